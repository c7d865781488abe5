//! Messages as events: `message_start`, blocks each with start, deltas and stop, `message_delta`,
//! `message_stop`.
//!
//! While a prompt is computed, Claude Code believes neither comments nor pings: only content keeps
//! it from giving up after 300 s. So after a quiet time a block is opened and empty deltas are
//! sent; both are legal, and the text stays what it is.

use std::time::Duration;

use serde_json::{Value, json};

use crate::anthropic::reply::{Message, call_block, error_json, signature, stop};
use crate::chat::stream::{Out, Signs, Voice};
use crate::http::api_error::ApiError;
use crate::http::sse;
use crate::openai::generation::{Generation, Part};
use crate::tools::call::Call;
use crate::tools::speech::Said;

/// The block that is open.
#[derive(Debug, PartialEq, Eq)]
enum Block {
    Text,
    /// With what was thought so far, to be signed.
    Thinking(String),
}

/// The voice of `/v1/messages`.
#[derive(Debug)]
pub struct Events {
    message: Message,
    is_open: bool,
    /// Index of the next block.
    next: usize,
    block: Option<Block>,
    calls: usize,
    /// Since the last event that counts as content.
    quiet: Duration,
}

impl Events {
    /// A voice for this message.
    pub fn new(message: Message) -> Events {
        Events {
            message,
            is_open: false,
            next: 0,
            block: None,
            calls: 0,
            quiet: Duration::ZERO,
        }
    }

    fn begin(&mut self, generation: &Generation, out: &mut Out) {
        if std::mem::replace(&mut self.is_open, true) {
            return;
        }
        let usage = self.message.usage(generation);
        let message = self
            .message
            .json(Vec::new(), (Value::Null, Value::Null), usage);
        send("message_start", json!({"message": message}), out);
        send("ping", json!({}), out);
    }

    fn said(&mut self, said: Said, generation: &Generation, out: &mut Out) {
        self.quiet = Duration::ZERO;
        match said {
            Said::Text(text) => {
                if self.block != Some(Block::Text) {
                    self.open(Block::Text, out);
                }
                self.delta(json!({"type": "text_delta", "text": text}), out);
            }
            Said::Thought(text) => {
                if !matches!(self.block, Some(Block::Thinking(_))) {
                    self.open(Block::Thinking(String::new()), out);
                }
                if let Some(Block::Thinking(thoughts)) = &mut self.block {
                    thoughts.push_str(&text);
                }
                self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Said::Call(call) => self.call(&call, generation, out),
        }
    }

    fn open(&mut self, block: Block, out: &mut Out) {
        self.close(out);
        let empty = match block {
            Block::Text => json!({"type": "text", "text": ""}),
            Block::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
        };
        let start = json!({"index": self.next, "content_block": empty});
        send("content_block_start", start, out);
        self.block = Some(block);
    }

    fn delta(&self, delta: Value, out: &mut Out) {
        let event = json!({"index": self.next, "delta": delta});
        send("content_block_delta", event, out);
    }

    fn close(&mut self, out: &mut Out) {
        let Some(block) = self.block.take() else {
            return;
        };
        if let Block::Thinking(thoughts) = block {
            let signature = signature(&thoughts);
            self.delta(
                json!({"type": "signature_delta", "signature": signature}),
                out,
            );
        }
        send("content_block_stop", json!({"index": self.next}), out);
        self.next += 1;
    }

    fn call(&mut self, call: &Call, generation: &Generation, out: &mut Out) {
        self.close(out);
        let mut block = call_block(&generation.call_id(0, self.calls), call);
        block["input"] = json!({});
        self.calls += 1;
        let start = json!({"index": self.next, "content_block": block});
        send("content_block_start", start, out);
        let input = call.arguments_text();
        self.delta(
            json!({"type": "input_json_delta", "partial_json": input}),
            out,
        );
        send("content_block_stop", json!({"index": self.next}), out);
        self.next += 1;
    }
}

impl Voice for Events {
    /// Nothing yet: the first event tells how much was cached, if that is known soon.
    fn open(&mut self, _: &Generation, _: &mut Out) {}

    fn part(&mut self, part: Part, generation: &Generation, out: &mut Out) {
        self.begin(generation, out);
        match part {
            Part::Started { .. } => {}
            Part::Said { said, .. } => self.said(said, generation, out),
            Part::End { finish, calls, .. } => {
                self.close(out);
                let (reason, sequence) = stop(&finish, calls);
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                let usage = self.message.usage(generation);
                let mut event = json!({"delta": delta, "usage": usage});
                if let Some(nvext) = self.message.wish.of_whole(&finish, generation) {
                    event["nvext"] = nvext;
                }
                send("message_delta", event, out);
            }
        }
    }

    fn patience(&self, signs: &Signs) -> Duration {
        if self.is_open {
            signs.every
        } else {
            signs.first
        }
    }

    fn idle(&mut self, quiet: Duration, signs: &Signs, generation: &Generation, out: &mut Out) {
        if !self.is_open {
            self.begin(generation, out);
            return;
        }
        self.quiet += quiet;
        if self.quiet < signs.content_every {
            send("ping", json!({}), out);
            return;
        }
        self.quiet = Duration::ZERO;
        if self.block.is_none() {
            self.open(Block::Text, out);
        }
        let empty = match &self.block {
            Some(Block::Thinking(_)) => json!({"type": "thinking_delta", "thinking": ""}),
            Some(Block::Text) | None => json!({"type": "text_delta", "text": ""}),
        };
        self.delta(empty, out);
    }

    fn done(&mut self, _: &Generation, out: &mut Out) {
        send("message_stop", json!({}), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        out.push_back(sse::named("error", &error_json(error)));
    }
}

/// Every event says its type in its data too, first.
fn send(kind: &'static str, fields: Value, out: &mut Out) {
    let mut event = json!({"type": kind});
    if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
        event.extend(fields);
    }
    out.push_back(sse::named(kind, &event));
}
