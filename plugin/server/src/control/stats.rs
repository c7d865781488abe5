//! `GET /v1/kv/stats`: what the cache holds and did, by tier, as one JSON object.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use rootstock::memory::{Nanos, StoreStats, TierId};
use rootstock::radix::{CacheConfig, CacheStats, EventTier, HitCurve, TierStats};
use rootstock::scheduler::SchedulerStats;
use rootstock_engine::service::{Histogram, Stats};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::departures::Departure;
use crate::control::why::Evictor;
use crate::http::api_error::json_response;
use crate::kv_events::publisher::PublisherState;

/// Departures that are told.
const EVICTED_MAX: usize = 32;

/// The route. It asks the core itself, so the numbers are of this moment and fit together.
pub async fn route(State(app): State<Arc<App>>) -> Response<Body> {
    let seen = app
        .engine
        .service()
        .visit(|at| (at.core.stats(), at.core.config().cache.clone(), at.now))
        .await;
    match seen {
        Ok((core, config, now)) => {
            let stats = core.cache;
            let events = app.engine.kv_events().map(|publisher| publisher.state());
            let mut body = body(&stats, &config, events);
            let service = app.engine.service().stats();
            body["requests"] = requests(&core.schedulers, &service);
            body["steps"] = steps(&service);
            body["times"] = times(&service);
            body["evicted_lately"] = evicted_lately(&app, now).into();
            body["moved_down_pages"] = app.engine.memory().moved_down_pages().into();
            let ahead = app.engine.ahead().stats();
            body["ahead"] = json!({"started": ahead.started, "warmed_tokens": ahead.warmed_tokens,
                "used_tokens": ahead.used_tokens, "wasted_tokens": ahead.wasted_tokens});
            body["store"] = store(service.store);
            json_response(StatusCode::OK, &body)
        }
        Err(_) => crate::engine_port::engine_dead().response(),
    }
}

fn body(stats: &CacheStats, config: &CacheConfig, events: Option<PublisherState>) -> Value {
    let tiers: Vec<Value> = stats.tiers.iter().map(tier).collect();
    json!({
        "page_tokens": config.page_tokens,
        "policy": config.policy,
        "write_policy": config.write_policy,
        "tiers": tiers,
        "lookups": stats.lookups,
        "lookup_tokens": stats.lookup_tokens,
        "pins": {
            "pages": stats.pinned_pages,
            "budget_pages": stats.pin_budget_pages,
            "yielded": stats.pins_yielded,
        },
        "copies": {"under_way": stats.copies_under_way, "failed": stats.copies_failed,
            "down_pages": stats.copied_down_pages, "up_pages": stats.copied_up_pages},
        "nodes": stats.nodes,
        "nodes_max": config.max_nodes,
        "namespaces": stats.namespaces,
        "leases": stats.leases,
        "uncached_pages": stats.uncached_pages,
        "programs": stats.programs,
        "prefetch": {
            "programs": stats.returns.programs,
            "pages": stats.returns.pages,
            "left_out": stats.returns.pressed,
        },
        "duel": stats.duel.as_ref().map(|duel| json!({
            "lru_rules": duel.lru_rules,
            "rounds_lost": duel.rounds_lost,
        })),
        "hit_curve": stats.curve.as_ref().map(curve),
        "kv_events": events.map(|state| json!({
            "incarnation": state.incarnation,
            "next": state.ring.next,
            "oldest": state.ring.first,
            "bytes": state.ring.bytes,
            "subscribers": state.subscribers,
        })),
    })
}

