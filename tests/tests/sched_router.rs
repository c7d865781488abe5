//! The router's cost by hand-worked cases, its thresholds, affinity, and the idle replica.

use rootstock_memory::ReplicaId;
use rootstock_scheduler::router::{
    Affinity, Mode, Overlap, Overload, ParkedParts, QueueOrder, Route, RouteRequest, Router,
    RouterConfig, RouterError, Why,
};

const SECOND: u64 = 1_000_000_000;

fn device(blocks: u32) -> Overlap {
    Overlap {
        device: blocks,
        ..Overlap::default()
    }
}

fn router(cfg: RouterConfig, replicas: u16) -> Router {
    Router::new(cfg, replicas).expect("the configuration is valid")
}

fn request(prompt_tokens: u32, overlaps: &[Overlap]) -> RouteRequest<'_> {
    RouteRequest {
        prompt_tokens,
        overlaps,
        ..RouteRequest::default()
    }
}

fn chosen(route: &Route) -> (u16, f64, Why) {
    match route {
        Route::To { replica, cost, why } => (replica.0, *cost, *why),
        Route::Park | Route::Overloaded => (u16::MAX, f64::NAN, Why::Cost),
    }
}

#[test]
fn cost_is_uncached_prefill_plus_decode_blocks() {
    let mut router = router(RouterConfig::default(), 2);
    // 160 tokens are 10 blocks; 6 are cached on the second.
    let overlaps = [device(0), device(6)];
    let route = router.route(&request(160, &overlaps), 0);
    assert_eq!(chosen(&route), (1, 4.0 + 10.0, Why::Cost));
    router.placed(1, &request(160, &overlaps), ReplicaId(1), 0);
    // The second now has 64 tokens to prefill and 10 blocks: 4 + 4 + 10 + 10 against 10 + 10.
    let route = router.route(&request(160, &overlaps), 0);
    assert_eq!(chosen(&route), (0, 20.0, Why::Cost));
    router.prefill_done(1);
    let mut cheaper = router.route(&request(160, &[device(0), device(10)]), 0);
    assert_eq!(
        chosen(&cheaper),
        (0, 20.0, Why::Cost),
        "0 + 10 + 10: a tie goes to the emptier"
    );
    router.ended(1, 0);
    cheaper = router.route(&request(160, &overlaps), 0);
    assert_eq!(chosen(&cheaper), (1, 14.0, Why::Cost));
}

#[test]
fn lower_tiers_count_by_their_weights() {
    let mut router = router(RouterConfig::default(), 3);
    let overlaps = [
        Overlap {
            host: 8,
            ..Overlap::default()
        },
        Overlap {
            storage: 8,
            ..Overlap::default()
        },
        device(5),
    ];
    let route = router.route(&request(160, &overlaps), 0);
    assert_eq!(chosen(&route), (0, 10.0 - 6.0 + 10.0, Why::Cost));
}

#[test]
fn the_credit_decays_with_prefill_load_above_the_least() {
    let cfg = RouterConfig {
        overlap_score_credit_decay: 1.0,
        ..RouterConfig::default()
    };
    let mut router = router(cfg, 2);
    let overlaps = [device(10), device(0)];
    router.placed(1, &request(160, &[]), ReplicaId(0), 0);
    // Excess is 10 blocks over 10: half the credit. 10 + 10 - 5 + 10 + 10 against 10 + 10.
    let route = router.route(&request(160, &overlaps), 0);
    assert_eq!(chosen(&route), (1, 20.0, Why::Cost));
    let pinned = RouteRequest {
        pinned: Some(ReplicaId(0)),
        ..request(160, &overlaps)
    };
    assert_eq!(chosen(&router.route(&pinned, 0)), (0, 35.0, Why::Pinned));
}

