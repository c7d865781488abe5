//! From a configuration to a running engine: the model file is found, memory is sized, the
//! service is started, and the lines that tell about it are written.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rootstock::ServingCore;
use rootstock::journal::JournalLimits;
use rootstock::memory::{KvDtype, without_secrets};
use rootstock::radix::{PolicyKind, WritePolicy};
use rootstock::scheduler::SchedulePolicy;
use rootstock_engine::error::EngineError;
use rootstock_engine::gguf::{Gguf, GgufError};
use rootstock_engine::kernels::{Isa, KernelError};
use rootstock_engine::model_source::{ModelSource, ModelSpec, SourceError};
use rootstock_engine::service::{
    EightBits, JournalSink, KvEventSink, KvNews, ModelInfo, Service, ServiceConfig, StorageConfig,
};

use crate::config::Config;
use crate::control::memory::Memory;
use crate::engine_port::{Engine, TextError};
use crate::kv_events::publisher::{Feed, Publisher};
use crate::options::{EvictionName, KvDtypeName, ScheduleName, WriteName};
use crate::progress::ProgressLine;

/// Cache events between two turns of the core thread, at most.
const KV_EVENTS_MAX: u32 = 1 << 16;

/// What storage has not given after this time is computed.
pub const STORAGE_PATIENCE: Duration = Duration::from_secs(2);

/// A model that is ready to serve.
#[derive(Debug)]
pub struct Loaded {
    /// The engine.
    pub engine: Engine,
    /// What to tell at the start, one fact a line.
    pub lines: Vec<String>,
}

/// A start that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The model is not to be had.
    #[error("--model {spec}: {source}")]
    Source {
        /// What was asked for.
        spec: String,
        /// Why not.
        source: SourceError,
    },
    /// The model file.
    #[error("cannot load the model {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: GgufError,
    },
    /// Its tokenizer or template.
    #[error("cannot use the model {}: {source}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TextError,
    },
    /// A file given for the chat template.
    #[error("--chat-template {}: {source}", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        source: io::Error,
    },
    /// Weights, memory or settings.
    #[error("cannot start the engine: {0}")]
    Engine(#[from] EngineError),
    /// The instruction set asked for.
    #[error("--isa {name}: {source}")]
    Isa {
        /// What was asked for.
        name: &'static str,
        /// Why not.
        source: KernelError,
    },
    /// The journal.
    #[error("cannot write the journal {}: {source}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Loads one model.
#[derive(Debug)]
pub struct Loader {
    config: Config,
    feed: Option<Feed>,
    spec: ModelSpec,
    source: ModelSource,
}

impl Loader {
    /// A loader for the model that the configuration names.
    ///
    /// # Errors
    /// When the name means nothing, or there is no folder to keep downloads in.
    pub fn new(config: Config) -> Result<Loader, LoadError> {
        let failed = |source| LoadError::Source {
            spec: config.model.clone(),
            source,
        };
        let spec: ModelSpec = config.model.parse().map_err(failed)?;
        let source = match spec {
            // A file of the user's needs no folder of ours.
            ModelSpec::File(_) => ModelSource::new(PathBuf::new(), PathBuf::new()),
            ModelSpec::Auto | ModelSpec::Pypi(_) | ModelSpec::Hub(_) => {
                ModelSource::of_user().map_err(failed)?
            }
        };
        Ok(Loader {
            config,
            feed: None,
            spec,
            source,
        })
    }

    /// Tells the publisher what becomes cached and what goes.
    #[must_use]
    pub fn feeding(self, publisher: Option<&Publisher>) -> Loader {
        let feed = publisher.map(Publisher::feed);
        Loader { feed, ..self }
    }

    /// Set it, and a download in progress ends and cleans up.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        self.source.cancel_flag()
    }

    /// Finds the model and starts its engine.
    ///
    /// # Errors
    /// In one line: what failed, with the value and the limit.
    pub fn load(self) -> Result<Loaded, LoadError> {
        let Loader {
            config,
            feed,
            spec,
            source,
        } = self;
        let isa = Isa::parse(config.isa.as_str()).map_err(|source| LoadError::Isa {
            name: config.isa.as_str(),
            source,
        })?;
        // Before anything is downloaded for it.
        Service::check_device(config.device, config.replicas)?;
        let mut line = ProgressLine::new("looking for the model");
        let model = source
            .resolve(&spec, &mut |progress| line.show(progress))
            .map_err(|source| LoadError::Source {
                spec: config.model.clone(),
                source,
            })?;
        drop(line);
        let _line = ProgressLine::new("loading the model");
        start(&model.path, &config, isa, feed)
    }
}

