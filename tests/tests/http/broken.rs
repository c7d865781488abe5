//! When it breaks (E6) and when the client is gone (J3), over a backend that fails, panics and
//! waits on command. Each test has a server of its own, because it breaks it.

use crate::client::Open;
use crate::server::{ParrotSetup, Server};
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

const CANCELLED: &str = "rootstock_answers_total{outcome=\"cancelled\"}";

fn parrot() -> Server {
    Server::parrot(ParrotSetup::default())
}

fn completion(prompt: &str, stream: bool) -> Value {
    json!({"model": "m", "prompt": prompt, "max_tokens": 1000, "stream": stream})
}

fn chat(prompt: &str, stream: bool) -> Value {
    json!({"model": "m", "max_tokens": 1000, "stream": stream,
        "messages": [{"role": "user", "content": prompt}]})
}

/// Nothing is leased, held or running, and the whole pool is free or cached.
fn assert_idle(server: &Server) {
    server.until_stats(|stats| {
        stats.live == 0
            && stats.core.as_ref().is_some_and(|core| {
                core.cache.tiers.iter().all(|tier| {
                    tier.leased == 0 && tier.held == 0 && tier.free + tier.evictable == tier.total
                })
            })
    });
    assert_eq!(server.service.stats().idle_breaches, 0);
}

fn assert_serves(server: &Server) {
    let answer = server.post("/v1/completions", &completion("~after", false));
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.json()["choices"][0]["text"], "after");
}

// E6

#[test]
fn a_failure_in_a_stream_is_one_error_event_and_the_end_of_the_connection() {
    let server = parrot();
    for (route, body) in [
        ("/v1/completions", completion("~abc^def", true)),
        ("/v1/chat/completions", chat("~abc^def", true)),
        ("/v1/completions", completion("~abc`def", true)),
    ] {
        let mut open = Open::start(server.address);
        open.post(route, &body);
        let answer = open.answer();
        assert_eq!(answer.status, 200);
        assert_eq!(
            answer.body.matches("\"error\"").count(),
            1,
            "{}",
            answer.body
        );
        assert!(
            !answer.is_done(),
            "a broken stream does not say that it is done"
        );
        let (last, before) = {
            let mut events = answer.events();
            (events.pop().unwrap(), events)
        };
        assert_eq!(last["error"]["type"], "server_error");
        assert!(
            before
                .iter()
                .all(|event| event["choices"][0]["finish_reason"].is_null())
        );
        let said: String = before
            .iter()
            .filter_map(|event| {
                let choice = &event["choices"][0];
                choice["text"]
                    .as_str()
                    .or(choice["delta"]["content"].as_str())
            })
            .collect();
        assert_eq!(said, "abc", "what was certain was sent");
        assert!(open.is_closed());
        assert_serves(&server);
        assert_idle(&server);
    }
}

#[test]
fn a_failure_without_a_stream_is_a_500() {
    let server = parrot();
    let answer = server.post("/v1/completions", &completion("~abc^", false));
    assert_eq!(answer.status, 500);
    assert_eq!(answer.json()["error"]["type"], "server_error");
    assert_serves(&server);
}

#[test]
fn validation_failures_never_start_a_stream() {
    let server = parrot();
    let mut body = completion("~x", true);
    body["n"] = json!(0);
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 400);
    assert_eq!(answer.header("content-type"), Some("application/json"));
}

#[test]
fn a_dead_engine_is_told_by_readiness_and_by_each_request() {
    let server = parrot();
    assert_eq!(server.get("/ready").status, 200);
    server.perch.lose();
    let mut open = Open::start(server.address);
    open.post("/v1/completions", &completion("~abc", true));
    let answer = open.answer();
    assert_eq!(
        answer.events().last().unwrap()["error"]["type"],
        "server_error"
    );
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(
        server.get("/health").status,
        200,
        "the process itself lives"
    );
    let answer = server.post("/v1/completions", &completion("~abc", false));
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "engine_unavailable");
}

// J3

#[test]
fn a_client_that_leaves_in_decode_stops_the_work_within_one_step() {
    for stream in [true, false] {
        for (route, body) in [
            (
                "/v1/completions",
                completion(&format!("~ab@{}", "c".repeat(500)), stream),
            ),
            (
                "/v1/chat/completions",
                chat(&format!("~ab@{}", "c".repeat(500)), stream),
            ),
        ] {
            let server = parrot();
            let mut open = Open::start(server.address);
            open.post(route, &body);
            server.perch.until_holding();
            drop(open);
            server.until_metric(CANCELLED, 1.0);
            server.perch.open();
            assert_idle(&server);
            let drawn = server.perch.drawn_by_latest();
            assert!(
                drawn <= 4,
                "{route} stream {stream}: {drawn} tokens after the client left"
            );
            let generated = server.service.stats().generated_tokens;
            assert!(generated >= 2, "{generated} tokens accounted for");
            assert_serves(&server);
        }
    }
}

#[test]
fn a_half_closed_client_counts_as_gone() {
    let server = parrot();
    let mut open = Open::start(server.address);
    open.post("/v1/completions", &completion("~ab@cdef", false));
    server.perch.until_holding();
    open.half_close();
    server.until_metric(CANCELLED, 1.0);
    server.perch.open();
    assert_idle(&server);
}

#[test]
fn a_client_that_leaves_while_queued_or_in_prefill_costs_nothing_more() {
    let setup = ParrotSetup {
        service: ServiceConfig {
            max_running: 1,
            step_tokens: 16,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    };
    let server = Server::parrot(setup);
    let mut first = Open::start(server.address);
    first.post("/v1/completions", &completion("~first@", false));
    server.perch.until_holding();
    // 100 chunks of prefill, waiting behind the first; its client leaves while it is queued.
    let mut queued = Open::start(server.address);
    queued.post("/v1/completions", &completion(&"q".repeat(1600), true));
    server.until_stats(|stats| stats.admitted == 2);
    drop(queued);
    server.until_metric(CANCELLED, 1.0);
    let computed = server.perch.computed();
    server.perch.open();
    assert_eq!(first.answer().json()["choices"][0]["text"], "first@");
    assert_serves(&server);
    assert_idle(&server);
    let since = server.perch.computed() - computed;
    assert!(
        since < 200,
        "{since} positions computed for a client that had left"
    );
}

#[test]
fn a_client_that_leaves_in_prefill_stops_it_between_chunks() {
    let setup = ParrotSetup {
        service: ServiceConfig {
            step_tokens: 16,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    };
    let server = Server::parrot(setup);
    // One request holds the step in which the other's prefill begins.
    let mut holder = Open::start(server.address);
    holder.post("/v1/completions", &completion("~h@", false));
    server.perch.until_holding();
    let mut leaver = Open::start(server.address);
    leaver.post("/v1/completions", &completion(&"p".repeat(1600), true));
    server.until_stats(|stats| stats.admitted == 2);
    let computed = server.perch.computed();
    drop(leaver);
    server.until_metric(CANCELLED, 1.0);
    server.perch.open();
    assert_eq!(holder.answer().status, 200);
    assert_idle(&server);
    let since = server.perch.computed() - computed;
    assert!(
        since < 160,
        "{since} of 1600 positions were computed after the client left"
    );
}
