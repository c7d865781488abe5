//! Pages, tiers and copy plans: plain bookkeeping of the KV pool.
//!
//! A *page* is `page_tokens` consecutive token slots over all layers, the unit of allocation.
//! A *tier* is where a page's bytes are. [`PagePool`] counts and hands out the pages of one
//! tier, [`KvLayout`] says where a slot's bytes lie, [`CopyPlan`] describes a copy between tiers
//! as data, and [`KvArena`] holds the bytes of a tier that lives in this process's memory.
//!
//! This crate has no threads, no clock, no files and no randomness: time is an argument, and the
//! same calls give the same pages. The exception is the feature `storage`: a worker thread that
//! carries out [`StorePlan`]s on a folder or a remote store.
#![forbid(unsafe_code)]

mod arena;
mod layout;
mod page;
mod plan;
mod pool;
#[cfg(feature = "storage")]
pub mod storage;
mod store;

pub use arena::{ArenaError, KvArena};
pub use layout::{KvDtype, KvLayout, KvSide, KvSlot, LayoutError, LayoutOrder, LayoutSpec};
pub use page::{CopyId, PageId, ReplicaId, StepId, TierId};
pub use plan::{CopyClass, CopyDone, CopyEngine, CopyPlan, Full};
pub use pool::{Corruption, PagePool, Pages, Reservation};
pub use store::{
    PageAddress, StoreEngine, StoreEvent, StoreOp, StorePage, StorePlan, StoreStats,
    without_secrets,
};

/// Nanoseconds of a monotonic clock, passed by the caller to everything that needs time.
pub type Nanos = u64;
