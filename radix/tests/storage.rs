//! The storage tier as the tree sees it, each promise as the smallest sequence.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host, R0};
use rootstock_memory::{CopyDone, PageAddress, ReplicaId, StoreEvent, StoreOp, StorePlan, TierId};
use rootstock_radix::{
    Action, CacheConfig, CacheError, Key, Lease, NamespaceKey, Outcome, PolicyKind, PrefixCache,
    Target, TenantId, Token, WritePolicy,
};

fn config(host_pages: u32) -> CacheConfig {
    CacheConfig {
        page_tokens: 2,
        device_pages: vec![8],
        host_pages,
        storage_pages: 100,
        write_policy: WritePolicy::Through,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    }
}

fn copies(host: &mut Host) {
    let mut plans = std::mem::take(&mut host.plans);
    host.cache.drain_copies(&mut plans);
    for plan in plans {
        let done = CopyDone {
            id: plan.id,
            ok: true,
        };
        host.cache.copy_done(done, host.now);
        host.cache.check().unwrap();
    }
}

fn store_plans(host: &mut Host) -> Vec<StorePlan> {
    let mut plans = Vec::new();
    host.cache.drain_store(&mut plans);
    plans
}

/// Acknowledges the first `ok` pages of a plan.
fn done(host: &mut Host, plan: &StorePlan, ok: usize) {
    let pages = (0..plan.pages.len()).map(|at| at < ok).collect();
    let event = StoreEvent::Done { id: plan.id, pages };
    host.cache.store_event(event, host.now);
    host.cache.check().unwrap();
}

fn tokens(range: std::ops::Range<u32>) -> Vec<Token> {
    range.collect()
}

/// Inserts a prefix, copies it to host and storage; the addresses of its pages.
fn store(host: &mut Host, tokens: &[Token]) -> Vec<PageAddress> {
    host.insert(tokens, 0);
    copies(host);
    let mut addresses = Vec::new();
    for plan in store_plans(host) {
        assert_eq!(plan.op, StoreOp::Write);
        addresses.extend(plan.pages.iter().map(|page| page.address));
        done(host, &plan, usize::MAX);
    }
    addresses
}

/// What a match finds: on the device, on host, in storage.
fn found(host: &mut Host, tokens: &[Token]) -> (u32, u32, u32) {
    let key = Key {
        ns: host.ns,
        tokens,
    };
    let probe = host.cache.probe(key, R0);
    let found = host.find(tokens);
    host.end(found.lease);
    let found = (found.device_tokens, found.host_tokens, found.storage_tokens);
    let probed = (probe.device_tokens, probe.host_tokens, probe.storage_tokens);
    assert_eq!(found, probed, "a probe says what a match finds");
    found
}

fn fetch(host: &mut Host, tokens: &[Token]) -> Vec<StorePlan> {
    let lease = host.find(tokens).lease;
    let key = Key {
        ns: host.ns,
        tokens,
    };
    let started = host.cache.fetch(&lease, key, u32::MAX, host.now).is_some();
    host.cache.check().unwrap();
    host.end(lease);
    let plans = store_plans(host);
    assert_eq!(started, !plans.is_empty());
    plans
}

/// A cache that knows what another one stored.
fn restarted(host_pages: u32, stored: &[PageAddress]) -> Host {
    let mut host = Host::new(&config(host_pages));
    let learned = StoreEvent::Learned(stored.to_vec());
    host.cache.store_event(learned, host.now);
    host
}

