//! Aborts at every stage, ends at every edge: one final event, everything back.

use rootstock_radix::Key;
use rootstock_scheduler::{FailKind, FinishReason, RequestId, SchedulerConfig, StepOutput};
use rootstock_tests::world::{World, prompt, request};

/// Chunks of 16 tokens: a prompt of 160 takes ten steps.
fn chunked(max_in_flight: u8) -> World {
    let config = SchedulerConfig {
        step_tokens: 16,
        max_in_flight,
        ..SchedulerConfig::default()
    };
    World::new(32, config)
}

/// Aborts, lets the following request run, and looks for anything left over.
fn abort_and_follow(world: &mut World, id: RequestId, matchable: u32) {
    let said = world.heard(id).tokens.len();
    assert!(world.abort(id), "the abort is the end");
    assert!(!world.abort(id), "and there is only one");
    while world.engine.in_flight() > 0 {
        world.land();
    }
    assert_eq!(world.cached(&prompt(1, 160)), matchable);
    let next = world.submit(&prompt(2, 20), 3, 0);
    world.run_dry();
    assert!(world.said_all(next));
    assert_eq!(world.reason(id), FinishReason::Aborted);
    assert_eq!(
        world.heard(id).tokens.len(),
        said,
        "no token after the abort"
    );
    assert_eq!(
        world.usage(id).completion_tokens as usize,
        said,
        "what was made is recorded"
    );
}

#[test]
fn an_abort_while_queued_leaves_nothing() {
    let mut world = chunked(1);
    let id = world.submit(&prompt(1, 160), 5, 0);
    abort_and_follow(&mut world, id, 0);
    assert_eq!(world.heard(id).started, None);
}

#[test]
fn an_abort_while_preempted_leaves_only_the_cache() {
    let mut world = chunked(1);
    let id = world.submit(&prompt(1, 160), 50, 0);
    (0..12).for_each(|_| drop(world.step()));
    world.submit(&prompt(3, 400), 2, 10);
    world.step();
    assert_eq!(world.scheduler.stats().preemptions, 1);
    assert!(world.abort(id) && !world.abort(id));
    world.run_dry();
    assert_eq!(world.usage(id).preemptions, 1);
}

#[test]
fn an_abort_between_chunks_keeps_the_finished_chunks_cached() {
    let mut world = chunked(1);
    let id = world.submit(&prompt(1, 160), 5, 0);
    (0..3).for_each(|_| drop(world.step()));
    abort_and_follow(&mut world, id, 48);
}

#[test]
fn an_abort_while_a_chunk_runs_leaves_nothing_of_it_matchable() {
    for in_flight in [1, 2] {
        let mut world = chunked(in_flight);
        let id = world.submit(&prompt(1, 160), 5, 0);
        world.launch();
        world.land();
        (0..in_flight).for_each(|_| drop(world.launch()));
        abort_and_follow(&mut world, id, 16);
    }
}

/// Whatever is in flight for a request when it is aborted, its pages belong to that step until the
/// step has ended: nobody else computes onto them meanwhile.
#[test]
fn the_pages_of_an_aborted_request_go_to_nobody_before_its_steps_have_ended() {
    for (launched, landed) in [1, 2]
        .into_iter()
        .flat_map(|n| (0..12).map(move |at| (n, at)))
    {
        let config = SchedulerConfig {
            max_in_flight: 3,
            step_tokens: 16,
            ..SchedulerConfig::default()
        };
        let mut world = World::new(9, config);
        let first = world.submit(&prompt(1, 100), 20, 0);
        for _ in 0..landed {
            assert!(world.launch().is_some() && world.land().is_some());
        }
        while world.engine.in_flight() < launched && world.launch().is_some() {}
        let out = world.engine.in_flight();
        assert!(out > 0 && world.abort(first));
        // It needs every page that there is.
        let second = world.submit(&prompt(2, 140), 2, 0);
        for left in (0..out).rev() {
            assert_eq!(world.launch(), None, "{landed} landed, {left} to come");
            world.land();
        }
        assert_eq!(world.step()[0], (second, 0, 16), "{landed} landed");
        world.run_dry();
        assert!(world.said_all(second));
    }
}

#[test]
fn an_abort_between_the_last_chunk_and_its_result_gives_no_token() {
    for in_flight in [1, 2] {
        let mut world = chunked(in_flight);
        let id = world.submit(&prompt(1, 160), 5, 0);
        while world.heard(id).tokens.is_empty() {
            let Some(rows) = world.launch() else {
                world.land();
                continue;
            };
            if rows[0].1 + rows[0].2 == 160 {
                break;
            }
            if in_flight == 1 {
                world.land();
            }
        }
        assert!(world.heard(id).tokens.is_empty());
        let done = if in_flight == 1 {
            144
        } else {
            world.cached(&prompt(1, 160))
        };
        abort_and_follow(&mut world, id, done);
    }
}

#[test]
fn an_abort_in_decode_stops_within_the_step_in_flight() {
    for in_flight in [1, 2] {
        let mut world = chunked(in_flight);
        let id = world.submit(&prompt(1, 160), 50, 0);
        while world.heard(id).tokens.len() < 3 {
            world.step();
        }
        world.launch();
        assert!(world.abort(id));
        let rows = world.launch();
        assert_eq!(rows, None, "no further step runs for it");
        assert!(!world.abort(id));
        world.run_dry();
    }
}

