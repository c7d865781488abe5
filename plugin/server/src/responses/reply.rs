//! The JSON of responses: the object, its output items, and the item that is being said.

use rootstock::radix::Token;
use serde_json::{Map, Value, json};

use crate::chat::message::Draft;
use crate::openai::generation::{Finish, Generation};
use crate::responses::input::HANDLE;
use crate::responses::request::Names;
use crate::tools::call::Call;

/// What all states of one response repeat.
#[derive(Clone, Debug)]
pub struct Frame {
    /// `resp_...`.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name as the caller wrote it.
    pub model: String,
    /// The request's own fields, given back.
    pub echo: Map<String, Value>,
    /// Names of tools in namespaces.
    pub names: Names,
    /// Whether reasoning comes with a handle (`include: ["reasoning.encrypted_content"]`).
    pub with_handle: bool,
}

/// How far a response is.
#[derive(Clone, Debug)]
pub enum Status {
    /// It is being generated.
    Running,
    /// It has ended.
    Ended(Finish),
    /// It failed: code and message.
    Failed(&'static str, String),
}

/// Fields that are given back as they came, with what they are when absent.
fn echoed() -> Map<String, Value> {
    let defaults = json!({
        "instructions": null, "max_output_tokens": null, "metadata": {},
        "parallel_tool_calls": true, "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null}, "store": true, "temperature": 1.0,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0,
        "truncation": "disabled", "user": null, "prompt_cache_key": null,
        "prompt_cache_retention": null, "service_tier": "default", "background": false,
    });
    defaults.as_object().cloned().unwrap_or_default()
}

impl Frame {
    /// The fields that a request gets back.
    pub fn echo_of(body: &Value) -> Map<String, Value> {
        let mut echo = echoed();
        for (key, value) in &mut echo {
            if let Some(sent) = body.get(key).filter(|sent| !sent.is_null()) {
                *value = sent.clone();
            }
        }
        echo
    }

    /// The response object.
    pub fn json(&self, status: &Status, output: &[Value], usage: Value) -> Value {
        let (name, error, incomplete) = match status {
            Status::Running => ("in_progress", Value::Null, Value::Null),
            Status::Ended(Finish::Length | Finish::OutOfPages) => (
                "incomplete",
                Value::Null,
                json!({"reason": "max_output_tokens"}),
            ),
            Status::Ended(_) => ("completed", Value::Null, Value::Null),
            Status::Failed(code, message) => (
                "failed",
                json!({"code": code, "message": message}),
                Value::Null,
            ),
        };
        let mut object = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": name,
            "error": error, "incomplete_details": incomplete, "model": self.model,
            "output": output, "usage": usage,
        });
        if let Some(object) = object.as_object_mut() {
            object.extend(self.echo.clone());
        }
        object
    }
}

/// The usage of a response.
pub fn usage(generation: &Generation, reasoning_tokens: u32) -> Value {
    let totals = generation.totals();
    json!({
        "input_tokens": totals.prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.cached_tokens},
        "output_tokens": totals.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
    })
}

/// The kinds of items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    Message,
    /// Thoughts.
    Reasoning,
}

/// The items of an answer as it grows.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Items that are complete.
    pub items: Vec<Value>,
    /// Tokens of thoughts.
    pub reasoning_tokens: u32,
    open: Option<(Kind, String)>,
    text: String,
    thoughts: String,
    calls: Vec<(String, Call)>,
}

impl Output {
    /// Index of the item that is open or comes next.
    pub fn index(&self) -> usize {
        self.items.len()
    }

    /// The kind of the open item.
    pub fn kind(&self) -> Option<Kind> {
        self.open.as_ref().map(|(kind, _)| *kind)
    }

    /// Begins an item; the one before has to be closed.
    pub fn open(&mut self, kind: Kind) {
        self.open = Some((kind, String::new()));
    }

    /// Adds to the open item.
    pub fn push(&mut self, text: &str, tokens: &[Token]) {
        let Some((kind, all)) = &mut self.open else {
            return;
        };
        all.push_str(text);
        match kind {
            Kind::Message => self.text.push_str(text),
            Kind::Reasoning => {
                self.thoughts.push_str(text);
                self.reasoning_tokens += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            }
        }
    }

    /// Ends the open item: its kind and its text.
    pub fn close(&mut self, frame: &Frame) -> Option<(Kind, String)> {
        let (kind, text) = self.open.take()?;
        let item = item(kind, &text, &self.id(frame), frame.with_handle, "completed");
        self.items.push(item);
        Some((kind, text))
    }

    /// Adds a whole call.
    pub fn call(&mut self, frame: &Frame, call_id: &str, call: &Call) {
        let (bare, namespace) = frame.names.bare(&call.name);
        let mut item = json!({
            "type": "function_call", "id": self.id(frame).replacen("msg_", "fc_", 1),
            "call_id": format!("call_{call_id}"), "name": bare,
            "arguments": call.arguments_text(), "status": "completed",
        });
        if let Some(namespace) = namespace {
            item["namespace"] = namespace.into();
        }
        self.items.push(item);
        self.calls.push((format!("call_{call_id}"), call.clone()));
    }

    /// The id of the item that is open or comes next.
    pub fn id(&self, frame: &Frame) -> String {
        let response = frame.id.trim_start_matches("resp_");
        let prefix = match self.kind() {
            Some(Kind::Reasoning) => "rs",
            Some(Kind::Message) | None => "msg",
        };
        format!("{prefix}_{response}{:02x}", self.items.len())
    }

    /// The answer as a message of the conversation.
    pub fn message(&self) -> Value {
        let mut message = Draft::new("assistant");
        message.say(&self.text);
        message.think(&self.thoughts);
        for (id, call) in &self.calls {
            message.call(id, &call.name, Value::Object(call.arguments.clone()));
        }
        message.take()
    }
}

/// A message or reasoning item.
pub fn item(kind: Kind, text: &str, id: &str, with_handle: bool, status: &str) -> Value {
    let is_empty = status == "in_progress";
    match kind {
        Kind::Message => {
            let content = if is_empty {
                json!([])
            } else {
                json!([part(kind, text)])
            };
            json!({"type": "message", "id": id, "status": status, "role": "assistant",
                "content": content})
        }
        Kind::Reasoning => {
            let content = if is_empty {
                json!([])
            } else {
                json!([part(kind, text)])
            };
            let handle = (with_handle && !is_empty).then(|| format!("{HANDLE}{text}"));
            json!({"type": "reasoning", "id": id, "summary": [], "content": content,
                "encrypted_content": handle, "status": status})
        }
    }
}

/// The content part of an item.
pub fn part(kind: Kind, text: &str) -> Value {
    match kind {
        Kind::Message => {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        }
        Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
    }
}
