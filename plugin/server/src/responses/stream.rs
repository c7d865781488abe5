//! Responses as events, each with a growing `sequence_number`: created, items added and done with
//! their deltas between, completed with the whole object.
//!
//! While nothing is ready `response.in_progress` is repeated: Codex counts any `data:` event as
//! life and no comment.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::app::App;
use crate::chat::stream::{Out, Signs, Voice};
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::sse;
use crate::openai::generation::{Finish, Generation, Part};
use crate::responses::reply::{Frame, Kind, Output, Status, item, part, usage};
use crate::responses::routes::Ending;
use crate::tools::call::Call;
use crate::tools::speech::Said;

/// The voice of `/v1/responses`.
#[derive(Debug)]
pub struct Events {
    app: Arc<App>,
    ending: Ending,
    output: Output,
    finish: Finish,
    calls: usize,
    sequence: u64,
}

impl Events {
    /// A voice for one response.
    pub fn new(app: &Arc<App>, ending: Ending) -> Events {
        Events {
            app: Arc::clone(app),
            ending,
            output: Output::default(),
            finish: Finish::Length,
            calls: 0,
            sequence: 0,
        }
    }

    fn frame(&self) -> &Frame {
        &self.ending.frame
    }

    fn send(&mut self, kind: &'static str, fields: Value, out: &mut Out) {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        out.push_back(sse::named(kind, &event));
    }

    fn running(&self) -> Value {
        let response = self.frame().json(&Status::Running, &[], Value::Null);
        json!({"response": response})
    }

    fn said(&mut self, kind: Kind, text: &str, tokens: &[u32], out: &mut Out) {
        if self.output.kind() != Some(kind) {
            self.close(out);
            self.open(kind, out);
        }
        self.output.push(text, tokens);
        let mut delta = json!({
            "item_id": self.output.id(self.frame()), "output_index": self.output.index(),
            "content_index": 0, "delta": text,
        });
        match kind {
            Kind::Message => {
                delta["logprobs"] = json!([]);
                self.send("response.output_text.delta", delta, out);
            }
            Kind::Reasoning => self.send("response.reasoning_text.delta", delta, out),
        }
    }

    fn open(&mut self, kind: Kind, out: &mut Out) {
        self.output.open(kind);
        let (id, index) = (self.output.id(self.frame()), self.output.index());
        let item = item(kind, "", &id, false, "in_progress");
        let added = json!({"output_index": index, "item": item});
        self.send("response.output_item.added", added, out);
        let added = json!({"item_id": id, "output_index": index, "content_index": 0,
            "part": part(kind, "")});
        self.send("response.content_part.added", added, out);
    }

    fn close(&mut self, out: &mut Out) {
        let (id, index) = (self.output.id(self.frame()), self.output.index());
        let Some((kind, text)) = self.output.close(&self.ending.frame) else {
            return;
        };
        let done = json!({"item_id": id, "output_index": index, "content_index": 0,
            "text": text});
        match kind {
            Kind::Message => {
                let mut done = done;
                done["logprobs"] = json!([]);
                self.send("response.output_text.done", done, out);
            }
            Kind::Reasoning => self.send("response.reasoning_text.done", done, out),
        }
        let done = json!({"item_id": id, "output_index": index, "content_index": 0,
            "part": part(kind, &text)});
        self.send("response.content_part.done", done, out);
        self.item_done(index, out);
    }

    fn item_done(&mut self, index: usize, out: &mut Out) {
        let item = self.output.items.get(index).cloned().unwrap_or_default();
        let done = json!({"output_index": index, "item": item});
        self.send("response.output_item.done", done, out);
    }

