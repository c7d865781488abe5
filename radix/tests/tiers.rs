//! The host tier and pins: the named faults of both, each as the smallest sequence.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "shared/host.rs"]
mod host;

use host::{DEVICE, Host, R0};
use rootstock_memory::{CopyClass, CopyDone, CopyPlan, PageId, TierId};
use rootstock_radix::{
    ActReason, Action, CacheConfig, Fate, Key, NamespaceId, Outcome, PolicyKind, Target, TenantId,
    Token, Ttl, WritePolicy,
};

const SECOND: u64 = 1_000_000_000;
const TENANT: TenantId = TenantId(1);

fn tiered(device: u32, host_pages: u32, write_policy: WritePolicy) -> Host {
    let device_pages = vec![device];
    Host::new(&CacheConfig {
        page_tokens: 1,
        device_pages,
        host_pages,
        write_policy,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    })
}

fn copies(host: &mut Host) -> Vec<CopyPlan> {
    let mut plans = std::mem::take(&mut host.plans);
    host.cache.drain_copies(&mut plans);
    plans
}

/// Acknowledges all copies that are planned; returns their pages.
fn settle(host: &mut Host, ok: bool) -> usize {
    let plans = copies(host);
    for plan in &plans {
        host.cache.copy_done(CopyDone { id: plan.id, ok }, host.now);
        host.cache.check().unwrap();
    }
    plans.iter().map(|plan| plan.to.1.len()).sum()
}

/// Makes `n` pages free, waiting for copies as a host would; the rounds that took.
fn room(host: &mut Host, n: u32) -> u32 {
    for round in 0..10 {
        match host.cache.make_room(DEVICE, n, host.now) {
            Ok(room) => {
                host.plans.extend(room.copies);
                return round;
            }
            Err(short) => assert!(short.in_transit_pages > 0, "{short}"),
        }
        host.cache.check().unwrap();
        assert!(settle(host, true) > 0);
    }
    unreachable!("no room after ten rounds of copies");
}

