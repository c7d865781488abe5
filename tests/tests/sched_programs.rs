//! Program-aware admission: programs that do not fit together are kept whole or wait, for a bounded
//! time; those that fit, and requests of no program, never do.

use rootstock::{CoreConfig, Limits, RouterConfig};
use rootstock_memory::Nanos;
use rootstock_radix::{CacheConfig, Hints, PolicyKind, Token};
use rootstock_scheduler::SchedulerConfig;
use rootstock_scheduler::{FinishReason, NewRequest, RequestId};
use rootstock_tests::rig::Rig;

const SECOND: Nanos = 1_000_000_000;

/// 100 pages of 4 tokens.
fn rig(program_wait_s: f64) -> Rig {
    let config = CoreConfig {
        cache: CacheConfig {
            page_tokens: 4,
            device_pages: vec![100],
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        },
        scheduler: SchedulerConfig {
            page_tokens: 4,
            step_tokens: 512,
            program_wait_s,
            ..SchedulerConfig::default()
        },
        limits: Limits::default(),
        router: RouterConfig::default(),
    };
    Rig::of(config, 0)
}

fn tokens(family: u32, len: u32) -> Vec<Token> {
    (0..len)
        .map(|at| 2 + (family * 37 + at * (7 + family)) % 60)
        .collect()
}

fn turn(rig: &Rig, program: Option<&str>, tokens: Vec<Token>, last: bool) -> NewRequest {
    NewRequest {
        ignore_eos: true,
        hints: Hints {
            program: program.map(str::to_owned),
            session_final: last,
            ..Hints::default()
        },
        ..NewRequest::new(rig.ns, tokens, 4)
    }
}

fn held(rig: &Rig) -> u32 {
    rig.core.stats().schedulers[0].held_now
}

fn add(rig: &mut Rig, program: Option<&str>, family: u32, len: u32, last: bool) -> RequestId {
    let new = turn(rig, program, tokens(family, len), last);
    rig.add(new)
}

#[test]
fn a_program_that_does_not_fit_waits_until_another_ends() {
    let mut rig = rig(60.0);
    let first = add(&mut rig, Some("a"), 1, 160, false);
    let second = add(&mut rig, Some("b"), 2, 160, true);
    assert_eq!(held(&rig), 0, "82 of 100 pages");
    let third = add(&mut rig, Some("c"), 3, 100, false);
    let small = add(&mut rig, Some("d"), 4, 40, false);
    let free = add(&mut rig, None, 5, 40, false);
    assert_eq!(
        held(&rig),
        1,
        "what fits goes in, and so does who has no program"
    );
    assert_eq!(rig.core.phase(third), Some("queued"));
    rig.run_dry();
    for id in [first, second, third, small, free] {
        assert!(rig.said_all(id), "{id:?}");
    }
    let before = rig.heard(third).last.map(|(_, usage)| usage.queue_ns);
    assert!(before.is_some_and(|ns| ns < SECOND), "b's end made room");
    let stats = &rig.core.stats().schedulers[0];
    assert_eq!((stats.held, stats.programs_inside), (1, 3));
}

#[test]
fn programs_inside_come_back_to_their_prefix_and_the_wait_of_others_is_bounded() {
    let mut rig = rig(10.0);
    let mut talks: Vec<Vec<Token>> = (1..=2).map(|n| tokens(n, 160)).collect();
    for (name, talk) in ["a", "b"].iter().zip(&talks) {
        let new = turn(&rig, Some(name), talk.clone(), false);
        rig.add(new);
    }
    rig.run_dry();
    // Somebody always works, so that the third is not let in for want of work.
    let outsider = add(&mut rig, Some("c"), 3, 160, false);
    let came = rig.now;
    let mut rounds = 0;
    while rig.heard(outsider).started.is_none() {
        for at in 0..2 {
            talks[at].push(2 + rounds % 50);
            let name = ["a", "b"][at];
            let new = turn(&rig, Some(name), talks[at].clone(), false);
            let id = rig.add(new);
            rig.turn();
            while rig.heard(id).started.is_none() {
                rig.turn();
            }
            if rig.heard(outsider).started.is_none() {
                let cached = rig.heard(id).cached.device;
                assert!(cached >= 156, "{name} found {cached} of its prefix");
            }
        }
        rig.now += SECOND / 2;
        rounds += 1;
        let waited = rig.now - came;
        if !(10 * SECOND..=11 * SECOND).contains(&waited) {
            let over = waited > 10 * SECOND;
            assert_eq!(held(&rig) == 0, over, "after {waited} ns");
        }
        // Then it needs the pages of two that never stop, which aging gets it.
        assert!(waited < 45 * SECOND, "{waited} ns waited");
    }
    rig.run_dry();
    assert!(rig.said_all(outsider));
}

#[test]
fn with_nothing_else_to_do_whoever_waits_is_let_in() {
    let mut rig = rig(1000.0);
    for (family, name) in [(1, "a"), (2, "b")] {
        add(&mut rig, Some(name), family, 160, false);
    }
    rig.run_dry();
    let third = add(&mut rig, Some("c"), 3, 160, false);
    assert_eq!(held(&rig), 1);
    rig.run_dry();
    assert!(rig.said_all(third));
    let inside = rig.core.stats().schedulers[0].programs_inside;
    assert_eq!(inside, 2, "one of the idle ones has given its place");
}

#[test]
fn a_request_that_somebody_waits_for_comes_in_at_once() {
    let mut rig = rig(60.0);
    let first = add(&mut rig, Some("a"), 1, 160, false);
    let second = add(&mut rig, Some("b"), 2, 160, false);
    let third = add(&mut rig, Some("c"), 3, 100, false);
    let mut watched = turn(&rig, Some("d"), tokens(4, 100), false);
    watched.hints.jump_s = 1.0;
    let watched = rig.add(watched);
    assert_eq!(held(&rig), 1, "the third only");
    rig.run_dry();
    let waited = |id| rig.heard(id).last.as_ref().unwrap().1.queue_ns;
    assert!(waited(watched) < waited(third));
    for id in [first, second, third, watched] {
        assert!(rig.said_all(id), "{id:?}");
    }
}

#[test]
fn who_waits_for_a_place_can_be_aborted_and_expires() {
    let mut rig = rig(1000.0);
    for (family, name) in [(1, "a"), (2, "b")] {
        add(&mut rig, Some(name), family, 160, false);
    }
    let aborted = add(&mut rig, Some("c"), 3, 160, false);
    let late = NewRequest {
        deadline: Some(rig.now + 500_000),
        ..turn(&rig, Some("d"), tokens(4, 160), false)
    };
    let late = rig.add(late);
    assert_eq!(held(&rig), 2);
    assert!(rig.core.abort(aborted, rig.now));
    rig.run_dry();
    let reason = |id| rig.heard(id).last.map(|(reason, _)| reason);
    assert_eq!(reason(aborted), Some(FinishReason::Aborted));
    assert_eq!(reason(late), Some(FinishReason::Expired));
    assert_eq!(held(&rig), 0);
}

#[test]
fn switched_off_nobody_is_held() {
    let mut rig = rig(0.0);
    for (family, name) in [(1, "a"), (2, "b"), (3, "c"), (4, "d")] {
        add(&mut rig, Some(name), family, 160, false);
    }
    assert_eq!(held(&rig), 0);
    rig.run_dry();
}
