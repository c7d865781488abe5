//! Requests among replicas: parked while all are over the queue threshold and placed late, by what
//! is cached then; refused over a limit; aborted and expired while parked; moved with their load.

use rootstock::{CoreConfig, Limits, RouterConfig};
use rootstock_memory::Nanos;
use rootstock_radix::{CacheConfig, Hints, PolicyKind, Token};
use rootstock_scheduler::router::{Affinity, Overload};
use rootstock_scheduler::{Admission, Class, FinishReason, NewRequest, SchedulerConfig};
use rootstock_tests::rig::Rig;

const SECOND: Nanos = 1_000_000_000;

fn rig(replicas: usize, router: RouterConfig) -> Rig {
    let config = CoreConfig {
        cache: CacheConfig {
            page_tokens: 4,
            device_pages: vec![100; replicas],
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        },
        scheduler: SchedulerConfig {
            page_tokens: 4,
            step_tokens: 16,
            max_queue: 8,
            ..SchedulerConfig::default()
        },
        limits: Limits::default(),
        router,
    };
    Rig::of(config, 0)
}

/// Parks as soon as every replica has any prompt to compute.
fn strict_threshold() -> RouterConfig {
    RouterConfig {
        queue_threshold: Some(0.0),
        ..RouterConfig::default()
    }
}

fn tokens(family: u32, len: u32) -> Vec<Token> {
    (0..len).map(|at| 2 + (family * 31 + at * 7) % 60).collect()
}

fn request(rig: &Rig, tokens: Vec<Token>) -> NewRequest {
    NewRequest {
        ignore_eos: true,
        ..NewRequest::new(rig.ns, tokens, 4)
    }
}

#[test]
fn a_parked_request_is_placed_late_where_its_prefix_is_by_then() {
    let mut rig = rig(2, strict_threshold());
    let long = rig.add(request(&rig, tokens(1, 160)));
    let short = rig.add(request(&rig, tokens(2, 64)));
    assert_eq!([long, short].map(|id| id.replica().0), [0, 1]);
    let mut more = tokens(2, 64);
    more.extend(tokens(3, 8));
    let late = rig.add(request(&rig, more));
    let newest = rig.add(request(&rig, tokens(4, 8)));
    let stats = rig.core.stats();
    assert_eq!(stats.routes.parked, 2, "both are over the threshold");
    let parked: u32 = stats.schedulers.iter().map(|s| s.parked).sum();
    assert_eq!(parked, 2);
    rig.run_dry();
    assert_eq!(
        rig.heard(late).cached.device,
        64,
        "the one that was free first has its prefix"
    );
    assert_eq!(rig.core.stats().routes.by_cost, 4, "all went by cost");
    for id in [long, short, late, newest] {
        assert!(rig.said_all(id), "{id:?}");
    }
}

#[test]
fn parked_requests_start_in_the_order_of_tiers_and_jumps() {
    let mut rig = rig(1, strict_threshold());
    let first = rig.add(request(&rig, tokens(1, 64)));
    let hinted = |strict, jump_s| Hints {
        strict,
        jump_s,
        ..Hints::default()
    };
    let asked = [
        (hinted(0, 0.0), 3_u32),
        (hinted(0, 0.0), 4),
        (hinted(0, 9.0), 2),
        (hinted(1, 0.0), 1),
    ];
    let mut ids = Vec::new();
    for (at, (hints, place)) in (5..).zip(asked) {
        let new = NewRequest {
            hints,
            ..request(&rig, tokens(at, 24))
        };
        rig.now += 1;
        ids.push((place, rig.add(new)));
    }
    ids.sort_unstable();
    let mut started = Vec::new();
    while started.len() < ids.len() {
        rig.turn();
        for &(_, id) in &ids {
            if rig.heard(id).started.is_some() && !started.contains(&id) {
                started.push(id);
            }
        }
    }
    let wanted: Vec<_> = ids.iter().map(|&(_, id)| id).collect();
    assert_eq!(started, wanted);
    rig.run_dry();
    assert!(rig.said_all(first));
}

