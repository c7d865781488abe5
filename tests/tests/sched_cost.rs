//! What scheduling costs with a long queue. Prints; asserts only that work does not grow with it.

use std::time::Instant;

use rootstock_scheduler::SchedulerConfig;
use rootstock_tests::world::{World, prompt};

/// Fills a queue with prompts of 1,000 tokens behind 64 that run, and times `schedule`.
fn schedule_us(queued: u32) -> (f64, f64) {
    let config = SchedulerConfig {
        max_queue: 20_000,
        max_running: 64,
        ..Default::default()
    };
    let mut world = World::new(8_192, config);
    for n in 0..64 {
        world.submit(&prompt(n, 30), 400, 0);
    }
    (0..8).for_each(|_| drop(world.step()));
    for n in 0..queued {
        // Ten families share their first half.
        let mut tokens = prompt(1000 + n % 10, 500);
        tokens.extend(prompt(2000 + n, 500));
        world.submit(&tokens, 10, (n % 3) as i32 - 2);
    }
    let mut times = Vec::new();
    for _ in 0..200 {
        let mut out = Vec::new();
        #[expect(clippy::disallowed_methods, reason = "it is the time that is printed")]
        let begin = Instant::now();
        let plan = world
            .scheduler
            .schedule(&mut world.cache, world.now, &mut out);
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        let Some(plan) = plan else { break };
        world.engine.launch(plan);
        let (step, output) = world.engine.run_oldest().expect("a step is out");
        world.now += 20_000_000;
        world
            .scheduler
            .complete(&mut world.cache, step, &output, world.now, &mut out);
    }
    std::mem::forget(world);
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

#[test]
fn a_long_queue_is_not_looked_through_each_step() {
    for queued in [0, 100, 1_000, 10_000] {
        let (p50, p99) = schedule_us(queued);
        println!("schedule with {queued} queued: p50 {p50:.1} us, p99 {p99:.1} us");
    }
}
