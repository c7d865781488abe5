//! The whole way over a real computation: a small random Llama whose weights are made here, so
//! that nothing is downloaded. Texts must not depend on what else runs, on the size of the pool or
//! on the number of steps in flight; priorities must show in what stays cached.

use crate::server::Server;
use crate::tiny_model::TinyModel;
use rootstock::radix::PolicyKind;
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

fn start(config: ServiceConfig) -> Server {
    let model = TinyModel::with_weights();
    Server::model(
        &model.path,
        ServiceConfig {
            threads: Some(2),
            ..config
        },
    )
}

fn flush(server: &Server) {
    server.until_stats(|stats| stats.live == 0);
    let flushed = crate::client::send(server.address, "POST", "/flush_cache", "");
    assert_eq!(flushed.status, 200, "{}", flushed.body);
}

/// Eight requests of different lengths: half greedy, half drawn by seed.
fn streams() -> Vec<Value> {
    (0..8_u64)
        .map(|index| {
            let prompt: Vec<u64> = (0..40 + 17 * index)
                .map(|at| (at * 31 + index) % 256)
                .collect();
            json!({
                "model": "m", "prompt": prompt, "max_tokens": 60 + 11 * index, "stream": true,
                "ignore_eos": true, "seed": 1000 + index,
                "temperature": if index % 2 == 0 { 0.0 } else { 1.0 },
                "nvext": {"extra_fields": ["completion_token_ids"]},
            })
        })
        .collect()
}

