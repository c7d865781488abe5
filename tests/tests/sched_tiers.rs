//! Requests over the host tier: fetched instead of computed, copied down when they give way,
//! pinned, and nobody wedged or refused while copies are under way.

use rootstock_memory::ReplicaId;
use rootstock_radix::{CacheConfig, Hints, PolicyKind, Token, Ttl, WritePolicy};
use rootstock_scheduler::{CachedTokens, FailKind, FinishReason, RequestId, SchedulerConfig};
use rootstock_tests::rig::Rig;
use rootstock_tests::world::{SECOND, World, prompt, request};

const PAGE: u32 = 4;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        page_tokens: PAGE,
        max_running: 4,
        step_tokens: 64,
        max_model_len: 128,
        prefill_ns_per_token: 1_000_000,
        copy_ns: 1_000,
        copy_ns_per_page: 1_000,
        ..SchedulerConfig::default()
    }
}

fn tiers(device: u32, host: u32, write_policy: WritePolicy) -> CacheConfig {
    CacheConfig {
        page_tokens: PAGE,
        device_pages: vec![device],
        host_pages: host,
        write_policy,
        policy: PolicyKind::Lru,
        ..CacheConfig::default()
    }
}

/// A world where prompt 1 (24 tokens) has been served and pushed to host by others.
fn demoted() -> (World, Vec<Token>) {
    demoted_in(config())
}

fn demoted_in(config: SchedulerConfig) -> (World, Vec<Token>) {
    let mut world = World::of(&tiers(10, 40, WritePolicy::Through), config);
    let first = prompt(1, 24);
    world.submit(&first, 1, 0);
    world.run_dry();
    world.submit(&prompt(2, 40), 1, 0);
    world.run_dry();
    assert_eq!(world.cached(&first), 0, "the device has let it go");
    (world, first)
}

fn longer(tokens: &[Token]) -> Vec<Token> {
    [tokens, &[7, 8, 9, 10, 11]].concat()
}

#[test]
fn a_prefix_on_host_is_fetched_and_only_the_rest_computed() {
    let (mut world, first) = demoted();
    let before = world.scheduler.stats().computed_tokens;
    let id = world.submit(&longer(&first), 3, 0);
    world.run_dry();
    assert!(world.said_all(id));
    let host = CachedTokens {
        host: 24,
        ..CachedTokens::default()
    };
    assert_eq!(world.heard(id).cached, host);
    assert_eq!(world.usage(id).cached, host);
    let stats = world.scheduler.stats();
    assert_eq!(stats.computed_tokens - before, 5 + 2);
    assert_eq!((stats.fetches, stats.fetched_tokens), (1, 24));
}

#[test]
fn part_of_a_prefix_on_device_and_part_on_host_are_counted_apart() {
    let (mut world, first) = demoted();
    let short = [&first[..8], &[5, 5, 5]].concat();
    let one = world.submit(&short, 1, 0);
    world.run_dry();
    assert_eq!(world.heard(one).cached.host, 8, "page-exact");
    let two = world.submit(&longer(&first), 2, 0);
    world.run_dry();
    assert!(world.said_all(two));
    let cached = world.heard(two).cached;
    assert_eq!((cached.device, cached.host), (8, 16));
}

#[test]
fn others_run_while_one_waits_for_its_copy_and_its_end_gives_everything_back() {
    let (mut world, first) = demoted();
    for end in [
        Some(FinishReason::Aborted),
        Some(FinishReason::Expired),
        None,
    ] {
        world.engine.hold_copies = true;
        let mut new = request(world.ns, &longer(&first), 2);
        new.deadline = (end == Some(FinishReason::Expired)).then(|| world.now + 60 * SECOND);
        let waits = world.add(new);
        let other = world.submit(&[1, 2, 3], 4, 0);
        for _ in 0..20 {
            world.step();
        }
        assert!(world.said_all(other), "it did not wait for the copy");
        assert_eq!(world.scheduler.phase(waits), Some("fetching"));
        match end {
            Some(FinishReason::Aborted) => assert!(world.abort(waits)),
            Some(_) => {
                world.now += 61 * SECOND;
                world.step();
            }
            None => {}
        }
        if let Some(reason) = end {
            assert_eq!(world.reason(waits), reason);
            assert_eq!(world.heard(waits).started, None);
        }
        world.engine.hold_copies = false;
        world.run_dry();
        assert!(end.is_some() || world.said_all(waits));
        // Out of the device again.
        world.submit(&prompt(3, 40), 1, 0);
        world.run_dry();
    }
}

