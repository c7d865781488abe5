//! The order of the queue: the table of rules, a plain model, and bounds on waiting.

use proptest::prelude::*;
use rootstock_radix::Hints;
use rootstock_scheduler::{Class, FinishReason, RequestId, SchedulePolicy, SchedulerConfig};
use rootstock_tests::world::{SECOND, World, prompt, request};

fn one_seat(policy: SchedulePolicy, aging_s: f64) -> World {
    let config = SchedulerConfig {
        policy,
        aging_s,
        max_running: 1,
        preempt_gap: None,
        ..SchedulerConfig::default()
    };
    World::new(64, config)
}

/// What a row of the table says about a request: (seconds after the first, hints).
type Wish = (u64, Hints);

fn hints(priority: i32, jump_s: f64, strict: u32) -> Hints {
    Hints {
        priority,
        jump_s,
        strict,
        ..Hints::default()
    }
}

/// Adds requests while the one seat is taken, then notes the order in which they start.
fn order_of(world: &mut World, wishes: &[Wish]) -> Vec<usize> {
    let blocker = world.submit(&prompt(900, 5), 60, 0);
    world.step();
    let begin = world.now;
    let mut ids: Vec<RequestId> = Vec::new();
    for (n, (after_s, hints)) in wishes.iter().enumerate() {
        world.now = begin + after_s * SECOND;
        let salt = u32::try_from(n).unwrap_or(0);
        let mut new = request(world.ns, &prompt(salt, 5), 1);
        new.hints = hints.clone();
        ids.push(world.add(new));
    }
    world.abort(blocker);
    starts(world, &ids)
}

fn starts(world: &mut World, ids: &[RequestId]) -> Vec<usize> {
    let mut order = Vec::new();
    for _ in 0..1000 {
        for (n, id) in ids.iter().enumerate() {
            if world.heard(*id).started.is_some() && !order.contains(&n) {
                order.push(n);
            }
        }
        if order.len() == ids.len() {
            break;
        }
        world.step();
    }
    world.run_dry();
    order
}

#[test]
fn the_table_of_the_queue_order() {
    use SchedulePolicy::{Fcfs, Priority};
    let none = Hints::default;
    let table: [(&str, SchedulePolicy, Vec<Wish>, Vec<usize>); 9] = [
        (
            "arrival",
            Priority,
            vec![(0, none()), (1, none()), (2, none())],
            vec![0, 1, 2],
        ),
        (
            "a jump is seconds",
            Priority,
            vec![(0, none()), (5, hints(0, 4.0, 0))],
            vec![0, 1],
        ),
        (
            "a longer jump wins",
            Priority,
            vec![(0, none()), (5, hints(0, 6.0, 0))],
            vec![1, 0],
        ),
        (
            "a tier beats a jump",
            Priority,
            vec![(0, hints(0, 1e6, 0)), (1, hints(0, 0.0, 1))],
            vec![1, 0],
        ),
        (
            "tiers in order",
            Priority,
            vec![(0, hints(0, 0.0, 1)), (0, hints(0, 0.0, 7)), (0, none())],
            vec![1, 0, 2],
        ),
        (
            "equal keys by id",
            Priority,
            vec![(0, none()), (0, none()), (0, none())],
            vec![0, 1, 2],
        ),
        (
            "a negative jump is none",
            Priority,
            vec![(0, hints(0, -50.0, 0)), (1, none())],
            vec![0, 1],
        ),
        (
            "priority alone does not reorder",
            Priority,
            vec![(0, none()), (1, hints(99, 0.0, 0))],
            vec![0, 1],
        ),
        (
            "fcfs hears no hints",
            Fcfs,
            vec![(0, none()), (1, hints(9, 9.0, 9))],
            vec![0, 1],
        ),
    ];
    for (name, policy, wishes, order) in table {
        let mut world = one_seat(policy, 30.0);
        assert_eq!(order_of(&mut world, &wishes), order, "{name}");
    }
}

#[test]
fn a_cached_prefix_is_worth_the_seconds_it_saves_and_no_more_than_the_aging_bound() {
    for (after_s, hot_first) in [(20, true), (40, false)] {
        let mut world = one_seat(SchedulePolicy::Priority, 30.0);
        // 48 cached tokens at 1 s each would be 48 s; the bound is 30.
        let config = SchedulerConfig {
            prefill_ns_per_token: 1_000_000_000,
            ..world.scheduler.config().clone()
        };
        world = World::new(64, config);
        let warm = world.submit(&prompt(1, 49), 1, 0);
        world.run_dry();
        let blocker = world.submit(&prompt(900, 5), 60, 0);
        world.step();
        let cold = world.submit(&prompt(2, 49), 1, 0);
        world.now += after_s * SECOND;
        let hot = world.submit(&prompt(1, 49), 1, 0);
        world.abort(blocker);
        let order = starts(&mut world, &[cold, hot]);
        assert_eq!(order[0] == 1, hot_first, "arrived {after_s} s later");
        assert!(world.said_all(warm));
    }
}

