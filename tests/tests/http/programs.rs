//! Programs through HTTP: who started whom as released agents say it, what is told of each to its
//! own tenant, and a parent that finds its prefix on the device when its child has closed.

use serde_json::{Value, json};

use crate::client::send_with;
use crate::server::{ParrotSetup, Server, until};
use crate::tiny_model::TinyModel;
use rootstock::radix::WritePolicy;
use rootstock_engine::service::ServiceConfig;

const PAGE: u64 = 16;

type Headers<'a> = &'a [(&'a str, &'a str)];

/// A prompt of so many pages, each byte a token of its own, and some.
fn prompt(seed: u64, pages: u64) -> Value {
    let token = |at| (at * 13 + at / 7 + seed * 41) % 256;
    let tokens: Vec<u64> = (0..pages * PAGE + 2).map(token).collect();
    json!(tokens)
}

/// Completes a prompt in the name of some headers.
fn ask(server: &Server, prompt: &Value, headers: Headers<'_>) -> Value {
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0,
        "nvext": {"extra_fields": ["cache_report"]}});
    let path = "/v1/completions";
    let answer = send_with(server.address, "POST", path, headers, &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn session<'a>(id: &'a str, parent: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("x-dynamo-session-id", id),
        ("x-dynamo-parent-session-id", parent),
    ]
}

fn closing<'a>(id: &'a str, parent: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut headers = session(id, parent);
    headers.push(("x-dynamo-session-final", "true"));
    headers
}

fn programs(server: &Server, query: &str) -> Vec<Value> {
    let told = server.get(&format!("/v1/kv/programs{query}"));
    assert_eq!(told.status, 200, "{}", told.body);
    told.json()["programs"].as_array().unwrap().clone()
}

fn ids(programs: &[Value]) -> Vec<&str> {
    programs
        .iter()
        .filter_map(|one| one["id"].as_str())
        .collect()
}

/// A program when its last request has ended in the core.
fn settled(server: &Server, id: &str) -> Value {
    let query = format!("?id={id}");
    let mut found = Value::Null;
    until("its request has ended", || {
        found = programs(server, &query).pop().unwrap_or_default();
        found["running"] == 0
    });
    found
}

