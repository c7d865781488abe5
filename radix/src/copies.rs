//! Copies between the device tiers and the host tier, from the choice of the source to the
//! acknowledgement.
//!
//! A copy under way names a span: the last node that it covers and the pages from the root where
//! it begins and ends. Nodes may split meanwhile; the span stays. It keeps, by `busy`:
//!
//! ```text
//!   demote   device: source and its path, so that the tree cannot lose the way to it
//!   promote  host: source;  device: the path to the destination
//! ```
//! Destination pages belong to the copy. A promotion that arrived goes on keeping its pages on
//! the device until the lease that asked for it takes them over or ends.

use crate::cache::PrefixCache;
use crate::lease::Lease;
use crate::order::{Place, Rank};
use crate::tier::Span;
use crate::tree::narrow;
use rootstock_memory::{
    CopyClass, CopyDone, CopyId, CopyPlan, Nanos, PageId, Pages, ReplicaId, Reservation, StepId,
    TierId,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// The part of a device, one of so many, that may be on its way up without anybody waiting for it.
const AHEAD: u32 = 4;

/// What may go for pages that are brought up and that nobody waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cost {
    /// What nobody uses: somebody has asked for it.
    Unused,
    /// Only what ranks lower.
    WorthLess,
}

/// A copy under way, or one that has arrived and waits for its lease.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// A node at or below the last one covered.
    pub(crate) node: u32,
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Node and depth of the kept device path.
    path: (u32, u32),
    /// Destination; `None` once it has arrived.
    pages: Option<Pages>,
    /// Whether a lease waits for it.
    awaited: bool,
    /// Whether it makes room on the device.
    pub(crate) leaving: bool,
    /// Last step that reads its destination before it is acknowledged.
    pub(crate) read_by: Option<StepId>,
}

impl Flight {
    pub(crate) const fn is_under_way(&self) -> bool {
        self.pages.is_some()
    }

    const NEW: Self = Self {
        from: 0,
        to: 0,
        node: 0,
        start: 0,
        end: 0,
        path: (0, 0),
        pages: None,
        awaited: false,
        leaving: false,
        read_by: None,
    };
}

/// All copies.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    pub(crate) all: BTreeMap<CopyId, Flight>,
    /// Plans that the caller has not fetched yet.
    pub(crate) outbox: Vec<CopyPlan>,
    next: u64,
    pub(crate) failed: u64,
    /// Pages that arrived on host, and on devices.
    pub(crate) arrived: (u64, u64),
    pub(crate) stray: u64,
}

impl Flights {
    /// An id that no copy had.
    pub(crate) const fn next_id(&mut self) -> CopyId {
        let id = CopyId(self.next);
        self.next += 1;
        id
    }
}

impl PrefixCache {
    /// Appends the copies that were planned since the last call. Whoever embeds the cache calls
    /// it after each group of calls; those of [`crate::Room`] and of `reserve` come there.
    pub fn drain_copies(&mut self, out: &mut Vec<CopyPlan>) {
        out.append(&mut self.flights.outbox);
    }

    /// Plans the copy that brings up what a match found on host, as far as the reservation goes.
    /// From now on source and destination are safe. After its acknowledgement
    /// [`PrefixCache::grow`] extends the lease over it; ending the lease gives it up. `None` when
    /// nothing is on host right after the lease any more, when it is on its way already, or when
    /// `max_copies` are under way.
    pub fn promote(
        &mut self,
        lease: &mut Lease,
        reservation: &mut Reservation,
        now: Nanos,
    ) -> Option<CopyPlan> {
        self.expire(now);
        let (host, to) = (self.host?, usize::from(lease.replica.0));
        let (node, generation, pages) = lease.ahead?;
        let alive = self.tree.nodes.get(node as usize)?.generation == generation;
        let full = self.flights.under_way() >= self.max_copies;
        if !alive || full || lease.copy.is_some() || lease.tail() > 0 {
            return None;
        }
        let anchor = self.end_of(lease);
        let chain = self.nodes_between(node, lease.pages, pages);
        if self.tree.node(*chain.first()?).parent != anchor {
            return None;
        }
        let ready = chain.into_iter().take_while(|&at| {
            let span = self.tiers[to].span(at);
            self.tiers[host].is_resident(at) && !span.resident && !span.incoming
        });
        let last = ready.last()?;
        let end = self
            .tree
            .node(last)
            .end()
            .min(lease.pages + reservation.left());
        let start = lease.pages;
        let last = if end > start {
            self.node_ending(last, end)?
        } else {
            return None;
        };
        let dest = self.tiers[to].acquire_for_copy(reservation, end - start);
        let plan = self.lift(to, anchor, (last, start, end), dest, true);
        lease.copy = Some(plan.id);
        Some(plan)
    }

