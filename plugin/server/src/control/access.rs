//! Who may use the control routes, and for what: each caller for its own salt only.
//!
//! Without API keys these routes answer to peers on loopback. With keys, whoever has one may use
//! those about its tenant's own content from anywhere; what is about everybody stays on loopback.
//! The salt that a caller acts for comes as with requests: the header `x-tenant-id`, else the field
//! or parameter `cache_salt`, and with keys it lies within the tenant's own, as with requests.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response};
use axum::middleware::Next;
use rootstock::hints::{self, ParsedHints};
use serde_json::{Value, json};

use crate::app::App;
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::listener::Peer;

/// Refuses peers that are not on this machine.
pub async fn from_this_machine(request: Request, next: Next) -> Response<Body> {
    if is_near(&request) {
        return next.run(request).await;
    }
    let message = format!(
        "{} answers to clients on this machine only (127.0.0.1 or ::1)",
        request.uri().path()
    );
    ApiError::new(ErrorKind::Forbidden, message).response()
}

/// The same, but where keys were checked before.
pub async fn near_or_with_key(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response<Body> {
    if app.keys.is_some() || is_near(&request) {
        return next.run(request).await;
    }
    let message = format!(
        "{} answers to clients on this machine (127.0.0.1 or ::1), or where there are API keys \
         (--api-keys, ROOTSTOCK_API_KEY) to those",
        request.uri().path()
    );
    ApiError::new(ErrorKind::Forbidden, message).response()
}

fn is_near(request: &Request) -> bool {
    let peer = request.extensions().get::<Peer>();
    peer.is_some_and(|peer| peer.0.ip().to_canonical().is_loopback())
}

/// Whom a verb or a question is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Where its content is.
    pub salt: Option<String>,
    /// How important it may make that.
    pub priority_max: i32,
}

impl Caller {
    /// Of a control route, with the salt that its body or query states.
    pub fn of(app: &App, headers: &HeaderMap, stated: Option<&str>) -> Caller {
        let mut parsed = read(headers, stated);
        if let Some(tenant) = app.keys.as_ref().and_then(|keys| keys.tenant(headers).ok()) {
            tenant.bind(&mut parsed);
        }
        Caller::of_request(&parsed)
    }

    /// Of a request whose hints were read.
    pub fn of_request(parsed: &ParsedHints) -> Caller {
        Caller {
            salt: parsed.salt.clone(),
            priority_max: parsed.ceiling.priority,
        }
    }
}

/// The salt that is stated, as requests state it; empty is none.
fn read(headers: &HeaderMap, stated: Option<&str>) -> ParsedHints {
    const TENANT: &str = "x-tenant-id";
    let header = headers.get(TENANT).and_then(|value| value.to_str().ok());
    let header = header.map(|value| (TENANT, value));
    hints::parse(
        &Value::Null,
        &json!({"cache_salt": stated}),
        header.as_slice(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_beats_the_field_and_nothing_is_no_salt() {
        let salt = |headers: &HeaderMap, stated| read(headers, stated).salt;
        let mut headers = HeaderMap::new();
        assert_eq!(salt(&headers, None), None);
        assert_eq!(salt(&headers, Some("")), None);
        assert_eq!(salt(&headers, Some("a")).as_deref(), Some("a"));
        headers.insert("x-tenant-id", " b ".parse().unwrap());
        assert_eq!(salt(&headers, Some("a")).as_deref(), Some("b"));
    }
}
