//! `hit_curve` of `/v1/kv/stats`: against what a plain list of prompts finds at each capacity.

use serde_json::{Value, json};

use crate::server::{ParrotSetup, Server};
use rootstock::radix::PolicyKind;
use rootstock_engine::service::ServiceConfig;

const PAGES: u32 = 64;
/// Of a prompt: two pages, and one token that is always computed.
const PROMPT_PAGES: u64 = 2;
const PROMPT_TOKENS: u64 = 33;
const CACHED_TOKENS: u64 = 32;
const PROMPTS: u64 = 60;
const REQUESTS: u64 = 300;

fn server(policy: PolicyKind) -> Server {
    Server::parrot(ParrotSetup {
        service: ServiceConfig {
            page_size: 16,
            policy,
            ..ServiceConfig::default()
        },
        pages: PAGES,
        ..ParrotSetup::default()
    })
}

/// Which prompts are asked for, in order; some much more often than others.
fn load() -> Vec<u64> {
    let mut state = 7_u64;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % PROMPTS
    };
    (0..REQUESTS).map(|_| draw().min(draw())).collect()
}

/// Tokens that so many pages find when the least recently used goes first.
fn found_by_recency(load: &[u64], pages: u64) -> u64 {
    let mut recent: Vec<u64> = Vec::new();
    let mut found = 0;
    for &prompt in load {
        if let Some(at) = recent.iter().position(|&one| one == prompt) {
            let fits = (at as u64 + 1) * PROMPT_PAGES <= pages;
            found += if fits { CACHED_TOKENS } else { 0 };
            recent.remove(at);
        }
        recent.insert(0, prompt);
    }
    found
}

fn count(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

#[test]
fn the_hit_curve_of_least_recently_used_is_that_of_a_plain_list_and_the_policys_fits_it() {
    let (server, load) = (server(PolicyKind::Agent), load());
    for which in &load {
        let page = format!("prompt {which:9}");
        let body = json!({"prompt": format!("{page}{page}."), "max_tokens": 1});
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let stats = server.get("/v1/kv/stats").json();
    let curve = &stats["hit_curve"];
    assert_eq!(curve["lookup_tokens"], REQUESTS * PROMPT_TOKENS);
    assert_eq!(curve["hit_tokens"], stats["tiers"][0]["hit_tokens"]);
    let points = curve["points"].as_array().unwrap();
    let sizes: Vec<u64> = points.iter().map(|point| count(&point["pages"])).collect();
    assert_eq!(sizes, [8, 16, 32, 48, 64, 128, 256]);
    let two_points = REQUESTS * PROMPT_TOKENS / 50;
    let by_recency: Vec<u64> = sizes.iter().map(|&n| found_by_recency(&load, n)).collect();
    for (point, real) in points.iter().zip(&by_recency) {
        let off = real.abs_diff(count(&point["lru_hit_tokens"]));
        assert!(off <= two_points, "{real} is right: {point}");
    }
    let policy: Vec<u64> = points.iter().map(|one| count(&one["hit_tokens"])).collect();
    assert!(policy.is_sorted(), "{policy:?}");
    assert_eq!(policy[4], count(&curve["hit_tokens"]), "its own capacity");
    // Where everything fits the order does not matter; the policy sees the clock of a busy machine.
    assert_eq!(by_recency[5], by_recency[6]);
    for size in [5, 6] {
        assert!(
            by_recency[size].abs_diff(policy[size]) <= 4 * two_points,
            "{policy:?} for {by_recency:?}"
        );
    }
    // The sizes differ enough for that to say something.
    let apart = |pair: &[u64]| pair[1] > pair[0] + 2 * two_points;
    assert!(by_recency[..6].windows(2).all(apart), "{by_recency:?}");
}

#[test]
fn without_the_policy_there_is_no_curve() {
    let stats = server(PolicyKind::Lru).get("/v1/kv/stats").json();
    assert_eq!(stats["hit_curve"], Value::Null);
}
