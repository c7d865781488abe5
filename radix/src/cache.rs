//! The cache as one unit: tree, tiers, namespaces, leases. What hosts embed.
//!
//! ```text
//!            reserve, acquire             extend                    end (last lease)
//!   free ----------------------> owned ------------> cached, leased ---------------> cached,
//!     ^                            | release              ^   match_lease, grow      evictable
//!     |                            v                      +--------------------------   |
//!     +----------------------------+----------------------------------------------------+
//!                                                          make_room, Fate::Ephemeral
//! ```
//! On each device the resident part of every path is a prefix of it: leases cover paths from the
//! root, and only nodes without a resident child are evicted.

use crate::lease::Kept;
use crate::namespace::Namespaces;
use crate::node::{NIL, Node};
use crate::order::Ranking;
use crate::tier::{Tier, Use};
use crate::tree::{Hashing, Tree, narrow};
use crate::{
    ActReason, Action, CacheConfig, CacheError, CacheStats, Fate, FlushRefused, Key, KvEvent,
    Lease, Match, NamespaceId, NamespaceKey, Outcome, PolicyKind, Probe, Room, Short, TenantId,
    Token,
};
use rootstock_memory::{
    CopyDone, CopyPlan, Nanos, PageId, Pages, ReplicaId, Reservation, StepId, TierId,
};

/// A radix-tree prefix cache over the page pools of all replicas.
#[derive(Debug)]
pub struct PrefixCache {
    pub(crate) tree: Tree,
    /// Devices in the order of replicas.
    pub(crate) tiers: Vec<Tier>,
    pub(crate) namespaces: Namespaces,
    /// Counts uses; recency is this number.
    pub(crate) clock: u64,
    pub(crate) leases: u32,
    pub(crate) lookups: u64,
    pub(crate) lookup_tokens: u64,
    pub(crate) uncached_pages: u64,
}

/// Where a walk from the root ended.
pub(crate) struct Reached {
    /// Last node that is covered wholly.
    pub(crate) node: u32,
    /// Pages up to its end.
    pub(crate) pages: u32,
    /// A child of it that is covered in part: node, pages of its edge.
    pub(crate) partly: Option<(u32, u32)>,
}

impl PrefixCache {
    /// A cache with empty pools.
    ///
    /// # Errors
    /// A number of the configuration that cannot be, with its bounds.
    pub fn new(config: &CacheConfig) -> Result<Self, CacheError> {
        let seed = config.hash_seed;
        let state = ahash::RandomState::with_seeds(seed, !seed, seed.rotate_left(32), 0x2545_f491);
        Self::with_hashing(config, Hashing::Seeded(state))
    }

    pub(crate) fn with_hashing(config: &CacheConfig, hashing: Hashing) -> Result<Self, CacheError> {
        config.validate()?;
        let ranking = match config.policy {
            PolicyKind::Lru => Ranking::Recency,
            PolicyKind::Priority => Ranking::Priority,
        };
        let devices = (0..)
            .map(|n| TierId::Device(ReplicaId(n)))
            .zip(&config.device_pages);
        Ok(Self {
            tree: Tree::new(config.page_tokens, config.max_nodes, hashing),
            tiers: devices
                .map(|(id, &total)| Tier::new(id, total, ranking))
                .collect(),
            namespaces: Namespaces::new(config.max_namespaces),
            clock: 0,
            leases: 0,
            lookups: 0,
            lookup_tokens: 0,
            uncached_pages: 0,
        })
    }

    /// The id of a namespace, new or known.
    ///
    /// # Errors
    /// `max_namespaces` hold cached or leased pages.
    pub fn namespace(&mut self, key: &NamespaceKey) -> Result<NamespaceId, CacheError> {
        if let Some(id) = self.namespaces.find(key) {
            return Ok(id);
        }
        if !self.namespaces.has_room() && !self.drop_unused_namespace() {
            return Err(self.namespaces.full());
        }
        let root = self.add_root();
        Ok(self.namespaces.insert(Some(key.clone()), root))
    }

    /// How much of a prefix is cached, for queues and routers. Changes nothing: no split, no
    /// recency, no count.
    pub fn probe(&self, key: Key<'_>, replica: ReplicaId) -> Probe {
        let Some(root) = self.namespaces.root(key.ns) else {
            return Probe::default();
        };
        let reached = self.walk(root, 0, key.tokens, replica);
        let pages = reached.pages + reached.partly.map_or(0, |(_, pages)| pages);
        Probe {
            device_tokens: pages * self.page_tokens(),
            ..Probe::default()
        }
    }