#[test]
fn a_new_cache_finds_what_an_old_one_stored_and_brings_it_up() {
    let mut old = Host::new(&config(8));
    let stored = store(&mut old, &tokens(0..8));
    assert_eq!(stored.len(), 4);
    assert_eq!(found(&mut old, &tokens(0..8)), (8, 0, 0));
    let mut new = restarted(8, &stored);
    // Longer than what is stored, and another branch.
    assert_eq!(found(&mut new, &tokens(0..12)), (0, 0, 8));
    assert_eq!(found(&mut new, &[0, 1, 2, 9]), (0, 0, 2));
    let plans = fetch(&mut new, &tokens(0..12));
    assert_eq!(
        (plans.len(), plans[0].op, plans[0].pages.len()),
        (1, StoreOp::Read, 4)
    );
    assert_eq!(*plans[0].pages[1].tokens, [2, 3]);
    assert_eq!(plans[0].pages[1].parent, stored[0]);
    done(&mut new, &plans[0], 4);
    assert_eq!(found(&mut new, &tokens(0..12)), (0, 8, 0));
    assert!(
        fetch(&mut new, &tokens(0..12)).is_empty(),
        "there is nothing to fetch"
    );
    // From host it comes up as anything on host.
    let mut lease = new.find(&tokens(0..8)).lease;
    let (mut room, _) = new.cache.reserve(DEVICE, 4, new.now).unwrap();
    let plan = new.cache.promote(&mut lease, &mut room, new.now).unwrap();
    new.cache.cancel(room);
    new.plans.push(plan);
    copies(&mut new);
    new.end(lease);
    assert_eq!(found(&mut new, &tokens(0..8)), (8, 0, 0));
    assert!(store_plans(&mut new).is_empty(), "it is in storage already");
}

#[test]
fn a_branch_that_leaves_amid_a_node_is_found_in_storage_too() {
    let mut old = Host::new(&config(16));
    let (one, other) = (tokens(0..8), [0, 1, 2, 3, 50, 51, 52, 53]);
    let mut stored = store(&mut old, &one);
    stored.extend(store(&mut old, &other));
    let mut new = restarted(16, &stored);
    let plans = fetch(&mut new, &one);
    done(&mut new, &plans[0], 4);
    // In the tree the two pages that both have in common are part of a node of four.
    let key = Key {
        ns: new.ns,
        tokens: &other,
    };
    assert_eq!(new.cache.stored_of(key), 4);
    assert!(new.cache.read_ahead(key, new.now));
    let plans = store_plans(&mut new);
    assert_eq!((plans.len(), plans[0].pages.len()), (1, 2));
    assert_eq!(plans[0].pages[0].parent, stored[1]);
    done(&mut new, &plans[0], 2);
    assert_eq!(found(&mut new, &other), (0, 8, 0));
    assert_eq!(found(&mut new, &one), (0, 8, 0));
}

#[test]
fn a_page_that_was_lost_amid_others_is_stored_again() {
    let mut host = Host::new(&config(8));
    let stored = store(&mut host, &tokens(0..8));
    host.cache
        .store_event(StoreEvent::Lost(vec![stored[1]]), host.now);
    host.insert(&tokens(0..8), 0);
    let plans = store_plans(&mut host);
    let again: Vec<PageAddress> = plans
        .iter()
        .flat_map(|plan| plan.pages.iter().map(|page| page.address))
        .collect();
    assert_eq!(again, [stored[1]]);
    host.insert(&tokens(0..8), 0);
    assert!(store_plans(&mut host).is_empty(), "it is on its way");
    done(&mut host, &plans[0], 1);
    host.insert(&tokens(0..8), 0);
    assert!(store_plans(&mut host).is_empty());
}

#[test]
fn each_part_of_a_namespace_has_its_own_pages_in_storage() {
    let mut old = Host::new(&config(8));
    let stored = store(&mut old, &tokens(0..8));
    let text = |value: &str| Some(value.to_owned());
    let named = |change: &dyn Fn(&mut NamespaceKey)| {
        let mut key = NamespaceKey::default();
        change(&mut key);
        key
    };
    let others = [
        named(&|key| key.model = "m".to_owned()),
        named(&|key| key.numerics = "avx512".to_owned()),
        named(&|key| key.lora = text("")),
        named(&|key| key.salt = text("a")),
    ];
    let mut new = restarted(8, &stored);
    for other in others {
        new.ns = new.cache.namespace(&other).unwrap();
        assert_eq!(found(&mut new, &tokens(0..8)), (0, 0, 0), "{other:?}");
    }
    new.ns = new.cache.namespace(&NamespaceKey::default()).unwrap();
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 0, 8));
}

