//! The swarm: many small worlds, each from one seed, and faults planted to show that the swarm
//! would find them.

use rootstock_tests::double::Planted;
use rootstock_tests::report::Report;
use rootstock_tests::sim::run;
use rootstock_tests::swarm::Swarm;

/// Seeds of the fixed set.
const SEEDS: u64 = 300;

fn seeds() -> Vec<u64> {
    match std::env::var("SIM_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
    {
        Some(seed) => vec![seed],
        None => {
            let count = std::env::var("SIM_SEEDS").ok().and_then(|n| n.parse().ok());
            (0..count.unwrap_or(SEEDS)).collect()
        }
    }
}

#[test]
fn every_world_of_the_swarm_keeps_all_promises() {
    let mut total = Report::default();
    let seeds = seeds();
    for &seed in &seeds {
        match run(Swarm::of(seed), Planted::Nothing) {
            Ok(report) => add(&mut total, &report),
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("{} worlds: {total:#?}", seeds.len());
    if seeds.len() as u64 >= SEEDS {
        assert!(total.preemptions > 100, "preemption is part of the swarm");
        assert!(
            total.rows_ahead > 100,
            "so are steps launched ahead of results"
        );
        assert!(total.rows_many > 100, "and rows of several tokens");
        assert!(
            total.shared_tokens > 0,
            "and prefixes shared while they are computed"
        );
        for reason in [
            "Stop",
            "Length",
            "Aborted",
            "StopString",
            "OutOfPages",
            "Failed(Step)",
        ] {
            assert!(
                total.ended.contains_key(reason),
                "nobody ended by {reason}: {total:?}"
            );
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_plans() {
    for seed in 0..10 {
        let first = run(Swarm::of(seed), Planted::Nothing).map_err(|f| f.to_string());
        let second = run(Swarm::of(seed), Planted::Nothing).map_err(|f| f.to_string());
        assert_eq!(first, second, "seed {seed}");
    }
}

#[test]
fn every_planted_fault_is_found() {
    let plants = [
        ("a lost write", Planted::LostWrite(20)),
        ("a wrong token", Planted::WrongCount(20)),
        ("two pages swapped in a table", Planted::SwappedPages(20)),
        (
            "a page of another request in a table",
            Planted::ForeignPage(20),
        ),
    ];
    for (name, plant) in plants {
        let found = (0..40).find(|&seed| run(Swarm::of(seed), plant).is_err());
        println!("{name}: found by seed {found:?}");
        assert!(found.is_some(), "{name} was not found by 40 seeds");
    }
}

fn add(total: &mut Report, report: &Report) {
    total.steps += report.steps;
    total.events += report.events;
    total.preemptions += report.preemptions;
    total.cached_tokens += report.cached_tokens;
    total.shared_tokens += report.shared_tokens;
    total.rows += report.rows;
    total.rows_ahead += report.rows_ahead;
    total.rows_many += report.rows_many;
    for (reason, count) in &report.ended {
        *total.ended.entry(reason.clone()).or_default() += count;
    }
}