    /// Leases the longest cached prefix, at most `max_tokens` rounded down to a page. Splits a
    /// node that is matched in part, and marks exactly the matched part as used. With all
    /// `max_nodes` in use it does not split, and matches up to the node before.
    ///
    /// # Panics
    /// When there is no such replica.
    /// # Cost
    /// One table lookup a node, one comparison a token.
    pub fn match_lease(
        &mut self,
        key: Key<'_>,
        replica: ReplicaId,
        max_tokens: u32,
        now: Nanos,
    ) -> Match {
        let (ns, root) = self.root_or_orphan(key.ns);
        let tokens = limited(key.tokens, max_tokens);
        let mut lease = Lease {
            ns,
            replica,
            node: root,
            pages: 0,
            page_tokens: self.page_tokens(),
            own_from: u32::MAX,
            kept: None,
        };
        self.leases += 1;
        let at = usize::from(replica.0);
        assert!(
            at < self.tiers.len(),
            "replica {at} of {}",
            self.tiers.len()
        );
        self.tiers[at].lease(root, self.tree.node(root));
        let device_tokens = self.cover(&mut lease, tokens, now) * self.page_tokens();
        self.lookups += 1;
        self.lookup_tokens += key.tokens.len() as u64;
        self.tiers[at].hit_tokens += u64::from(device_tokens);
        Match {
            lease,
            device_tokens,
            host_tokens: 0,
            storage_tokens: 0,
        }
    }

    /// Extends a lease over what became cached after it since; returns the tokens added. `key` is
    /// the whole prefix, the leased part included.
    pub fn grow(&mut self, lease: &mut Lease, key: Key<'_>, max_tokens: u32, now: Nanos) -> u32 {
        let covered = lease.len_tokens() as usize;
        if lease.tail() > 0 || key.ns != lease.ns {
            return 0;
        }
        match limited(key.tokens, max_tokens).get(covered..) {
            Some(rest) => self.cover(lease, rest, now) * self.page_tokens(),
            None => 0,
        }
    }

    /// Appends the device pages of the leased span, in order: the pages the request itself uses.
    pub fn pages(&self, lease: &Lease, out: &mut Vec<PageId>) {
        let first = out.len();
        out.resize(first + lease.len_pages() as usize, PageId::SCRATCH);
        let tier = &self.tiers[usize::from(lease.replica.0)];
        let mut at = self.end_of(lease);
        while !self.tree.node(at).is_root() {
            let node = self.tree.node(at);
            let begin = first + node.depth as usize;
            out[begin..begin + node.pages as usize].copy_from_slice(tier.pages_of(node));
            at = node.parent;
        }
        for (page, id) in lease.kept_pages() {
            out[first + page as usize] = id;
        }
    }

    /// Reserves `n` pages, evicting for them what is needed: all or nothing.
    ///
    /// # Errors
    /// Not enough is free and evictable; then nothing was evicted.
    /// # Panics
    /// Only when the cache contradicts itself.
    pub fn reserve(
        &mut self,
        tier: TierId,
        n: u32,
        now: Nanos,
    ) -> Result<(Reservation, Vec<CopyPlan>), Short> {
        let room = self.make_room(tier, n, now)?;
        let at = self.index(tier).expect("a tier that has room exists");
        let reservation = self.tiers[at]
            .pool
            .reserve(n)
            .expect("room was made for it");
        Ok((reservation, room.copies))
    }

    /// Takes `n` pages of a reservation.
    ///
    /// # Panics
    /// When fewer than `n` are left in it.
    pub fn acquire(&mut self, reservation: &mut Reservation, n: u32) -> Pages {
        let at = self
            .index(reservation.tier())
            .expect("a reservation comes from a tier");
        self.tiers[at].acquire(reservation, n)
    }

    /// Gives the rest of a reservation back.
    pub fn cancel(&mut self, reservation: Reservation) {
        if let Some(at) = self.index(reservation.tier()) {
            self.tiers[at].pool.cancel(reservation);
        }
    }

    /// Gives acquired pages back, after step `busy_until` where one may still touch them.
    ///
    /// # Panics
    /// When they are of another cache.
    pub fn release(&mut self, pages: Pages, busy_until: Option<StepId>) {
        let at = self.index(pages.tier()).expect("pages come from a tier");
        self.tiers[at].release(pages, busy_until);
    }