#[test]
fn what_does_not_arrive_or_is_lost_is_a_miss() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    let mut new = restarted(8, &stored);
    let plans = fetch(&mut new, &tokens(0..8));
    // Two of four arrive; the third is lost.
    new.cache
        .store_event(StoreEvent::Lost(vec![stored[2]]), new.now);
    done(&mut new, &plans[0], 2);
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 4, 0));
    new.assert_idle();
    // An acknowledgement of nothing is counted, and changes nothing.
    let before = new.cache.stats().copies_stray;
    done(&mut new, &plans[0], 4);
    assert_eq!(new.cache.stats().copies_stray, before + 1);
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 4, 0));
}

#[test]
fn what_is_not_known_is_looked_for_within_a_bound_where_that_is_asked_for() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    let mut new = Host::new(&CacheConfig {
        storage_probes: 3,
        ..config(8)
    });
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 0, 0));
    let all = tokens(0..9);
    let key = Key {
        ns: new.ns,
        tokens: &all,
    };
    let ahead = |new: &mut Host| {
        let begun = new.cache.read_ahead(key, new.now);
        (begun, store_plans(new))
    };
    let (begun, looks) = ahead(&mut new);
    assert!(begun && new.cache.is_reading(key));
    assert_eq!((looks.len(), looks[0].op), (1, StoreOp::Look));
    let asked: Vec<PageAddress> = looks[0].pages.iter().map(|page| page.address).collect();
    assert_eq!(asked, stored[..3]);
    // Two are there: they are read at once.
    done(&mut new, &looks[0], 2);
    let reads = store_plans(&mut new);
    assert!(new.cache.is_reading(key), "the request waits on");
    assert_eq!((reads[0].op, reads[0].pages.len()), (StoreOp::Read, 2));
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 0, 4));
    done(&mut new, &reads[0], 2);
    assert!(!new.cache.is_reading(key));
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 4, 0));
    // The next looks on where this one ended; nothing is there.
    let (_, looks) = ahead(&mut new);
    assert_eq!(looks[0].pages[0].address, stored[2]);
    done(&mut new, &looks[0], 0);
    assert!(!new.cache.is_reading(key) && store_plans(&mut new).is_empty());
    new.assert_idle();
}

#[test]
fn what_was_read_counts_as_from_storage_until_it_is_used() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    let mut new = restarted(8, &stored);
    let plans = fetch(&mut new, &tokens(0..4));
    done(&mut new, &plans[0], 2);
    let read = |new: &mut Host, tokens: &[Token]| {
        let found = new.find(tokens);
        new.end(found.lease);
        (found.host_tokens, found.read_tokens)
    };
    assert_eq!(read(&mut new, &tokens(0..2)), (2, 2));
    assert_eq!(read(&mut new, &tokens(0..8)), (4, 4), "nobody has used it");
    let mut lease = new.find(&tokens(0..2)).lease;
    let (mut room, _) = new.cache.reserve(DEVICE, 1, new.now).unwrap();
    let plan = new.cache.promote(&mut lease, &mut room, new.now).unwrap();
    new.cache.cancel(room);
    new.end(lease);
    assert_eq!(read(&mut new, &tokens(0..8)), (4, 2), "half of it is used");
    new.plans.push(plan);
    copies(&mut new);
    assert_eq!(read(&mut new, &tokens(0..8)), (2, 2));
}