/// The replica without prefill is full of decodes: nothing may go there, so it is no measure.
#[test]
fn a_replica_that_takes_nothing_more_does_not_make_the_credit_of_others_decay() {
    let cfg = RouterConfig {
        overlap_score_credit_decay: 1.0,
        kv_blocks: vec![100; 2],
        overload: Overload {
            decode_blocks: Some(0.1),
            ..Overload::default()
        },
        ..RouterConfig::default()
    };
    let mut router = router(cfg, 2);
    router.placed(1, &request(80, &[]), ReplicaId(0), 0);
    router.placed(2, &request(320, &[]), ReplicaId(1), 0);
    router.prefill_done(2);
    // 5 + 5 blocks to prefill less all 5 of the credit, 5 + 5 to decode.
    let route = router.route(&request(80, &[device(5), device(0)]), 0);
    assert_eq!(chosen(&route), (0, 5.0 + 10.0, Why::Cost));
}

#[test]
fn blocks_that_requests_share_are_counted_once() {
    let mut router = router(RouterConfig::default(), 1);
    let (first, second) = ([1, 2, 3, 4], [1, 2, 3, 9]);
    for (id, blocks) in [(1, &first), (2, &second)] {
        let new = RouteRequest {
            blocks,
            ..request(64, &[])
        };
        router.placed(id, &new, ReplicaId(0), 0);
        router.prefill_done(id);
    }
    let third = [1, 2, 8];
    let new = RouteRequest {
        blocks: &third,
        ..request(48, &[])
    };
    // 3 to prefill, 5 distinct blocks there, 1 new.
    assert_eq!(chosen(&router.route(&new, 0)).1, 9.0);
    router.ended(1, 0);
    assert_eq!(chosen(&router.route(&new, 0)).1, 8.0);
}

#[test]
fn tracked_output_grows_and_fades_towards_the_expected_length() {
    let cfg = RouterConfig {
        track_output_blocks: true,
        ..RouterConfig::default()
    };
    for (osl, generated, decode) in [
        (None, 0, 4.0),
        (None, 64, 8.0),
        (Some(128), 64, 4.0),
        (Some(64), 64, 0.0),
        (Some(0), 1, 0.0),
    ] {
        let mut router = router(cfg.clone(), 1);
        let blocks = [1, 2, 3, 4];
        router.placed(
            1,
            &RouteRequest {
                osl,
                blocks: &blocks,
                ..request(64, &[])
            },
            ReplicaId(0),
            0,
        );
        router.prefill_done(1);
        router.generated(1, generated, 0);
        let cost = chosen(&router.route(&request(16, &[]), 0)).1;
        assert_eq!(cost, 2.0 + decode, "osl {osl:?}, {generated} generated");
    }
    // What another shares does not fade.
    let mut router = router(cfg, 1);
    let blocks = [1, 2, 3, 4];
    for id in [1, 2] {
        router.placed(
            id,
            &RouteRequest {
                osl: Some(64),
                blocks: &blocks,
                ..request(64, &[])
            },
            ReplicaId(0),
            0,
        );
        router.prefill_done(id);
        router.generated(id, 64, 0);
    }
    assert_eq!(chosen(&router.route(&request(16, &[]), 0)).1, 2.0 + 4.0);
}

#[test]
fn requests_park_only_while_every_replica_is_over_the_threshold() {
    let cfg = RouterConfig {
        queue_threshold: Some(1.0),
        step_tokens: 100,
        ..RouterConfig::default()
    };
    let mut router = router(cfg, 2);
    router.placed(1, &request(100, &[]), ReplicaId(0), 0);
    router.placed(2, &request(101, &[]), ReplicaId(1), 0);
    let route = router.route(&request(50, &[]), 0);
    assert_eq!(chosen(&route).0, 0, "exactly the threshold is not over it");
    router.placed(3, &request(50, &[]), ReplicaId(0), 0);
    assert_eq!(router.route(&request(50, &[]), 0), Route::Park);
    let pinned = RouteRequest {
        pinned: Some(ReplicaId(1)),
        ..request(50, &[])
    };
    router.prefill_done(3);
    assert_eq!(
        router.route(&pinned, 0),
        Route::Park,
        "a pinned one looks at its own only"
    );
    let route = router.route(&request(50, &[]), 0);
    assert_ne!(route, Route::Park, "one below the threshold is enough");
    let cfg = RouterConfig {
        queue_threshold: Some(0.0),
        ..RouterConfig::default()
    };
    let mut router = Router::new(cfg, 1).expect("0 is a threshold");
    assert_eq!(chosen(&router.route(&request(50, &[]), 0)).0, 0);
    router.placed(1, &request(50, &[]), ReplicaId(0), 0);
    assert_eq!(router.route(&request(50, &[]), 0), Route::Park);
}

