//! `rootstock serve --device cuda` as a process on the mock driver, with two steps in flight: the
//! texts of the CPU for requests of every kind in company, with a pool too small for all, clients
//! that leave, stop strings, and launches that fail.
#![cfg(all(unix, feature = "cuda"))]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests stop at the first surprise, and say what they saw"
)]

use std::io::{BufRead, Read};

#[path = "../../../kernels/tests/cuda/mock.rs"]
mod mock;
#[path = "support/running.rs"]
#[expect(dead_code, reason = "shared with the tests of the binary")]
mod running;

use mock::{Variant, build};
use running::Running;
use serde_json::{Value, json};

const SERVER: Variant = Variant {
    head_dims: &[16],
    kv_types: &[0],
    sanitized: false,
    fault: None,
};

/// 128 pages of 16 tokens, host pages beside them, and K and V that lose nothing.
const POOL: &[&str] = &[
    "--kv-cache-mib",
    "1",
    "--host-kv-mib",
    "4",
    "--page-size",
    "16",
    "--kv-dtype",
    "f32",
    "--write-policy",
    "through",
];

/// A server on the mock driver; None without a compiler to build that with.
fn on_mock(environment: &[(&str, &str)], arguments: &[&str]) -> Option<Running> {
    let Some(folder) = build(&SERVER) else {
        println!("skipped: no g++ to build the emulated kernels with");
        return None;
    };
    let cache = folder.join("cache");
    let found = [
        ("LD_LIBRARY_PATH", folder.to_str().unwrap()),
        ("XDG_CACHE_HOME", cache.to_str().unwrap()),
    ];
    let environment = [&found[..], environment].concat();
    let device = ["--device", "cuda"];
    Some(Running::start_in(
        &environment,
        &[&device[..], POOL, arguments].concat(),
    ))
}

fn text_of(server: &Running, path: &str, body: &Value) -> (bool, String) {
    let mut answer = String::new();
    let mut socket = server.request(path, &body.to_string());
    socket.read_to_string(&mut answer).unwrap();
    (answer.starts_with("HTTP/1.1 200"), answer)
}

/// What a request was answered: choices, without ids and times.
fn ask(server: &Running, body: &Value) -> Value {
    let (fine, answer) = text_of(server, "/v1/completions", body);
    assert!(fine, "{answer}");
    let json = answer.split("\r\n\r\n").nth(1).unwrap();
    let json: Value = serde_json::from_str(json).unwrap();
    json["choices"].clone()
}

fn metric(server: &Running, name: &str) -> f64 {
    let mut text = String::new();
    server.get("/metrics").read_to_string(&mut text).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name));
    let values: Vec<f64> = lines
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    assert!(!values.is_empty(), "no metric {name}");
    values.iter().sum()
}

