//! The door: what can never fit is refused with its numbers, what does not fit now waits or is
//! deferred, and neither blocks anyone else.

use rootstock_scheduler::{
    Admission, ConfigError, FinishReason, Reason, Scheduler, SchedulerConfig,
};
use rootstock_tests::world::{World, prompt, request};

fn world() -> World {
    World::new(
        49,
        SchedulerConfig {
            max_model_len: 2048,
            ..SchedulerConfig::default()
        },
    )
}

// Faults C2: a request that can never fit must be refused, not waited for.

#[test]
fn a_prompt_larger_than_the_pool_is_refused_with_both_numbers_and_blocks_nobody() {
    let mut world = world();
    let new = request(world.ns, &prompt(1, 1002), 10);
    let refused = world.try_add(new);
    let Admission::Rejected(reason) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(
        reason,
        Reason::NeverFits {
            needed_pages: 63,
            usable_pages: 49
        }
    );
    let text = reason.to_string();
    assert!(text.contains("63") && text.contains("49"), "{text}");
    let small = world.submit(&prompt(2, 5), 3, 0);
    world.run_dry();
    assert!(world.said_all(small));
}

#[test]
fn a_prompt_of_exactly_the_pool_runs_and_one_more_token_is_refused() {
    let mut world = world();
    let exact = world.submit(&prompt(1, 49 * 16), 1, 0);
    let new = request(world.ns, &prompt(2, 49 * 16 + 1), 1);
    let over = world.try_add(new);
    assert!(matches!(
        over,
        Admission::Rejected(Reason::NeverFits {
            needed_pages: 50,
            ..
        })
    ));
    world.run_dry();
    assert!(world.said_all(exact));
    let more = world.submit(&prompt(1, 49 * 16), 5, 0);
    world.run_dry();
    assert_eq!(
        world.reason(more),
        FinishReason::OutOfPages,
        "prompt fits, prompt + output do not"
    );
    assert_eq!(world.heard(more).tokens.len(), 1);
}

#[test]
fn the_longest_prompt_leaves_one_token_of_the_model_length_to_generate() {
    let mut world = World::new(
        200,
        SchedulerConfig {
            max_model_len: 64,
            ..Default::default()
        },
    );
    let longest = world.submit(&prompt(1, 63), 10, 0);
    for len in [64, 65] {
        let new = request(world.ns, &prompt(2, len), 10);
        let refused = world.try_add(new);
        assert_eq!(
            refused,
            Admission::Rejected(Reason::TooLong {
                tokens: len,
                limit: 63
            })
        );
    }
    world.run_dry();
    assert_eq!(world.reason(longest), FinishReason::Length);
    assert_eq!(world.heard(longest).tokens.len(), 1);
}

#[test]
fn empty_requests_are_refused() {
    let mut world = world();
    let new = request(world.ns, &[], 10);
    assert_eq!(world.try_add(new), Admission::Rejected(Reason::Empty));
    let new = request(world.ns, &prompt(1, 5), 0);
    assert_eq!(
        world.try_add(new),
        Admission::Rejected(Reason::MaxTokensZero)
    );
    assert!(world.scheduler.is_idle());
}

#[test]
fn a_full_queue_defers_with_its_size_and_a_time() {
    let mut world = World::new(
        49,
        SchedulerConfig {
            max_queue: 2,
            ..Default::default()
        },
    );
    world.submit(&prompt(1, 5), 1, 0);
    world.submit(&prompt(2, 5), 1, 0);
    let new = request(world.ns, &prompt(3, 5), 1);
    let Admission::Deferred {
        queue_len,
        queue_cap,
        retry_after_s,
    } = world.try_add(new)
    else {
        panic!("the queue is full");
    };
    assert_eq!((queue_len, queue_cap), (2, 2));
    assert!((1..=60).contains(&retry_after_s));
    world.run_dry();
}

#[test]
fn what_does_not_fit_now_is_passed_by_what_does_until_its_patience_ends() {
    let second = rootstock_tests::world::SECOND;
    let config = SchedulerConfig {
        aging_s: 10.0,
        preempt_gap: None,
        ..Default::default()
    };
    let mut world = World::new(20, config);
    world.step_ns = second;
    let long = world.submit(&prompt(1, 160), 40, 0);
    world.step();
    let big = world.submit(&prompt(2, 200), 2, 0);
    let mut passed = Vec::new();
    for n in 3..40 {
        if world.heard(big).started.is_some() {
            break;
        }
        passed.push(world.submit(&prompt(n, 20), 20, 0));
        world.step();
    }
    let started = |id: &&rootstock_scheduler::RequestId| world.heard(**id).started.is_some();
    let early = passed.iter().take(9).filter(started).count();
    let late = passed
        .iter()
        .skip(12)
        .take_while(|_| !world.heard(big).tokens.is_empty())
        .count();
    assert!(early > 0, "small ones pass at first");
    assert_eq!(late, 0, "and none after 10 s");
    world.run_dry();
    assert!(world.said_all(big) && world.said_all(long));
}

#[test]
fn impossible_configurations_are_refused_by_name() {
    let zero = |cfg: SchedulerConfig| Scheduler::new(cfg).map(|_| ()).map_err(|e| e.to_string());
    let base = SchedulerConfig::default;
    assert!(
        zero(SchedulerConfig {
            page_tokens: 0,
            ..base()
        })
        .is_err_and(|e| e.contains("page_tokens"))
    );
    assert!(
        zero(SchedulerConfig {
            step_tokens: 0,
            ..base()
        })
        .is_err()
    );
    assert!(
        zero(SchedulerConfig {
            max_in_flight: 0,
            ..base()
        })
        .is_err()
    );
    let aging = Scheduler::new(SchedulerConfig {
        aging_s: f64::NAN,
        ..base()
    });
    assert!(matches!(aging, Err(ConfigError::Aging { .. })));
    assert!(zero(base()).is_ok());
}

#[test]
fn a_full_queue_gives_the_place_of_its_worst_to_a_strictly_better_newcomer() {
    let mut world = World::new(
        49,
        SchedulerConfig {
            max_queue: 2,
            ..Default::default()
        },
    );
    let first = world.submit(&prompt(1, 5), 1, 1);
    let worst = world.submit(&prompt(2, 5), 1, 0);
    for (priority, strict) in [(0, 5), (5, 0)] {
        let mut new = request(world.ns, &prompt(3, 5), 1);
        (new.hints.priority, new.hints.strict) = (priority, strict);
        let answer = world.try_add(new);
        assert!(
            matches!(answer, Admission::Deferred { .. }),
            "better in one respect is not enough"
        );
    }
    let mut new = request(world.ns, &prompt(3, 5), 1);
    (new.hints.priority, new.hints.strict) = (5, 5);
    let better = world.add(new);
    world.run_dry();
    assert_eq!(world.reason(worst), FinishReason::Displaced);
    assert!(world.said_all(first) && world.said_all(better));
}

#[test]
fn a_preempted_request_is_never_displaced() {
    let config = SchedulerConfig {
        max_queue: 1,
        max_running: 1,
        ..Default::default()
    };
    let mut world = World::new(49, config);
    let low = world.submit(&prompt(1, 20), 20, 0);
    world.step();
    world.submit(&prompt(2, 20), 5, 10);
    world.step();
    assert_eq!(world.scheduler.stats().preemptions, 1);
    let mut new = request(world.ns, &prompt(3, 5), 1);
    (new.hints.priority, new.hints.strict) = (50, 5);
    assert!(matches!(world.try_add(new), Admission::Deferred { .. }));
    world.run_dry();
    assert!(world.said_all(low));
}
