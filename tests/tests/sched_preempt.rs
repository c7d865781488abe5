//! Giving way and coming back: who gives way, for whom, how many, and that nothing is lost.

use rootstock_scheduler::{Admission, FinishReason, SamplingParams, SchedulerConfig};
use rootstock_tests::world::{SECOND, World, prompt, request};

fn config(page_tokens: u32) -> SchedulerConfig {
    SchedulerConfig {
        page_tokens,
        max_running: 16,
        ..SchedulerConfig::default()
    }
}

// Faults C1: preemption fires when pages run out, not only when seats run out.

#[test]
fn a_higher_priority_takes_pages_in_the_same_round() {
    let mut world = World::new(8, config(16));
    let low = world.submit(&prompt(1, 100), 28, 0);
    world.until_said(low, 14);
    assert_eq!(world.available(), 0, "the low one holds all 8 pages");
    let high = world.submit(&prompt(2, 30), 2, 10);
    let rows = world.step();
    assert_eq!(rows, vec![(high, 0, 30)], "only the high one runs, at once");
    world.run_dry();
    assert!(world.said_all(low) && world.said_all(high));
    assert_eq!(world.usage(low).preemptions, 1);
    assert_eq!(world.usage(high).preemptions, 0);
}

#[test]
fn a_higher_priority_takes_pages_as_soon_as_the_step_in_flight_ends() {
    let mut world = World::new(
        8,
        SchedulerConfig {
            max_in_flight: 2,
            ..config(16)
        },
    );
    let low = world.submit(&prompt(1, 100), 28, 0);
    world.until_said(low, 15);
    world.launch();
    let high = world.submit(&prompt(2, 30), 2, 10);
    world.land();
    assert_eq!(
        world.launch(),
        None,
        "a step of the low one is in flight; it gets no other"
    );
    world.land();
    assert_eq!(world.launch(), Some(vec![(high, 0, 30)]));
    world.run_dry();
    assert!(world.said_all(low) && world.said_all(high));
}

#[test]
fn a_higher_priority_takes_a_seat() {
    let mut world = World::new(
        64,
        SchedulerConfig {
            max_running: 1,
            ..config(16)
        },
    );
    let low = world.submit(&prompt(1, 20), 20, 0);
    world.until_said(low, 3);
    let high = world.submit(&prompt(2, 20), 3, 1);
    assert_eq!(world.step(), vec![(high, 0, 20)]);
    world.run_dry();
    assert!(world.said_all(low) && world.said_all(high));
}

#[test]
fn a_difference_below_the_gap_takes_nothing() {
    for gap in [Some(3), None] {
        let mut world = World::new(
            8,
            SchedulerConfig {
                preempt_gap: gap,
                ..config(16)
            },
        );
        let low = world.submit(&prompt(1, 100), 28, 0);
        world.until_said(low, 13);
        let high = world.submit(&prompt(2, 30), 2, 2);
        let rows = world.step();
        assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), vec![low]);
        world.run_dry();
        assert_eq!(world.usage(low).preemptions, 0);
        assert!(world.said_all(high));
    }
}

#[test]
fn no_more_give_way_than_are_needed_and_the_least_served_of_the_lowest_first() {
    // Three of 3 pages each; 2 pages are left, and the newcomer needs 3.
    let mut world = World::new(11, config(16));
    let ids: Vec<_> = [(1, 1), (2, 0), (3, 0)]
        .map(|(n, prio)| world.submit(&prompt(n, 33), 12, prio))
        .into();
    world.until_said(ids[2], 2);
    let high = world.submit(&prompt(9, 40), 2, 10);
    world.step();
    world.run_dry();
    let gave_way: Vec<u32> = ids.iter().map(|&id| world.usage(id).preemptions).collect();
    assert_eq!(
        gave_way,
        vec![0, 0, 1],
        "same rank and work: the newest of the lowest"
    );
    assert!(ids.iter().chain([&high]).all(|&id| world.said_all(id)));
}

#[test]
fn nobody_gives_way_when_all_together_could_not_free_enough() {
    let mut world = World::new(10, config(16));
    let low = world.submit(&prompt(1, 30), 18, 0);
    let peer = world.submit(&prompt(2, 100), 12, 10);
    world.until_said(low, 2);
    let high = world.submit(&prompt(3, 80), 2, 10);
    world.step();
    assert!(
        world.heard(high).started.is_none(),
        "5 pages, of which low could free 3"
    );
    world.run_dry();
    assert_eq!(world.usage(low).preemptions, 0);
    assert_eq!(world.usage(peer).preemptions, 0);
    assert!(world.said_all(high));
}

// Faults C4: a preempted request keeps everything it was promised.