    /// Registers the copy of a span on host to a device, right after the `anchor` there.
    fn lift(
        &mut self,
        to: usize,
        anchor: u32,
        (node, start, end): (u32, u32, u32),
        dest: Pages,
        awaited: bool,
    ) -> CopyPlan {
        let from = self.host.expect("what is lifted is on host");
        self.keep_span(from, node, start, end, true);
        self.keep_path(to, anchor, start, true);
        for at in self.nodes_between(node, start, end) {
            let node = self.tree.node(at);
            self.tiers[from].change(at, node, Place::Tail, |span| span.read = false);
        }
        let flight = Flight {
            from,
            to,
            node,
            start,
            end,
            path: (anchor, start),
            awaited,
            ..Flight::NEW
        };
        self.launch(flight, dest, CopyClass::Promote)
    }

    /// Plans to bring up to a device what host has of the first `pages` of the path of `at`, right
    /// after what the device has, for somebody who will ask for it; returns how many pages. What
    /// is on its way like this takes a share of the device at most, and what arrives is as
    /// evictable as anything that nobody uses.
    pub(crate) fn promote_ahead(
        &mut self,
        replica: ReplicaId,
        at: u32,
        pages: u32,
        cost: Cost,
        now: Nanos,
    ) -> u32 {
        let to = usize::from(replica.0);
        let Some(host) = self.host.filter(|_| to < self.devices()) else {
            return 0;
        };
        let start = self.on_device(replica, at, pages);
        let root = self.tree.root_of(at);
        let way = self.nodes_between(at, 0, start);
        let anchor = way.last().copied().unwrap_or(root);
        let chain = self.nodes_between(at, start, pages);
        let ready = chain.into_iter().take_while(|&at| {
            let span = self.tiers[to].span(at);
            self.tiers[host].is_resident(at) && !span.resident && !span.incoming
        });
        let ready: Vec<u32> = ready.collect();
        let (Some(&last), true) = (ready.last(), self.flights.under_way() < self.max_copies) else {
            return 0;
        };
        let most = (self.tiers[to].pool.total() / AHEAD).saturating_sub(self.lifted(to));
        let n = (self.tree.node(last).end().min(pages) - start).min(most);
        // Room is not made at the cost of what is brought up, nor of the way there.
        self.keep_nodes(to, &way, true);
        self.keep_nodes(host, &ready, true);
        match cost {
            Cost::Unused => self.make_room_ahead(replica, n, now),
            Cost::WorthLess => {
                let node = self.tree.node(last);
                let rank = self.tiers[host].rank_of(last, node, &self.tiers[host].span(last));
                self.make_room_below(replica, n, rank, now);
            }
        }
        self.keep_nodes(to, &way, false);
        self.keep_nodes(host, &ready, false);
        let n = n.min(self.tiers[to].pool.free());
        let end = start + n;
        let Some(last) = (n > 0).then(|| self.node_ending(last, end)).flatten() else {
            return 0;
        };
        let Some(mut rest) = self.tiers[to].pool.reserve(n) else {
            return 0;
        };
        let dest = self.tiers[to].acquire_for_copy(&mut rest, n);
        let plan = self.lift(to, anchor, (last, start, end), dest, false);
        self.flights.outbox.push(plan);
        n
    }

    fn make_room_ahead(&mut self, replica: ReplicaId, n: u32, now: Nanos) {
        let room = self.make_room(TierId::Device(replica), n, now);
        self.flights
            .outbox
            .extend(room.into_iter().flat_map(|room| room.copies));
    }

