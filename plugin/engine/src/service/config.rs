//! Settings of a service, and the configuration of the core that follows from them.

use std::io::Write;

use rootstock::hints::Ceiling;
use rootstock::journal::JournalLimits;
use rootstock::memory::{KvDtype, ReplicaId};
use rootstock::radix::{CacheConfig, KvEvent, PolicyKind};
use rootstock::scheduler::{SchedulePolicy, SchedulerConfig};
use rootstock::{CoreConfig, Limits, ServingCore};
use rootstock_kernels::Isa;

use super::memory;
use crate::error::EngineError;

/// Where the journal of inputs goes.
pub struct JournalSink {
    /// Takes the bytes; written from the core thread.
    pub writer: Box<dyn Write + Send>,
    /// Bounds of the journal.
    pub limits: JournalLimits,
}

impl std::fmt::Debug for JournalSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalSink").finish_non_exhaustive()
    }
}

/// News of the cache for a [`KvEventSink`].
#[derive(Debug)]
pub enum KvNews<'a> {
    /// What changed since the last news.
    Changed(&'a [KvEvent]),
    /// All that is cached now; it replaces everything told before.
    Snapshot(&'a [KvEvent]),
}

/// What hears the news.
type Listener = dyn FnMut(KvNews<'_>, &ServingCore) + Send;

/// Takes news of the cache.
pub struct KvEventSink {
    /// Called on the core thread, so it must neither block nor take long. The core is there to
    /// look up names of namespaces.
    pub take: Box<Listener>,
    /// Events the cache keeps between two calls. Where more come, a snapshot follows.
    pub max_events: u32,
}

impl std::fmt::Debug for KvEventSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvEventSink").finish_non_exhaustive()
    }
}

/// Settings of a service.
#[derive(Debug)]
pub struct ServiceConfig {
    /// Memory of the device tier in MiB; None: 40 % of what is free, at most 8 GiB.
    pub kv_cache_mib: Option<u64>,
    /// Exact number of device pages, instead of `kv_cache_mib`.
    pub device_pages: Option<u32>,
    /// Tokens a page.
    pub page_size: u32,
    /// Element type of K and V.
    pub kv_dtype: KvDtype,
    /// Threads that compute; None: one a core.
    pub threads: Option<usize>,
    /// Instruction set; None: the best of this CPU.
    pub isa: Option<Isa>,
    /// Steps in flight, 1 or 2.
    pub max_in_flight: u8,
    /// Tokens a step may compute.
    pub step_tokens: u32,
    /// Requests that may hold pages at a time.
    pub max_running: u32,
    /// Requests that may wait.
    pub max_queue: u32,
    /// Prompt and output together, in tokens; None: what the model and the pages allow.
    pub max_model_len: Option<u32>,
    /// Which pages go first when room is needed.
    pub policy: PolicyKind,
    /// Order of the queue.
    pub schedule_policy: SchedulePolicy,
    /// Seconds of waiting that raise a request by one strict tier; 0: off.
    pub aging_s: f64,
    /// Least difference of priority that preempts; None: never.
    pub preempt_gap: Option<u32>,
    /// Seconds a request may wait for its first step; 0: no limit.
    pub queue_timeout_s: u32,
    /// Seed of the cache's hashes.
    pub hash_seed: u64,
    /// Highest priority, tier and jump a client may ask for.
    pub ceiling: Ceiling,
    /// Records every input of the core.
    pub journal: Option<JournalSink>,
    /// Hears what becomes cached and what goes.
    pub kv_events: Option<KvEventSink>,
    /// Name of the model; None: what the file says.
    pub model_name: Option<String>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        let scheduler = SchedulerConfig::default();
        Self {
            kv_cache_mib: None,
            device_pages: None,
            page_size: 16,
            kv_dtype: KvDtype::F16,
            threads: None,
            isa: None,
            max_in_flight: 1,
            step_tokens: scheduler.step_tokens,
            max_running: scheduler.max_running,
            max_queue: scheduler.max_queue,
            max_model_len: None,
            policy: PolicyKind::Priority,
            schedule_policy: scheduler.policy,
            aging_s: scheduler.aging_s,
            preempt_gap: scheduler.preempt_gap,
            queue_timeout_s: scheduler.queue_timeout_s,
            hash_seed: 0,
            ceiling: Ceiling::default(),
            journal: None,
            kv_events: None,
            model_name: None,
        }
    }
}

impl ServiceConfig {
    /// Threads that compute.
    pub(super) fn compute_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.unwrap_or_else(cores).clamp(1, 256)
    }

    /// Pages of the device tier, for pages of `page_bytes` beside `weight_bytes` of weights.
    ///
    /// # Errors
    /// The memory asked for holds no page, or is more than the system has.
    pub(super) fn pages(&self, page_bytes: u64, weight_bytes: u64) -> Result<u32, EngineError> {
        if let Some(pages) = self.device_pages {
            return Ok(pages);
        }
        let available = memory::available();
        let bytes = match self.kv_cache_mib {
            Some(mib) => mib.saturating_mul(memory::MIB),
            None => available.map_or(memory::DEFAULT_BYTES, |bytes| {
                (bytes / 10 * 4).min(memory::DEFAULT_MAX)
            }),
        };
        if let Some(available) = available
            && bytes > available
        {
            return Err(EngineError::Memory {
                wanted_mib: bytes / memory::MIB,
                weights_mib: weight_bytes / memory::MIB,
                available_mib: available / memory::MIB,
            });
        }
        let pages = u32::try_from(bytes / page_bytes.max(1)).unwrap_or(u32::MAX - 1);
        if pages == 0 {
            return Err(EngineError::Config {
                setting: "kv_cache_mib",
                found: (bytes / memory::MIB).to_string(),
                wanted: format!(
                    "at least {} MiB, one page of {} tokens",
                    page_bytes.div_ceil(memory::MIB),
                    self.page_size
                ),
            });
        }
        Ok(pages)
    }

    /// Longest request, for a model of `context` positions and `pages` pages.
    ///
    /// # Errors
    /// More is asked for than the model has.
    pub(super) fn model_len(&self, context: u32) -> Result<u32, EngineError> {
        match self.max_model_len {
            Some(len) if len > context => Err(EngineError::Config {
                setting: "max_model_len",
                found: len.to_string(),
                wanted: format!("at most {context}, the positions of the model"),
            }),
            Some(len) => Ok(len),
            None => Ok(context),
        }
    }

    /// The configuration of the core.
    pub(super) fn core(&self, pages: u32, max_model_len: u32, replicas: usize) -> CoreConfig {
        CoreConfig {
            cache: CacheConfig {
                page_tokens: self.page_size,
                device_pages: vec![pages; replicas],
                policy: self.policy,
                hash_seed: self.hash_seed,
                max_events: self.kv_events.as_ref().map_or(0, |sink| sink.max_events),
                ..CacheConfig::default()
            },
            scheduler: SchedulerConfig {
                replica: ReplicaId(0),
                page_tokens: self.page_size,
                max_running: self.max_running,
                max_queue: self.max_queue,
                step_tokens: self.step_tokens,
                max_model_len,
                policy: self.schedule_policy,
                aging_s: self.aging_s,
                preempt_gap: self.preempt_gap,
                max_in_flight: self.max_in_flight,
                queue_timeout_s: self.queue_timeout_s,
                ..SchedulerConfig::default()
            },
            limits: Limits {
                ceiling: self.ceiling,
            },
        }
    }
}