#[test]
fn an_idle_replica_takes_what_a_loaded_one_would_get_for_its_cache() {
    let mut router = router(
        RouterConfig {
            step_tokens: 512,
            ..RouterConfig::default()
        },
        4,
    );
    let hot = [device(1000), device(0), device(0), device(0)];
    router.placed(1, &request(600, &[]), ReplicaId(0), 0);
    let route = router.route(&request(16_000, &hot), 0);
    let (replica, _, why) = chosen(&route);
    assert_eq!((replica, why), (1, Why::Idle));
    router.prefill_done(1);
    assert_eq!(
        chosen(&router.route(&request(16_000, &hot), 0)).0,
        0,
        "not loaded: its cache wins"
    );
    // No replica stays idle however hot one of them is.
    let mut router = Router::new(
        RouterConfig {
            seats: 2,
            ..RouterConfig::default()
        },
        4,
    )
    .expect("valid");
    let mut got = [0; 4];
    for id in 0..16 {
        let new = request(16_000, &hot);
        let (replica, _, _) = chosen(&router.route(&new, 0));
        router.placed(id, &new, ReplicaId(replica), 0);
        router.prefill_done(id);
        got[usize::from(replica)] += 1;
    }
    assert!(got.iter().all(|&n| n > 0), "{got:?}");
}

#[test]
fn sessions_stay_and_children_start_where_their_parent_is() {
    let cfg = RouterConfig {
        affinity_ttl_s: 60,
        queue_threshold: Some(1.0),
        ..RouterConfig::default()
    };
    for affinity in [Affinity::Soft, Affinity::Hard] {
        let mut router = router(
            RouterConfig {
                affinity,
                ..cfg.clone()
            },
            2,
        );
        let hot = [device(0), device(4)];
        let turn = RouteRequest {
            session: Some("a"),
            ..request(64, &hot)
        };
        assert_eq!(chosen(&router.route(&turn, 0)), (1, 4.0, Why::Cost));
        router.placed(1, &turn, ReplicaId(1), 0);
        router.ended(1, SECOND);
        let cold = [device(4), device(0)];
        let next = RouteRequest {
            session: Some("a"),
            ..request(64, &cold)
        };
        assert_eq!(chosen(&router.route(&next, 30 * SECOND)).2, Why::Affinity);
        let child = RouteRequest {
            session: Some("b"),
            parent: Some("a"),
            ..request(64, &cold)
        };
        assert_eq!(chosen(&router.route(&child, 30 * SECOND)).0, 1);
        assert_eq!(
            chosen(&router.route(&next, 62 * SECOND)),
            (0, 4.0, Why::Cost),
            "it has expired"
        );
        router.placed(2, &turn, ReplicaId(1), 70 * SECOND);
        router.placed(3, &request(600, &[]), ReplicaId(1), 70 * SECOND);
        let route = router.route(&next, 200 * SECOND);
        match affinity {
            Affinity::Soft => assert_eq!(chosen(&route).0, 0, "busy: by cost"),
            Affinity::Hard => assert_eq!(route, Route::Park),
        }
    }
}