    /// Makes up to `n` pages of a device free, at the cost only of what ranks lower.
    fn make_room_below(&mut self, replica: ReplicaId, n: u32, rank: Rank, now: Nanos) {
        let at = usize::from(replica.0);
        while let free = self.tiers[at].pool.free()
            && free < n
            && let Some(first) = self.tiers[at].first()
        {
            let (tier, node) = (&self.tiers[at], self.tree.node(first));
            if tier.rank_of(first, node, &tier.span(first)) >= rank {
                break;
            }
            self.make_room_ahead(replica, n.min(free + node.pages), now);
            if self.tiers[at].pool.free() == free {
                break;
            }
        }
    }

    /// Pages of the first `pages` of the path of `at` that a device has, from the root on.
    pub(crate) fn on_device(&self, replica: ReplicaId, at: u32, pages: u32) -> u32 {
        let to = usize::from(replica.0);
        let path = self.nodes_between(at, 0, pages);
        let there = path
            .iter()
            .take_while(|&&at| self.tiers[to].is_resident(at));
        there
            .last()
            .map_or(0, |&at| self.tree.node(at).end().min(pages))
    }

    /// Pages on their way up to a device for which nobody waits.
    fn lifted(&self, to: usize) -> u32 {
        let flights = self.flights.all.values();
        let ahead = flights.filter(|flight| flight.to == to && !flight.awaited);
        ahead.map(|flight| flight.end - flight.start).sum()
    }

    /// Takes the acknowledgement of a copy. One that is not under way is counted and ignored.
    ///
    /// # Panics
    /// Only when the cache contradicts itself.
    pub fn copy_done(&mut self, done: CopyDone, now: Nanos) {
        self.expire(now);
        let under_way = self.flights.all.get_mut(&done.id);
        let Some(pages) = under_way.and_then(|flight| flight.pages.take()) else {
            self.flights.stray += 1;
            return;
        };
        let mut flight = self
            .flights
            .all
            .remove(&done.id)
            .expect("it was just found");
        self.clock += 1;
        self.flights.failed += u64::from(!done.ok);
        self.count_arrival(&flight, done.ok);
        self.land(&flight, pages, done.ok);
        let (path, depth) = flight.path;
        if Some(flight.to) == self.host {
            self.keep_path(flight.from, path, depth, false);
            if flight.leaving {
                self.tiers[flight.from].leaving -= flight.end - flight.start;
            }
            if done.ok {
                self.store_down(self.normal(flight.node, flight.end));
            }
            return;
        }
        if done.ok && flight.awaited {
            // What has arrived stays until its lease takes it over.
            flight.path = (flight.node, flight.end);
            self.keep_path(flight.to, flight.node, flight.end, true);
        }
        self.keep_span(flight.from, flight.node, flight.start, flight.end, false);
        self.keep_path(flight.to, path, depth, false);
        if done.ok && flight.awaited {
            self.flights.all.insert(done.id, flight);
        }
    }

    /// The lease took over what its copy brought, or wants it no more.
    pub(crate) fn settle_copy(&mut self, lease: &mut Lease, ends: bool) {
        let Some(id) = lease.copy else { return };
        match self.flights.all.get_mut(&id) {
            Some(flight) if flight.pages.is_some() => {
                if ends {
                    flight.awaited = false;
                    lease.copy = None;
                }
            }
            Some(flight) => {
                let (to, (node, depth)) = (flight.to, flight.path);
                self.flights.all.remove(&id);
                self.keep_path(to, node, depth, false);
                lease.copy = None;
            }
            None => lease.copy = None,
        }
    }

