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
//!   read    host: destination pages, in transit; on arrival nodes of the tree, or given back where
//!           the path to them is gone or somebody else was faster
//! ```
//! Addresses of all pages in the tree lie by run, parallel to its tokens, as event hashes do.

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::tree::narrow;
use crate::{Key, Lease, NamespaceId, SpanMeta, TierStats, Token};
use rootstock_memory::{
    CopyId, Nanos, PageAddress, PageId, Pages, StoreEvent, StoreOp, StorePage, StorePlan, TierId,
};
use std::collections::{BTreeMap, BTreeSet};

/// Pages of one plan at most, so that a read does not wait behind a long write.
const PLAN_PAGES: usize = 64;

/// A plan that is not acknowledged.
#[derive(Debug)]
enum Flight {
    /// Last node and end of the path that is kept on host, addresses of the pages.
    Write(u32, u32, Vec<PageAddress>),
    /// Prefix up to the last page, first page that is read, destination.
    Read(NamespaceId, Box<[Token]>, u32, Pages),
    Clear,
}

/// What is known of the store.
#[derive(Debug)]
pub(crate) struct Store {
    attached: bool,
    pub(crate) known: BTreeSet<PageAddress>,
    pub(crate) limit: usize,
    /// Pages that are looked for although nobody told of them.
    probes: usize,
    /// By run, parallel to its tokens.
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
            Flight::Read(_, _, _, pages) => pages.len(),
            Flight::Clear => 0,
        });
        narrow(pages.sum())
    }

    /// The paths that writes keep on host: last node, end.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (u32, u32)> {
        self.flights.values().filter_map(|flight| match flight {
            Flight::Write(node, end, _) => Some((*node, *end)),
            Flight::Read(..) | Flight::Clear => None,
        })
    }

    /// Destination pages of reads under way.
    pub(crate) fn arriving(&self) -> u32 {
        let pages = self.flights.values().map(|flight| match flight {
            Flight::Read(_, _, _, pages) => pages.len(),
            Flight::Write(..) | Flight::Clear => 0,
        });
        narrow(pages.sum())
    }
}

impl PrefixCache {
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

    /// Plans to read what storage has right after what a lease and host cover, at most up to
    /// `max_tokens` of `key`, the whole prefix. After the acknowledgement the prefix is matched
    /// again and has more on host. `None` when there is nothing, no room on host, or `max_copies`
    /// are under way.
    pub fn fetch(
        &mut self,
        lease: &Lease,
        key: Key<'_>,
        max_tokens: u32,
        now: Nanos,
    ) -> Option<CopyId> {
        self.expire(now);
        let host = self.host?;
        let tokens = &key.tokens[..key.tokens.len().min(max_tokens as usize)];
        let covered = lease.len_tokens() as usize;
        let rest = tokens.get(covered..)?;
        if lease.tail() > 0 || key.ns != lease.ns {
            return None;
        }
        let reached = self.walk(self.end_of(lease), lease.pages, rest, host);
        if reached.partly.is_some() {
            return None;
        }
        self.read_up(key.ns, (reached.node, reached.pages), tokens)
    }

    /// Plans to read what only storage has of a prefix that nobody has leased: for requests that
    /// wait. Returns how many pages are on their way.
    pub fn read_ahead(&mut self, key: Key<'_>, now: Nanos) -> u32 {
        self.expire(now);
        match self.prefetch(key.ns, key.tokens) {
            (pages, true) => pages,
            (_, false) => 0,
        }
    }

