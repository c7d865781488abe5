//! Prometheus metrics. Counters and histograms only of what happened; shares are left to whoever
//! reads them. A request's prompt and reused tokens are counted once, at its first admission, so
//! their sums equal the sums over the answers. Health probes are not counted.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use rootstock::scheduler::CachedTokens;

use crate::chat::derived::Kind;
use crate::openai::generation::ChoiceUsage;

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const LATENCY_S: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
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

/// All metrics of the server.
pub struct Metrics {
    registry: Registry,
    answers: Family<OutcomeLabel, Counter>,
    responses: Family<ResponseLabel, Counter>,
    prompt_tokens: Counter,
    reused_tokens: Family<TierLabel, Counter>,
    completion_tokens: Counter,
    ignored_hints: Counter,
    derived_hints: Family<KindLabel, Counter>,
    queue_s: Histogram,
    ttft_s: Histogram,
    tpot_s: Histogram,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics at zero. `engine` adds what the engine counts itself at each scrape.
    pub fn new(engine: impl prometheus_client::collector::Collector) -> Arc<Metrics> {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("rootstock"),
            answers: Family::default(),
            responses: Family::default(),
            prompt_tokens: Counter::default(),
            reused_tokens: Family::default(),
            completion_tokens: Counter::default(),
            ignored_hints: Counter::default(),
            derived_hints: Family::default(),
            queue_s: Histogram::new(LATENCY_S),
            ttft_s: Histogram::new(LATENCY_S),
            tpot_s: Histogram::new(TOKEN_S),
        };
        metrics.register();
        for tier in TIERS {
            // Present from the start, so that rates have a first point.
            drop(metrics.reused_tokens.get_or_create(&TierLabel { tier }));
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
        registry.register(
            "queue_seconds",
            "Arrival to first admission",
            self.queue_s.clone(),
        );
        registry.register(
            "ttft_seconds",
            "Arrival to first token",
            self.ttft_s.clone(),
        );
        registry.register(
            "tpot_seconds",
            "Time per output token after the first, averaged over an answer",
            self.tpot_s.clone(),
        );
    }

    /// Counts a prompt at its first admission.
    pub fn started(&self, prompt_tokens: u32, cached: CachedTokens) {
        self.prompt_tokens.inc_by(prompt_tokens.into());
        for (tier, tokens) in TIERS
            .into_iter()
            .zip([cached.device, cached.host, cached.storage])
        {
            self.reused_tokens
                .get_or_create(&TierLabel { tier })
                .inc_by(tokens.into());
        }
    }

    /// Counts the end of an answer; `decode` is its decode time in seconds and its tokens after
    /// the first.
    pub fn ended(&self, outcome: Outcome, usage: &ChoiceUsage, decode: Option<(f64, u32)>) {
        self.answers.get_or_create(&outcome.label()).inc();
        self.completion_tokens
            .inc_by(usage.completion_tokens.into());
        if let Some(ttft_ns) = usage.ttft_ns {
            self.queue_s.observe(seconds(usage.queue_ns));
            self.ttft_s.observe(seconds(ttft_ns));
        }
        if let Some((decode_s, tokens)) = decode {
            self.tpot_s.observe(decode_s / f64::from(tokens));
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
        let text = Metrics::new(Nothing).text().unwrap();
        assert!(text.contains("rootstock_prompt_tokens_total 0\n"), "{text}");
        assert!(
            text.contains("rootstock_reused_tokens_total{tier=\"host\"} 0\n"),
            "{text}"
        );
        assert!(!text.contains("NaN"));
        let mut kinds = text.lines().filter(|line| line.starts_with("# TYPE"));
        assert!(kinds.all(|line| !line.ends_with(" gauge")), "{text}");
    }

    #[test]
    fn prompt_and_reused_tokens_add_up() {
        let metrics = Metrics::new(Nothing);
        metrics.started(100, CachedTokens::default());
        metrics.started(
            100,
            CachedTokens {
                device: 96,
                host: 0,
                storage: 0,
            },
        );
        let text = metrics.text().unwrap();
        assert!(text.contains("rootstock_prompt_tokens_total 200\n"));
        assert!(text.contains("rootstock_reused_tokens_total{tier=\"device\"} 96\n"));
    }
}