#[test]
fn an_abort_after_the_end_or_of_nobody_changes_nothing() {
    let mut world = chunked(1);
    let id = world.submit(&prompt(1, 20), 2, 0);
    world.run_dry();
    assert!(!world.abort(id));
    assert!(!world.abort(RequestId(999_999)));
    assert_eq!(world.reason(id), FinishReason::Length);
    world.at_rest();
}

#[test]
fn a_stop_string_ends_a_request_once_and_its_pages_stay_cached() {
    for in_flight in [1, 2] {
        let mut world = chunked(in_flight);
        let id = world.submit(&prompt(1, 32), 50, 0);
        while world.heard(id).tokens.len() < 20 {
            world.step();
        }
        world.launch();
        let now = world.now;
        let finish = |world: &mut World| {
            world
                .scheduler
                .finish(&mut world.cache, id, FinishReason::StopString, now)
        };
        assert!(finish(&mut world).is_some());
        assert!(finish(&mut world).is_none());
        while world.engine.in_flight() > 0 {
            world.land();
        }
        assert_eq!(world.cached(&prompt(1, 32)), 32);
        world.at_rest();
    }
}

// Faults D2: each page is released exactly once, whatever ends the request and wherever.

#[test]
fn ends_around_page_boundaries_release_each_page_once() {
    for page in [1, 3, 16] {
        for len in [page.max(2) - 1, page, page + 1, 2 * page] {
            for max_tokens in [1, 2, page, page + 1, 200] {
                let config = SchedulerConfig {
                    page_tokens: page,
                    ..SchedulerConfig::default()
                };
                let mut world = World::new(400 / page, config);
                let id = world.submit(&prompt(1, len), max_tokens, 0);
                world.run_dry();
                assert!(
                    world.said_all(id),
                    "page {page}, {len} tokens, {max_tokens} more"
                );
            }
        }
    }
}

#[test]
fn an_end_and_an_abort_in_the_same_step_give_one_final_event() {
    let mut world = chunked(2);
    let id = world.submit(&prompt(1, 10), 2, 0);
    world.launch();
    world.launch();
    world.land();
    world.land();
    assert!(world.ended(id));
    assert!(!world.abort(id));
    world.run_dry();
}

// Failing steps and results that make no sense.

#[test]
fn a_failed_step_ends_its_requests_and_no_other_and_leaves_nothing_of_itself() {
    for in_flight in [1, 2] {
        let mut world = chunked(in_flight);
        let first = world.submit(&prompt(1, 160), 5, 0);
        world.step();
        world.launch();
        let second = world.submit(&prompt(2, 20), 3, 0);
        while world.engine.in_flight() > 0 {
            world.fail();
        }
        assert_eq!(world.reason(first), FinishReason::Failed(FailKind::Step));
        let whole = if in_flight == 1 {
            16
        } else {
            world.cached(&prompt(1, 160))
        };
        assert!(whole <= 16, "the failed chunks are not matchable");
        world.run_dry();
        assert!(world.said_all(second));
    }
}

#[test]
fn results_that_do_not_fit_the_plan_fail_the_request_and_not_the_process() {
    for rows in [0, 2] {
        let mut world = chunked(1);
        let id = world.submit(&prompt(1, 10), 5, 0);
        world.launch();
        let (step, output) = world.engine.run_oldest().expect("a step is out");
        let row = output.rows[0].clone();
        let wrong = StepOutput {
            rows: vec![row; rows],
        };
        let mut out = Vec::new();
        world
            .scheduler
            .complete(&mut world.cache, step, &wrong, world.now, &mut out);
        assert!(format!("{out:?}").contains("BadOutput"), "{out:?}");
        assert!(world.scheduler.is_idle());
        assert!(!world.abort(id));
        world
            .scheduler
            .complete(&mut world.cache, step, &output, world.now, &mut out);
        assert_eq!(
            world.scheduler.stats().stray_results,
            1,
            "a second result is ignored"
        );
        world.at_rest();
    }
}

#[test]
fn a_deadline_ends_a_request_in_any_phase_and_a_queue_timeout_only_before_its_start() {
    let second = rootstock_tests::world::SECOND;
    let config = SchedulerConfig {
        max_running: 1,
        queue_timeout_s: 5,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(32, config);
    let mut new = request(world.ns, &prompt(1, 20), 100);
    new.deadline = Some(world.now + 20 * second);
    let running = world.add(new);
    world.step();
    let waiting = world.submit(&prompt(2, 20), 3, 0);
    world.now += 6 * second;
    world.step();
    assert_eq!(world.reason(waiting), FinishReason::Expired);
    assert!(
        !world.ended(running),
        "the timeout of the queue is not for those who run"
    );
    world.now += 20 * second;
    world.step();
    assert_eq!(world.reason(running), FinishReason::Expired);
    assert!(!world.heard(running).tokens.is_empty());
    world.run_dry();
    let key = Key {
        ns: world.ns,
        tokens: &prompt(1, 20),
    };
    assert_eq!(world.cache.probe(key, Default::default()).device_tokens, 16);
}