#[test]
fn a_request_preempted_twice_says_what_it_says_alone_even_when_it_samples() {
    for max_in_flight in [1, 2] {
        let mut world = World::new(
            8,
            SchedulerConfig {
                max_in_flight,
                max_queue: 1,
                ..config(16)
            },
        );
        let mut new = request(world.ns, &prompt(1, 90), 30);
        new.sampling = SamplingParams {
            temperature: 0.8,
            seed: 7,
            frequency_penalty: 0.1,
            ..SamplingParams::default()
        };
        let low = world.add(new);
        world.until_said(low, 5);
        let first = world.submit(&prompt(2, 60), 3, 10);
        world.until_said(first, 3);
        world.until_said(low, 9);
        let second = world.submit(&prompt(3, 60), 3, 10);
        world.run_dry();
        assert!([low, first, second].iter().all(|&id| world.said_all(id)));
        let usage = world.usage(low);
        assert_eq!((usage.preemptions, usage.completion_tokens), (2, 30));
        assert_eq!(usage.cached.total(), 0, "its own pages are not a hit");
        assert_eq!(world.reason(low), FinishReason::Length);
    }
}

#[test]
fn a_preempted_request_is_not_refused_by_a_full_queue() {
    let mut world = World::new(
        8,
        SchedulerConfig {
            max_queue: 1,
            ..config(16)
        },
    );
    let low = world.submit(&prompt(1, 100), 28, 0);
    world.until_said(low, 2);
    let high = world.submit(&prompt(2, 90), 2, 10);
    world.launch();
    let queued = world.try_add(request(world.ns, &prompt(3, 10), 1));
    assert!(
        matches!(
            queued,
            Admission::Deferred {
                queue_len: 1,
                queue_cap: 1,
                ..
            }
        ),
        "{queued:?}"
    );
    world.run_dry();
    assert!(world.said_all(low) && world.said_all(high));
}

#[test]
fn giving_way_is_bounded_for_those_outranked_and_keeps_them_running_at_the_end() {
    let mut world = World::new(
        8,
        SchedulerConfig {
            max_running: 1,
            max_preemptions: 2,
            ..config(16)
        },
    );
    let low = world.submit(&prompt(1, 20), 12, 0);
    world.until_said(low, 1);
    for n in 2..8 {
        world.submit(&prompt(n, 20), 2, 10);
        for _ in 0..4 {
            world.step();
        }
    }
    world.run_dry();
    assert_eq!(world.usage(low).preemptions, 2, "then it is passed over");
    assert!(world.said_all(low));
}

#[test]
fn a_request_that_had_to_give_way_once_too_often_ends_cleanly() {
    // Two grow together in a pool for one and a half: the newer gives way again and again.
    let mut world = World::new(
        6,
        SchedulerConfig {
            max_preemptions: 0,
            ..config(4)
        },
    );
    let old = world.submit(&prompt(1, 4), 18, 0);
    let new = world.submit(&prompt(2, 4), 18, 0);
    world.run_dry();
    assert_eq!(world.reason(new), FinishReason::TooManyPreemptions);
    assert!(
        !world.heard(new).tokens.is_empty(),
        "it carries what it said"
    );
    assert!(world.said_all(old));
}

// Faults D1: the page is the only unit.

#[test]
fn six_at_a_page_boundary_with_five_free_pages_cost_one_preemption() {
    for page in [1, 3, 16, 64] {
        // Each: one page of prompt, and it wants its second page with the second token.
        let mut world = World::new(11, config(page));
        let ids: Vec<_> = (0..6)
            .map(|n| world.submit(&prompt(n, page), 2, 0))
            .collect();
        world.step();
        assert!(
            ids.iter().all(|&id| world.heard(id).tokens.len() == 1),
            "page {page}"
        );
        assert_eq!(world.available(), 5);
        let rows = world.step();
        assert_eq!(rows.len(), 5);
        world.run_dry();
        let preemptions: u32 = ids.iter().map(|&id| world.usage(id).preemptions).sum();
        assert_eq!(preemptions, 1, "page {page}");
        assert!(ids.iter().all(|&id| world.said_all(id)));
    }
}

#[test]
fn odd_lengths_over_cached_prefixes_survive_preemption() {
    for page in [1, 3, 16, 64] {
        let mut world = World::new(4 * 64 / page + 4, config(page));
        let warm = world.submit(&prompt(1, 20), 1, 0);
        world.run_dry();
        let mut long = prompt(1, 20);
        long.extend(prompt(2, 17));
        let low = world.submit(&long, 30, 0);
        world.until_said(low, 3);
        let pool = world
            .cache
            .total(rootstock_memory::TierId::Device(Default::default()));
        let high = world.submit(&prompt(3, pool * page - page), 2, 5);
        world.run_dry();
        assert_eq!(world.usage(low).preemptions, 1, "page {page}");
        assert_eq!(world.usage(low).cached.total(), 20 / page * page);
        assert!([warm, low, high].iter().all(|&id| world.said_all(id)));
    }
}

