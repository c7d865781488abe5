//! The storage tier over the real CPU backend and a tiny model: a service that starts again finds
//! what an earlier one stored, and says the same.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "support/tiny.rs"]
mod tiny;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rootstock::memory::TierId;
use rootstock::radix::{CacheStats, WritePolicy};
use rootstock::scheduler::Usage;
use rootstock_engine::service::{Event, Service, ServiceConfig, StorageConfig, Submission};
use tiny::VOCAB;

fn start(folder: &Path) -> Service {
    let config = ServiceConfig {
        device_pages: Some(16),
        host_pages: Some(64),
        write_policy: WritePolicy::Through,
        free_copies: true,
        page_size: 4,
        threads: Some(1),
        storage: Some(StorageConfig {
            uri: format!("fs://{}", folder.display()),
            quota_mib: 16,
            read_timeout: Duration::from_secs(30),
        }),
        ..ServiceConfig::default()
    };
    Service::start(&tiny::file("qwen3"), config).unwrap()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed * 101 + i * i * 7 + i) % VOCAB as u32)
        .collect()
}

fn ask(service: &Service, tokens: Vec<u32>) -> (Vec<u32>, Usage) {
    let ticket = service.submit(Submission::new(tokens, 4)).unwrap();
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

/// Waits until storage knows so many pages.
fn until_stored(service: &Service, pages: u32) {
    let stored = |cache: &CacheStats| {
        let tiers = cache.tiers.iter();
        let storage = tiers.filter(|tier| tier.tier == TierId::Storage);
        storage.map(|tier| tier.evictable).sum::<u32>()
    };
    for _ in 0..30_000 {
        if stored(&service.stats().core.unwrap().cache) >= pages {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("nothing is stored");
}

fn folder() -> PathBuf {
    let name = format!("rootstock-service-storage-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::remove_dir_all(&path).ok();
    path
}

#[test]
fn a_service_that_starts_again_finds_what_an_earlier_one_stored() {
    let folder = folder();
    let first = start(&folder);
    let (cold, usage) = ask(&first, prompt(1, 30));
    assert_eq!(usage.cached.total(), 0);
    until_stored(&first, 7);
    drop(first);
    let second = start(&folder);
    until_stored(&second, 7);
    let (warm, usage) = ask(&second, prompt(1, 30));
    assert_eq!(warm, cold);
    assert_eq!(usage.cached.total(), 28, "all whole pages: {usage:?}");
    drop(second);
    // Damage is a miss, never another text.
    for sub in fs::read_dir(folder.join("pages")).unwrap() {
        for file in fs::read_dir(sub.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    let third = start(&folder);
    until_stored(&third, 7);
    let (damaged, usage) = ask(&third, prompt(1, 30));
    assert_eq!((damaged, usage.cached.total()), (cold, 0));
    drop(third);
    fs::remove_dir_all(&folder).unwrap();
}
