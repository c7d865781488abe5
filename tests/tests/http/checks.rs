//! Compatibility checks of agent programs that stand nowhere else: what they send, without the
//! programs. `docs/agents.md` lists all twenty with the tests that show them.

use std::time::Duration;

use rootstock_engine::service::ServiceConfig;
use rootstock_server::app::ApiOptions;
use rootstock_server::chat::stream::Signs;
use serde_json::{Value, json};

use crate::client::{Answer, Open, send_with};
use crate::script::Script;
use crate::server::{ParrotSetup, Server};

const PAGE: u64 = 16;

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let answer = send_with(server.address, "POST", path, headers, &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer
}

fn read_tokens(answer: &Answer) -> u64 {
    number(&answer.json()["usage"]["cache_read_input_tokens"])
}

fn tool(name: &str) -> Value {
    json!({"name": name, "description": "What it does.", "input_schema": {"type": "object"}})
}

#[test]
fn check_4_keys_of_a_body_in_any_order_are_one_prompt() {
    let server = Server::parrot(ParrotSetup::default());
    let system = "order of keys ".repeat(8);
    let first = json!({"model": "m", "max_tokens": 4, "system": system, "tools": [tool("look")],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "~one"}]}],
        "metadata": {"user_id": "{\"session_id\":\"a\",\"device_id\":\"b\"}"}});
    let second = json!({"metadata": {"user_id": "{\"device_id\":\"b\",\"session_id\":\"a\"}"},
        "messages": [{"content": [{"text": "~one", "type": "text"}], "role": "user"}],
        "tools": [{"input_schema": {"type": "object"}, "description": "What it does.",
            "name": "look"}],
        "system": system, "max_tokens": 4, "model": "m"});
    let prompt = read_tokens(&post(&server, "/v1/messages", &[], &first));
    assert_eq!(prompt, 0, "cold");
    let again = post(&server, "/v1/messages", &[], &second).json()["usage"].clone();
    let read = number(&again["cache_read_input_tokens"]);
    assert!(
        number(&again["input_tokens"]) < PAGE && read > 100,
        "{again}"
    );
}

#[test]
fn check_5_the_body_decides_about_streaming_not_the_accept_header() {
    let server = Server::parrot(ParrotSetup::default());
    let body = |stream: bool| {
        json!({"model": "m", "max_tokens": 9, "stream": stream, "input": "~x",
            "messages": [{"role": "user", "content": "~x"}]})
    };
    for path in ["/v1/messages", "/v1/chat/completions", "/v1/responses"] {
        for accept in ["application/json", "text/event-stream", "*/*"] {
            for stream in [false, true] {
                let answer = post(&server, path, &[("accept", accept)], &body(stream));
                let kind = answer.header("content-type").unwrap();
                assert_eq!(kind == "text/event-stream", stream, "{path} {accept}");
            }
        }
    }
}

/// The title that an agent asks for beside its work.
fn title(text: &str) -> Value {
    json!({"model": "m", "max_tokens": 200, "tools": [], "thinking": {"type": "disabled"},
        "system": "Name this.", "messages": [{"role": "user", "content": text}],
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {
            "type": "object", "properties": {"title": {"type": "string", "maxLength": 20}},
            "required": ["title"], "additionalProperties": false}}},
        "nvext": {"extra_fields": ["hints"]}})
}

#[test]
fn check_8_a_title_is_a_json_object_of_low_priority_and_goes_first() {
    let server = Server::parrot(ParrotSetup {
        pages: 96,
        ..ParrotSetup::default()
    });
    let small = |model: &str| {
        json!({"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "~x"}],
            "tools": [tool("look")], "nvext": {"extra_fields": ["hints"]}})
    };
    let answer = post(
        &server,
        "/v1/messages",
        &[],
        &title("~{\"title\": \"Work\"}"),
    )
    .json();
    let text = answer["content"][0]["text"].as_str().unwrap();
    let object: Value = serde_json::from_str(text).unwrap();
    assert!(object["title"].is_string(), "{text}");
    assert_eq!(answer["nvext"]["hints"]["priority"], -1);
    assert_eq!(answer["nvext"]["hints"]["derived"], json!(["side_request"]));
    let asked = post(
        &server,
        "/v1/messages",
        &[],
        &small("claude-haiku-4-5-20251001"),
    )
    .json();
    assert_eq!(
        asked["model"], "claude-haiku-4-5-20251001",
        "the name asked for comes back"
    );
    assert_eq!(asked["nvext"]["hints"]["derived"], json!(["small_model"]));
    let asked = post(&server, "/v1/messages", &[], &small("the-big-one")).json();
    assert_eq!(asked["nvext"]["hints"]["priority"], 0);

    // Work, titles that came later, then more work than there is room for beside them: the titles
    // make room although they were used after the first work.
    server.post("/flush_cache", &json!({}));
    let work = |name: u32| {
        json!({"model": "m", "max_tokens": 1, "tools": [tool("look")],
            "messages": [{"role": "user", "content": format!("{name}{}~y", "w".repeat(150))}]})
    };
    post(&server, "/v1/messages", &[], &work(1));
    let mut titles = title(&format!("{}~y", "t".repeat(600)));
    titles["max_tokens"] = 1.into();
    post(&server, "/v1/messages", &[], &titles);
    for name in 2..5 {
        post(&server, "/v1/messages", &[], &work(name));
    }
    let first = post(&server, "/v1/messages", &[], &work(1));
    let usage = first.json()["usage"].clone();
    assert!(
        number(&usage["input_tokens"]) < 2 * PAGE,
        "the work is still there: {usage}"
    );
    let usage = post(&server, "/v1/messages", &[], &titles).json()["usage"].clone();
    let missing = number(&usage["input_tokens"]);
    assert!(missing > 200, "the title has made room: {usage}");
}

