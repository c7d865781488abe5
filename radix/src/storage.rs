//! The storage tier as the tree sees it: which pages are there, by address, and what is on its way
//! there and back.
//!
//! Storage holds no nodes. It is a set of content addresses beside the tree, told by whoever owns
//! the store, so it outlives the tree and may be filled by others. What is on host with its whole
//! path is written down; what a request needs and only storage has is read to host and put into
//! the tree there, from where it is promoted as anything on host.
//!
//! ```text
//!   write   host: the path of what is read, kept by `busy` until the acknowledgement
//!   look    nothing: which pages are there that others may have stored; what is, is read
//!   read    host: destination pages, in transit; on arrival nodes of the tree, or given back where
//!           the path to them is gone or somebody else was faster
//! ```
//! Addresses of all pages in the tree lie by node, as event hashes do.

mod up;

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::tree::narrow;
use crate::{NamespaceId, TierStats, Token};
use rootstock_memory::{
    CopyId, Nanos, PageAddress, Pages, ReplicaId, StoreEvent, StoreOp, StorePage, StorePlan, TierId,
};
use std::collections::{BTreeMap, BTreeSet};

/// Pages of one plan at most, so that a read does not wait behind a long write.
const PLAN_PAGES: usize = 64;

/// Part of the plans under way that may be writes: who waits for a read has room for it.
const WRITES: usize = 2;

/// A plan that is not acknowledged.
#[derive(Debug)]
enum Flight {
    /// Last node and end of the path that is kept on host, addresses of the pages.
    Write(u32, u32, Vec<PageAddress>),
    /// What is read, and its destination.
    Read(Errand, Pages),
    /// What is looked for, and its addresses.
    Look(Errand, Vec<PageAddress>),
    Clear,
}

/// What somebody wants from storage.
#[derive(Clone, Debug)]
struct Errand {
    ns: NamespaceId,
    /// The prefix up to the last page.
    tokens: Box<[Token]>,
    /// The first page that is not there yet.
    start: u32,
    /// The device to which it goes on from host.
    then: Option<ReplicaId>,
}

/// What is known of the store.
#[derive(Debug)]
pub(crate) struct Store {
    attached: bool,
    pub(crate) known: BTreeSet<PageAddress>,
    pub(crate) limit: usize,
    /// Pages that are looked for at a time although nobody told of them.
    probes: usize,
    /// By node, for each page of its edge.
    pub(crate) addresses: Vec<Vec<PageAddress>>,
    /// Being written.
    pending: BTreeSet<PageAddress>,
    flights: BTreeMap<CopyId, Flight>,
    outbox: Vec<StorePlan>,
    pub(crate) hit_tokens: u64,
    pub(crate) lost_pages: u64,
}

impl Store {
    pub(crate) fn new(limit: u32, probes: u32) -> Self {
        Self {
            attached: true,
            known: BTreeSet::new(),
            limit: limit as usize,
            probes: probes as usize,
            addresses: Vec::new(),
            pending: BTreeSet::new(),
            flights: BTreeMap::new(),
            outbox: Vec::new(),
            hit_tokens: 0,
            lost_pages: 0,
        }
    }

    /// Whether a page is there, or on its way.
    fn has(&self, address: &PageAddress) -> bool {
        self.known.contains(address) || self.pending.contains(address)
    }

    fn learn(&mut self, address: PageAddress) {
        if self.known.len() < self.limit {
            self.known.insert(address);
        }
    }

    /// As a tier: what is known to be there can go at any time.
    pub(crate) fn stats(&self) -> TierStats {
        TierStats {
            tier: TierId::Storage,
            total: narrow(self.limit),
            free: narrow(self.limit - self.known.len()),
            evictable: narrow(self.known.len()),
            leased: 0,
            held: 0,
            in_transit: 0,
            hit_tokens: self.hit_tokens,
            evicted_pages: self.lost_pages,
            dropped_pages: 0,
        }
    }

