//! Starting a service: from a model file, or over any backend.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rootstock::journal::Journal;
use rootstock::memory::{KvArena, KvLayout, ReplicaId};
use rootstock::radix::NamespaceKey;
use rootstock::{Backend, Masks, ServingCore};
use rootstock_kernels::Isa;
use sha2::{Digest, Sha256};

use super::clock::Clock;
use super::config::{DeviceChoice, PageCost};
use super::core_thread::{CoreThread, Port};
use super::engine_thread::EngineThread;
use super::kv_teller::KvTeller;
use super::request::RequestLimits;
use super::stats::Stats;
use super::store::{self, Place, StorageConfig};
use super::watch::Watch;
use super::{Inner, ModelInfo, Service, ServiceConfig, Shared};
use crate::constrained::GrammarMasks;
use crate::cpu_backend::{CpuBackend, CpuBackendConfig, SharedArena};
use crate::error::EngineError;
use crate::gguf::Gguf;
use crate::model::{Model, ModelConfig};

/// Bytes of each tensor that go into the model's fingerprint.
const SAMPLE_BYTES: usize = 4096;

/// What the cache key and the callers must know about a model.
#[derive(Clone, Debug)]
pub struct ModelIdentity {
    /// Name shown to clients.
    pub name: String,
    /// Tells apart models of the same name.
    pub revision: String,
    /// Positions the model was made for.
    pub context: u32,
    /// Bytes of its weights.
    pub weight_bytes: u64,
}

impl ModelIdentity {
    /// Of the model of a file.
    pub(super) fn of(
        file: &Gguf,
        config: &ServiceConfig,
        sizes: &ModelConfig,
        weight_bytes: u64,
    ) -> Self {
        let name = config.model_name.clone();
        Self {
            name: name.unwrap_or_else(|| sizes.name.clone()),
            revision: fingerprint(file),
            context: sizes.context,
            weight_bytes,
        }
    }
}

/// The host tier of a service that has one.
#[derive(Debug, Default)]
pub(super) struct HostTier {
    /// Its bytes: storage needs them.
    pub(super) arena: Option<SharedArena>,
    /// Nanoseconds that a page takes to or from it, where a device was asked.
    pub(super) copy_page_ns: Option<u64>,
}

impl HostTier {
    /// A tier of `pages` pages; none without any.
    pub(super) fn new(layout: KvLayout, pages: u32) -> Result<Self, EngineError> {
        let arena = match pages {
            0 => None,
            pages => Some(Arc::new(Mutex::new(KvArena::new(layout, pages)?))),
        };
        Ok(Self {
            arena,
            copy_page_ns: None,
        })
    }
}

impl Service {
    /// Loads a model onto the CPU, or onto the devices that the settings name, and serves it.
    ///
    /// # Errors
    /// The file or a setting is refused, by name and number.
    pub fn start(file: &Gguf, config: ServiceConfig) -> Result<Self, EngineError> {
        if config.page_size == 0 || config.page_size > 1024 {
            return Err(EngineError::Config {
                setting: "page_size",
                found: config.page_size.to_string(),
                wanted: "1 to 1024 tokens".to_owned(),
            });
        }
        match config.device {
            DeviceChoice::Cpu => Self::start_on_cpu(file, config),
            DeviceChoice::Cuda(first) => start_on_cuda(file, config, first),
            DeviceChoice::Auto => {
                let on_cpu = |config| ServiceConfig {
                    device: DeviceChoice::Cpu,
                    ..config
                };
                match cuda_devices() {
                    Ok(count) if count >= u32::from(config.replicas) => {
                        start_on_cuda(file, config, 0)
                    }
                    Ok(count) => {
                        let replicas = config.replicas;
                        tracing::info!(count, replicas, "fewer CUDA devices than replicas");
                        Self::start_on_cpu(file, on_cpu(config))
                    }
                    Err(reason) => {
                        tracing::info!(%reason, "the CPU computes");
                        Self::start_on_cpu(file, on_cpu(config))
                    }
                }
            }
        }
    }

    /// Says why the device asked for cannot be used, without loading anything.
    ///
    /// # Errors
    /// No such device, with the reason.
    pub fn check_device(device: DeviceChoice, replicas: u16) -> Result<(), EngineError> {
        match device {
            DeviceChoice::Cpu | DeviceChoice::Auto => Ok(()),
            DeviceChoice::Cuda(first) => check_cuda(first, replicas),
        }
    }

