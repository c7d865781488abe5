//! The control routes: what the cache holds, verbs on it, flushes that tell the truth (J1), and
//! why a prompt was not found.

use crate::client::{self, Open};
use crate::server::{ParrotSetup, Server};
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

fn server() -> Server {
    Server::parrot(ParrotSetup::default())
}

/// A server with room for so many pages.
fn small(pages: u32) -> Server {
    Server::parrot(ParrotSetup {
        pages,
        ..ParrotSetup::default()
    })
}

/// Completes a prompt; the answer.
fn complete(server: &Server, prompt: &str, extra: &Value) -> Value {
    let mut body = json!({"prompt": prompt, "max_tokens": 2,
        "nvext": {"extra_fields": ["cache_report"]}});
    merge(&mut body, extra);
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn merge(body: &mut Value, extra: &Value) {
    for (key, value) in extra.as_object().into_iter().flatten() {
        if body[key].is_object() && value.is_object() {
            merge(&mut body[key], value);
        } else {
            body[key] = value.clone();
        }
    }
}

fn cached(answer: &Value) -> u64 {
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().unwrap()
}

fn act(server: &Server, actions: &Value, salt: Option<&str>) -> Vec<Value> {
    let body = json!({"protocol_version": "0.1", "message_id": "m", "actions": actions,
        "cache_salt": salt});
    let answer = server.post("/v1/kv/actions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    assert_eq!(answer["message_id"], "m");
    answer["outcomes"].as_array().unwrap().clone()
}

/// The status of one action on one target.
fn status(server: &Server, kind: &str, payload: &Value) -> (String, u64) {
    let action = json!([{"action_id": "a", "action_type": kind, "action_version": "1.0",
        "payload": payload}]);
    let outcome = act(server, &action, None).remove(0);
    assert_eq!(outcome["action_id"], "a");
    let status = outcome["status"].as_str().unwrap();
    if status != "accepted" {
        assert!(outcome["reason"].is_string(), "{outcome}");
    }
    (status.to_owned(), outcome["pages"].as_u64().unwrap_or(0))
}

fn tokens(text: &str) -> Value {
    json!(text.bytes().map(u32::from).collect::<Vec<_>>())
}

fn stats(server: &Server) -> Value {
    server.get("/v1/kv/stats").json()
}

/// 54 bytes, each a token of its own: three pages.
const LONG: &str = "0123456789abcdef0123456789KLMNOP0123456789abcdefxyz~ab";

#[test]
fn the_pages_of_each_tier_add_up_and_hits_are_counted() {
    let server = small(100);
    complete(&server, LONG, &json!({}));
    let again = complete(&server, LONG, &json!({}));
    let stats = stats(&server);
    let tier = &stats["tiers"][0];
    assert_eq!(tier["tier"], "device");
    let pages = |state: &str| tier["pages"][state].as_u64().unwrap();
    let states = ["free", "evictable", "leased", "held", "in_transit"];
    assert_eq!(states.map(pages).iter().sum::<u64>(), pages("total"));
    assert_eq!(pages("total"), 100);
    assert_eq!(tier["hit_tokens"].as_u64().unwrap(), cached(&again));
    assert_eq!(
        (&stats["page_tokens"], &stats["lookups"]),
        (&json!(16), &json!(2))
    );
    assert!(stats["policy"].is_string() && stats["write_policy"].is_string());
}

#[test]
fn a_pin_by_any_target_is_counted_once_and_released() {
    let server = server();
    let session = json!({"nvext": {"agent_hints": {"program_id": "s"}}});
    complete(&server, LONG, &session);
    let by_tokens = json!({"tokens": tokens(LONG), "ttl": "5m"});
    assert_eq!(
        status(&server, "kv.pin", &by_tokens),
        ("accepted".into(), 3)
    );
    let by_session = json!({"session": "s", "ttl": 60});
    assert_eq!(status(&server, "Pin", &by_session).1, 3);
    let nodes = server.get("/v1/kv/tree?session=s").json();
    let hash = nodes["nodes"][0]["hash"].clone();
    assert!(nodes["nodes"][0]["pinned"].as_bool().unwrap(), "{nodes}");
    assert_eq!(stats(&server)["pins"]["pages"], 3);
    // Hashes go from the root on: the last of three alone names nothing.
    let alone = status(&server, "kv.pin", &json!({"block_hashes": [hash]}));
    assert_eq!(alone.0, "missing");
    let released = status(&server, "kv.release", &json!({"tokens": tokens(LONG)}));
    assert_eq!(released, ("accepted".into(), 3));
    assert_eq!(stats(&server)["pins"]["pages"], 0);
}

#[test]
fn each_action_has_its_own_outcome_and_reason() {
    let server = server();
    complete(&server, LONG, &json!({}));
    let longer = format!("{}{}", &LONG[..48], "z".repeat(32));
    let target = json!({"tokens": tokens(&longer)});
    assert_eq!(status(&server, "kv.pin", &target), ("clipped".into(), 3));
    assert_eq!(
        status(&server, "kv.pin", &json!({"tokens": [1, 2]})).0,
        "missing"
    );
    assert_eq!(
        status(&server, "kv.pin", &json!({"session": "nobody"})).0,
        "missing"
    );
    assert_eq!(status(&server, "kv.fetch", &target).0, "rejected");
    let zero = json!({"tokens": tokens(LONG), "ttl": 0});
    assert_eq!(status(&server, "kv.pin", &zero).0, "rejected");
    let retain = json!({"tokens": tokens(LONG), "priority": 5});
    assert_eq!(status(&server, "kv.retain", &retain).0, "accepted");
    let elsewhere = json!({"tokens": tokens(LONG), "dp_rank": 7});
    assert_eq!(status(&server, "kv.prefetch", &elsewhere).0, "rejected");
    let messages = json!([{"role": "user", "content": "~never seen"}]);
    assert_eq!(
        status(&server, "kv.pin", &json!({"messages": messages})).0,
        "missing"
    );
    let future = json!({"protocol_version": "9", "actions": []});
    let refused = server.post("/v1/kv/actions", &future).json();
    assert_eq!(
        refused["error"]["message"],
        "protocol_version is \"9\"; this server knows 0.x"
    );
    let refused = server.post("/v1/kv/actions", &json!({"actions": 5}));
    assert_eq!(
        (refused.status, refused.json()["error"]["param"].as_str()),
        (400, Some("actions"))
    );
}

#[test]
fn a_conversation_is_pinned_by_its_messages() {
    let server = server();
    let text = "a long message that fills some pages of the cache, and then some more of it";
    let messages = json!([{"role": "user", "content": format!("{text}~ab")}]);
    let body = json!({"messages": messages, "max_tokens": 2});
    let answer = server.post("/v1/chat/completions", &body).json();
    let pages = answer["usage"]["prompt_tokens"].as_u64().unwrap() / 16;
    let pinned = status(&server, "kv.pin", &json!({"messages": messages}));
    assert_eq!(pinned, ("accepted".into(), pages));
}

#[test]
fn other_salts_are_neither_seen_nor_touched() {
    let server = server();
    let answer = complete(&server, LONG, &json!({"cache_salt": "a"}));
    let id = answer["id"].as_str().unwrap();
    let why = |salt: &str| server.get(&format!("/v1/kv/why/{id}{salt}")).status;
    assert_eq!(
        (why(""), why("?cache_salt=b"), why("?cache_salt=a")),
        (404, 404, 200)
    );
    let nodes = |salt: &str| {
        let tree = server.get(&format!("/v1/kv/tree{salt}")).json();
        tree["nodes"].as_array().unwrap().len()
    };
    assert_eq!(
        (nodes(""), nodes("?cache_salt=b"), nodes("?cache_salt=a")),
        (0, 0, 1)
    );
    let pin = json!([{"action_type": "pin", "payload": {"tokens": tokens(LONG)}}]);
    assert_eq!(act(&server, &pin, Some("b"))[0]["status"], "missing");
    assert_eq!(act(&server, &pin, Some("a"))[0]["status"], "accepted");
}

#[test]
fn a_flush_waits_for_what_runs_or_says_what_is_in_the_way() {
    let server = server();
    complete(&server, LONG, &json!({}));
    assert_eq!(
        status(&server, "kv.pin", &json!({"tokens": tokens(LONG)})).0,
        "accepted"
    );
    let mut running = Open::start(server.address);
    running.post(
        "/v1/completions",
        &json!({"prompt": "~hold@", "max_tokens": 9}),
    );
    server.perch.until_holding();
    let refused = client::send(server.address, "POST", "/flush_cache?timeout_s=0", "");
    assert_eq!(refused.status, 409, "{}", refused.body);
    assert!(
        refused.body.contains("pages held by requests"),
        "{}",
        refused.body
    );
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(stats(&server)["pins"]["pages"], 3, "nothing was cleared");
    let mut flush = Open::start(server.address);
    flush.request("POST", "/flush_cache?timeout_s=60", &[], "");
    server.perch.open();
    assert_eq!(running.answer().status, 200);
    assert_eq!(flush.answer().status, 200);
    let stats = stats(&server);
    let pages = &stats["tiers"][0]["pages"];
    assert_eq!(
        (&pages["free"], &stats["pins"]["pages"]),
        (&pages["total"], &json!(0))
    );
    assert_eq!(cached(&complete(&server, LONG, &json!({}))), 0);
    let wrong = client::send(server.address, "POST", "/flush_cache?timeout_s=x", "");
    assert_eq!(wrong.status, 400);
}

/// The cause that a report names, with the token at which it begins.
fn cause(answer: &Value) -> (String, Option<u64>) {
    let report = &answer["choices"][0]["nvext"]["cache_report"];
    let report = if report.is_null() {
        &answer["nvext"]["cache_report"]
    } else {
        report
    };
    let miss = &report["miss"];
    let named = miss["cause"].as_str();
    assert!(
        named.is_some() && miss["text"].is_string(),
        "no report: {answer}"
    );
    (named.unwrap_or_default().to_owned(), miss["at"].as_u64())
}

fn named(cause: &str, at: u64) -> (String, Option<u64>) {
    (cause.to_owned(), Some(at))
}

/// A line with a number that changes with each request, at every depth of a prompt.
#[test]
fn a_nonce_is_named_with_its_place() {
    let server = server();
    let prompt = |at: usize, nonce: char| {
        let mut text = "p".repeat(60);
        text.replace_range(at..=at, &nonce.to_string());
        text + "~ab"
    };
    for (seed, at) in [0_usize, 1, 15, 16, 17, 31, 40, 47].into_iter().enumerate() {
        let salt = json!({"cache_salt": format!("n{seed}")});
        complete(&server, &prompt(at, 'A'), &salt);
        let answer = complete(&server, &prompt(at, 'B'), &salt);
        assert_eq!(cause(&answer), named("diverged", at as u64));
    }
}

#[test]
fn new_text_whole_hits_and_other_salts_are_no_divergence() {
    let server = server();
    let first = complete(&server, LONG, &json!({}));
    assert_eq!(cause(&first).0, "new");
    assert_eq!(cause(&complete(&server, LONG, &json!({}))).0, "none");
    let longer = format!("{}{}", &LONG[..51], "c".repeat(40));
    assert_eq!(
        cause(&complete(&server, &longer, &json!({}))).0,
        "new",
        "nothing but a tail"
    );
    let fork = format!("{}{}", &LONG[..40], "c".repeat(20));
    assert_eq!(
        cause(&complete(&server, &fork, &json!({}))),
        named("diverged", 40)
    );
    let salted = complete(&server, LONG, &json!({"cache_salt": "x"}));
    assert_eq!(cause(&salted).0, "new", "another salt is not told of");
}

#[test]
fn what_was_evicted_or_flushed_is_named_with_what_would_have_kept_it() {
    let server = small(8);
    complete(&server, LONG, &json!({}));
    for letter in ["q", "r", "s"] {
        complete(&server, &format!("{}~ab", letter.repeat(60)), &json!({}));
    }
    let answer = complete(&server, LONG, &json!({}));
    let (named, at) = cause(&answer);
    assert_eq!(named, "evicted", "{answer}");
    assert_eq!(at, Some(0));
    let id = answer["id"].as_str().unwrap();
    let why = server.get(&format!("/v1/kv/why/{id}")).json();
    assert!(why["pages_short"].as_u64().unwrap() > 0, "{why}");
    assert_eq!(why["tier"], "device");
    assert_eq!(
        client::send(server.address, "POST", "/flush_cache", "").status,
        200
    );
    assert_eq!(cause(&complete(&server, LONG, &json!({}))).0, "flushed");
}

#[test]
fn in_a_conversation_the_part_that_changed_is_named() {
    let server = server();
    let long = |text: &str| format!("{} {text} {}", "x".repeat(40), "y".repeat(40));
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let (system, first, said) = (long("10:01"), long("first"), long("said"));
    let last = format!("{}~ab", long("last"));
    let old = [
        turn("system", &system),
        turn("user", &first),
        turn("assistant", &said),
        turn("user", &last),
    ];
    let changed = |at: usize, text: &str| {
        let mut new = old.clone();
        new[at]["content"] = text.into();
        new.to_vec()
    };
    let swapped = [&old[0], &old[2], &old[1], &old[3]].map(Value::clone);
    let cases = [
        (
            "a timestamp in the system prompt",
            changed(0, &long("10:02")),
            "system",
        ),
        ("an edited question", changed(1, &long("other")), "history"),
        ("an edited answer", changed(2, &long("thought")), "history"),
        (
            "another question",
            changed(3, &format!("{}~ab", long("new"))),
            "history",
        ),
        ("turns in another order", swapped.to_vec(), "history"),
        (
            "a turn left out",
            [&old[..1], &old[3..]].concat(),
            "history",
        ),
    ];
    for (index, (what, new, kind)) in cases.into_iter().enumerate() {
        let salt = format!("c{index}");
        let ask = |messages: &[Value]| {
            let body = json!({"max_tokens": 2, "cache_salt": salt, "messages": messages,
                "nvext": {"extra_fields": ["cache_report"]}});
            server.post("/v1/chat/completions", &body).json()
        };
        ask(&old);
        let answer = ask(&new);
        let id = answer["id"].as_str().unwrap();
        let why = server
            .get(&format!("/v1/kv/why/{id}?cache_salt={salt}"))
            .json();
        assert_eq!(cause(&answer).0, "diverged", "{what}: {why}");
        assert_eq!(why["kind"], kind, "{what}: {why}");
        let text = why["text"].as_str().unwrap();
        assert!(text.contains(&format!("inside {kind}")), "{what}: {text}");
    }
}

#[test]
fn a_report_says_where_each_token_came_from() {
    let server = Server::parrot(ParrotSetup {
        service: ServiceConfig {
            step_tokens: 16,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    });
    complete(&server, LONG, &json!({}));
    let answer = complete(&server, LONG, &json!({}));
    let report = &answer["nvext"]["cache_report"];
    let of = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(of("device_tokens"), cached(&answer));
    let all = [
        "device_tokens",
        "host_tokens",
        "storage_tokens",
        "computed_tokens",
    ];
    let sum = all.map(of).iter().sum::<u64>();
    assert_eq!(sum, answer["usage"]["prompt_tokens"].as_u64().unwrap());
}

/// `kv_hints` inside a request: the outcomes by action.
fn outcomes(answer: &Value) -> Vec<(String, String)> {
    let told = answer["outcomes"].as_array().unwrap();
    let text = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    told.iter()
        .map(|one| (text(one, "action_id"), text(one, "status")))
        .collect()
}

#[test]
fn verbs_inside_requests_are_carried_out_on_every_api_and_answered() {
    let server = server();
    complete(
        &server,
        LONG,
        &json!({"nvext": {"agent_hints": {"program_id": "sub"}}}),
    );
    let pinned = |server: &Server| stats(server)["pins"]["pages"].as_u64().unwrap();
    let hints = |kind: &str| {
        json!({"protocol_version": "0.1", "message_id": "m", "actions": [
            {"action_id": "theirs", "action_type": kind, "payload": {"session": "sub"}},
            {"action_id": "own", "action_type": "kv.pin", "payload": {"ttl": "5m"}},
            {"action_id": "odd", "action_type": "kv.fly"}]})
    };
    let wanted = |theirs: &str| {
        let all = [("theirs", theirs), ("own", "deferred"), ("odd", "rejected")];
        all.map(|(id, status)| (id.to_owned(), status.to_owned()))
            .to_vec()
    };
    // The session has three pages, and the request's own prompt as many.
    let other = LONG.to_uppercase();
    let extra = json!({"kv_hints": hints("kv.pin")});
    let answer = complete(&server, &other, &extra);
    assert_eq!(outcomes(&answer["nvext"]["kv_hints"]), wanted("accepted"));
    let report = &answer["nvext"]["cache_report"]["pins"];
    assert_eq!(
        (&report["accepted"], &report["pages"]),
        (&json!(1), &json!(3))
    );
    assert_eq!(pinned(&server), 6);
    let release = json!({"kv_hints": hints("kv.release")});
    let salted = json!({"cache_salt": "else"});
    let asked = |path: &str, mut body: Value| {
        merge(&mut body, &release);
        merge(&mut body, &salted);
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    };
    let talk = json!([{"role": "user", "content": format!("{LONG}~ab")}]);
    let chat = asked(
        "/v1/chat/completions",
        json!({"messages": talk, "max_tokens": 3}),
    );
    assert_eq!(
        outcomes(&chat["nvext"]["kv_hints"]),
        wanted("missing"),
        "another salt"
    );
    let whole = asked(
        "/v1/responses",
        json!({"input": talk, "max_output_tokens": 16}),
    );
    assert_eq!(outcomes(&whole["nvext"]["kv_hints"]), wanted("missing"));
    let message = asked("/v1/messages", json!({"messages": talk, "max_tokens": 3}));
    let id = message["id"].as_str().unwrap();
    let why = server
        .get(&format!("/v1/kv/why/{id}?cache_salt=else"))
        .json();
    assert_eq!(outcomes(&why["kv_hints"]), wanted("missing"), "{why}");
    // The other salt has not undone anything; its own pins came in addition.
    assert!(pinned(&server) > 6);
    let mine = json!({"kv_hints": hints("kv.release"), "nvext": {}});
    let answer = complete(&server, LONG, &mine);
    assert_eq!(outcomes(&answer["nvext"]["kv_hints"])[0].1, "accepted");
    // What is no envelope is noted, and the request runs.
    let odd = json!({"kv_hints": {"actions": "all"}});
    let answer = complete(&server, LONG, &odd);
    let notes = answer["nvext"]["ignored_fields"].to_string();
    assert!(notes.contains("kv_hints"), "{answer}");
}

#[test]
fn a_program_is_pinned_with_all_its_branches() {
    let server = server();
    let session = json!({"nvext": {"agent_hints": {"program_id": "tree"}}});
    let shared = &LONG[..32];
    for tail in ["A", "B", "C"] {
        complete(&server, &format!("{shared}{}", tail.repeat(18)), &session);
    }
    let pinned = status(&server, "kv.pin", &json!({"program": "tree", "ttl": "1h"}));
    // Two shared pages, and one of each of three branches.
    assert_eq!(pinned, ("accepted".into(), 5));
    assert_eq!(stats(&server)["pins"]["pages"], 5);
    let released = status(&server, "kv.release", &json!({"program": "tree"}));
    assert_eq!(released, ("accepted".into(), 5));
    assert_eq!(stats(&server)["pins"]["pages"], 0);
    let raised = json!({"program": "tree", "priority": 3});
    assert_eq!(
        status(&server, "kv.retain", &raised),
        ("accepted".into(), 5)
    );
    let ahead = json!({"program": "tree"});
    assert_eq!(
        status(&server, "kv.prefetch", &ahead),
        ("accepted".into(), 5)
    );
}
