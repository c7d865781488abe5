//! Room: what goes, where it goes to, and what a request gets for it.

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::order::Place;
use crate::{Room, Short, WritePolicy};
use rootstock_memory::{CopyClass, CopyPlan, Nanos, Reservation, TierId};
use std::collections::BTreeSet;

impl PrefixCache {
    /// Reserves `n` pages, evicting for them what is needed: all or nothing.
    ///
    /// # Errors
    /// Not enough is free and evictable. With `in_transit_pages` copies are under way that free
    /// pages: ask again after their acknowledgement.
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

    /// Evicts until `n` pages of `tier` are free. What the write policy or a pin wants to keep is
    /// copied to host first; its device pages can go once that copy is acknowledged.
    ///
    /// # Errors
    /// Not enough is free and evictable: nothing was evicted. Or, with `in_transit_pages`, the
    /// rest waits for copies: ask again after their acknowledgement.
    /// # Cost
    /// Linear in the pages freed.
    pub fn make_room(&mut self, tier: TierId, n: u32, now: Nanos) -> Result<Room, Short> {
        self.expire(now);
        let Some(at) = self.index(tier) else {
            return Err(Short {
                needed_pages: n,
                ..Short::default()
            });
        };
        if self.available(tier) + self.coming(at) < n {
            return Err(self.short(at, n));
        }
        let mut room = Room::default();
        while self.tiers[at].pool.free() < n {
            let coming = self.tiers[at].pool.free() + self.coming(at);
            let Some(missing) = n.checked_sub(coming).filter(|&missing| missing > 0) else {
                break;
            };
            let went_on = match self.tiers[at].first() {
                Some(first) => self.evict_or_demote(at, first, missing, &mut room),
                None if self.host.is_none() => {
                    let yielded = self.yield_pin(at);
                    room.pins_yielded += yielded;
                    yielded > 0
                }
                None => false,
            };
            if !went_on {
                break;
            }
        }
        self.tiers[at].evicted_pages += u64::from(room.freed_pages);
        self.pins_yielded += u64::from(room.pins_yielded);
        if self.tiers[at].pool.free() < n {
            return Err(self.short(at, n));
        }
        room.copies = self.take_copies_of(tier);
        Ok(room)
    }

    /// Pages of a tier that [`Self::reserve`] could grant now or after copies: free and evictable.
    pub fn available(&self, tier: TierId) -> u32 {
        self.index(tier).map_or(0, |at| {
            self.tiers[at].available()
                - if self.host == Some(at) {
                    self.blocked()
                } else {
                    0
                }
        })
    }

    /// Usable pages of a tier.
    pub fn total(&self, tier: TierId) -> u32 {
        self.index(tier).map_or(0, |at| self.tiers[at].pool.total())
    }

    fn short(&self, at: usize, needed_pages: u32) -> Short {
        let tier = &self.tiers[at];
        Short {
            needed_pages,
            free_pages: tier.pool.free(),
            evictable_pages: tier.evictable(),
            in_transit_pages: self.kept_by_copies(at),
        }
    }

    /// Pages that demotions under way will let go, as far as nobody took a lease meanwhile.
    fn coming(&self, tier: usize) -> u32 {
        if self.tiers[tier].leaving == 0 {
            return 0;
        }
        let flights = self.flights.all.values();
        let leaving = flights.filter(|flight| flight.leaving && flight.from == tier);
        let nodes =
            leaving.flat_map(|flight| self.nodes_between(flight.node, flight.start, flight.end));
        let free = nodes.filter(|&at| self.tiers[tier].span(at).leases == 0);
        free.map(|at| self.tree.node(at).pages).sum()
    }

    /// Pages of a tier that nothing but copies under way keeps: each goes back to the candidates
    /// with its acknowledgement.
    pub(crate) fn kept_by_copies(&self, tier: usize) -> u32 {
        let mut kept = BTreeSet::new();
        for flight in self
            .flights
            .all
            .values()
            .filter(|flight| flight.is_under_way())
        {
            for (_, (last, start, end)) in self
                .kept_by(flight)
                .into_iter()
                .filter(|&(at, _)| at == tier)
            {
                kept.extend(self.nodes_between(last, start, end));
            }
        }
        if let Some(store) = self.store.as_ref().filter(|_| self.host == Some(tier)) {
            for (last, end) in store.kept() {
                kept.extend(self.nodes_between(last, 0, end));
            }
        }
        let alone = kept
            .iter()
            .filter(|&&at| self.tiers[tier].span(at).leases == 0);
        alone.map(|&at| self.tree.node(at).pages).sum()
    }

    /// Host pages that count as evictable but cannot go now: pinned, or with something below them
    /// that is pinned or read by a copy.
    fn blocked(&self) -> u32 {
        let Some(host) = self.host else { return 0 };
        let mut blocked = BTreeSet::new();
        let sources = self
            .flights
            .all
            .values()
            .filter(|flight| flight.from == host);
        for mut at in sources
            .map(|flight| flight.node)
            .chain(self.pins.by_node.keys().copied())
        {
            while !self.tree.node(at).is_root() && blocked.insert(at) {
                at = self.tree.node(at).parent;
            }
        }
        let span = |at: u32| self.tiers[host].span(at);
        let counted = blocked
            .iter()
            .filter(|&&at| span(at).resident && !span(at).is_kept());
        counted.map(|&at| self.tree.node(at).pages).sum()
    }

