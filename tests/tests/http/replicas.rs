//! Replicas over one host tier, with a real computation: what was pinned on one is found by the
//! other when the first is busy, and says the same.

use crate::server::Server;
use crate::tiny_model::TinyModel;
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

/// One seat a replica: whoever has it is busy.
fn start(replicas: u16) -> Server {
    let model = TinyModel::with_weights();
    Server::model(
        &model.path,
        ServiceConfig {
            threads: Some(2),
            replicas,
            device_pages: Some(512),
            host_pages: Some(512),
            free_copies: true,
            max_running: 1,
            ..ServiceConfig::default()
        },
    )
}

fn turn(server: &Server, messages: &[Value]) -> Value {
    let body = json!({
        "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": true,
        "nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"},
            "extra_fields": ["worker_id"]},
    });
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn first_turn() -> Vec<Value> {
    let text = "a long story of roots and trees ".repeat(20);
    vec![json!({"role": "user", "content": text})]
}

fn second_turn(first: &Value) -> Vec<Value> {
    let mut messages = first_turn();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "and then?"}));
    messages
}

#[test]
fn a_pin_made_on_one_replica_is_found_by_another_while_the_first_is_busy() {
    // What is said without replicas.
    let alone = start(1);
    let first = turn(&alone, &first_turn());
    let wanted = turn(&alone, &second_turn(&first));

    let server = start(2);
    let first = turn(&server, &first_turn());
    let admissions = |at: usize| {
        let core = server.service.stats().core;
        core.map_or(0, |core| core.schedulers[at].admissions)
    };
    assert_eq!((admissions(0), admissions(1)), (1, 0));
    // The pin is on host when nothing is copied any more.
    server.until_stats(|stats| {
        let cache = stats.core.as_ref().map(|core| &core.cache);
        cache.is_some_and(|cache| cache.pinned_pages > 40 && cache.copies_under_way == 0)
    });
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let body = json!({"prompt": "once", "max_tokens": 3900, "temperature": 0,
                "ignore_eos": true});
            server.post("/v1/completions", &body).status
        });
        server.until_stats(|stats| {
            let core = stats.core.as_ref();
            core.is_some_and(|core| core.schedulers[0].running == 1)
        });
        let again = turn(&server, &first_turn());
        let second = turn(&server, &second_turn(&first));
        let core = server.service.stats().core.unwrap();
        assert_eq!(
            (core.schedulers[0].running, core.schedulers[1].admissions),
            (1, 2),
            "the first is busy, so the second took both: {:?}",
            core.routes
        );
        let worker = |answer: &Value| answer["nvext"]["worker_id"]["decode_worker_id"].clone();
        assert_eq!([worker(&first), worker(&again), worker(&second)], [0, 1, 1]);
        let counts = |answer: &Value| {
            let usage = &answer["usage"];
            let prompt = usage["prompt_tokens"].as_u64().unwrap();
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            (cached.as_u64().unwrap(), prompt)
        };
        let (cached, prompt) = counts(&again);
        assert!(cached + 16 >= prompt, "{cached} of {prompt} pinned tokens");
        assert_eq!(again["choices"], first["choices"], "the same text");
        let (cached, _) = counts(&second);
        assert!(
            cached + 16 >= prompt,
            "{cached} of {prompt} before the answer"
        );
        assert_eq!(second["choices"], wanted["choices"], "the same text");
        assert_eq!(busy.join().unwrap(), 200);
    });
}
