//! The swarm for as long as wanted: `simulate EVENTS [FIRST_SEED] [CHECK_EVERY]`.
//!
//! Runs one world after the other until that many calls and events have passed, recounts
//! everything every `CHECK_EVERY` turns (default 16), prints what happened, and ends with 1 and
//! the seed at the first thing found wrong.
#![expect(clippy::print_stdout, reason = "a program for people")]

use rootstock_tests::planted::Planted;
use rootstock_tests::report::Report;
use rootstock_tests::sim::run;
use rootstock_tests::swarm::Swarm;
use std::process::ExitCode;

fn main() -> ExitCode {
    let number = |n: usize, default: u64| {
        let word = std::env::args().nth(n);
        word.and_then(|word| word.replace('_', "").parse().ok())
            .unwrap_or(default)
    };
    let (events, first, every) = (number(1, 1_000_000), number(2, 0), number(3, 16));
    let (mut total, mut seed) = (Report::default(), first);
    while total.events < events {
        let world = Swarm {
            steps: 3_000,
            check_every: u32::try_from(every).unwrap_or(u32::MAX).max(1),
            ..Swarm::of(seed)
        };
        match run(world, Planted::Nothing) {
            Ok(report) => total.add(&report),
            Err(failure) => {
                println!("{failure}");
                return ExitCode::FAILURE;
            }
        }
        seed += 1;
    }
    println!("{} worlds from seed {first}: {total:#?}", seed - first);
    ExitCode::SUCCESS
}
