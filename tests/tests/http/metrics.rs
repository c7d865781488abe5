//! Metrics that add up (J2): one server, one history of requests, one scrape.

use crate::server::{ParrotSetup, Server};
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

const PROMPT: &str = "rootstock_prompt_tokens_total";
const REUSED: &str = "rootstock_reused_tokens_total{tier=\"device\"}";

fn totals(usage: &Value) -> (u64, u64) {
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    (usage["prompt_tokens"].as_u64().unwrap(), cached)
}

#[test]
fn counters_equal_the_sums_over_the_answers_and_probes_do_not_count() {
    // Chunks of 32 tokens: a request's own earlier chunks must not count as reuse.
    let service = ServiceConfig {
        step_tokens: 32,
        ..ServiceConfig::default()
    };
    let server = Server::parrot(ParrotSetup {
        service,
        ..ParrotSetup::default()
    });
    for probe in ["/health", "/ready", "/metrics", "/v1/models"] {
        assert_eq!(server.get(probe).status, 200);
    }
    assert!(
        !server.get("/metrics").body.contains("NaN"),
        "no requests, no shares"
    );
    assert_eq!((server.metric(PROMPT), server.metric(REUSED)), (0.0, 0.0));

    let long = format!("{}~ab", "prefix ".repeat(30));
    let ask = |n: u64| {
        let body = json!({"prompt": long, "max_tokens": 9, "n": n});
        totals(&server.post("/v1/completions", &body).json()["usage"])
    };
    let answers = [ask(1), ask(1), ask(2)];
    assert_eq!(answers[0].1, 0, "chunks of one prompt are no hits");
    assert!(answers[1].1 > 0);
    let (prompt, cached) = answers
        .iter()
        .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert_eq!(server.metric(PROMPT), prompt as f64);
    assert_eq!(server.metric(REUSED), cached as f64);
    assert_eq!(
        server.metric("rootstock_answers_total{outcome=\"stop\"}"),
        4.0
    );
    assert_eq!(server.metric("rootstock_completion_tokens_total"), 12.0);
    let text = server.get("/metrics").body;
    for name in ["ttft", "tpot", "queue", "step"] {
        assert!(
            text.contains(&format!("rootstock_{name}_seconds_bucket")),
            "{name}: {text}"
        );
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn a_preempted_request_counts_once() {
    // 12 pages of 16: two requests of 10 pages each cannot run side by side to their ends.
    let server = Server::parrot(ParrotSetup {
        pages: 12,
        ..ParrotSetup::default()
    });
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let run = |letter: &str| {
            let say = letter.repeat(70);
            let body = json!({"prompt": format!("~{say}"), "max_tokens": 100});
            let answer = server.post("/v1/completions", &body);
            assert_eq!(answer.status, 200, "{}", answer.body);
            let answer = answer.json();
            assert_eq!(
                answer["choices"][0]["text"], say,
                "nothing lost, nothing doubled"
            );
            answer["usage"].clone()
        };
        let threads: Vec<_> = ["a", "b", "c"]
            .map(|letter| scope.spawn(move || run(letter)))
            .into();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let prompt: u64 = answers.iter().map(|usage| totals(usage).0).sum();
    let cached: u64 = answers.iter().map(|usage| totals(usage).1).sum();
    assert_eq!((prompt, cached), (3 * 71, 0));
    assert_eq!(server.metric(PROMPT), prompt as f64);
    assert_eq!(server.metric(REUSED), 0.0, "resuming is no reuse");
}
