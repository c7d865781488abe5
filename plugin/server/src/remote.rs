//! A server, this one or another on the network, as a program asks it: JSON answers and streams of
//! events, over plain HTTP, a connection a call.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use clap::Args;
use futures_util::StreamExt;
use hyper::client::conn::http1;
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// Longest wait for the next piece of an answer.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Where a server is, and who asks.
#[derive(Clone, Debug, Args)]
pub struct Address {
    /// The server
    #[arg(long, env = "ROOTSTOCK_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// The API key, where the server has keys
    #[arg(long, env = "ROOTSTOCK_KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// Whose content: the salt of requests, as header x-tenant-id
    #[arg(long, env = "ROOTSTOCK_SALT", value_name = "SALT")]
    pub salt: Option<String>,
}

/// A server that can be asked.
#[derive(Clone, Debug)]
pub struct Remote {
    host: String,
    port: u16,
    prefix: String,
    key: Option<String>,
    salt: Option<String>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The address.
    #[error("--url is {url:?}; http://HOST:PORT is wanted")]
    Url {
        /// What was given.
        url: String,
    },
    /// Nobody answers there.
    #[error("no server answers at {host}:{port}: {source}")]
    Connect {
        /// Where.
        host: String,
        /// Where.
        port: u16,
        /// Why.
        source: std::io::Error,
    },
    /// The connection broke.
    #[error("the connection to the server broke: {0}")]
    Http(#[from] hyper::Error),
    /// An answer broke.
    #[error("the answer broke off: {0}")]
    Body(#[from] axum::Error),
    /// A header that is none, for instance a key with a line break.
    #[error("the request cannot be written: {0}")]
    Request(#[from] hyper::http::Error),
    /// The server said no.
    #[error("the server answered {status}: {message}")]
    Refused {
        /// The status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// The server sent something that is not JSON.
    #[error("the server's answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Nothing came.
    #[error("nothing came from the server for {} s", PATIENCE.as_secs())]
    Silent,
    /// Too much came.
    #[error("the server's answer has more than {ANSWER_BYTES_MAX} bytes")]
    Long,
}

impl Remote {
    /// A server at an address; nothing is asked yet.
    ///
    /// # Errors
    /// It is not plain HTTP.
    pub fn new(address: &Address) -> Result<Remote, RemoteError> {
        let wrong = || RemoteError::Url {
            url: address.url.clone(),
        };
        let uri: Uri = address.url.parse().map_err(|_| wrong())?;
        let host = uri.host().filter(|host| !host.is_empty());
        if uri.scheme_str() != Some("http") {
            return Err(wrong());
        }
        let prefix = uri.path().trim_end_matches('/').trim_end_matches("/v1");
        Ok(Remote {
            host: host.ok_or_else(wrong)?.trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(80),
            prefix: prefix.to_owned(),
            key: address.key.clone(),
            salt: address.salt.clone(),
        })
    }

    /// Where it is, for people.
    pub fn name(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Gets JSON.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn get(&self, path: &str) -> Result<Value, RemoteError> {
        self.whole(self.send("GET", path, None).await?).await
    }

    /// Posts JSON and gets JSON.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        self.whole(self.send("POST", path, Some(body)).await?).await
    }

    /// Posts JSON and hands out the events of the stream that comes back, one by one.
    ///
    /// # Errors
    /// Why it did not come to its end.
    pub async fn stream(
        &self,
        path: &str,
        body: &Value,
        mut take: impl FnMut(&Value) -> std::io::Result<()>,
    ) -> Result<(), RemoteError> {
        let mut pieces = self.send("POST", path, Some(body)).await?;
        let mut lines = Vec::new();
        while let Some(piece) = next(&mut pieces).await? {
            lines.extend_from_slice(&piece);
            while let Some(end) = lines.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = lines.drain(..=end).collect();
                let Some(data) = line.trim_ascii().strip_prefix(b"data:") else {
                    continue;
                };
                let data = data.trim_ascii();
                if data == b"[DONE]" {
                    return Ok(());
                }
                let event: Value = serde_json::from_slice(data)?;
                if let Some(error) = event.get("error") {
                    return Err(RemoteError::Refused {
                        status: 200,
                        message: message(error),
                    });
                }
                take(&event).map_err(axum::Error::new)?;
            }
            if lines.len() > ANSWER_BYTES_MAX {
                return Err(RemoteError::Long);
            }
        }
        Ok(())
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<BodyDataStream, RemoteError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(|source| RemoteError::Connect {
            host: self.host.clone(),
            port: self.port,
            source,
        })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the body; an error of it is one of the body too.
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header("host", self.name())
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        if let Some(salt) = &self.salt {
            request = request.header("x-tenant-id", salt);
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let response = sender.send_request(request.body(body)?).await?;
        let status = response.status();
        let pieces = Body::new(response.into_body()).into_data_stream();
        if status.is_success() {
            return Ok(pieces);
        }
        Err(refused(status, pieces).await)
    }

    async fn whole(&self, mut pieces: BodyDataStream) -> Result<Value, RemoteError> {
        Ok(serde_json::from_slice(&all(&mut pieces).await?)?)
    }
}

async fn next(pieces: &mut BodyDataStream) -> Result<Option<axum::body::Bytes>, RemoteError> {
    let piece = tokio::time::timeout(PATIENCE, pieces.next()).await;
    Ok(piece.map_err(|_| RemoteError::Silent)?.transpose()?)
}

async fn all(pieces: &mut BodyDataStream) -> Result<Vec<u8>, RemoteError> {
    let mut bytes = Vec::new();
    while let Some(piece) = next(pieces).await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(RemoteError::Long);
        }
    }
    Ok(bytes)
}

async fn refused(status: StatusCode, mut pieces: BodyDataStream) -> RemoteError {
    let text = all(&mut pieces).await.unwrap_or_default();
    let told: Value = serde_json::from_slice(&text).unwrap_or_default();
    RemoteError::Refused {
        status: status.as_u16(),
        message: message(&told["error"]),
    }
}

fn message(error: &Value) -> String {
    let text = error["message"].as_str();
    text.unwrap_or("it gave no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_with_and_without_its_version_and_what_is_no_http_is_refused() {
        let read = |url: &str| {
            let address = Address {
                url: url.to_owned(),
                key: None,
                salt: None,
            };
            Remote::new(&address)
        };
        let found = read("http://box:9/v1").unwrap();
        assert_eq!(
            (found.name().as_str(), found.prefix.as_str()),
            ("box:9", "")
        );
        let behind = read("http://[::1]:8/behind/v1/").unwrap();
        assert_eq!((behind.host.as_str(), behind.port), ("::1", 8));
        assert_eq!(behind.prefix, "/behind");
        assert_eq!(read("http://box").unwrap().port, 80);
        for wrong in ["box:8000", "https://box", "", "http://"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("http://HOST:PORT is wanted"), "{error}");
        }
    }
}
