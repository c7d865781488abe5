//! Sizes and choices of a cache, checked once at construction.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// In which order pages go when room is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PolicyKind {
    /// Least recently used first.
    Lru,
    /// Lowest priority first, then least recently used.
    Priority,
    /// Fewest matches first, then least recently used.
    Lfu,
    /// What came in first goes first.
    Fifo,
    /// What came in last goes first.
    Filo,
    /// Most recently used first.
    Mru,
    /// What was never matched first, then least recently used.
    Slru,
    /// What brings the fewest uses per second of memory first, learned from the load and from
    /// what requests say; never for long worse than `Lru`.
    #[default]
    Agent,
}

/// When device pages are copied to the host tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// When the request that computed them ends.
    Through,
    /// When a request ends that shares them with two others or more; and what has a priority above
    /// 0 when the device needs the room.
    #[default]
    Selective,
    /// When the device needs the room.
    Back,
}

/// Sizes and choices.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheConfig {
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers that a copy plan names.
    pub layers: u16,
    /// Usable device pages of each replica.
    pub device_pages: Vec<u32>,
    /// Usable host pages; 0 is no host tier.
    pub host_pages: u32,
    /// Pages in storage that are known at most; 0 is no storage tier.
    pub storage_pages: u32,
    /// Pages a request that are looked for in storage although they are not known to be there: for
    /// stores that cannot be listed, or that others write to.
    pub storage_probes: u32,
    /// Eviction order.
    pub policy: PolicyKind,
    /// When device pages go to the host tier.
    pub write_policy: WritePolicy,
    /// Share of the host tier (of the device tier when there is none) that pins may hold.
    pub pin_budget: f64,
    /// Seed of the child table.
    pub hash_seed: u64,
    /// Most tree nodes. Beyond it nothing new is cached, requests run on.
    pub max_nodes: u32,
    /// Most copies under way.
    pub max_copies: u32,
    /// Most events that wait to be fetched; 0 makes none and costs nothing.
    pub max_events: u32,
    /// Most namespaces with cached or leased pages at a time.
    pub max_namespaces: u32,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            page_tokens: 16,
            layers: 1,
            device_pages: vec![1024],
            host_pages: 0,
            storage_pages: 0,
            storage_probes: 0,
            policy: PolicyKind::Agent,
            write_policy: WritePolicy::Selective,
            pin_budget: 0.5,
            hash_seed: 0x5eed,
            max_nodes: 1 << 20,
            max_copies: 64,
            max_events: 0,
            max_namespaces: 4096,
        }
    }
}

/// A cache or namespace that cannot be made.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A size that must be within bounds is not.
    #[error("{field} is {value}, expected {min} to {max}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What was given.
        value: u64,
        /// Least accepted.
        min: u64,
        /// Most accepted.
        max: u64,
    },
    /// The pin budget is no share.
    #[error("pin_budget is {value}, expected 0 to 1")]
    PinBudget {
        /// What was given.
        value: f64,
    },
    /// Storage without the tier that its pages pass through.
    #[error("storage_pages is {storage_pages} and host_pages 0: storage needs a host tier")]
    StorageWithoutHost {
        /// What was given.
        storage_pages: u32,
    },
    /// All namespaces are in use.
    #[error("{limit} namespaces are in use, raise max_namespaces or use fewer salts")]
    NamespacesFull {
        /// The limit.
        limit: u32,
    },
}

impl CacheConfig {
    /// Checks every number.
    ///
    /// # Errors
    /// The first number that cannot be, with its bounds.
    pub fn validate(&self) -> Result<(), CacheError> {
        const PAGES_MAX: u64 = 1 << 30;
        let sizes = [
            ("page_tokens", u64::from(self.page_tokens), 1, 1 << 16),
            ("layers", u64::from(self.layers), 1, u64::from(u16::MAX)),
            (
                "device_pages (replicas)",
                self.device_pages.len() as u64,
                1,
                256,
            ),
            ("host_pages", u64::from(self.host_pages), 0, PAGES_MAX),
            ("storage_pages", u64::from(self.storage_pages), 0, PAGES_MAX),
            ("max_copies", u64::from(self.max_copies), 1, 1 << 15),
            ("max_events", u64::from(self.max_events), 0, 1 << 24),
            ("max_nodes", u64::from(self.max_nodes), 1, 1 << 30),
            ("max_namespaces", u64::from(self.max_namespaces), 1, 1 << 24),
        ];
        let devices = self
            .device_pages
            .iter()
            .map(|&n| ("device_pages", n.into(), 1, PAGES_MAX));
        for (field, value, min, max) in sizes.into_iter().chain(devices) {
            if value < min || value > max {
                return Err(CacheError::OutOfRange {
                    field,
                    value,
                    min,
                    max,
                });
            }
        }
        if !(0.0..=1.0).contains(&self.pin_budget) {
            return Err(CacheError::PinBudget {
                value: self.pin_budget,
            });
        }
        if self.storage_pages > 0 && self.host_pages == 0 {
            let storage_pages = self.storage_pages;
            return Err(CacheError::StorageWithoutHost { storage_pages });
        }
        Ok(())
    }
}
