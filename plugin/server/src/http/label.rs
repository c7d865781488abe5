//! The name under which a request is found in logs and traces.
//!
//! A caller's `X-Request-Id` is given back and used. It is a label: nothing is looked up by it, so
//! two requests may carry the same one. A request without one, or with one that is not usable, gets
//! a name of the server's own, which only logs and traces show.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response};
use axum::middleware::Next;
use tracing::Instrument;

use crate::app::App;
use crate::spans::Parent;

/// Bytes of a label that is given back.
const BYTES_MAX: usize = 256;

static HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// The request that a task works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub id: Arc<str>,
    /// The caller gave it.
    pub is_given: bool,
    /// Where it came from.
    pub origin: Arc<Origin>,
}

/// When a request came, and with what.
#[derive(Debug, PartialEq, Eq)]
pub struct Origin {
    /// Nanoseconds since 1970.
    pub received_ns: u64,
    /// The path that was asked.
    pub path: Arc<str>,
    /// The client's place in a trace.
    pub parent: Option<Parent>,
}

tokio::task_local! {
    static CURRENT: Label;
}

impl Label {
    /// That of the request whose handler this is.
    pub fn current() -> Option<Label> {
        CURRENT.try_with(Clone::clone).ok()
    }
}

/// Runs a request under its name.
pub async fn follow(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    let given = usable(request.headers());
    let text = given.as_ref().and_then(|label| label.to_str().ok());
    let id = text.map_or_else(|| app.new_id("req"), str::to_owned);
    let span = tracing::info_span!(
        "request",
        request_id = id,
        method = %request.method(),
        path = request.uri().path(),
        status = tracing::field::Empty,
    );
    let label = Label {
        id: id.into(),
        is_given: given.is_some(),
        origin: Arc::new(Origin {
            received_ns: crate::clock::unix_nanos(),
            path: request.uri().path().into(),
            parent: parent(request.headers()),
        }),
    };
    let answered = CURRENT.scope(label, next.run(request));
    let mut response = answered.instrument(span.clone()).await;
    span.record("status", response.status().as_u16());
    if let Some(given) = given {
        response.headers_mut().insert(&HEADER, given);
    }
    response
}

/// The place in a trace that W3C's headers name; what they mean is read where spans are made.
fn parent(headers: &HeaderMap) -> Option<Parent> {
    let text = |name: &str| {
        let text = headers.get(name)?.to_str().ok()?;
        (text.len() <= 2 * BYTES_MAX).then(|| Arc::from(text))
    };
    Some(Parent {
        traceparent: text("traceparent")?,
        tracestate: text("tracestate"),
    })
}

fn usable(headers: &HeaderMap) -> Option<HeaderValue> {
    let label = headers.get(&HEADER)?;
    let text = label.to_str().ok()?;
    (1..=BYTES_MAX).contains(&text.len()).then(|| label.clone())
}
