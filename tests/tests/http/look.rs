//! What people look at: the page and its files, the picture of the tree, what went lately, the
//! request trace, and a conversation in the terminal.

use std::sync::Arc;

use crate::client::{send, send_with};
use crate::server::{ParrotSetup, Server, until};
use rootstock_engine::service::ServiceConfig;
use rootstock_server::app::ApiOptions;
use rootstock_server::chat_client::{self, ChatFlags};
use rootstock_server::remote::Address;
use rootstock_server::request_trace::RequestTrace;
use serde_json::{Value, json};

fn ask(server: &Server, program: &str, prompt: &str) {
    let body = json!({"prompt": prompt, "max_tokens": 2,
        "nvext": {"agent_hints": {"program_id": program}}});
    assert_eq!(server.post("/v1/completions", &body).status, 200);
}

fn act(server: &Server, verb: &str, payload: &Value) -> Value {
    let body = json!({"protocol_version": "0.1", "message_id": "1", "actions": [{
        "action_id": "a", "action_type": verb, "action_version": "1.0", "payload": payload}]});
    server.post("/v1/kv/actions", &body).json()["outcomes"][0].clone()
}

#[test]
fn a_browser_gets_the_page_with_all_its_files_and_others_get_json() {
    let server = Server::parrot(ParrotSetup::default());
    let told = server.get("/").json();
    assert_eq!(told["server"], "rootstock");
    assert!(told["features"].is_array());
    let html = [("accept", "text/html,application/xhtml+xml;q=0.9")];
    let page = send_with(server.address, "GET", "/", &html, "");
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'"), "{policy}");
    assert!(!page.body.contains("style="), "the policy forbids it");
    // Whatever the page and its scripts name is there, and nothing comes from elsewhere.
    let mut texts = vec![page.body];
    let mut files = 0;
    while let Some(text) = texts.pop() {
        assert!(
            !text.contains("https://") && !text.contains("//cdn"),
            "{text}"
        );
        for name in text.split("\"/page/").skip(1) {
            let name = name.split('"').next().unwrap();
            let file = server.get(&format!("/page/{name}"));
            assert_eq!(file.status, 200, "{name}");
            files += 1;
            if name.ends_with(".js") && files < 20 {
                texts.push(file.body);
            }
        }
    }
    assert!(files >= 4, "{files}");
    let missing = server.get("/page/other.js");
    assert_eq!(
        (missing.status, missing.json()["error"]["code"].is_string()),
        (404, true)
    );
}

#[test]
fn the_picture_adds_up_to_the_tree_names_programs_and_takes_verbs_on_its_nodes() {
    let server = Server::parrot(ParrotSetup::default());
    let shared = "s".repeat(320);
    for branch in 0..30_u8 {
        let tail = char::from(b'A' + branch)
            .to_string()
            .repeat(64 + usize::from(branch));
        ask(&server, &format!("p{branch}"), &format!("{shared}{tail}~x"));
    }
    let picture = server.get("/v1/kv/picture?nodes=10").json();
    let parts = picture["parts"].as_array().unwrap();
    let sum: u64 = parts
        .iter()
        .map(|part| part["pages"].as_u64().unwrap())
        .sum();
    assert_eq!(picture["pages"], sum);
    let stats = server.get("/v1/kv/stats").json();
    assert_eq!(stats["tiers"][0]["pages"]["evictable"], sum);
    assert_eq!(
        parts.iter().filter(|part| part["id"].is_string()).count(),
        10
    );
    let programs = picture["programs"].as_array().unwrap();
    assert_eq!(programs.len(), 30);
    assert_eq!(programs[0]["name"], "p29", "the one that asked last");
    assert!(
        programs
            .iter()
            .all(|one| one["part"].is_u64() && one["turns"] == 1)
    );
    // A node by its name: what is below it, and verbs on it.
    let root = parts[0]["id"].as_str().unwrap();
    let below = server.get(&format!("/v1/kv/picture?under={root}")).json();
    assert_eq!(below["pages"], parts[0]["below"]);
    let pinned = act(&server, "kv.pin", &json!({"node": root, "ttl": "5m"}));
    assert_eq!(
        (&pinned["status"], &pinned["pages"]),
        (&json!("accepted"), &json!(20))
    );
    let again = server.get("/v1/kv/picture").json();
    let left = again["parts"][0]["pin_left_s"].as_u64().unwrap();
    assert!((290..=300).contains(&left), "{left}");
    assert_eq!(
        act(&server, "kv.pin", &json!({"node": "99.7"}))["status"],
        "missing"
    );
    assert_eq!(
        act(&server, "kv.pin", &json!({"node": "x"}))["status"],
        "rejected"
    );
    assert_eq!(server.get("/v1/kv/picture?under=x").status, 400);
    let others = server.get("/v1/kv/picture?cache_salt=other").json();
    assert_eq!(
        (&others["pages"], &others["programs"]),
        (&json!(0), &json!([]))
    );
    let theirs = format!("/v1/kv/picture?cache_salt=other&under={root}");
    assert_eq!(server.get(&theirs).json()["parts"], json!([]));
}

