//! Ends of answers: where they are told, and those that are none, as errors of the API.

use std::sync::Arc;

use rootstock::scheduler::FinishReason;

use crate::app::App;
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::label::Label;
use crate::http::lifecycle::draining;
use crate::metrics::{Ending, Metrics};
use crate::request_trace::{RequestTrace, Traced};
use crate::spans::OpenSpan;

/// Where the end of an answer is told: metrics, log, request trace and spans.
#[derive(Debug)]
pub struct Account {
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// The file, if there is one.
    pub trace: Option<Arc<RequestTrace>>,
    /// The name of the request.
    pub label: Option<Label>,
    /// Its span, if there are to be any; it ends with the account.
    pub span: Option<OpenSpan>,
}

impl Account {
    /// Of the request whose handler this is, of an agent program perhaps.
    pub fn open(app: &App, program: Option<&String>) -> Account {
        let label = Label::current();
        let spans = app.spans.as_ref();
        Account {
            metrics: Arc::clone(&app.metrics),
            trace: app.request_trace.clone(),
            span: spans.map(|spans| spans.begin(label.as_ref(), program.cloned())),
            label,
        }
    }

    /// Tells of an end; `traced` for one that the trace is to have.
    pub fn close(&mut self, traced: Option<Traced>, ending: Ending<'_>) {
        self.metrics.ended(ending);
        tracing::debug!(
            request_id = self.label.as_ref().map(|label| &*label.id),
            class = ending.class.name(),
            outcome = ?ending.outcome,
            prompt_tokens = ending.usage.prompt_tokens,
            cached_tokens = ending.usage.cached.total(),
            completion_tokens = ending.usage.completion_tokens,
            queue_ms = ending.usage.queue_ns / 1_000_000,
            ttft_ms = ending.usage.ttft_ns.map(|ns| ns / 1_000_000),
            total_s = ending.took_s,
            "answer ended"
        );
        if let Some(span) = &mut self.span {
            span.answer(ending);
        }
        if let (Some(trace), Some(traced)) = (&self.trace, traced) {
            trace.end(traced, ending);
        }
    }
}

/// The error of an answer whose engine is gone.
pub fn engine_gone() -> ApiError {
    ApiError::new(
        ErrorKind::EngineDead,
        "the engine stopped; restart the server",
    )
}

/// The error for an end that is no answer.
pub fn error_of(reason: FinishReason) -> ApiError {
    match reason {
        FinishReason::Expired => ApiError::new(
            ErrorKind::QueueTimeout,
            "the request waited longer in the queue than --queue-timeout-s allows",
        )
        .retry_after(5),
        FinishReason::Displaced => ApiError::new(
            ErrorKind::Overloaded,
            "the queue is full and a more important request took the place",
        )
        .retry_after(5),
        FinishReason::TooManyPreemptions => ApiError::new(
            ErrorKind::Overloaded,
            "the request gave way to others as often as is allowed; the KV cache is too small \
             for the load",
        )
        .retry_after(5),
        FinishReason::Aborted => draining(),
        FinishReason::Failed(kind) => ApiError::new(
            ErrorKind::Failed,
            format!("the step that computed this request failed ({kind:?})"),
        ),
        FinishReason::Stop
        | FinishReason::StopString
        | FinishReason::Length
        | FinishReason::OutOfPages => {
            ApiError::new(ErrorKind::Failed, format!("unexpected end {reason:?}"))
        }
    }
}
