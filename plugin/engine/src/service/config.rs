//! Settings of a service, and the configuration of the core that follows from them.

use std::io::Write;

use rootstock::hints::Ceiling;
use rootstock::journal::JournalLimits;
use rootstock::memory::{KvDtype, KvLayout, ReplicaId};
use rootstock::radix::{CacheConfig, KvEvent, PolicyKind, WritePolicy};
use rootstock::scheduler::{SchedulePolicy, SchedulerConfig};
use rootstock::{CoreConfig, Limits, RouterConfig, ServingCore};
use rootstock_kernels::Isa;

use super::memory;
use super::store::{self, StorageConfig};
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

/// Most replicas of one service.
const REPLICAS_MAX: u16 = 64;

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// CUDA devices from this number on, one a replica.
    Cuda(u32),
    /// CUDA devices if there are as many as replicas, else the CPU.
    Auto,
}

/// Types of 8 bits of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EightBits {
    /// Floats with 4 bits of exponent and 3 of fraction.
    E4m3,
    /// Integers.
    Int8,
}

/// Pages that a request looks for in storage at a time although nobody told of them: others may
/// write to the same store.
pub(super) const STORAGE_PROBES: u32 = 64;

/// Hand-over, look at the queue and acknowledgement of a copy, between threads of the CPU.
const COPY_NS: u32 = 300_000;
/// Without a device that says better: two arenas in the same memory, one thread, beside a step that
/// computes.
const COPY_BYTES_PER_NS: u64 = 2;

/// Usable pages of each tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiers {
    /// Of each replica.
    pub(super) device: u32,
    /// Of the process; 0 is no host tier.
    pub(super) host: u32,
}

/// What the core has to know of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCost {
    pub(super) layers: u16,
    pub(super) bytes: u64,
    /// Nanoseconds to copy it between device and host.
    pub(super) copy_ns: u32,
}

impl PageCost {
    /// Of pages of a layout; `copy_ns` is what a copy was measured to take.
    pub(super) fn of(layout: &KvLayout, copy_ns: Option<u64>) -> Self {
        let copy_ns = copy_ns.unwrap_or(layout.page_bytes() as u64 / COPY_BYTES_PER_NS);
        Self {
            layers: u16::try_from(layout.layers()).unwrap_or(u16::MAX),
            bytes: layout.page_bytes() as u64,
            copy_ns: u32::try_from(copy_ns).unwrap_or(u32::MAX),
        }
    }
}

fn page_count(bytes: u64, page_bytes: u64) -> u32 {
    u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX - 1)
}

