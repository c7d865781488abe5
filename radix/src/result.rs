//! Answers of the cache as plain values.

use crate::Lease;
use rootstock_memory::{CopyPlan, PageId};
use thiserror::Error;

/// How much of a prefix is cached where. The parts follow each other and do not overlap; each is
/// a multiple of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Probe {
    /// Tokens on the device of the replica asked for.
    pub device_tokens: u32,
    /// Tokens after those, on host.
    pub host_tokens: u32,
    /// Tokens after those, in storage.
    pub storage_tokens: u32,
}

/// A match and the lease that keeps it.
#[derive(Debug)]
#[must_use = "the lease must be ended"]
pub struct Match {
    /// Keeps the device part.
    pub lease: Lease,
    /// Tokens on the device.
    pub device_tokens: u32,
    /// Tokens after those, on host.
    pub host_tokens: u32,
    /// Of those, the ones that were read from storage and have not been used since: its hits.
    pub read_tokens: u32,
    /// Tokens after those on host, in storage.
    pub storage_tokens: u32,
}

/// What became of computed pages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Extended {
    /// Pages that went into the cache.
    pub inserted_pages: u32,
    /// Entries of the caller's page table that change: page index in the request, cached page.
    /// The duplicates are already released or wait for `busy_until`.
    pub swapped: Vec<(u32, PageId)>,
}

/// Room was made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Room {
    /// Pages freed by this call.
    pub freed_pages: u32,
    /// Copies to start.
    pub copies: Vec<CopyPlan>,
    /// Pins that gave way.
    pub pins_yielded: u32,
}

/// Not enough room, and nothing was evicted for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Error)]
#[error(
    "{needed_pages} pages needed: {free_pages} free, {evictable_pages} evictable, \
     {in_transit_pages} in transit"
)]
pub struct Short {
    /// Pages asked for.
    pub needed_pages: u32,
    /// Pages free.
    pub free_pages: u32,
    /// Pages cached and not leased.
    pub evictable_pages: u32,
    /// Pages that copies in flight will free or fill: ask again after their acknowledgement.
    pub in_transit_pages: u32,
}

/// The cache is in use; nothing was cleared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "flush refused: {leases} leases, {held_pages} pages held by requests, \
     {in_transit_pages} in transit; ask again when idle"
)]
pub struct FlushRefused {
    /// Leases that live.
    pub leases: u32,
    /// Pages held by requests.
    pub held_pages: u32,
    /// Pages in transit.
    pub in_transit_pages: u32,
}
