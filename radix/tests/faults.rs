//! Faults that other engines have shipped, each as the smallest sequence that would show it here.
#![expect(clippy::cast_possible_truncation, reason = "sizes of tests are tiny")]

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host, R0};
use rootstock_memory::{ReplicaId, StepId};
use rootstock_radix::{
    Action, CacheConfig, CacheError, Dedup, Fate, Key, NamespaceKey, Outcome, PolicyKind,
    PrefixCache, SpanMeta, Target, TenantId, Ttl,
};

#[test]
fn a_lease_covers_exactly_the_matched_path() {
    let mut host = Host::of(1, 100);
    host.insert(&[1, 2, 3, 4, 5, 6], 0);
    let found = host.find(&[1, 2, 3, 9]);
    assert_eq!(found.device_tokens, 3);
    assert_eq!((host.tier().leased, host.tier().evictable), (3, 3));
    assert_eq!(host.evict_all(), 3);
    assert_eq!(host.peek(&[1, 2, 3, 4, 5, 6]), 3);
    host.insert(&[1, 2, 3, 9], 0);
    host.end(found.lease);
    host.assert_idle();
}

#[test]
fn no_node_of_a_leased_path_is_evicted() {
    let mut host = Host::of(1, 100);
    host.insert(&[1, 2, 3], 0);
    host.insert(&[1, 2, 3, 4, 5], 0);
    let lease = host.find(&[1, 2, 3, 4, 5]).lease;
    assert_eq!(host.evict_all(), 0);
    assert_eq!(host.peek(&[1, 2, 3, 4, 5]), 5);
    host.end(lease);
    host.assert_idle();
}

#[test]
fn splits_of_a_leased_node_leave_no_lease_behind() {
    for page in [1, 2, 3, 16] {
        for cut in 1..6 {
            let mut host = Host::of(page, 100);
            let page = page as usize;
            let long: Vec<u32> = (0..6 * page as u32).collect();
            let mut sibling = long[..cut * page].to_vec();
            sibling.extend(vec![77; page]);
            host.insert(&long, 0);
            let lease = host.find(&long).lease;
            let before = host.pages(&lease);
            host.insert(&sibling, 0);
            assert_eq!(host.pages(&lease), before);
            assert_eq!(host.tier().leased, 6);
            let _ = host.evict_all();
            assert_eq!(host.peek(&long) as usize, 6 * page);
            host.end(lease);
            assert_eq!(host.tier().leased, 0);
            host.assert_idle();
        }
    }
}

#[test]
fn a_split_does_not_refresh_the_unmatched_part() {
    for page in [1, 16] {
        let repeat = |tokens: &[u32]| -> Vec<u32> {
            tokens.iter().flat_map(|&token| vec![token; page]).collect()
        };
        // The split comes from a match, then from an insert.
        for inserts in [false, true] {
            let mut host = Host::of(page as u32, 100);
            host.insert(&repeat(&[1, 2, 3, 4]), 0);
            host.insert(&repeat(&[7, 8]), 0);
            if inserts {
                host.insert(&repeat(&[1, 2, 9]), 0);
            } else {
                assert_eq!(host.hit(&repeat(&[1, 2, 9])) as usize, 2 * page);
            }
            assert!(host.evict(2));
            assert_eq!(host.peek(&repeat(&[7, 8])) as usize, 2 * page);
            assert_eq!(host.peek(&repeat(&[1, 2, 3, 4])) as usize, 2 * page);
        }
    }
}

