//! Ids of pages, tiers, replicas, steps and copies. Plain numbers with a type each; no pool here.

use serde::{Deserialize, Serialize};

/// Index of a page inside one tier. Page 0 is a scratch page for padding and is never handed out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct PageId(u32);

impl PageId {
    /// The page that padding rows may write to. No pool ever hands it out.
    pub const SCRATCH: Self = Self(0);

    /// A page id from its number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The number of the page.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of the page as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One engine with its own device memory. Replicas share the host tier.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct ReplicaId(pub u16);

/// A step of one replica, counted from 1; later steps have larger ids. 0 is before all of them.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct StepId(pub u64);

/// A copy between tiers, unique in one cache.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct CopyId(pub u64);

/// Where the bytes of a page are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum TierId {
    /// Memory that a step of this replica computes on.
    Device(ReplicaId),
    /// Memory of the process, shared by all replicas.
    Host,
    /// Disk or a remote store.
    Storage,
}