#[test]
fn who_started_whom_is_known_as_each_agent_says_it() {
    let server = Server::parrot(ParrotSetup::default());
    let claude = "x-claude-code-session-id";
    let runs: [(Headers<'_>, &str, &str); 5] = [
        (&session("d-child", "d-root"), "d-child", "d-root"),
        (
            &[(claude, "c-root"), ("x-claude-code-agent-id", "c-child")],
            "c-child",
            "c-root",
        ),
        (
            &[
                (claude, "c-root"),
                ("x-claude-code-agent-id", "c-grand"),
                ("x-claude-code-parent-agent-id", "c-child"),
            ],
            "c-grand",
            "c-child",
        ),
        (
            &[
                ("thread-id", "x-child"),
                ("x-codex-parent-thread-id", "x-root"),
            ],
            "x-child",
            "x-root",
        ),
        (
            &[
                ("x-session-id", "o-child"),
                ("x-parent-session-id", "o-root"),
            ],
            "o-child",
            "o-root",
        ),
    ];
    for (headers, child, parent) in runs {
        ask(&server, &prompt(1, 2), headers);
        let child = settled(&server, child);
        assert_eq!(child["parent"], parent, "{child}");
        let parent = programs(&server, &format!("?id={parent}")).remove(0);
        let children = parent["children"].as_array().unwrap();
        assert!(children.contains(&child["id"]), "{parent}");
        assert_eq!(parent["children_more"], 0);
    }
    // A parent that is the session itself is none.
    ask(&server, &prompt(2, 2), &session("alone", "alone"));
    assert_eq!(settled(&server, "alone")["parent"], Value::Null);
}

#[test]
fn what_is_told_of_a_program_adds_up() {
    let server = Server::parrot(ParrotSetup::default());
    let tokens = prompt(3, 3);
    for _ in 0..3 {
        ask(&server, &tokens, &[("x-dynamo-session-id", "s/1")]);
    }
    let told = settled(&server, "s%2F1");
    assert_eq!((&told["id"], &told["turns"]), (&json!("s/1"), &json!(3)));
    let count = |name: &str| told[name].as_u64().unwrap();
    assert_eq!(count("prompt_tokens"), 3 * (3 * PAGE + 2));
    assert_eq!((count("hits"), count("restored_tokens")), (2, 0));
    let cached = &told["cached_tokens"];
    assert_eq!(cached["device"], 2 * 3 * PAGE, "{told}");
    let all = cached["device"].as_u64().unwrap() + count("computed_tokens");
    assert_eq!(all, count("prompt_tokens"));
    let pages = json!({"distinct": 3, "device": 3, "host": 0, "storage": 0, "pinned": 0});
    assert_eq!(told["pages"], pages);
    assert!(told["mean_gap_s"].as_f64().unwrap() > 0.0);
    assert!(told["expected_in_s"].is_f64() && told["derived_ttl_s"].as_u64().unwrap() >= 1);
    assert!(told["seen_s_ago"].as_f64().unwrap() >= 0.0);
    let pin = json!({"actions": [{"action_type": "kv.pin", "payload": {"session": "s/1"}}]});
    assert_eq!(server.post("/v1/kv/actions", &pin).status, 200);
    assert_eq!(settled(&server, "s%2F1")["pages"]["pinned"], 3);
    ask(&server, &tokens, &closing("s/1", ""));
    let told = settled(&server, "s%2F1");
    assert_eq!((&told["done"], &told["turns"]), (&json!(true), &json!(4)));
    assert_eq!(told["expected_in_s"], Value::Null, "it is done");
}

#[test]
fn programs_are_told_to_their_own_tenant_the_newest_first_and_so_many() {
    let server = Server::parrot(ParrotSetup::default());
    for name in ["a", "b", "c", "a"] {
        ask(&server, &prompt(4, 2), &session(name, "root"));
        settled(&server, name);
    }
    let salted = |id| [("x-dynamo-session-id", id), ("x-tenant-id", "t")];
    ask(&server, &prompt(4, 2), &salted("mine"));
    ask(&server, &prompt(4, 2), &salted("a"));
    assert_eq!(ids(&programs(&server, "")), ["a", "root", "c", "b"]);
    let own = |query: &str| {
        let path = format!("/v1/kv/programs{query}");
        let answer = send_with(server.address, "GET", &path, &[("x-tenant-id", "t")], "");
        answer.json()
    };
    until("both have ended", || {
        let programs = own("");
        let programs = programs["programs"].as_array().unwrap();
        programs.iter().all(|program| program["turns"] == 1)
    });
    let programs_of_t = own("")["programs"].as_array().unwrap().clone();
    assert_eq!(ids(&programs_of_t), ["a", "mine"]);
    assert_eq!(programs_of_t[0]["parent"], Value::Null, "another a");
    assert_eq!(own("?id=root")["programs"], json!([]));
    assert_eq!(own("?limit=1")["more"], true);
    let first = server.get("/v1/kv/programs?limit=2").json();
    assert_eq!(ids(first["programs"].as_array().unwrap()), ["a", "root"]);
    assert_eq!(first["more"], true);
    let refused = server.get("/v1/kv/programs?limit=1001");
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["param"], "limit");
    // Verbs on a session find it under its salt too.
    let release = json!({"cache_salt": "t", "actions": [{"action_type": "kv.release",
        "payload": {"session": "mine"}}]});
    let outcome = server.post("/v1/kv/actions", &release).json();
    assert_eq!(outcome["outcomes"][0]["status"], "clipped", "{outcome}");
    assert_eq!(own("?id=mine")["programs"][0]["done"], true);
}