    fn start_on_cpu(file: &Gguf, config: ServiceConfig) -> Result<Self, EngineError> {
        if let Some(kind) = config.kv_eight_bits {
            return Err(EngineError::Config {
                setting: "kv_dtype",
                found: format!("{kind:?}").to_lowercase(),
                wanted: "f32, f16 or bf16 where the CPU computes".to_owned(),
            });
        }
        let isa = config.isa.unwrap_or_else(Isa::detect);
        let threads = config.compute_threads();
        let model = Arc::new(Model::load(file, isa, threads)?);
        let sizes = model.config();
        let layout = CpuBackend::layout(sizes, config.page_size, config.kv_dtype)?;
        let tiers = config.pages(layout.page_bytes() as u64, model.weight_bytes())?;
        let identity = ModelIdentity::of(file, &config, sizes, model.weight_bytes());
        let settings = CpuBackendConfig {
            pages: tiers.device,
            page_tokens: config.page_size,
            kv_dtype: config.kv_dtype,
            threads,
            max_in_flight: config.in_flight(),
            ..CpuBackendConfig::default()
        };
        let host = HostTier::new(layout, tiers.host)?;
        let mut backends: Vec<Box<dyn Backend>> = Vec::new();
        for _replica in 0..config.replicas()? {
            let backend = CpuBackend::new(Arc::clone(&model), &settings, host.arena.clone())?;
            backends.push(Box::new(backend));
        }
        Self::start_over(config.with(tiers), backends, identity, host)
    }

    /// Serves over given backends, one a replica. `config.device_pages` says how many pages each
    /// has; without it the memory settings decide. `config.host_pages` says how many pages of a
    /// host tier their copy engines share; without it there is none.
    ///
    /// # Errors
    /// A setting is refused, or a thread cannot be started.
    pub fn start_with(
        config: ServiceConfig,
        backends: Vec<Box<dyn Backend>>,
        identity: ModelIdentity,
    ) -> Result<Self, EngineError> {
        Self::start_over(config, backends, identity, HostTier::default())
    }

    /// The same, with the host tier where it is ours.
    pub(super) fn start_over(
        mut config: ServiceConfig,
        backends: Vec<Box<dyn Backend>>,
        identity: ModelIdentity,
        host: HostTier,
    ) -> Result<Self, EngineError> {
        let caps = backends
            .first()
            .map(|backend| backend.caps())
            .ok_or_else(no_backend)?;
        let max_in_flight = config.in_flight().clamp(1, caps.max_in_flight.max(1));
        config.max_in_flight = Some(max_in_flight);
        config.page_size = caps.layout.page_tokens();
        let page_bytes = caps.layout.page_bytes() as u64;
        config.host_pages.get_or_insert(0);
        config.replicas = u16::try_from(backends.len()).unwrap_or(u16::MAX);
        let tiers = config.pages(page_bytes, identity.weight_bytes)?;
        let page = PageCost::of(&caps.layout, host.copy_page_ns);
        let max_model_len = config.model_len(identity.context);
        let mut core_config = config.core(tiers, page, max_model_len);
        core_config.scheduler.overtake = backends.iter().all(|backend| backend.can_pause());
        core_config.scheduler.begin_in_transit =
            backends.iter().all(|backend| backend.orders_layers());
        core_config.scheduler.late_history =
            backends.iter().all(|backend| backend.completes_histories());
        if !backends.iter().all(|backend| backend.verifies()) {
            core_config.scheduler.max_drafts = 0;
        }
        let mut core = ServingCore::new(core_config)?;
        if let Some(sink) = config.journal.take() {
            let journal = Journal::new(sink.writer, core.config(), sink.limits)?;
            core.set_journal(Some(journal));
        }
        let info = ModelInfo {
            name: identity.name,
            max_model_len,
            trained_len: identity.context,
            vocab: caps.vocab,
            numerics_id: caps.numerics_id.clone(),
            page_tokens: caps.layout.page_tokens(),
            replicas: config.replicas,
            device_pages: tiers.device,
            host_pages: tiers.host,
            page_bytes,
            weight_bytes: identity.weight_bytes,
        };
        let place = Place {
            host: host.arena,
            layout: caps.layout,
            numerics: caps.numerics_id.clone(),
        };
        let namespace = NamespaceKey {
            model: identity.revision,
            numerics: caps.numerics_id,
            lora: None,
            salt: None,
        };
        let max_queue = config.max_queue;
        let limits = RequestLimits {
            vocab: caps.vocab,
            max_model_len,
            max_queue,
        };
        spawn(
            core,
            backends,
            max_in_flight,
            Parts {
                info,
                limits,
                namespace,
                kv_events: config.kv_events.map(KvTeller::new),
                storage: config.storage,
                place,
            },
        )
    }
}

struct Parts {
    info: ModelInfo,
    limits: RequestLimits,
    namespace: NamespaceKey,
    kv_events: Option<KvTeller>,
    storage: Option<StorageConfig>,
    place: Place,
}

