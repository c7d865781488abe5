//! Pins and retention through HTTP, over a real computation (a tiny Llama): what was
//! promised is there after a flood of three times the device, and what was not is gone.

use std::time::Duration;

use crate::server::{ParrotSetup, Server};
use crate::tiny_model::TinyModel;
use rootstock::radix::PolicyKind;
use rootstock_engine::service::ServiceConfig;
use rootstock_server::app::ApiOptions;
use rootstock_server::kind_retention::KindRetention;
use serde_json::{Value, json};

const DEVICE_PAGES: u32 = 64;
const PAGE: u64 = 16;

fn start(policy: PolicyKind, host_pages: u32) -> Server {
    let model = TinyModel::with_weights();
    let config = ServiceConfig {
        device_pages: Some(DEVICE_PAGES),
        host_pages: Some(host_pages),
        page_size: 16,
        threads: Some(1),
        // The tiny model computes quicker than any copy is worth; here copies are the point.
        free_copies: true,
        policy,
        ..ServiceConfig::default()
    };
    Server::model(&model.path, config)
}

/// Requests that share nothing, so many pages of the device together.
fn flood(server: &Server, pages: u64, seed: u64) {
    for request in 0..pages / 16 {
        let prompt: Vec<u64> = (0..16 * PAGE - 2)
            .map(|at| (at * 13 + at / 7 + request * 41 + seed * 7) % 256)
            .collect();
        let mut prompt = prompt;
        prompt[0] = (request + seed * 16) % 256;
        prompt[1] = seed % 256;
        let body = json!({"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0});
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
}

fn cached(answer: &Value) -> u64 {
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().unwrap()
}

/// A turn of a conversation about `topic`.
fn chat(server: &Server, topic: &str, turns: &[Value], nvext: &Value) -> Value {
    let system = format!(
        "{topic}: {}",
        "You explain roots and stocks in detail. ".repeat(6)
    );
    let mut messages = vec![json!({"role": "system", "content": system})];
    messages.extend_from_slice(turns);
    let body = json!({"model": "m", "messages": messages, "max_tokens": 6, "temperature": 0,
        "ignore_eos": true, "nvext": nvext});
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Warm, flood, come back with the next turn; the last answer, and tokens of the first prompt.
fn come_back(server: &Server, topic: &str, nvext: &Value) -> (Value, u64) {
    let question = user("What is a rootstock?");
    let first = chat(server, topic, std::slice::from_ref(&question), nvext);
    let said = first["choices"][0]["message"]["content"].clone();
    flood(server, 3 * u64::from(DEVICE_PAGES), topic.len() as u64);
    let turns = [
        question,
        json!({"role": "assistant", "content": said}),
        user("And a scion?"),
    ];
    let report = json!({"extra_fields": ["cache_report"]});
    let back = chat(server, topic, &turns, &report);
    (back, first["usage"]["prompt_tokens"].as_u64().unwrap())
}

#[test]
fn a_pinned_turn_comes_back_whole_after_a_flood_of_three_times_the_device() {
    let server = start(PolicyKind::Agent, 256);
    let wishes = json!({"cache_control": {"type": "ephemeral", "ttl": "1h"},
        "extra_fields": ["cache_report"]});
    let (pinned, prompt) = come_back(&server, "pinned", &wishes);
    let whole = prompt / PAGE * PAGE;
    assert!(
        cached(&pinned) >= whole,
        "{} of {whole}: {pinned}",
        cached(&pinned)
    );
    let report = &pinned["nvext"]["cache_report"];
    assert!(report["host_tokens"].as_u64().unwrap() > 0, "{report}");
    let (unpinned, _) = come_back(&server, "unpinned, and longer", &json!({}));
    assert_eq!(cached(&unpinned), 0, "{unpinned}");
    let miss = &unpinned["nvext"]["cache_report"]["miss"];
    assert_eq!(miss["cause"], "evicted", "{miss}");
    // What the pin promised still holds, and the text is that of a server without any of it.
    let (again, _) = come_back(&start(PolicyKind::Agent, 0), "pinned", &json!({}));
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    assert_eq!(text(&again), text(&pinned));
}

#[test]
fn an_answer_tells_how_far_its_pin_goes() {
    let server = start(PolicyKind::Agent, 16);
    let wishes = json!({"cache_control": {"type": "ephemeral", "ttl": "1h"},
        "extra_fields": ["cache_report"]});
    let answer = chat(&server, "long", &[user(&"far ".repeat(60))], &wishes);
    let pins = &answer["nvext"]["cache_report"]["pins"];
    // Half of sixteen host pages is the budget.
    assert_eq!(
        (&pins["clipped"], &pins["pages"]),
        (&json!(1), &json!(8)),
        "{answer}"
    );
    assert!(pins["asked_pages"].as_u64().unwrap() > 8);
}

/// A prompt of 20 pages with some priority.
fn weighted(server: &Server, seed: u64, hints: &Value) -> Value {
    let prompt: Vec<u64> = (0..20 * PAGE + 1)
        .map(|at| (at * 11 + at / 5 + seed * 59) % 256)
        .collect();
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0,
        "nvext": {"agent_hints": hints}});
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

/// The priorities of what is cached of a session.
fn priorities(server: &Server, session: &str) -> Vec<i64> {
    let tree = server.get(&format!("/v1/kv/tree?session={session}")).json();
    let nodes = tree["nodes"].as_array().unwrap();
    nodes
        .iter()
        .map(|node| node["priority"].as_i64().unwrap())
        .collect()
}

/// Which of two prompts is kept when room for a third is made: (important, ordinary) tokens.
fn kept(retention_s: u64, wait_for_the_end: bool) -> (u64, u64) {
    let server = start(PolicyKind::Priority, 0);
    let important = json!({"priority": 10, "retention_seconds": retention_s, "program_id": "a"});
    weighted(&server, 1, &important);
    weighted(&server, 2, &json!({"priority": 0, "program_id": "b"}));
    assert!(priorities(&server, "a").contains(&10));
    assert_eq!(priorities(&server, "b"), [0]);
    for _ in 0..60_000 {
        if !wait_for_the_end
            || priorities(&server, "a")
                .iter()
                .all(|&priority| priority == 0)
        {
            break;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    flood(&server, 32, 3);
    let ask = |seed| cached(&weighted(&server, seed, &json!({})));
    if wait_for_the_end {
        let ordinary = ask(2);
        (ask(1), ordinary)
    } else {
        let important = ask(1);
        (important, ask(2))
    }
}

#[test]
fn priority_keeps_its_prefix_and_after_its_seconds_of_idleness_the_order_flips() {
    let whole = 20 * PAGE;
    let (important, ordinary) = kept(3600, false);
    assert_eq!(important, whole);
    assert!(ordinary < whole, "room came from somewhere");
    let (important, ordinary) = kept(1, true);
    assert_eq!(ordinary, whole, "the one used last");
    assert!(important < whole);
}

/// Cached tokens of a system prompt after a flood of completions, with rules by kind of context.
fn kept_by_kind(rules: &str) -> u64 {
    let server = Server::parrot(ParrotSetup {
        service: ServiceConfig {
            page_size: 16,
            policy: PolicyKind::Priority,
            ..ServiceConfig::default()
        },
        options: ApiOptions {
            kind_retention: KindRetention::parse(rules).unwrap(),
            ..ApiOptions::default()
        },
        pages: DEVICE_PAGES,
        ..ParrotSetup::default()
    });
    let turn = || {
        let system = json!({"role": "system", "content": "careful ".repeat(30)});
        let question = json!({"role": "user", "content": "now~yes"});
        let body = json!({"messages": [system, question], "max_tokens": 4});
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        cached(&answer.json())
    };
    turn();
    for number in 0..20 {
        let body = json!({"prompt": format!("{number:3}").repeat(80), "max_tokens": 1});
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    turn()
}

#[test]
fn a_kind_of_context_is_worth_what_the_operator_says() {
    assert_eq!(kept_by_kind(""), 0);
    assert!(kept_by_kind("system=9") >= 14 * PAGE);
    assert_eq!(kept_by_kind("tools=9"), 0, "there are none");
    assert_eq!(kept_by_kind("system=9:0"), 0, "it holds for no idle second");
}