#[test]
fn prefetch_goes_on_to_a_device_within_a_quarter_of_it() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    let mut new = restarted(16, &stored);
    let act = |new: &mut Host, tokens: std::ops::Range<u32>| {
        let target = Target::Prefix {
            ns: new.ns,
            tokens: tokens.collect(),
        };
        let action = Action::Prefetch {
            target,
            replica: Some(R0),
        };
        let outcome = new.cache.act(TenantId(1), &action, new.now);
        new.cache.check().unwrap();
        outcome
    };
    assert_eq!(act(&mut new, 0..8), Outcome::Deferred { pages: 4 });
    let plans = store_plans(&mut new);
    done(&mut new, &plans[0], 4);
    // Two of eight pages are on their way at a time.
    assert_eq!(new.cache.stats().tiers[0].in_transit, 2);
    let again = Outcome::Clipped {
        pages: 0,
        asked_pages: 4,
    };
    assert_eq!(act(&mut new, 0..8), again, "not twice");
    copies(&mut new);
    assert_eq!(found(&mut new, &tokens(0..8)), (4, 4, 0));
    assert_eq!(act(&mut new, 0..8), Outcome::Deferred { pages: 2 });
    copies(&mut new);
    assert_eq!(found(&mut new, &tokens(0..8)), (8, 0, 0));
    assert_eq!(act(&mut new, 0..8), Outcome::Accepted { pages: 4 });
    new.assert_idle();
    // What nobody uses makes room for it, what is used does not.
    let lease = new.run(&tokens(50..62), 0);
    copies(&mut new);
    assert!(new.evict(2), "two pages of what was brought up go");
    let other = new.run(&tokens(70..74), 0);
    copies(&mut new);
    assert_eq!(found(&mut new, &tokens(0..8)).0, 0);
    assert_eq!(
        act(&mut new, 0..8).clone(),
        Outcome::Clipped {
            pages: 0,
            asked_pages: 4,
        }
    );
    new.end(lease);
    copies(&mut new);
    assert_eq!(act(&mut new, 0..8), Outcome::Deferred { pages: 2 });
    copies(&mut new);
    assert_eq!(found(&mut new, &tokens(0..8)), (4, 4, 0));
    new.end(other);
    copies(&mut new);
    for plan in store_plans(&mut new) {
        done(&mut new, &plan, usize::MAX);
    }
    new.assert_idle();
}

#[test]
fn a_small_host_takes_what_fits_and_pages_being_written_stay() {
    let mut old = Host::new(&config(8));
    let stored = store(&mut old, &tokens(0..8));
    let mut new = restarted(2, &stored);
    let plans = fetch(&mut new, &tokens(0..8));
    assert_eq!(plans[0].pages.len(), 2);
    done(&mut new, &plans[0], 2);
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 4, 4));
    // The way to what is fetched is not given up for it.
    assert!(fetch(&mut new, &tokens(0..8)).is_empty());
    // While storage reads host pages, they do not go.
    new.insert(&tokens(50..54), 0);
    copies(&mut new);
    let plans = store_plans(&mut new);
    assert_eq!(plans.iter().map(|plan| plan.pages.len()).sum::<usize>(), 2);
    new.insert(&tokens(60..64), 0);
    copies(&mut new);
    assert_eq!(new.cache.stats().tiers[1].leased, 2);
    for plan in &plans {
        done(&mut new, plan, usize::MAX);
    }
    assert_eq!(new.cache.stats().tiers[1].leased, 0);
    assert_eq!(new.cache.stats().tiers[2].evictable, 6);
}

#[test]
fn a_flush_waits_for_writes_and_clears_storage_too() {
    let mut host = Host::new(&config(8));
    host.insert(&tokens(0..8), 0);
    copies(&mut host);
    let plans = store_plans(&mut host);
    let refused = host.cache.flush(host.now).unwrap_err();
    assert_eq!(refused.in_transit_pages, 4);
    plans.iter().for_each(|plan| done(&mut host, plan, 4));
    host.cache.flush(host.now).unwrap();
    let plans = store_plans(&mut host);
    assert_eq!((plans.len(), plans[0].op), (1, StoreOp::Clear));
    done(&mut host, &plans[0], 0);
    assert_eq!(found(&mut host, &tokens(0..8)), (0, 0, 0));
}