/// The masks of grammars, which all backends ask; None when one of them cannot apply them.
fn share_masks(
    backends: &mut [Box<dyn Backend>],
) -> Result<Option<Arc<GrammarMasks>>, EngineError> {
    let masks = GrammarMasks::start().map_err(|source| EngineError::Thread {
        thread: "rootstock-masks",
        source,
    })?;
    let masks = Arc::new(masks);
    let mut all_apply = true;
    for backend in backends {
        all_apply &= backend.use_masks(Arc::clone(&masks) as Arc<dyn Masks>);
    }
    Ok(all_apply.then_some(masks))
}

fn spawn(
    core: ServingCore,
    mut backends: Vec<Box<dyn Backend>>,
    max_in_flight: u8,
    parts: Parts,
) -> Result<Service, EngineError> {
    let clock = Clock::start();
    let shared = Arc::new(Shared::default());
    // Room for a full queue's worth of submissions on top of what engines and tickets say.
    let (inbox, messages) = flume::bounded(parts.limits.max_queue as usize + 64);
    let mut threads = Vec::new();
    let mut ports = Vec::new();
    if let Some(masks) = share_masks(&mut backends)? {
        let _first = shared.masks.set(masks);
    }
    for (index, backend) in (0_u16..).zip(backends) {
        let replica = ReplicaId(index);
        // One more for a step that overtakes.
        let (plans, work) = flume::bounded(usize::from(max_in_flight) + 1);
        let inbox = inbox.clone();
        let pause = Arc::new(AtomicBool::new(false));
        let engine = EngineThread {
            backend,
            replica,
            plans: work,
            pause: Arc::clone(&pause),
            inbox,
            clock,
        };
        threads.push(start_thread("rootstock-engine", move || engine.run())?);
        ports.push(Port {
            replica,
            plans,
            pause,
            flying: VecDeque::new(),
        });
    }
    let storage = match &parts.storage {
        Some(config) => Some(store::open(config, &parts.place, store::waker(&inbox))?),
        None => None,
    };
    let mut core = CoreThread {
        core,
        clock,
        inbox: messages,
        ports,
        shared: Arc::clone(&shared),
        namespace: parts.namespace,
        live: BTreeMap::new(),
        next_label: 1,
        stats: Stats::default(),
        emits: Vec::new(),
        outgoing: Vec::new(),
        when_idle: Vec::new(),
        kv_events: parts.kv_events,
        storage,
        watch: Watch::default(),
        dirty: false,
    };
    // Whoever has the service finds its counters, before the first turn too.
    core.publish(true);
    threads.push(start_thread("rootstock-core", move || core.run())?);
    let inner = Inner {
        inbox,
        shared,
        info: parts.info,
        limits: parts.limits,
        place: parts.place,
        threads: Mutex::new(threads),
    };
    Ok(Service {
        inner: Arc::new(inner),
    })
}

fn start_thread(
    name: &'static str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, EngineError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map_err(|source| EngineError::Thread {
            thread: name,
            source,
        })
}

pub(super) fn no_backend() -> EngineError {
    EngineError::Config {
        setting: "backends",
        found: "0".to_owned(),
        wanted: "at least 1".to_owned(),
    }
}

#[cfg(feature = "cuda")]
use super::start_cuda::{check_cuda, cuda_devices, start_on_cuda};

#[cfg(not(feature = "cuda"))]
fn no_cuda() -> EngineError {
    EngineError::Config {
        setting: "device",
        found: "cuda".to_owned(),
        wanted: "cpu, because this program was built without CUDA".to_owned(),
    }
}

#[cfg(not(feature = "cuda"))]
fn check_cuda(_first: u32, _replicas: u16) -> Result<(), EngineError> {
    Err(no_cuda())
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<u32, EngineError> {
    Err(no_cuda())
}

#[cfg(not(feature = "cuda"))]
fn start_on_cuda(
    _file: &Gguf,
    _config: ServiceConfig,
    _first: u32,
) -> Result<Service, EngineError> {
    Err(no_cuda())
}

/// Tells models apart by header and a sample of each tensor; the same file always gives the same.
fn fingerprint(file: &Gguf) -> String {
    let mut hash = Sha256::new();
    for (key, value) in file.values() {
        hash.update(key.as_bytes());
        hash.update(format!("{value:?}").as_bytes());
    }
    for info in file.tensors() {
        hash.update(format!("{info:?}").as_bytes());
        if let Some(tensor) = file.tensor(info.name()) {
            let end = tensor.data.len().min(SAMPLE_BYTES);
            hash.update(tensor.data.get(..end).unwrap_or_default());
            let start = tensor.data.len() - end;
            hash.update(tensor.data.get(start..).unwrap_or_default());
        }
    }
    hash.finalize()
        .iter()
        .take(16)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
