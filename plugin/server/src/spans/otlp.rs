//! Spans to a collector of OpenTelemetry, by OTLP over HTTP in protobuf (feature `otel`).
//!
//! ```text
//! request ----------------------------------------------  one a request
//!    queue ---- prefill ------- decode ------------         of each of its answers
//! ```
//!
//! A thread of its own takes ended requests from the queue, makes spans of them and posts them,
//! many at once. A client's `traceparent` is continued; one that says not sampled is left alone.
//! The OpenTelemetry exporter reads its own environment: headers, time limit, resource.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flume::RecvTimeoutError;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceState,
};
use opentelemetry::{Array, Context, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, Protocol, SpanExporter, WithExportConfig, WithHttpConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanExporter as _, SpanLinks,
};

use super::{AnswerSpan, Lost, Parent, QUEUE_MAX, RequestSpan, Spans};
use crate::about;
use crate::metrics::Outcome;

/// Where traces go below an endpoint.
const TRACES: &str = "/v1/traces";
/// Requests of one post, at most.
const BATCH_MAX: usize = 256;
/// Between two looks at whether the server ends, where nothing comes.
const LOOK: Duration = Duration::from_millis(100);
/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Characters of a program's name in a span.
const PROGRAM_MAX: usize = 256;

/// A collector that cannot be sent to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OtlpError {
    /// The address.
    #[error(
        "--otlp-endpoint {endpoint}: {source}; an address such as http://127.0.0.1:4318 is \
             wanted"
    )]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// Why not.
        source: ExporterBuildError,
    },
    /// No thread is to be had.
    #[error("no thread for --otlp-endpoint: {0}")]
    Thread(#[from] io::Error),
}

/// The thread that sends.
#[derive(Debug)]
pub struct Exporter {
    spans: Spans,
    stop: Arc<AtomicBool>,
    done: flume::Receiver<()>,
}

impl Exporter {
    /// Starts it; `endpoint` is the collector's, to which `/v1/traces` is added.
    ///
    /// # Errors
    /// The address is none, or there is no thread.
    pub fn start(endpoint: &str, model: &str) -> Result<Exporter, OtlpError> {
        let base = endpoint.trim_end_matches('/');
        let url = match base.ends_with(TRACES) {
            true => base.to_owned(),
            false => format!("{base}{TRACES}"),
        };
        let failed = |source| OtlpError::Endpoint {
            endpoint: endpoint.to_owned(),
            source,
        };
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new())
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url)
            .build()
            .map_err(failed)?;
        exporter.set_resource(&resource());
        let (spans, ended) = Spans::new(QUEUE_MAX);
        let (finished, done) = flume::bounded(1);
        let stop: Arc<AtomicBool> = Arc::default();
        let worker = Worker {
            exporter,
            maker: Maker::new(model),
            ended,
            lost: spans.lost().clone(),
            stop: Arc::clone(&stop),
            warned: false,
        };
        std::thread::Builder::new()
            .name("otlp".to_owned())
            .spawn(move || {
                worker.run();
                drop(finished);
            })?;
        Ok(Exporter { spans, stop, done })
    }

    /// Where requests tell their ends.
    pub fn spans(&self) -> Spans {
        self.spans.clone()
    }

    /// Sends what is left, for this long at most; whether all was sent or given up.
    pub fn finish(self, patience: Duration) -> bool {
        self.stop.store(true, Ordering::Release);
        let ended = self.done.recv_timeout(patience);
        matches!(ended, Err(RecvTimeoutError::Disconnected) | Ok(()))
    }
}

