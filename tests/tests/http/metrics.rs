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

/// Names that a text of metrics has, with the suffixes of their samples.
fn names(text: &str) -> std::collections::BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let name = |line: &str| line.split(['{', ' ']).next().unwrap().to_owned();
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let histograms = families.filter_map(|line| line.strip_suffix(" histogram"));
    let buckets = histograms.map(|name| format!("{name}_bucket"));
    samples.map(name).chain(buckets).collect()
}

/// Words of a text that are names of metrics.
fn mentioned(text: &str) -> std::collections::BTreeSet<String> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    let ours = words.filter(|word| word.starts_with("rootstock_"));
    ours.map(str::to_owned).collect()
}

#[test]
fn every_expression_of_the_dashboard_and_every_name_in_the_docs_is_a_metric_of_the_server() {
    let server = Server::parrot(ParrotSetup::default());
    let body = json!({"prompt": "~ab", "max_tokens": 9});
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    let known = names(&server.get("/metrics").body);
    // Only with a store are there numbers of one.
    let exists = |name: &String| {
        let is_family = known.iter().any(|one| {
            let rest = one.strip_prefix(name.as_str());
            rest.is_some_and(|rest| matches!(rest, "" | "_bucket" | "_total" | "_info"))
        });
        is_family || name.starts_with("rootstock_storage_")
    };
    let dashboard = include_str!("../../../docs/grafana.json");
    let parsed: Value = serde_json::from_str(dashboard).unwrap();
    let mut expressions = 0;
    for panel in parsed["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let used = mentioned(expression);
            assert!(!used.is_empty(), "{expression}");
            let unknown: Vec<_> = used.iter().filter(|name| !exists(name)).collect();
            assert!(unknown.is_empty(), "{unknown:?} in {expression}");
            expressions += 1;
        }
    }
    assert!(expressions > 30, "{expressions}");
    let docs = mentioned(include_str!("../../../docs/metrics.md"));
    let unknown: Vec<_> = docs.iter().filter(|name| !exists(name)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn times_are_by_class_of_the_request_and_of_the_step_and_prompts_by_kind_and_source() {
    let server = Server::parrot(ParrotSetup::default());
    let ask = |hints: Value| {
        let body = json!({"messages": [{"role": "system", "content": "s".repeat(64)},
            {"role": "user", "content": "~abc"}], "max_tokens": 9,
            "nvext": {"agent_hints": hints}});
        assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    };
    ask(json!({}));
    ask(json!({"priority": 3}));
    ask(json!({"priority": -3}));
    ask(json!({"latency_sensitivity": 2.0}));
    for class in ["normal", "high", "low", "urgent"] {
        for name in ["ttft", "queue", "tpot", "request"] {
            let count = format!("rootstock_{name}_seconds_count{{class=\"{class}\"}}");
            assert_eq!(server.metric(&count), 1.0, "{count}");
        }
        let gaps = format!("rootstock_inter_token_seconds_count{{class=\"{class}\"}}");
        assert!(server.metric(&gaps) >= 1.0, "{gaps}");
    }
    let steps = |class: &str| {
        server.metric(&format!(
            "rootstock_step_seconds_count{{class=\"{class}\"}}"
        ))
    };
    assert!(steps("prefill") >= 1.0 && steps("decode") >= 1.0);
    assert_eq!(
        ["prefill", "decode", "mixed", "copies"]
            .map(steps)
            .iter()
            .sum::<f64>(),
        server.metric("rootstock_steps_total")
    );
    let kind = |kind: &str, source: &str| {
        let name = "rootstock_prompt_kind_tokens_total";
        server.metric(&format!("{name}{{kind=\"{kind}\",source=\"{source}\"}}"))
    };
    assert!(kind("system", "computed") >= 64.0);
    assert!(kind("system", "device") >= 3.0 * 64.0, "found three times");
    let text = server.get("/metrics").body;
    let samples = text
        .lines()
        .filter(|line| line.starts_with("rootstock_prompt_kind_tokens_total{"));
    let sum: f64 = samples
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum();
    assert_eq!(
        sum,
        server.metric(PROMPT),
        "every token has a kind and a source"
    );
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