/// The token ids of one streamed completion.
fn ids(server: &Server, body: &Value) -> Vec<u64> {
    let answer = server.post("/v1/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.is_done(), "{}", answer.body);
    answer
        .events()
        .iter()
        .filter_map(|event| event["nvext"]["completion_token_ids"].as_array().cloned())
        .flatten()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

fn eight_streams_equal_each_alone(max_in_flight: u8) {
    // 40 pages hold 640 tokens; the eight want more than 1,700.
    let server = start(ServiceConfig {
        device_pages: Some(40),
        page_size: 16,
        step_tokens: 64,
        max_in_flight: Some(max_in_flight),
        ..ServiceConfig::default()
    });
    let bodies = streams();
    let alone: Vec<Vec<u64>> = bodies
        .iter()
        .map(|body| {
            flush(&server);
            ids(&server, body)
        })
        .collect();
    for (ids, body) in alone.iter().zip(&bodies) {
        assert_eq!(ids.len() as u64, body["max_tokens"].as_u64().unwrap());
    }
    flush(&server);
    let together: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let server = &server;
        let threads: Vec<_> = bodies
            .iter()
            .map(|body| scope.spawn(move || ids(server, body)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for (index, (alone, together)) in alone.iter().zip(&together).enumerate() {
        assert_eq!(together, alone, "stream {index} depends on its company");
    }
    let preemptions = server.metric("rootstock_preemptions_total");
    let evicted = server.metric("rootstock_evicted_pages_total{tier=\"device\",replica=\"0\"}");
    println!("in flight {max_in_flight}: {preemptions} preemptions, {evicted} pages evicted");
    assert!(
        preemptions > 0.0 && evicted > 0.0,
        "the pool was not small enough to show anything"
    );
}

#[test]
fn eight_streams_on_a_tiny_pool_equal_each_alone() {
    eight_streams_equal_each_alone(1);
}

#[test]
fn eight_streams_with_two_steps_in_flight_equal_each_alone() {
    eight_streams_equal_each_alone(2);
}

/// Conversations of each of the two agents, and turns of each conversation.
const CONVERSATIONS: u64 = 6;
const TURNS: u64 = 8;

/// What one agent reuses of each turn's prefix, in tokens: (prefix, cached) summed by turn.
type Table = Vec<[(u64, u64); 2]>;

/// Two agents with equal traffic and a pool for one: 6 conversations of 19 pages each.
fn two_agents(policy: PolicyKind) -> Table {
    let server = start(ServiceConfig {
        device_pages: Some(145),
        // What leaves the device is gone: with a host tier it would be worth copying back or not by
        // how fast the machine computes at the moment.
        host_pages: Some(0),
        policy,
        ..ServiceConfig::default()
    });
    let mut table = Vec::new();
    for turn in 0..TURNS {
        let mut row = [(0, 0); 2];
        for conversation in 0..CONVERSATIONS {
            for (agent, priority) in [(0_usize, 10), (1, 0)] {
                // The history is what was sent before; each turn adds 38 tokens to it.
                let tokens = |turns: u64| {
                    let all = (0..turns * 38)
                        .map(|at| (at * 7 + at / 13 + conversation * 41 + agent as u64 * 97) % 256);
                    all.collect::<Vec<u64>>()
                };
                let body = json!({"model": "m", "prompt": tokens(turn + 1), "max_tokens": 2,
                    "temperature": 0, "ignore_eos": true,
                    "nvext": {"agent_hints": {"priority": priority}}});
                let answer = server.post("/v1/completions", &body);
                assert_eq!(answer.status, 200, "{}", answer.body);
                let cached = &answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
                row[agent].0 += turn * 38 / 16 * 16;
                row[agent].1 += cached.as_u64().unwrap();
            }
        }
        table.push(row);
    }
    table
}

fn print_table(name: &str, table: &Table) {
    println!("{name}: cached of reusable tokens, {CONVERSATIONS} conversations, per turn");
    println!("turn  priority 10    priority 0");
    for (turn, [(high_all, high), (low_all, low)]) in table.iter().enumerate() {
        println!(
            "{:>4}  {high:>5}/{high_all:<5}   {low:>5}/{low_all:<5}",
            turn + 1
        );
    }
}

fn share(table: &Table, agent: usize) -> f64 {
    let all: u64 = table.iter().map(|row| row[agent].0).sum();
    let cached: u64 = table.iter().map(|row| row[agent].1).sum();
    cached as f64 / all as f64
}

#[test]
fn with_a_pool_for_one_of_two_agents_the_important_one_keeps_its_prefix() {
    let by_priority = two_agents(PolicyKind::Priority);
    print_table("priority", &by_priority);
    for (turn, row) in by_priority.iter().enumerate().skip(1) {
        let (all, cached) = row[0];
        assert!(
            cached * 10 >= all * 9,
            "turn {}: {cached} of {all} tokens",
            turn + 1
        );
    }
    let by_recency = two_agents(PolicyKind::Lru);
    print_table("lru", &by_recency);
    assert!(
        share(&by_recency, 0) < share(&by_priority, 0),
        "priority makes the difference"
    );
    assert!(
        share(&by_priority, 1) < 0.9,
        "the pool was large enough for both"
    );
}

#[test]
fn the_same_chat_again_is_cached_up_to_the_last_page_and_gives_the_same_text() {
    let server = start(ServiceConfig {
        device_pages: Some(200),
        ..ServiceConfig::default()
    });
    let body = json!({"model": "m", "temperature": 0, "max_tokens": 20, "ignore_eos": true,
        "messages": [{"role": "user", "content": "Tell me something about roots and stocks."}]});
    let cold = server.post("/v1/chat/completions", &body).json();
    let warm = server.post("/v1/chat/completions", &body).json();
    assert_eq!(cold["choices"][0]["message"], warm["choices"][0]["message"]);
    let prompt = warm["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    assert!(cached + 16 >= prompt, "{cached} of {prompt}");
}

#[test]
fn seeds_make_drawn_texts_repeatable_and_answers_of_one_request_differ() {
    let server = start(ServiceConfig {
        device_pages: Some(200),
        ..ServiceConfig::default()
    });
    let body = json!({"model": "m", "prompt": "abc", "max_tokens": 24, "seed": 7, "n": 3,
        "ignore_eos": true, "nvext": {"extra_fields": ["completion_token_ids"]}});
    let texts = |body: &Value| {
        let answer = server.post("/v1/completions", body).json();
        let choices = answer["choices"].as_array().unwrap().clone();
        choices
            .iter()
            .map(|choice| choice["text"].clone())
            .collect::<Vec<_>>()
    };
    let first = texts(&body);
    assert_eq!(texts(&body), first);
    assert!(first[0] != first[1] && first[1] != first[2]);
    let mut single = body.clone();
    single["n"] = json!(1);
    assert_eq!(
        texts(&single)[0],
        first[0],
        "the first answer is that of n = 1"
    );
}