#[test]
fn a_parked_request_that_is_aborted_or_too_late_ends_once_and_leaves_nothing() {
    let mut rig = rig(2, strict_threshold());
    for family in 0..2 {
        rig.add(request(&rig, tokens(family, 160)));
    }
    let aborted = rig.add(request(&rig, tokens(7, 20)));
    let late = rig.add(NewRequest {
        deadline: Some(rig.now + 3_000_000),
        ..request(&rig, tokens(8, 20))
    });
    assert_eq!(rig.core.stats().routes.parked, 2);
    assert_eq!(rig.core.phase(aborted), Some("queued"));
    assert!(rig.core.abort(aborted, rig.now));
    assert!(!rig.core.abort(aborted, rig.now), "once");
    rig.run_dry();
    let reason = |id| rig.heard(id).last.map(|(reason, _)| reason);
    assert_eq!(reason(aborted), Some(FinishReason::Aborted));
    assert_eq!(reason(late), Some(FinishReason::Expired));
}

#[test]
fn parked_requests_count_as_waiting_and_a_full_queue_defers() {
    let mut rig = rig(1, strict_threshold());
    rig.add(request(&rig, tokens(0, 160)));
    rig.turn();
    for family in 1..=8 {
        rig.add(request(&rig, tokens(family, 12)));
    }
    let answer = rig.core.add(request(&rig, tokens(9, 12)), rig.now);
    assert!(
        matches!(answer, Admission::Deferred { queue_len: 8, .. }),
        "{answer:?}"
    );
    rig.run_dry();
}

#[test]
fn a_hard_session_waits_for_its_replica_and_a_soft_one_goes_elsewhere() {
    for affinity in [Affinity::Hard, Affinity::Soft] {
        let mut rig = rig(
            2,
            RouterConfig {
                affinity,
                affinity_ttl_s: 60,
                ..strict_threshold()
            },
        );
        let of = |session: &str| Hints {
            program: Some(session.to_owned()),
            ..Hints::default()
        };
        let turn = |rig: &Rig, family| NewRequest {
            hints: of("a"),
            ..request(rig, tokens(family, 24))
        };
        let first = rig.add(turn(&rig, 1));
        rig.run_dry();
        assert_eq!(first.replica().0, 0);
        // Two of the session: the second finds its replica with a prompt to compute.
        let busy = rig.add(turn(&rig, 2));
        let next = rig.add(turn(&rig, 3));
        assert_eq!(
            rig.core.stats().routes.parked == 1,
            affinity == Affinity::Hard
        );
        rig.run_dry();
        assert!(rig.said_all(busy) && rig.said_all(next));
        let found = [0, 1].map(|at| rig.found(&tokens(3, 24), at));
        let wanted = match affinity {
            Affinity::Hard => [24, 0],
            Affinity::Soft => [0, 24],
        };
        assert_eq!(found, wanted, "{affinity:?}");
    }
}

#[test]
fn above_the_limit_everywhere_the_answer_is_to_try_again() {
    let overload = Overload {
        prefill_tokens: Some(50),
        ..Overload::default()
    };
    let mut rig = rig(
        2,
        RouterConfig {
            overload,
            ..RouterConfig::default()
        },
    );
    for family in 0..2 {
        rig.add(request(&rig, tokens(family, 64)));
    }
    let answer = rig.core.add(request(&rig, tokens(3, 8)), rig.now);
    assert!(matches!(answer, Admission::Deferred { .. }), "{answer:?}");
    assert_eq!(rig.core.stats().routes.overloaded, 1);
    rig.run_dry();
    let later = rig.add(request(&rig, tokens(3, 8)));
    rig.run_dry();
    assert!(rig.said_all(later));
}

#[test]
fn speculative_work_goes_where_its_prefix_is_and_weighs_nothing() {
    let mut rig = rig(2, strict_threshold());
    rig.add(request(&rig, tokens(1, 64)));
    rig.run_dry();
    // An idle replica would take a client's request; this one needs what the other has.
    let mut more = tokens(1, 64);
    more.extend(tokens(5, 16));
    rig.now += SECOND;
    let busy = rig.add(request(&rig, tokens(6, 160)));
    let warm = NewRequest {
        class: Class::Speculative,
        max_tokens: 1,
        ..request(&rig, more.clone())
    };
    let warm = rig.add(warm);
    let home = warm.replica().0;
    assert_eq!(rig.core.stats().routes.parked, 0);
    rig.run_dry();
    assert_eq!(home, 0, "{busy:?}");
    assert_eq!(rig.found(&more, 0), 80);
    assert_eq!(rig.found(&more, 1), 0);
}
