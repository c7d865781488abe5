//! What is not begun, and what gives way, where a bound of the tiers below the device is reached.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host};
use rootstock_memory::{CopyDone, PageAddress, StoreEvent, StoreOp, StorePlan};
use rootstock_radix::{
    Action, CacheConfig, Key, Lease, Outcome, PolicyKind, Target, TenantId, Token, Ttl, WritePolicy,
};

fn config(host_pages: u32, storage_pages: u32) -> CacheConfig {
    CacheConfig {
        page_tokens: 1,
        device_pages: vec![8],
        host_pages,
        storage_pages,
        write_policy: WritePolicy::Through,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    }
}

/// Acknowledges all copies that are planned; how many there were.
fn copies(host: &mut Host, ok: bool) -> usize {
    let mut plans = std::mem::take(&mut host.plans);
    host.cache.drain_copies(&mut plans);
    for plan in &plans {
        host.cache.copy_done(CopyDone { id: plan.id, ok }, host.now);
        host.cache.check().unwrap();
    }
    plans.len()
}

fn store_plans(host: &mut Host) -> Vec<StorePlan> {
    let mut plans = Vec::new();
    host.cache.drain_store(&mut plans);
    plans
}

fn done(host: &mut Host, plan: &StorePlan) {
    let pages = vec![true; plan.pages.len()];
    let event = StoreEvent::Done { id: plan.id, pages };
    host.cache.store_event(event, host.now);
    host.cache.check().unwrap();
}

/// What a cache stores of these prefixes.
fn stored(prefixes: &[&[Token]]) -> Vec<PageAddress> {
    let mut host = Host::new(&config(8, 100));
    let mut addresses = Vec::new();
    for tokens in prefixes {
        host.insert(tokens, 0);
        copies(&mut host, true);
        for plan in store_plans(&mut host) {
            assert_eq!(plan.op, StoreOp::Write);
            addresses.extend(plan.pages.iter().map(|page| page.address));
            done(&mut host, &plan);
        }
    }
    addresses
}

/// A cache that knows what another one stored.
fn restarted(config: &CacheConfig, stored: &[PageAddress]) -> Host {
    let mut host = Host::new(config);
    let learned = StoreEvent::Learned(stored.to_vec());
    host.cache.store_event(learned, host.now);
    host
}

/// Whether a read has begun.
fn fetch(host: &mut Host, lease: &Lease, tokens: &[Token]) -> bool {
    let ns = host.ns;
    let key = Key { ns, tokens };
    let started = host.cache.fetch(lease, key, u32::MAX, host.now);
    host.cache.check().unwrap();
    started.is_some()
}

#[test]
fn no_more_is_read_at_once_than_copies_may_be_under_way() {
    let prefixes: [&[Token]; 2] = [&[1, 2], &[3, 4]];
    let config = CacheConfig {
        max_copies: 1,
        ..config(8, 100)
    };
    let mut host = restarted(&config, &stored(&prefixes));
    let leases = prefixes.map(|tokens| host.find(tokens).lease);
    assert!(fetch(&mut host, &leases[0], prefixes[0]));
    let plans = store_plans(&mut host);
    assert_eq!((plans.len(), plans[0].op), (1, StoreOp::Read));
    assert!(!fetch(&mut host, &leases[1], prefixes[1]), "one is enough");
    assert!(store_plans(&mut host).is_empty());
    done(&mut host, &plans[0]);
    assert!(fetch(&mut host, &leases[1], prefixes[1]));
    let plans = store_plans(&mut host);
    done(&mut host, &plans[0]);
    leases.into_iter().for_each(|lease| host.end(lease));
    for tokens in prefixes {
        let found = host.find(tokens);
        assert_eq!(found.host_tokens, 2);
        host.end(found.lease);
    }
}

/// Pages that found no node in the tree are the request's own, so nothing can hang below them.
#[test]
fn a_request_whose_pages_are_not_in_the_tree_reads_nothing_that_follows_them() {
    let prefix: &[Token] = &[1, 2, 3, 4];
    let config = CacheConfig {
        max_nodes: 1,
        write_policy: WritePolicy::Selective,
        ..config(8, 100)
    };
    let mut host = restarted(&config, &stored(&[prefix]));
    let other = host.run(&[7, 8], 0);
    let mut lease = host.find(prefix).lease;
    host.extend(&mut lease, &prefix[..2], 0);
    assert_eq!(lease.len_tokens(), 2);
    assert_eq!(host.cache.stats().uncached_pages, 2, "no node was free");
    assert!(!fetch(&mut host, &lease, prefix));
    assert!(store_plans(&mut host).is_empty());
    host.end(lease);
    host.end(other);
}

#[test]
fn a_pin_whose_copy_to_host_fails_yields_and_the_caller_is_told() {
    let mut host = Host::new(&CacheConfig {
        write_policy: WritePolicy::Back,
        ..config(8, 0)
    });
    host.insert(&[1, 2], 0);
    let target = Target::Prefix {
        ns: host.ns,
        tokens: vec![1, 2],
    };
    let ttl = Ttl {
        seconds: 60,
        clamped: false,
    };
    let outcome = host.cache.act(TenantId(1), &Action::Pin { target, ttl }, 0);
    assert_eq!(outcome, Outcome::Accepted { pages: 2 });
    let short = host.cache.make_room(DEVICE, 8, host.now).unwrap_err();
    assert_eq!(short.in_transit_pages, 2);
    assert_eq!(copies(&mut host, false), 1);
    let made = host.cache.make_room(DEVICE, 8, host.now).unwrap();
    assert_eq!((made.freed_pages, made.pins_yielded), (2, 1));
    let stats = host.cache.stats();
    assert_eq!((stats.pinned_pages, stats.pins_yielded), (0, 1));
    host.assert_idle();
}
