//! From the `--router-*` flags, which have Dynamo's names, to the configuration of the router.

use clap::ValueEnum;
use rootstock::RouterConfig;
use rootstock::scheduler::router::{Affinity, Mode, Overload, QueueOrder};
use serde::{Deserialize, Serialize};

use crate::options::Options;

/// `--router-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterModeName {
    /// By cached prefix and load.
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

/// `--router-queue-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterQueueName {
    /// Strict tier, then arrival less jump.
    Fcfs,
    /// Strict tier, then the least uncached prompt per jump.
    Wspt,
}

/// `--router-session-affinity-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AffinityName {
    /// A session's replica is kept, and waited for while it is busy.
    Hard,
    /// A session's replica is kept unless it is busy.
    Soft,
}

/// Numbers among the flags, with the ranges in which they are possible: flag, value, from, to.
pub(crate) fn ranges(options: &Options) -> [(&'static str, Option<f64>, f64, f64); 10] {
    const MOST: f64 = 1e9;
    let o = options;
    [
        (
            "router-kv-overlap-score-credit",
            o.router_kv_overlap_score_credit,
            0.0,
            MOST,
        ),
        (
            "router-kv-overlap-score-credit-decay",
            o.router_kv_overlap_score_credit_decay,
            0.0,
            MOST,
        ),
        (
            "router-prefill-load-scale",
            o.router_prefill_load_scale,
            0.0,
            MOST,
        ),
        (
            "router-decode-active-request-weight",
            o.router_decode_active_request_weight,
            0.0,
            MOST,
        ),
        (
            "router-host-cache-hit-weight",
            o.router_host_cache_hit_weight,
            0.0,
            1.0,
        ),
        (
            "router-disk-cache-hit-weight",
            o.router_disk_cache_hit_weight,
            0.0,
            1.0,
        ),
        ("router-temperature", o.router_temperature, 0.0, MOST),
        (
            "router-queue-threshold",
            o.router_queue_threshold,
            0.0,
            MOST,
        ),
        (
            "active-decode-blocks-threshold",
            o.active_decode_blocks_threshold,
            0.0,
            1.0,
        ),
        (
            "active-prefill-tokens-threshold-frac",
            o.active_prefill_tokens_threshold_frac,
            0.0,
            MOST,
        ),
    ]
}

/// The router's configuration; what is absent has Dynamo's default, except that the mode is `kv`.
pub(crate) fn router_config(options: &Options) -> RouterConfig {
    let default = RouterConfig::default();
    let o = options;
    RouterConfig {
        mode: o.router_mode.map_or(default.mode, Mode::from),
        overlap_score_credit: o
            .router_kv_overlap_score_credit
            .unwrap_or(default.overlap_score_credit),
        overlap_score_credit_decay: o
            .router_kv_overlap_score_credit_decay
            .unwrap_or(default.overlap_score_credit_decay),
        prefill_load_scale: o
            .router_prefill_load_scale
            .unwrap_or(default.prefill_load_scale),
        host_cache_hit_weight: o
            .router_host_cache_hit_weight
            .unwrap_or(default.host_cache_hit_weight),
        storage_cache_hit_weight: o
            .router_disk_cache_hit_weight
            .unwrap_or(default.storage_cache_hit_weight),
        decode_active_request_weight: o
            .router_decode_active_request_weight
            .unwrap_or(default.decode_active_request_weight),
        temperature: o.router_temperature.unwrap_or(default.temperature),
        queue_threshold: o.router_queue_threshold,
        queue_order: o
            .router_queue_policy
            .map_or(default.queue_order, QueueOrder::from),
        track_active_blocks: o
            .router_track_active_blocks
            .unwrap_or(default.track_active_blocks),
        track_prefill_tokens: o
            .router_track_prefill_tokens
            .unwrap_or(default.track_prefill_tokens),
        track_output_blocks: o
            .router_track_output_blocks
            .unwrap_or(default.track_output_blocks),
        overload: Overload {
            decode_blocks: o.active_decode_blocks_threshold,
            prefill_tokens: o.active_prefill_tokens_threshold,
            prefill_frac: o.active_prefill_tokens_threshold_frac,
        },
        stale_after_s: o
            .router_request_expiry_secs
            .unwrap_or(default.stale_after_s),
        affinity_ttl_s: o.router_session_affinity_ttl_secs.unwrap_or(0),
        affinity: o
            .router_session_affinity_mode
            .map_or(Affinity::Hard, Affinity::from),
        ..default
    }
}

/// The flags that give this configuration.
pub(crate) fn router_flags(router: &RouterConfig) -> Options {
    let overload = router.overload;
    Options {
        router_mode: Some(router.mode.into()),
        router_kv_overlap_score_credit: Some(router.overlap_score_credit),
        router_kv_overlap_score_credit_decay: Some(router.overlap_score_credit_decay),
        router_prefill_load_scale: Some(router.prefill_load_scale),
        router_host_cache_hit_weight: Some(router.host_cache_hit_weight),
        router_disk_cache_hit_weight: Some(router.storage_cache_hit_weight),
        router_decode_active_request_weight: Some(router.decode_active_request_weight),
        router_temperature: Some(router.temperature),
        router_queue_threshold: router.queue_threshold,
        router_queue_policy: Some(router.queue_order.into()),
        router_track_active_blocks: Some(router.track_active_blocks),
        router_track_prefill_tokens: Some(router.track_prefill_tokens),
        router_track_output_blocks: Some(router.track_output_blocks),
        active_decode_blocks_threshold: overload.decode_blocks,
        active_prefill_tokens_threshold: overload.prefill_tokens,
        active_prefill_tokens_threshold_frac: overload.prefill_frac,
        router_request_expiry_secs: Some(router.stale_after_s),
        router_session_affinity_ttl_secs: (router.affinity_ttl_s > 0)
            .then_some(router.affinity_ttl_s),
        router_session_affinity_mode: Some(router.affinity.into()),
        ..Options::default()
    }
}

impl From<RouterModeName> for Mode {
    fn from(name: RouterModeName) -> Mode {
        match name {
            RouterModeName::Kv => Mode::Kv,
            RouterModeName::RoundRobin => Mode::RoundRobin,
            RouterModeName::Random => Mode::Random,
            RouterModeName::PowerOfTwo => Mode::PowerOfTwo,
            RouterModeName::LeastLoaded => Mode::LeastLoaded,
        }
    }
}

impl From<Mode> for RouterModeName {
    fn from(mode: Mode) -> RouterModeName {
        match mode {
            Mode::Kv => RouterModeName::Kv,
            Mode::RoundRobin => RouterModeName::RoundRobin,
            Mode::Random => RouterModeName::Random,
            Mode::PowerOfTwo => RouterModeName::PowerOfTwo,
            Mode::LeastLoaded => RouterModeName::LeastLoaded,
        }
    }
}

impl From<RouterQueueName> for QueueOrder {
    fn from(name: RouterQueueName) -> QueueOrder {
        match name {
            RouterQueueName::Fcfs => QueueOrder::Fcfs,
            RouterQueueName::Wspt => QueueOrder::Wspt,
        }
    }
}

impl From<QueueOrder> for RouterQueueName {
    fn from(order: QueueOrder) -> RouterQueueName {
        match order {
            QueueOrder::Fcfs => RouterQueueName::Fcfs,
            QueueOrder::Wspt => RouterQueueName::Wspt,
        }
    }
}

impl From<AffinityName> for Affinity {
    fn from(name: AffinityName) -> Affinity {
        match name {
            AffinityName::Hard => Affinity::Hard,
            AffinityName::Soft => Affinity::Soft,
        }
    }
}

impl From<Affinity> for AffinityName {
    fn from(affinity: Affinity) -> AffinityName {
        match affinity {
            Affinity::Hard => AffinityName::Hard,
            Affinity::Soft => AffinityName::Soft,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_flags_the_router_has_its_defaults() {
        let config = router_config(&Options::default());
        let affinity = Affinity::Hard;
        assert_eq!(
            config,
            RouterConfig {
                affinity,
                ..RouterConfig::default()
            }
        );
        assert_eq!(config.affinity_ttl_s, 0, "and no affinity");
    }

    #[test]
    fn flags_give_a_configuration_that_gives_the_flags() {
        let text = "router-mode = \"power-of-two\"\nrouter-kv-overlap-score-credit = 2.0\n\
            router-kv-overlap-score-credit-decay = 0.5\nrouter-prefill-load-scale = 4.0\n\
            router-host-cache-hit-weight = 0.5\nrouter-disk-cache-hit-weight = 0.125\n\
            router-decode-active-request-weight = 64.0\nrouter-temperature = 0.25\n\
            router-queue-threshold = 0.0\nrouter-queue-policy = \"wspt\"\n\
            router-track-active-blocks = false\nrouter-track-prefill-tokens = false\n\
            router-track-output-blocks = true\nactive-decode-blocks-threshold = 0.9\n\
            active-prefill-tokens-threshold = 10000\n\
            active-prefill-tokens-threshold-frac = 3.0\nrouter-request-expiry-secs = 7\n\
            router-session-affinity-ttl-secs = 60\nrouter-session-affinity-mode = \"soft\"";
        let flags: Options = toml::from_str(text).unwrap();
        let config = router_config(&flags);
        assert_eq!(router_flags(&config), flags, "no flag is lost");
        assert_eq!(config.mode, Mode::PowerOfTwo);
        assert_eq!(config.queue_threshold, Some(0.0));
        assert_eq!(config.storage_cache_hit_weight, 0.125);
        assert!(!config.track_prefill_tokens && config.track_output_blocks);
    }
}
