//! `GET /v1/kv/picture`: the caller's part of the tree as a picture of bounded size, and the
//! programs in it: what the page at `/` and `rootstock top` show.
//!
//! `?nodes=N` bounds the nodes that are shown one by one (300, at most 2,000); what is left at each
//! place is one more entry with its sums, so that the pages of all entries add up. `?under=ID`
//! shows what lies in and below one node. `?cache_salt=S` names the salt. Of tokens nothing is
//! shown.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::memory::Nanos;
use rootstock::radix::{
    NamespaceKey, NodeRef, Part, Picture, PictureLimits, PrefixCache, ProgramPlace,
};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::control::access::Caller;
use crate::control::query::{bounded, parameter};
use crate::engine_port::{TENANT, engine_dead, scoped};
use crate::http::api_error::{ApiError, json_response};
use crate::metrics::asked::kind_name;

const NODES: usize = 300;
const NODES_MAX: usize = 2000;
/// Programs that are shown.
const PROGRAMS_MAX: usize = 256;

/// The route.
pub async fn route(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    let query = query.unwrap_or_default();
    let salt = Caller::of(&app, &headers, parameter(&query, "cache_salt").as_deref()).salt;
    let read = bounded(&query, "nodes", NODES, 1..=NODES_MAX)
        .and_then(|nodes| Ok((nodes, under(&query)?)));
    let (nodes, under) = match read {
        Ok(read) => read,
        Err(error) => return error.response(),
    };
    let limits = PictureLimits {
        nodes,
        programs: PROGRAMS_MAX,
    };
    let seen = app.engine.service().visit(move |at| {
        let own = scoped(salt.as_deref(), "");
        let name = NamespaceKey {
            salt,
            ..at.namespace.clone()
        };
        let page_tokens = at.core.config().cache.page_tokens;
        let ns = at.core.namespace(&name).ok();
        let cache = at.core.cache();
        let picture = ns.map(|ns| cache.picture((TENANT, ns), under, limits, at.now));
        let picture = picture.unwrap_or_default();
        let programs = picture.programs.iter();
        let programs = programs
            .filter_map(|place| program(cache, *place, &own, at.now))
            .collect::<Vec<_>>();
        body(&picture, &programs, page_tokens)
    });
    match seen.await {
        Ok(body) => json_response(StatusCode::OK, &body),
        Err(_) => engine_dead().response(),
    }
}

fn under(query: &str) -> Result<Option<NodeRef>, ApiError> {
    let Some(text) = parameter(query, "under") else {
        return Ok(None);
    };
    let node = text.parse().map(Some);
    node.map_err(|()| {
        let message = format!("under is {text:?}; the id of a node is wanted, as 12.3");
        ApiError::param("under", message)
    })
}

fn body(picture: &Picture, programs: &[Value], page_tokens: u32) -> Value {
    let parts: Vec<Value> = picture.parts.iter().map(part).collect();
    json!({
        "page_tokens": page_tokens,
        "nodes": picture.nodes,
        "pages": picture.pages,
        "partial": picture.is_partial,
        "parts": parts,
        "programs": programs,
    })
}

/// What is usual is left out.
fn part(part: &Part) -> Value {
    let mut told = Map::new();
    let mut tell = |name: &str, value: Value, usual: Value| {
        if value != usual {
            told.insert(name.to_owned(), value);
        }
    };
    tell("parent", part.parent.into(), Value::Null);
    let id = part.id.map(|id| id.to_string());
    tell("id", id.into(), Value::Null);
    tell("nodes", part.nodes.into(), 1.into());
    tell("depth", part.depth.into(), 0.into());
    tell("pages", part.pages.into(), Value::Null);
    tell("below", part.below.into(), part.pages.into());
    tell("host", part.tiers.host.into(), 0.into());
    let elsewhere = part.pages - part.tiers.host - part.tiers.device;
    tell("moving", elsewhere.into(), 0.into());
    tell("kind", kind_name(part.kind).into(), "unknown".into());
    tell("hits", part.hits.into(), 0.into());
    tell("priority", part.priority.into(), 0.into());
    tell("pinned", part.pinned.into(), 0.into());
    tell("pin_left_s", part.pin_left_s.into(), Value::Null);
    tell("used", part.used.into(), false.into());
    told.into()
}

fn program(cache: &PrefixCache, place: ProgramPlace, own: &str, now: Nanos) -> Option<Value> {
    let stats = cache.program_stats(place.program)?;
    let name = cache.program_name(place.program)?;
    let due = stats.due_ns.map(|due| seconds(due) - seconds(now));
    Some(json!({
        "name": name.strip_prefix(own).unwrap_or(name),
        "part": place.part,
        "pages": place.pages,
        "turns": stats.turns,
        "running": stats.running,
        "done": stats.done,
        "seen_s_ago": rounded(seconds(now.saturating_sub(stats.seen_ns))),
        "expected_in_s": due.map(rounded),
    }))
}

#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn seconds(time: Nanos) -> f64 {
    time as f64 / 1e9
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 10.0).round() / 10.0
}