/// What the collector is told of this process; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`
/// are said by whoever runs it.
fn resource() -> Resource {
    let version = KeyValue::new("service.version", about::VERSION);
    let named = std::env::var_os("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty());
    let resource = Resource::builder().with_attribute(version);
    if named {
        resource.build()
    } else {
        resource.with_service_name("rootstock").build()
    }
}

struct Worker {
    exporter: SpanExporter,
    maker: Maker,
    ended: flume::Receiver<RequestSpan>,
    lost: Lost,
    stop: Arc<AtomicBool>,
    warned: bool,
}

impl Worker {
    fn run(mut self) {
        loop {
            let first = match self.ended.recv_timeout(LOOK) {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let stopping = self.stop.load(Ordering::Acquire);
            let waiting: Vec<RequestSpan> = first
                .into_iter()
                .chain(self.ended.try_iter().take(BATCH_MAX - 1))
                .collect();
            if !waiting.is_empty() {
                self.send(&waiting);
            } else if stopping {
                return;
            }
        }
    }

    fn send(&mut self, requests: &[RequestSpan]) {
        let spans: Vec<SpanData> = requests
            .iter()
            .flat_map(|request| self.maker.spans(request))
            .collect();
        if spans.is_empty() {
            return;
        }
        let sent = futures_util::future::FutureExt::now_or_never(self.exporter.export(spans));
        let error = match sent {
            Some(Ok(())) => {
                self.warned = false;
                return;
            }
            Some(Err(error)) => error.to_string(),
            None => "the client did not finish".to_owned(),
        };
        self.lost.add(Lost::EXPORT, requests.len());
        // Once, until it works again.
        if !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(error, "spans are lost: the collector does not take them");
        }
    }
}

/// HTTP on the thread that asks: the exporter has one of its own.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn new() -> Client {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(PATIENCE))
            .build();
        Client(agent.into())
    }
}

#[async_trait::async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, &body[..]);
        let (parts, mut body) = self.0.run(request)?.into_parts();
        let bytes = body.read_to_vec()?;
        Ok(Response::from_parts(parts, Bytes::from(bytes)))
    }
}

/// Makes spans of requests.
struct Maker {
    model: StringValue,
    scope: InstrumentationScope,
    ids: RandomIdGenerator,
    propagator: TraceContextPropagator,
}

impl Extractor for Parent {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(&self.traceparent),
            "tracestate" => self.tracestate.as_deref(),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

impl Maker {
    fn new(model: &str) -> Maker {
        let scope = InstrumentationScope::builder("rootstock").with_version(about::VERSION);
        Maker {
            model: model.to_owned().into(),
            scope: scope.build(),
            ids: RandomIdGenerator::default(),
            propagator: TraceContextPropagator::new(),
        }
    }

    /// The request and its parts; nothing where the client does not want it sampled.
    fn spans(&self, request: &RequestSpan) -> Vec<SpanData> {
        let parent = request.parent.as_ref().map(|parent| {
            let context = self
                .propagator
                .extract_with_context(&Context::new(), parent);
            context.span().span_context().clone()
        });
        let parent = parent.filter(SpanContext::is_valid);
        if parent.as_ref().is_some_and(|parent| !parent.is_sampled()) {
            return Vec::new();
        }
        let context = SpanContext::new(
            parent
                .as_ref()
                .map_or_else(|| self.ids.new_trace_id(), SpanContext::trace_id),
            self.ids.new_span_id(),
            TraceFlags::SAMPLED,
            false,
            parent
                .as_ref()
                .map_or_else(TraceState::default, |parent| parent.trace_state().clone()),
        );
        let mut root = self.span("request", &context, (request.begin_ns, request.end_ns));
        root.span_kind = SpanKind::Server;
        root.parent_span_id = parent
            .as_ref()
            .map_or(SpanId::INVALID, SpanContext::span_id);
        root.parent_span_is_remote = parent.is_some();
        root.attributes = self.attributes(request);
        root.status = status(request);
        let mut spans = vec![root];
        for (number, answer) in request.answers.iter().enumerate() {
            self.parts(&context, number, answer, &mut spans);
        }
        spans
    }