/// Settings of a service.
#[derive(Debug)]
pub struct ServiceConfig {
    /// Memory of each replica's device tier in MiB; None: the replicas share 40 % of what is free,
    /// at most 8 GiB.
    pub kv_cache_mib: Option<u64>,
    /// Exact number of device pages of each replica, instead of `kv_cache_mib`.
    pub device_pages: Option<u32>,
    /// Memory of the host tier in MiB, 0 for none; None: twice the device tiers, at most a quarter
    /// of what is free.
    pub host_kv_mib: Option<u64>,
    /// Exact number of host pages, instead of `host_kv_mib`; 0 is no host tier.
    pub host_pages: Option<u32>,
    /// Share of the host tier (of the device tier when there is none) that pins may hold, 0 to 1.
    pub pin_budget: f64,
    /// When device pages are copied to the host tier.
    pub write_policy: WritePolicy,
    /// Copies between tiers count as free: what is on host is never computed anew, even where
    /// that is quicker.
    pub free_copies: bool,
    /// Engines over the same weights and the same host tier.
    pub replicas: u16,
    /// Which of them a request goes to; sizes are taken from the other settings.
    pub router: RouterConfig,
    /// Tokens a page.
    pub page_size: u32,
    /// Element type of K and V.
    pub kv_dtype: KvDtype,
    /// On CUDA: K and V of 8 bits, with a scale a slot, instead of `kv_dtype`.
    pub kv_eight_bits: Option<EightBits>,
    /// Threads that compute; None: one a core.
    pub threads: Option<usize>,
    /// Instruction set; None: the best of this CPU.
    pub isa: Option<Isa>,
    /// What computes.
    pub device: DeviceChoice,
    /// On CUDA: a token's bits depend on nothing that shares its step, at some cost. The CPU is
    /// always so.
    pub batch_invariant: bool,
    /// Steps in flight, 1 or 2; None: two on CUDA, where the next one is planned and queued while
    /// the device computes, else one.
    pub max_in_flight: Option<u8>,
    /// On CUDA: graphs of decode steps at most, for each step in flight.
    pub cuda_graphs: u32,
    /// On CUDA: large products by cuBLASLt, where it is installed and bits may depend on company.
    pub cuda_library: bool,
    /// Tokens that a request may guess from its own text and verify in one step, where that pays;
    /// 0 is off. On the CPU; other backends do not verify guesses.
    pub prompt_lookup: u8,
    /// Tokens a step may compute.
    pub step_tokens: u32,
    /// Milliseconds a step should take, by what earlier steps took; 0: `step_tokens` alone.
    pub target_step_ms: u32,
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
    /// Seconds for which programs that do not fit the cache together wait at most; 0: not at all.
    pub program_wait_s: f64,
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
    /// Keeps pages beyond the process.
    pub storage: Option<StorageConfig>,
    /// Name of the model; None: what the file says.
    pub model_name: Option<String>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        let scheduler = SchedulerConfig::default();
        Self {
            kv_cache_mib: None,
            device_pages: None,
            host_kv_mib: None,
            host_pages: None,
            pin_budget: CacheConfig::default().pin_budget,
            write_policy: WritePolicy::default(),
            free_copies: false,
            replicas: 1,
            router: RouterConfig::default(),
            page_size: 16,
            kv_dtype: KvDtype::F16,
            kv_eight_bits: None,
            threads: None,
            isa: None,
            device: DeviceChoice::Cpu,
            batch_invariant: false,
            max_in_flight: None,
            cuda_graphs: 64,
            cuda_library: true,
            prompt_lookup: 8,
            step_tokens: scheduler.step_tokens,
            target_step_ms: scheduler.target_step_ms,
            max_running: scheduler.max_running,
            max_queue: scheduler.max_queue,
            max_model_len: None,
            policy: PolicyKind::Agent,
            schedule_policy: scheduler.policy,
            aging_s: scheduler.aging_s,
            program_wait_s: scheduler.program_wait_s,
            preempt_gap: scheduler.preempt_gap,
            queue_timeout_s: scheduler.queue_timeout_s,
            hash_seed: 0,
            ceiling: Ceiling::default(),
            journal: None,
            kv_events: None,
            storage: None,
            model_name: None,
        }
    }
}

