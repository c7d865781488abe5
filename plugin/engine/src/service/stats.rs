//! Counters and histograms of a running service, copied out as one snapshot.

use rootstock::CoreStats;
use rootstock::memory::{Nanos, StoreStats};
use rootstock::scheduler::{CachedTokens, FinishReason, StepPlan};

/// Upper bounds of the buckets in seconds; the last bucket has none.
const BOUNDS_S: [f64; 16] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// Observed durations by size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    counts: [u64; BOUNDS_S.len() + 1],
    sum_s: f64,
}

impl Histogram {
    /// Upper bounds of the buckets, in seconds; one bucket more holds what is above.
    #[must_use]
    pub const fn bounds_s() -> &'static [f64] {
        &BOUNDS_S
    }

    /// Observations by bucket, one more than there are bounds; not cumulated.
    #[must_use]
    pub const fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Sum of all observations, in seconds.
    #[must_use]
    pub const fn sum_s(&self) -> f64 {
        self.sum_s
    }

    /// Number of observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds an observation.
    pub(super) fn observe(&mut self, ns: Nanos) {
        let seconds = ns as f64 / 1e9;
        let bucket = BOUNDS_S.partition_point(|&bound| bound < seconds);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum_s += seconds;
    }
}

/// What a step computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepClass {
    /// Prompts alone.
    Prefill,
    /// One token for each of its requests.
    Decode,
    /// Both.
    Mixed,
    /// Nothing: it brought copies under way.
    Copies,
}

impl StepClass {
    /// Of a plan.
    pub(super) fn of(plan: &StepPlan) -> Self {
        let decodes = plan.rows.iter().filter(|row| row.len == 1).count();
        match decodes {
            _ if plan.rows.is_empty() => Self::Copies,
            0 => Self::Prefill,
            all if all == plan.rows.len() => Self::Decode,
            _ => Self::Mixed,
        }
    }

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::Copies => "copies",
        }
    }
}

/// Step times by class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTimes {
    prefill: Histogram,
    decode: Histogram,
    mixed: Histogram,
    copies: Histogram,
}

impl StepTimes {
    /// Each class with its times.
    #[must_use]
    pub const fn all(&self) -> [(StepClass, &Histogram); 4] {
        [
            (StepClass::Prefill, &self.prefill),
            (StepClass::Decode, &self.decode),
            (StepClass::Mixed, &self.mixed),
            (StepClass::Copies, &self.copies),
        ]
    }

    pub(super) fn observe(&mut self, class: StepClass, ns: Nanos) {
        match class {
            StepClass::Prefill => &mut self.prefill,
            StepClass::Decode => &mut self.decode,
            StepClass::Mixed => &mut self.mixed,
            StepClass::Copies => &mut self.copies,
        }
        .observe(ns);
    }
}

/// Requests that ended, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// A stop token.
    pub stop: u64,
    /// A stop string.
    pub stop_string: u64,
    /// `max_tokens` or the model length.
    pub length: u64,
    /// The caller gave up.
    pub aborted: u64,
    /// The computation failed.
    pub failed: u64,
    /// Waited too long.
    pub expired: u64,
    /// No pages, too many preemptions, or displaced from the queue.
    pub pushed_out: u64,
}

impl Finished {
    pub(super) fn count(&mut self, reason: FinishReason) {
        let slot = match reason {
            FinishReason::Stop => &mut self.stop,
            FinishReason::StopString => &mut self.stop_string,
            FinishReason::Length => &mut self.length,
            FinishReason::Aborted => &mut self.aborted,
            FinishReason::Failed(_) => &mut self.failed,
            FinishReason::Expired => &mut self.expired,
            FinishReason::OutOfPages
            | FinishReason::TooManyPreemptions
            | FinishReason::Displaced => &mut self.pushed_out,
        };
        *slot += 1;
    }
}

/// A snapshot of a service. Counters only grow.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Pages by state, queue and running counts, evictions, preemptions. None before the start.
    pub core: Option<CoreStats>,
    /// What the store did. None without one.
    pub store: Option<StoreStats>,
    /// Requests queued so far.
    pub admitted: u64,
    /// Requests turned away for a full queue.
    pub deferred: u64,
    /// Requests refused for good.
    pub rejected: u64,
    /// Requests without their final event yet.
    pub live: u64,
    /// Requests that ended.
    pub finished: Finished,
    /// Prompt tokens of started requests.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the cache.
    pub cached: CachedTotals,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Steps computed.
    pub steps: u64,
    /// Steps that failed or panicked.
    pub steps_failed: u64,
    /// Tokens put through the model, but for guesses.
    pub computed_tokens: u64,
    /// Full recounts made while idle.
    pub idle_checks: u64,
    /// Recounts that did not add up: a fault, to be reported.
    pub idle_breaches: u64,
    /// Events that found no room: a fault, to be reported.
    pub events_lost: u64,
    /// Arrival to first step.
    pub queue_s: Histogram,
    /// Arrival to first token.
    pub ttft_s: Histogram,
    /// Time between output tokens, averaged over a request.
    pub tpot_s: Histogram,
    /// Time of a step in the backend, by what it computed.
    pub step_s: StepTimes,
}

/// Cached prompt tokens by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTotals {
    /// On the device.
    pub device: u64,
    /// On the host.
    pub host: u64,
    /// In storage.
    pub storage: u64,
}

impl CachedTotals {
    pub(super) fn add(&mut self, cached: CachedTokens) {
        self.device += u64::from(cached.device);
        self.host += u64::from(cached.host);
        self.storage += u64::from(cached.storage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_on_a_bound_counts_below_it() {
        let mut histogram = Histogram::default();
        histogram.observe(1_000_000);
        histogram.observe(1_000_001);
        histogram.observe(400_000_000_000);
        assert_eq!(histogram.counts()[0], 1);
        assert_eq!(histogram.counts()[1], 1);
        assert_eq!(histogram.counts()[16], 1);
        assert_eq!(histogram.count(), 3);
        assert!((histogram.sum_s() - 400.002_000_001).abs() < 1e-6);
    }
}