#[test]
fn check_9_a_second_session_finds_the_first_up_to_its_prompt() {
    let server = Server::parrot(ParrotSetup::default());
    let body = |id: &str, text: &str| {
        let item = |number: u32, role: &str, text: &str| {
            json!({"type": "message", "id": format!("msg_{id}{number}"), "role": role,
                "content": [{"type": "input_text", "text": text}]})
        };
        json!({"model": "m", "store": false, "prompt_cache_key": format!("session-{id}"), "input": [
            item(1, "developer", &"base instructions ".repeat(20)),
            item(2, "developer", &"sandbox ".repeat(10)),
            item(3, "user", "environment"), item(4, "user", text)]})
    };
    let first = post(&server, "/v1/responses", &[], &body("a", "do one~x")).json();
    let second = post(&server, "/v1/responses", &[], &body("b", "do another~x")).json();
    let prompt = number(&first["usage"]["input_tokens"]);
    let cached = number(&second["usage"]["input_tokens_details"]["cached_tokens"]);
    // What differs is the last message and the head of the answer.
    assert!(cached + 3 * PAGE > prompt, "{cached} of {prompt}");
}

fn call_text(name: &str, prompt: &str) -> String {
    let call = json!({"name": name, "arguments": {"prompt": prompt}});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// A family of agents: a parent that starts two children, and what it says then.
fn family() -> Server {
    let spawn = format!(
        "{}\n{}",
        call_text("Agent", "KID one"),
        call_text("Agent", "KID two")
    );
    let script = json!([
        {"marker": "PARENT", "turns": [spawn, "All seen."]},
        {"marker": "KID", "turns": ["Seen."]},
    ]);
    Server::parrot(ParrotSetup {
        script: Some(Script::read(&script.to_string())),
        ..ParrotSetup::default()
    })
}

fn agent_body(messages: Value, tools: &[&str]) -> Value {
    let tools: Vec<Value> = tools.iter().map(|name| tool(name)).collect();
    json!({"model": "m", "max_tokens": 300, "tools": tools, "messages": messages,
        "system": "You work with others, on the same thing. ".repeat(12),
        "nvext": {"extra_fields": ["hints", "cache_report"]}})
}

fn hints(answer: &Answer) -> Value {
    answer.json()["nvext"]["hints"].clone()
}

#[test]
fn check_13_a_childs_tail_goes_first_when_its_parent_has_the_result() {
    let server = family();
    let parent = [("x-claude-code-session-id", "root")];
    let child = |name: &'static str| {
        [
            ("x-claude-code-session-id", "root"),
            ("x-claude-code-agent-id", name),
        ]
    };
    let wish = json!({"role": "user", "content": "PARENT, let two look."});
    let body = agent_body(json!([wish]), &["Agent", "Read"]);
    let first = post(&server, "/v1/messages", &parent, &body).json();
    let calls = first["content"].as_array().unwrap();
    assert_eq!(calls.len(), 2, "{first}");
    let mut results = Vec::new();
    for (name, call) in ["one", "two"].into_iter().zip(calls) {
        let task = json!({"role": "user", "content": call["input"]["prompt"]});
        let body = agent_body(json!([task]), &["Read"]);
        let answer = post(&server, "/v1/messages", &child(name), &body);
        let said = hints(&answer);
        assert_eq!(
            (&said["session"], &said["parent"]),
            (&json!(name), &json!("root"))
        );
        let fans_out = said["derived"] == json!(["fan_out"]);
        assert_eq!(fans_out, name == "one", "{said}");
        if fans_out {
            let pinned = number(&said["pins"][0]["tokens"]);
            assert!(pinned > 450, "instructions and tools: {said}");
        } else {
            assert!(read_tokens(&answer) > 450, "the sibling's head is there");
        }
        results.push(json!({"type": "tool_result", "tool_use_id": call["id"],
            "content": answer.json()["content"]}));
    }
    let messages = json!([wish, {"role": "assistant", "content": calls},
        {"role": "user", "content": results}]);
    let body = agent_body(messages, &["Agent", "Read"]);
    let answer = post(&server, "/v1/messages", &parent, &body);
    assert_eq!(answer.json()["content"][0]["text"], "All seen.");
    assert_eq!(hints(&answer)["derived"], json!(["child_ended"]));
    assert_eq!(
        server.metric("rootstock_derived_hints_total{kind=\"tool_gap\"}"),
        1.0
    );
    let again = post(&server, "/v1/messages", &parent, &body);
    assert_eq!(hints(&again)["derived"], json!([]), "each child ends once");
}