impl ServiceConfig {
    /// Threads of each replica's engine.
    pub(super) fn compute_threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let all = self.threads.unwrap_or_else(cores).clamp(1, 256);
        (all / usize::from(self.replicas.max(1))).max(1)
    }

    /// Steps in flight of a backend that computes on the thread that launches, unless asked for
    /// otherwise.
    pub(super) fn in_flight(&self) -> u8 {
        self.max_in_flight.unwrap_or(1)
    }

    /// Replicas asked for.
    ///
    /// # Errors
    /// None, or more than a core can have.
    pub(super) fn replicas(&self) -> Result<u16, EngineError> {
        if (1..=REPLICAS_MAX).contains(&self.replicas) {
            return Ok(self.replicas);
        }
        Err(EngineError::Config {
            setting: "replicas",
            found: self.replicas.to_string(),
            wanted: format!("1 to {REPLICAS_MAX}"),
        })
    }

    /// Pages of the tiers, for pages of `page_bytes` beside `weight_bytes` of weights.
    ///
    /// # Errors
    /// The memory asked for holds no page, or is more than the system has.
    pub(super) fn pages(&self, page_bytes: u64, weight_bytes: u64) -> Result<Tiers, EngineError> {
        let free = memory::available();
        let replicas = u64::from(self.replicas()?);
        let page_bytes = page_bytes.max(1);
        let device = match (self.device_pages, self.kv_cache_mib) {
            (Some(pages), _) => pages,
            (None, Some(mib)) => page_count(mib.saturating_mul(memory::MIB), page_bytes),
            (None, None) => page_count(memory::device_default(free) / replicas, page_bytes),
        };
        if device == 0 {
            return Err(EngineError::Config {
                setting: "kv_cache_mib",
                found: self.kv_cache_mib.unwrap_or_default().to_string(),
                wanted: format!(
                    "at least {} MiB, one page of {} tokens",
                    page_bytes.div_ceil(memory::MIB),
                    self.page_size
                ),
            });
        }
        let device_bytes = match self.device {
            DeviceChoice::Cpu => u64::from(device) * page_bytes * replicas,
            // Elsewhere than in the memory of this process.
            DeviceChoice::Cuda(_) | DeviceChoice::Auto => 0,
        };
        let host = match (self.host_pages, self.host_kv_mib) {
            (Some(pages), _) => pages,
            (None, Some(mib)) => page_count(mib.saturating_mul(memory::MIB), page_bytes),
            (None, None) => {
                let device_bytes = u64::from(device) * page_bytes * replicas;
                page_count(memory::host_default(free, device_bytes), page_bytes)
            }
        };
        if let Some(storage) = self.storage.as_ref().filter(|_| host == 0) {
            return Err(store::without_host(storage));
        }
        let wanted = device_bytes + u64::from(host) * page_bytes;
        match free {
            Some(free) if wanted > free => Err(EngineError::Memory {
                wanted_mib: wanted / memory::MIB,
                weights_mib: weight_bytes / memory::MIB,
                available_mib: free / memory::MIB,
            }),
            Some(_) | None => Ok(Tiers { device, host }),
        }
    }

    /// The same, with tiers of these sizes.
    pub(super) fn with(self, tiers: Tiers) -> Self {
        Self {
            device_pages: Some(tiers.device),
            host_pages: Some(tiers.host),
            ..self
        }
    }

    /// Longest request, for a model that was trained on `context` positions. Positions are angles,
    /// which have no end: more may be asked for, and what is said there gets worse.
    pub(super) fn model_len(&self, context: u32) -> u32 {
        self.max_model_len.unwrap_or(context)
    }

    /// The configuration of the core.
    pub(super) fn core(&self, tiers: Tiers, page: PageCost, max_model_len: u32) -> CoreConfig {
        CoreConfig {
            cache: CacheConfig {
                page_tokens: self.page_size,
                layers: page.layers,
                device_pages: vec![tiers.device; usize::from(self.replicas)],
                host_pages: tiers.host,
                storage_pages: self.storage.as_ref().map_or(0, |to| to.pages(page.bytes)),
                storage_probes: self.storage.as_ref().map_or(0, |_| STORAGE_PROBES),
                pin_budget: self.pin_budget,
                write_policy: self.write_policy,
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
                target_step_ms: self.target_step_ms,
                max_model_len,
                policy: self.schedule_policy,
                aging_s: self.aging_s,
                program_wait_s: self.program_wait_s,
                preempt_gap: self.preempt_gap,
                max_in_flight: self.in_flight(),
                max_drafts: self.prompt_lookup,
                prompt_lookup: true,
                queue_timeout_s: self.queue_timeout_s,
                copy_ns: if self.free_copies { 0 } else { COPY_NS },
                copy_ns_per_page: if self.free_copies { 0 } else { page.copy_ns },
                ..SchedulerConfig::default()
            },
            limits: Limits {
                ceiling: self.ceiling,
            },
            router: self.router.clone(),
        }
    }
}