    fn call(&mut self, call: &Call, generation: &Generation, out: &mut Out) {
        self.close(out);
        let index = self.output.index();
        let call_id = generation.call_id(0, self.calls);
        self.calls += 1;
        self.output.call(&self.ending.frame, &call_id, call);
        let whole = self.output.items.get(index).cloned().unwrap_or_default();
        let (id, arguments) = (whole["id"].clone(), whole["arguments"].clone());
        let mut begun = whole;
        begun["arguments"] = "".into();
        begun["status"] = "in_progress".into();
        let added = json!({"output_index": index, "item": begun});
        self.send("response.output_item.added", added, out);
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        self.send("response.function_call_arguments.delta", delta, out);
        let done = json!({"item_id": id, "output_index": index, "arguments": arguments});
        self.send("response.function_call_arguments.done", done, out);
        self.item_done(index, out);
    }
}

impl Voice for Events {
    fn open(&mut self, _: &Generation, out: &mut Out) {
        self.send("response.created", self.running(), out);
        self.send("response.in_progress", self.running(), out);
    }

    fn part(&mut self, part: Part, generation: &Generation, out: &mut Out) {
        match part {
            Part::Started { .. } => {}
            Part::Said { said, tokens, .. } => {
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                match said {
                    Said::Text(text) => self.said(Kind::Message, &text, &ids, out),
                    Said::Thought(text) => self.said(Kind::Reasoning, &text, &ids, out),
                    Said::Call(call) => self.call(&call, generation, out),
                }
            }
            Part::End { finish, .. } => {
                self.close(out);
                self.finish = finish;
            }
        }
    }

    fn idle(&mut self, _: Duration, _: &Signs, _: &Generation, out: &mut Out) {
        self.send("response.in_progress", self.running(), out);
    }

    fn done(&mut self, generation: &Generation, out: &mut Out) {
        let kind = match self.finish {
            Finish::Length | Finish::OutOfPages => "response.incomplete",
            Finish::StopToken(_) | Finish::StopString(_) => "response.completed",
        };
        let response = self
            .ending
            .finish(&self.app, &self.output, &self.finish, generation);
        self.send(kind, json!({"response": response}), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        let code = match error.kind {
            ErrorKind::ContextLength => "context_length_exceeded",
            ErrorKind::Overloaded | ErrorKind::QueueTimeout => "rate_limit_exceeded",
            ErrorKind::BadRequest | ErrorKind::Unsupported => "invalid_prompt",
            ErrorKind::NotFound
            | ErrorKind::MethodNotAllowed
            | ErrorKind::Unauthorized
            | ErrorKind::Forbidden
            | ErrorKind::BodyTimeout
            | ErrorKind::BodyTooLarge
            | ErrorKind::Conflict
            | ErrorKind::Draining
            | ErrorKind::Failed
            | ErrorKind::EngineDead => "server_error",
        };
        let status = Status::Failed(code, error.message.clone());
        let response = self.frame().json(&status, &self.output.items, Value::Null);
        self.send("response.failed", json!({"response": response}), out);
    }
}

/// The output of a whole response.
///
/// # Errors
/// What broke it.
pub async fn collect(
    generation: &mut Generation,
    frame: &Frame,
    mut ended: impl FnMut(&Generation),
) -> Result<(Output, Finish), ApiError> {
    let (mut output, mut end, mut calls) = (Output::default(), Finish::Length, 0);
    while let Some(part) = generation.next().await {
        match part? {
            Part::Started { .. } => {}
            Part::Said { said, tokens, .. } => {
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let (kind, text) = match said {
                    Said::Text(text) => (Kind::Message, text),
                    Said::Thought(text) => (Kind::Reasoning, text),
                    Said::Call(call) => {
                        output.close(frame);
                        let id = generation.call_id(0, calls);
                        calls += 1;
                        output.call(frame, &id, &call);
                        continue;
                    }
                };
                if output.kind() != Some(kind) {
                    output.close(frame);
                    output.open(kind);
                }
                output.push(&text, &ids);
            }
            Part::End { finish, .. } => {
                output.close(frame);
                end = finish;
                ended(generation);
            }
        }
    }
    Ok((output, end))
}

/// The usage object of a response with this output.
pub fn usage_of(generation: &Generation, output: &Output) -> Value {
    usage(generation, output.reasoning_tokens)
}
