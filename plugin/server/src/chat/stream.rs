//! A [`Generation`] as server-sent events, in the voice of one API.
//!
//! One failure after the 200 becomes one error event; then the body ends and the connection is
//! closed. While nothing is ready, each voice gives the sign of life that its clients accept.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};

use crate::http::api_error::ApiError;
use crate::http::listener::HangUp;
use crate::openai::generation::{Generation, Part};
use crate::openai::turn::Turn;

/// Events on their way to the client.
pub type Out = VecDeque<Bytes>;

/// How often a stream in which nothing happens shows that it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signs {
    /// Until the first event of a stream whose prompt has not begun to be computed.
    pub first: Duration,
    /// Between two signs.
    pub every: Duration,
    /// Between two signs that count as content, for clients that believe nothing else.
    pub content_every: Duration,
}

impl Default for Signs {
    /// The strictest client measured cuts after 300 s without content.
    fn default() -> Signs {
        Signs {
            first: Duration::from_secs(1),
            every: Duration::from_secs(10),
            content_every: Duration::from_secs(50),
        }
    }
}

/// How one API tells what happens.
pub trait Voice: Send + 'static {
    /// The first events, before anything has happened.
    fn open(&mut self, generation: &Generation, out: &mut Out);

    /// What to do with a part of the answer.
    fn part(&mut self, part: Part, generation: &Generation, out: &mut Out);

    /// How long to wait for the next part before a sign of life.
    fn patience(&self, signs: &Signs) -> Duration {
        signs.every
    }

    /// A sign of life; the wait was `quiet` long.
    fn idle(&mut self, quiet: Duration, signs: &Signs, generation: &Generation, out: &mut Out);

    /// The end, after all parts.
    fn done(&mut self, generation: &Generation, out: &mut Out);

    /// The error event.
    fn fail(&mut self, error: &ApiError, out: &mut Out);
}

/// What a stream needs beside the generation and its voice.
#[derive(Debug)]
pub struct StreamParts {
    /// Where to remember the answers.
    pub turn: Turn,
    /// Closes the connection after an error event.
    pub hang_up: Option<HangUp>,
    /// How often to show life.
    pub signs: Signs,
}

/// The response of a stream.
pub fn response(generation: Generation, voice: impl Voice, parts: StreamParts) -> Response<Body> {
    let events = Events::new(generation, voice, parts);
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

struct Events<V> {
    // None once the last event is queued: the engine's side is closed before the client's.
    generation: Option<Generation>,
    voice: V,
    parts: StreamParts,
    queue: Out,
}

impl<V: Voice> Events<V> {
    fn new(generation: Generation, mut voice: V, parts: StreamParts) -> Events<V> {
        let mut queue = Out::new();
        voice.open(&generation, &mut queue);
        Events {
            generation: Some(generation),
            voice,
            parts,
            queue,
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.queue.pop_front() {
                return Some(bytes);
            }
            let generation = self.generation.as_mut()?;
            let patience = self.voice.patience(&self.parts.signs);
            match tokio::time::timeout(patience, generation.next()).await {
                Err(_) => {
                    let signs = &self.parts.signs;
                    self.voice
                        .idle(patience, signs, generation, &mut self.queue);
                }
                Ok(Some(Ok(part))) => {
                    if let Part::End { choice, .. } = &part {
                        self.parts.turn.remember(*choice, generation.ids(*choice));
                    }
                    self.voice.part(part, generation, &mut self.queue);
                }
                Ok(Some(Err(error))) => {
                    self.generation = None;
                    self.voice.fail(&error, &mut self.queue);
                    if let Some(hang_up) = &self.parts.hang_up {
                        hang_up.after_this_answer();
                    }
                }
                Ok(None) => {
                    self.voice.done(generation, &mut self.queue);
                    self.generation = None;
                }
            }
        }
    }
}