    /// The phases of an answer that it came to.
    fn parts(
        &self,
        request: &SpanContext,
        number: usize,
        answer: &AnswerSpan,
        to: &mut Vec<SpanData>,
    ) {
        let end = answer.took_ns;
        let admitted = answer.queue_ns.unwrap_or(end).min(end);
        let first = answer.ttft_ns.map(|ns| ns.clamp(admitted, end));
        let mut phases = vec![("queue", 0, admitted)];
        if answer.queue_ns.is_some() {
            phases.push(("prefill", admitted, first.unwrap_or(end)));
        }
        phases.extend(first.map(|first| ("decode", first, end)));
        for (name, from, until) in phases {
            let context = SpanContext::new(
                request.trace_id(),
                self.ids.new_span_id(),
                TraceFlags::SAMPLED,
                false,
                request.trace_state().clone(),
            );
            let begin = answer.begin_ns;
            let mut span = self.span(
                name,
                &context,
                (begin.saturating_add(from), begin.saturating_add(until)),
            );
            span.parent_span_id = request.span_id();
            let number = i64::try_from(number).unwrap_or(i64::MAX);
            span.attributes
                .push(KeyValue::new("rootstock.answer", number));
            let tokens = match name {
                "prefill" => answer.prompt_tokens.saturating_sub(answer.cached.total()),
                "decode" => answer.output_tokens,
                _ => 0,
            };
            if tokens > 0 {
                let tokens = KeyValue::new("rootstock.computed_tokens", i64::from(tokens));
                span.attributes.push(tokens);
            }
            to.push(span);
        }
    }

    fn attributes(&self, request: &RequestSpan) -> Vec<KeyValue> {
        let text = |name, value: &str| KeyValue::new(name, value.to_owned());
        let number = |name, value: u32| KeyValue::new(name, i64::from(value));
        let prompts = || request.answers.iter().filter(|answer| answer.counts_prompt);
        let sum = |part: fn(&AnswerSpan) -> u32| prompts().map(part).sum();
        let reasons = request
            .answers
            .iter()
            .map(|answer| StringValue::from(answer.outcome.finish_reason()));
        let mut all = vec![
            KeyValue::new("gen_ai.request.model", self.model.clone()),
            text("url.path", &request.path),
            text("rootstock.request_id", &request.request_id),
            number(
                "gen_ai.usage.input_tokens",
                sum(|answer| answer.prompt_tokens),
            ),
            number(
                "gen_ai.usage.output_tokens",
                request
                    .answers
                    .iter()
                    .map(|answer| answer.output_tokens)
                    .sum(),
            ),
            number(
                "rootstock.cached_tokens.device",
                sum(|answer| answer.cached.device),
            ),
            number(
                "rootstock.cached_tokens.host",
                sum(|answer| answer.cached.host),
            ),
            number(
                "rootstock.cached_tokens.storage",
                sum(|answer| answer.cached.storage),
            ),
            KeyValue::new(
                "gen_ai.response.finish_reasons",
                Value::Array(Array::String(reasons.collect())),
            ),
        ];
        if let Some(program) = &request.program {
            let program: String = program.chars().take(PROGRAM_MAX).collect();
            all.push(KeyValue::new("rootstock.program", program));
        }
        if let Some(answer) = request.answers.first() {
            all.push(KeyValue::new("rootstock.class", answer.class));
            all.push(number("rootstock.replica", answer.replica.into()));
        }
        all
    }

    fn span(&self, name: &'static str, context: &SpanContext, times: (u64, u64)) -> SpanData {
        SpanData {
            span_context: context.clone(),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: at(times.0),
            end_time: at(times.1),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }
}

fn at(unix_ns: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(unix_ns)
}

fn status(request: &RequestSpan) -> Status {
    if request.answers.is_empty() {
        return Status::error("refused");
    }
    let failed = |answer: &AnswerSpan| answer.outcome == Outcome::Failed;
    if request.answers.iter().any(failed) {
        Status::error("failed")
    } else {
        Status::Unset
    }
}
