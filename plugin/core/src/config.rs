//! The configuration of a core: cache, schedulers and limits, checked as one.
//!
//! It is plain data: read from a file by the server, from a struct by an embedder, and written to
//! the head of each journal, because the same configuration and inputs give the same plans.

use rootstock_memory::ReplicaId;
use rootstock_radix::{CacheConfig, CacheError};
use rootstock_scheduler::SchedulerConfig;
use rootstock_scheduler::router::{RouterConfig, RouterError};
use serde::{Deserialize, Serialize};

use crate::hints::Ceiling;

/// Replicas of one core at most.
pub const REPLICAS_MAX: usize = 256;

/// Everything a [`ServingCore`](crate::ServingCore) is built from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreConfig {
    /// The prefix cache and its tiers; one entry of `device_pages` per replica.
    pub cache: CacheConfig,
    /// Pattern for each replica's scheduler; its `replica` is set to each in turn.
    pub scheduler: SchedulerConfig,
    /// What no caller may exceed.
    #[serde(default)]
    pub limits: Limits,
    /// Which replica a request goes to; with one replica only its thresholds have an effect.
    /// `block_tokens`, `kv_blocks`, `step_tokens`, `seats` and `aging_s` are taken from the cache
    /// and the scheduler.
    #[serde(default)]
    pub router: RouterConfig,
}

impl CoreConfig {
    /// No limits for callers, and the router's defaults.
    pub fn new(cache: CacheConfig, scheduler: SchedulerConfig) -> Self {
        Self {
            cache,
            scheduler,
            limits: Limits::default(),
            router: RouterConfig::default(),
        }
    }
}

/// What no caller may exceed, whatever its hints say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Highest priority, strict tier and jump that `add` lets through; higher ones are lowered.
    pub ceiling: Ceiling,
}

/// A configuration that builds no core.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The cache refuses its part.
    #[error("cache: {0}")]
    Cache(#[from] CacheError),
    /// The scheduler refuses its part.
    #[error("scheduler: {0}")]
    Scheduler(#[from] rootstock_scheduler::ConfigError),
    /// The router refuses its part.
    #[error("router: {0}")]
    Router(#[from] RouterError),
    /// Cache and scheduler count different pages.
    #[error(
        "scheduler.page_tokens is {scheduler} and cache.page_tokens is {cache}; set both to the \
         same number"
    )]
    PageTokensDiffer {
        /// The cache's page size, in tokens.
        cache: u32,
        /// The scheduler's page size, in tokens.
        scheduler: u32,
    },
    /// No replica, or too many.
    #[error("cache.device_pages has {replicas} entries; 1 to {limit} replicas are possible")]
    Replicas {
        /// Entries found.
        replicas: usize,
        /// Entries possible.
        limit: usize,
    },
    /// A ceiling that is not a number of seconds.
    #[error("limits.ceiling.jump_s is {jump_s}; a number of seconds >= 0 is needed")]
    Jump {
        /// The value.
        jump_s: f64,
    },
}

impl CoreConfig {
    /// Number of replicas.
    pub fn replicas(&self) -> usize {
        self.cache.device_pages.len()
    }

    /// The scheduler configuration of one replica.
    pub fn scheduler_of(&self, replica: ReplicaId) -> SchedulerConfig {
        SchedulerConfig {
            replica,
            ..self.scheduler.clone()
        }
    }

    /// The router's configuration, with what it takes from the other parts.
    pub fn router(&self) -> RouterConfig {
        RouterConfig {
            block_tokens: self.cache.page_tokens,
            step_tokens: self.scheduler.step_tokens,
            seats: self.scheduler.max_running,
            aging_s: self.scheduler.aging_s,
            kv_blocks: self.cache.device_pages.clone(),
            ..self.router.clone()
        }
    }

    /// Refuses what no core can work with.
    ///
    /// # Errors
    /// The first thing that is wrong, with its value and what is possible.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let replicas = self.replicas();
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(ConfigError::Replicas {
                replicas,
                limit: REPLICAS_MAX,
            });
        }
        self.scheduler.validate()?;
        let (cache, scheduler) = (self.cache.page_tokens, self.scheduler.page_tokens);
        if cache != scheduler {
            return Err(ConfigError::PageTokensDiffer { cache, scheduler });
        }
        self.router().validate()?;
        let jump_s = self.limits.ceiling.jump_s;
        if jump_s.is_nan() || jump_s < 0.0 {
            return Err(ConfigError::Jump { jump_s });
        }
        Ok(())
    }
}