#[test]
fn prefetch_brings_what_only_storage_has_to_host() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    let mut new = restarted(8, &stored);
    let target = |tokens: &[Token], ns| Target::Prefix {
        ns,
        tokens: tokens.to_vec(),
    };
    let act = |new: &mut Host, tokens: &[Token]| {
        let action = Action::Prefetch {
            target: target(tokens, new.ns),
            replica: None,
        };
        new.cache.act(TenantId(1), &action, new.now)
    };
    assert_eq!(act(&mut new, &tokens(20..24)), Outcome::Missing);
    let deferred = Outcome::Deferred { pages: 4 };
    assert_eq!(act(&mut new, &tokens(0..8)), deferred);
    let plans = store_plans(&mut new);
    done(&mut new, &plans[0], 4);
    let accepted = Outcome::Accepted { pages: 4 };
    assert_eq!(act(&mut new, &tokens(0..8)), accepted);
    let (pages, asked_pages) = (4, 6);
    let clipped = Outcome::Clipped { pages, asked_pages };
    assert_eq!(act(&mut new, &tokens(0..12)), clipped);
    assert_eq!(found(&mut new, &tokens(0..8)), (0, 8, 0));
}

#[test]
fn a_store_comes_and_goes_while_requests_run() {
    let mut host = Host::new(&CacheConfig {
        storage_pages: 0,
        ..config(8)
    });
    let lease = host.run(&tokens(0..8), 0);
    assert!(!host.cache.attach_storage(0, 0));
    assert!(host.cache.attach_storage(100, 0));
    host.cache.check().unwrap();
    host.end(lease);
    copies(&mut host);
    // Pages from before it was attached have their addresses.
    let plans = store_plans(&mut host);
    assert_eq!(plans[0].pages.len(), 4);
    host.cache.detach_storage();
    assert!(!host.cache.attach_storage(100, 0), "a write is under way");
    done(&mut host, &plans[0], 0);
    assert_eq!(host.cache.stats().tiers.len(), 2);
    assert!(host.cache.attach_storage(100, 0));
    assert_eq!(found(&mut host, &tokens(0..8)), (8, 0, 0));
    let plans = store_plans(&mut host);
    assert_eq!(
        plans[0].pages.len(),
        4,
        "what was not stored is written now"
    );
    done(&mut host, &plans[0], 4);
    let without = CacheConfig {
        host_pages: 0,
        ..config(8)
    };
    let refused = PrefixCache::new(&without).unwrap_err();
    assert_eq!(
        refused,
        CacheError::StorageWithoutHost { storage_pages: 100 }
    );
}

/// Whatever the answers to the pages of a read are, only those before the first that is missing
/// have arrived: what comes after it continues a prefix that is not there.
#[test]
fn after_the_first_page_that_did_not_arrive_none_counts() {
    let stored = store(&mut Host::new(&config(8)), &tokens(0..8));
    for answers in 0..16_u32 {
        let mut new = restarted(8, &stored);
        let plans = fetch(&mut new, &tokens(0..8));
        let id = plans[0].id;
        let pages: Vec<bool> = (0..4).map(|at| answers >> at & 1 == 1).collect();
        let event = StoreEvent::Done { id, pages };
        new.cache.store_event(event, new.now);
        new.cache.check().unwrap();
        let arrived = 2 * answers.trailing_ones();
        assert_eq!(found(&mut new, &tokens(0..8)).1, arrived, "{answers:b}");
        assert_eq!(new.cache.stats().tiers[1].in_transit, 0);
        new.assert_idle();
    }
}