/// The same over a backend that orders each layer of a step behind its copies.
fn ordered() -> (World, Vec<Token>) {
    let (mut world, first) = demoted_in(SchedulerConfig {
        begin_in_transit: true,
        max_in_flight: 2,
        ..config()
    });
    world.engine.orders_layers = true;
    (world, first)
}

#[test]
fn a_request_begins_on_pages_that_a_copy_still_fills() {
    let (mut world, first) = ordered();
    world.engine.hold_copies = true;
    let id = world.submit(&longer(&first), 3, 0);
    assert_eq!(world.launch(), Some(vec![(id, 24, 5)]));
    assert_eq!(world.scheduler.phase(id), Some("prefill"));
    // To its end, and nobody has said that the copy has.
    for _ in 0..5 {
        world.step();
    }
    assert!(world.said_all(id));
    assert_eq!(world.heard(id).cached.host, 24);
    assert_eq!(world.cached(&first), 0);
    assert_eq!(world.cache.stats().copies_under_way, 1);
    world.engine.hold_copies = false;
    world.run_dry();
    assert_eq!(
        world.cached(&first),
        24,
        "it came, and nobody had to wait for it"
    );
    assert_eq!(world.scheduler.stats().begun_in_transit, 1);
    // What is computed while a copy ends becomes cached behind what it brought.
    world.submit(&prompt(3, 40), 1, 0);
    world.run_dry();
    let id = world.submit(&longer(&first), 4, 0);
    world.run_dry();
    assert!(world.said_all(id));
    assert_eq!(world.cached(&longer(&first)), 28);
    assert_eq!(world.scheduler.stats().begun_in_transit, 2);
}

#[test]
fn a_copy_that_fails_under_a_step_fails_that_request_alone_and_gives_its_pages_back() {
    // Told of the copy first, of the step first, and with a further step in flight.
    for (copy_first, further) in [(true, false), (false, false), (true, true)] {
        let (mut world, first) = ordered();
        let other = world.submit(&[1, 2, 3], 6, 0);
        world.step();
        world.engine.copy_failures = 100;
        let id = world.submit(&longer(&first), 3, 0);
        while !world.engine.must_fail(ReplicaId(0)) {
            world.launch();
            if !world.engine.must_fail(ReplicaId(0)) {
                world.land();
            }
        }
        if further {
            world.launch();
        }
        if copy_first {
            world.acknowledge();
            let rows = world.launch().unwrap_or_default();
            assert!(rows.iter().all(|row| row.0 != id), "on what never came");
        }
        while world.engine.must_fail(ReplicaId(0)) {
            world.fail();
        }
        assert_eq!(world.reason(id), FinishReason::Failed(FailKind::Step));
        world.engine.copy_failures = 0;
        world.run_dry();
        assert!(world.ended(other));
        let again = world.submit(&longer(&first), 3, 0);
        world.run_dry();
        assert!(world.said_all(again), "{copy_first} {further}");
    }
}

#[test]
fn what_a_failed_copy_should_have_brought_is_computed() {
    let (mut world, first) = demoted();
    world.engine.copy_failures = 100;
    let id = world.submit(&longer(&first), 3, 0);
    world.run_dry();
    assert!(world.said_all(id));
    assert_eq!(world.usage(id).cached, CachedTokens::default());
    let stats = world.scheduler.stats();
    assert_eq!((stats.fetches, stats.fetches_failed), (1, 1));
}

#[test]
fn two_that_need_the_same_pages_fetch_them_once() {
    let (mut world, first) = demoted();
    let ids = [1, 2].map(|_| world.submit(&longer(&first), 2, 0));
    world.run_dry();
    assert!(ids.iter().all(|&id| world.said_all(id)));
    assert_eq!(world.scheduler.stats().fetched_tokens, 24);
}

#[test]
fn a_copy_that_takes_longer_than_computing_is_not_made() {
    let (world, first) = demoted();
    let dear = SchedulerConfig {
        copy_ns_per_page: 100_000_000,
        ..config()
    };
    drop(world);
    let mut world = World::of(&tiers(10, 40, WritePolicy::Through), dear);
    world.submit(&first, 1, 0);
    world.run_dry();
    world.submit(&prompt(2, 40), 1, 0);
    world.run_dry();
    let id = world.submit(&longer(&first), 1, 0);
    world.run_dry();
    assert_eq!(world.usage(id).cached, CachedTokens::default());
    assert_eq!(world.scheduler.stats().fetches, 0);
}