/// Other traffic evicts what it can, while a copy reads `sources`.
fn evict_hard(host: &mut Host, sources: &[PageId]) {
    for _ in 0..5 {
        for tier in [DEVICE, TierId::Host] {
            if let Ok(room) = host.cache.make_room(tier, 4, host.now) {
                host.plans.extend(room.copies);
            }
        }
        host.cache.check().unwrap();
        for other in copies(host) {
            assert!(other.to.1.iter().all(|id| !sources.contains(id)));
            host.cache.copy_done(
                CopyDone {
                    id: other.id,
                    ok: true,
                },
                host.now,
            );
        }
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<Token> {
    range.collect()
}

fn on_host(host: &Host, tokens: &[Token]) -> (u32, u32) {
    let probe = host.cache.probe(
        Key {
            ns: host.ns,
            tokens,
        },
        R0,
    );
    (probe.device_tokens, probe.host_tokens)
}

fn host_tier(host: &Host) -> rootstock_radix::TierStats {
    host.cache.stats().tiers[1]
}

fn pin(ns: NamespaceId, tokens: &[Token], seconds: u64) -> Action {
    let target = Target::Prefix {
        ns,
        tokens: tokens.to_vec(),
    };
    Action::Pin {
        target,
        ttl: Ttl {
            seconds,
            clamped: false,
        },
    }
}

/// A request that takes the whole device and leaves nothing.
fn flood(host: &mut Host) {
    let total = host.tier().total;
    room(host, total);
    assert_eq!(host.tier().free, total);
}

#[test]
fn what_write_back_evicts_is_on_host_page_by_page_and_comes_back() {
    let mut host = tiered(8, 8, WritePolicy::Back);
    let a = tokens(1..9);
    host.insert(&a, 0);
    assert_eq!(room(&mut host, 3), 1);
    assert_eq!(on_host(&host, &a), (5, 3));
    assert_eq!(room(&mut host, 8), 1);
    assert_eq!(on_host(&host, &a), (0, 8));
    let found = host.find(&a[..6]);
    assert_eq!((found.device_tokens, found.host_tokens), (0, 6));
    let mut lease = found.lease;
    let (mut reservation, _) = host.cache.reserve(DEVICE, 6, 0).unwrap();
    let plan = host.cache.promote(&mut lease, &mut reservation, 0).unwrap();
    assert_eq!(
        (plan.class, plan.from.0, plan.to.0),
        (CopyClass::Promote, TierId::Host, DEVICE)
    );
    assert_eq!((reservation.left(), host.tier().in_transit), (0, 6));
    host.cache.cancel(reservation);
    host.cache.check().unwrap();
    host.cache.copy_done(
        CopyDone {
            id: plan.id,
            ok: true,
        },
        0,
    );
    host.cache.check().unwrap();
    // What has arrived stays until the lease takes it over, whatever the pressure.
    assert!(host.cache.make_room(DEVICE, 3, 0).is_err());
    let key = Key {
        ns: host.ns,
        tokens: &a,
    };
    assert_eq!(host.cache.grow(&mut lease, key, 6, 0), 6);
    assert_eq!(host.pages(&lease), plan.to.1.to_vec());
    host.end(lease);
    host.assert_idle();
}

#[test]
fn host_pages_are_safe_from_being_chosen_until_the_copy_back_is_acknowledged() {
    for (ok, late, abort) in [
        (true, false, false),
        (true, true, false),
        (false, true, false),
        (true, true, true),
        (false, false, true),
    ] {
        let mut host = tiered(8, 8, WritePolicy::Back);
        let (a, b) = (tokens(1..9), tokens(11..19));
        host.insert(&a, 0);
        flood(&mut host);
        host.insert(&b, 0);
        let mut lease = host.find(&a).lease;
        // Room for A means that B goes: its copy to host may not take A's pages once they are
        // chosen, and they are chosen by `promote`. Host is full, A is older, so B displaces it.
        let reserved = host.cache.reserve(DEVICE, 4, host.now);
        let (mut reservation, _) = match reserved {
            Ok(granted) => granted,
            Err(short) => {
                assert!(short.in_transit_pages > 0);
                settle(&mut host, true);
                host.cache.reserve(DEVICE, 4, host.now).unwrap()
            }
        };
        host.cache.check().unwrap();
        let plan = host.cache.promote(&mut lease, &mut reservation, host.now);
        host.cache.cancel(reservation);
        host.cache.check().unwrap();
        let Some(plan) = plan else {
            host.end(lease);
            settle(&mut host, true);
            host.assert_idle();
            continue;
        };
        let sources: Vec<_> = plan.from.1.to_vec();
        if late {
            evict_hard(&mut host, &sources);
        }
        let mut lease = Some(lease);
        if abort {
            host.end(lease.take().unwrap());
        }
        host.cache.copy_done(CopyDone { id: plan.id, ok }, host.now);
        host.cache.check().unwrap();
        // A second acknowledgement is counted and does nothing.
        host.cache.copy_done(CopyDone { id: plan.id, ok }, host.now);
        assert_eq!(host.cache.stats().copies_stray, 1);
        if let Some(mut lease) = lease {
            let key = Key {
                ns: host.ns,
                tokens: &a,
            };
            let grown = host.cache.grow(&mut lease, key, 8, host.now);
            assert_eq!(grown > 0, ok);
            host.end(lease);
        }
        settle(&mut host, true);
        host.assert_idle();
    }
}

#[test]
fn a_host_write_that_did_not_happen_is_not_believed() {
    // All host pages belong to pins: nothing can be written.
    let config = CacheConfig {
        page_tokens: 1,
        device_pages: vec![8],
        host_pages: 2,
        write_policy: WritePolicy::Back,
        pin_budget: 1.0,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    host.insert(&[1, 2], 0);
    let act = pin(host.ns, &[1, 2], 100);
    assert_eq!(
        host.cache.act(TENANT, &act, 0),
        Outcome::Accepted { pages: 2 }
    );
    assert_eq!(settle(&mut host, true), 2);
    host.insert(&[5, 6, 7], 0);
    flood(&mut host);
    assert_eq!(on_host(&host, &[5, 6, 7]), (0, 0));
    assert_eq!(on_host(&host, &[1, 2]), (0, 2));
    host.assert_idle();
    // A copy that fails leaves nothing on host either, and does not stop the device.
    let mut host = tiered(8, 8, WritePolicy::Back);
    host.insert(&[1, 2, 3], 0);
    assert!(host.cache.make_room(DEVICE, 8, 0).is_err());
    assert_eq!(settle(&mut host, false), 3);
    assert_eq!(on_host(&host, &[1, 2, 3]), (3, 0));
    assert!(host.cache.make_room(DEVICE, 8, 0).is_ok());
    assert_eq!(on_host(&host, &[1, 2, 3]), (0, 0));
    assert_eq!(host.cache.stats().copies_failed, 1);
    host.assert_idle();
}

#[test]
fn asking_host_for_one_page_costs_one_page() {
    let mut host = tiered(10, 10, WritePolicy::Through);
    for token in 1..11 {
        host.insert(&[token], 0);
        settle(&mut host, true);
    }
    flood(&mut host);
    assert_eq!(host_tier(&host).evictable, 10);
    let room = host.cache.make_room(TierId::Host, 1, 0).unwrap();
    assert_eq!((room.freed_pages, host_tier(&host).free), (1, 1));
    assert_eq!((on_host(&host, &[1]).1, on_host(&host, &[2]).1), (0, 1));
}

#[test]
fn a_host_tier_smaller_than_the_device_keeps_what_fits() {
    let mut host = tiered(8, 3, WritePolicy::Back);
    let a = tokens(1..9);
    host.insert(&a, 0);
    flood(&mut host);
    // Only pages that follow each other from the root are worth anything.
    let (_, kept) = on_host(&host, &a);
    assert!(host_tier(&host).evictable <= 3);
    assert_eq!(kept, host_tier(&host).evictable);
    host.assert_idle();
}

#[test]
fn selective_writes_wait_for_the_second_match_and_through_writes_do_not() {
    let mut host = tiered(8, 8, WritePolicy::Selective);
    host.insert(&[1, 2], 0);
    let _ = host.hit(&[1, 2]);
    assert_eq!(settle(&mut host, true), 0);
    let _ = host.hit(&[1, 2]);
    assert_eq!(settle(&mut host, true), 2);
    let _ = host.hit(&[1, 2]);
    assert_eq!(settle(&mut host, true), 0);
    flood(&mut host);
    assert_eq!(on_host(&host, &[1, 2]), (0, 2));
    let mut host = tiered(8, 8, WritePolicy::Through);
    host.insert(&[1, 2], 0);
    assert_eq!(settle(&mut host, true), 2);
}

#[test]
fn a_preempted_request_leaves_its_pages_on_host() {
    let mut host = tiered(8, 8, WritePolicy::Selective);
    let lease = host.run(&[1, 2, 3], 0);
    host.finish(lease, Fate::Preempted);
    let plans = copies(&mut host);
    assert!(plans.iter().all(|plan| plan.class == CopyClass::Preempt));
    host.cache.copy_done(
        CopyDone {
            id: plans[0].id,
            ok: true,
        },
        0,
    );
    flood(&mut host);
    assert_eq!(on_host(&host, &[1, 2, 3]), (0, 3));
}

#[test]
fn pins_have_a_budget_of_distinct_pages_and_say_how_far_they_go() {
    let mut host = tiered(20, 10, WritePolicy::Selective);
    let (p1, p2) = (tokens(1..5), tokens(11..15));
    host.insert(&p1, 0);
    host.insert(&p2, 0);
    let (one, two) = (pin(host.ns, &p1, 60), pin(host.ns, &p2, 60));
    let pinned = |host: &Host| host.cache.stats().pinned_pages;
    assert_eq!(
        host.cache.act(TENANT, &one, 0),
        Outcome::Accepted { pages: 4 }
    );
    assert_eq!(
        host.cache.act(TENANT, &two, 0),
        Outcome::Clipped {
            pages: 1,
            asked_pages: 4
        }
    );
    assert_eq!(pinned(&host), 5);
    assert_eq!(
        host.cache.act(TENANT, &one, 0),
        Outcome::Accepted { pages: 4 }
    );
    assert_eq!(pinned(&host), 5);
    host.insert(&[1, 2, 99], 0);
    assert_eq!(pinned(&host), 5);
    assert_eq!(settle(&mut host, true), 5);
    // The flood takes the device, the pins survive on host.
    for round in 0..5 {
        host.insert(&tokens(100 * round..100 * round + 20), 0);
        settle(&mut host, true);
        flood(&mut host);
    }
    assert_eq!((on_host(&host, &p1), on_host(&host, &p2)), ((0, 4), (0, 1)));
    host.cache.tick(61 * SECOND);
    assert_eq!(pinned(&host), 0);
    assert_eq!(
        host.cache.act(TENANT, &one, 61 * SECOND),
        Outcome::Accepted { pages: 4 }
    );
    host.cache.flush(61 * SECOND).unwrap();
    assert_eq!(pinned(&host), 0);
    assert_eq!(host.cache.act(TENANT, &one, 61 * SECOND), Outcome::Missing);
    host.assert_idle();
}

#[test]
fn without_budget_a_pin_is_refused_and_the_request_runs() {
    let config = CacheConfig {
        page_tokens: 1,
        host_pages: 10,
        pin_budget: 0.0,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    };
    let mut host = Host::new(&config);
    host.insert(&[1, 2], 0);
    let act = pin(host.ns, &[1, 2], 60);
    assert_eq!(
        host.cache.act(TENANT, &act, 0),
        Outcome::Rejected(ActReason::Budget)
    );
    assert_eq!(host.hit(&[1, 2]), 2);
    let zero = pin(host.ns, &[1, 2], 0);
    assert_eq!(
        host.cache.act(TENANT, &zero, 0),
        Outcome::Rejected(ActReason::ZeroTtl)
    );
}

#[test]
fn an_expired_pin_stays_expired_and_a_match_before_the_deadline_renews_it() {
    let mut host = Host::of(1, 10);
    host.insert(&[1, 2], 0);
    let act = pin(host.ns, &[1, 2], 60);
    host.now = 0;
    assert_eq!(
        host.cache.act(TENANT, &act, 0),
        Outcome::Accepted { pages: 2 }
    );
    // A read after the deadline does not bring it back.
    host.now = 61 * SECOND;
    assert_eq!(host.hit(&[1, 2]), 2);
    assert_eq!(host.cache.stats().pinned_pages, 0);
    host.insert(&[7], 0);
    assert!(host.evict(2));
    assert_eq!((host.peek(&[1, 2]), host.peek(&[7])), (0, 1));
    // One before it does, for a whole lifetime.
    host.insert(&[1, 2], 0);
    host.now = 100 * SECOND;
    assert_eq!(
        host.cache.act(TENANT, &act, host.now),
        Outcome::Accepted { pages: 2 }
    );
    host.now = 130 * SECOND;
    assert_eq!(host.hit(&[1]), 1);
    host.cache.tick(160 * SECOND);
    assert_eq!(
        host.cache.stats().pinned_pages,
        1,
        "only the matched page was renewed"
    );
    host.cache.tick(189 * SECOND);
    assert_eq!(host.cache.stats().pinned_pages, 1);
    host.cache.tick(191 * SECOND);
    assert_eq!(host.cache.stats().pinned_pages, 0);
    // A shorter pin never shortens a longer one.
    let (long, short) = (pin(host.ns, &[1], 100), pin(host.ns, &[1], 10));
    let _ = host.cache.act(TENANT, &long, 200 * SECOND);
    let _ = host.cache.act(TENANT, &short, 201 * SECOND);
    host.cache.tick(299 * SECOND);
    assert_eq!(host.cache.stats().pinned_pages, 1);
    host.cache.tick(300 * SECOND);
    assert_eq!(host.cache.stats().pinned_pages, 0);
    host.cache.check().unwrap();
}

#[test]
fn without_a_host_tier_pins_outlive_other_pages_and_give_way_last_weakest_first() {
    let mut host = Host::of(1, 10);
    host.insert(&[1, 2], 0);
    host.insert(&[3, 4], 0);
    host.insert(&[5, 6], 0);
    for (prefix, seconds) in [([1, 2], 60), ([3, 4], 30)] {
        let act = pin(host.ns, &prefix, seconds);
        assert_eq!(
            host.cache.act(TENANT, &act, host.now),
            Outcome::Accepted { pages: 2 }
        );
    }
    // Five pages are the budget, half of the device.
    let act = pin(host.ns, &[5, 6], 60);
    let clipped = Outcome::Clipped {
        pages: 1,
        asked_pages: 2,
    };
    assert_eq!(host.cache.act(TENANT, &act, host.now), clipped);
    assert!(host.evict(1));
    assert_eq!(host.peek(&[5, 6]), 1);
    let made = host.cache.make_room(DEVICE, 6, host.now).unwrap();
    assert_eq!((made.freed_pages, made.pins_yielded > 0), (1, true));
    assert_eq!((host.peek(&[1, 2]), host.peek(&[3, 4])), (2, 1));
    // Pins never make a request unschedulable.
    assert!(host.cache.make_room(DEVICE, 10, host.now).is_ok());
    assert_eq!(host.cache.stats().pinned_pages, 0);
    host.assert_idle();
}

#[test]
fn a_tenant_cannot_release_the_pin_of_another() {
    let mut host = Host::of(1, 10);
    host.insert(&[1, 2], 0);
    let _ = host.cache.act(TENANT, &pin(host.ns, &[1, 2], 60), 0);
    let target = Target::Prefix {
        ns: host.ns,
        tokens: vec![1, 2],
    };
    let release = Action::Release { target };
    assert_eq!(host.cache.act(TenantId(2), &release, 0), Outcome::Missing);
    assert_eq!(host.cache.stats().pinned_pages, 2);
    assert_eq!(
        host.cache.act(TENANT, &release, 0),
        Outcome::Accepted { pages: 2 }
    );
    assert_eq!(host.cache.stats().pinned_pages, 0);
}

/// The search for the place of an expired pin once stopped at a spent node that lies in front
/// whatever its stamp, and put the pin before its own child.
#[test]
fn an_expired_pin_goes_behind_its_children_even_when_they_were_spent() {
    let mut host = Host::of(1, 10);
    host.insert(&[1, 2], 0);
    let _ = host.cache.act(TENANT, &pin(host.ns, &[1, 2], 60), 0);
    for spent in [&[1, 2, 3][..], &[9]] {
        let lease = host.run(spent, 0);
        host.finish(lease, Fate::Superseded);
    }
    host.cache.tick(61 * SECOND);
    host.cache.check().unwrap();
    assert!(host.evict(2));
    assert_eq!((host.peek(&[1, 2, 3]), host.peek(&[9])), (2, 0));
}

/// A request goes on while a copy reads its last node. The copy brings what it was planned for,
/// the request keeps what it adds, on whatever page the two meet and however the copy ends.
#[test]
fn a_request_extends_a_prefix_that_is_being_copied_down() {
    for (first, more, ok) in (1..4).flat_map(|first| {
        let ends = [true, false].into_iter();
        ends.flat_map(move |ok| (1..4).map(move |more| (first, more, ok)))
    }) {
        let mut host = tiered(16, 16, WritePolicy::Back);
        let mut lease = host.run(&tokens(0..first), 0);
        let target = Target::Prefix {
            ns: host.ns,
            tokens: tokens(0..first),
        };
        let pages = first;
        let outcome = host.cache.act(TENANT, &Action::Demote { target }, host.now);
        assert_eq!(outcome, Outcome::Deferred { pages });
        host.extend(&mut lease, &tokens(0..first + more), 0);
        let own = host.pages(&lease);
        assert_eq!(settle(&mut host, ok), pages as usize);
        assert_eq!(host.pages(&lease), own, "a copy moves no page of a request");
        assert_eq!(host_tier(&host).evictable, if ok { first } else { 0 });
        host.end(lease);
        settle(&mut host, true);
        assert_eq!(host.hit(&tokens(0..first + more)), first + more);
        room(&mut host, 16);
        assert_eq!(on_host(&host, &tokens(0..first + more)), (0, first + more));
        host.assert_idle();
    }
}

/// A match counts as a use on host too, also when none of the matches has ended yet.
#[test]
fn matches_on_host_are_in_the_order_in_which_they_were_made() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
        let mut host = tiered(8, 3, WritePolicy::Through);
        for first in 0..3 {
            host.insert(&tokens(first..first + 1), 0);
            settle(&mut host, true);
        }
        host.evict_all();
        let mut leases = Vec::new();
        for first in order {
            let found = host.find(&tokens(first..first + 1));
            assert_eq!((found.device_tokens, found.host_tokens), (0, 1));
            leases.push(found.lease);
        }
        for first in order {
            assert_eq!(on_host(&host, &tokens(first..first + 1)), (0, 1));
            let free = host_tier(&host).free;
            let gone = host.cache.make_room(TierId::Host, free + 1, host.now);
            assert_eq!(gone.unwrap().freed_pages, 1);
            assert_eq!(
                on_host(&host, &tokens(first..first + 1)),
                (0, 0),
                "{order:?}"
            );
        }
        leases.into_iter().for_each(|lease| host.end(lease));
        host.assert_idle();
    }
}

#[test]
fn what_host_says_is_available_can_be_had_and_no_more() {
    for pinned in 0..=3 {
        let mut host = tiered(8, 8, WritePolicy::Through);
        for first in [0, 10] {
            host.insert(&tokens(first..first + 3), 0);
            settle(&mut host, true);
        }
        host.evict_all();
        if pinned > 0 {
            let pin = pin(host.ns, &tokens(0..pinned), 60);
            let pages = pinned;
            let told = host.cache.act(TENANT, &pin, host.now);
            assert_eq!(told, Outcome::Accepted { pages });
        }
        let available = host.cache.available(TierId::Host);
        assert_eq!(available, 8 - pinned);
        let more = host.cache.make_room(TierId::Host, available + 1, host.now);
        assert!(more.is_err(), "{pinned} pages are pinned");
        let all = host.cache.make_room(TierId::Host, available, host.now);
        assert_eq!(all.unwrap().freed_pages, 6 - pinned);
        host.assert_idle();
    }
}
