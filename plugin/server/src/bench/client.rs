//! One streamed chat completion over HTTP/1.1, with the times that matter. A connection of its own
//! for each call: servers are measured with what it costs them.

use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt;
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::BenchError;

/// Longest wait for the next piece of an answer.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of an error answer that are kept.
const ERROR_BYTES_MAX: usize = 300;

/// A server.
#[derive(Clone, Debug)]
pub(super) struct Target {
    host: String,
    port: u16,
    path: String,
    key: Option<String>,
}

/// An answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Reply {
    /// Its text.
    pub(super) text: String,
    /// Seconds to the first piece of it.
    pub(super) ttft_s: f64,
    /// Seconds to its end.
    pub(super) total_s: f64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) output_tokens: u64,
}

impl Target {
    /// Reads an address.
    ///
    /// # Errors
    /// It is not plain HTTP.
    pub(super) fn new(url: &str, key: Option<&str>) -> Result<Target, BenchError> {
        let wrong = || BenchError::Url {
            url: url.to_owned(),
        };
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let bracket = authority.rfind(']').map_or(0, |at| at + 1);
        let (host, port) = match authority.get(bracket..).and_then(|rest| rest.rfind(':')) {
            Some(at) => {
                let (host, port) = authority.split_at(bracket + at);
                (host, port[1..].parse().map_err(|_| wrong())?)
            }
            None => (authority, 80),
        };
        if host.is_empty() {
            return Err(wrong());
        }
        let path = path.trim_end_matches('/').trim_end_matches("v1");
        let path = path.trim_end_matches('/');
        Ok(Target {
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
            path: match path {
                "" => String::new(),
                path => format!("/{path}"),
            },
            key: key.map(str::to_owned),
        })
    }

    /// Asks for a streamed chat completion and reads it to its end.
    ///
    /// # Errors
    /// Why there is no whole answer.
    pub(super) async fn ask(&self, body: &Value) -> Result<Reply, String> {
        let begin = crate::clock::now();
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| format!("cannot connect to {}:{}: {error}", self.host, self.port))?;
        stream
            .set_nodelay(true)
            .map_err(|error| error.to_string())?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        let driver = tokio::spawn(connection);
        let mut request = Request::post(format!("{}/v1/chat/completions", self.path))
            .header("host", format!("{}:{}", self.host, self.port))
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request
            .body(Body::from(body.to_string()))
            .map_err(|error| error.to_string())?;
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        let status = response.status();
        let mut pieces = Body::new(response.into_body()).into_data_stream();
        let mut events = Events::default();
        let mut reply = Reply::default();
        let since = || crate::clock::now().duration_since(begin).as_secs_f64();
        loop {
            let piece = tokio::time::timeout(PATIENCE, pieces.next())
                .await
                .map_err(|_| format!("nothing came for {} s", PATIENCE.as_secs()))?;
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|error| error.to_string())?;
            events.bytes.extend_from_slice(&piece);
            if !status.is_success() {
                continue;
            }
            while let Some(event) = events.next() {
                reply.take(&event, since())?;
            }
        }
        driver.abort();
        if !status.is_success() {
            let text = String::from_utf8_lossy(&events.bytes);
            let text: String = text.chars().take(ERROR_BYTES_MAX).collect();
            return Err(format!("{status}: {text}"));
        }
        reply.total_s = since();
        if reply.ttft_s == 0.0 {
            return Err("the stream ended without a token".to_owned());
        }
        Ok(reply)
    }
}

impl Reply {
    fn take(&mut self, event: &Value, at_s: f64) -> Result<(), String> {
        if let Some(error) = event.get("error") {
            return Err(error.to_string());
        }
        let delta = &event["choices"][0]["delta"];
        let text = |key: &str| delta[key].as_str().unwrap_or_default();
        let says = ["content", "reasoning_content", "reasoning"]
            .into_iter()
            .any(|key| !text(key).is_empty())
            || delta["tool_calls"].is_array();
        if says && self.ttft_s == 0.0 {
            self.ttft_s = at_s;
        }
        self.text.push_str(text("content"));
        if says && event["usage"].is_null() {
            // Servers that tell no usage send a token an event.
            self.output_tokens += 1;
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            let number = |path: &str| usage.pointer(path).and_then(Value::as_u64);
            self.prompt_tokens = number("/prompt_tokens").unwrap_or(0);
            self.output_tokens = number("/completion_tokens").unwrap_or(self.output_tokens);
            self.cached_tokens = number("/prompt_tokens_details/cached_tokens").unwrap_or(0);
        }
        Ok(())
    }
}

/// Server-sent events out of bytes.
#[derive(Debug, Default)]
struct Events {
    bytes: Vec<u8>,
}

impl Events {
    /// The next line of data that is JSON; what is not is left out.
    fn next(&mut self) -> Option<Value> {
        loop {
            let end = self.bytes.iter().position(|byte| *byte == b'\n')?;
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            let Some(data) = line.strip_prefix(b"data:") else {
                continue;
            };
            if let Ok(value) = serde_json::from_slice(data) {
                return Some(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn addresses_are_host_port_and_path() {
        let parts = |url: &str| {
            let target = Target::new(url, None).unwrap();
            (target.host, target.port, target.path)
        };
        let of = |host: &str, port, path: &str| (host.to_owned(), port, path.to_owned());
        assert_eq!(parts("http://127.0.0.1:8000"), of("127.0.0.1", 8000, ""));
        assert_eq!(parts("http://a.b/v1/"), of("a.b", 80, ""));
        assert_eq!(parts("http://[::1]:9/x/v1"), of("::1", 9, "/x"));
        for bad in ["https://a", "a:8000", "http://", "http://a:b"] {
            assert!(Target::new(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn events_are_read_however_they_are_cut() {
        let first = json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]});
        let second = json!({"choices": [{"delta": {"content": "hi"}}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4}}});
        let text = format!(
            ": sign of life\n\ndata: {first}\n\ndata:{second}\r\n\r\ndata: {usage}\n\n\
             data: [DONE]\n\n"
        );
        let (mut events, mut reply) = (Events::default(), Reply::default());
        for (at, byte) in text.bytes().enumerate() {
            events.bytes.push(byte);
            while let Some(event) = events.next() {
                reply.take(&event, at as f64).unwrap();
            }
        }
        assert_eq!(reply.text, "hi");
        assert_eq!(
            [
                reply.prompt_tokens,
                reply.cached_tokens,
                reply.output_tokens
            ],
            [7, 4, 3]
        );
        let end_of_second = text.find("\r\n").unwrap() + 1;
        assert_eq!(
            reply.ttft_s, end_of_second as f64,
            "empty pieces do not count"
        );
    }
}
