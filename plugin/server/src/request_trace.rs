//! `--request-trace FILE`: one `dynamo.request.trace.v1` event a line for each prompt whose answer
//! ended, as Dynamo's converters and `rootstock replay --trace` read them. Prompts are in it as
//! chained hashes of their pages, the same as in KV events, and as numbers.
//!
//! Lines go through a bounded channel to a thread that writes; when the disk is slower than the
//! requests, lines are left out and counted, never waited for.
//! Source of the form: Dynamo 1.6, field by field in its request trace documentation.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rootstock::radix::{NamespaceKey, sequence_hashes};
use serde_json::{Value, json};

use crate::engine_port::Job;
use crate::http::label::Label;
use crate::metrics::Ending;

/// Lines that wait for the disk.
const LINES_MAX: usize = 4096;

/// The file, and the thread that writes it.
#[derive(Debug)]
pub struct RequestTrace {
    lines: flume::Sender<String>,
    left_out: AtomicU64,
    begin: Instant,
    page_tokens: u32,
    model: String,
}

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write --request-trace {}: {source}; choose another file", path.display())]
pub struct TraceError {
    path: PathBuf,
    source: io::Error,
}

/// What is known of a prompt when it is queued.
#[derive(Debug)]
pub struct Traced {
    received_ms: u64,
    request: Value,
    agent_context: Value,
}

impl RequestTrace {
    /// Opens a file, behind what it holds.
    ///
    /// # Errors
    /// It cannot be opened, or no thread can be had.
    pub fn open(path: &Path, page_tokens: u32, model: &str) -> Result<RequestTrace, TraceError> {
        let failed = |source| TraceError {
            path: path.to_owned(),
            source,
        };
        let file = File::options().create(true).append(true).open(path);
        let file = BufWriter::new(file.map_err(failed)?);
        let (lines, coming) = flume::bounded(LINES_MAX);
        let thread = std::thread::Builder::new().name("request-trace".to_owned());
        thread.spawn(move || write(file, &coming)).map_err(failed)?;
        Ok(RequestTrace {
            lines,
            left_out: AtomicU64::new(0),
            begin: crate::clock::now(),
            page_tokens,
            model: model.to_owned(),
        })
    }

    /// Counter: lines left out because the disk was too slow.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Takes down a prompt that is about to be queued.
    pub fn begin(&self, job: &Job) -> Traced {
        let name = NamespaceKey {
            salt: job.salt.clone(),
            ..NamespaceKey::default()
        };
        let page = usize::try_from(self.page_tokens).unwrap_or(usize::MAX);
        let hints = &job.hints;
        let label = Label::current();
        let given = label.as_ref().filter(|label| label.is_given);
        Traced {
            received_ms: crate::clock::unix_millis(),
            request: json!({
                "request_id": label.as_ref().map(|label| &*label.id),
                "x_request_id": given.map(|label| &*label.id),
                "model": self.model,
                "agent_hints": {"osl": hints.osl, "priority": hints.priority},
                "replay": {
                    "trace_block_size": self.page_tokens,
                    "input_length": job.tokens.len(),
                    "input_sequence_hashes": sequence_hashes(&name, &job.tokens, page),
                },
            }),
            agent_context: json!({
                "session_id": hints.program,
                "parent_session_id": hints.parent,
                "session_final": hints.session_final.then_some(true),
            }),
        }
    }

    /// Writes the end of its answer.
    pub fn end(&self, traced: Traced, ending: Ending<'_>) {
        let now_ms = crate::clock::unix_millis();
        let elapsed = crate::clock::now().duration_since(self.begin).as_millis();
        let line = traced.line(ending, now_ms, u64::try_from(elapsed).unwrap_or(u64::MAX));
        if self.lines.try_send(line.to_string()).is_err()
            && self.left_out.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::warn!("the request trace cannot be written fast enough; lines are left out");
        }
    }
}

impl Traced {
    fn line(self, ending: Ending<'_>, now_ms: u64, elapsed_ms: u64) -> Value {
        let usage = ending.usage;
        let ttft_ns = usage.ttft_ns;
        let mut request = self.request;
        let told = [
            ("input_tokens", json!(usage.prompt_tokens)),
            ("output_tokens", json!(usage.completion_tokens)),
            ("cached_tokens", json!(usage.cached.total())),
            ("request_received_ms", json!(self.received_ms)),
            ("prefill_wait_time_ms", json!(ms(usage.queue_ns))),
            (
                "prefill_time_ms",
                json!(ttft_ns.map(|ns| ms(ns.saturating_sub(usage.queue_ns)))),
            ),
            ("ttft_ms", json!(ttft_ns.map(ms))),
            (
                "total_time_ms",
                json!(now_ms.saturating_sub(self.received_ms)),
            ),
            (
                "avg_itl_ms",
                json!(ending.decode.map(|(s, tokens)| 1e3 * s / f64::from(tokens))),
            ),
            (
                "kv_hit_rate",
                json!(f64::from(usage.cached.total()) / f64::from(usage.prompt_tokens.max(1))),
            ),
            ("worker", json!({"dp_rank": usage.replica})),
            (
                "finish_reason_metadata",
                json!({"finish_reason": ending.outcome.finish_reason()}),
            ),
        ];
        for (name, value) in told {
            request[name] = value;
        }
        json!({
            "timestamp": elapsed_ms,
            "event": {
                "schema": "dynamo.request.trace.v1",
                "event_type": "request_end",
                "event_time_unix_ms": now_ms,
                "event_source": "rootstock",
                "agent_context": self.agent_context,
                "request": request,
            },
        })
    }
}

fn ms(ns: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "microseconds are enough")]
    let us = (ns / 1_000) as f64;
    us / 1_000.0
}

/// Writes until nobody sends any more, and to the disk whenever nothing waits.
fn write(mut file: BufWriter<File>, coming: &flume::Receiver<String>) {
    for line in coming {
        let written = writeln!(file, "{line}").and_then(|()| {
            if coming.is_empty() {
                file.flush()
            } else {
                Ok(())
            }
        });
        if let Err(error) = written {
            tracing::error!("the request trace ends here: {error}");
            return;
        }
    }
}