#[test]
fn longest_prefix_first_orders_by_what_is_cached_now() {
    let mut world = one_seat(SchedulePolicy::Lpm, 30.0);
    for (salt, len) in [(1, 16), (2, 48), (3, 32)] {
        world.submit(&prompt(salt, len + 1), 1, 0);
        world.run_dry();
    }
    let blocker = world.submit(&prompt(900, 5), 60, 0);
    world.step();
    let ids: Vec<RequestId> = [1, 2, 3, 4]
        .map(|salt| world.submit(&prompt(salt, 49), 1, 0))
        .into();
    // The fourth becomes the hottest while it waits.
    world.abort(blocker);
    let order = starts(&mut world, &ids);
    assert_eq!(order, vec![1, 2, 0, 3]);
}

#[test]
fn speculative_work_runs_when_no_client_waits_and_gives_way_to_any() {
    let mut world = one_seat(SchedulePolicy::Priority, 30.0);
    let mut new = request(world.ns, &prompt(1, 40), 1);
    new.class = Class::Speculative;
    new.hints = hints(i32::MAX, 1e9, u32::MAX);
    let blocker = world.submit(&prompt(900, 5), 60, 0);
    world.step();
    let warm = world.add(new);
    let client = world.submit(&prompt(2, 20), 1, i32::MIN);
    world.abort(blocker);
    assert_eq!(starts(&mut world, &[warm, client]), vec![1, 0]);

    let config = SchedulerConfig {
        max_running: 1,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(64, config);
    let mut new = request(world.ns, &prompt(1, 40), 30);
    new.class = Class::Speculative;
    new.hints.priority = i32::MAX;
    let warm = world.add(new);
    world.step();
    let client = world.submit(&prompt(2, 20), 1, i32::MIN);
    assert_eq!(world.step(), vec![(client, 0, 20)]);
    world.run_dry();
    assert_eq!(world.reason(warm), FinishReason::Displaced, "for good");
}

#[test]
fn speculative_prompts_take_a_small_part_of_a_step_and_end_when_a_client_waits_for_pages() {
    let config = SchedulerConfig {
        step_tokens: 64,
        page_tokens: 4,
        ..SchedulerConfig::default()
    };
    // 20 pages of 4 tokens.
    let mut world = World::new(20, config);
    let warm = |world: &mut World, salt, len| {
        let mut new = request(world.ns, &prompt(salt, len), 1);
        new.class = Class::Speculative;
        world.add(new)
    };
    let first = warm(&mut world, 1, 60);
    assert_eq!(world.step(), vec![(first, 0, 16)], "a quarter of a step");
    let client = world.submit(&prompt(2, 12), 3, 0);
    assert_eq!(world.step(), vec![(client, 0, 12), (first, 16, 16)]);
    assert_eq!(
        world.step(),
        vec![(client, 12, 1), (first, 32, 8)],
        "an eighth beside a client"
    );
    // 10 pages that the two do not leave.
    let second = world.submit(&prompt(3, 40), 3, 0);
    world.run_dry();
    assert_eq!(world.reason(first), FinishReason::Displaced);
    assert!(world.said_all(client) && world.said_all(second));
}

// Faults F1: one direction, the full range.

#[test]
fn higher_is_more_important_over_the_full_range_of_i32() {
    let values = [i32::MIN, -5, 0, 10, i32::MAX];
    for (n, &low) in values.iter().enumerate() {
        for &high in &values[n + 1..] {
            let config = SchedulerConfig {
                max_running: 1,
                ..SchedulerConfig::default()
            };
            let mut world = World::new(64, config);
            let first = world.submit(&prompt(1, 20), 20, low);
            world.step();
            let second = world.submit(&prompt(2, 20), 2, high);
            assert_eq!(world.step(), vec![(second, 0, 20)], "{high} over {low}");
            world.run_dry();
            assert!(world.said_all(first));
            let mut world = World::new(64, world.scheduler.config().clone());
            let first = world.submit(&prompt(1, 20), 20, high);
            world.step();
            world.submit(&prompt(2, 20), 2, low);
            assert_eq!(world.step()[0].0, first, "{low} does not take from {high}");
            world.run_dry();
        }
    }
}

// Faults C3: low priority and cold requests must not wait without bound.

#[test]
fn a_waiter_starts_within_the_aging_bound_although_stricter_ones_arrive_every_step() {
    for strict in [1, 3] {
        let mut world = one_seat(SchedulePolicy::Priority, 10.0);
        world.step_ns = SECOND;
        let blocker = world.submit(&prompt(900, 5), 1, 0);
        world.launch();
        let waiter = world.submit(&prompt(901, 5), 1, 0);
        world.land();
        let begin = world.now;
        for n in 0..200 {
            let mut new = request(world.ns, &prompt(n, 5), 1);
            new.hints = hints(10, 10.0, strict);
            let _ = world.try_add(new);
            world.step();
            if world.ended(waiter) {
                break;
            }
        }
        assert!(world.ended(blocker));
        let waited_s = (world.now - begin) / SECOND;
        // One tier per 10 s, then the arrivals of the same tier jump 10 s and are themselves
        // older by their turn.
        let bound = u64::from(strict) * 10 + 10 + 10 + 2;
        assert!(
            world.ended(waiter) && waited_s <= bound,
            "waited {waited_s} s of {bound}"
        );
        world.run_dry();
    }
}

#[test]
fn a_cold_waiter_starts_within_the_aging_bound_under_longest_prefix_first() {
    let mut world = one_seat(SchedulePolicy::Lpm, 10.0);
    world.step_ns = SECOND;
    let hot = world.submit(&prompt(1, 33), 1, 0);
    world.run_dry();
    let cold = world.submit(&prompt(2, 33), 1, 0);
    let mut rounds = 0;
    while !world.ended(cold) && rounds < 100 {
        let new = request(world.ns, &prompt(1, 33), 1);
        let _ = world.try_add(new);
        world.step();
        rounds += 1;
    }
    assert!(
        (9..=13).contains(&rounds),
        "started after {rounds} rounds of 1 s"
    );
    assert!(world.ended(hot));
    world.run_dry();
}

#[test]
fn with_aging_off_the_order_is_that_of_the_tiers_for_ever() {
    let mut world = one_seat(SchedulePolicy::Priority, 0.0);
    world.step_ns = 100 * SECOND;
    let waiter = world.submit(&prompt(901, 5), 1, 0);
    for n in 0..50 {
        let mut new = request(world.ns, &prompt(n, 5), 1);
        new.hints.strict = 1;
        world.add(new);
        if n > 0 {
            world.step();
        }
    }
    assert!(world.heard(waiter).started.is_none());
    world.run_dry();
}

#[test]
fn age_gives_no_right_to_preempt() {
    let config = SchedulerConfig {
        max_running: 1,
        aging_s: 1.0,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(64, config);
    let running = world.submit(&prompt(1, 20), 20, 0);
    world.step();
    let waiter = world.submit(&prompt(2, 20), 1, 0);
    world.now += 300 * SECOND;
    let rows = world.step();
    assert_eq!(rows[0].0, running);
    world.run_dry();
    assert_eq!(world.usage(running).preemptions, 0);
    assert!(world.said_all(waiter));
}

// The plain model: a flat list, the rule applied to all of it each time.

#[derive(Clone, Debug)]
struct Wished {
    after_ms: u64,
    strict: u32,
    jump_s: u32,
}

fn wished() -> impl Strategy<Value = Wished> {
    (0..4_000_u64, 0..3_u32, 0..4_u32).prop_map(|(after_ms, strict, jump_s)| Wished {
        after_ms,
        strict,
        jump_s,
    })
}

/// First of those not started at `now`, by the rule of design: strict tier and one more per
/// second waited, then arrival less jump, then id.
fn model_first(waiting: &[(u64, Wished, usize)], now: u64) -> Option<usize> {
    let key = |(arrival, wish, n): &(u64, Wished, usize)| {
        let tier = u64::from(wish.strict) + (now - arrival) / SECOND;
        let effective = i128::from(*arrival) - i128::from(wish.jump_s) * i128::from(SECOND);
        (std::cmp::Reverse(tier), effective, *n)
    };
    waiting
        .iter()
        .min_by_key(|entry| key(entry))
        .map(|entry| entry.2)
}

fn plain() -> ProptestConfig {
    ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(plain())]

    #[test]
    fn requests_start_in_the_order_of_a_flat_list(
        wishes in prop::collection::vec(wished(), 1..12),
    ) {
        let mut world = one_seat(SchedulePolicy::Priority, 1.0);
        world.step_ns = SECOND / 3;
        let blocker = world.submit(&prompt(900, 5), 60, 0);
        world.step();
        let mut waiting = Vec::new();
        let mut ids = Vec::new();
        for (n, wish) in wishes.iter().enumerate() {
            world.now += wish.after_ms * 1_000_000;
            let salt = u32::try_from(n).unwrap_or(0);
            let mut new = request(world.ns, &prompt(salt, 5), 2);
            new.hints = hints(0, f64::from(wish.jump_s), wish.strict);
            ids.push(world.add(new));
            waiting.push((world.now, wish.clone(), n));
        }
        world.abort(blocker);
        while !waiting.is_empty() {
            let now = world.now;
            world.step();
            let started: Vec<usize> = waiting
                .iter()
                .map(|entry| entry.2)
                .filter(|&n| world.heard(ids[n]).started.is_some())
                .collect();
            if let Some(&n) = started.first() {
                prop_assert_eq!(Some(n), model_first(&waiting, now));
                waiting.retain(|entry| entry.2 != n);
            }
        }
        world.run_dry();
    }
}