#[test]
fn a_release_covers_the_children_where_that_is_said() {
    let server = Server::parrot(ParrotSetup::default());
    ask(&server, &prompt(1, 2), &[("x-dynamo-session-id", "top")]);
    ask(&server, &prompt(2, 2), &session("child", "top"));
    ask(&server, &prompt(3, 3), &session("grandchild", "child"));
    ask(&server, &prompt(4, 2), &session("stranger", "other"));
    for name in ["top", "child", "grandchild", "stranger"] {
        settled(&server, name);
    }
    let release = |children: bool| {
        let payload = json!({"session": "top", "children": children});
        let body = json!({"actions": [{"action_type": "kv.release", "payload": payload}]});
        let answer = server.post("/v1/kv/actions", &body).json();
        answer["outcomes"][0].clone()
    };
    let done = |name: &str| settled(&server, name)["done"] == true;
    assert_eq!(release(false)["status"], "accepted");
    assert!(done("top") && !done("child"), "it ends nothing of theirs");
    let all = release(true);
    assert_eq!(all["children"], json!({"programs": 2, "pages": 5}), "{all}");
    assert!(done("child") && done("grandchild") && !done("stranger"));
}

/// A real computation; all that is computed is written to host.
fn tiers() -> Server {
    let model = TinyModel::with_weights();
    let config = ServiceConfig {
        device_pages: Some(64),
        host_pages: Some(256),
        page_size: 16,
        threads: Some(1),
        write_policy: WritePolicy::Through,
        // The tiny model computes quicker than any copy is worth; here copies are the point.
        free_copies: true,
        ..ServiceConfig::default()
    };
    Server::model(&model.path, config)
}

/// How a child of the parent ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// It says so.
    Final,
    /// Its answer in a chat calls no tools.
    Answered,
    /// It is somebody else's.
    Elsewhere,
}

/// Where the tokens of the parent's next prompt come from, after a flood between its turns and an
/// end of its child. Device, host, and the text.
fn parent_comes_back(end: End) -> (u64, u64, Value) {
    let server = tiers();
    let parent = prompt(1, 6);
    ask(&server, &parent, &[("x-dynamo-session-id", "parent")]);
    for seed in 0..12 {
        ask(&server, &prompt(100 + seed, 16), &[]);
    }
    match end {
        End::Final => drop(ask(&server, &prompt(2, 2), &closing("child", "parent"))),
        End::Elsewhere => drop(ask(&server, &prompt(2, 2), &session("child", "else"))),
        End::Answered => {
            let body = json!({"messages": [{"role": "user", "content": "Go."}], "max_tokens": 2});
            let (path, headers) = ("/v1/chat/completions", session("child", "parent"));
            let answer = send_with(server.address, "POST", path, &headers, &body.to_string());
            assert_eq!(answer.status, 200, "{}", answer.body);
            server.until_metric("rootstock_derived_hints_total{kind=\"parent_due\"}", 1.0);
        }
    }
    settled(&server, "child");
    let device_pages = || programs(&server, "?id=parent")[0]["pages"]["device"].as_u64();
    if end == End::Elsewhere {
        assert_eq!(device_pages(), Some(0));
    } else {
        until("it is brought up", || device_pages() == Some(6));
    }
    let back = ask(&server, &parent, &[("x-dynamo-session-id", "parent")]);
    let report = &back["nvext"]["cache_report"];
    let tokens = |tier: &str| report[tier].as_u64().unwrap();
    let text = back["choices"][0]["text"].clone();
    (tokens("device_tokens"), tokens("host_tokens"), text)
}

#[test]
fn a_parent_finds_its_prefix_on_the_device_when_its_child_has_closed() {
    let (device, host, text) = parent_comes_back(End::Elsewhere);
    assert_eq!((device, host), (0, 6 * PAGE), "fetched when it asks");
    for end in [End::Final, End::Answered] {
        let (device, host, other) = parent_comes_back(end);
        assert_eq!((device, host), (6 * PAGE, 0), "brought up ahead");
        assert_eq!(text, other);
    }
}
