//! `GET /v1/kv/tree`: the caller's part of the tree, as a flat list of nodes, parents first.
//!
//! `?limit=N` bounds the nodes (100, at most 1000), `?session=ID` shows the way of the last prompt
//! of a session and what lies below it, `?cache_salt=S` names the salt. Of tokens only their hashes
//! are shown.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::radix::{Key, NamespaceKey, Outline};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::access::Caller;
use crate::control::query::{limit, parameter};
use crate::engine_port::engine_dead;
use crate::http::api_error::json_response;

const NODES: usize = 100;
const NODES_MAX: usize = 1000;

/// The route.
pub async fn route(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    let query = query.unwrap_or_default();
    let limit = match limit(&query, NODES, 1..=NODES_MAX) {
        Ok(limit) => limit,
        Err(error) => return error.response(),
    };
    let salt = Caller::of(&app, &headers, parameter(&query, "cache_salt").as_deref()).salt;
    let session = parameter(&query, "session");
    let prompt = match session {
        None => Arc::default(),
        Some(name) => match app.engine.sessions().prompt(salt.as_deref(), &name) {
            Some(tokens) => tokens,
            None => return json_response(StatusCode::OK, &body(&[], false)),
        },
    };
    let nodes = app.engine.service().visit(move |at| {
        let name = NamespaceKey {
            salt,
            ..at.namespace.clone()
        };
        let ns = at.core.namespace(&name).ok()?;
        let key = Key {
            ns,
            tokens: &prompt,
        };
        Some(at.core.cache().outline(key, limit + 1))
    });
    match nodes.await {
        Ok(nodes) => {
            let mut nodes = nodes.unwrap_or_default();
            let more = nodes.len() > limit;
            nodes.truncate(limit);
            json_response(StatusCode::OK, &body(&nodes, more))
        }
        Err(_) => engine_dead().response(),
    }
}

fn body(nodes: &[Outline], more: bool) -> Value {
    json!({"nodes": nodes, "more": more})
}