fn until(server: &Running, what: &str, reached: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if reached() {
            return;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    panic!("{what} never came: {:?}", server.lines);
}

fn prompt(number: u64, len: u64) -> Vec<u64> {
    (0..len)
        .map(|at| (at * 31 + number * 7 + at * at) % 256)
        .collect()
}

/// Requests of every kind: drawn on the device, drawn on the host for whatever reason, ended by a
/// stop string or by a grammar.
fn kinds() -> Vec<Value> {
    let more = [
        json!({"temperature": 0}),
        json!({"temperature": 0.9, "top_p": 0.9, "seed": 3}),
        json!({"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4}),
        json!({"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3}),
        json!({"temperature": 0, "logit_bias": {"65": 3.5}}),
        json!({"temperature": 0, "logprobs": 2}),
        json!({"temperature": 0, "stop": ["\u{0}", "e", "A"]}),
        json!({"temperature": 0, "min_tokens": 9, "ignore_eos": false}),
        json!({"temperature": 0, "ignore_eos": false, "response_format": {"type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "properties":
                {"a": {"enum": ["left", "right"]}}, "required": ["a"],
                "additionalProperties": false}}}}),
        json!({"temperature": 0, "nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}}),
    ];
    let whole = (0..).zip(more).map(|(number, more)| {
        let mut body = json!({"model": "m", "prompt": prompt(number, 100 + 23 * number),
            "max_tokens": 40 + number, "ignore_eos": true,
            "nvext": {"agent_hints": {"priority": number % 3}}});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    });
    whole.collect()
}

/// The first so many of them, all at the same time.
fn together(server: &Running, count: usize) -> Vec<Value> {
    let bodies = kinds();
    std::thread::scope(|scope| {
        let asked: Vec<_> = bodies[..count]
            .iter()
            .map(|body| scope.spawn(move || ask(server, body)))
            .collect();
        asked.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

/// Numbers that the last bits of a computation reach are left out.
fn words(answers: &[Value]) -> Vec<(Value, Value)> {
    let words = |choice: &Value| (choice["text"].clone(), choice["finish_reason"].clone());
    answers.iter().map(|it| words(&it[0])).collect()
}

#[test]
fn every_kind_of_request_says_on_cuda_what_it_says_on_the_cpu() {
    let Some(cuda) = on_mock(&[], &[]) else {
        return;
    };
    let cpu = Running::start_in(&[], POOL);
    let expected: Vec<Value> = kinds().iter().map(|body| ask(&cpu, body)).collect();
    let expected = words(&expected);
    assert_eq!(words(&together(&cuda, 10)), expected, "two in flight");
    // Now part of it is on the device, part on host.
    assert_eq!(words(&together(&cuda, 5)), expected[..5], "again");
    let preempted = metric(&cuda, "rootstock_preemptions_total");
    let copied = metric(&cuda, "rootstock_copied_pages_total");
    let begun = metric(&cuda, "rootstock_begun_in_transit_total");
    println!("    {preempted} preemptions, {copied} pages copied, {begun} begun in transit");
    assert!(preempted > 0.0, "the pool was not small enough");
    assert!(copied > 0.0);
    let one = on_mock(&[], &["--max-in-flight", "1"]).unwrap();
    assert_eq!(words(&together(&one, 4)), expected[..4], "one in flight");
    let plain = ["--cuda-graphs", "0", "--cuda-library", "false"];
    let plain = on_mock(&[], &plain).unwrap();
    assert_eq!(words(&together(&plain, 4)), expected[..4], "no graphs");
    for server in [cuda, one, plain] {
        server.signal("-TERM");
        assert_eq!(server.wait(), Some(0));
    }
}

#[test]
fn clients_that_leave_give_everything_back() {
    let Some(server) = on_mock(&[], &[]) else {
        return;
    };
    for number in 0..6 {
        let body = json!({"model": "m", "prompt": prompt(number, 90), "max_tokens": 400,
            "ignore_eos": true, "stream": true});
        let mut asked = server.request("/v1/completions", &body.to_string());
        let mut line = String::new();
        // Some leave at once, some after the first words.
        while number % 2 == 0 && !line.starts_with("data:") {
            line.clear();
            assert!(asked.read_line(&mut line).unwrap() > 0);
        }
    }
    until(&server, "the end of all requests", || {
        metric(&server, "rootstock_running_requests") == 0.0
    });
    assert_eq!(metric(&server, "rootstock_idle_breaches_total"), 0.0);
    let body = &kinds()[0];
    assert_eq!(ask(&server, body), ask(&server, body));
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn launches_that_fail_cost_their_requests_and_the_server_goes_on() {
    let Some(server) = on_mock(&[("MOCK_FAIL_LAUNCHES", "149")], &[]) else {
        return;
    };
    let cpu = Running::start_in(&[], POOL);
    let (mut failed, mut answered) = (0, 0);
    for number in 0..24 {
        let body = json!({"model": "m", "prompt": prompt(number, 40), "max_tokens": 3,
            "temperature": 0, "ignore_eos": true});
        let (fine, answer) = text_of(&server, "/v1/completions", &body);
        if fine {
            let json: Value =
                serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
            let expected = ask(&cpu, &body);
            assert_eq!(json["choices"][0]["text"], expected[0]["text"], "{number}");
            answered += 1;
        } else {
            assert!(answer.starts_with("HTTP/1.1 500"), "{answer}");
            failed += 1;
        }
    }
    println!("    {failed} failed, {answered} answered");
    assert!(failed > 2 && answered > 2, "{failed} and {answered}");
    let mut health = String::new();
    server.get("/health").read_to_string(&mut health).unwrap();
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    assert_eq!(metric(&server, "rootstock_idle_breaches_total"), 0.0);
    server.signal("-TERM");
    assert_eq!(server.wait(), Some(0));
}
