//! `GET /v1/kv/programs`: what is known of the caller's programs, the one that asked last first.
//!
//! `?id=ID` tells of one, `?limit=N` bounds them (100, at most 1000), `?cache_salt=S` names the
//! salt. Sessions are programs too. Times are seconds from now, so that no clock need be shared.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::memory::Nanos;
use rootstock::radix::{NamespaceKey, PrefixCache, ProgramId, ProgramStats};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::access::Caller;
use crate::control::query::{limit, parameter};
use crate::engine_port::{TENANT, engine_dead, scoped};
use crate::http::api_error::json_response;

const PROGRAMS: usize = 100;
const PROGRAMS_MAX: usize = 1000;
/// Children that are named.
const CHILDREN_MAX: usize = 64;

/// The route.
pub async fn route(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    let query = query.unwrap_or_default();
    let limit = match limit(&query, PROGRAMS, 1..=PROGRAMS_MAX) {
        Ok(limit) => limit,
        Err(error) => return error.response(),
    };
    let salt = Caller::of(&app, &headers, parameter(&query, "cache_salt").as_deref()).salt;
    let id = parameter(&query, "id").map(|id| scoped(salt.as_deref(), &id));
    let told = app.engine.service().visit(move |at| {
        let own = scoped(salt.as_deref(), "");
        let name = NamespaceKey {
            salt,
            ..at.namespace.clone()
        };
        let Ok(ns) = at.core.namespace(&name) else {
            return (Vec::new(), false);
        };
        let cache = at.core.cache();
        let all: Vec<ProgramId> = match id {
            Some(id) => cache.find_program(TENANT, ns, &id).into_iter().collect(),
            None => cache.programs_of(TENANT, ns).take(limit + 1).collect(),
        };
        let teller = Teller {
            cache,
            own: &own,
            now: at.now,
        };
        let told = all.iter().take(limit).filter_map(|&id| teller.program(id));
        (told.collect(), all.len() > limit)
    });
    match told.await {
        Ok((programs, more)) => {
            let body = json!({"programs": programs, "more": more});
            json_response(StatusCode::OK, &body)
        }
        Err(_) => engine_dead().response(),
    }
}

/// Tells of programs under one salt.
struct Teller<'a> {
    cache: &'a PrefixCache,
    /// What their names begin with in the core.
    own: &'a str,
    now: Nanos,
}

impl Teller<'_> {
    fn program(&self, id: ProgramId) -> Option<Value> {
        let stats = self.cache.program_stats(id)?;
        let mut told = self.turns(&stats);
        told["id"] = self.name(id)?.into();
        told["parent"] = self.cache.program_parent(id).map(|id| self.name(id)).into();
        let mut children = self.cache.program_children(id);
        let named: Vec<_> = children.by_ref().take(CHILDREN_MAX).collect();
        told["children"] = named.into_iter().map(|id| self.name(id)).collect();
        told["children_more"] = children.count().into();
        let holds = self.cache.program_holds(id);
        told["pages"] = json!({"distinct": holds.distinct, "device": holds.device,
            "host": holds.host, "storage": holds.storage, "pinned": holds.pinned});
        Some(told)
    }

    fn turns(&self, stats: &ProgramStats) -> Value {
        let served = stats.served;
        let restored = served.host_tokens + served.storage_tokens;
        let computed = served.prompt_tokens - served.device_tokens - restored;
        json!({
            "turns": stats.turns,
            "running": stats.running,
            "done": stats.done,
            "hits": stats.hits,
            "prompt_tokens": served.prompt_tokens,
            "cached_tokens": {"device": served.device_tokens, "host": served.host_tokens,
                "storage": served.storage_tokens},
            "restored_tokens": restored,
            "computed_tokens": computed,
            "seen_s_ago": seconds(self.now.saturating_sub(stats.seen_ns)),
            "expected_in_s": stats.due_ns.map(|due| self.until(due)),
            "mean_gap_s": stats.gap_ns.map(seconds),
            "derived_ttl_s": stats.derived_ttl_s,
        })
    }

    /// Below 0 for a moment that has passed.
    fn until(&self, moment: Nanos) -> f64 {
        seconds(moment.saturating_sub(self.now)) - seconds(self.now.saturating_sub(moment))
    }

    fn name(&self, id: ProgramId) -> Option<String> {
        let name = self.cache.program_name(id)?;
        Some(name.strip_prefix(self.own).unwrap_or(name).to_owned())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn seconds(time: Nanos) -> f64 {
    time as f64 / 1e9
}
