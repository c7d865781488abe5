//! `POST` and `DELETE` of `/v1/kv/storage`: a storage tier comes and goes while requests run.
//!
//! Whoever may name an address can have the conversations of all callers written there, and KV
//! read from there. So this answers to clients on this machine, and only where the operator has
//! said `--storage-control`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use rootstock::memory::without_secrets;
use rootstock_engine::service::{AttachError, Service, StorageConfig};
use serde_json::{Value, json};

use crate::app::App;
use crate::config::STORAGE_MIB;
use crate::engine_port::engine_dead;
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::http::body;
use crate::load::STORAGE_PATIENCE;
use crate::openai::fields::Fields;

/// Most MiB of a store.
const QUOTA_MIB_MAX: i64 = 1 << 30;

/// Takes a storage tier into use.
pub async fn attach(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let attached = match allowed(&app) {
        Ok(()) => attach_as_asked(&app, request).await,
        Err(error) => Err(error),
    };
    match attached {
        Ok(uri) => json_response(StatusCode::OK, &json!({"attached": true, "uri": uri})),
        Err(error) => error.response(),
    }
}

/// Uses it no more.
pub async fn detach(State(app): State<Arc<App>>) -> Response<Body> {
    let detached = match allowed(&app) {
        Ok(()) => away(&app, |service| service.detach_storage()).await,
        Err(error) => Err(error),
    };
    match detached {
        Ok(()) => json_response(StatusCode::OK, &json!({"attached": false})),
        Err(error) => error.response(),
    }
}

fn allowed(app: &App) -> Result<(), ApiError> {
    if app.storage_control {
        return Ok(());
    }
    let message = "a storage tier comes and goes only on a server started with --storage-control";
    Err(ApiError::new(ErrorKind::Forbidden, message))
}

async fn attach_as_asked(app: &App, request: Request) -> Result<String, ApiError> {
    let (head, incoming) = request.into_parts();
    let value: Value = body::read_json(&head.headers, incoming, &app.limits).await?;
    let fields = Fields::root(&value)?;
    let uri = fields.text("uri")?;
    let uri = uri.ok_or_else(|| ApiError::param("uri", "the address of a store is wanted"))?;
    let quota_mib = fields.integer("quota_mib", 1..=QUOTA_MIB_MAX)?;
    let config = StorageConfig {
        uri: uri.to_owned(),
        quota_mib: quota_mib.map_or(STORAGE_MIB, i64::unsigned_abs),
        read_timeout: STORAGE_PATIENCE,
    };
    let told = without_secrets(&config.uri);
    away(app, move |service| service.attach_storage(&config)).await?;
    Ok(told)
}

/// Does what may wait for a disk away from the threads that serve.
async fn away(
    app: &App,
    act: impl FnOnce(&Service) -> Result<(), AttachError> + Send + 'static,
) -> Result<(), ApiError> {
    let service = app.engine.service().clone();
    let done = tokio::task::spawn_blocking(move || act(&service)).await;
    match done {
        Ok(Ok(())) => Ok(()),
        Ok(Err(AttachError::EngineDead)) | Err(_) => Err(engine_dead()),
        Ok(Err(AttachError::Store(error))) => Err(ApiError::param("uri", error.to_string())),
        Ok(Err(conflict)) => Err(ApiError::new(ErrorKind::Conflict, conflict.to_string())),
    }
}
