//! Counts that the cache reports. Counters only grow; gauges are the state now.

use crate::{Duel, HitCurve, Returns};
use rootstock_memory::TierId;
use serde::{Deserialize, Serialize};

/// State of one tier. `free + evictable + leased + held + in_transit = total`, always.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TierStats {
    /// Which.
    pub tier: TierId,
    /// Usable pages.
    pub total: u32,
    /// Neither reserved nor used.
    pub free: u32,
    /// Cached, and nothing keeps them.
    pub evictable: u32,
    /// Cached, and leased by requests or copies.
    pub leased: u32,
    /// Reserved or owned by requests, or waiting for a step to end.
    pub held: u32,
    /// Destinations of copies in flight.
    pub in_transit: u32,
    /// Counter: tokens that lookups found here.
    pub hit_tokens: u64,
    /// Counter: pages evicted for room.
    pub evicted_pages: u64,
    /// Counter: pages dropped because their request ended as ephemeral.
    pub dropped_pages: u64,
}

/// State of the cache.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheStats {
    /// Devices in the order of replicas, then the lower tiers.
    pub tiers: Vec<TierStats>,
    /// Nodes of the tree, roots included.
    pub nodes: u32,
    /// Namespaces known.
    pub namespaces: u32,
    /// Leases that live.
    pub leases: u32,
    /// Counter: calls of `match_lease`.
    pub lookups: u64,
    /// Counter: tokens asked for in them.
    pub lookup_tokens: u64,
    /// Counter: pages not cached because `max_nodes` was reached.
    pub uncached_pages: u64,
    /// Programs known.
    pub programs: u32,
    /// What was brought up for programs that were expected.
    pub returns: Returns,
    /// The duel of policy `agent` with least recently used; absent with other policies.
    pub duel: Option<Duel>,
    /// Expected hits over capacity with policy `agent`; absent with other policies.
    pub curve: Option<HitCurve>,
    /// Copies that are not acknowledged.
    pub copies_under_way: u32,
    /// Counter: copies that failed.
    pub copies_failed: u64,
    /// Counter: pages that copies brought from devices to host.
    pub copied_down_pages: u64,
    /// Counter: pages that copies brought from host to devices.
    pub copied_up_pages: u64,
    /// Counter: acknowledgements of copies that were not under way.
    pub copies_stray: u64,
    /// Distinct pages pinned.
    pub pinned_pages: u32,
    /// Most pages that may be pinned.
    pub pin_budget_pages: u32,
    /// Nodes whose importance ends with idle time.
    pub retained_nodes: u32,
    /// Counter: pins that gave way before their deadline.
    pub pins_yielded: u64,
    /// Counter: releases that named a page which was not out.
    pub stray_releases: u64,
}