#[test]
fn priority_on_a_shared_prefix_is_the_maximum() {
    let policy = PolicyKind::Priority;
    let config = CacheConfig {
        page_tokens: 1,
        device_pages: vec![100],
        policy,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    host.insert(&[1, 2, 3], 5);
    host.insert(&[1, 2, 4], 0);
    host.insert(&[8, 9], 2);
    host.insert(&[1, 2], 0);
    assert!(host.evict(1));
    assert_eq!((host.peek(&[1, 2, 4]), host.peek(&[1, 2, 3])), (2, 3));
    assert!(host.evict(2));
    assert_eq!((host.peek(&[8, 9]), host.peek(&[1, 2, 3])), (0, 3));
    assert!(host.evict(1));
    assert_eq!(host.peek(&[1, 2, 3]), 2);
    assert!(host.evict(2));
    assert_eq!(host.tier().evictable, 0);
}

#[test]
fn negative_priority_goes_first_and_equal_priority_by_recency() {
    let policy = PolicyKind::Priority;
    let config = CacheConfig {
        page_tokens: 1,
        policy,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    host.insert(&[1], 0);
    host.insert(&[2], -3);
    host.insert(&[3], 0);
    let _ = host.hit(&[1]);
    for gone in [2, 3, 1] {
        assert_eq!(host.peek(&[gone]), 1);
        assert!(host.evict(1));
        assert_eq!(host.peek(&[gone]), 0);
    }
}

#[test]
fn two_requests_that_compute_one_prefix_share_its_pages_before_duplicates_are_freed() {
    let mut host = Host::of(1, 12);
    let tokens: Vec<u32> = (1..=8).collect();
    let mut leases = [host.find(&tokens).lease, host.find(&tokens).lease];
    let (mut reservation, _) = host.cache.reserve(DEVICE, 12, 0).unwrap();
    let mut tables = Vec::new();
    for lease in &mut leases {
        let pages = host.cache.acquire(&mut reservation, 4);
        let mut table = pages.ids().to_vec();
        let meta = SpanMeta {
            busy_until: Some(StepId(7)),
            ..SpanMeta::default()
        };
        let done = host.cache.extend(lease, &tokens[..4], pages, &meta, 0);
        for &(page, id) in &done.swapped {
            table[page as usize] = id;
        }
        host.cache.check().unwrap();
        assert_eq!(table, host.pages(lease));
        tables.push(table);
    }
    host.cache.cancel(reservation);
    assert_eq!(tables[0], tables[1]);
    // The duplicates wait for the step that may still touch them.
    assert_eq!((host.tier().leased, host.tier().held), (4, 4));
    host.cache.step_done(R0, StepId(6));
    assert_eq!(host.tier().held, 4);
    host.cache.step_done(R0, StepId(7));
    assert_eq!((host.tier().held, host.tier().free), (0, 8));
    leases.into_iter().for_each(|lease| host.end(lease));
    host.assert_idle();
}

#[test]
fn an_append_only_host_keeps_its_duplicates_until_the_lease_ends() {
    let mut host = Host::of(2, 12);
    let tokens: Vec<u32> = (1..=8).collect();
    let mut lease = host.find(&tokens).lease;
    host.insert(&tokens[..6], 0);
    let (mut reservation, _) = host.cache.reserve(DEVICE, 4, 0).unwrap();
    let pages = host.cache.acquire(&mut reservation, 4);
    host.cache.cancel(reservation);
    let table = pages.ids().to_vec();
    let meta = SpanMeta {
        dedup: Dedup::Keep,
        ..SpanMeta::default()
    };
    let done = host.cache.extend(&mut lease, &tokens, pages, &meta, 0);
    assert_eq!((done.inserted_pages, done.swapped.len()), (1, 0));
    assert_eq!(host.pages(&lease), table);
    assert_eq!((host.tier().leased, host.tier().held), (4, 3));
    host.end(lease);
    host.assert_idle();
    assert_eq!(host.tier().evictable, 4);
}

#[test]
fn a_match_does_not_split_inside_a_page() {
    let mut host = Host::of(3, 10);
    host.insert(&[1, 2, 3, 4, 5, 6], 0);
    assert_eq!(host.hit(&[1, 2, 9]), 0);
    assert_eq!(host.hit(&[1, 2, 3, 4, 5, 9]), 3);
    host.insert(&[1; 20], 0);
    assert_eq!(host.hit(&[1; 37]), 18);
    host.assert_idle();
}

#[test]
fn a_page_size_of_zero_is_a_configuration_error() {
    let error = PrefixCache::new(&CacheConfig {
        page_tokens: 0,
        ..CacheConfig::default()
    });
    assert_eq!(
        error.unwrap_err().to_string(),
        "page_tokens is 0, expected 1 to 65536"
    );
}

#[test]
fn each_page_goes_back_exactly_once_through_every_ending() {
    for fate in [
        Fate::Keep,
        Fate::Superseded,
        Fate::Ephemeral,
        Fate::Preempted,
    ] {
        for len in 14..19 {
            let mut host = Host::of(16, 8);
            let tokens = vec![1; len];
            let lease = host.run(&tokens, 0);
            host.finish(lease, fate);
            host.assert_idle();
            let kept = if fate == Fate::Ephemeral {
                0
            } else {
                len as u32 / 16
            };
            assert_eq!(host.tier().evictable, kept);
            let _ = host.evict_all();
            assert_eq!(host.tier().free, 8);
            assert_eq!(host.cache.stats().stray_releases, 0);
        }
    }
}

#[test]
fn what_a_lease_did_not_bring_survives_its_ephemeral_end() {
    let mut host = Host::of(1, 20);
    host.insert(&[1, 2], 0);
    let lease = host.run(&[1, 2, 3, 4], 0);
    let other = host.find(&[1, 2, 3]).lease;
    host.finish(lease, Fate::Ephemeral);
    assert_eq!(host.peek(&[1, 2, 3, 4]), 3);
    host.end(other);
    assert_eq!(host.peek(&[1, 2, 3, 4]), 3);
    host.assert_idle();
}

#[test]
fn superseded_tails_go_before_older_prefixes() {
    for policy in [PolicyKind::Lru, PolicyKind::Priority] {
        let mut host = Host::new(&CacheConfig {
            page_tokens: 1,
            policy,
            ..CacheConfig::default()
        });
        host.insert(&[7, 8], 0);
        host.insert(&[1, 2], 0);
        let mut lease = host.run(&[1, 2, 3], 3);
        // A second node, because its priority differs.
        host.extend(&mut lease, &[1, 2, 3, 4, 5], 1);
        host.finish(lease, Fate::Superseded);
        assert!(host.evict(1));
        assert_eq!((host.peek(&[1, 2, 3, 4, 5]), host.peek(&[7, 8])), (4, 2));
        assert!(host.evict(2));
        assert_eq!((host.peek(&[1, 2, 3, 4, 5]), host.peek(&[7, 8])), (2, 2));
        assert!(host.evict(2));
        assert_eq!((host.peek(&[1, 2]), host.peek(&[7, 8])), (2, 0));
    }
}

#[test]
fn every_part_of_the_cache_key_separates() {
    let text = |value: &str| Some(value.to_owned());
    let base = NamespaceKey::default();
    let keys = [
        base.clone(),
        NamespaceKey {
            salt: text("a"),
            ..base.clone()
        },
        NamespaceKey {
            salt: text(""),
            ..base.clone()
        },
        NamespaceKey {
            lora: text("a"),
            ..base.clone()
        },
        NamespaceKey {
            lora: text(""),
            ..base.clone()
        },
        NamespaceKey {
            lora: text("a@2"),
            ..base.clone()
        },
        NamespaceKey {
            model: "a".into(),
            ..base.clone()
        },
        NamespaceKey {
            numerics: "a".into(),
            ..base.clone()
        },
        NamespaceKey {
            lora: text("a"),
            salt: text("a"),
            ..base
        },
    ];
    let mut host = Host::of(1, 100);
    for (inserted, key) in keys.iter().enumerate() {
        host.ns = host.cache.namespace(key).unwrap();
        host.insert(&[1, 2, 3], 0);
        for (at, key) in keys.iter().enumerate() {
            let ns = host.cache.namespace(key).unwrap();
            let found = host
                .cache
                .probe(
                    Key {
                        ns,
                        tokens: &[1, 2, 3],
                    },
                    R0,
                )
                .device_tokens;
            assert_eq!(found > 0, at <= inserted, "{key:?}");
        }
        let _ = host.hit(&[1, 2, 3]);
    }
    assert_eq!(host.tier().evictable, 27);
}

#[test]
fn namespaces_are_bounded_and_the_id_of_a_dropped_one_never_meets_foreign_pages() {
    let config = CacheConfig {
        page_tokens: 1,
        max_namespaces: 2,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    let named = |name: &str| NamespaceKey {
        model: name.into(),
        ..NamespaceKey::default()
    };
    let stale = host.ns;
    host.ns = host.cache.namespace(&named("b")).unwrap();
    host.insert(&[1, 2], 0);
    // The first namespace is empty and makes place.
    let third = host.cache.namespace(&named("c")).unwrap();
    let lease = host
        .cache
        .match_lease(
            Key {
                ns: third,
                tokens: &[1],
            },
            R0,
            9,
            0,
        )
        .lease;
    let full = host.cache.namespace(&named("d")).unwrap_err();
    assert!(
        matches!(full, CacheError::NamespacesFull { limit: 2 }),
        "{full}"
    );
    host.end(lease);
    host.ns = host.cache.namespace(&named("d")).unwrap();
    host.insert(&[5, 6], 0);
    // A queued request still has the dropped id: it misses, and may even go on and insert.
    host.ns = stale;
    assert_eq!(host.peek(&[5, 6]), 0);
    let lease = host.run(&[5, 6], 0);
    assert_ne!(lease.namespace(), stale);
    assert_eq!(host.tier().leased, 2);
    host.end(lease);
    host.assert_idle();
    let _ = host.evict_all();
    host.assert_idle();
}

#[test]
fn with_all_nodes_in_use_requests_run_on_and_nothing_is_lost() {
    let config = CacheConfig {
        page_tokens: 1,
        max_nodes: 1,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    host.insert(&[1, 2, 3, 4], 0);
    // No node for the split: the match ends at the node before.
    assert_eq!(host.hit(&[1, 2, 9]), 0);
    let mut lease = host.run(&[1, 2, 9], 0);
    assert_eq!((lease.len_tokens(), host.tier().held), (3, 3));
    host.extend(&mut lease, &[1, 2, 9, 9], 0);
    assert_eq!(host.pages(&lease).len(), 4);
    assert_eq!(host.cache.stats().uncached_pages, 4);
    host.end(lease);
    host.assert_idle();
    assert_eq!(host.peek(&[1, 2, 3, 4]), 4);
}

#[test]
fn a_flush_is_refused_while_anything_is_in_use_and_then_empties_everything() {
    let mut host = Host::of(1, 10);
    host.insert(&[1, 2, 3], 0);
    let lease = host.find(&[1, 2]).lease;
    assert_eq!(host.cache.flush(0).unwrap_err().leases, 1);
    assert_eq!(host.peek(&[1, 2, 3]), 3);
    host.end(lease);
    let (mut reservation, _) = host.cache.reserve(DEVICE, 2, 0).unwrap();
    assert_eq!(host.cache.flush(0).unwrap_err().held_pages, 2);
    let pages = host.cache.acquire(&mut reservation, 2);
    host.cache.release(pages, None);
    host.cache.flush(0).unwrap();
    assert_eq!((host.peek(&[1, 2, 3]), host.tier().free), (0, 10));
    host.assert_idle();
}

/// A long answer is one node, however many steps computed it.
#[test]
fn what_one_request_computes_in_many_steps_is_one_node() {
    let mut host = Host::of(1, 100);
    let empty = host.cache.stats().nodes;
    let all: Vec<u32> = (0..60).collect();
    let mut lease = host.run(&all[..10], 0);
    for len in 11..=60 {
        host.extend(&mut lease, &all[..len], 0);
    }
    assert_eq!(host.cache.stats().nodes, empty + 1);
    host.end(lease);
    assert_eq!(host.hit(&all), 60);
    assert_eq!(host.cache.stats().nodes, empty + 1);
    // Nor does the next turn, if it alone holds the leaf, make another.
    let longer: Vec<u32> = (0..80).collect();
    let mut lease = host.run(&all, 0);
    host.extend(&mut lease, &longer[..70], 0);
    assert_eq!(host.cache.stats().nodes, empty + 1);
    // What another request holds too stays as it is.
    let other = host.run(&longer[..70], 0);
    let mut third = host.run(&longer[..70], 0);
    host.extend(&mut third, &longer, 0);
    assert_eq!(host.cache.stats().nodes, empty + 2);
    for lease in [lease, other, third] {
        host.end(lease);
    }
    assert_eq!(host.hit(&longer), 80);
    host.assert_idle();
}

/// Verbs reach over all nodes of a prefix, whatever a page is, and no further than its whole pages.
#[test]
fn verbs_reach_the_whole_pages_of_a_prefix_over_all_its_nodes() {
    for page in [1_u32, 2, 3, 16] {
        let mut host = Host::of(page, 100);
        let long: Vec<u32> = (0..9 * page).collect();
        for cut in [2, 3, 7] {
            let mut sibling = long[..(cut * page) as usize].to_vec();
            sibling.extend(vec![777; page as usize]);
            host.insert(&sibling, 0);
        }
        host.insert(&long, 0);
        for pages in 1..=9 {
            for more in [0, page - 1] {
                let len = (pages * page + more).min(9 * page) as usize;
                let target = || Target::Prefix {
                    ns: host.ns,
                    tokens: long[..len].to_vec(),
                };
                let ttl = Ttl {
                    seconds: 60,
                    clamped: false,
                };
                let pin = Action::Pin {
                    target: target(),
                    ttl,
                };
                let release = Action::Release { target: target() };
                for (action, pinned) in [(pin, pages), (release, 0)] {
                    let told = host.cache.act(TenantId(1), &action, host.now);
                    assert_eq!(told, Outcome::Accepted { pages }, "{pages} of {page}");
                    assert_eq!(host.cache.stats().pinned_pages, pinned);
                    host.cache.check().unwrap();
                }
            }
        }
        host.assert_idle();
    }
}

#[test]
fn a_lease_says_whose_it_is() {
    let mut host = Host::new(&CacheConfig {
        device_pages: vec![8; 3],
        ..CacheConfig::default()
    });
    let salted = NamespaceKey {
        salt: Some("a".into()),
        ..NamespaceKey::default()
    };
    let other = host.cache.namespace(&salted).unwrap();
    for ns in [host.ns, other] {
        for replica in (0..3).map(ReplicaId) {
            let key = Key {
                ns,
                tokens: &[1, 2],
            };
            let lease = host.cache.match_lease(key, replica, 1, host.now).lease;
            assert_eq!((lease.namespace(), lease.replica()), (ns, replica));
            host.end(lease);
        }
    }
}

/// Who counts references to pages itself sees the very pages that a lease would hold.
#[test]
fn a_peek_shows_the_pages_of_a_lease_and_changes_nothing() {
    for page in [1_u32, 2, 3, 16] {
        let mut host = Host::of(page, 100);
        let long: Vec<u32> = (0..9 * page).collect();
        host.insert(&long[..(5 * page) as usize], 0);
        for cut in [2, 3, 7] {
            let mut sibling = long[..(cut * page) as usize].to_vec();
            sibling.extend(vec![777; page as usize]);
            host.insert(&sibling, 0);
        }
        host.insert(&long, 0);
        for len in 0..long.len() {
            let key = Key {
                ns: host.ns,
                tokens: &long[..len],
            };
            let nodes = host.cache.stats().nodes;
            let mut seen = Vec::new();
            host.cache.peek(key, R0, &mut seen);
            assert_eq!(seen.len(), len / page as usize);
            assert_eq!(host.cache.stats().nodes, nodes, "nothing is split");
            let lease = host.find(&long[..len]).lease;
            assert_eq!(host.pages(&lease), seen);
            host.end(lease);
        }
    }
}
