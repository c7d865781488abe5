//! Shares of tenants, the order by output length, and the step budget that follows the clock.

use rootstock_radix::TenantId;
use rootstock_scheduler::{RequestId, SchedulePolicy, SchedulerConfig};
use rootstock_tests::world::{World, prompt, request};

fn one_seat(policy: SchedulePolicy) -> World {
    let config = SchedulerConfig {
        policy,
        max_running: 1,
        preempt_gap: None,
        aging_s: 0.0,
        ..SchedulerConfig::default()
    };
    World::new(64, config)
}

fn add(world: &mut World, tenant: u32, salt: u32, tokens: u32, strict: u32) -> RequestId {
    let mut new = request(world.ns, &prompt(salt, tokens), 1);
    new.tenant = TenantId(tenant);
    new.hints.strict = strict;
    world.add(new)
}

/// Runs dry and returns the ids in the order in which they ended; with one seat that is the
/// order in which they started.
fn order(world: &mut World, ids: &[RequestId]) -> Vec<RequestId> {
    let mut order = Vec::new();
    while order.len() < ids.len() {
        world.step();
        order.extend(ids.iter().filter(|&&id| world.ended(id)));
        order.dedup();
        let mut seen = std::collections::BTreeSet::new();
        order.retain(|id| seen.insert(*id));
    }
    world.run_dry();
    order
}

#[test]
fn a_flood_of_one_tenant_does_not_delay_another_beyond_its_share() {
    let mut world = one_seat(SchedulePolicy::Priority);
    let flood: Vec<_> = (0..30).map(|n| add(&mut world, 1, n, 20, 0)).collect();
    let other: Vec<_> = (0..5).map(|n| add(&mut world, 2, 100 + n, 20, 0)).collect();
    let ids: Vec<_> = flood.iter().chain(&other).copied().collect();
    let order = order(&mut world, &ids);
    let last = order
        .iter()
        .rposition(|id| other.contains(id))
        .expect("they all ran");
    assert!(
        last < 11,
        "the five of the second tenant were done after {} starts",
        last + 1
    );
}

#[test]
fn without_shares_the_flood_goes_first() {
    let config = SchedulerConfig {
        fair_shares: false,
        ..one_seat(SchedulePolicy::Priority)
            .scheduler
            .config()
            .clone()
    };
    let mut world = World::new(64, config);
    let flood: Vec<_> = (0..8).map(|n| add(&mut world, 1, n, 20, 0)).collect();
    let other = add(&mut world, 2, 100, 20, 0);
    let ids: Vec<_> = flood.iter().copied().chain([other]).collect();
    assert_eq!(order(&mut world, &ids), ids);
}

#[test]
fn shares_are_counted_in_uncached_tokens() {
    let mut world = one_seat(SchedulePolicy::Priority);
    // The first tenant's prompts are four times as long: it starts a quarter as often.
    let long: Vec<_> = (0..10).map(|n| add(&mut world, 1, n, 160, 0)).collect();
    let short: Vec<_> = (0..40)
        .map(|n| add(&mut world, 2, 100 + n, 40, 0))
        .collect();
    let ids: Vec<_> = long.iter().chain(&short).copied().collect();
    let order = order(&mut world, &ids);
    let among = order.iter().take(25).filter(|id| long.contains(id)).count();
    assert!(
        (4..=6).contains(&among),
        "{among} long ones among the first 25"
    );
}

#[test]
fn a_tenant_that_was_idle_has_saved_nothing_up() {
    let mut world = one_seat(SchedulePolicy::Priority);
    let early: Vec<_> = (0..20).map(|n| add(&mut world, 1, n, 20, 0)).collect();
    for _ in 0..30 {
        world.step();
    }
    assert!(world.ended(early[10]));
    let more: Vec<_> = (50..60).map(|n| add(&mut world, 1, n, 20, 0)).collect();
    let late: Vec<_> = (0..10)
        .map(|n| add(&mut world, 2, 100 + n, 20, 0))
        .collect();
    let ids: Vec<_> = more.iter().chain(&late).copied().collect();
    let order = order(&mut world, &ids);
    let first: Vec<bool> = order.iter().take(10).map(|id| late.contains(id)).collect();
    let count = first.iter().filter(|&&of_late| of_late).count();
    assert!(
        (4..=6).contains(&count),
        "{count} of the first ten starts: {first:?}"
    );
}

