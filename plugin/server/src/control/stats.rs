//! `GET /v1/kv/stats`: what the cache holds and did, by tier, as one JSON object.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use rootstock::memory::{StoreStats, TierId};
use rootstock::radix::{CacheConfig, CacheStats, HitCurve, TierStats};
use serde_json::{Value, json};

use crate::app::App;
use crate::http::api_error::json_response;
use crate::kv_events::publisher::PublisherState;

/// The route. It asks the core itself, so the numbers are of this moment and fit together.
pub async fn route(State(app): State<Arc<App>>) -> Response<Body> {
    let seen = app
        .engine
        .service()
        .visit(|at| (at.core.stats().cache, at.core.config().cache.clone()))
        .await;
    match seen {
        Ok((stats, config)) => {
            let events = app.engine.kv_events().map(|publisher| publisher.state());
            let mut body = body(&stats, &config, events);
            body["store"] = store(app.engine.service().stats().store);
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
        "copies": {"under_way": stats.copies_under_way, "failed": stats.copies_failed},
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
