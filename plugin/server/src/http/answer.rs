//! What the handlers of all generating routes have in common: they end when the server's time is
//! up, what goes wrong is answered in the form of their API, and every answer is counted.

use std::future::Future;

use axum::body::Body;
use axum::http::Response;

use crate::app::App;
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::lifecycle::draining;

/// Runs a handler; `refuse` puts errors into the form of the API.
pub async fn answer(
    app: &App,
    route: &'static str,
    work: impl Future<Output = Result<Response<Body>, ApiError>>,
    refuse: impl FnOnce(&ApiError) -> Response<Body>,
) -> Response<Body> {
    let answered = tokio::select! {
        biased;
        answered = work => answered,
        // Whatever it waits for: a body, a seat, the answer.
        () = app.life.expired() => Err(draining()),
    };
    let response = answered.unwrap_or_else(|error| refuse(&error));
    app.metrics.responded(route, response.status().as_u16());
    response
}

/// Reads a request on a thread of its own: templates and tokenizers take their time on long
/// prompts.
///
/// # Errors
/// What `read` found; `Failed` when it panicked.
pub async fn read_apart<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(read).await.map_err(|_| {
        ApiError::new(
            ErrorKind::Failed,
            "reading the request failed; the server's log says why",
        )
    })?
}
