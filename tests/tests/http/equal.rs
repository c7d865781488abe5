//! A stream put together is the plain answer, field by field, on all four APIs: random answers of
//! text, characters of several bytes, calls, what only looks like calls and stop strings, with
//! random lengths, stop strings and log probabilities.

use std::sync::OnceLock;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::Config;
use serde_json::{Value, json};

use crate::anthropic;
use crate::responses;
use crate::server::{ParrotSetup, Server};

const PIECES: [&str; 14] = [
    "word ",
    "two\n",
    "\u{e9}",
    "\u{1F600}",
    "<",
    "<tool_call>",
    "</tool_call>",
    "<tool_cal",
    "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"path\": \"a\"}}\n</tool_call>",
    "\n<tool_call>{\"name\":\"look\",  \"arguments\":{ \"path\":\"\u{1F600}\" }}</tool_call>",
    "\n\n",
    "  ",
    "STOP",
    "ST",
];
const STOPS: [&str; 4] = ["STOP", "\u{1F600}", "word", "call>"];

/// One request: what the model says, and what is asked of it.
#[derive(Clone, Debug)]
struct Case {
    text: String,
    stops: Vec<&'static str>,
    max_tokens: u32,
    has_tools: bool,
    logprobs: Option<u8>,
}

fn cases() -> impl Strategy<Value = Case> {
    let text = proptest::collection::vec(select(&PIECES[..]), 0..8);
    let stops = subsequence(&STOPS[..], 0..3);
    let logprobs = proptest::option::of(0_u8..3);
    (text, stops, 1_u32..200, any::<bool>(), logprobs).prop_map(
        |(text, stops, max_tokens, has_tools, logprobs)| Case {
            text: text.concat(),
            stops,
            max_tokens,
            has_tools,
            logprobs,
        },
    )
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::parrot(ParrotSetup::default()))
}

/// The plain answer, and the stream's.
fn both(path: &str, body: &Value) -> (Value, crate::client::Answer) {
    let plain = server().post(path, body);
    assert_eq!(plain.status, 200, "{body}: {}", plain.body);
    let mut streaming = body.clone();
    streaming["stream"] = true.into();
    if path != "/v1/messages" && path != "/v1/responses" {
        streaming["stream_options"] = json!({"include_usage": true});
    }
    let streamed = server().post(path, &streaming);
    assert_eq!(streamed.status, 200, "{body}: {}", streamed.body);
    (plain.json(), streamed)
}

/// A usage without what the cache adds to the second of two requests.
fn tokens(usage: &Value) -> Vec<Value> {
    let keys = [
        "prompt_tokens",
        "completion_tokens",
        "input_tokens",
        "output_tokens",
    ];
    keys.iter().map(|key| usage[key].clone()).collect()
}

/// The sum of the strings under a path of deltas.
fn joined(deltas: &[Value], pointer: &str) -> String {
    let texts = deltas
        .iter()
        .filter_map(|delta| delta.pointer(pointer)?.as_str());
    texts.collect()
}

/// The lists under a path, one behind the other.
fn listed(deltas: &[Value], pointer: &str) -> Vec<Value> {
    let lists = deltas
        .iter()
        .filter_map(|delta| delta.pointer(pointer)?.as_array());
    lists.flatten().cloned().collect()
}

fn completions(case: &Case) {
    let body = json!({"prompt": format!("~{}", case.text), "stop": case.stops,
        "max_tokens": case.max_tokens, "logprobs": case.logprobs});
    // What stands behind the prompt is its own text, so the parrot ends there.
    let (plain, streamed) = both("/v1/completions", &body);
    let chunks = streamed.events();
    let choice = &plain["choices"][0];
    assert_eq!(
        joined(&chunks, "/choices/0/text"),
        choice["text"].as_str().unwrap()
    );
    assert_eq!(
        streamed.finish_reasons(0),
        [choice["finish_reason"].as_str().unwrap()]
    );
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let pointer = format!("/choices/0/logprobs/{key}");
        let wanted = choice["logprobs"][key]
            .as_array()
            .cloned()
            .unwrap_or_default();
        assert_eq!(listed(&chunks, &pointer), wanted, "{key}");
    }
    assert_eq!(
        tokens(&chunks.last().unwrap()["usage"]),
        tokens(&plain["usage"])
    );
}