#[test]
fn a_session_whose_user_came_back_before_is_kept_for_the_next_time() {
    let server = Server::parrot(ParrotSetup::default());
    let session = [("x-claude-code-session-id", "talk")];
    let kept = "rootstock_derived_hints_total{kind=\"human_gap\"}";
    let mut messages = Vec::new();
    for (turn, wanted) in [0.0, 1.0, 2.0].into_iter().enumerate() {
        messages.push(json!({"role": "user", "content": format!("{turn}~well")}));
        let body = agent_body(json!(messages), &["Read"]);
        let answer = post(&server, "/v1/messages", &session, &body).json();
        assert_eq!(server.metric(kept), wanted, "after turn {turn}");
        messages.push(json!({"role": "assistant", "content": answer["content"]}));
    }
    let tree = server.get("/v1/kv/tree").json();
    let nodes = tree["nodes"].as_array().unwrap();
    let retained = nodes.iter().any(|node| node["priority"] == 1);
    assert!(retained, "its prefix is more important for a while: {tree}");
}

#[test]
fn what_is_derived_can_be_switched_off() {
    let server = Server::parrot(ParrotSetup {
        options: ApiOptions {
            derive_hints: false,
            ..ApiOptions::default()
        },
        ..ParrotSetup::default()
    });
    let answer = post(&server, "/v1/messages", &[], &title("~{\"title\": \"x\"}")).json();
    assert_eq!(answer["nvext"]["hints"]["priority"], 0);
    assert_eq!(answer["nvext"]["hints"]["derived"], json!([]));
}