/// A sink that publishes what it is told, if there is a feed, and remembers what went.
pub fn sink(feed: Option<Feed>, memory: Arc<Memory>) -> KvEventSink {
    let mut evicted_before = 0;
    let take = move |news: KvNews<'_>, core: &ServingCore| {
        let stats = core.cache().stats();
        let evicted = stats
            .tiers
            .iter()
            .map(|tier| tier.evicted_pages)
            .sum::<u64>();
        let dropped_only = evicted == evicted_before;
        evicted_before = evicted;
        let name = |ns| core.namespace_key(ns);
        match news {
            KvNews::Changed(events) => {
                memory.hear(events, &stats, dropped_only, core.latest());
                if let Some(feed) = &feed {
                    feed.tell_changes(events, name);
                }
            }
            KvNews::Snapshot(events) => {
                if let Some(feed) = &feed {
                    feed.tell_all(events, name);
                }
            }
        }
    };
    KvEventSink {
        take: Box::new(take),
        max_events: KV_EVENTS_MAX,
    }
}

fn start(path: &Path, config: &Config, isa: Isa, feed: Option<Feed>) -> Result<Loaded, LoadError> {
    let file = Gguf::open(path).map_err(|source| LoadError::File {
        path: path.to_owned(),
        source,
    })?;
    let memory: Arc<Memory> = Arc::default();
    let settings = ServiceConfig {
        kv_events: Some(sink(feed, Arc::clone(&memory))),
        ..service_config(config, isa)?
    };
    let service = Service::start(&file, settings)?;
    let lines = lines(path, config, isa, &service);
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| LoadError::Text { path, source }
    };
    let mut engine = Engine::new(service, &file).map_err(failed(path))?;
    if let Some(path) = &config.chat_template {
        let source = std::fs::read_to_string(path).map_err(|source| LoadError::Template {
            path: path.clone(),
            source,
        })?;
        engine = engine.with_template(&source).map_err(failed(path))?;
    }
    let engine = engine.remembering(memory);
    Ok(Loaded { engine, lines })
}

/// Elements of K and V, and what stands for them where they have 8 bits.
fn kv_types(name: KvDtypeName) -> (KvDtype, Option<EightBits>) {
    match name {
        KvDtypeName::F32 => (KvDtype::F32, None),
        KvDtypeName::F16 => (KvDtype::F16, None),
        KvDtypeName::Bf16 => (KvDtype::Bf16, None),
        KvDtypeName::Fp8 => (KvDtype::F16, Some(EightBits::E4m3)),
        KvDtypeName::Int8 => (KvDtype::F16, Some(EightBits::Int8)),
    }
}

