//! The page at `/`: plain files that are part of the binary, without a build step.
//!
//! Whoever asks `/` for HTML gets the page, everybody else what this server is, as JSON. The page
//! asks the same control routes as everybody, with the key that is typed into it.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, header};

use crate::app::App;
use crate::http::admin;
use crate::http::api_error::{ApiError, ErrorKind};

/// Where its files lie; they need no key.
pub const FOLDER: &str = "/page/";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Nothing from elsewhere, and nobody puts it into a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /`.
pub async fn root(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    let accept = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok());
    if accept.is_some_and(|accept| accept.contains("text/html")) {
        return file(HTML, include_str!("page/index.html"));
    }
    let mut response = admin::root(&app);
    vary(&mut response);
    response
}

/// `GET /page/{file}`.
pub async fn part(Path(name): Path<String>) -> Response<Body> {
    match name.as_str() {
        "page.css" => file("text/css; charset=utf-8", include_str!("page/page.css")),
        "page.js" => file(SCRIPT, include_str!("page/page.js")),
        "tree.js" => file(SCRIPT, include_str!("page/tree.js")),
        "charts.js" => file(SCRIPT, include_str!("page/charts.js")),
        _ => {
            let message = format!("the page has no file {name:?}");
            ApiError::new(ErrorKind::NotFound, message).response()
        }
    }
}

fn file(kind: &'static str, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    let told: [(HeaderName, &'static str); 5] = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    for (name, value) in told {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    vary(&mut response);
    response
}

fn vary(response: &mut Response<Body>) {
    let value = HeaderValue::from_static("accept");
    response.headers_mut().insert(header::VARY, value);
}
