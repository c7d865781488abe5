//! Steps kept short for those whom somebody waits for, and what others lose by it.

use rootstock_memory::Nanos;
use rootstock_scheduler::{RequestId, SchedulerConfig};
use rootstock_tests::world::{Rows, SECOND, World, prompt, request};

const MS: Nanos = 1_000_000;

/// A world whose steps take 8 ms and `token_us` for each token.
struct Timed {
    world: World,
    token_us: u64,
    asked: Vec<RequestId>,
}

impl Timed {
    fn new(token_us: u64, target_step_ms: u32) -> Timed {
        let config = SchedulerConfig {
            target_step_ms,
            aging_s: 5.0,
            ..SchedulerConfig::default()
        };
        let world = World::new(4_000, config);
        Timed {
            world,
            token_us,
            asked: Vec::new(),
        }
    }

    fn add(&mut self, len: u32, max_tokens: u32, jump_s: f64) -> RequestId {
        let number = u32::try_from(self.asked.len()).expect("a few requests");
        let mut new = request(self.world.ns, &prompt(number, len), max_tokens);
        new.hints.jump_s = jump_s;
        self.asked.push(self.world.add(new));
        self.asked[self.asked.len() - 1]
    }

    /// All is over.
    fn end(mut self) {
        for id in std::mem::take(&mut self.asked) {
            self.world.abort(id);
        }
        self.world.run_dry();
    }

    fn step(&mut self) -> Rows {
        let rows = self.world.launch().unwrap_or_default();
        let tokens: u32 = rows.iter().map(|row| row.2).sum();
        self.world.step_ns = 8 * MS + u64::from(tokens) * self.token_us * 1_000;
        self.world.land();
        rows
    }

    /// Eight requests that decode, and step times that are known.
    fn with_background(token_us: u64, target_step_ms: u32) -> (Timed, Vec<RequestId>) {
        let mut timed = Timed::new(token_us, target_step_ms);
        let background: Vec<_> = (0..8).map(|n| timed.add(20 + n, 2_000, 0.0)).collect();
        (0..40).for_each(|_| drop(timed.step()));
        (timed, background)
    }
}

fn has(rows: &Rows, id: RequestId) -> bool {
    rows.iter().any(|row| row.0 == id)
}

#[test]
fn decodes_sit_out_the_step_of_one_who_hurries_where_they_would_make_it_long() {
    let (mut timed, background) = Timed::with_background(4_000, 400);
    let hurried = timed.add(16, 3, 10.0);
    assert_eq!(timed.step(), vec![(hurried, 0, 16)]);
    let rows = timed.step();
    let all = background.iter().all(|&id| has(&rows, id));
    assert!(
        all && has(&rows, hurried),
        "and are back with the next: {rows:?}"
    );
    assert_eq!(timed.world.scheduler.stats().hurried_steps, 1);
    timed.end();
}

#[test]
fn decodes_that_cost_little_take_part() {
    let (mut timed, background) = Timed::with_background(20, 400);
    let hurried = timed.add(64, 3, 10.0);
    let rows = timed.step();
    assert_eq!(rows[0], (hurried, 0, 64));
    assert!(background.iter().all(|&id| has(&rows, id)), "{rows:?}");
    timed.end();
}

#[test]
fn without_a_target_for_steps_or_a_jump_nobody_sits_out() {
    for (target, jump_s) in [(0, 10.0), (400, 0.0)] {
        let (mut timed, background) = Timed::with_background(4_000, target);
        let new = timed.add(16, 3, jump_s);
        let rows = timed.step();
        assert!(has(&rows, new) && background.iter().all(|&id| has(&rows, id)));
        assert_eq!(timed.world.scheduler.stats().hurried_steps, 0);
        timed.end();
    }
}

#[test]
fn nobody_sits_out_more_than_three_steps_in_a_row() {
    let (mut timed, background) = Timed::with_background(4_000, 100);
    // Far more than a step holds: every step is one for them.
    for _ in 0..10 {
        timed.add(200, 1, 10.0);
    }
    let mut sat_out = vec![0; background.len()];
    for _ in 0..60 {
        let rows = timed.step();
        for (id, sat_out) in background.iter().zip(&mut sat_out) {
            *sat_out = if has(&rows, *id) { 0 } else { *sat_out + 1 };
            assert!(*sat_out <= 3, "request {} sits out {sat_out} steps", id.0);
        }
    }
    assert!(timed.world.scheduler.stats().hurried_steps >= 60);
    timed.end();
}

