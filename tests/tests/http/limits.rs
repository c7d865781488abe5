//! Limits of the HTTP side: sizes, counts, times. Each test has a small server of its own.

use crate::client::Open;
use crate::server::{ParrotSetup, Server, until};
use rootstock_engine::service::ServiceConfig;
use rootstock_server::app::ApiOptions;
use rootstock_server::config::HttpLimits;
use serde_json::{Value, json};

fn with_limits(limits: HttpLimits) -> Server {
    Server::parrot(ParrotSetup {
        limits,
        ..ParrotSetup::default()
    })
}

fn completion(prompt: &str) -> Value {
    json!({"model": "m", "prompt": prompt, "max_tokens": 100})
}

#[test]
fn a_body_over_the_limit_is_413_whether_declared_or_chunked() {
    let server = with_limits(HttpLimits {
        max_body_bytes: 1000,
        ..HttpLimits::default()
    });
    let answer = server.post("/v1/completions", &completion(&"x".repeat(2000)));
    assert_eq!(answer.status, 413);
    assert_eq!(answer.json()["error"]["code"], "body_too_large");
    let mut open = Open::start(server.address);
    open.raw(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("200\r\n{}\r\n", "x".repeat(512));
    open.raw(chunk.as_bytes());
    open.raw(chunk.as_bytes());
    open.raw(b"0\r\n\r\n");
    assert_eq!(open.answer().status, 413);
    assert_eq!(
        server.post("/v1/completions", &completion("~x")).status,
        200
    );
}

#[test]
fn no_answer_is_longer_than_the_server_allows_whatever_was_asked_for() {
    let server = Server::parrot(ParrotSetup {
        options: ApiOptions {
            max_output_tokens: 8,
            ..ApiOptions::default()
        },
        ..ParrotSetup::default()
    });
    let talk = json!([{"role": "user", "content": "say~abcdefghijklmnop"}]);
    let asked = [
        (
            "/v1/completions",
            json!({"prompt": "~abcdefghijkl", "max_tokens": 100}),
        ),
        ("/v1/chat/completions", json!({"messages": talk})),
        (
            "/v1/chat/completions",
            json!({"messages": talk, "max_completion_tokens": 9}),
        ),
        (
            "/v1/messages",
            json!({"messages": talk, "max_tokens": 32_000}),
        ),
        ("/v1/responses", json!({"input": talk})),
    ];
    for (path, body) in asked {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        let usage = answer.json()["usage"].clone();
        let said = [&usage["completion_tokens"], &usage["output_tokens"]];
        assert!(said.iter().any(|tokens| **tokens == 8), "{path}: {usage}");
    }
    let short = json!({"messages": talk, "max_tokens": 3});
    let answer = server.post("/v1/chat/completions", &short).json();
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn heads_of_too_many_bytes_or_headers_are_refused() {
    let server = with_limits(HttpLimits::default());
    let mut open = Open::start(server.address);
    let head = format!(
        "GET /health HTTP/1.1\r\nhost: t\r\nx: {}\r\n\r\n",
        "a".repeat(100_000)
    );
    let refused = open.raw_until_refused(head.as_bytes());
    assert!(matches!(refused, None | Some(431)), "{refused:?}");
    let mut open = Open::start(server.address);
    let mut head = String::from("GET /health HTTP/1.1\r\nhost: t\r\n");
    for number in 0..200 {
        head.push_str(&format!("x-{number}: y\r\n"));
    }
    head.push_str("\r\n");
    assert_eq!(open.raw_until_refused(head.as_bytes()), Some(431));
}

#[test]
fn a_client_that_never_ends_its_head_or_its_body_is_let_go() {
    let server = with_limits(HttpLimits {
        read_timeout_s: 1,
        ..HttpLimits::default()
    });
    let mut head = Open::start(server.address);
    head.raw(b"GET /health HTTP/1.1\r\nhos");
    let mut body = Open::start(server.address);
    body.raw(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 10\r\n\r\n{");
    assert_eq!(body.head().0, 408);
    assert!(head.is_closed());
}

#[test]
fn beyond_the_connection_cap_clients_are_told_so() {
    let server = with_limits(HttpLimits {
        max_connections: 2,
        ..HttpLimits::default()
    });
    let mut kept: Vec<Open> = (0..2).map(|_| Open::start(server.address)).collect();
    for open in &mut kept {
        open.request("GET", "/health", &[], "");
        assert_eq!(open.answer().status, 200);
    }
    let mut third = Open::start(server.address);
    let answer = third.answer();
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    drop(kept);
}

#[test]
fn a_thousand_idle_connections_and_a_hundred_megabytes_leave_the_server_responsive() {
    let server = with_limits(HttpLimits::default());
    let idle: Vec<Open> = (0..1000).map(|_| Open::start(server.address)).collect();
    let ask = || server.post("/v1/completions", &completion("~here")).json();
    assert_eq!(ask()["choices"][0]["text"], "here");
    // Declared, the body is refused unread; in pieces, it is refused at the limit.
    let mut declared = Open::start(server.address);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\n";
    declared.raw(format!("{head}content-length: 104857600\r\n\r\n").as_bytes());
    assert_eq!(declared.answer().status, 413);
    let mut pieces = Open::start(server.address);
    pieces.raw(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes());
    let piece = format!("100000\r\n{}\r\n", " ".repeat(1 << 20)).repeat(100);
    let refused = pieces.raw_until_refused(piece.as_bytes());
    assert!(refused.is_none_or(|status| status == 413), "{refused:?}");
    assert_eq!(ask()["choices"][0]["text"], "here");
    drop(idle);
}

#[test]
fn a_full_queue_is_429_with_a_wait() {
    let service = ServiceConfig {
        max_running: 1,
        max_queue: 1,
        ..ServiceConfig::default()
    };
    let server = Server::parrot(ParrotSetup {
        service,
        ..ParrotSetup::default()
    });
    let mut running = Open::start(server.address);
    running.post("/v1/completions", &completion("~a@"));
    server.perch.until_holding();
    let mut queued = Open::start(server.address);
    queued.post("/v1/completions", &completion("~queued"));
    server.until_stats(|stats| stats.admitted == 2);
    let refused = server.post("/v1/completions", &completion("~late"));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    let wait: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!(wait >= 1);
    server.perch.open();
    assert_eq!(running.answer().status, 200);
    assert_eq!(queued.answer().json()["choices"][0]["text"], "queued");
}

/// Whoever is told to come back is told when, whatever API it speaks and why it is sent away.
#[test]
fn every_api_names_the_wait_with_a_full_queue_and_while_draining() {
    let server = Server::parrot(ParrotSetup {
        service: ServiceConfig {
            max_running: 1,
            max_queue: 1,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    });
    let mut running = Open::start(server.address);
    running.post("/v1/completions", &completion("~a@"));
    server.perch.until_holding();
    let mut queued = Open::start(server.address);
    queued.post("/v1/completions", &completion("~queued"));
    server.until_stats(|stats| stats.admitted == 2);
    let said = json!([{"role": "user", "content": "~late"}]);
    let apis = [
        ("/v1/completions", completion("~late")),
        (
            "/v1/chat/completions",
            json!({"model": "m", "messages": said, "max_tokens": 9}),
        ),
        (
            "/v1/messages",
            json!({"model": "m", "messages": said, "max_tokens": 9}),
        ),
        (
            "/v1/responses",
            json!({"model": "m", "input": "~late", "max_output_tokens": 9}),
        ),
    ];
    let refused = |status: u16| {
        for (route, body) in &apis {
            for stream in [false, true] {
                let mut body = body.clone();
                body["stream"] = stream.into();
                let answer = server.post(route, &body);
                assert_eq!(answer.status, status, "{route}: {}", answer.body);
                let wait = answer.header("retry-after").unwrap_or_default();
                assert!(wait.parse().is_ok_and(|s: u32| s >= 1), "{route}: {wait:?}");
                assert!(answer.json()["error"]["message"].is_string(), "{route}");
            }
        }
    };
    refused(429);
    server.begin_drain();
    until("the drain", || server.get("/ready").status == 503);
    refused(503);
    server.perch.open();
    assert_eq!(running.answer().status, 200);
    assert_eq!(queued.answer().json()["choices"][0]["text"], "queued");
}

#[test]
fn a_prompt_beyond_the_whole_pool_is_refused_at_once_and_the_next_one_served() {
    let server = Server::parrot(ParrotSetup {
        pages: 49,
        ..ParrotSetup::default()
    });
    let answer = server.post("/v1/completions", &completion(&"x".repeat(1002)));
    assert_eq!(answer.status, 400, "{}", answer.body);
    let message = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("63") && message.contains("49"),
        "{message}"
    );
    assert_eq!(
        server.post("/v1/completions", &completion("~four")).status,
        200
    );
}

#[test]
fn flushing_refuses_while_something_runs_and_empties_everything_when_idle() {
    let server = with_limits(HttpLimits::default());
    let prompt = format!("{}~done", "warm ".repeat(20));
    let cached = |server: &Server| {
        let answer = server.post("/v1/completions", &completion(&prompt)).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(cached(&server), 0);
    assert!(cached(&server) > 0);
    let mut running = Open::start(server.address);
    running.post("/v1/completions", &completion("~a@"));
    server.perch.until_holding();
    let refused = crate::client::send(server.address, "POST", "/flush_cache", "");
    assert_eq!(refused.status, 409, "{}", refused.body);
    server.perch.open();
    assert_eq!(running.answer().status, 200);
    server.until_stats(|stats| stats.live == 0);
    assert!(cached(&server) > 0, "a refused flush has changed nothing");
    server.until_stats(|stats| stats.live == 0);
    let flushed = crate::client::send(server.address, "POST", "/flush_cache", "");
    assert_eq!(flushed.status, 200, "{}", flushed.body);
    assert_eq!(cached(&server), 0);
}
