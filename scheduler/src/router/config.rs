//! Knobs of the router, checked once; names and defaults follow Dynamo's flags.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a replica is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Mode {
    /// By cached prefix and load.
    #[default]
    Kv,
    /// One after the other.
    RoundRobin,
    /// Drawn evenly.
    Random,
    /// The one with fewer requests of two that are drawn.
    PowerOfTwo,
    /// The one with the fewest requests.
    LeastLoaded,
}

/// Order of those who wait until a replica is below the queue threshold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum QueueOrder {
    /// Strict tier, then arrival less jump.
    #[default]
    Fcfs,
    /// Strict tier, then `(1 + jump) / uncached prompt tokens`, the largest first: weighted
    /// shortest processing time.
    Wspt,
}

/// What the binding of a session to a replica is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Affinity {
    /// It goes there unless that replica is busy.
    #[default]
    Soft,
    /// It goes there, and parks while that replica is busy.
    Hard,
}

/// Load above which a replica gets nothing more; a request that finds all above is refused.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Overload {
    /// Share of a replica's KV blocks that requests under way hold.
    pub decode_blocks: Option<f64>,
    /// Prompt tokens not computed yet.
    pub prefill_tokens: Option<u32>,
    /// The same, as a multiple of `step_tokens`.
    pub prefill_frac: Option<f64>,
}

impl Overload {
    /// Whether any limit is set.
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }
}

/// Knobs of the router.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterConfig {
    /// How a replica is chosen. Thresholds, affinity and the idle replica hold in all modes.
    pub mode: Mode,
    /// Tokens a block.
    pub block_tokens: u32,
    /// Worth of a cached device block, in blocks to prefill.
    pub overlap_score_credit: f64,
    /// How fast that worth decays with prefill load above the least loaded replica.
    pub overlap_score_credit_decay: f64,
    /// Weight of prefill against decode.
    pub prefill_load_scale: f64,
    /// Worth of a cached host block.
    pub host_cache_hit_weight: f64,
    /// Worth of a cached storage block.
    pub storage_cache_hit_weight: f64,
    /// Cost of each active request.
    pub decode_active_request_weight: f64,
    /// 0 takes the least cost; above, how evenly requests spread.
    pub temperature: f64,
    /// A replica is busy with more active prefill tokens than this times `step_tokens`; None:
    /// nobody is ever busy.
    pub queue_threshold: Option<f64>,
    /// Order of those who wait for a replica that is not busy.
    pub queue_order: QueueOrder,
    /// Seconds of waiting that raise a parked request by one strict tier; 0 is off. Taken from the
    /// scheduler.
    pub aging_s: f64,
    /// Tokens a replica computes in a step.
    pub step_tokens: u32,
    /// Requests a replica can run at a time.
    pub seats: u32,
    /// KV blocks of each replica; empty: not known, and nobody is overloaded by them.
    pub kv_blocks: Vec<u32>,
    /// Whether the blocks of requests under way count.
    pub track_active_blocks: bool,
    /// Whether the prompt tokens of requests under way count until they are computed.
    pub track_prefill_tokens: bool,
    /// Whether blocks of the output count as they are generated.
    pub track_output_blocks: bool,
    /// Load above which a replica gets nothing more.
    pub overload: Overload,
    /// Seconds without news after which a request is forgotten; 0 is never.
    pub stale_after_s: u32,
    /// Seconds for which an idle session stays with its replica; 0 is no affinity.
    pub affinity_ttl_s: u32,
    /// What a session's binding is worth.
    pub affinity: Affinity,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Kv,
            block_tokens: 16,
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            host_cache_hit_weight: 0.75,
            storage_cache_hit_weight: 0.25,
            decode_active_request_weight: 0.0,
            temperature: 0.0,
            queue_threshold: None,
            queue_order: QueueOrder::Fcfs,
            aging_s: 30.0,
            step_tokens: 512,
            seats: 64,
            kv_blocks: Vec::new(),
            track_active_blocks: true,
            track_prefill_tokens: true,
            track_output_blocks: false,
            overload: Overload::default(),
            stale_after_s: 300,
            affinity_ttl_s: 0,
            affinity: Affinity::Soft,
        }
    }
}

/// A value the router cannot work with.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum RouterError {
    /// Must be 1 or more.
    #[error("{name} is 0; at least 1 is needed")]
    Zero {
        /// Name of the value.
        name: &'static str,
    },
    /// Must be a finite number, 0 or more.
    #[error("{name} is {value}; 0 or more is possible")]
    Weight {
        /// Name of the value.
        name: &'static str,
        /// The value.
        value: f64,
    },
}

impl RouterConfig {
    /// Refuses values no router can work with.
    ///
    /// # Errors
    /// The first value out of range.
    pub fn validate(&self) -> Result<(), RouterError> {
        let counts = [
            ("block_tokens", self.block_tokens),
            ("step_tokens", self.step_tokens),
            ("seats", self.seats),
        ];
        if let Some(&(name, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(RouterError::Zero { name });
        }
        let overload = self.overload;
        let weights = [
            ("overlap_score_credit", self.overlap_score_credit),
            (
                "overlap_score_credit_decay",
                self.overlap_score_credit_decay,
            ),
            ("prefill_load_scale", self.prefill_load_scale),
            ("host_cache_hit_weight", self.host_cache_hit_weight),
            ("storage_cache_hit_weight", self.storage_cache_hit_weight),
            (
                "decode_active_request_weight",
                self.decode_active_request_weight,
            ),
            ("temperature", self.temperature),
            ("queue_threshold", self.queue_threshold.unwrap_or(0.0)),
            ("aging_s", self.aging_s),
            (
                "overload.decode_blocks",
                overload.decode_blocks.unwrap_or(0.0),
            ),
            (
                "overload.prefill_frac",
                overload.prefill_frac.unwrap_or(0.0),
            ),
        ];
        match weights.iter().find(|(_, v)| !(0.0..=1e12).contains(v)) {
            Some(&(name, value)) => Err(RouterError::Weight { name, value }),
            None => Ok(()),
        }
    }
}
