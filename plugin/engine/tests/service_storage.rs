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

fn folder(name: &str) -> PathBuf {
    let name = format!("rootstock-service-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    fs::remove_dir_all(&path).ok();
    path
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for sub in fs::read_dir(folder.join("pages")).into_iter().flatten() {
        let sub = fs::read_dir(sub.unwrap().path()).unwrap();
        found.extend(sub.map(|entry| entry.unwrap().path()));
    }
    found.sort();
    found
}

/// Two conversations that share four pages: cold texts, then a start of the service after each
/// damage to a random file of the folder.
#[test]
fn a_thousand_corruptions_of_the_folder_never_change_a_text() {
    let folder = folder("corruptions");
    let shared = prompt(3, 16);
    let talks: Vec<Vec<u32>> = [5, 6]
        .map(|seed| [&shared[..], &prompt(seed, 14)[..]].concat())
        .into();
    let first = start(&folder);
    let cold: Vec<Vec<u32>> = talks
        .iter()
        .map(|talk| ask(&first, talk.clone()).0)
        .collect();
    // The shared pages, and of each its own with the one that ends within the answer.
    const PAGES: u32 = 4 + 2 * 4;
    until_stored(&first, PAGES);
    drop(first);
    let mut random = 0x5eed_u64;
    let mut below = |n: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % n
    };
    let (mut from_storage, mut refused) = (0_u64, 0_u64);
    for round in 0..1000 {
        let all = files(&folder);
        let (path, other) = (&all[below(all.len())], &all[below(all.len())]);
        let mut record = fs::read(path).unwrap();
        if record.is_empty() {
            // Cut to nothing in an earlier round, and not met since.
            record = vec![0; 64];
        }
        match below(6) {
            0 => {
                let at = below(record.len());
                record[at] ^= 1 << below(8);
            }
            1 => record.truncate(below(record.len())),
            2 => record.extend_from_slice(&[7; 5]),
            3 => record = fs::read(other).unwrap(),
            4 => {
                let (from, to) = (below(record.len()), below(record.len()));
                record.copy_within(from.min(to)..from.max(to), 0);
            }
            _ => {
                let from = below(record.len());
                record[from..].fill(0xff);
            }
        }
        fs::write(path, &record).unwrap();
        let service = start(&folder);
        for (talk, cold) in talks.iter().zip(&cold) {
            let (text, usage) = ask(&service, talk.clone());
            assert_eq!(&text, cold, "round {round}: {}", path.display());
            from_storage += u64::from(usage.cached.storage);
        }
        let store = service.stats().store.unwrap();
        assert_eq!(store.errors, 0);
        refused += store.corrupt + store.truncated + store.foreign;
        // What was lost is written anew, so that the next damage meets whole prefixes too.
        until_stored(&service, PAGES);
    }
    assert!(refused > 600, "{refused} damaged pages were met");
    assert!(
        from_storage > 10_000,
        "{from_storage} tokens came from storage"
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_service_that_starts_again_finds_what_an_earlier_one_stored() {
    let folder = folder("storage");
    let first = start(&folder);
    let (cold, usage) = ask(&first, prompt(1, 30));
    assert_eq!(usage.cached.total(), 0);
    until_stored(&first, 7);
    drop(first);
    let second = start(&folder);
    until_stored(&second, 7);
    let (warm, usage) = ask(&second, prompt(1, 30));
    assert_eq!(warm, cold);
    let found = (usage.cached.storage, usage.cached.total());
    assert_eq!(found, (28, 28), "all whole pages: {usage:?}");
    let (_, usage) = ask(&second, prompt(1, 30));
    assert_eq!((usage.cached.storage, usage.cached.device), (0, 28));
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
