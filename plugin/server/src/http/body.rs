//! Reading a request body within its limits of size and time.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde_json::Value;

use crate::config::HttpLimits;
use crate::http::api_error::{ApiError, ErrorKind};

/// How long a client may go on sending what is thrown away, so that it reads our answer instead
/// of a broken connection.
const DISCARD: Duration = Duration::from_secs(2);

/// Reads a JSON body.
///
/// # Errors
/// When it is too large, too slow, cut off, or no JSON.
pub async fn read_json(
    headers: &HeaderMap,
    body: Body,
    limits: &HttpLimits,
) -> Result<Value, ApiError> {
    let bytes = read(headers, body, limits).await?;
    serde_json::from_slice(&bytes).map_err(|error| {
        ApiError::new(
            ErrorKind::BadRequest,
            format!("the body is not valid JSON: {error}"),
        )
    })
}

async fn read(headers: &HeaderMap, body: Body, limits: &HttpLimits) -> Result<Vec<u8>, ApiError> {
    let limit = limits.max_body_bytes;
    let mut body = body.into_data_stream();
    let declared = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok());
    let declared = declared.map_or(Some(0), |text| text.parse::<usize>().ok());
    if declared.is_none_or(|bytes| bytes > limit) {
        // A client that asks before it sends is told no, and sends nothing.
        if !headers.contains_key(header::EXPECT) {
            discard(body, limit).await;
        }
        return Err(too_large(limit));
    }
    let timeout = Duration::from_secs(limits.read_timeout_s.into());
    let collected = tokio::time::timeout(timeout, collect(&mut body, limit)).await;
    match collected {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => {
            discard(body, limit).await;
            Err(too_large(limit))
        }
        Ok(Err(error)) => Err(ApiError::new(
            ErrorKind::BadRequest,
            format!("the body could not be read: {error}"),
        )),
        Err(_) => Err(ApiError::new(
            ErrorKind::BodyTimeout,
            format!("the body did not arrive within {} s", limits.read_timeout_s),
        )),
    }
}

/// The whole body, or none when it is over the limit.
async fn collect(body: &mut BodyDataStream, limit: usize) -> Result<Option<Vec<u8>>, axum::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk?;
        if bytes.len() + chunk.len() > limit {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Some(bytes))
}

/// Throws away what still comes, up to the limit once more.
async fn discard(mut body: BodyDataStream, limit: usize) {
    let all = async {
        let mut bytes = 0;
        while bytes <= limit {
            match body.next().await {
                Some(Ok(chunk)) => bytes += chunk.len(),
                Some(Err(_)) | None => break,
            }
        }
    };
    // Whether it ends or not: the answer is the same.
    drop(tokio::time::timeout(DISCARD, all).await);
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        ErrorKind::BodyTooLarge,
        format!("the body is over the limit of {limit} bytes; --max-body-mib raises it"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;

    fn limits() -> HttpLimits {
        HttpLimits {
            max_body_bytes: 8,
            read_timeout_s: 1,
            ..HttpLimits::default()
        }
    }

    /// A body that never comes.
    fn endless() -> Body {
        Body::from_stream(futures_util::stream::pending::<Result<Bytes, axum::Error>>())
    }

    async fn read_body(body: Body) -> Result<Value, ErrorKind> {
        read_json(&HeaderMap::new(), body, &limits())
            .await
            .map_err(|error| error.kind)
    }

    #[tokio::test]
    async fn a_body_at_the_limit_is_read_and_one_byte_more_is_not() {
        assert_eq!(read_body(Body::from("{\"a\":12}")).await.unwrap()["a"], 12);
        assert_eq!(
            read_body(Body::from("{\"a\":123}")).await,
            Err(ErrorKind::BodyTooLarge)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_declared_length_over_the_limit_is_refused_unread() {
        let mut headers = HeaderMap::new();
        for declared in ["9", "99999999999999999999"] {
            headers.insert(header::CONTENT_LENGTH, declared.parse().unwrap());
            let error = read_json(&headers, endless(), &limits()).await.unwrap_err();
            assert_eq!(error.kind, ErrorKind::BodyTooLarge);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_is_given_up() {
        assert_eq!(read_body(endless()).await, Err(ErrorKind::BodyTimeout));
    }

    #[tokio::test]
    async fn what_is_no_json_is_a_mistake_of_the_caller() {
        for bad in ["", "{", "nope", "[[[["] {
            assert_eq!(
                read_body(Body::from(bad)).await,
                Err(ErrorKind::BadRequest),
                "{bad}"
            );
        }
        assert_eq!(
            read_body(Body::from(vec![0xFF, 0xFE])).await,
            Err(ErrorKind::BadRequest)
        );
    }
}