#[test]
fn pages_on_their_way_down_are_waited_for_and_nobody_is_refused() {
    let mut world = World::of(&tiers(10, 40, WritePolicy::Back), config());
    world.submit(&prompt(1, 39), 1, 0);
    world.run_dry();
    world.engine.hold_copies = true;
    let id = world.submit(&prompt(2, 39), 1, 0);
    for _ in 0..10 {
        world.step();
    }
    assert!(!world.ended(id), "the copies are still under way");
    world.engine.hold_copies = false;
    world.run_dry();
    assert!(world.said_all(id));
}

#[test]
fn copies_end_without_traffic_and_a_flush_finds_the_cache_at_rest() {
    let mut world = World::of(&tiers(10, 40, WritePolicy::Through), config());
    world.submit(&prompt(1, 24), 1, 0);
    while !world.scheduler.is_idle() {
        world.step();
    }
    assert!(
        world.cache.flush(world.now).is_err(),
        "pages are on their way"
    );
    let rows = world.launch();
    assert_eq!(rows, Some(Vec::new()), "a plan of copies alone");
    world.land();
    world.acknowledge();
    assert_eq!(world.launch(), None);
    assert_eq!(world.cache.flush(world.now), Ok(()));
}

#[test]
fn a_request_that_gave_way_comes_back_by_copies_and_says_what_it_says_alone() {
    let mut world = World::of(&tiers(12, 40, WritePolicy::Selective), config());
    let low = world.submit(&prompt(1, 36), 8, 0);
    world.until_said(low, 2);
    let computed = world.scheduler.stats().computed_tokens;
    let high = world.submit(&prompt(2, 40), 2, 5);
    world.run_dry();
    assert!(world.said_all(low) && world.said_all(high));
    assert_eq!(world.usage(low).preemptions, 1);
    let stats = world.scheduler.stats();
    assert!(stats.fetched_tokens > 0, "{stats:?}");
    let again = stats.computed_tokens - computed - (40 + 1) - 6;
    assert!(again <= u64::from(PAGE), "{again} tokens computed twice");
}

fn pinned(rig: &Rig, tokens: &[Token], seconds: u64) -> rootstock_scheduler::NewRequest {
    let mut new = request(rig.ns, tokens, 2);
    let clamped = false;
    new.hints.pins = vec![(u32::MAX, Ttl { seconds, clamped })];
    new
}

fn rig(replicas: usize, host: u32, write_policy: WritePolicy) -> Rig {
    let cache = CacheConfig {
        device_pages: vec![32; replicas],
        policy: PolicyKind::Priority,
        ..tiers(0, host, write_policy)
    };
    let scheduler = SchedulerConfig {
        max_queue: 512,
        max_running: 8,
        ..config()
    };
    Rig::new(cache, scheduler)
}

#[test]
fn with_everything_pinned_that_may_be_two_hundred_requests_complete() {
    for host in [0, 16, 64] {
        let mut rig = rig(1, host, WritePolicy::Selective);
        let mut kept = Vec::new();
        for n in 0..20 {
            let tokens = prompt(n, 24);
            let new = pinned(&rig, &tokens, 3600);
            let id = rig.add(new);
            rig.run_dry();
            let (_, usage) = rig.heard(id).last.expect("it has ended");
            assert_eq!((usage.pins.asked, usage.pins.asked_pages), (1, 6));
            kept.push((tokens, usage.pins.pages * PAGE));
        }
        let stats = rig.core.stats().cache;
        assert_eq!(stats.pinned_pages, stats.pin_budget_pages, "to the limit");
        let ids: Vec<RequestId> = (0..200)
            .map(|n| rig.add(request(rig.ns, &prompt(100 + n, 40 + n % 60), 4)))
            .collect();
        rig.run_dry();
        for id in ids {
            assert!(rig.said_all(id));
            let (reason, _) = rig.heard(id).last.expect("it has ended");
            assert_eq!(reason, FinishReason::Length);
        }
        for (tokens, pinned) in kept.iter().filter(|_| host > 0) {
            assert!(rig.found(tokens, 0) >= *pinned, "pinned and lost");
        }
    }
}

#[test]
fn pins_end_at_their_deadline_without_traffic() {
    let mut rig = rig(1, 32, WritePolicy::Selective);
    let new = pinned(&rig, &prompt(1, 24), 60);
    rig.add(new);
    rig.run_dry();
    assert_eq!(rig.core.stats().cache.pinned_pages, 6);
    let due = rig.core.due_at().expect("the pin's deadline");
    assert!(due > rig.now && due <= rig.now + 60 * SECOND);
    rig.core.tick(due);
    assert_eq!(rig.core.stats().cache.pinned_pages, 0);
    assert_eq!(rig.core.due_at(), None);
}