    /// Step `step` of a replica and all before it have ended: what waited for them is free.
    pub fn step_done(&mut self, replica: ReplicaId, step: StepId) {
        self.device(replica).pool.step_done(step);
    }

    /// Evicts until `n` pages of `tier` are free.
    ///
    /// # Errors
    /// Not enough is free and evictable; then nothing was evicted.
    /// # Cost
    /// Linear in the pages freed.
    pub fn make_room(&mut self, tier: TierId, n: u32, _now: Nanos) -> Result<Room, Short> {
        let Some(at) = self.index(tier) else {
            return Err(Short {
                needed_pages: n,
                ..Short::default()
            });
        };
        let found = &self.tiers[at];
        if found.available() < n {
            return Err(Short {
                needed_pages: n,
                free_pages: found.pool.free(),
                evictable_pages: found.evictable(),
                in_transit_pages: 0,
            });
        }
        let mut room = Room::default();
        while self.tiers[at].pool.free() < n {
            let missing = n - self.tiers[at].pool.free();
            room.freed_pages += self.evict_first(at, missing);
        }
        self.tiers[at].evicted_pages += u64::from(room.freed_pages);
        Ok(room)
    }

    /// Pages of a tier that [`Self::reserve`] could grant now: free and evictable.
    pub fn available(&self, tier: TierId) -> u32 {
        self.index(tier).map_or(0, |at| self.tiers[at].available())
    }

    /// Usable pages of a tier.
    pub fn total(&self, tier: TierId) -> u32 {
        self.index(tier).map_or(0, |at| self.tiers[at].pool.total())
    }

    /// Ends a lease. The leased span counts as used now; `fate` says what it is worth.
    pub fn end(&mut self, mut lease: Lease, fate: Fate, _now: Nanos) {
        self.clock += 1;
        let at = usize::from(lease.replica.0);
        if let Some(kept) = lease.kept.take() {
            let Kept {
                pages, busy_until, ..
            } = *kept;
            self.tiers[at].release(pages, busy_until);
        }
        let mut node = self.end_of(&lease);
        let mut alone = matches!(fate, Fate::Superseded | Fate::Ephemeral);
        let mut below = None;
        while node != NIL {
            let parent = self.tree.node(node).parent;
            alone = alone && self.is_alone(at, node, below, lease.own_from);
            let use_ = Use {
                until: self.clock,
                last: alone,
            };
            let last = self.tiers[at].unlease(node, self.tree.node(node), below, use_);
            below = last.then_some(node);
            if alone && fate == Fate::Ephemeral {
                let dropped = self.drop_leaf(at, node);
                self.tiers[at].dropped_pages += u64::from(dropped);
                below = None;
            }
            node = parent;
        }
        lease.node = NIL;
        self.leases -= 1;
    }

    /// Empties all tiers.
    ///
    /// # Errors
    /// Leases live or requests hold pages; then nothing was cleared.
    /// # Panics
    /// Only when the cache contradicts itself.
    pub fn flush(&mut self, now: Nanos) -> Result<(), FlushRefused> {
        let held_pages = self.tiers.iter().map(Tier::held).sum();
        if self.leases > 0 || held_pages > 0 {
            return Err(FlushRefused {
                leases: self.leases,
                held_pages,
                in_transit_pages: 0,
            });
        }
        for at in 0..self.tiers.len() {
            let (id, total) = (self.tiers[at].pool.tier(), self.tiers[at].pool.total());
            let counted = self.tiers[at].evicted_pages;
            let room = self.make_room(id, total, now);
            assert!(room.is_ok(), "without leases everything is evictable");
            self.tiers[at].evicted_pages = counted;
        }
        Ok(())
    }

    /// Does a verb. This version has none: each is rejected as unsupported.
    pub fn act(&mut self, _tenant: TenantId, _action: &Action, _now: Nanos) -> Outcome {
        Outcome::Rejected(ActReason::Unsupported)
    }

    /// Takes the acknowledgement of a copy. One that this cache did not plan is ignored.
    pub fn copy_done(&mut self, _done: CopyDone, _now: Nanos) {}

    /// Lets what is due happen.
    pub fn tick(&mut self, _now: Nanos) {}

    /// Appends the events since the last call.
    pub fn drain_events(&mut self, _out: &mut Vec<KvEvent>) {}

