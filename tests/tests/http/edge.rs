//! The edge: API keys and what tenants see of each other (G3), signs of life while a prompt is
//! computed, tokens and texts.

use std::time::Duration;

use rootstock_server::app::ApiOptions;
use rootstock_server::chat::stream::Signs;
use rootstock_server::http::keys::Keys;
use serde_json::{Value, json};

use crate::client::{Answer, Open};
use crate::server::{ParrotSetup, Server};

const KEYS: &str = "[[key]]\nkey = \"sk-tenant-one\"\ntenant = \"one\"\nmax-priority = 3\n\
    [[key]]\nkey = \"sk-tenant-two\"\ntenant = \"two\"\n";

fn with_keys() -> Server {
    let name = format!("rootstock-keys-{}.toml", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, KEYS).unwrap();
    let keys = Keys::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Server::parrot(ParrotSetup {
        options: ApiOptions {
            keys: Some(keys),
            ..ApiOptions::default()
        },
        ..ParrotSetup::default()
    })
}

fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let mut open = Open::start(server.address);
    open.request("POST", path, headers, &body.to_string());
    open.answer()
}

#[test]
fn without_a_valid_key_every_api_says_so_in_its_own_form_and_probes_answer() {
    let server = with_keys();
    let body = json!({"model": "m", "max_tokens": 5, "input": "x",
        "messages": [{"role": "user", "content": "~x"}]});
    for headers in [&[][..], &[("authorization", "Bearer sk-tenant-three")]] {
        let chat = post(&server, "/v1/chat/completions", headers, &body);
        assert_eq!(
            (chat.status, chat.json()["error"]["code"].clone()),
            (401, json!("invalid_api_key"))
        );
        let message = post(&server, "/v1/messages", headers, &body);
        assert_eq!(
            (message.status, message.json()["error"]["type"].clone()),
            (401, json!("authentication_error"))
        );
        assert!(!message.body.contains("three"), "keys are not repeated");
        assert_eq!(post(&server, "/v1/responses", headers, &body).status, 401);
    }
    for path in ["/", "/health", "/ready"] {
        assert_eq!(server.get(path).status, 200);
    }
    assert_eq!(server.get("/metrics").status, 401);
    for header in [
        ("authorization", "Bearer sk-tenant-one"),
        ("x-api-key", "sk-tenant-two"),
    ] {
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses"] {
            assert_eq!(post(&server, path, &[header], &body).status, 200, "{path}");
        }
    }
}

