//! What a request went through, as spans: plain data that its end puts into a bounded queue, from
//! which `spans::otlp` (feature `otel`) makes what a collector of OpenTelemetry takes.
//!
//! Nothing waits here. A request whose span finds the queue full is served like any other, and its
//! span is left out and counted. All times are known at the end, so nothing is kept open meanwhile
//! but what stands in [`OpenSpan`].

#[cfg(feature = "otel")]
pub mod otlp;

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use rootstock::scheduler::CachedTokens;

use crate::http::label::Label;
use crate::metrics::{Ending, Outcome};

/// Requests whose spans wait to be sent, at most.
pub const QUEUE_MAX: usize = 2048;
/// Answers of one request that have spans, at most.
const ANSWERS_MAX: usize = 64;

/// Why spans were left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LossLabel {
    reason: &'static str,
}

/// Counter: requests without a span, by why.
#[derive(Clone, Debug, Default)]
pub struct Lost(Family<LossLabel, Counter>);

impl Lost {
    /// The queue was full.
    pub const QUEUE: &str = "queue";
    /// The collector did not take them.
    pub const EXPORT: &str = "export";

    /// Counts requests.
    pub fn add(&self, reason: &'static str, requests: usize) {
        let count = u64::try_from(requests).unwrap_or(u64::MAX);
        self.0.get_or_create(&LossLabel { reason }).inc_by(count);
    }

    /// The counter, with all its reasons from the start.
    pub fn family(&self) -> Family<LossLabel, Counter> {
        for reason in [Lost::QUEUE, Lost::EXPORT] {
            self.add(reason, 0);
        }
        self.0.clone()
    }
}

/// Where ends of requests go, if they are to be spans.
#[derive(Clone, Debug)]
pub struct Spans {
    queue: flume::Sender<RequestSpan>,
    lost: Lost,
}

/// A request that has ended.
#[derive(Clone, Debug)]
pub struct RequestSpan {
    /// Its id in logs.
    pub request_id: Arc<str>,
    /// The path that was asked.
    pub path: Arc<str>,
    /// `traceparent` and `tracestate` of the client, as they came.
    pub parent: Option<Parent>,
    /// The agent program it belongs to.
    pub program: Option<String>,
    /// Nanoseconds since 1970.
    pub begin_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
    /// Its answers, in the order in which they ended.
    pub answers: Vec<AnswerSpan>,
}

/// The client's place in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The header `traceparent`.
    pub traceparent: Arc<str>,
    /// The header `tracestate`.
    pub tracestate: Option<Arc<str>>,
}

/// One answer, its times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct AnswerSpan {
    /// When its job was handed to the engine, since 1970.
    pub begin_ns: u64,
    /// Until its first admission; `None`: it never was.
    pub queue_ns: Option<u64>,
    /// Until its first token.
    pub ttft_ns: Option<u64>,
    /// Until its end.
    pub took_ns: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// The class of its request, as metrics name it.
    pub class: &'static str,
    /// The first answer to its prompt, by which the prompt is counted.
    pub counts_prompt: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, found in the cache.
    pub cached: CachedTokens,
    /// Tokens generated.
    pub output_tokens: u32,
    /// The replica that computed it.
    pub replica: u16,
}

impl Spans {
    /// A queue for this many requests, and its other end.
    pub fn new(requests: usize) -> (Spans, flume::Receiver<RequestSpan>) {
        let (queue, ended) = flume::bounded(requests);
        let lost = Lost::default();
        (Spans { queue, lost }, ended)
    }

    /// What was left out.
    pub fn lost(&self) -> &Lost {
        &self.lost
    }

    /// Begins the span of the request whose handler this is.
    pub fn begin(&self, label: Option<&Label>, program: Option<String>) -> OpenSpan {
        let now = crate::clock::unix_nanos();
        let origin = label.map(|label| &label.origin);
        OpenSpan {
            span: RequestSpan {
                request_id: label.map_or_else(|| Arc::from(""), |label| Arc::clone(&label.id)),
                path: origin.map_or_else(|| Arc::from(""), |origin| Arc::clone(&origin.path)),
                parent: origin.and_then(|origin| origin.parent.clone()),
                program,
                begin_ns: origin.map_or(now, |origin| origin.received_ns.min(now)),
                end_ns: now,
                answers: Vec::new(),
            },
            to: self.clone(),
        }
    }
}

/// The span of a request that still runs. It ends when this goes.
#[derive(Debug)]
pub struct OpenSpan {
    span: RequestSpan,
    to: Spans,
}

impl OpenSpan {
    /// Takes down the end of an answer.
    pub fn answer(&mut self, ending: Ending<'_>) {
        if self.span.answers.len() == ANSWERS_MAX {
            return;
        }
        let usage = ending.usage;
        let took_ns = nanos(ending.took_s);
        let admitted = usage.queue_ns > 0 || usage.ttft_ns.is_some();
        self.span.answers.push(AnswerSpan {
            begin_ns: crate::clock::unix_nanos().saturating_sub(took_ns),
            queue_ns: admitted.then_some(usage.queue_ns),
            ttft_ns: usage.ttft_ns,
            took_ns,
            outcome: ending.outcome,
            class: ending.class.name(),
            counts_prompt: ending.counts_prompt,
            prompt_tokens: usage.prompt_tokens,
            cached: usage.cached,
            output_tokens: usage.completion_tokens,
            replica: usage.replica,
        });
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let mut span = RequestSpan {
            answers: std::mem::take(&mut self.span.answers),
            ..self.span.clone()
        };
        span.end_ns = crate::clock::unix_nanos().max(span.begin_ns);
        if self.to.queue.try_send(span).is_err() {
            self.to.lost.add(Lost::QUEUE, 1);
        }
    }
}

/// Seconds as nanoseconds; what is no time is none.
fn nanos(seconds: f64) -> u64 {
    let time = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_leaves_spans_out_counts_them_and_keeps_nobody_waiting() {
        let (spans, ended) = Spans::new(2);
        for _ in 0..5 {
            drop(spans.begin(None, Some("p".to_owned())));
        }
        assert_eq!(ended.try_iter().count(), 2);
        let count = |reason| {
            spans
                .lost
                .family()
                .get_or_create_owned(&LossLabel { reason })
        };
        assert_eq!(count(Lost::QUEUE).get(), 3);
        assert_eq!(count(Lost::EXPORT).get(), 0);
        drop(spans.begin(None, None));
        assert_eq!(ended.len(), 1, "and goes on");
    }

    #[test]
    fn a_collector_that_is_gone_is_a_full_queue() {
        let (spans, ended) = Spans::new(2);
        drop(ended);
        drop(spans.begin(None, None));
        let label = LossLabel {
            reason: Lost::QUEUE,
        };
        assert_eq!(spans.lost.family().get_or_create_owned(&label).get(), 1);
    }
}
