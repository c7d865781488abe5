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
use crate::engine_port::engine_dead;
use crate::http::api_error::{ApiError, json_response};

const NODES: usize = 100;
const NODES_MAX: usize = 1000;

/// The route.
pub async fn route(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    let query = query.unwrap_or_default();
    let limit = match parameter(&query, "limit").map(|text| (text.parse::<usize>(), text)) {
        None => NODES,
        Some((Ok(limit), _)) if (1..=NODES_MAX).contains(&limit) => limit,
        Some((_, text)) => {
            let message = format!("limit is {text:?}; 1 to {NODES_MAX} nodes are possible");
            return ApiError::param("limit", message).response();
        }
    };
    let salt = Caller::of(&app, &headers, parameter(&query, "cache_salt")).salt;
    let session = parameter(&query, "session");
    let prompt = match session {
        None => Arc::default(),
        Some(name) => match app.engine.sessions().prompt(salt.as_deref(), name) {
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

/// The value of a parameter that needs no decoding.
pub fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == name && !value.is_empty()).then_some(value)
    })
}