#[test]
fn a_tenant_hits_its_own_cache_and_never_that_of_another_whatever_it_claims() {
    let server = with_keys();
    let text = format!("~{}", "the same long prompt ".repeat(6));
    let body = |salt: Value| {
        json!({"messages": [{"role": "user", "content": text}],
        "cache_salt": salt, "max_tokens": 2, "nvext": {"agent_hints": {"priority": 2_000_000_000},
        "extra_fields": ["ignored_fields"]}})
    };
    let cached = |answer: &Answer| {
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    let route = "/v1/chat/completions";
    let one = [("authorization", "Bearer sk-tenant-one")];
    let two = [("authorization", "Bearer sk-tenant-two")];
    let first = post(&server, route, &one, &body(Value::Null));
    assert_eq!(cached(&first), 0);
    let ignored = first.json()["nvext"]["ignored_fields"].to_string();
    assert!(ignored.contains("clamped to 3"), "{ignored}");
    assert!(cached(&post(&server, route, &one, &body(Value::Null))) > 100);
    let before = server.perch.computed();
    for salt in [
        Value::Null,
        json!("one"),
        json!("tenant 3:one/"),
        json!("sk-tenant-one"),
    ] {
        assert_eq!(cached(&post(&server, route, &two, &body(salt))), 0);
    }
    let prompt = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let done = server.perch.computed() - before;
    assert!(
        done >= 4 * prompt,
        "all was computed: {done} of 4 x {prompt}"
    );
}

/// Reads a stream until it holds a text, then lets the parrot speak on, and reads the rest.
fn until(server: &Server, path: &str, body: &Value, wanted: &str) -> String {
    let mut open = Open::start(server.address);
    open.post(path, body);
    assert_eq!(open.head().0, 200);
    let mut all = String::new();
    while !all.contains(wanted) {
        all.push_str(&String::from_utf8(open.chunk().unwrap()).unwrap());
    }
    server.perch.open();
    while let Some(chunk) = open.chunk() {
        all.push_str(&String::from_utf8(chunk).unwrap());
    }
    all
}

#[test]
fn while_nothing_comes_each_api_shows_the_life_that_its_clients_believe() {
    let impatient = || {
        Server::parrot(ParrotSetup {
            options: ApiOptions {
                signs: Signs {
                    first: Duration::from_millis(1),
                    every: Duration::from_millis(2),
                    content_every: Duration::from_millis(7),
                },
                ..ApiOptions::default()
            },
            ..ParrotSetup::default()
        })
    };
    // `@` is the first token: nothing has been said when it waits.
    let messages = json!([{"role": "user", "content": "~@late"}]);
    let body = json!({"max_tokens": 20, "stream": true, "messages": messages, "input": "~@late"});
    let content = "{\"type\":\"text_delta\",\"text\":\"\"}";
    let all = until(&impatient(), "/v1/messages", &body, content);
    assert!(
        all.starts_with("event: message_start\n"),
        "the first event is a real one"
    );
    assert!(all.contains("event: ping\n"));
    assert!(all.contains("\"text\":\"@\"") && all.ends_with("{\"type\":\"message_stop\"}\n\n"));
    let wanted = "\"type\":\"response.in_progress\",\"sequence_number\":4";
    let all = until(&impatient(), "/v1/responses", &body, wanted);
    assert!(all.starts_with("event: response.created\n"));
    assert!(all.contains("event: response.completed\n"));
    let all = until(
        &impatient(),
        "/v1/chat/completions",
        &body,
        ": keep-alive\n",
    );
    assert!(all.starts_with("data: {") && all.ends_with("data: [DONE]\n\n"));
}

#[test]
fn tokens_of_a_text_and_of_a_conversation_and_back() {
    let server = Server::parrot(ParrotSetup::default());
    let found = server.post(
        "/tokenize",
        &json!({"prompt": "aHIb", "return_token_strs": true}),
    );
    let found = found.json();
    assert_eq!(found["token_strs"], json!(["a", "HI", "b"]));
    assert_eq!(found["count"], 3);
    let back = server.post("/detokenize", &json!({"tokens": found["tokens"]}));
    assert_eq!(back.json()["prompt"], "aHIb");
    let talk = json!({"messages": [{"role": "user", "content": "~x"}], "max_tokens": 3});
    let count = server.post("/tokenize", &talk).json()["count"].clone();
    let usage = server.post("/v1/chat/completions", &talk).json()["usage"].clone();
    assert_eq!(count, usage["prompt_tokens"]);
    assert_eq!(server.post("/tokenize", &json!({})).status, 400);
    assert_eq!(server.post("/detokenize", &json!({})).status, 400);
    assert_eq!(
        server
            .post("/detokenize", &json!({"tokens": [99_999]}))
            .status,
        400
    );
}

#[test]
fn control_routes_reach_the_content_of_the_key_that_asks_and_nothing_else() {
    let server = with_keys();
    let one = [("authorization", "Bearer sk-tenant-one")];
    let two = [("authorization", "Bearer sk-tenant-two")];
    let prompt: Vec<u32> = (1..=48).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1,
        "nvext": {"agent_hints": {"program_id": "p"}, "extra_fields": ["cache_report"]}});
    let answer = post(&server, "/v1/completions", &one, &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    let act = |headers: &[(&str, &str)], salt: &str, target: Value| {
        let mut payload = target;
        payload["priority"] = 1_000_000.into();
        let body = json!({"cache_salt": salt,
            "actions": [{"action_type": "kv.retain", "payload": payload}]});
        let answer = post(&server, "/v1/kv/actions", headers, &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["outcomes"][0]["status"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    // The salt of another tenant's, as it is kept, is a salt within one's own.
    for salt in ["", "tenant 3:one/"] {
        for target in [json!({"tokens": prompt}), json!({"program": "p"})] {
            assert_eq!(act(&two, salt, target), "missing", "{salt}");
        }
    }
    assert_eq!(act(&one, "", json!({"program": "p"})), "accepted");
    assert_eq!(act(&one, "", json!({"tokens": prompt})), "accepted");
    let see = |path: &str, headers: &[(&str, &str)]| {
        let mut open = Open::start(server.address);
        open.request("GET", path, headers, "");
        open.answer()
    };
    let why = format!("/v1/kv/why/{id}");
    let seen = [&one[..], &two[..], &[]].map(|headers| see(&why, headers).status);
    assert_eq!(seen, [200, 404, 401]);
    let tree = see("/v1/kv/tree", &one).json();
    let priority = tree["nodes"][0]["priority"].as_i64().unwrap();
    assert_eq!(priority, 3, "no more than the ceiling of its key");
    let others = see("/v1/kv/tree", &two).json();
    assert!(others["nodes"].as_array().unwrap().is_empty());
}
