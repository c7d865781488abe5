//! One policy at one capacity, on the cache that serves requests.
//!
//! A block is a page of one token, and its number is that token: equal prefixes of blocks become
//! equal prefixes of tokens, exactly. Requests run one after another, each from match to end, as
//! the offline optimum takes them. With a host tier, evicted blocks are copied down and found
//! blocks are copied up; with a storage tier what comes to host is written there, and read where
//! host has it no more. The store forgets what was written longest ago. Copies take no time. Own.

use std::collections::VecDeque;

use rootstock::memory::{
    CopyDone, CopyPlan, PageAddress, ReplicaId, Reservation, StoreEvent, StoreOp, TierId,
};
use rootstock::radix::{
    CacheConfig, Fate, Hints, HitCurve, Key, Lease, NamespaceId, NamespaceKey, PolicyKind,
    PrefixCache, SpanMeta, TenantId, WritePolicy,
};

use super::error::ReplayError;
use super::tally::{Found, Tally};
use super::ticker::Ticker;
use super::trace::Trace;

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);

/// Nodes beside those that hold pages: the root of the one namespace.
const SPARE_NODES: u32 = 16;

/// Reads of one prompt from storage, one after the other, at most.
const READS_MAX: u32 = 64;

/// Blocks that fit on the device, on host and into storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) device: u32,
    pub(crate) host: u32,
    pub(crate) storage: u32,
}

/// Tells `tally` the blocks that `policy` hits with `room`; what it expects of other capacities.
///
/// A prompt longer than the device keeps as many of its first blocks as fit.
///
/// # Errors
/// The cache refuses its configuration, or breaks its contract.
pub(crate) fn run(
    trace: &Trace,
    policy: PolicyKind,
    room: Room,
    tally: &mut Tally<'_>,
    ticker: &mut Ticker,
) -> Result<Option<HitCurve>, ReplayError> {
    let config = CacheConfig {
        page_tokens: 1,
        device_pages: vec![room.device],
        host_pages: room.host,
        storage_pages: room.storage,
        write_policy: WritePolicy::Back,
        policy,
        max_nodes: (room.device + room.host).saturating_add(SPARE_NODES),
        ..CacheConfig::default()
    };
    let mut cache = PrefixCache::new(&config)?;
    let ns = cache.namespace(&NamespaceKey::default())?;
    let mut served = Served {
        cache,
        ns,
        room,
        stored: VecDeque::new(),
    };
    for request in 0..trace.len() {
        let hints = trace.hints(request);
        let found = served.request(trace.path(request), hints, trace.arrival_ns(request));
        let found = found.map_err(|what| ReplayError::Broken { request, what })?;
        tally.add(request, found);
        ticker.tick();
    }
    Ok(served.cache.stats().curve)
}

struct Served {
    cache: PrefixCache,
    ns: NamespaceId,
    room: Room,
    /// In storage, what was written longest ago first.
    stored: VecDeque<PageAddress>,
}