#[test]
fn a_prompt_without_a_jump_is_computed_when_it_has_aged() {
    let (mut timed, _) = Timed::with_background(4_000, 100);
    let plain = timed.add(100, 1, 0.0);
    let since = timed.world.now;
    while !timed.world.ended(plain) {
        // Somebody hurries all the time.
        if timed.world.scheduler.stats().waiting < 2 {
            timed.add(100, 1, 10.0);
        }
        timed.step();
        let waited = timed.world.now - since;
        assert!(waited < 30 * SECOND, "it waits for {} s", waited / SECOND);
    }
    assert!(timed.world.scheduler.stats().hurried_steps > 10);
    timed.end();
}

#[test]
fn one_who_hurries_and_cannot_start_keeps_nobody_from_computing() {
    let config = SchedulerConfig {
        target_step_ms: 100,
        max_running: 1,
        preempt_gap: None,
        ..SchedulerConfig::default()
    };
    let mut world = World::new(64, config);
    let first = world.submit(&prompt(1, 20), 60, 0);
    (0..30).for_each(|_| drop(world.step()));
    let mut new = request(world.ns, &prompt(2, 20), 2);
    new.hints.jump_s = 10.0;
    let hurried = world.add(new);
    assert!(has(&world.step(), first), "there is no second seat");
    world.run_dry();
    assert!(world.said_all(first) && world.said_all(hurried));
}

/// A world whose backend can pause, with eight requests that decode and step times that are known.
fn pausing() -> Timed {
    let config = SchedulerConfig {
        target_step_ms: 400,
        overtake: true,
        ..SchedulerConfig::default()
    };
    let mut timed = Timed {
        world: World::new(4_000, config),
        token_us: 4_000,
        asked: Vec::new(),
    };
    for n in 0..8 {
        timed.add(20 + n, 2_000, 0.0);
    }
    (0..40).for_each(|_| drop(timed.step()));
    timed
}

#[test]
fn one_who_hurries_overtakes_the_step_in_flight() {
    for pauses in [true, false] {
        let mut timed = pausing();
        timed.world.engine.pauses = pauses;
        let long = timed.add(2_000, 1, 0.0);
        let rows = timed
            .world
            .launch()
            .expect("a step with a part of the long prompt");
        assert!(has(&rows, long));
        let hurried = timed.add(16, 1, 10.0);
        assert_eq!(timed.world.launch(), Some(vec![(hurried, 0, 16)]));
        assert_eq!(timed.world.launch(), None, "one overtakes at a time");
        timed.world.land();
        assert_eq!(timed.world.ended(hurried), pauses);
        timed.world.land();
        assert!(timed.world.ended(hurried) && timed.world.said_all(hurried));
        timed.end();
    }
}

#[test]
fn who_has_a_part_in_the_step_in_flight_does_not_overtake_it() {
    let mut timed = pausing();
    let hurried = timed.add(3_000, 1, 10.0);
    let rows = timed.world.launch().expect("a step for it");
    assert!(has(&rows, hurried) && !timed.world.ended(hurried));
    assert_eq!(timed.world.launch(), None);
    timed.world.land();
    timed.end();
}

#[test]
fn what_ends_while_it_is_overtaken_keeps_its_pages_until_it_lands() {
    let mut timed = pausing();
    let long = timed.add(2_000, 1, 0.0);
    timed.world.launch();
    let free = timed.world.available();
    timed.world.abort(long);
    let hurried = timed.add(16, 1, 10.0);
    timed.world.launch();
    timed.world.land();
    assert!(timed.world.ended(hurried));
    let held = timed.world.scheduler.stats().draining;
    assert!(
        held == 1 && timed.world.available() < free + 100,
        "its step still runs"
    );
    timed.world.land();
    assert_eq!(timed.world.scheduler.stats().draining, 0);
    timed.end();
}

#[test]
fn who_ends_for_want_of_pages_in_a_hurried_step_is_not_asked_about_afterwards() {
    let config = SchedulerConfig {
        target_step_ms: 400,
        max_preemptions: 0,
        ..SchedulerConfig::default()
    };
    let mut timed = Timed {
        world: World::new(3, config),
        token_us: 4_000,
        asked: Vec::new(),
    };
    // Step times become known by requests of less than a page, which leave nothing behind.
    for _ in 0..3 {
        timed.add(2, 12, 0.0);
        timed.world.run_dry();
    }
    let least = timed.add(2, 100, 0.0);
    let watched = timed.add(10, 100, 10.0);
    timed.world.until_said(watched, 7);
    let mut new = request(timed.world.ns, &prompt(90, 4), 3);
    new.hints.jump_s = 10.0;
    new.hints.priority = 5;
    // It takes the last page, and the other's next token needs one more.
    let hurried = timed.world.add(new);
    let rows = timed.step();
    assert!(has(&rows, hurried) && has(&rows, watched), "{rows:?}");
    assert!(timed.world.ended(least));
    timed.end();
}
