//! The swarm: many small worlds, each from one seed, and faults planted to show that the swarm
//! would find them.

use rootstock_tests::planted::Planted;
use rootstock_tests::report::Report;
use rootstock_tests::sim::run;
use rootstock_tests::swarm::Swarm;

/// Seeds of the fixed set.
const SEEDS: u64 = 300;
/// Seeds within which a planted fault has to be found.
const PLANT_SEEDS: u64 = 1_000;

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
            Ok(report) => total.add(&report),
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
        assert!(
            total.hurried_steps > 100 && total.overtaking_steps > 100,
            "and steps kept short, and such as overtake"
        );
        assert!(total.rows_many > 100, "and rows of several tokens");
        assert!(
            total.in_transit > 100,
            "and steps on pages that copies still fill: {}",
            total.in_transit
        );
        assert!(
            total.shared_tokens > 0,
            "and prefixes shared while they are computed"
        );
        let [down, up, failed] = total.copies;
        assert!(
            down > 1_000 && up > 100 && failed > 100,
            "and copies that come late or fail: {:?}",
            total.copies
        );
        assert!(total.fetched_tokens > 1_000 && total.fetches_failed > 10);
        assert!(
            total.pins_watched > 100,
            "and pins whose pages must be found"
        );
        for fault in ["abort", "stop string", "clock jump", "failed copy"] {
            for phase in ["queued", "preempted", "fetching", "prefill", "decode"] {
                let pair = format!("{fault} / {phase}");
                let count = total.met.get(&pair).copied().unwrap_or(0);
                assert!(count > 0, "nobody met {pair}: {total:?}");
            }
        }
        for pair in ["failed step / prefill", "failed step / decode"] {
            assert!(total.met.contains_key(pair), "nobody met {pair}");
        }
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
        ("a copy that moved no bytes", Planted::LostCopy(5)),
        ("a failed copy that is believed", Planted::BelievedCopy(2)),
        (
            "a copy up whose source is let go early",
            Planted::EarlyCopy(2),
        ),
        ("a pin whose pages are forgotten", Planted::LostPin(2)),
        ("a copy acknowledged twice", Planted::DoubledAck(3)),
        ("a copy never acknowledged", Planted::LostAck(3)),
        ("a result told twice", Planted::DoubledResult(20)),
        ("a result never told", Planted::LostResult(20)),
        ("tokens that do not arrive", Planted::LostEvent(10)),
        ("tokens that arrive twice", Planted::DoubledEvent(10)),
        ("a token changed on its way", Planted::ChangedToken(10)),
        ("an abort that does not arrive", Planted::LostAbort(2)),
        ("a request under a foreign salt", Planted::ForeignSalt(5)),
        ("an end that does not arrive", Planted::LostFinal(5)),
    ];
    for (name, plant) in plants {
        let found = (0..PLANT_SEEDS).find(|&seed| run(Swarm::of(seed), plant).is_err());
        println!("{name}: found by seed {found:?}");
        assert!(
            found.is_some(),
            "{name} was not found by {PLANT_SEEDS} seeds"
        );
    }
}