    /// Counts.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            tiers: self.tiers.iter().map(Tier::stats).collect(),
            nodes: narrow(self.tree.nodes.len()),
            namespaces: narrow(self.namespaces.len()),
            leases: self.leases,
            lookups: self.lookups,
            lookup_tokens: self.lookup_tokens,
            uncached_pages: self.uncached_pages,
            stray_releases: self
                .tiers
                .iter()
                .map(|tier| tier.pool.stray_releases())
                .sum(),
        }
    }

    pub(crate) const fn page_tokens(&self) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "it came in as u32")]
        let tokens = self.tree.page_tokens() as u32;
        tokens
    }

    pub(crate) fn device(&mut self, replica: ReplicaId) -> &mut Tier {
        let count = self.tiers.len();
        assert!(
            usize::from(replica.0) < count,
            "replica {} of {count}",
            replica.0
        );
        &mut self.tiers[usize::from(replica.0)]
    }

    pub(crate) fn index(&self, tier: TierId) -> Option<usize> {
        match tier {
            TierId::Device(replica) => {
                Some(usize::from(replica.0)).filter(|&at| at < self.tiers.len())
            }
            TierId::Host | TierId::Storage => None,
        }
    }

    /// The node in which the tree part of a lease ends.
    pub(crate) fn end_of(&self, lease: &Lease) -> u32 {
        let mut at = lease.node;
        while self.tree.node(at).depth >= lease.pages && !self.tree.node(at).is_root() {
            at = self.tree.node(at).parent;
        }
        at
    }

    /// Follows `rest` from the end of `from` over what is resident on the replica.
    pub(crate) fn walk(
        &self,
        from: u32,
        pages: u32,
        mut rest: &[Token],
        replica: ReplicaId,
    ) -> Reached {
        let tier = &self.tiers[usize::from(replica.0)];
        let mut reached = Reached {
            node: from,
            pages,
            partly: None,
        };
        while let Some(child) = self.tree.child(reached.node, rest) {
            if !tier.is_resident(child) {
                break;
            }
            let edge = self.tree.node(child).pages;
            let common = self.tree.common_pages(child, rest);
            if common < edge {
                reached.partly = Some((child, common));
                break;
            }
            reached.node = child;
            reached.pages += edge;
            rest = &rest[edge as usize * self.tree.page_tokens()..];
        }
        reached
    }

    /// Cuts a node after `keep` pages in all tiers; the new upper part is returned. `None` when
    /// all nodes are in use.
    pub(crate) fn split(&mut self, at: u32, keep: u32) -> Option<u32> {
        if !self.tree.has_slots(1) {
            return None;
        }
        let upper = self.tree.split(at, keep);
        for tier in &mut self.tiers {
            tier.split(at, upper);
        }
        Some(upper)
    }

    /// Changes what nodes are ranked by.
    pub(crate) fn update(&mut self, at: u32, change: impl FnOnce(&mut Node)) {
        for tier in &mut self.tiers {
            tier.unrank(at, self.tree.node(at));
        }
        change(self.tree.node_mut(at));
        for tier in &mut self.tiers {
            tier.rank(at, self.tree.node(at));
        }
    }

    /// Extends a lease over the cached part of `rest`, which follows it; returns the pages added.
    fn cover(&mut self, lease: &mut Lease, rest: &[Token], _now: Nanos) -> u32 {
        let from = self.end_of(lease);
        let reached = self.walk(from, lease.pages, rest, lease.replica);
        let (mut end, mut pages) = (reached.node, reached.pages);
        if let Some((child, common)) = reached.partly
            && let Some(upper) = self.split(child, common)
        {
            (end, pages) = (upper, pages + common);
        }
        let first = lease.pages;
        (lease.node, lease.pages) = (end, pages);
        let tier = usize::from(lease.replica.0);
        let mut at = end;
        while self.tree.node(at).depth >= first && !self.tree.node(at).is_root() {
            self.tiers[tier].lease(at, self.tree.node(at));
            self.update(at, |node| node.hits = node.hits.saturating_add(1));
            at = self.tree.node(at).parent;
        }
        pages - first
    }

    /// Evicts from the first candidate of a tier up to `missing` pages, from its end.
    fn evict_first(&mut self, tier: usize, missing: u32) -> u32 {
        let at = self.tiers[tier]
            .order
            .first()
            .expect("evictable pages have a first candidate");
        let keep = self.tree.node(at).pages.saturating_sub(missing);
        if keep > 0 && self.only_in(tier, at) {
            let freed = self.tiers[tier].free_tail(at, self.tree.node(at), keep);
            self.tree.truncate(at, keep);
            return freed;
        }
        let at = match keep {
            0 => at,
            _ => {
                // The lower part keeps the index, the other tiers keep both.
                let _ = self.split(at, keep);
                at
            }
        };
        self.drop_leaf(tier, at)
    }

    /// Frees what an unleased node has in a tier, and removes it when that was its last place.
    fn drop_leaf(&mut self, tier: usize, at: u32) -> u32 {
        let freed = self.tiers[tier].vacate(at, &self.tree);
        if !self.tiers.iter().any(|tier| tier.is_resident(at)) {
            self.tree.remove(at);
        }
        freed
    }

    /// Whether only the lease that ends now used a node, which it put in from page `own_from` on,
    /// and nothing hangs from it but `below`, which that lease leaves too.
    fn is_alone(&self, tier: usize, at: u32, below: Option<u32>, own_from: u32) -> bool {
        let (node, span) = (self.tree.node(at), self.tiers[tier].span(at));
        node.depth >= own_from
            && node.hits == 0
            && !node.is_root()
            && span.leases == 1
            && span.kids == u32::from(below.is_some())
    }

    /// Whether a node is in this tier and no other.
    pub(crate) fn only_in(&self, tier: usize, at: u32) -> bool {
        (0..self.tiers.len()).all(|other| (other == tier) == self.tiers[other].is_resident(at))
    }

    fn add_root(&mut self) -> u32 {
        let root = self.tree.add_root();
        for tier in &mut self.tiers {
            tier.add_root(root);
        }
        root
    }

    /// The root of a namespace. A namespace that was dropped gets a fresh one without a name,
    /// where nothing is cached.
    fn root_or_orphan(&mut self, ns: NamespaceId) -> (NamespaceId, u32) {
        if let Some(root) = self.namespaces.root(ns) {
            return (ns, root);
        }
        // Held by live leases, so bounded by them; unused ones make place.
        if !self.namespaces.has_room() {
            self.drop_unused_namespace();
        }
        let root = self.add_root();
        (self.namespaces.insert(None, root), root)
    }

    fn drop_unused_namespace(&mut self) -> bool {
        let (tree, tiers) = (&self.tree, &self.tiers);
        let unused = |root: u32| {
            tree.node(root).is_leaf() && tiers.iter().all(|tier| tier.span(root).leases == 0)
        };
        let Some((slot, root)) = self.namespaces.find_unused(unused) else {
            return false;
        };
        self.namespaces.remove(slot);
        for tier in &mut self.tiers {
            tier.remove_root(root);
        }
        self.tree.remove_root(root);
        true
    }
}