#[test]
fn a_request_that_moves_takes_its_load_and_its_session_along() {
    let cfg = RouterConfig {
        affinity_ttl_s: 60,
        ..RouterConfig::default()
    };
    let mut router = router(cfg, 2);
    let blocks = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    let turn = RouteRequest {
        session: Some("a"),
        blocks: &blocks,
        ..request(160, &[])
    };
    router.placed(1, &turn, ReplicaId(0), 0);
    router.moved(1, ReplicaId(1), device(4), 0);
    assert_eq!(
        [ReplicaId(0), ReplicaId(1)].map(|at| router.active(at)),
        [0, 1]
    );
    // 6 blocks are left to prefill there, and 10 are held.
    let pinned = RouteRequest {
        pinned: Some(ReplicaId(1)),
        ..request(16, &[])
    };
    assert_eq!(
        chosen(&router.route(&pinned, 0)).1,
        7.0 + 10.0 + 1.0,
        "the load is where the request is"
    );
    assert_eq!(chosen(&router.route(&turn, 0)).2, Why::Affinity);
    assert_eq!(
        chosen(&router.route(&turn, 0)).0,
        1,
        "and so is its session"
    );
    router.moved(9, ReplicaId(0), device(0), 0);
    router.moved(1, ReplicaId(9), device(0), 0);
    router.ended(1, 0);
    assert_eq!(router.active(ReplicaId(1)), 0);
}

#[test]
fn a_replica_over_a_limit_gets_nothing_and_without_another_the_request_is_refused() {
    let overloads = [
        Overload {
            prefill_tokens: Some(100),
            ..Overload::default()
        },
        Overload {
            prefill_frac: Some(0.5),
            ..Overload::default()
        },
        Overload {
            decode_blocks: Some(0.1),
            ..Overload::default()
        },
    ];
    for overload in overloads {
        let cfg = RouterConfig {
            overload,
            step_tokens: 200,
            kv_blocks: vec![60, 60],
            ..RouterConfig::default()
        };
        let mut router = router(cfg, 2);
        let hot = [device(6), device(0)];
        router.placed(1, &request(96, &[]), ReplicaId(0), 0);
        router.placed(4, &request(80, &[]), ReplicaId(1), 0);
        let route = router.route(&request(96, &hot), 0);
        assert_eq!(chosen(&route).0, 0, "below, {overload:?}");
        router.placed(2, &request(16, &[]), ReplicaId(0), 0);
        let route = router.route(&request(96, &hot), 0);
        assert_eq!(chosen(&route).0, 1, "above: no candidate, {overload:?}");
        router.placed(3, &request(160, &[]), ReplicaId(1), 0);
        let route = router.route(&request(96, &hot), 0);
        assert_eq!(route, Route::Overloaded, "{overload:?}");
        router.ended(3, 0);
        router.ended(4, 0);
        let huge = request(16_000, &hot);
        assert_eq!(
            chosen(&router.route(&huge, 0)).0,
            1,
            "an idle one takes anything"
        );
    }
}

#[test]
fn parked_requests_are_ordered_by_tier_then_by_the_policy_and_age() {
    let parts = |id, strict, jump_s, arrival_s, uncached_tokens| ParkedParts {
        id,
        strict,
        jump_s,
        arrival: arrival_s * SECOND,
        uncached_tokens,
    };
    let waiting = [
        parts(1, 0, 0.0, 10, 50),
        parts(2, 0, 0.0, 11, 10),
        parts(3, 0, 5.0, 14, 500),
        parts(4, 1, 0.0, 19, 900),
        parts(5, 0, -3.0, 12, 40),
    ];
    let order = |queue_order, aging_s, now_s: u64| {
        let cfg = RouterConfig {
            queue_order,
            aging_s,
            ..RouterConfig::default()
        };
        let router = Router::new(cfg, 1).expect("valid");
        let mut ids: Vec<u64> = waiting.iter().map(|parts| parts.id).collect();
        ids.sort_by_key(|&id| {
            let at = usize::try_from(id).expect("small") - 1;
            router.place_in_queue(&waiting[at], now_s * SECOND)
        });
        ids
    };
    assert_eq!(order(QueueOrder::Fcfs, 30.0, 20), [4, 3, 1, 2, 5]);
    assert_eq!(order(QueueOrder::Wspt, 30.0, 20), [4, 2, 5, 1, 3]);
    // After 30 s of waiting 1 is a tier up, level with 4.
    assert_eq!(order(QueueOrder::Wspt, 30.0, 40), [1, 4, 2, 5, 3]);
    assert_eq!(
        order(QueueOrder::Wspt, 0.0, 40),
        [4, 2, 5, 1, 3],
        "no aging"
    );
}

