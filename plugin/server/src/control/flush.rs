//! `POST /flush_cache`: 200 only when every tier is empty afterwards.
//!
//! What runs is not stopped: while requests hold pages or copies are under way the answer is 409
//! with what is in the way, and nothing was cleared. `?timeout_s=N` waits up to so long for them.
//! Pins do not stand in the way; they end with what they pinned.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{Response, StatusCode};
use serde_json::json;

use crate::app::App;
use crate::control::query::parameter;
use crate::http::api_error::{ApiError, ErrorKind, json_response};

/// Seconds that a caller may wait, at most.
const TIMEOUT_MAX_S: u64 = 3600;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// The route.
pub async fn route(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Response<Body> {
    let patience = match timeout(query.as_deref().unwrap_or_default()) {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(error) => return error.response(),
    };
    let until = crate::clock::now() + patience;
    loop {
        match app.engine.flush().await {
            Ok(()) => return json_response(StatusCode::OK, &json!({"flushed": true})),
            Err(error) if error.kind != ErrorKind::Conflict => return error.response(),
            Err(error) if crate::clock::now() >= until => return error.retry_after(1).response(),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

fn timeout(query: &str) -> Result<u64, ApiError> {
    let value = parameter(query, "timeout_s").or_else(|| parameter(query, "timeout"));
    let Some(value) = value else {
        return Ok(0);
    };
    let seconds = value
        .parse()
        .ok()
        .filter(|&seconds| seconds <= TIMEOUT_MAX_S);
    seconds.ok_or_else(|| {
        let message = format!(
            "timeout_s is {value:?}; a whole number of seconds from 0 to {TIMEOUT_MAX_S} is wanted"
        );
        ApiError::param("timeout_s", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_whole_seconds_within_an_hour() {
        assert_eq!(timeout(""), Ok(0));
        assert_eq!(timeout("x=1&timeout_s=5"), Ok(5));
        assert_eq!(timeout("timeout=7"), Ok(7));
        for wrong in ["timeout_s=-1", "timeout_s=1.5", "timeout_s=3601"] {
            let error = timeout(wrong).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("timeout_s"), "{wrong}");
        }
    }
}