#[test]
fn a_strict_tier_goes_before_shares() {
    let mut world = one_seat(SchedulePolicy::Priority);
    let plain: Vec<_> = (0..4).map(|n| add(&mut world, 2, 100 + n, 20, 0)).collect();
    let strict: Vec<_> = (0..8).map(|n| add(&mut world, 1, n, 20, 1)).collect();
    let ids: Vec<_> = plain.iter().chain(&strict).copied().collect();
    let order = order(&mut world, &ids);
    assert!(order.iter().take(8).all(|id| strict.contains(id)));
}

#[test]
fn longest_output_first_orders_by_what_was_asked_for() {
    let mut world = one_seat(SchedulePolicy::Lof);
    let ids: Vec<_> = [3, 9, 1, 6]
        .map(|n| world.submit(&prompt(n, 20), n, 0))
        .into();
    let order = order(&mut world, &ids);
    assert_eq!(order, vec![ids[1], ids[3], ids[0], ids[2]]);
}

#[test]
fn the_largest_group_of_a_shared_prefix_goes_first_and_the_aged_before_it() {
    let mut world = one_seat(SchedulePolicy::DfsWeight);
    let config = SchedulerConfig {
        aging_s: 10.0,
        ..world.scheduler.config().clone()
    };
    world = World::new(64, config);
    let tails = |group: u32, n: u32| {
        let mut tokens = prompt(group, 32);
        tokens.extend(prompt(100 + n, 9));
        tokens
    };
    let blocker = world.submit(&prompt(90, 5), 60, 0);
    world.step();
    let aged = world.submit(&prompt(80, 20), 1, 0);
    world.now += 11 * rootstock_tests::world::SECOND;
    let alone = world.submit(&prompt(70, 20), 1, 0);
    let mixed: Vec<_> = [1, 2, 2, 1, 2]
        .iter()
        .zip(0..)
        .map(|(&g, n)| world.submit(&tails(g, n), 1, 0))
        .collect();
    world.abort(blocker);
    let mut ids = mixed.clone();
    ids.extend([alone, aged]);
    let order = order(&mut world, &ids);
    let expected = [
        aged, mixed[1], mixed[2], mixed[4], mixed[0], mixed[3], alone,
    ];
    assert_eq!(order, expected);
}

/// Nanoseconds of a step of the machine that the scheduler has to learn: 1 ms and 0.1 ms a token.
fn step_ns(rows: &rootstock_tests::world::Rows) -> u64 {
    1_000_000 + rows.iter().map(|row| u64::from(row.2)).sum::<u64>() * 100_000
}

#[test]
fn the_step_budget_follows_the_target_time_once_steps_have_been_seen() {
    let config = SchedulerConfig {
        target_step_ms: 5,
        max_model_len: 4096,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(1000, config);
    for n in 0..4 {
        world.submit(&prompt(n, 30 + n), 400, 0);
    }
    for _ in 0..20 {
        let rows = world.launch().expect("four are decoding");
        world.step_ns = step_ns(&rows);
        world.land();
    }
    for n in 4..7 {
        world.submit(&prompt(n, 900 + n), 3, 0);
    }
    let mut times = Vec::new();
    for _ in 0..60 {
        let rows = world.launch().expect("there is work");
        world.step_ns = step_ns(&rows);
        times.push(world.step_ns);
        world.land();
    }
    let late = &times[20..];
    let most = late.iter().max().expect("forty steps");
    assert!(
        *most <= 5_500_000,
        "a step of {most} ns for a target of 5 ms"
    );
    let long = late.iter().filter(|&&ns| ns >= 4_000_000).count();
    assert!(long >= 35, "{long} of 40 steps use what they may: {late:?}");
    world.run_dry();
}

#[test]
fn a_target_below_what_a_page_takes_still_makes_progress() {
    let config = SchedulerConfig {
        target_step_ms: 1,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(1000, config);
    world.step_ns = 50_000_000;
    let ids: Vec<_> = (0..6)
        .map(|n| world.submit(&prompt(n, 300), 30, 0))
        .collect();
    world.run_dry();
    assert!(ids.iter().all(|&id| world.said_all(id)));
}