    /// Copies to host what lies on the path of `last`, on a device, from where `wanted` says so.
    pub(crate) fn write_down(
        &mut self,
        device: usize,
        last: u32,
        class: CopyClass,
        wanted: impl Fn(&Self, u32) -> bool,
    ) {
        let Some(host) = self.host else { return };
        let mut runs: Vec<(u32, u32, u32)> = Vec::new();
        let mut at = last;
        while !self.tree.node(at).is_root() {
            let node = self.tree.node(at);
            let there = self.tiers[host].span(at);
            let here = self.tiers[device].span(at);
            if here.resident
                && !here.stuck
                && !there.resident
                && !there.incoming
                && wanted(self, at)
            {
                match runs.last_mut() {
                    Some(run) if run.1 == node.end() => run.1 = node.depth,
                    _ => runs.push((at, node.depth, node.end())),
                }
            }
            at = node.parent;
        }
        // From the root on: a prefix is worth more than what follows it.
        for (last, start, end) in runs.into_iter().rev() {
            let rank = self.rank_on_host(device, last);
            let room = self.room_on_host(end - start, rank);
            if room > 0 && self.flights.under_way() < self.max_copies {
                self.demote(device, last, start..start + room, class, false);
            }
        }
    }

    /// Makes up to `n` pages free on host, at the cost only of what ranks lower; returns how many
    /// there are.
    pub(crate) fn room_on_host(&mut self, n: u32, rank: Rank) -> u32 {
        let Some(host) = self.host else { return 0 };
        while self.tiers[host].pool.free() < n {
            let missing = n - self.tiers[host].pool.free();
            let first = self.tiers[host].first().filter(|&at| {
                let tier = &self.tiers[host];
                tier.rank_of(at, self.tree.node(at), &tier.span(at)) < rank
            });
            let Some(first) = first else { break };
            let freed = self.evict_from(host, first, missing);
            self.tiers[host].evicted_pages += u64::from(freed);
        }
        self.tiers[host].pool.free().min(n)
    }

    /// The rank that a node of a device would have on host: a promise goes before all else.
    pub(crate) fn rank_on_host(&self, device: usize, at: u32) -> Rank {
        if self.is_pinned(at) {
            return (i64::MAX, u64::MAX);
        }
        let tier = &self.tiers[device];
        let span = tier.span(at);
        // What is leased is being used now.
        let stamp = if span.leases > 0 {
            self.clock
        } else {
            span.stamp
        };
        tier.rank_of(at, self.tree.node(at), &Span { stamp, ..span })
    }

    /// Plans the copy of pages `start..end` of the path of `node` to host, which has room.
    pub(crate) fn demote(
        &mut self,
        from: usize,
        node: u32,
        span: Range<u32>,
        class: CopyClass,
        leaving: bool,
    ) {
        let Range { start, end } = span;
        let Some(host) = self.host else { return };
        let Some(node) = self.node_ending(node, end) else {
            return;
        };
        let n = end - start;
        let mut room = self.tiers[host]
            .pool
            .reserve(n)
            .expect("room was made on host");
        let dest = self.tiers[host].acquire_for_copy(&mut room, n);
        self.keep_path(from, node, end, true);
        if leaving {
            self.tiers[from].leaving += n;
        }
        let path = (node, end);
        let flight = Flight {
            from,
            to: host,
            node,
            start,
            end,
            path,
            leaving,
            ..Flight::NEW
        };
        let plan = self.launch(flight, dest, class);
        self.flights.outbox.push(plan);
    }

    /// Registers a copy and makes its plan.
    fn launch(&mut self, mut flight: Flight, dest: Pages, class: CopyClass) -> CopyPlan {
        let mut source: Vec<PageId> = Vec::with_capacity(dest.len());
        for at in self.nodes_between(flight.node, flight.start, flight.end) {
            let node = self.tree.node(at);
            source.extend(self.tiers[flight.from].pages_of(at));
            self.tiers[flight.to].change(at, node, Place::Tail, |span| span.incoming = true);
        }
        assert_eq!(
            source.len(),
            dest.len(),
            "a copy has as many sources as destinations"
        );
        let id = self.flights.next_id();
        let from = (
            self.tiers[flight.from].pool.tier(),
            source.into_boxed_slice(),
        );
        let to = (self.tiers[flight.to].pool.tier(), dest.ids().into());
        flight.pages = Some(dest);
        self.flights.all.insert(id, flight);
        CopyPlan {
            id,
            from,
            to,
            layers: 0..self.layers,
            class,
            deadline: None,
        }
    }

