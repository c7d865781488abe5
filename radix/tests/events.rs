//! Events by example: what is told, what is not, and what a slow consumer learns.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "any other event is a failure"
)]

#[path = "shared/host.rs"]
mod host;

use host::{Host, R0};
use rootstock_memory::{CopyDone, TierId};
use rootstock_radix::{
    CacheConfig, EventTier, Key, KvEvent, NamespaceKey, PolicyKind, Probe, Token, WritePolicy,
};
use std::collections::BTreeSet;

const DEVICE: EventTier = EventTier::Device(R0);
const DEVICE_TIER: TierId = host::DEVICE;

fn telling(max_events: u32, host_pages: u32) -> Host {
    let (page_tokens, write_policy) = (1, WritePolicy::Through);
    let device_pages = vec![8];
    Host::new(&CacheConfig {
        page_tokens,
        device_pages,
        host_pages,
        write_policy,
        max_events,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    })
}

fn events(host: &mut Host) -> Vec<KvEvent> {
    let mut out = Vec::new();
    host.cache.drain_events(&mut out);
    out
}

#[test]
fn splits_and_reads_tell_nothing_and_a_demotion_is_stored_then_removed() {
    let mut host = telling(100, 8);
    host.insert(&[1, 2, 3], 0);
    let told = events(&mut host);
    let [
        KvEvent::Stored {
            tier: DEVICE,
            parent: None,
            pages,
            ..
        },
    ] = &told[..]
    else {
        unreachable!("{told:?}");
    };
    let hashes: Vec<u64> = pages.iter().map(|page| page.sequence_hash).collect();
    for _ in 0..10 {
        let _ = host.hit(&[1, 2]);
    }
    assert_eq!(events(&mut host), []);
    let mut plans = Vec::new();
    host.cache.drain_copies(&mut plans);
    for plan in plans.into_iter().chain(std::mem::take(&mut host.plans)) {
        host.cache.copy_done(
            CopyDone {
                id: plan.id,
                ok: true,
            },
            host.now,
        );
    }
    let told = events(&mut host);
    let on_host = told.iter().all(|event| {
        matches!(
            event,
            KvEvent::Stored {
                tier: EventTier::Host,
                ..
            }
        )
    });
    assert!(on_host && !told.is_empty(), "{told:?}");
    let _ = host.evict_all();
    let removed: Vec<u64> = events(&mut host)
        .into_iter()
        .flat_map(|event| match event {
            KvEvent::Removed {
                tier: DEVICE,
                hashes,
            } => hashes,
            other => unreachable!("{other:?}"),
        })
        .collect();
    // Deepest first.
    assert_eq!(removed, hashes.into_iter().rev().collect::<Vec<_>>());
    host.cache.flush(host.now).unwrap();
    let cleared = [DEVICE, EventTier::Host].map(|tier| KvEvent::Cleared { tier });
    assert_eq!(events(&mut host), cleared);
}

#[test]
fn namespaces_have_distinct_hashes_for_the_same_tokens() {
    let mut host = telling(100, 0);
    let text = |value: &str| Some(value.to_owned());
    let keys = [
        (None, None),
        (None, text("a")),
        (None, text("b")),
        (text("x"), None),
    ];
    let mut seen = BTreeSet::new();
    for (lora, salt) in keys {
        let key = NamespaceKey {
            lora,
            salt,
            ..NamespaceKey::default()
        };
        host.ns = host.cache.namespace(&key).unwrap();
        host.insert(&[1, 2], 0);
        for event in events(&mut host) {
            if let KvEvent::Stored { pages, .. } = event {
                seen.extend(pages.into_iter().map(|page| page.sequence_hash));
            }
        }
    }
    assert_eq!(seen.len(), 8);
}

#[test]
fn a_consumer_that_does_not_fetch_learns_of_the_gap_and_can_start_over() {
    let mut host = telling(3, 0);
    for token in 0..8 {
        host.insert(&[token], 0);
    }
    let told = events(&mut host);
    assert_eq!(told[0], KvEvent::Gap { events: 5 });
    assert_eq!(told.len(), 4);
    let mut dump = Vec::new();
    host.cache.dump_events(&mut dump);
    assert_eq!(dump.len(), 8);
    assert_eq!(events(&mut host), []);
}

/// Routers keep what a probe said for as long as the revision stays.
#[test]
fn the_revision_grows_whenever_a_probe_would_say_something_else() {
    const TEXTS: [&[Token]; 4] = [&[1, 2, 3], &[1, 2, 9, 9], &[7, 8], &[1, 2]];
    for max_events in [0, 100] {
        let mut host = telling(max_events, 8);
        let said = |host: &Host| {
            let probe = |&tokens: &&[Token]| {
                host.cache.probe(
                    Key {
                        ns: host.ns,
                        tokens,
                    },
                    R0,
                )
            };
            let probes: Vec<Probe> = TEXTS.iter().map(probe).collect();
            (host.cache.revision(), probes)
        };
        let mut before = said(&host);
        let mut changes = 0;
        let mut compare = |host: &Host| {
            let now = said(host);
            assert!(now.0 >= before.0, "it never falls");
            assert!(
                now.0 > before.0 || now.1 == before.1,
                "{before:?}, then {now:?}"
            );
            changes += u32::from(now.1 != before.1);
            before = now;
        };
        for text in TEXTS {
            host.insert(text, 0);
            compare(&host);
            let mut plans = std::mem::take(&mut host.plans);
            host.cache.drain_copies(&mut plans);
            for plan in plans {
                let done = CopyDone {
                    id: plan.id,
                    ok: true,
                };
                host.cache.copy_done(done, host.now);
                compare(&host);
            }
            let revision = host.cache.revision();
            assert_eq!(host.hit(text) as usize, text.len());
            assert_eq!(host.cache.revision(), revision, "a read of whole nodes");
        }
        for tier in [DEVICE_TIER, TierId::Host] {
            for free in 1..=8 {
                if let Ok(room) = host.cache.make_room(tier, free, host.now) {
                    host.plans.extend(room.copies);
                }
                compare(&host);
            }
        }
        host.insert(TEXTS[0], 0);
        compare(&host);
        let mut plans = Vec::new();
        host.cache.drain_copies(&mut plans);
        for plan in plans {
            let done = CopyDone {
                id: plan.id,
                ok: false,
            };
            host.cache.copy_done(done, host.now);
        }
        host.cache.flush(host.now).unwrap();
        compare(&host);
        assert!(changes >= 12, "{changes} of the steps change a probe");
    }
}
