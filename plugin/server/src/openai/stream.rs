//! A [`Generation`] as server-sent events.
//!
//! One failure after the 200 becomes one error event; then the body ends and the connection is
//! closed. While nothing is ready, comments keep the connection alive.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use serde_json::Value;

use crate::http::api_error::ApiError;
use crate::http::listener::HangUp;
use crate::http::sse;
use crate::openai::generation::{Generation, Part};
use crate::openai::reply::Reply;
use crate::openai::reply_nvext::NvextWish;
use crate::openai::turn::Turn;

const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);

/// What a stream needs beside the generation.
#[derive(Debug)]
pub struct StreamParts {
    /// The pieces that all chunks repeat.
    pub reply: Reply,
    /// What the caller wants to see under `nvext`.
    pub wish: NvextWish,
    /// Where to remember the answers.
    pub turn: Turn,
    /// Text that stands before each answer (`echo`), by choice.
    pub echo: Vec<String>,
    /// Closes the connection after an error event.
    pub hang_up: Option<HangUp>,
}

/// The response of a stream; the first events are sent before the first token is there.
pub fn response(generation: Generation, parts: StreamParts) -> Response<Body> {
    let events = Events::new(generation, parts);
    let bytes = futures_util::stream::unfold(events, |mut events| async move {
        let bytes = events.next().await?;
        Some((Ok::<Bytes, Infallible>(bytes), events))
    });
    let mut response = Response::new(Body::from_stream(bytes));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Events {
    // None once the last event is queued: the engine's side is closed before the client's.
    generation: Option<Generation>,
    parts: StreamParts,
    queue: VecDeque<Bytes>,
    /// Characters sent so far, by choice.
    sent: Vec<usize>,
}

impl Events {
    fn new(generation: Generation, parts: StreamParts) -> Events {
        let mut queue = VecDeque::new();
        for choice in 0..generation.len() {
            if let Some(opening) = parts.reply.opening(choice) {
                queue.push_back(sse::event(&opening));
            }
            if let Some(echo) = parts.echo.get(choice).filter(|echo| !echo.is_empty()) {
                queue.push_back(sse::event(&parts.reply.text(choice, echo, &[], 0)));
            }
        }
        let sent = vec![0; generation.len()];
        Events {
            generation: Some(generation),
            parts,
            queue,
            sent,
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.queue.pop_front() {
                return Some(bytes);
            }
            let generation = self.generation.as_mut()?;
            match tokio::time::timeout(KEEP_ALIVE_EVERY, generation.next()).await {
                Err(_) => return Some(Bytes::from_static(sse::KEEP_ALIVE.as_bytes())),
                Ok(Some(Ok(part))) => self.part(part),
                Ok(Some(Err(error))) => self.fail(&error),
                Ok(None) => self.done(),
            }
        }
    }

    fn part(&mut self, part: Part) {
        let Some(generation) = &self.generation else {
            return;
        };
        let StreamParts { reply, wish, .. } = &self.parts;
        match part {
            Part::Started { .. } => {}
            Part::Text {
                choice,
                text,
                tokens,
            } => {
                let Some(sent) = self.sent.get_mut(choice) else {
                    return;
                };
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let mut chunk = reply.text(choice, &text, &tokens, *sent);
                *sent += text.chars().count();
                add_nvext(&mut chunk, wish.of_text(&ids));
                self.queue.push_back(sse::event(&chunk));
            }
            Part::End {
                choice,
                finish,
                tokens,
            } => {
                let Some(sent) = self.sent.get(choice) else {
                    return;
                };
                let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
                let mut chunk = reply.ending(choice, &finish, &tokens, *sent);
                add_nvext(
                    &mut chunk,
                    wish.of_end(&finish, &ids, generation.usage(choice)),
                );
                self.queue.push_back(sse::event(&chunk));
                self.parts.turn.remember(choice, generation.ids(choice));
            }
        }
    }

    fn done(&mut self) {
        let Some(generation) = self.generation.take() else {
            return;
        };
        if self.parts.reply.include_usage {
            let chunk = self.parts.reply.usage_chunk(generation.totals());
            self.queue.push_back(sse::event(&chunk));
        }
        self.queue
            .push_back(Bytes::from_static(sse::DONE.as_bytes()));
    }

    fn fail(&mut self, error: &ApiError) {
        self.generation = None;
        self.queue.push_back(sse::event(&error.body()));
        if let Some(hang_up) = &self.parts.hang_up {
            hang_up.after_this_answer();
        }
    }
}

fn add_nvext(chunk: &mut Value, nvext: Option<Value>) {
    if let Some(nvext) = nvext {
        chunk["nvext"] = nvext;
    }
}
