//! Chat and text completions as events: one chunk a piece of text, `[DONE]` at the end.

use std::time::Duration;

use axum::body::Bytes;
use serde_json::Value;

use crate::chat::stream::{Out, Signs, Voice};
use crate::http::api_error::ApiError;
use crate::http::sse;
use crate::openai::generation::{Generation, Part};
use crate::openai::reply::{Ending, Piece, Reply};
use crate::openai::reply_nvext::NvextWish;
use crate::tools::speech::Said;

/// The voice of `/v1/chat/completions` and `/v1/completions`.
#[derive(Debug)]
pub struct Chunks {
    reply: Reply,
    wish: NvextWish,
    /// Text that stands before each answer (`echo`), by choice.
    echo: Vec<String>,
    /// Characters sent so far, by choice.
    sent: Vec<usize>,
    /// Calls sent so far, by choice.
    calls: Vec<usize>,
}

impl Chunks {
    /// A voice for this answer.
    pub fn new(reply: Reply, wish: NvextWish, echo: Vec<String>) -> Chunks {
        Chunks {
            reply,
            wish,
            echo,
            sent: Vec::new(),
            calls: Vec::new(),
        }
    }
}

impl Voice for Chunks {
    fn open(&mut self, generation: &Generation, out: &mut Out) {
        self.sent = vec![0; generation.len()];
        self.calls = vec![0; generation.len()];
        for choice in 0..generation.len() {
            if let Some(opening) = self.reply.opening(choice) {
                out.push_back(sse::event(&opening));
            }
            if let Some(echo) = self.echo.get(choice).filter(|echo| !echo.is_empty()) {
                out.push_back(sse::event(&self.reply.text(choice, echo, &[], 0)));
            }
        }
    }

    fn part(&mut self, part: Part, generation: &Generation, out: &mut Out) {
        match part {
            Part::Started { .. } => {}
            Part::Said {
                choice,
                said,
                tokens,
            } => {
                let (Some(sent), Some(calls)) =
                    (self.sent.get_mut(choice), self.calls.get_mut(choice))
                else {
                    return;
                };
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let replica = generation.usage(choice).replica;
                let mut chunk = match &said {
                    Said::Text(text) => {
                        let chunk = self.reply.text(choice, text, &tokens, *sent);
                        *sent += self.reply.characters(&tokens);
                        chunk
                    }
                    Said::Thought(text) => self.reply.piece(choice, Piece::Thought(text), &tokens),
                    Said::Call(call) => {
                        let id = format!("call_{}", generation.call_id(choice, *calls));
                        let piece = Piece::Call(*calls, &id, call);
                        *calls += 1;
                        self.reply.piece(choice, piece, &tokens)
                    }
                };
                add_nvext(&mut chunk, self.wish.of_text(&ids, replica));
                out.push_back(sse::event(&chunk));
            }
            Part::End {
                choice,
                finish,
                calls,
                tokens,
            } => {
                let Some(sent) = self.sent.get(choice) else {
                    return;
                };
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let ending = Ending {
                    finish: &finish,
                    calls,
                    tokens: &tokens,
                };
                let mut chunk = self.reply.ending(choice, &ending, *sent);
                let usage = generation.usage(choice);
                add_nvext(&mut chunk, self.wish.of_end(&finish, &ids, usage));
                out.push_back(sse::event(&chunk));
            }
        }
    }

    /// A comment: every client measured on these routes takes any byte for life.
    fn idle(&mut self, _: Duration, _: &Signs, _: &Generation, out: &mut Out) {
        out.push_back(Bytes::from_static(sse::KEEP_ALIVE.as_bytes()));
    }

    fn done(&mut self, generation: &Generation, out: &mut Out) {
        if self.reply.include_usage {
            let chunk = self.reply.usage_chunk(generation.totals());
            out.push_back(sse::event(&chunk));
        }
        out.push_back(Bytes::from_static(sse::DONE.as_bytes()));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        out.push_back(sse::event(&error.body()));
    }
}

fn add_nvext(chunk: &mut Value, nvext: Option<Value>) {
    if let Some(nvext) = nvext {
        chunk["nvext"] = nvext;
    }
}
