//! Who may use the control routes: clients on this machine, and each for its own salt only.
//!
//! There are no keys yet, so a peer that is not on loopback is refused. The salt that a caller acts
//! for comes as with requests: the header `x-tenant-id`, else the field or parameter `cache_salt`.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, Response};
use axum::middleware::Next;

use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::listener::Peer;

/// Refuses peers that are not on this machine.
pub async fn from_this_machine(request: Request, next: Next) -> Response<Body> {
    let peer = request.extensions().get::<Peer>();
    if peer.is_some_and(|peer| peer.0.ip().to_canonical().is_loopback()) {
        return next.run(request).await;
    }
    let message = format!(
        "{} answers to clients on this machine only (127.0.0.1 or ::1)",
        request.uri().path()
    );
    ApiError::new(ErrorKind::Forbidden, message).response()
}

/// The salt of a caller; empty is none.
pub fn salt(headers: &HeaderMap, stated: Option<&str>) -> Option<String> {
    let header = headers
        .get("x-tenant-id")
        .and_then(|value| value.to_str().ok());
    [header.map(str::trim), stated]
        .into_iter()
        .flatten()
        .find(|salt| !salt.is_empty())
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_beats_the_field_and_nothing_is_no_salt() {
        let mut headers = HeaderMap::new();
        assert_eq!(salt(&headers, None), None);
        assert_eq!(salt(&headers, Some("")), None);
        assert_eq!(salt(&headers, Some("a")).as_deref(), Some("a"));
        headers.insert("x-tenant-id", " b ".parse().unwrap());
        assert_eq!(salt(&headers, Some("a")).as_deref(), Some("b"));
    }
}