#[test]
fn numbers_of_queue_times_and_steps_and_what_went_for_whom_are_in_the_stats() {
    // 12 pages: a second prompt of 9 pages does not fit beside the first.
    let server = Server::parrot(ParrotSetup {
        pages: 12,
        service: ServiceConfig {
            page_size: 16,
            host_kv_mib: Some(0),
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    });
    ask(&server, "first", &format!("{}~x", "a".repeat(144)));
    ask(&server, "second", &format!("{}~x", "b".repeat(144)));
    let stats = server.get("/v1/kv/stats").json();
    let gone = stats["evicted_lately"].as_array().unwrap();
    let pages: u64 = gone.iter().map(|one| one["pages"].as_u64().unwrap()).sum();
    assert_eq!(stats["tiers"][0]["evicted_pages"]["for_room"], pages);
    assert!(pages > 0);
    assert_eq!(gone[0]["reason"], "room");
    assert_eq!(gone[0]["by"]["session"], "second");
    assert_eq!(stats["requests"]["ended"], 2);
    assert_eq!(stats["requests"]["running"], 0);
    let ttft = stats["times"]["ttft"]["counts"].as_array().unwrap();
    let answers: u64 = ttft.iter().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(answers, 2);
    assert_eq!(
        ttft.len(),
        stats["times"]["bounds_s"].as_array().unwrap().len() + 1
    );
    let steps = stats["steps"]["by_class"].as_object().unwrap();
    let sum: u64 = steps
        .values()
        .map(|one| one["count"].as_u64().unwrap())
        .sum();
    assert_eq!(stats["steps"]["computed"], sum);
}

#[test]
fn each_answer_is_a_line_of_the_request_trace_that_replay_reads() {
    let path = std::env::temp_dir().join(format!("rootstock-trace-{}.jsonl", std::process::id()));
    let trace = Arc::new(RequestTrace::open(&path, 16, "parrot").unwrap());
    let server = Server::parrot(ParrotSetup {
        options: ApiOptions {
            request_trace: Some(Arc::clone(&trace)),
            ..ApiOptions::default()
        },
        ..ParrotSetup::default()
    });
    let body = json!({"prompt": format!("{}~xy", "a".repeat(60)), "max_tokens": 9, "n": 2,
        "nvext": {"agent_hints": {"program_id": "s1"}}});
    let label = [("x-request-id", "label-7")];
    let told = send_with(
        server.address,
        "POST",
        "/v1/completions",
        &label,
        &body.to_string(),
    );
    assert_eq!(told.status, 200);
    let named = send(server.address, "POST", "/v1/completions", &body.to_string());
    assert_eq!(named.header("x-request-id"), None);
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&path).unwrap();
        let whole = text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        whole.collect()
    };
    until("two lines", || lines().len() == 2);
    let lines = lines();
    std::fs::remove_file(&path).unwrap();
    let first = &lines[0]["event"];
    assert_eq!(first["schema"], "dynamo.request.trace.v1");
    assert_eq!(first["event_type"], "request_end");
    assert_eq!(first["agent_context"]["session_id"], "s1");
    let request = &first["request"];
    assert_eq!(
        (&request["request_id"], &request["x_request_id"]),
        (&json!("label-7"), &json!("label-7"))
    );
    assert_eq!(request["input_tokens"], 63);
    assert_eq!(request["finish_reason_metadata"]["finish_reason"], "stop");
    let hashes = request["replay"]["input_sequence_hashes"]
        .as_array()
        .unwrap();
    assert_eq!(hashes.len(), 4, "a partial last page too");
    let second = &lines[1]["event"]["request"];
    assert_eq!(second["replay"]["input_sequence_hashes"], json!(hashes));
    assert_eq!(second["cached_tokens"], 48);
    assert!(second["request_id"].as_str().unwrap().starts_with("req-"));
    assert!(second["x_request_id"].is_null());
    assert_eq!(trace.left_out(), 0);
}

fn chat(server: &Server, lines: &str, once: Option<&str>) -> (String, String) {
    let flags = ChatFlags {
        address: Address {
            url: format!("http://{}/v1", server.address),
            key: None,
            salt: None,
        },
        model: "m".into(),
        system: Some("Be brief.".into()),
        session: Some("talk".into()),
        max_tokens: 200,
        temperature: 0.0,
        once: once.map(str::to_owned),
    };
    let (mut out, mut notes) = (Vec::new(), Vec::new());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut lines = lines.as_bytes();
    let talk = chat_client::run(flags, &mut lines, &mut out, &mut notes);
    runtime.block_on(talk).unwrap();
    (
        String::from_utf8(out).unwrap(),
        String::from_utf8(notes).unwrap(),
    )
}

#[test]
fn a_conversation_in_the_terminal_streams_tells_what_was_cached_and_steers() {
    let server = Server::parrot(ParrotSetup::default());
    let long = "word ".repeat(12);
    let (out, notes) = chat(
        &server,
        &format!(
            "/why\n{long}~one\n\n{long}~two\n/pin 5m\n/why\n/release\n/nonsense\n/new\n/quit\nnever"
        ),
        None,
    );
    let said: Vec<&str> = out.lines().collect();
    assert!(said[0].contains("one") && said[1].contains("two"), "{out}");
    assert!(!out.contains("never"), "{out}");
    let told: Vec<&str> = notes
        .lines()
        .filter(|line| line.contains("tokens of prompt"))
        .collect();
    assert!(told[0].contains("cached: nothing"), "{notes}");
    assert!(told[1].contains(" on device"), "{notes}");
    for part in [
        "nothing was said yet",
        "accepted",
        "cache_report",
        "a new conversation",
        "/pin 5m",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let (out, notes) = chat(&server, "", Some("~three"));
    assert!(out.contains("three"), "{out}");
    assert!(notes.contains("tokens said"), "{notes}");
}
