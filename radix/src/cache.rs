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

use crate::copies::Flights;
use crate::event::Events;
use crate::namespace::Namespaces;
use crate::node::Node;
use crate::order::Ranking;
use crate::pin::Pins;
use crate::policy::agent::{Agent, Said};
use crate::program::Programs;
use crate::retain::Retention;
use crate::storage::Store;
use crate::tier::Tier;
use crate::tree::{Hashing, Tree, narrow};
use crate::{
    CacheConfig, CacheError, CacheStats, FlushRefused, Key, Lease, Match, PolicyKind, Probe, Token,
    WritePolicy,
};
use rootstock_memory::{Nanos, PageId, Pages, ReplicaId, Reservation, StepId, TierId};

/// A radix-tree prefix cache over the page pools of all replicas.
#[derive(Debug)]
pub struct PrefixCache {
    pub(crate) tree: Tree,
    /// Devices in the order of replicas, then host.
    pub(crate) tiers: Vec<Tier>,
    /// Where host is in `tiers`, if there is one.
    pub(crate) host: Option<usize>,
    pub(crate) flights: Flights,
    pub(crate) pins: Pins,
    pub(crate) retention: Retention,
    pub(crate) store: Option<Store>,
    /// Only with that policy.
    pub(crate) agent: Option<Box<Agent>>,
    pub(crate) programs: Programs,
    pub(crate) write_policy: WritePolicy,
    /// Whether how often a node was matched is what it is ranked by.
    ranks_hits: bool,
    /// Whether what was matched may grow by what was not: nothing tells them apart but their place,
    /// and no other device asks how often each was matched.
    pub(crate) grows_found: bool,
    pub(crate) max_copies: usize,
    pub(crate) layers: u16,
    pub(crate) pins_yielded: u64,
    /// Only with `max_events`.
    pub(crate) events: Option<Events>,
    /// Changes of what is cached.
    pub(crate) revision: u64,
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
        let ranking = Ranking::of(config.policy);
        let devices = (0..)
            .map(|n| TierId::Device(ReplicaId(n)))
            .zip(&config.device_pages);
        let mut tiers: Vec<Tier> = devices
            .map(|(id, &total)| Tier::new(id, total, ranking))
            .collect();
        let host = (config.host_pages > 0).then_some(tiers.len());
        if host.is_some() {
            tiers.push(Tier::new(TierId::Host, config.host_pages, ranking));
        }
        let pinnable = match host {
            Some(_) => f64::from(config.host_pages),
            None => config.device_pages.iter().copied().map(f64::from).sum(),
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share"
        )]
        let budget = (pinnable * config.pin_budget) as u32;
        let devices = config.device_pages.iter().copied();
        let pages = devices.fold(config.host_pages, u32::saturating_add);
        Ok(Self {
            tree: Tree::new(config.page_tokens, config.max_nodes, hashing),
            tiers,
            host,
            flights: Flights::default(),
            pins: Pins::new(budget),
            retention: Retention::default(),
            store: (config.storage_pages > 0)
                .then(|| Store::new(config.storage_pages, config.storage_probes)),
            agent: (config.policy == PolicyKind::Agent).then(|| Box::new(Agent::new(pages))),
            programs: Programs::default(),
            write_policy: config.write_policy,
            ranks_hits: ranking.counts_hits(),
            grows_found: ranking.is_alike_along_a_node()
                && config.device_pages.len() == 1
                && (host.is_none() || config.write_policy != WritePolicy::Selective),
            max_copies: config.max_copies as usize,
            layers: config.layers,
            pins_yielded: 0,
            revision: 0,
            events: (config.max_events > 0).then(|| Events::new(config.max_events)),
            namespaces: Namespaces::new(config.max_namespaces),
            clock: 0,
            leases: 0,
            lookups: 0,
            lookup_tokens: 0,
            uncached_pages: 0,
        })
    }

    /// How much of a prefix is cached, for queues and routers. Changes nothing: no split, no
    /// recency, no count.
    pub fn probe(&self, key: Key<'_>, replica: ReplicaId) -> Probe {
        let Some(root) = self.namespaces.root(key.ns) else {
            return Probe::default();
        };
        let p = self.page_tokens();
        let whole = |reached: &Reached| reached.pages + reached.partly.map_or(0, |part| part.1);
        let device = self.walk(root, 0, key.tokens, usize::from(replica.0));
        let device_pages = whole(&device);
        let (mut host_pages, mut storage_tokens) = (0, 0);
        if let Some(host) = self.host {
            // A node that the device has in part does not exist: it has all of it or nothing.
            let rest = &key.tokens[(device.pages * p) as usize..];
            let below = self.walk(device.node, device.pages, rest, host);
            host_pages = whole(&below).max(device_pages) - device_pages;
            let partly = below.partly.or(device.partly);
            let node = partly.map_or(below.node, |part| part.0);
            storage_tokens = self.stored_tokens(node, device_pages + host_pages, key.tokens);
        }
        Probe {
            device_tokens: device_pages * p,
            host_tokens: host_pages * p,
            storage_tokens,
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
            grown: (0, 0),
            kept: None,
            ahead: None,
            copy: None,
            arrived: now,
            asked_pages: narrow(key.tokens.len()) / self.page_tokens(),
            said: Said::default(),
        };
        self.expire(now);
        self.leases += 1;
        let at = usize::from(replica.0);
        assert!(at < self.devices(), "replica {at} of {}", self.devices());
        self.tiers[at].lease(root, self.tree.node(root));
        let p = self.page_tokens();
        let device_tokens = self.cover(&mut lease, tokens, now) * p;
        let host_tokens = self.look_ahead(&mut lease, tokens, now) * p;
        let read_tokens = self.read_pages(&lease) * p;
        let (node, pages) = match lease.ahead {
            Some((node, _, pages)) => (node, pages),
            None => (self.end_of(&lease), lease.pages),
        };
        let storage_tokens = self.stored_tokens(node, pages, tokens);
        self.lookups += 1;
        self.lookup_tokens += key.tokens.len() as u64;
        self.tiers[at].hit_tokens += u64::from(device_tokens);
        if let Some(host) = self.host {
            self.tiers[host].hit_tokens += u64::from(host_tokens - read_tokens);
        }
        Match {
            lease,
            device_tokens,
            host_tokens,
            read_tokens,
            storage_tokens,
        }
    }

    /// Extends a lease over what became cached after it since; returns the tokens added. `key` is
    /// the whole prefix, the leased part included.
    pub fn grow(&mut self, lease: &mut Lease, key: Key<'_>, max_tokens: u32, now: Nanos) -> u32 {
        self.expire(now);
        let covered = lease.len_tokens() as usize;
        let mut added = 0;
        if lease.tail() == 0
            && key.ns == lease.ns
            && let Some(rest) = limited(key.tokens, max_tokens).get(covered..)
        {
            added = self.cover(lease, rest, now) * self.page_tokens();
        }
        self.settle_copy(lease, false);
        added
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
            out[begin..begin + node.pages as usize].copy_from_slice(tier.pages_of(at));
            at = node.parent;
        }
        for (page, id) in lease.kept_pages() {
            out[first + page as usize] = id;
        }
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
        if let Some(at) = self.index(TierId::Device(replica)) {
            self.tiers[at].pool.step_done(step);
        }
    }

    /// Empties all tiers.
    ///
    /// # Errors
    /// Leases live or requests hold pages; then nothing was cleared.
    /// # Panics
    /// Only when the cache contradicts itself.
    pub fn flush(&mut self, now: Nanos) -> Result<(), FlushRefused> {
        self.expire(now);
        let held_pages = self.tiers.iter().map(Tier::held).sum();
        let stored = self.store.as_ref().map_or(0, Store::under_way);
        let in_transit_pages = self.tiers.iter().map(|tier| tier.in_transit).sum::<u32>();
        let in_transit_pages = in_transit_pages.max(stored);
        if self.leases > 0 || held_pages > 0 || in_transit_pages > 0 {
            return Err(FlushRefused {
                leases: self.leases,
                held_pages,
                in_transit_pages,
            });
        }
        while let Some(&at) = self.pins.by_node.keys().next() {
            self.unpin(at);
        }
        let events = self.events.take();
        for tier in 0..self.tiers.len() {
            while let Some(first) = self.tiers[tier].first() {
                self.drop_from(tier, first);
            }
            assert_eq!(
                self.tiers[tier].cached, 0,
                "without leases everything can go"
            );
        }
        self.events = events;
        self.clear_store();
        self.tell_cleared();
        Ok(())
    }

    /// Counts.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            tiers: self
                .tiers
                .iter()
                .map(Tier::stats)
                .chain(self.store.as_ref().map(Store::stats))
                .collect(),
            nodes: narrow(self.tree.nodes.len()),
            namespaces: narrow(self.namespaces.len()),
            leases: self.leases,
            lookups: self.lookups,
            lookup_tokens: self.lookup_tokens,
            uncached_pages: self.uncached_pages,
            copies_under_way: narrow(self.flights.under_way()),
            copies_failed: self.flights.failed,
            copied_down_pages: self.flights.arrived.0,
            copied_up_pages: self.flights.arrived.1,
            copies_stray: self.flights.stray,
            pinned_pages: self.pins.pages,
            pin_budget_pages: self.pins.budget,
            retained_nodes: narrow(self.retention.len()),
            programs: narrow(self.programs.len()),
            returns: self.programs.returns,
            duel: self.agent.as_ref().map(|agent| agent.duel()),
            curve: self.hit_curve(),
            pins_yielded: self.pins_yielded,
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

    pub(crate) fn index(&self, tier: TierId) -> Option<usize> {
        match tier {
            TierId::Device(replica) => {
                Some(usize::from(replica.0)).filter(|&at| at < self.devices())
            }
            TierId::Host => self.host,
            TierId::Storage => None,
        }
    }

    pub(crate) fn devices(&self) -> usize {
        self.host.unwrap_or(self.tiers.len())
    }

    /// The node in which the tree part of a lease ends.
    pub(crate) fn end_of(&self, lease: &Lease) -> u32 {
        self.normal(lease.node, lease.pages)
    }

    /// Follows `rest` from the end of `from` over what is resident in a tier.
    pub(crate) fn walk(&self, from: u32, pages: u32, mut rest: &[Token], tier: usize) -> Reached {
        let tier = &self.tiers[tier];
        let mut reached = Reached {
            node: from,
            pages,
            partly: None,
        };
        while let Some((child, common)) = self.tree.step(reached.node, rest) {
            if !tier.is_resident(child) {
                break;
            }
            let edge = self.tree.node(child).pages;
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
            tier.split(at, upper, keep);
        }
        if let Some(events) = &mut self.events {
            split_rows(&mut events.hashes, at, upper, keep);
        }
        if let Some(store) = &mut self.store {
            split_rows(&mut store.addresses, at, upper, keep);
        }
        self.split_pin(at, upper);
        self.retention.split(at, upper);
        if let Some(agent) = &mut self.agent {
            agent.split(at, upper, self.tree.node(at).depth);
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

    /// A node was matched once more.
    pub(crate) fn count_hit(&mut self, at: u32) {
        let count = |node: &mut Node| node.hits = node.hits.saturating_add(1);
        if self.ranks_hits {
            self.update(at, count);
        } else {
            count(self.tree.node_mut(at));
        }
    }

    /// Extends a lease over the cached part of `rest`, which follows it; returns the pages added.
    fn cover(&mut self, lease: &mut Lease, rest: &[Token], now: Nanos) -> u32 {
        let tier = usize::from(lease.replica.0);
        let first = lease.pages;
        let reached = self.walk(self.end_of(lease), first, rest, tier);
        (lease.node, lease.pages) = self.cut(reached);
        self.clock += 1;
        let mut at = lease.node;
        while self.tree.node(at).depth >= first && !self.tree.node(at).is_root() {
            self.tiers[tier].lease(at, self.tree.node(at));
            self.matched(at, now);
            at = self.tree.node(at).parent;
        }
        self.renew_pins(lease.node, now);
        lease.pages - first
    }

    /// Notes what host has right after a lease; returns its pages. It is not kept until it is
    /// promoted.
    fn look_ahead(&mut self, lease: &mut Lease, tokens: &[Token], now: Nanos) -> u32 {
        let Some(host) = self.host else { return 0 };
        let end = self.end_of(lease);
        let rest = &tokens[(lease.pages * lease.page_tokens) as usize..];
        let reached = self.walk(end, lease.pages, rest, host);
        let (node, pages) = self.cut(reached);
        if pages > lease.pages {
            lease.ahead = Some((node, self.tree.node(node).generation, pages));
        }
        let mut at = node;
        while self.tree.node(at).depth >= lease.pages && !self.tree.node(at).is_root() {
            self.tiers[host].refresh(at, self.tree.node(at), self.clock);
            self.matched(at, now);
            at = self.tree.node(at).parent;
        }
        self.renew_pins(node, now);
        pages - lease.pages
    }

    /// Where a walk ended, with the node that it covers in part cut to that part.
    fn cut(&mut self, reached: Reached) -> (u32, u32) {
        if let Some((child, common)) = reached.partly
            && let Some(upper) = self.split(child, common)
        {
            return (upper, reached.pages + common);
        }
        (reached.node, reached.pages)
    }

    /// Whether a node is in this tier and no other.
    pub(crate) fn only_in(&self, tier: usize, at: u32) -> bool {
        (0..self.tiers.len()).all(|other| (other == tier) == self.tiers[other].is_resident(at))
    }
}

/// What lies by node, a row of what there is for each page, after `upper` was cut from `lower`.
fn split_rows<T>(rows: &mut Vec<Vec<T>>, lower: u32, upper: u32, keep: u32) {
    let (lower, upper) = (lower as usize, upper as usize);
    let Some(row) = rows.get_mut(lower) else {
        return;
    };
    let below = row.split_off(row.len().min(keep as usize));
    let above = std::mem::replace(row, below);
    *row_of(rows, upper) = above;
}

/// The row of a node, made where there is none.
pub(crate) fn row_of<T>(rows: &mut Vec<Vec<T>>, at: usize) -> &mut Vec<T> {
    if rows.len() <= at {
        rows.resize_with(at + 1, Vec::new);
    }
    &mut rows[at]
}

/// The first `max_tokens` of `tokens`.
fn limited(tokens: &[Token], max_tokens: u32) -> &[Token] {
    &tokens[..tokens.len().min(max_tokens as usize)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fate, NamespaceKey, SpanMeta};

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