#[test]
fn the_other_modes_look_at_no_cache() {
    let run = |mode| {
        let cfg = RouterConfig {
            mode,
            ..RouterConfig::default()
        };
        let mut router = router(cfg, 3);
        let hot = [device(0), device(0), device(100)];
        let mut got = [0_u32; 3];
        for id in 0..300_u64 {
            let draw = id.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
            let new = RouteRequest {
                draw,
                ..request(16, &hot)
            };
            let at = chosen(&router.route(&new, 0)).0;
            router.placed(id, &new, ReplicaId(at), 0);
            router.prefill_done(id);
            got[usize::from(at)] += 1;
        }
        got
    };
    assert_eq!(run(Mode::RoundRobin), [100, 100, 100]);
    assert_eq!(run(Mode::LeastLoaded), [100, 100, 100]);
    let random = run(Mode::Random);
    assert!(random.iter().all(|n| (70..130).contains(n)), "{random:?}");
    let two = run(Mode::PowerOfTwo);
    assert!(two.iter().all(|n| (90..110).contains(n)), "{two:?}");
}

#[test]
fn requests_nobody_ends_are_forgotten() {
    let mut router = router(RouterConfig::default(), 1);
    router.placed(1, &request(160, &[]), ReplicaId(0), 0);
    router.route(&request(16, &[]), 300 * SECOND);
    assert_eq!(router.active(ReplicaId(0)), 1);
    router.generated(1, 5, 200 * SECOND);
    router.route(&request(16, &[]), 301 * SECOND);
    assert_eq!(router.active(ReplicaId(0)), 1, "there was news of it");
    router.route(&request(16, &[]), 501 * SECOND);
    assert_eq!(router.active(ReplicaId(0)), 0);
}

#[test]
fn a_temperature_spreads_requests_by_cost() {
    let spread = |temperature: f64| {
        let mut router = router(
            RouterConfig {
                temperature,
                ..RouterConfig::default()
            },
            3,
        );
        let overlaps = [device(0), device(5), device(10)];
        let mut got = [0_u32; 3];
        for n in 0..3000_u64 {
            let draw = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let route = router.route(
                &RouteRequest {
                    draw,
                    ..request(160, &overlaps)
                },
                0,
            );
            got[usize::from(chosen(&route).0)] += 1;
        }
        got
    };
    assert_eq!(spread(0.0), [0, 0, 3000]);
    let warm = spread(1.0);
    assert!(
        warm[0] < warm[1] && warm[1] < warm[2] && warm[0] > 300,
        "{warm:?}"
    );
    let hot = spread(1000.0);
    assert!(hot.iter().all(|n| (950..1050).contains(n)), "{hot:?}");
}

#[test]
fn impossible_values_are_refused_and_unknown_replicas_ignored() {
    let bad = RouterConfig {
        temperature: f64::NAN,
        ..RouterConfig::default()
    };
    assert!(matches!(
        Router::new(bad, 1),
        Err(RouterError::Weight {
            name: "temperature",
            ..
        })
    ));
    assert!(matches!(
        Router::new(RouterConfig::default(), 0),
        Err(RouterError::Zero { .. })
    ));
    let mut router = router(RouterConfig::default(), 1);
    router.placed(1, &request(16, &[]), ReplicaId(7), 0);
    router.ended(99, 0);
    let pinned = RouteRequest {
        pinned: Some(ReplicaId(7)),
        ..request(16, &[])
    };
    assert_eq!(chosen(&router.route(&pinned, 0)).0, 0);
}
