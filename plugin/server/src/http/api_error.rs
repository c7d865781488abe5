//! What a caller gets when a request fails: one type, one table from cause to HTTP status, and
//! OpenAI's error form `{"error": {"message", "type", "param", "code"}}`.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

/// Why a request was refused or broke. Every variant has one row of status, type and code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ErrorKind {
    /// The body or a field of it is wrong.
    BadRequest,
    /// The prompt does not fit the context window.
    ContextLength,
    /// The request asks for something this server does not do yet.
    Unsupported,
    /// No such path.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// No valid key came with the request.
    Unauthorized,
    /// The caller may not use this path.
    Forbidden,
    /// The body took too long to arrive.
    BodyTimeout,
    /// The body is over the limit.
    BodyTooLarge,
    /// The state of the server does not allow it now.
    Conflict,
    /// The queue is full.
    Overloaded,
    /// The server is going down.
    Draining,
    /// The engine failed in this request.
    Failed,
    /// The engine is gone.
    EngineDead,
    /// The request waited in the queue beyond its limit.
    QueueTimeout,
}

impl ErrorKind {
    /// All kinds, for the table's completeness test.
    pub const ALL: [ErrorKind; 15] = [
        ErrorKind::BadRequest,
        ErrorKind::ContextLength,
        ErrorKind::Unsupported,
        ErrorKind::NotFound,
        ErrorKind::MethodNotAllowed,
        ErrorKind::Unauthorized,
        ErrorKind::Forbidden,
        ErrorKind::BodyTimeout,
        ErrorKind::BodyTooLarge,
        ErrorKind::Conflict,
        ErrorKind::Overloaded,
        ErrorKind::Draining,
        ErrorKind::Failed,
        ErrorKind::EngineDead,
        ErrorKind::QueueTimeout,
    ];

    /// HTTP status, OpenAI `type` and `code` of this kind.
    pub fn row(self) -> (StatusCode, &'static str, Option<&'static str>) {
        const CALLER: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            ErrorKind::BadRequest => (StatusCode::BAD_REQUEST, CALLER, None),
            ErrorKind::ContextLength => (
                StatusCode::BAD_REQUEST,
                CALLER,
                Some("context_length_exceeded"),
            ),
            ErrorKind::Unsupported => (StatusCode::BAD_REQUEST, CALLER, Some("unsupported")),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, CALLER, Some("not_found")),
            ErrorKind::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                CALLER,
                Some("method_not_allowed"),
            ),
            ErrorKind::Unauthorized => (StatusCode::UNAUTHORIZED, CALLER, Some("invalid_api_key")),
            ErrorKind::Forbidden => (StatusCode::FORBIDDEN, CALLER, Some("forbidden")),
            ErrorKind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, CALLER, Some("body_timeout")),
            ErrorKind::BodyTooLarge => (
                StatusCode::PAYLOAD_TOO_LARGE,
                CALLER,
                Some("body_too_large"),
            ),
            ErrorKind::Conflict => (StatusCode::CONFLICT, CALLER, Some("conflict")),
            ErrorKind::Overloaded => (
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                Some("overloaded"),
            ),
            ErrorKind::Draining => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("draining")),
            ErrorKind::Failed => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("failed")),
            ErrorKind::EngineDead => (
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                Some("engine_unavailable"),
            ),
            ErrorKind::QueueTimeout => (
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                Some("queue_timeout"),
            ),
        }
    }
}

/// One failure, ready to be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// The row of the table.
    pub kind: ErrorKind,
    /// What was wanted, what was found, what to do.
    pub message: String,
    /// The field of the body that is wrong, e.g. `messages[0].role`.
    pub param: Option<String>,
    /// Seconds to wait before another try; becomes `Retry-After`.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    /// A failure that no single field is to blame for.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> ApiError {
        ApiError {
            kind,
            message: message.into(),
            param: None,
            retry_after_s: None,
        }
    }

    /// A wrong field.
    pub fn param(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            kind: ErrorKind::BadRequest,
            message: message.into(),
            param: Some(param.into()),
            retry_after_s: None,
        }
    }

    /// A field that asks for what is not built.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError {
            kind: ErrorKind::Unsupported,
            ..ApiError::param(param, message)
        }
    }

    /// The same failure with a wait for the client.
    #[must_use]
    pub fn retry_after(self, seconds: u32) -> ApiError {
        ApiError {
            retry_after_s: Some(seconds),
            ..self
        }
    }

    /// The body, in OpenAI's form.
    pub fn body(&self) -> Value {
        let (_, class, code) = self.kind.row();
        json!({"error": {
            "message": self.message, "type": class, "param": self.param, "code": code,
        }})
    }

    /// The whole HTTP answer.
    pub fn response(&self) -> Response<Body> {
        let (status, _, _) = self.kind.row();
        let mut response = json_response(status, &self.body());
        if let Some(seconds) = self.retry_after_s {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// An answer with a JSON body.
pub fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_row_with_an_error_status() {
        for kind in ErrorKind::ALL {
            let (status, class, _) = kind.row();
            assert!(
                status.is_client_error() || status.is_server_error(),
                "{kind:?}"
            );
            let caller = class == "invalid_request_error";
            assert_eq!(
                caller,
                status.is_client_error() && status != 429,
                "{kind:?}"
            );
        }
        let mut sorted = ErrorKind::ALL.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), ErrorKind::ALL.len(), "a kind is listed twice");
    }

    #[test]
    fn an_error_names_its_param_and_its_wait() {
        let error = ApiError::param("stop[4]", "too many").retry_after(3);
        assert_eq!(error.body()["error"]["param"], "stop[4]");
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        assert_eq!(error.response().headers()["retry-after"], "3");
        assert_eq!(error.response().status(), 400);
    }
}