/// A server that computes 16 tokens a step.
fn slow() -> Server {
    Server::parrot(ParrotSetup {
        service: ServiceConfig {
            page_size: 16,
            step_tokens: 64,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    })
}

#[test]
fn check_14_two_children_that_start_at_once_have_one_prefill() {
    let server = slow();
    let mut holder = Open::start(server.address);
    holder.post(
        "/v1/completions",
        &json!({"prompt": "~h@", "max_tokens": 8}),
    );
    server.perch.until_holding();
    let before = server.perch.computed();
    let body = |task: &str| {
        json!({"max_tokens": 1, "system": "s".repeat(3000),
            "messages": [{"role": "user", "content": format!("{task}~x")}]})
    };
    let mut children: Vec<Open> = ["one", "two"]
        .map(|task| {
            let mut child = Open::start(server.address);
            child.post("/v1/messages", &body(task));
            child
        })
        .into();
    server.until_stats(|stats| stats.admitted == 3);
    server.perch.open();
    for child in &mut children {
        assert_eq!(child.answer().status, 200);
    }
    assert_eq!(holder.answer().status, 200);
    let computed = server.perch.computed() - before;
    assert!(
        computed < 3400,
        "{computed} positions for two prompts of some 3070"
    );
}

#[test]
fn check_16_a_repeat_takes_the_running_prefill_over() {
    let server = slow();
    let body = |stream: bool| {
        json!({"max_tokens": 2, "system": "s".repeat(3500), "stream": stream,
            "messages": [{"role": "user", "content": "~x"}]})
    };
    let mut first = Open::start(server.address);
    first.post("/v1/messages", &body(true));
    server.until_stats(|stats| stats.admitted == 1);
    let mut again = Open::start(server.address);
    again.post("/v1/messages", &body(false));
    drop(first);
    let answer = again.answer();
    assert_eq!(answer.json()["content"][0]["text"], "x");
    let computed = server.perch.computed();
    assert!(
        computed < 3800,
        "{computed} positions for one prompt of some 3570"
    );
}

/// Seconds of an idle time, and whether an event ends it for a client.
type Rule = (&'static str, fn(&str) -> bool);

/// What counts as life for three programs; all three give up after 300 s without it.
const RULES: [Rule; 3] = [
    ("any byte", |_| true),
    ("any data", |event| event.contains("data: ")),
    ("content", |event| event.contains("\"content_block_delta\"")),
];

/// The longest time without life, when events come every ten seconds.
fn quiet_s(events: &[String], rule: fn(&str) -> bool) -> usize {
    let mut longest = 0;
    let mut quiet = 0;
    for event in events {
        quiet = if rule(event) { 0 } else { quiet + 10 };
        longest = longest.max(quiet);
    }
    longest
}

#[test]
fn check_15_a_prefill_of_330_seconds_is_alive_for_every_program() {
    // The times of a real server, a thousandth of each: 10 s between signs, 50 s between content.
    let signs = Signs::default();
    let scaled = |time: Duration| time / 1000;
    let server = Server::parrot(ParrotSetup {
        options: ApiOptions {
            signs: Signs {
                first: scaled(signs.first),
                every: scaled(signs.every),
                content_every: scaled(signs.content_every),
            },
            ..ApiOptions::default()
        },
        ..ParrotSetup::default()
    });
    assert_eq!(
        signs.every,
        Duration::from_secs(10),
        "what quiet_s counts with"
    );
    let mut open = Open::start(server.address);
    let body = json!({"max_tokens": 9, "stream": true,
        "messages": [{"role": "user", "content": "~@ok"}]});
    open.post("/v1/messages", &body);
    assert_eq!(open.head().0, 200);
    let mut all = String::new();
    // Signs come one at a time, but a slow reader may find several in one chunk.
    while all.matches("\n\n").count() < 35 {
        all.push_str(&String::from_utf8(open.chunk().unwrap()).unwrap());
    }
    server.perch.open();
    let events: Vec<String> = all.split("\n\n").map(str::to_owned).collect();
    assert!(
        events[0].starts_with("event: message_start"),
        "a real event comes first"
    );
    for (name, rule) in RULES {
        let quiet = quiet_s(&events, rule);
        assert!(quiet <= 70, "{quiet} s without {name}: {all}");
    }
    let pings: Vec<String> = events
        .iter()
        .filter(|event| !event.contains("content_block"))
        .cloned()
        .collect();
    assert!(
        quiet_s(&pings, RULES[2].1) > 200,
        "pings alone would not have kept the strictest program"
    );
    while open.chunk().is_some() {}
}

#[test]
fn check_19_a_compacted_conversation_keeps_its_head_and_reports_less() {
    let server = Server::parrot(ParrotSetup::default());
    let window = [
        ("thread-id", "t"),
        ("session-id", "t"),
        ("x-codex-window-id", "t:0"),
    ];
    let next = [
        ("thread-id", "t"),
        ("session-id", "t"),
        ("x-codex-window-id", "t:1"),
    ];
    let developer = json!({"type": "message", "role": "developer",
        "content": [{"type": "input_text", "text": "base instructions ".repeat(20)}]});
    let user = |text: &str| json!({"type": "message", "role": "user", "content": text});
    let long = json!({"input": [developer, user(&"history ".repeat(60)), user("~x")]});
    let short = json!({"input": [developer, user("summary~x")]});
    let before = post(&server, "/v1/responses", &window, &long).json()["usage"].clone();
    let after = post(&server, "/v1/responses", &next, &short).json()["usage"].clone();
    let cached = number(&after["input_tokens_details"]["cached_tokens"]);
    assert!(cached > 340, "the head is still there: {after}");
    assert!(number(&after["total_tokens"]) < number(&before["total_tokens"]) - 400);
    let tree = server.get("/v1/kv/stats");
    assert_eq!(tree.status, 200, "{}", tree.body);
}

#[test]
fn check_20_many_counts_at_once_leave_the_cache_as_it_is() {
    let server = Server::parrot(ParrotSetup::default());
    let tools: Vec<Value> = (0..9).map(|n| tool(&format!("tool_{n}"))).collect();
    let body = json!({"max_tokens": 1, "tools": tools,
        "messages": [{"role": "user", "content": "foo"}]});
    let mut open: Vec<Open> = (0..14).map(|_| Open::start(server.address)).collect();
    for open in &mut open {
        open.post("/v1/messages/count_tokens?beta=true", &body);
    }
    let counts: Vec<u64> = open
        .iter_mut()
        .map(|open| number(&open.answer().json()["input_tokens"]))
        .collect();
    assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
    assert_eq!(server.perch.computed(), 0, "nothing was computed");
    assert_eq!(server.metric("rootstock_prompt_tokens_total"), 0.0);
    let usage = post(&server, "/v1/messages", &[], &body).json()["usage"].clone();
    let keys = [
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    ];
    let total: u64 = keys.iter().map(|key| number(&usage[key])).sum();
    assert_eq!(total, counts[0], "a run reports what was counted");
}