    /// Whether a page that `key` needs is being read from storage. Bounded by what the owner of
    /// the store allows a read to take.
    pub fn is_reading(&self, key: Key<'_>) -> bool {
        let flights = self.store.iter().flat_map(|store| store.flights.values());
        flights.into_iter().any(|flight| match flight {
            Flight::Read(ns, tokens, start, _) => {
                let first = &tokens[..self.tokens_of(start + 1)];
                *ns == key.ns && key.tokens.starts_with(first)
            }
            Flight::Write(..) | Flight::Clear => false,
        })
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

    /// The pages that are read, or those that were there and false.
    pub(crate) fn prefetch(&mut self, ns: NamespaceId, tokens: &[Token]) -> (u32, bool) {
        let Some(root) = self.namespaces.root(ns) else {
            return (0, false);
        };
        let (mut at, mut pages) = (root, 0);
        while let Some(child) = self.tree.child(at, &tokens[self.tokens_of(pages)..]) {
            let common = self
                .tree
                .common_pages(child, &tokens[self.tokens_of(pages)..]);
            pages += common;
            if common < self.tree.node(child).pages {
                return (pages, false);
            }
            at = child;
        }
        let started = self.read_up(ns, (at, pages), tokens);
        let flight = started.and_then(|id| self.store.as_ref()?.flights.get(&id));
        match flight {
            Some(Flight::Read(_, _, _, dest)) => (narrow(dest.len()), true),
            Some(Flight::Write(..) | Flight::Clear) | None => (pages, false),
        }
    }

    /// Tokens of `tokens` that storage has right after their first `pages`, which end with `at`.
    pub(crate) fn stored_tokens(&self, at: u32, pages: u32, tokens: &[Token]) -> u32 {
        narrow(self.stored_after(at, pages, tokens).len()) * self.page_tokens()
    }

    fn stored_after(&self, at: u32, pages: u32, tokens: &[Token]) -> Vec<PageAddress> {
        let mut found = Vec::new();
        let Some(store) = self.store.as_ref().filter(|store| store.attached) else {
            return found;
        };
        let idle = store.known.is_empty() && store.probes == 0;
        if idle || self.tree.node(at).end() != pages {
            return found;
        }
        let Some(mut address) = self.address_before(at, self.tree.node(at).pages) else {
            return found;
        };
        let mut probes = store.probes;
        let rest = tokens.get(self.tokens_of(pages)..).unwrap_or_default();
        for page in rest.chunks_exact(self.tree.page_tokens()) {
            address = address.next(page);
            if !store.known.contains(&address) {
                if probes == 0 {
                    break;
                }
                probes -= 1;
            }
            found.push(address);
        }
        found
    }

    /// Plans the read of what follows the first `end.1` pages of `tokens`, which end with the node
    /// `end.0`.
    fn read_up(&mut self, ns: NamespaceId, end: (u32, u32), tokens: &[Token]) -> Option<CopyId> {
        let host = self.host?;
        let (at, start) = end;
        let addresses = self.stored_after(at, start, tokens);
        let seed = self.namespaces.store_seed_of(self.tree.root_of(at))?;
        if addresses.is_empty() || self.store.as_ref()?.flights.len() >= self.max_copies {
            return None;
        }
        // Somebody waits for it: it goes before all but pins, and not at the cost of its own path.
        let way = self.nodes_between(at, 0, start);
        let way: Vec<u32> = way
            .into_iter()
            .filter(|&at| self.tiers[host].is_resident(at))
            .collect();
        self.keep_nodes(host, &way, true);
        let room = self.room_on_host(narrow(addresses.len()), (i64::MAX - 1, u64::MAX));
        self.keep_nodes(host, &way, false);
        let mut reservation = self.tiers[host].pool.reserve(room).filter(|_| room > 0)?;
        let dest = self.tiers[host].acquire_for_copy(&mut reservation, room);
        let mut parent = self.address_before(at, self.tree.node(at).pages)?;
        let p = self.tree.page_tokens();
        let wanted = &tokens[self.tokens_of(start)..self.tokens_of(start + room)];
        let mut pages = Vec::with_capacity(room as usize);
        for ((tokens, &address), &host) in wanted.chunks_exact(p).zip(&addresses).zip(dest.ids()) {
            pages.push(StorePage {
                host,
                address,
                parent,
                tokens: tokens.into(),
            });
            parent = address;
        }
        let prefix = tokens[..self.tokens_of(start + room)].into();
        let flight = Flight::Read(ns, prefix, start, dest);
        Some(self.launch_store(StoreOp::Read, seed, pages, flight))
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
            let (node, store) = (self.tree.node(at), self.store.as_ref());
            let (Some(store), pages) = (store, node.pages) else {
                return;
            };
            let end = self.address_before(at, pages);
            if end.is_none_or(|end| store.known.contains(&end) || store.pending.contains(&end)) {
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
        let new = |page: &&StorePage| !store.known.contains(&page.address);
        let pages: Vec<StorePage> = part.iter().filter(new).cloned().collect();
        if pages.is_empty() || store.flights.len() >= self.max_copies {
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
            Some(Flight::Read(ns, tokens, start, pages)) => {
                self.flights.failed += u64::from(failed);
                let Some(host) = self.host else { return };
                let ids = pages.disband();
                self.tiers[host].in_transit -= narrow(ids.len());
                let arrived = ok.iter().take_while(|&&ok| ok).count().min(ids.len());
                let placed = self.place_read((ns, &tokens), start, &ids[..arrived], now);
                self.tiers[host].pool.release_ids(&ids[placed..]);
                if let Some(store) = &mut self.store {
                    store.hit_tokens += (arrived * self.tree.page_tokens()) as u64;
                }
            }
        }
        self.drop_empty_store();
    }

    /// Puts pages that were read into the tree, on host: those of `prefix` from page `start` on.
    /// Returns how many it has dealt with; the rest is the caller's.
    fn place_read(
        &mut self,
        prefix: (NamespaceId, &[Token]),
        start: u32,
        ids: &[PageId],
        now: Nanos,
    ) -> usize {
        let (ns, tokens) = prefix;
        let (Some(host), Some(mut at)) = (self.host, self.namespaces.root(ns)) else {
            return 0;
        };
        let end = start + narrow(ids.len());
        let (tokens, mut page) = (&tokens[..self.tokens_of(end)], 0);
        while let Some(child) = self.tree.child(at, &tokens[self.tokens_of(page)..]) {
            let common = self
                .tree
                .common_pages(child, &tokens[self.tokens_of(page)..]);
            // The pages that were read begin with a node.
            let want = match start.checked_sub(page) {
                Some(before) if before > 0 => common.min(before),
                _ => common,
            };
            let child = if want == self.tree.node(child).pages {
                child
            } else if let Some(upper) = self.split(child, want) {
                upper
            } else {
                return page.saturating_sub(start) as usize;
            };
            if page >= start {
                let first = (page - start) as usize;
                self.arrive(host, child, &ids[first..first + want as usize]);
            }
            at = child;
            page += want;
        }
        let Some(first) = page.checked_sub(start).map(|first| first as usize) else {
            return 0; // The way there is gone.
        };
        if first < ids.len() && self.tree.has_slots(1) {
            let meta = SpanMeta::default();
            self.retain(at, &meta, now);
            let rest = &tokens[self.tokens_of(page)..];
            let leaf = self.tree.add_leaf(at, rest, &meta, self.clock);
            let count = self.tree.node(leaf).pages;
            self.hash_pages(leaf, count);
            self.address_pages(leaf, count);
            self.arrive(host, leaf, &ids[first..]);
            return ids.len();
        }
        first
    }

    /// A node has its pages on host now, unless it had them before.
    fn arrive(&mut self, host: usize, at: u32, ids: &[PageId]) {
        let span = self.tiers[host].span(at);
        if span.resident || span.incoming {
            self.tiers[host].pool.release_ids(ids);
            return;
        }
        let stamp = self.clock;
        self.tiers[host].set_resident(at, &self.tree, ids, |span| span.stamp = stamp);
        self.tell_stored(host, at, narrow(ids.len()));
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