    /// Makes the destination resident, or gives its pages back where the copy failed or somebody
    /// else was faster.
    fn land(&mut self, flight: &Flight, pages: Pages, ok: bool) {
        let to = flight.to;
        let ids = pages.disband();
        self.tiers[to].in_transit -= narrow(ids.len());
        let mut arrived = false;
        for at in self.nodes_between(flight.node, flight.start, flight.end) {
            let node = self.tree.node(at);
            let first = (node.depth - flight.start) as usize;
            let node_pages = node.pages;
            let part = &ids[first..first + node_pages as usize];
            self.tiers[to].change(at, node, Place::Tail, |span| span.incoming = false);
            let landed = ok && !self.tiers[to].is_resident(at);
            if landed {
                let from = &mut self.tiers[flight.from];
                let stamp = from.span(at).stamp;
                // What is known of it there holds here too.
                if let Some(mark) = from.order.shelf().map(|shelf| shelf.mark_of(at)) {
                    self.tiers[to].remark(at, node, mark);
                }
                self.tiers[to]
                    .set_resident(at, &self.tree, part.to_vec(), |span| span.stamp = stamp);
                arrived = true;
            } else if let Some(step) = flight.read_by {
                self.tiers[to].pool.release_ids_after(part, step);
            } else {
                self.tiers[to].pool.release_ids(part);
            }
            if !ok && Some(to) == self.host {
                let from = &mut self.tiers[flight.from];
                from.change(at, node, Place::Tail, |span| span.stuck = true);
            }
            if landed {
                self.tell_stored(to, at, node_pages);
            }
        }
        if arrived && Some(to) != self.host {
            // The path was asked for, and children lie ahead of their parents.
            let mut at = self.normal(flight.node, flight.end);
            while !self.tree.node(at).is_root() {
                self.tiers[to].refresh(at, self.tree.node(at), self.clock);
                at = self.tree.node(at).parent;
            }
        }
    }

    /// The node in which the first `end` pages of the path of `at` end.
    pub(crate) fn normal(&self, mut at: u32, end: u32) -> u32 {
        while self.tree.node(at).depth >= end && !self.tree.node(at).is_root() {
            at = self.tree.node(at).parent;
        }
        at
    }

    /// The same, cut so that it ends there exactly. `None` when no node is free for the cut.
    pub(crate) fn node_ending(&mut self, at: u32, end: u32) -> Option<u32> {
        let at = self.normal(at, end);
        let node = self.tree.node(at);
        if node.end() == end {
            return Some(at);
        }
        let keep = end - node.depth;
        self.split(at, keep)
    }

    /// The nodes of the path of `at` that cover pages `start..end`, from the root on.
    pub(crate) fn nodes_between(&self, at: u32, start: u32, end: u32) -> Vec<u32> {
        let mut nodes = Vec::new();
        let mut at = self.normal(at, end);
        while self.tree.node(at).depth >= start && !self.tree.node(at).is_root() {
            nodes.push(at);
            at = self.tree.node(at).parent;
        }
        nodes.reverse();
        nodes
    }

    /// What a copy keeps: tier, and a span by its last node, its start and its end.
    pub(crate) fn kept_by(&self, flight: &Flight) -> Vec<(usize, (u32, u32, u32))> {
        let (path, depth) = flight.path;
        let device = if Some(flight.to) == self.host {
            flight.from
        } else {
            flight.to
        };
        let mut kept = vec![(device, (path, 0, depth))];
        if Some(flight.from) == self.host && flight.is_under_way() {
            kept.push((flight.from, (flight.node, flight.start, flight.end)));
        }
        kept
    }

    fn keep_span(&mut self, tier: usize, at: u32, start: u32, end: u32, keep: bool) {
        let nodes = self.nodes_between(at, start, end);
        self.keep_nodes(tier, &nodes, keep);
    }

    pub(crate) fn keep_nodes(&mut self, tier: usize, nodes: &[u32], keep: bool) {
        for &at in nodes {
            let node = self.tree.node(at);
            self.tiers[tier].change(at, node, Place::Tail, |span| {
                span.busy = if keep { span.busy + 1 } else { span.busy - 1 };
            });
        }
    }

    pub(crate) fn keep_path(&mut self, tier: usize, at: u32, end: u32, keep: bool) {
        self.keep_span(tier, at, 0, end, keep);
    }
}