#[test]
fn with_a_host_tier_priority_ten_is_kept_against_a_flood_of_priority_zero() {
    let mut rig = rig(1, 64, WritePolicy::Selective);
    let prompts: Vec<Vec<Token>> = (0..8).map(|n| prompt(n, 24)).collect();
    let ask = |rig: &mut Rig, tokens: &[Token], priority| {
        let hints = Hints {
            priority,
            ..Hints::default()
        };
        let new = rootstock_scheduler::NewRequest {
            hints,
            ..request(rig.ns, tokens, 2)
        };
        rig.add(new);
        rig.run_dry();
    };
    prompts.iter().for_each(|tokens| ask(&mut rig, tokens, 10));
    (100..200).for_each(|n| ask(&mut rig, &prompt(n, 40), 0));
    let kept: u32 = prompts.iter().map(|tokens| rig.found(tokens, 0)).sum();
    assert!(kept * 100 >= 95 * 8 * 24, "{kept} of {} tokens", 8 * 24);
}

#[test]
fn what_was_pinned_on_one_replica_serves_the_next_turn_on_another() {
    let mut rig = rig(2, 64, WritePolicy::Selective);
    let tokens = prompt(1, 48);
    let new = pinned(&rig, &tokens, 600);
    let first = rig.add(new);
    assert_eq!(first.replica(), ReplicaId(0));
    rig.run_dry();
    // All follow what the first replica has, until it has no seat left.
    let next = (0..9).map(|n| {
        let tail = [tokens.as_slice(), &[3, n]].concat();
        rig.add(request(rig.ns, &tail, 20))
    });
    let next: Vec<RequestId> = next.filter(|id| id.replica() == ReplicaId(1)).collect();
    let next = *next.first().expect("an idle replica takes a request");
    rig.run_dry();
    assert!(rig.said_all(next));
    let cached = rig.heard(next).cached;
    assert!(cached.host + cached.device >= 48, "{cached:?}");
}

#[test]
fn a_replica_that_becomes_idle_takes_over_who_waits_for_a_seat_elsewhere() {
    let cache = CacheConfig {
        device_pages: vec![32; 2],
        ..tiers(0, 64, WritePolicy::Selective)
    };
    let scheduler = SchedulerConfig {
        max_running: 1,
        queue_timeout_s: 60,
        ..config()
    };
    let mut rig = Rig::new(cache, scheduler);
    let shared = prompt(1, 40);
    rig.add(request(rig.ns, &shared, 1));
    rig.run_dry();
    let long = rig.add(request(rig.ns, &longer(&shared), 60));
    let short = rig.add(request(rig.ns, &[1, 2, 3], 4));
    let waits = rig.add(request(rig.ns, &[shared.as_slice(), &[9]].concat(), 4));
    let at = |id: RequestId| usize::from(id.replica().0);
    assert_eq!((at(long), at(short), at(waits)), (0, 1, 0));
    while rig.heard(waits).last.is_none() {
        rig.turn();
    }
    assert!(rig.said_all(waits) && rig.said_all(short));
    assert!(rig.heard(long).last.is_none(), "it did not wait for this");
    assert_eq!(rig.core.stats().routes.moved, 1);
    // One that has moved is still known by its id.
    let again = rig.add(request(rig.ns, &[shared.as_slice(), &[8]].concat(), 40));
    while rig.core.phase(again) == Some("queued") {
        rig.turn();
    }
    assert!(rig.core.abort(again, rig.now) && !rig.core.abort(again, rig.now));
    rig.run_dry();
}

/// Copies keep what they read. Who waits asks at every step, and a copy each time would keep the
/// very pages that it waits for.
#[test]
fn a_request_that_goes_on_waiting_copies_nothing_down() {
    let ranked = SchedulerConfig {
        preempt_gap: Some(3),
        ..config()
    };
    let mut world = World::of(&tiers(22, 40, WritePolicy::Selective), ranked);
    let first = prompt(1, 24);
    world.submit(&first, 1, 0);
    world.run_dry();
    // What gives way to it is not enough for it, so it is looked at, and goes on waiting.
    let important = world.submit(&prompt(2, 40), 12, 9);
    let lesser = world.submit(&prompt(4, 4), 12, 0);
    world.step();
    let waiting = world.submit(&[&first[..], &prompt(3, 24)].concat(), 1, 9);
    let mut steps = 0;
    while world.heard(important).last.is_none() {
        world.step();
        steps += 1;
        assert_eq!(world.scheduler.stats().copy_plans, 0, "step {steps}");
        assert_eq!(world.cache.stats().copies_under_way, 0, "step {steps}");
    }
    assert!(steps > 8, "it waited for {steps} steps only");
    world.run_dry();
    for id in [important, lesser, waiting] {
        assert!(world.said_all(id));
    }
}
