//! Prometheus metrics. Counters and histograms only of what happened; shares are left to whoever
//! reads them. A request's prompt and reused tokens are counted once, at its first admission, so
//! their sums equal the sums over the answers. Health probes are not counted.

pub mod asked;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use rootstock::radix::ContextKind;
use rootstock::scheduler::CachedTokens;

use crate::about;
use crate::chat::derived::Kind;
use crate::openai::generation::ChoiceUsage;
use crate::spans::Lost;

use asked::{RequestClass, SOURCES, by_kind, kind_name};

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const LATENCY_S: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Tokens of a prompt or an answer.
const LENGTHS: [f64; 12] = [
    1.0, 8.0, 32.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0, 262_144.0,
];
const TOKEN_S: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
];

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// By a stop token or stop string.
    Stop,
    /// By its length.
    Length,
    /// The client went away, or the server went down.
    Cancelled,
    /// It broke.
    Failed,
}

impl Outcome {
    /// Its name in request traces and spans.
    pub const fn finish_reason(self) -> &'static str {
        match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed => "error",
        }
    }

    fn label(self) -> OutcomeLabel {
        let outcome = match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Cancelled => "cancelled",
            Outcome::Failed => "failed",
        };
        OutcomeLabel { outcome }
    }
}

const TIERS: [&str; 3] = ["device", "host", "storage"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    tier: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabel {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindSourceLabel {
    kind: &'static str,
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabel {
    class: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabel {
    version: &'static str,
    model: String,
}

/// A histogram for each class of requests.
type ByClass = Family<ClassLabel, Histogram, fn() -> Histogram>;

fn latency() -> Histogram {
    Histogram::new(LATENCY_S)
}

fn per_token() -> Histogram {
    Histogram::new(TOKEN_S)
}

/// How an answer went, once it has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ending<'a> {
    /// How urgent its request was.
    pub class: RequestClass,
    /// How it ended.
    pub outcome: Outcome,
    /// What it used.
    pub usage: &'a ChoiceUsage,
    /// Seconds from its first to its last token, and tokens after the first.
    pub decode: Option<(f64, u32)>,
    /// Seconds since it came.
    pub took_s: f64,
    /// The first answer to its prompt, by which the prompt is counted.
    pub counts_prompt: bool,
}

/// All metrics of the server.
pub struct Metrics {
    registry: Registry,
    answers: Family<OutcomeLabel, Counter>,
    responses: Family<ResponseLabel, Counter>,
    prompt_tokens: Counter,
    reused_tokens: Family<TierLabel, Counter>,
    kind_tokens: Family<KindSourceLabel, Counter>,
    completion_tokens: Counter,
    ignored_hints: Counter,
    derived_hints: Family<KindLabel, Counter>,
    queue_s: ByClass,
    ttft_s: ByClass,
    tpot_s: ByClass,
    gap_s: ByClass,
    request_s: ByClass,
    prompt_lengths: Histogram,
    answer_lengths: Histogram,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics at zero, of a server with this model. `engine` adds what the engine counts itself at
    /// each scrape.
    pub fn new(
        model: &str,
        lost: Option<&Lost>,
        engine: impl prometheus_client::collector::Collector,
    ) -> Arc<Metrics> {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("rootstock"),
            answers: Family::default(),
            responses: Family::default(),
            prompt_tokens: Counter::default(),
            reused_tokens: Family::default(),
            kind_tokens: Family::default(),
            completion_tokens: Counter::default(),
            ignored_hints: Counter::default(),
            derived_hints: Family::default(),
            queue_s: Family::new_with_constructor(latency),
            ttft_s: Family::new_with_constructor(latency),
            tpot_s: Family::new_with_constructor(per_token),
            gap_s: Family::new_with_constructor(per_token),
            request_s: Family::new_with_constructor(latency),
            prompt_lengths: Histogram::new(LENGTHS),
            answer_lengths: Histogram::new(LENGTHS),
        };
        metrics.register();
        metrics.register_times();
        metrics.register_build(model);
        if let Some(lost) = lost {
            let help = "Requests without a span, by why";
            metrics.registry.register("spans_lost", help, lost.family());
        }
        for tier in TIERS {
            // Present from the start, so that rates have a first point.
            drop(metrics.reused_tokens.get_or_create(&TierLabel { tier }));
        }
        for source in SOURCES {
            let kind = kind_name(ContextKind::Unknown);
            let label = KindSourceLabel { kind, source };
            drop(metrics.kind_tokens.get_or_create(&label));
        }
        let class = RequestClass::Normal.name();
        for times in metrics.times() {
            drop(times.get_or_create(&ClassLabel { class }));
        }
        metrics.registry.register_collector(Box::new(engine));
        Arc::new(metrics)
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register(
            "answers",
            "Answers that ended, by how",
            self.answers.clone(),
        );
        registry.register(
            "responses",
            "HTTP answers of the generating routes, by route and status",
            self.responses.clone(),
        );
        registry.register(
            "prompt_tokens",
            "Prompt tokens of requests at their first admission",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "reused_tokens",
            "Prompt tokens found in the cache at first admission, by tier",
            self.reused_tokens.clone(),
        );
        registry.register(
            "prompt_kind_tokens",
            "Prompt tokens at first admission, by kind of context and by where they came from",
            self.kind_tokens.clone(),
        );
        registry.register(
            "completion_tokens",
            "Tokens generated, those of cancelled requests included",
            self.completion_tokens.clone(),
        );
        registry.register(
            "ignored_hints",
            "Fields of nvext that were not understood",
            self.ignored_hints.clone(),
        );
        registry.register(
            "derived_hints",
            "Hints that requests of agent programs gave without saying so, by kind",
            self.derived_hints.clone(),
        );
    }

    fn times(&self) -> [&ByClass; 5] {
        [
            &self.queue_s,
            &self.ttft_s,
            &self.tpot_s,
            &self.gap_s,
            &self.request_s,
        ]
    }

    fn register_times(&mut self) {
        let named = [
            ("queue_seconds", "Arrival to first admission, by class"),
            ("ttft_seconds", "Arrival to first token, by class"),
            (
                "tpot_seconds",
                "Time per output token after the first, averaged over an answer, by class",
            ),
            (
                "inter_token_seconds",
                "Time from each output token to the next, by class",
            ),
            (
                "request_seconds",
                "Arrival to last token of answers that came to their end, by class",
            ),
        ];
        let times = self.times().map(ByClass::clone);
        for ((name, help), times) in named.into_iter().zip(times) {
            self.registry.register(name, help, times);
        }
        let prompts = self.prompt_lengths.clone();
        let help = "Tokens of a prompt";
        self.registry
            .register("request_prompt_tokens", help, prompts);
        let answers = self.answer_lengths.clone();
        let help = "Tokens of an answer that came to its end";
        self.registry
            .register("request_answer_tokens", help, answers);
    }

    fn register_build(&mut self, model: &str) {
        let label = BuildLabel {
            version: about::VERSION,
            model: model.to_owned(),
        };
        let help = "Version and model of this server";
        self.registry.register("build", help, Info::new(label));
    }

    /// The times between output tokens of a class.
    pub fn token_gaps(&self, class: RequestClass) -> Histogram {
        let class = class.name();
        self.gap_s.get_or_create_owned(&ClassLabel { class })
    }

    /// Counts a prompt at its first admission.
    pub fn started(
        &self,
        prompt_tokens: u32,
        cached: CachedTokens,
        spans: &[(Range<u32>, ContextKind)],
    ) {
        self.prompt_tokens.inc_by(prompt_tokens.into());
        self.prompt_lengths.observe(prompt_tokens.into());
        for (kind, source, tokens) in by_kind(spans, prompt_tokens, cached) {
            let kind = kind_name(kind);
            self.kind_tokens
                .get_or_create(&KindSourceLabel { kind, source })
                .inc_by(tokens.into());
        }
        for (tier, tokens) in TIERS
            .into_iter()
            .zip([cached.device, cached.host, cached.storage])
        {
            self.reused_tokens
                .get_or_create(&TierLabel { tier })
                .inc_by(tokens.into());
        }
    }

    /// Counts the end of an answer.
    pub fn ended(&self, ending: Ending<'_>) {
        let Ending {
            class,
            outcome,
            usage,
            decode,
            took_s,
            counts_prompt: _,
        } = ending;
        let class = &ClassLabel {
            class: class.name(),
        };
        self.answers.get_or_create(&outcome.label()).inc();
        self.completion_tokens
            .inc_by(usage.completion_tokens.into());
        if let Some(ttft_ns) = usage.ttft_ns {
            self.queue_s
                .get_or_create(class)
                .observe(seconds(usage.queue_ns));
            self.ttft_s.get_or_create(class).observe(seconds(ttft_ns));
        }
        if let Some((decode_s, tokens)) = decode {
            self.tpot_s
                .get_or_create(class)
                .observe(decode_s / f64::from(tokens));
        }
        if matches!(outcome, Outcome::Stop | Outcome::Length) {
            self.request_s.get_or_create(class).observe(took_s);
            self.answer_lengths.observe(usage.completion_tokens.into());
        }
    }

    /// Counts the HTTP status of a generating route.
    pub fn responded(&self, route: &'static str, status: u16) {
        self.responses
            .get_or_create(&ResponseLabel { route, status })
            .inc();
    }

    /// Counts hints that were not understood.
    pub fn ignored(&self, fields: usize) {
        self.ignored_hints
            .inc_by(u64::try_from(fields).unwrap_or(u64::MAX));
    }

    /// Counts a hint that nobody gave.
    pub fn derived(&self, kind: Kind) {
        let kind = kind.name();
        self.derived_hints.get_or_create(&KindLabel { kind }).inc();
    }

    /// Everything in the OpenMetrics text format.
    ///
    /// # Errors
    /// When a collector fails to write.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn seconds(ns: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "2^53 ns are 104 days")]
    let ns = ns as f64;
    ns / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::DescriptorEncoder;

    #[derive(Debug)]
    struct Nothing;

    impl prometheus_client::collector::Collector for Nothing {
        fn encode(&self, _: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
            Ok(())
        }
    }

    #[test]
    fn counters_start_at_zero_and_nothing_is_a_share() {
        let text = Metrics::new("m", None, Nothing).text().unwrap();
        assert!(text.contains("rootstock_prompt_tokens_total 0\n"), "{text}");
        assert!(
            text.contains("rootstock_reused_tokens_total{tier=\"host\"} 0\n"),
            "{text}"
        );
        assert!(!text.contains("NaN"));
        let mut kinds = text.lines().filter(|line| line.starts_with("# TYPE"));
        assert!(kinds.all(|line| !line.ends_with(" gauge")), "{text}");
        let build = "rootstock_build_info{version=";
        assert!(text.contains(build), "{text}");
    }

    #[test]
    fn prompt_and_reused_tokens_add_up() {
        let metrics = Metrics::new("m", None, Nothing);
        let spans = [(0..48, ContextKind::System)];
        metrics.started(100, CachedTokens::default(), &spans);
        metrics.started(
            100,
            CachedTokens {
                device: 96,
                host: 0,
                storage: 0,
            },
            &spans,
        );
        let text = metrics.text().unwrap();
        assert!(text.contains("rootstock_prompt_tokens_total 200\n"));
        assert!(text.contains("rootstock_reused_tokens_total{tier=\"device\"} 96\n"));
        let kinds = [
            ("system", "computed", 48),
            ("system", "device", 48),
            ("unknown", "device", 48),
            ("unknown", "computed", 52 + 4),
        ];
        for (kind, source, tokens) in kinds {
            let name = "rootstock_prompt_kind_tokens_total";
            let line = format!("{name}{{kind=\"{kind}\",source=\"{source}\"}} {tokens}\n");
            assert!(text.contains(&line), "{line}{text}");
        }
    }
}
