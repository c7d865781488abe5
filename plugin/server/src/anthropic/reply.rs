//! The JSON of Anthropic's answers and errors. Pure functions of what was asked and what came out.

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use rootstock::radix::Ttl;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::anthropic::cache::CacheUsage;
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::openai::generation::{Finish, Generation};
use crate::openai::reply_nvext::NvextWish;
use crate::tools::call::Call;
use crate::tools::speech::Said;

/// What all pieces of one answer repeat.
#[derive(Clone, Debug)]
pub struct Message {
    /// `msg_...`.
    pub id: String,
    /// The model's name as the caller wrote it.
    pub model: String,
    /// The request's breakpoints: tokens before each, and its lifetime.
    pub breakpoints: Vec<(u32, Ttl)>,
    /// What of `nvext` was asked for.
    pub wish: NvextWish,
}

impl Message {
    /// The usage so far.
    pub fn usage(&self, generation: &Generation) -> Value {
        let usage = generation.usage(0);
        CacheUsage::of(usage.prompt_tokens, usage.cached.total(), &self.breakpoints)
            .json(usage.completion_tokens)
    }

    /// The message, whole or at its beginning.
    pub fn json(&self, content: Vec<Value>, stop: (Value, Value), usage: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": stop.0, "stop_sequence": stop.1, "usage": usage,
        })
    }
}

/// `stop_reason` and `stop_sequence`.
pub fn stop(finish: &Finish, calls: usize) -> (Value, Value) {
    match finish {
        Finish::StopToken(_) if calls > 0 => (json!("tool_use"), Value::Null),
        Finish::StopToken(_) => (json!("end_turn"), Value::Null),
        Finish::StopString(text) => (json!("stop_sequence"), json!(text)),
        Finish::Length | Finish::OutOfPages => (json!("max_tokens"), Value::Null),
    }
}

/// The content blocks of a whole answer.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    blocks: Vec<Value>,
    calls: usize,
}

impl Blocks {
    /// Takes what was said; pieces of one kind are one block.
    pub fn push(&mut self, said: Said, generation: &Generation) {
        match said {
            Said::Text(text) => self.extend("text", "text", &text),
            Said::Thought(text) => self.extend("thinking", "thinking", &text),
            Said::Call(call) => {
                let id = generation.call_id(0, self.calls);
                self.calls += 1;
                self.blocks.push(call_block(&id, &call));
            }
        }
    }

    fn extend(&mut self, kind: &str, key: &str, text: &str) {
        if let Some(last) = self.blocks.last_mut().filter(|last| last["type"] == kind) {
            let all = format!("{}{text}", last[key].as_str().unwrap_or_default());
            last[key] = all.into();
        } else {
            self.blocks.push(json!({"type": kind, key: text}));
        }
    }

    /// The blocks, thoughts signed.
    pub fn into_json(mut self) -> Vec<Value> {
        for block in &mut self.blocks {
            if let Some(thinking) = block.get("thinking").and_then(Value::as_str) {
                block["signature"] = signature(thinking).into();
            }
        }
        self.blocks
    }
}

/// A whole call.
pub fn call_block(id: &str, call: &Call) -> Value {
    json!({"type": "tool_use", "id": format!("toolu_{id}"), "name": call.name,
        "input": call.arguments})
}

/// What clients have to give back with thoughts. Nothing is proven by it here.
pub fn signature(thinking: &str) -> String {
    let digest = Sha256::digest(thinking.as_bytes());
    let hex = digest.iter().take(16).map(|byte| format!("{byte:02x}"));
    format!("rootstock-{}", hex.collect::<String>())
}

/// The error object.
pub fn error_json(error: &ApiError) -> Value {
    let class = match error.kind {
        ErrorKind::BadRequest | ErrorKind::ContextLength | ErrorKind::Unsupported => {
            "invalid_request_error"
        }
        ErrorKind::MethodNotAllowed | ErrorKind::Conflict => "invalid_request_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::Unauthorized => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::BodyTimeout => "timeout_error",
        ErrorKind::BodyTooLarge => "request_too_large",
        ErrorKind::Overloaded => "rate_limit_error",
        ErrorKind::Draining | ErrorKind::EngineDead | ErrorKind::QueueTimeout => "overloaded_error",
        ErrorKind::Failed => "api_error",
    };
    let is_long = error.kind == ErrorKind::ContextLength;
    let message = if is_long && !error.message.starts_with("prompt is too long") {
        format!("prompt is too long: {}", error.message)
    } else {
        error.message.clone()
    };
    json!({"type": "error", "error": {"type": class, "message": message}})
}

/// The whole HTTP answer of an error.
pub fn error_response(error: &ApiError) -> Response<Body> {
    let (status, _, _) = error.kind.row();
    let mut response = json_response(status, &error_json(error));
    if let Some(seconds) = error.retry_after_s {
        let seconds = HeaderValue::from(seconds);
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_is_too_long_says_so_in_the_words_that_agents_know() {
        let error = ApiError::new(ErrorKind::ContextLength, "5 pages do not fit into 4");
        let json = error_json(&error);
        assert_eq!(json["error"]["type"], "invalid_request_error");
        let message = json["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with("prompt is too long: 5 pages"),
            "{message}"
        );
    }

    #[test]
    fn the_reasons_of_an_end_are_anthropics() {
        let name = |finish: Finish, calls| stop(&finish, calls).0;
        assert_eq!(name(Finish::StopToken(None), 0), "end_turn");
        assert_eq!(name(Finish::StopToken(None), 2), "tool_use");
        assert_eq!(name(Finish::Length, 1), "max_tokens");
        assert_eq!(
            stop(&Finish::StopString("x".into()), 0),
            (json!("stop_sequence"), json!("x"))
        );
    }
}
