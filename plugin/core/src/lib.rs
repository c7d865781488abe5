//! Rootstock for embedders: a KV-cache and scheduling core for agents, as plain data in and out.
//!
//! Three depths, each usable without the next:
//!
//! 1. **The cache alone**: [`radix::PrefixCache`]. Which token prefix is on which pages, what is
//!    evicted, what is leased. For hosts that schedule themselves.
//! 2. **Cache and scheduler**: [`ServingCore`]. Requests go in, [`scheduler::StepPlan`]s come
//!    out: token ids, positions, page tables. The host computes them on its own KV
//!    (`examples/own_kv.rs`).
//! 3. **A whole engine**: [`ServingCore`] and something that implements [`Backend`]
//!    (`examples/toy_engine.rs`).
//!
//! Beside them, [`hints`] reads what agents say about their requests, and [`journal`] records all
//! inputs of a core and replays them plan for plan.
//!
//! The core has no threads, no clock, no files and no randomness: time is an argument, and equal
//! inputs give equal plans. Every call answers at once; nothing blocks.
//!
//! # The cache alone
//!
//! ```
//! use rootstock::memory::{ReplicaId, TierId};
//! use rootstock::radix::{CacheConfig, Fate, Key, NamespaceKey, PrefixCache, SpanMeta};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (gpu, tokens) = (ReplicaId(0), (0..64).collect::<Vec<u32>>());
//! let config = CacheConfig { device_pages: vec![100], ..CacheConfig::default() };
//! let mut cache = PrefixCache::new(&config)?;
//! let ns = cache.namespace(&NamespaceKey { model: "m".into(), ..Default::default() })?;
//! let mut found = cache.match_lease(Key { ns, tokens: &tokens }, gpu, 63, 0);
//! let (mut room, _) = cache.reserve(TierId::Device(gpu), 4, 0)?; // evicts what is worth least
//! let pages = cache.acquire(&mut room, 4);
//! // ... compute KV onto pages.ids() ...
//! cache.extend(&mut found.lease, &tokens, pages, &SpanMeta::default(), 0);
//! cache.end(found.lease, Fate::Keep, 0);
//! assert_eq!(cache.probe(Key { ns, tokens: &tokens }, gpu).device_tokens, 64);
//! # cache.cancel(room);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod backend;
pub mod config;
pub mod hints;
pub mod journal;
pub mod ledger;
mod replicas;
pub mod serving;

pub use backend::{Backend, Caps, Masks, StepError};
pub use config::{ConfigError, CoreConfig, Limits};
pub use replicas::RouteStats;
pub use serving::{CoreStats, ServingCore};

pub use rootstock_memory as memory;
pub use rootstock_radix as radix;
pub use rootstock_scheduler as scheduler;
pub use rootstock_scheduler::router::RouterConfig;
