//! One step: the budget and who gets it, steps launched ahead, several tokens a row.

use rootstock_scheduler::{SamplingParams, SchedulerConfig};
use rootstock_tests::world::{World, prompt, request};

#[test]
fn decodes_come_first_and_the_rest_of_the_budget_is_one_chunk() {
    let config = SchedulerConfig {
        step_tokens: 20,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(64, config);
    let a = world.submit(&prompt(1, 8), 30, 0);
    let b = world.submit(&prompt(2, 8), 30, 0);
    world.step();
    let c = world.submit(&prompt(3, 100), 3, 0);
    let rows = world.step();
    assert_eq!(
        rows,
        vec![(a, 8, 1), (b, 8, 1), (c, 0, 16)],
        "16 of the 18 left end on a page"
    );
    let rows = world.step();
    assert_eq!(rows[2], (c, 16, 16));
    world.run_dry();
    assert!([a, b, c].iter().all(|&id| world.said_all(id)));
}

#[test]
fn an_urgent_newcomer_gets_the_budget_before_a_long_prompt_that_was_there_first() {
    let config = SchedulerConfig {
        step_tokens: 32,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(64, config);
    let long = world.submit(&prompt(1, 500), 2, 0);
    world.step();
    let mut new = request(world.ns, &prompt(2, 20), 2);
    new.hints.jump_s = 5.0;
    let urgent = world.add(new);
    let rows = world.step();
    assert_eq!(rows[0], (urgent, 0, 20));
    assert_eq!(rows[1].0, long, "and the long prompt gets what is left");
    world.run_dry();
    assert!(world.said_all(long) && world.said_all(urgent));
}

#[test]
fn guesses_take_only_what_the_decodes_of_others_leave() {
    let config = SchedulerConfig {
        step_tokens: 6,
        max_drafts: 8,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(200, config);
    let ids: Vec<_> = (0..5)
        .map(|n| world.submit(&prompt(n, 1), 40, n as i32))
        .collect();
    while ids.iter().any(|&id| world.heard(id).tokens.is_empty()) {
        world.step();
    }
    let before: Vec<usize> = ids.iter().map(|&id| world.heard(id).tokens.len()).collect();
    (0..10).for_each(|_| drop(world.step()));
    for (id, before) in ids.iter().zip(before) {
        let served = world.heard(*id).tokens.len() - before;
        assert!(
            served >= 10,
            "request {} was served {served} times in 10 steps",
            id.0
        );
    }
    world.run_dry();
}

#[test]
fn two_steps_in_flight_say_what_one_says() {
    let texts = |max_in_flight: u8, max_drafts: u8, late_history: bool| {
        let config = SchedulerConfig {
            max_in_flight,
            max_drafts,
            late_history,
            step_tokens: 24,
            ..Default::default()
        };
        let mut world = World::new(24, config);
        world.engine.completes_histories = late_history;
        let mut ids = Vec::new();
        for n in 0..8 {
            let mut new = request(world.ns, &prompt(n % 3, 20 + 7 * n), 10 + 3 * n);
            new.stop_tokens = vec![0, 1, 2];
            new.min_tokens = n;
            new.hints.priority = (n % 2) as i32;
            if n % 4 == 1 {
                new.sampling = SamplingParams {
                    temperature: 0.7,
                    seed: 5,
                    ..SamplingParams::default()
                };
            }
            if n % 4 == 2 {
                new.sampling.presence_penalty = 0.2;
            }
            ids.push(world.add(new));
        }
        world.run_dry();
        assert!(ids.iter().all(|&id| world.said_all(id)));
        let ahead = world.engine.rows_ahead;
        let many = world.engine.rows_many;
        let text: Vec<_> = ids
            .iter()
            .map(|&id| world.heard(id).tokens.clone())
            .collect();
        (text, ahead, many)
    };
    let (one, ahead, many) = texts(1, 0, false);
    assert_eq!((ahead, many), (0, 0));
    let (two, ahead, _) = texts(2, 0, false);
    assert!(
        ahead > 20,
        "{ahead} rows were launched ahead of their input"
    );
    let (late, with_penalties, _) = texts(2, 0, true);
    assert!(
        with_penalties > ahead,
        "{with_penalties} and {ahead}: those with penalties were too"
    );
    assert_eq!(one, late);
    let (drafted, _, many) = texts(2, 4, false);
    assert!(many > 10, "{many} rows accepted several tokens");
    assert_eq!(one, two);
    assert_eq!(one, drafted);
}

#[test]
fn rows_of_a_request_that_ended_in_the_step_before_are_dropped_and_its_pages_outlive_them() {
    let config = SchedulerConfig {
        max_in_flight: 2,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(4, config);
    let mut new = request(world.ns, &prompt(1, 16), 40);
    let all = rootstock_tests::text::alone(&new, 8192).0;
    new.stop_tokens = vec![all[4]];
    let id = world.add(new);
    while !world.ended(id) {
        world.step();
    }
    assert_eq!(
        world.engine.in_flight(),
        1,
        "a row beyond the end is in flight"
    );
    assert_eq!(world.scheduler.stats().draining, 1);
    assert!(world.available() < 4, "its pages are held");
    world.land();
    assert_eq!(world.available(), 4);
    let end = all
        .iter()
        .position(|token| *token == all[4])
        .expect("it is in it")
        + 1;
    assert_eq!(world.heard(id).tokens, all[..end]);
    world.run_dry();
}

#[test]
fn equal_inputs_give_equal_plans() {
    let run = || {
        let config = SchedulerConfig {
            max_in_flight: 2,
            ..SchedulerConfig::default()
        };
        let mut world = World::new(16, config);
        for n in 0..10 {
            world.submit(&prompt(n % 4, 20 + n), 12, (n % 3) as i32);
        }
        let mut prints = Vec::new();
        while !world.scheduler.is_idle() {
            let mut out = Vec::new();
            while let Some(plan) = world
                .scheduler
                .schedule(&mut world.cache, world.now, &mut out)
            {
                prints.push(plan.fingerprint());
                world.engine.launch(plan);
            }
            let (step, output) = world.engine.run_oldest().expect("a step is out");
            world
                .scheduler
                .complete(&mut world.cache, step, &output, world.now, &mut out);
        }
        prints
    };
    let first = run();
    assert!(first.len() > 10);
    assert_eq!(first, run());
}