    /// Pages of reads and writes under way.
    pub(crate) fn under_way(&self) -> u32 {
        let pages = self.flights.values().map(|flight| match flight {
            Flight::Write(_, _, pages) => pages.len(),
            Flight::Read(_, pages) => pages.len(),
            Flight::Look(..) | Flight::Clear => 0,
        });
        narrow(pages.sum())
    }

    /// The paths that writes keep on host: last node, end.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (u32, u32)> {
        self.flights.values().filter_map(|flight| match flight {
            Flight::Write(node, end, _) => Some((*node, *end)),
            Flight::Read(..) | Flight::Look(..) | Flight::Clear => None,
        })
    }

    /// Destination pages of reads under way.
    pub(crate) fn arriving(&self) -> u32 {
        let pages = self.flights.values().map(|flight| match flight {
            Flight::Read(_, pages) => pages.len(),
            Flight::Write(..) | Flight::Look(..) | Flight::Clear => 0,
        });
        narrow(pages.sum())
    }
}

impl PrefixCache {
    /// Pages of a node that storage is known to have.
    pub(crate) fn stored_pages(&self, at: u32) -> u32 {
        let Some(store) = self.store.as_ref().filter(|store| store.attached) else {
            return 0;
        };
        let addresses = self.addresses_of(at).iter();
        narrow(addresses.filter(|&one| store.known.contains(one)).count())
    }

    /// Takes a store of at most `limit` pages into use, at any time; `probes` as in
    /// [`crate::CacheConfig::storage_probes`]. False without a host tier, or while plans of an
    /// earlier store are not all acknowledged.
    ///
    /// # Cost
    /// Linear in the pages of the tree.
    pub fn attach_storage(&mut self, limit: u32, probes: u32) -> bool {
        let busy = self
            .store
            .as_ref()
            .is_some_and(|store| !store.flights.is_empty());
        if self.host.is_none() || busy || limit == 0 {
            return false;
        }
        self.store = Some(Store::new(limit, probes));
        let mut stack: Vec<u32> = self.namespaces.roots().collect();
        while let Some(at) = stack.pop() {
            if !self.tree.node(at).is_root() {
                self.address_pages(at, self.tree.node(at).pages);
            }
            let mut child = self.tree.node(at).first_child;
            while child != NIL {
                stack.push(child);
                child = self.tree.node(child).next_sibling;
            }
        }
        true
    }

    /// Uses the store no more. What is under way is still to be acknowledged, as not done.
    pub fn detach_storage(&mut self) {
        if let Some(store) = &mut self.store {
            store.attached = false;
            store.known.clear();
        }
        self.drop_empty_store();
    }

    /// Appends the plans for the store that were made since the last call. Each is to be
    /// acknowledged by exactly one [`StoreEvent::Done`].
    pub fn drain_store(&mut self, out: &mut Vec<StorePlan>) {
        if let Some(store) = &mut self.store {
            out.append(&mut store.outbox);
        }
    }

    /// Takes what the store tells. An acknowledgement of a plan that is not under way is counted
    /// and ignored.
    ///
    /// # Panics
    /// Only when the cache contradicts itself.
    pub fn store_event(&mut self, event: StoreEvent, now: Nanos) {
        self.expire(now);
        let Some(store) = &mut self.store else {
            self.flights.stray += u64::from(matches!(event, StoreEvent::Done { .. }));
            return;
        };
        match event {
            StoreEvent::Learned(addresses) if store.attached => {
                addresses
                    .into_iter()
                    .for_each(|address| store.learn(address));
            }
            StoreEvent::Learned(_) => {}
            StoreEvent::Lost(addresses) => {
                for address in addresses {
                    store.lost_pages += u64::from(store.known.remove(&address));
                }
            }
            StoreEvent::Done { id, pages } => self.store_done(id, &pages, now),
        }
    }

    /// Pages of reads from and writes to storage that are not acknowledged.
    pub fn storage_under_way(&self) -> u32 {
        self.store.as_ref().map_or(0, Store::under_way)
    }

    /// Gives up all plans for the store as not done: for the end of the process, when nobody uses
    /// the host pages any more.
    pub fn abandon_storage(&mut self, now: Nanos) {
        let flights = self.store.iter().flat_map(|store| store.flights.keys());
        for id in flights.copied().collect::<Vec<_>>() {
            self.store_done(id, &[], now);
        }
    }