// Faults D3: the last request standing.

#[test]
fn the_last_request_standing_ends_with_what_it_has() {
    for max_in_flight in [1, 2] {
        let mut world = World::new(
            4,
            SchedulerConfig {
                max_in_flight,
                ..config(16)
            },
        );
        let cached = world.submit(&prompt(7, 16), 1, 0);
        world.run_dry();
        let first = world.submit(&prompt(1, 16), 1000, 0);
        let second = world.submit(&prompt(2, 5), 3, 0);
        world.run_dry();
        assert_eq!(world.reason(first), FinishReason::OutOfPages);
        // 64 slots: 16 of the prompt, 48 of the output; the last token needs no slot.
        assert_eq!(world.heard(first).tokens.len(), 49);
        assert_eq!(
            world.cached(&prompt(7, 16)),
            0,
            "what was cached went first"
        );
        assert!(world.said_all(second) && world.said_all(cached));
    }
}

#[test]
fn a_preempted_request_that_no_longer_fits_the_pool_ends_with_what_it_has() {
    let mut world = World::new(
        4,
        SchedulerConfig {
            max_running: 2,
            ..config(16)
        },
    );
    let low = world.submit(&prompt(1, 16), 1000, 0);
    world.until_said(low, 49);
    let high = world.submit(&prompt(2, 16), 2, 10);
    world.run_dry();
    assert_eq!(world.reason(low), FinishReason::OutOfPages);
    assert!(world.said_all(high));
}

#[test]
fn requests_that_wait_for_pages_age_only_while_they_wait() {
    let mut world = World::new(
        8,
        SchedulerConfig {
            max_running: 1,
            aging_s: 10.0,
            ..config(16)
        },
    );
    world.step_ns = SECOND;
    let low = world.submit(&prompt(1, 20), 60, 0);
    world.until_said(low, 40);
    let high = world.submit(&prompt(2, 20), 3, 5);
    world.step();
    let mut new = request(world.ns, &prompt(3, 20), 3);
    new.hints.strict = 1;
    let strict = world.add(new);
    world.until_said(high, 3);
    world.step();
    assert!(
        world.heard(strict).started.is_some(),
        "40 s of decoding gave no age"
    );
    world.run_dry();
    assert!([low, high, strict].iter().all(|&id| world.said_all(id)));
}

#[test]
fn pages_that_the_newcomer_shares_with_a_victim_do_not_count_as_freed() {
    let mut world = World::new(10, config(16));
    let peer = world.submit(&prompt(2, 33), 12, 10);
    let low = world.submit(&prompt(1, 96), 10, 0);
    world.until_said(low, 2);
    assert_eq!(world.available(), 0);
    let mut tokens = prompt(1, 96);
    tokens.extend(prompt(3, 40));
    let high = world.submit(&tokens, 4, 10);
    world.run_dry();
    assert_eq!(
        world.usage(low).preemptions,
        0,
        "it could have freed one page of three"
    );
    assert!([peer, low, high].iter().all(|&id| world.said_all(id)));
}

// Faults C3 and C4 together: what a request has waited is not forgotten when it gives way.

#[test]
fn a_request_that_gave_way_has_the_age_of_all_its_waits() {
    let order = |before_s: u64, after_s: u64| {
        let one_seat = SchedulerConfig {
            aging_s: 10.0,
            max_running: 1,
            ..config(16)
        };
        let mut world = World::new(64, one_seat);
        let blocker = world.submit(&prompt(1, 5), 60, 0);
        world.step();
        let waiter = world.submit(&prompt(2, 5), 60, 0);
        world.now += before_s * SECOND;
        world.abort(blocker);
        world.until_said(waiter, 2);
        let urgent = world.submit(&prompt(3, 5), 60, 1);
        assert_eq!(world.step()[0].0, urgent, "the waiter gives way");
        // A tier above the waiter's, so that age alone puts the waiter before it.
        let mut stricter = request(world.ns, &prompt(4, 5), 1);
        stricter.hints.strict = 1;
        let stricter = world.add(stricter);
        world.now += after_s * SECOND;
        world.abort(urgent);
        let first = world.step()[0].0;
        world.run_dry();
        assert!(world.said_all(waiter) && world.said_all(stricter));
        assert_eq!(world.usage(waiter).preemptions, 1);
        (first == waiter, first == stricter)
    };
    let (waiter, stricter) = ((true, false), (false, true));
    for (before_s, after_s) in [(1, 1), (8, 1), (1, 8), (0, 9)] {
        let first = order(before_s, after_s);
        assert_eq!(first, stricter, "{before_s} + {after_s} s");
    }
    for (before_s, after_s) in [(8, 3), (3, 8), (5, 6), (11, 0)] {
        let first = order(before_s, after_s);
        assert_eq!(first, waiter, "{before_s} + {after_s} s");
    }
}