fn service_config(config: &Config, isa: Isa) -> Result<ServiceConfig, LoadError> {
    let (kv_dtype, kv_eight_bits) = kv_types(config.kv_dtype);
    let journal = match &config.journal {
        None => None,
        Some(path) => {
            let writer = File::create(path).map_err(|source| LoadError::Journal {
                path: path.clone(),
                source,
            })?;
            Some(JournalSink {
                writer: Box::new(writer),
                limits: JournalLimits::default(),
            })
        }
    };
    Ok(ServiceConfig {
        kv_cache_mib: config.kv_cache_mib(),
        host_kv_mib: config.host_kv_bytes.map(|bytes| bytes >> 20),
        pin_budget: config.pin_budget,
        write_policy: match config.write_policy {
            WriteName::Through => WritePolicy::Through,
            WriteName::Selective => WritePolicy::Selective,
            WriteName::Back => WritePolicy::Back,
        },
        storage: config.storage.as_ref().map(|uri| StorageConfig {
            uri: uri.clone(),
            quota_mib: config.storage_mib,
            read_timeout: STORAGE_PATIENCE,
        }),
        replicas: config.replicas,
        router: config.router.clone(),
        page_size: config.page_tokens,
        kv_dtype,
        kv_eight_bits,
        threads: config.threads,
        isa: Some(isa),
        device: config.device,
        batch_invariant: config.batch_invariant,
        max_in_flight: config.max_in_flight,
        cuda_graphs: config.cuda_graphs,
        cuda_library: config.cuda_library,
        prompt_lookup: config.prompt_lookup,
        step_tokens: config.step_tokens,
        target_step_ms: config.target_step_ms,
        max_running: config.max_running,
        max_queue: config.max_queue,
        max_model_len: config.max_model_len,
        policy: match config.policy {
            EvictionName::Lru => PolicyKind::Lru,
            EvictionName::Priority => PolicyKind::Priority,
            EvictionName::Lfu => PolicyKind::Lfu,
            EvictionName::Fifo => PolicyKind::Fifo,
            EvictionName::Filo => PolicyKind::Filo,
            EvictionName::Mru => PolicyKind::Mru,
            EvictionName::Slru => PolicyKind::Slru,
            EvictionName::Agent => PolicyKind::Agent,
        },
        schedule_policy: match config.schedule_policy {
            ScheduleName::Fcfs => SchedulePolicy::Fcfs,
            ScheduleName::Lpm => SchedulePolicy::Lpm,
            ScheduleName::DfsWeight => SchedulePolicy::DfsWeight,
            ScheduleName::Lof => SchedulePolicy::Lof,
            ScheduleName::Priority => SchedulePolicy::Priority,
        },
        aging_s: config.aging_s,
        program_wait_s: config.program_wait_s,
        queue_timeout_s: config.queue_timeout_s,
        journal,
        ..ServiceConfig::default()
    })
}

fn lines(path: &Path, config: &Config, isa: Isa, service: &Service) -> Vec<String> {
    let info = service.model_info();
    let mut lines = vec![
        format!("rootstock  {}", crate::about::VERSION),
        format!(
            "model      {} ({} MiB of weights, context {} tokens)",
            info.name,
            info.weight_bytes >> 20,
            info.max_model_len
        ),
        format!("file       {}", path.display()),
        format!(
            "KV cache   {} ({:?})",
            pages(info, info.device_pages),
            config.kv_dtype
        ),
    ];
    if info.max_model_len > info.trained_len {
        lines.push(format!(
            "warning    the model was trained on {} tokens; beyond them its text gets worse",
            info.trained_len
        ));
    }
    lines.push(match info.host_pages {
        0 => "host tier  none".to_owned(),
        host => format!(
            "host tier  {}, pins up to {}",
            pages(info, host),
            percent(config.pin_budget)
        ),
    });
    if let Some(storage) = &config.storage {
        lines.push(format!(
            "storage    {}, at most {} MiB",
            without_secrets(storage),
            config.storage_mib
        ));
    }
    if info.replicas > 1 {
        lines.push(format!(
            "replicas   {}, each with its own KV cache",
            info.replicas
        ));
    }
    lines.push(if info.numerics_id.starts_with("cuda") {
        format!("device     {}", info.numerics_id)
    } else {
        format!("CPU        {}, {} threads", isa.name(), threads(config))
    });
    if let Some(journal) = &config.journal {
        lines.push(format!(
            "journal    {} (holds prompts: keep it private)",
            journal.display()
        ));
    }
    lines
}

fn pages(info: &ModelInfo, pages: u32) -> String {
    let tokens = u64::from(pages) * u64::from(info.page_tokens);
    let mib = (u64::from(pages) * info.page_bytes) >> 20;
    format!(
        "{pages} pages of {} tokens = {tokens} tokens in {mib} MiB",
        info.page_tokens
    )
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// As the engine counts them when none are asked for.
fn threads(config: &Config) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    config.threads.unwrap_or_else(all)
}