    /// Evicts up to `missing` pages of the candidate `at`, or plans to copy them down first.
    /// False when the answer has to wait for copies.
    fn evict_or_demote(&mut self, tier: usize, at: u32, missing: u32, room: &mut Room) -> bool {
        if !self.wants_copy(tier, at) {
            // What cannot be copied and is nowhere else loses its pin with its pages.
            let last = self.host.is_some_and(|host| host != tier) && self.only_in(tier, at);
            room.pins_yielded += if last { self.unpin_below(at) } else { 0 };
            room.freed_pages += self.evict_from(tier, at, missing);
            return true;
        }
        if self.flights.under_way() >= self.max_copies {
            // Wait where that helps; elsewhere do without the copy.
            return self.kept_by_copies(tier) == 0 && self.give_up(tier, at);
        }
        let (depth, end) = (self.tree.node(at).depth, self.tree.node(at).end());
        let start = end.saturating_sub(missing).max(depth);
        // What goes after it in this call is worth more and fills host alone.
        let after = missing - (end - start);
        let pinned = self.is_pinned(at);
        if !pinned
            && self
                .host
                .is_some_and(|host| after >= self.tiers[host].pool.total())
        {
            return self.give_up(tier, at);
        }
        // Cut first: only the tail is to go. Without a free node all of it goes.
        let cut = start == depth || self.split(at, start - depth).is_some();
        let start = if cut { start } else { depth };
        let rank = self.rank_on_host(tier, at);
        let got = self.room_on_host(end - start, rank);
        if got < end - start && pinned && self.kept_by_copies(tier) > 0 {
            // What is on its way to host will be worth less there than a promise.
            return false;
        }
        if got == 0 {
            return self.give_up(tier, at);
        }
        let mut at = at;
        if got < end - start {
            // Host takes the first part, the rest goes.
            let Some(upper) = self.split(at, got) else {
                return self.give_up(tier, at);
            };
            room.freed_pages += self.evict_from(tier, at, end - start - got);
            at = upper;
        }
        self.demote(tier, at, start..start + got, CopyClass::Demote, true);
        true
    }

    /// The candidate will be dropped without a copy.
    fn give_up(&mut self, tier: usize, at: u32) -> bool {
        self.tiers[tier].change(at, self.tree.node(at), Place::Tail, |span| {
            span.stuck = true
        });
        true
    }

    /// Whether the pages of a device candidate should be on host before they go.
    fn wants_copy(&self, tier: usize, at: u32) -> bool {
        let Some(host) = self.host.filter(|&host| host != tier) else {
            return false;
        };
        let (here, there) = (self.tiers[tier].span(at), self.tiers[host].span(at));
        let important = self.tree.node(at).priority > 0;
        let kept = self.write_policy == WritePolicy::Back
            || (self.write_policy == WritePolicy::Selective && important)
            || self.is_pinned(at)
            || (!self.tree.node(at).is_leaf() && self.only_in(tier, at));
        let worthless = here.spent && !self.is_pinned(at);
        kept && !worthless && !there.resident && !there.incoming && !here.stuck
    }

    /// Evicts from the candidate `at` of a tier up to `missing` pages, from its end.
    pub(crate) fn evict_from(&mut self, tier: usize, at: u32, missing: u32) -> u32 {
        let keep = self.tree.node(at).pages.saturating_sub(missing);
        if keep == 0 {
            return self.drop_from(tier, at);
        }
        if self.tree.node(at).is_leaf() && self.only_in(tier, at) && !self.is_pinned(at) {
            self.tell_removed(tier, at, keep);
            let freed = self.tiers[tier].free_tail(at, self.tree.node(at), keep);
            self.tree.truncate(at, keep);
            if let Some(agent) = &mut self.agent {
                agent.evicted(at, self.tree.node(at).end());
            }
            return freed;
        }
        // The lower part keeps the index; without a free node all of it goes.
        let _ = self.split(at, keep);
        self.drop_from(tier, at)
    }

    /// Frees what a candidate has in a tier, and removes it when that was its last place, with
    /// what only host still has below it.
    pub(crate) fn drop_from(&mut self, tier: usize, at: u32) -> u32 {
        self.tell_removed(tier, at, 0);
        let freed = self.tiers[tier].vacate(at, &self.tree);
        if self.tiers.len() == 1 {
            // One device: its residents are closed upwards, so nothing is below.
            self.pins_yielded += u64::from(self.unpin(at));
            self.remove(at);
            return freed;
        }
        if self.tiers.iter().any(|tier| tier.is_resident(at)) {
            return freed;
        }
        let mut last = at;
        loop {
            let child = self.tree.node(last).first_child;
            if child != NIL {
                last = child;
                continue;
            }
            let parent = self.tree.node(last).parent;
            self.pins_yielded += u64::from(self.unpin(last));
            if let Some(host) = self.host
                && self.tiers[host].is_resident(last)
            {
                self.tell_removed(host, last, 0);
                let lost = self.tiers[host].vacate(last, &self.tree);
                self.tiers[host].evicted_pages += u64::from(lost);
            }
            self.remove(last);
            if last == at {
                return freed;
            }
            last = parent;
        }
    }

    fn remove(&mut self, at: u32) {
        self.tree.remove(at);
        self.retention.forget(at);
        if let Some(agent) = &mut self.agent {
            agent.forget(at);
        }
        for tier in &mut self.tiers {
            tier.forget(at);
        }
        // Nothing of it is left for who gets its index.
        let hashes = self.events.as_mut().map(|events| &mut events.hashes);
        if let Some(row) = hashes.and_then(|rows| rows.get_mut(at as usize)) {
            row.clear();
        }
        let addresses = self.store.as_mut().map(|store| &mut store.addresses);
        if let Some(row) = addresses.and_then(|rows| rows.get_mut(at as usize)) {
            row.clear();
        }
    }
}