impl Served {
    /// One request from match to end; the blocks found.
    fn request(
        &mut self,
        path: &[u32],
        hints: Option<&Hints>,
        now_ns: u64,
    ) -> Result<Found, &'static str> {
        let key = Key {
            ns: self.ns,
            tokens: path,
        };
        self.read(key, now_ns);
        let found = self.cache.match_lease(key, REPLICA, u32::MAX, now_ns);
        let (mut lease, mut hits) = (found.lease, Found::default());
        hits.device = found.device_tokens;
        if let Some(hints) = hints {
            self.cache.describe(TenantId::default(), &mut lease, hints);
        }
        let done = self
            .promote(&mut lease, key, found.host_tokens, now_ns)
            .and_then(|promoted| {
                // What was read lies behind what host had before.
                hits.host = promoted.min(found.host_tokens - found.read_tokens);
                hits.storage = promoted - hits.host;
                self.compute(
                    &mut lease,
                    path.get(hits.all() as usize..).unwrap_or_default(),
                    now_ns,
                )
            });
        self.cache.end(lease, Fate::Keep, now_ns);
        self.acknowledge(now_ns);
        self.store(now_ns);
        done.map(|()| hits)
    }

    /// Reads to host what only storage has of a prompt.
    fn read(&mut self, key: Key<'_>, now_ns: u64) {
        if self.room.storage == 0 {
            return;
        }
        for _ in 0..READS_MAX {
            if !self.cache.read_ahead(key, now_ns) {
                break;
            }
            self.acknowledge(now_ns);
            self.store(now_ns);
        }
    }

    /// Carries out what was planned for the store.
    fn store(&mut self, now_ns: u64) {
        let mut plans = Vec::new();
        self.cache.drain_store(&mut plans);
        for plan in plans {
            if plan.op == StoreOp::Write {
                self.stored
                    .extend(plan.pages.iter().map(|page| page.address));
            }
            // What the cache asks for it knows to be there.
            let pages = vec![true; plan.pages.len()];
            self.cache
                .store_event(StoreEvent::Done { id: plan.id, pages }, now_ns);
        }
        let over = self.stored.len().saturating_sub(self.room.storage as usize);
        if over > 0 {
            let lost = self.stored.drain(..over).collect();
            self.cache.store_event(StoreEvent::Lost(lost), now_ns);
        }
    }

    /// Brings up what a match found on host, as far as the device has room.
    fn promote(
        &mut self,
        lease: &mut Lease,
        key: Key<'_>,
        host_blocks: u32,
        now_ns: u64,
    ) -> Result<u32, &'static str> {
        let count = host_blocks.min(self.room.device.saturating_sub(lease.len_pages()));
        if count == 0 {
            return Ok(0);
        }
        let mut reservation = self.reserve(count, now_ns)?;
        let plan = self.cache.promote(lease, &mut reservation, now_ns);
        self.cache.cancel(reservation);
        let Some(plan) = plan else { return Ok(0) };
        self.done(&plan, now_ns);
        Ok(self.cache.grow(lease, key, u32::MAX, now_ns))
    }

    /// Computes the blocks that are missing, as far as they fit.
    fn compute(
        &mut self,
        lease: &mut Lease,
        missing: &[u32],
        now_ns: u64,
    ) -> Result<(), &'static str> {
        let room = self.room.device.saturating_sub(lease.len_pages()) as usize;
        let computed = missing.get(..room).unwrap_or(missing);
        let count = u32::try_from(computed.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return Ok(());
        }
        let mut reservation = self.reserve(count, now_ns)?;
        let pages = self.cache.acquire(&mut reservation, count);
        self.cache.cancel(reservation);
        let meta = SpanMeta::default();
        let extended = self.cache.extend(lease, computed, pages, &meta, now_ns);
        if extended.inserted_pages == count {
            Ok(())
        } else {
            Err("computed pages did not all become cached")
        }
    }

    /// Reserves blocks on the device; what goes to host for them is there at once.
    fn reserve(&mut self, count: u32, now_ns: u64) -> Result<Reservation, &'static str> {
        loop {
            match self.cache.reserve(DEVICE, count, now_ns) {
                Ok((reservation, copies)) => {
                    copies.iter().for_each(|plan| self.done(plan, now_ns));
                    return Ok(reservation);
                }
                Err(short) if short.in_transit_pages > 0 => {
                    if !self.acknowledge(now_ns) {
                        return Err("room waits for copies that were never planned");
                    }
                }
                Err(_) => {
                    return Err("no room although nothing but this request is leased");
                }
            }
        }
    }

    /// Ends all copies that were planned; false when there were none.
    fn acknowledge(&mut self, now_ns: u64) -> bool {
        let mut copies = Vec::new();
        self.cache.drain_copies(&mut copies);
        copies.iter().for_each(|plan| self.done(plan, now_ns));
        !copies.is_empty()
    }

    fn done(&mut self, plan: &CopyPlan, now_ns: u64) {
        let done = CopyDone {
            id: plan.id,
            ok: true,
        };
        self.cache.copy_done(done, now_ns);
    }
}