/// The first `max_tokens` of `tokens`.
fn limited(tokens: &[Token], max_tokens: u32) -> &[Token] {
    &tokens[..tokens.len().min(max_tokens as usize)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpanMeta;

    /// G2: with a hash that is the same for every page, equality still decides.
    #[test]
    fn a_hash_match_is_not_a_token_match() {
        let config = CacheConfig::default();
        let mut cache = PrefixCache::with_hashing(&config, Hashing::Constant).unwrap();
        let ns = cache.namespace(&NamespaceKey::default()).unwrap();
        let texts = [1..=16, 17..=32].map(Vec::from_iter);
        let replica = ReplicaId(0);
        for tokens in &texts {
            let key = Key { ns, tokens };
            let Match {
                mut lease,
                device_tokens,
                ..
            } = cache.match_lease(key, replica, 99, 0);
            assert_eq!(device_tokens, 0);
            let tier = TierId::Device(replica);
            let (mut reservation, _) = cache.reserve(tier, 1, 0).unwrap();
            let pages = cache.acquire(&mut reservation, 1);
            let _ = cache.extend(&mut lease, tokens, pages, &SpanMeta::default(), 0);
            cache.end(lease, Fate::Keep, 0);
            cache.check().unwrap();
        }
        let pages = texts.map(|tokens| {
            let found = cache.match_lease(
                Key {
                    ns,
                    tokens: &tokens,
                },
                replica,
                99,
                0,
            );
            assert_eq!(found.device_tokens, 16);
            let mut pages = Vec::new();
            cache.pages(&found.lease, &mut pages);
            cache.end(found.lease, Fate::Keep, 0);
            pages
        });
        assert_ne!(pages[0], pages[1]);
        cache.check().unwrap();
    }
}
