//! The tiers over the real CPU backend and a tiny model: what leaves the device comes back from
//! host, byte for byte; pins survive a flood; replicas share the host tier.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use std::time::Duration;

use rootstock::radix::{CacheStats, Ttl, WritePolicy};
use rootstock::scheduler::Usage;
use rootstock_engine::service::{Event, Service, ServiceConfig, Submission};
use tiny::VOCAB;

const WHOLE_PROMPT: u32 = u32::MAX;

fn config(host_pages: u32, write_policy: WritePolicy) -> ServiceConfig {
    ServiceConfig {
        device_pages: Some(16),
        host_pages: Some(host_pages),
        write_policy,
        // The tiny model computes faster than any copy; real ones do not.
        free_copies: true,
        page_size: 4,
        threads: Some(1),
        ..ServiceConfig::default()
    }
}

fn start(config: ServiceConfig) -> Service {
    Service::start(&tiny::file("qwen3"), config).unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed * 101 + i * i * 7 + i) % VOCAB as u32)
        .collect()
}

fn ask(service: &Service, submission: Submission) -> (Vec<u32>, Usage) {
    let ticket = service.submit(submission).unwrap();
    let mut drawn = Vec::new();
    for event in ticket.events.iter() {
        match event {
            Event::Started { .. } => {}
            Event::Tokens { tokens, .. } => drawn.extend(tokens),
            Event::Final { usage, .. } => return (drawn, usage),
        }
    }
    panic!("the channel closed without a final event");
}

fn pinned(tokens: Vec<u32>, seconds: u64) -> Submission {
    let mut submission = Submission::new(tokens, 4);
    submission.hints.pins.push((
        WHOLE_PROMPT,
        Ttl {
            seconds,
            clamped: false,
        },
    ));
    submission
}

/// Waits until the cache is in a state; copies and expiries come without requests.
fn until(service: &Service, state: impl Fn(&CacheStats) -> bool) {
    for _ in 0..30_000 {
        if state(&service.stats().core.unwrap().cache) {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("{:?}", service.stats().core.unwrap().cache);
}

/// Other prompts, three times what the device holds.
fn flood(service: &Service) {
    for seed in 50..62 {
        ask(service, Submission::new(prompt(seed, 17), 2));
    }
}

#[test]
fn what_left_the_device_comes_back_from_host_and_says_the_same() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        let service = start(config(128, policy));
        let (cold, usage) = ask(&service, Submission::new(prompt(1, 30), 4));
        assert_eq!(usage.cached.total(), 0);
        until(&service, |cache| cache.copies_under_way == 0);
        flood(&service);
        let (warm, usage) = ask(&service, Submission::new(prompt(1, 30), 4));
        assert_eq!(warm, cold, "{policy:?}");
        assert_eq!(
            usage.cached.total(),
            28,
            "{policy:?}: all whole pages: {usage:?}"
        );
        assert!(usage.cached.host > 0, "{policy:?}: {usage:?}");
        let core = service.stats().core.unwrap();
        assert_eq!(core.cache.copies_failed, 0);
    }
}

#[test]
fn a_pin_survives_a_flood_that_evicts_its_like() {
    let service = start(config(12, WritePolicy::Selective));
    let (cold, _) = ask(&service, pinned(prompt(1, 22), 600));
    ask(&service, Submission::new(prompt(2, 22), 4));
    flood(&service);
    let (warm, usage) = ask(&service, Submission::new(prompt(1, 22), 4));
    assert_eq!(usage.cached.total(), 20, "{usage:?}");
    assert_eq!(warm, cold);
    let (_, usage) = ask(&service, Submission::new(prompt(2, 22), 4));
    assert_eq!(usage.cached.total(), 0, "nobody pinned this one: {usage:?}");
}

#[test]
fn pins_beyond_the_budget_are_clipped_and_everything_completes() {
    let service = start(config(12, WritePolicy::Selective));
    for seed in 0..40 {
        let (drawn, _) = ask(&service, pinned(prompt(seed, 18), 600));
        assert_eq!(drawn.len(), 4);
    }
    let cache = service.stats().core.unwrap().cache;
    assert!(cache.pinned_pages <= cache.pin_budget_pages, "{cache:?}");
    assert!(cache.pinned_pages > 0);
    flood(&service);
}

#[test]
fn a_short_pin_ends_without_traffic_and_the_cache_can_be_flushed() {
    let service = start(config(12, WritePolicy::Through));
    ask(&service, pinned(prompt(1, 22), 1));
    assert!(service.stats().core.unwrap().cache.pinned_pages > 0);
    until(&service, |cache| cache.pinned_pages == 0);
    service.flush().unwrap();
}

#[test]
fn what_one_replica_computed_and_pinned_another_finds_on_host() {
    let service = start(ServiceConfig {
        replicas: 2,
        max_running: 2,
        ..config(64, WritePolicy::Through)
    });
    let tokens = prompt(1, 30);
    let (cold, _) = ask(&service, pinned(tokens.clone(), 600));
    until(&service, |cache| cache.copies_under_way == 0);
    // More than one replica runs at once, and long enough that they meet: who waits for one
    // replica is taken over by the other.
    let tickets: Vec<_> = (0..6)
        .map(|_| service.submit(Submission::new(tokens.clone(), 30)).unwrap())
        .collect();
    let mut from_host = 0;
    for ticket in tickets {
        for event in ticket.events.iter() {
            if let Event::Final { usage, .. } = event {
                assert_eq!(usage.cached.total(), 28, "{usage:?}");
                from_host += u64::from(usage.cached.host);
            }
        }
    }
    let core = service.stats().core.unwrap();
    let admitted: Vec<u64> = core.schedulers.iter().map(|one| one.admissions).collect();
    assert!(
        admitted.iter().all(|&n| n > 0),
        "both replicas served: {admitted:?}"
    );
    assert!(from_host > 0);
    let (again, _) = ask(&service, Submission::new(tokens, 4));
    assert_eq!(again, cold);
}
