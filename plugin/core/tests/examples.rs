//! The examples run and find what they are meant to find.

#[path = "../examples/cache_trace.rs"]
mod cache_trace;
#[path = "../examples/own_kv.rs"]
mod own_kv;
#[path = "../examples/toy_engine.rs"]
mod toy_engine;

#[test]
fn toy_engine_answers_alike_and_reuses_all_whole_pages_of_the_prompt() {
    let mut out = Vec::new();
    let cached = toy_engine::run(&mut out).expect("the example runs");
    // 20 tokens, pages of 4, at least one token computed: 16 come from the cache.
    assert_eq!(cached, [0, 16]);
    assert_eq!(String::from_utf8(out).expect("text").lines().count(), 2);
}

#[test]
fn own_kv_reuses_the_shared_system_prompt() {
    let mut out = Vec::new();
    let cached = own_kv::run(&mut out).expect("the example runs");
    assert_eq!(cached, 12, "the three pages of the system prompt");
}

#[test]
fn a_recorded_trace_evicts_and_refuses_as_its_golden_lines_say() {
    let trace = include_str!("../../python/engines/conversation.trace");
    let mut out = Vec::new();
    cache_trace::run(trace, &mut out).expect("the trace plays");
    let text = String::from_utf8(out).expect("text");
    let golden = include_str!("../../python/engines/conversation.golden");
    for (number, (got, said)) in text.lines().zip(golden.lines()).enumerate() {
        assert_eq!(got, said, "line {}", number + 1);
    }
    assert_eq!(text.lines().count(), golden.lines().count());
}
