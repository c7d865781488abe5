//! The routes around generation: models, liveness, readiness, metrics.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use crate::about;
use crate::app::App;
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::http::lifecycle::Phase;
use crate::metrics::CONTENT_TYPE;

/// `GET /`: what this is.
pub fn root(app: &App) -> Response<Body> {
    let body = json!({
        "server": "rootstock", "version": about::VERSION,
        "commit": about::COMMIT, "features": about::features(),
        "model": app.engine.card().name,
    });
    json_response(StatusCode::OK, &body)
}

/// `GET /health`: 200 as long as the process answers, also while it drains.
pub async fn health(State(app): State<Arc<App>>) -> Response<Body> {
    json_response(
        StatusCode::OK,
        &json!({"status": "alive", "phase": phase(&app)}),
    )
}

/// `GET /ready`: 200 when requests are taken; 503 while draining or when the engine is gone.
pub async fn ready(State(app): State<Arc<App>>) -> Response<Body> {
    let status = if app.is_ready() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    json_response(
        status,
        &json!({"ready": app.is_ready(), "phase": phase(&app)}),
    )
}

fn phase(app: &App) -> &'static str {
    if !app.engine.alive() {
        return "engine stopped";
    }
    match app.life.phase() {
        Phase::Serving => "serving",
        Phase::Draining | Phase::Expired => "draining",
    }
}

/// `GET /openapi.json`: routes and fields, for programs that read such things.
pub async fn openapi() -> Response<Body> {
    let mut response = Response::new(Body::from(include_str!("openapi.json")));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `GET /metrics`.
pub async fn metrics(State(app): State<Arc<App>>) -> Response<Body> {
    match app.metrics.text() {
        Ok(text) => {
            let mut response = Response::new(Body::from(text));
            let kind = HeaderValue::from_static(CONTENT_TYPE);
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
            response
        }
        Err(error) => {
            ApiError::new(ErrorKind::Failed, format!("metrics failed: {error}")).response()
        }
    }
}

/// `GET /v1/models`: the one model that is loaded. Every other name is served by it too.
pub async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    let entry = entry(&app, &app.engine.card().name);
    // Anthropic's clients read the same list by other names.
    let body = json!({"object": "list", "data": [entry], "has_more": false,
        "first_id": entry["id"], "last_id": entry["id"]});
    json_response(StatusCode::OK, &body)
}

/// `GET /v1/models/{name}`: every name is served.
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response<Body> {
    json_response(StatusCode::OK, &entry(&app, &name))
}

fn entry(app: &App, name: &str) -> Value {
    let card = app.engine.card();
    json!({
        "id": name, "object": "model", "created": app.started_s, "owned_by": "rootstock",
        "root": card.name, "max_model_len": card.max_len, "type": "model",
        "display_name": name, "created_at": crate::clock::rfc3339(app.started_s),
    })
}
