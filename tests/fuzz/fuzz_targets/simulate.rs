//! Worlds of the simulator (scheduler, cache, router, tiers, faults) whose weights libFuzzer picks:
//! all laws of the swarm hold, and the world runs dry.
//!
//! `cargo +nightly fuzz run simulate -- -max_total_time=60`, in `tests/`.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use rootstock_tests::planted::Planted;
use rootstock_tests::sim::run;
use rootstock_tests::swarm::Swarm;

/// What is turned; all else follows from the seed.
#[derive(Arbitrary, Debug)]
struct Input {
    seed: u16,
    arrivals: u8,
    aborts: u8,
    failures: u8,
    copy_failures: u8,
    clock_jumps: u8,
    pins: u8,
    acts: u8,
    speculative: u8,
    deadlines: u8,
}

fuzz_target!(|input: Input| {
    let percent = |byte: u8| u32::from(byte) % 101;
    let world = Swarm {
        steps: 60,
        arrivals: 20 + u32::from(input.arrivals),
        aborts: percent(input.aborts),
        failures: percent(input.failures) / 2,
        copy_failures: percent(input.copy_failures),
        clock_jumps: percent(input.clock_jumps) / 4,
        pins: percent(input.pins),
        acts: percent(input.acts),
        speculative: percent(input.speculative),
        deadlines: percent(input.deadlines),
        ..Swarm::of(u64::from(input.seed))
    };
    if let Err(failure) = run(world, Planted::Nothing) {
        panic!("{failure}");
    }
});