    /// Plans to write what of the path of `last` is on host, with all before it, and is not in
    /// storage.
    pub(crate) fn store_down(&mut self, last: u32) {
        let (Some(host), Some(store)) = (self.host, &self.store) else {
            return;
        };
        let seed = self.namespaces.store_seed_of(self.tree.root_of(last));
        let Some(seed) = seed.filter(|_| store.attached) else {
            return;
        };
        let path = self.nodes_between(last, 0, self.tree.node(last).end());
        for at in path {
            if !self.tiers[host].is_resident(at) {
                break;
            }
            let Some(store) = self.store.as_ref() else {
                return;
            };
            // Pages go from the end, unless one was damaged.
            let pages = self.addresses_of(at);
            let from = if store.lost_pages == 0 {
                pages.len().saturating_sub(1)
            } else {
                0
            };
            if pages[from..].iter().all(|page| store.has(page)) {
                continue;
            }
            let all = self.store_pages(host, at);
            for part in all.chunks(PLAN_PAGES) {
                self.write_part(host, at, seed, part);
            }
        }
    }

    fn write_part(&mut self, host: usize, at: u32, seed: PageAddress, part: &[StorePage]) {
        let Some(store) = &mut self.store else { return };
        let new = |page: &&StorePage| !store.has(&page.address);
        let pages: Vec<StorePage> = part.iter().filter(new).cloned().collect();
        let most = self.max_copies.div_ceil(WRITES);
        if pages.is_empty() || store.flights.len() >= most {
            return;
        }
        let addresses: Vec<PageAddress> = pages.iter().map(|page| page.address).collect();
        store.pending.extend(&addresses);
        let end = self.tree.node(at).end();
        self.keep_path(host, at, end, true);
        let flight = Flight::Write(at, end, addresses);
        self.launch_store(StoreOp::Write, seed, pages, flight);
    }

    fn launch_store(
        &mut self,
        op: StoreOp,
        namespace: PageAddress,
        pages: Vec<StorePage>,
        flight: Flight,
    ) -> CopyId {
        let id = self.flights.next_id();
        if let Some(store) = &mut self.store {
            store.flights.insert(id, flight);
            store.outbox.push(StorePlan {
                id,
                op,
                namespace,
                pages: pages.into(),
            });
        }
        id
    }

    fn store_done(&mut self, id: CopyId, ok: &[bool], now: Nanos) {
        let flight = self
            .store
            .as_mut()
            .and_then(|store| store.flights.remove(&id));
        self.clock += 1;
        let failed = !ok.iter().all(|&ok| ok);
        match flight {
            None => self.flights.stray += 1,
            Some(Flight::Clear) => {}
            Some(Flight::Write(node, end, addresses)) => {
                self.flights.failed += u64::from(failed);
                let (Some(host), Some(store)) = (self.host, &mut self.store) else {
                    return;
                };
                for (at, address) in addresses.into_iter().enumerate() {
                    store.pending.remove(&address);
                    if store.attached && ok.get(at) == Some(&true) {
                        store.learn(address);
                    }
                }
                self.keep_path(host, node, end, false);
            }
            Some(Flight::Read(errand, pages)) => {
                self.flights.failed += u64::from(failed);
                self.read_done(&errand, pages, ok, now);
            }
            Some(Flight::Look(errand, addresses)) => self.look_done(&errand, addresses, ok, now),
        }
        self.drop_empty_store();
    }

    /// Everything is forgotten, and the store is to forget it too.
    pub(crate) fn clear_store(&mut self) {
        let Some(store) = self.store.as_mut().filter(|store| store.attached) else {
            return;
        };
        store.known.clear();
        let seed = PageAddress::seed(&[]);
        self.launch_store(StoreOp::Clear, seed, Vec::new(), Flight::Clear);
    }

    fn drop_empty_store(&mut self) {
        let done = |store: &Store| !store.attached && store.flights.is_empty();
        if self.store.as_ref().is_some_and(done) {
            self.store = None;
        }
    }
}