fn chat(case: &Case) {
    let mut body = json!({"messages": [{"role": "user", "content": format!("~{}", case.text)}],
        "stop": case.stops, "max_tokens": case.max_tokens});
    if let Some(top) = case.logprobs {
        body["logprobs"] = true.into();
        body["top_logprobs"] = top.into();
    }
    if case.has_tools {
        body["tools"] = json!([{"type": "function", "function": {"name": "look",
            "parameters": {"type": "object"}}}]);
    }
    let (plain, streamed) = both("/v1/chat/completions", &body);
    let chunks = streamed.events();
    let choice = &plain["choices"][0];
    let message = &choice["message"];
    let content = message["content"].as_str().unwrap_or_default();
    assert_eq!(joined(&chunks, "/choices/0/delta/content"), content);
    assert_eq!(
        joined(&chunks, "/choices/0/delta/role"),
        "assistant",
        "said once"
    );
    let mut calls = listed(&chunks, "/choices/0/delta/tool_calls");
    for (number, call) in calls.iter_mut().enumerate() {
        assert_eq!(call["index"], number);
        call.as_object_mut().unwrap().remove("index");
        call["id"] = Value::Null;
    }
    let mut wanted = message["tool_calls"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    wanted.iter_mut().for_each(|call| call["id"] = Value::Null);
    assert_eq!(calls, wanted);
    assert_eq!(
        streamed.finish_reasons(0),
        [choice["finish_reason"].as_str().unwrap()]
    );
    let wanted = choice["logprobs"]["content"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    assert_eq!(listed(&chunks, "/choices/0/logprobs/content"), wanted);
    assert_eq!(
        tokens(&chunks.last().unwrap()["usage"]),
        tokens(&plain["usage"])
    );
}

fn messages(case: &Case) {
    let mut body = json!({"model": "m", "max_tokens": case.max_tokens,
        "stop_sequences": case.stops,
        "messages": [{"role": "user", "content": format!("~{}", case.text)}]});
    if case.has_tools {
        body["tools"] = json!([{"name": "look", "input_schema": {"type": "object"}}]);
    }
    let (plain, streamed) = both("/v1/messages", &body);
    let mut assembled = anthropic::assembled(&streamed.named_events());
    assert_eq!(tokens(&assembled["usage"])[3], tokens(&plain["usage"])[3]);
    let mut plain = plain;
    for message in [&mut plain, &mut assembled] {
        message["usage"] = Value::Null;
    }
    assert_eq!(anthropic::lasting(assembled), anthropic::lasting(plain));
}

fn respond(case: &Case) {
    let mut body = json!({"input": format!("~{}", case.text), "store": false,
        "max_output_tokens": case.max_tokens});
    if case.has_tools {
        body["tools"] = json!([{"type": "function", "name": "look",
            "parameters": {"type": "object"}}]);
    }
    let (plain, streamed) = both("/v1/responses", &body);
    let (items, mut last) = responses::assembled(&streamed.named_events());
    assert_eq!(
        last["output"],
        Value::Array(items),
        "items done are the output"
    );
    assert_eq!(tokens(&last["usage"]), tokens(&plain["usage"]));
    let mut plain = plain;
    for response in [&mut plain, &mut last] {
        response["usage"] = Value::Null;
    }
    assert_eq!(responses::lasting(last), responses::lasting(plain));
}

proptest! {
    #![proptest_config(Config { cases: 64, failure_persistence: None, ..Config::default() })]

    #[test]
    fn streams_are_plain_answers_in_pieces_on_all_four_apis(case in cases()) {
        completions(&case);
        chat(&case);
        messages(&case);
        respond(&case);
    }
}