/// What is brought up ahead takes its quarter of the device in all, not each time anew.
#[test]
fn prefetches_of_many_prefixes_share_one_quarter_of_the_device() {
    let mut host = Host::new(&CacheConfig {
        device_pages: vec![16],
        ..config(32)
    });
    let prefixes: Vec<Vec<Token>> = (0..6)
        .map(|n| tokens(100 * n..100 * n + 2 * (n + 1)))
        .collect();
    for prefix in &prefixes {
        host.insert(prefix, 0);
        copies(&mut host);
        store_plans(&mut host)
            .iter()
            .for_each(|plan| done(&mut host, plan, usize::MAX));
        host.evict_all();
    }
    for round in 0..6 {
        for at in 0..prefixes.len() {
            let target = Target::Prefix {
                ns: host.ns,
                tokens: prefixes[(round + at) % prefixes.len()].clone(),
            };
            let replica = Some(R0);
            let action = Action::Prefetch { target, replica };
            let before = host.cache.stats().tiers[0].in_transit;
            let outcome = host.cache.act(TenantId(1), &action, host.now);
            host.cache.check().unwrap();
            let rising = host.cache.stats().tiers[0].in_transit;
            assert!(rising <= 4, "{rising} of 16 pages are on their way up");
            if let Outcome::Deferred { pages } = outcome {
                assert_eq!(rising, before + pages);
            }
        }
        assert_eq!(host.cache.stats().tiers[0].in_transit, 4);
        copies(&mut host);
    }
    host.assert_idle();
}

/// Those who wait for copies and reads hear of their own and of no others.
#[test]
fn what_is_under_way_is_told_to_those_whom_it_concerns() {
    let mut host = Host::new(&CacheConfig {
        device_pages: vec![8, 8],
        ..config(8)
    });
    let at = |host: &Host| {
        let tiers = [DEVICE, TierId::Device(ReplicaId(1)), TierId::Host];
        tiers.map(|tier| host.cache.copies_at(tier))
    };
    let of = |host: &mut Host, replica| {
        let mut plans = Vec::new();
        host.cache.drain_copies_of(ReplicaId(replica), &mut plans);
        plans
    };
    host.insert(&tokens(0..8), 0);
    assert_eq!(at(&host), [1, 0, 1]);
    assert_eq!(of(&mut host, 1), []);
    host.plans = of(&mut host, 0);
    assert_eq!(host.plans.len(), 1);
    assert_eq!(of(&mut host, 0), [], "each is given once");
    copies(&mut host);
    assert_eq!(at(&host), [0, 0, 0]);
    let mut host = Host::new(&config(8));
    let stored = store(&mut host, &tokens(0..8));
    host.evict_all();
    let mut lease = host.find(&tokens(0..8)).lease;
    let asked = |host: &Host, lease: &Lease| {
        let cache = &host.cache;
        (cache.is_promoting(lease), cache.is_coming(lease))
    };
    assert_eq!(asked(&host, &lease), (false, false));
    let (mut room, _) = host.cache.reserve(DEVICE, 4, host.now).unwrap();
    let plan = host.cache.promote(&mut lease, &mut room, host.now).unwrap();
    host.cache.cancel(room);
    let other = host.find(&tokens(0..8)).lease;
    assert!(host.cache.is_promoting(&lease));
    assert_eq!(asked(&host, &other), (false, true));
    host.plans.push(plan);
    copies(&mut host);
    assert!(!host.cache.is_promoting(&lease));
    assert_eq!(asked(&host, &other), (false, false));
    host.end(lease);
    host.end(other);
    let mut new = restarted(8, &stored);
    let reads = |host: &Host, range| {
        let tokens = &tokens(range);
        host.cache.is_reading(Key {
            ns: host.ns,
            tokens,
        })
    };
    assert!(!reads(&new, 0..8));
    let plans = fetch(&mut new, &tokens(0..8));
    assert!(reads(&new, 0..8) && reads(&new, 0..2) && reads(&new, 0..40));
    assert!(!reads(&new, 0..1) && !reads(&new, 50..58) && !reads(&new, 1..8));
    done(&mut new, &plans[0], 4);
    assert!(!reads(&new, 0..8));
}
