//! Radix-tree prefix cache: which token prefix is on which pages, and what is worth keeping.
//!
//! Hosts embed [`PrefixCache`]: one tree over all namespaces and replicas, the page pools of the
//! tiers, and the eviction order, under one conservation law. A request matches its longest
//! cached prefix and holds it by a [`Lease`]; what it computes goes in by
//! [`PrefixCache::extend`]; pages come from [`PrefixCache::reserve`], which evicts what is worth
//! least.
//!
//! This crate has no threads, no clock, no files and no randomness: time and seeds are arguments,
//! and the same calls give the same pages.
#![forbid(unsafe_code)]

mod act;
mod address;
mod cache;
mod check;
mod config;
mod copies;
mod edge;
mod end;
mod event;
mod explain;
mod extend;
mod hints;
mod key;
mod lease;
mod namespace;
mod node;
mod order;
mod peek;
mod picture;
mod pin;
mod policy;
mod program;
mod result;
mod retain;
mod room;
pub mod slots;
mod stats;
mod storage;
mod table;
mod tier;
mod tree;
mod under_way;
mod whole;

pub use act::{ActReason, Action, Outcome, Target};
pub use cache::PrefixCache;
pub use config::{CacheConfig, CacheError, PolicyKind, WritePolicy};
pub use event::{EventTier, KvEvent, StoredPage, sequence_hashes};
pub use explain::{Ghost, Ghosts, Nearest, Outline};
pub use hints::{ContextKind, Dedup, Fate, Hints, Retention, SpanMeta, Ttl};
pub use key::{Key, NamespaceId, NamespaceKey, ProgramId, TenantId, Token};
pub use lease::Lease;
pub use picture::{NodeRef, Part, Picture, PictureLimits, ProgramPlace};
pub use policy::agent::{CurvePoint, Duel, HitCurve};
pub use program::{ProgramStats, Returns, Served};
pub use result::{Extended, FlushRefused, Match, Probe, Room, Short};
pub use rootstock_memory::Corruption;
pub use stats::{CacheStats, TierStats};
pub use whole::ProgramPages;