/// The queue and the batch, and what came of requests so far.
fn requests(all: &[SchedulerStats], service: &Stats) -> Value {
    let sum =
        |of: fn(&SchedulerStats) -> u32| -> u64 { all.iter().map(|s| u64::from(of(s))).sum() };
    json!({
        "waiting": sum(|stats| stats.waiting),
        "held_for_programs": sum(|stats| stats.held_now),
        "running": sum(|stats| stats.running),
        "fetching": sum(|stats| stats.fetching),
        "preemptions": all.iter().map(|stats| stats.preemptions).sum::<u64>(),
        "ended": service.finished.stop + service.finished.stop_string + service.finished.length,
        "aborted": service.finished.aborted,
        "failed": service.finished.failed,
        "prompt_tokens": service.prompt_tokens,
        "cached_tokens": {"device": service.cached.device, "host": service.cached.host,
            "storage": service.cached.storage},
        "generated_tokens": service.generated_tokens,
    })
}

fn steps(service: &Stats) -> Value {
    let classes = service.step_s.all().map(|(class, times)| {
        let told = json!({"count": times.count(), "sum_s": times.sum_s()});
        (class.name().to_owned(), told)
    });
    json!({
        "computed": service.steps,
        "failed": service.steps_failed,
        "computed_tokens": service.computed_tokens,
        "by_class": classes.into_iter().collect::<serde_json::Map<_, _>>(),
    })
}

/// Counters by bucket, so that the times of a span of time are differences.
fn times(service: &Stats) -> Value {
    let told = |times: &Histogram| json!({"counts": times.counts(), "sum_s": times.sum_s()});
    json!({
        "bounds_s": Histogram::bounds_s(),
        "ttft": told(&service.ttft_s),
        "tpot": told(&service.tpot_s),
        "queue": told(&service.queue_s),
    })
}

fn evicted_lately(app: &App, now: Nanos) -> Vec<Value> {
    let told = |(one, by): (Departure, Option<Evictor>)| {
        let (tier, replica) = match one.tier {
            EventTier::Device(replica) => ("device", Some(replica.0)),
            EventTier::Host => ("host", None),
        };
        #[expect(clippy::cast_precision_loss, reason = "a time for people")]
        let ago_s = now.saturating_sub(one.at) as f64 / 1e9;
        json!({
            "ago_s": ago_s, "tier": tier, "replica": replica, "reason": one.reason.name(),
            "pages": one.pages, "moved_down": one.moved_down,
            "by": by.map(|by| json!({"own": by.is_own, "session": by.session,
                "prompt_tokens": by.prompt_tokens})),
        })
    };
    let departed = app.engine.memory().departed();
    departed.into_iter().take(EVICTED_MAX).map(told).collect()
}

fn store(stats: Option<StoreStats>) -> Value {
    stats.map_or(Value::Null, |stats| {
        json!({
            "pages": stats.pages, "bytes": stats.bytes, "written": stats.written,
            "read": stats.read, "missing": stats.missing, "corrupt": stats.corrupt,
            "truncated": stats.truncated, "foreign": stats.foreign, "errors": stats.errors,
            "timeouts": stats.timeouts, "evicted": stats.evicted,
        })
    })
}

/// Counters, so that the hits of a span of time are differences.
fn curve(curve: &HitCurve) -> Value {
    let point = |point: &rootstock::radix::CurvePoint| {
        json!({
            "pages": point.pages,
            "hit_tokens": point.hit_tokens,
            "lru_hit_tokens": point.lru_hit_tokens,
        })
    };
    let points: Vec<Value> = curve.points.iter().map(point).collect();
    json!({
        "lookup_tokens": curve.lookup_tokens,
        "hit_tokens": curve.hit_tokens,
        "points": points,
    })
}

fn tier(stats: &TierStats) -> Value {
    let (tier, replica) = match stats.tier {
        TierId::Device(replica) => ("device", Some(replica.0)),
        TierId::Host => ("host", None),
        TierId::Storage => ("storage", None),
    };
    json!({
        "tier": tier,
        "replica": replica,
        "pages": {
            "total": stats.total, "free": stats.free, "evictable": stats.evictable,
            "leased": stats.leased, "held": stats.held, "in_transit": stats.in_transit,
        },
        "hit_tokens": stats.hit_tokens,
        "evicted_pages": {"for_room": stats.evicted_pages, "ephemeral": stats.dropped_pages},
    })
}
