//! From storage to host: what is looked for, read and put into the tree.
//!
//! ```text
//!   wanted prefix:  [ in the tree | known to be stored | not known ]
//!     a look first, where others may have stored what follows; then one read of all that is known
//! ```
//! Whoever needs a page that is being looked for or read waits: [`PrefixCache::is_reading`].

use super::{Errand, Flight};
use crate::cache::PrefixCache;
use crate::copies::Cost;
use crate::tree::narrow;
use crate::{Key, Lease, NamespaceId, Outcome, SpanMeta, Token};
use rootstock_memory::{CopyId, Nanos, PageAddress, PageId, Pages, ReplicaId, StoreOp, StorePage};

/// What was begun for a prefix.
enum Begun {
    /// So many pages are read.
    Reading(u32),
    /// So many pages are looked for.
    Looking(u32),
    Nothing,
}

impl PrefixCache {
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
        let errand = Errand {
            ns: key.ns,
            tokens: tokens.into(),
            start: reached.pages,
            then: None,
        };
        self.read_up(reached.node, &errand).map(|(id, _)| id)
    }

    /// Begins to bring up what only storage has of a prefix that nobody has leased: for requests
    /// that wait. Returns whether something is on its way.
    pub fn read_ahead(&mut self, key: Key<'_>, now: Nanos) -> bool {
        self.expire(now);
        let Some((at, start)) = self.in_tree(key.ns, key.tokens) else {
            return false;
        };
        let errand = || Errand {
            ns: key.ns,
            tokens: key.tokens.into(),
            start,
            then: None,
        };
        !matches!(self.bring_up(at, errand), Begun::Nothing)
    }

    /// Whether a page that `key` needs is being read from storage, or looked for there. Bounded by
    /// what the owner of the store allows that to take.
    pub fn is_reading(&self, key: Key<'_>) -> bool {
        let flights = self.store.iter().flat_map(|store| store.flights.values());
        flights.into_iter().any(|flight| match flight {
            Flight::Read(errand, _) | Flight::Look(errand, _) => {
                let first = &errand.tokens[..self.tokens_of(errand.start + 1)];
                errand.ns == key.ns && key.tokens.starts_with(first)
            }
            Flight::Write(..) | Flight::Clear => false,
        })
    }

    /// Brings a prefix up to host, and with `then` on to that device.
    pub(crate) fn prefetch(
        &mut self,
        ns: NamespaceId,
        tokens: &[Token],
        then: Option<ReplicaId>,
        now: Nanos,
    ) -> Outcome {
        let asked_pages = narrow(tokens.len() / self.tree.page_tokens());
        let Some((at, pages)) = self.in_tree(ns, tokens) else {
            return Outcome::Missing;
        };
        // What is on host goes up at once, what is in storage follows it.
        let rising = then.map_or(0, |replica| {
            self.promote_ahead(replica, at, pages, Cost::Unused, now)
        });
        let begun = self.bring_up(at, || Errand {
            ns,
            tokens: tokens.into(),
            start: pages,
            then,
        });
        let there = match then {
            None => pages,
            Some(replica) => self.on_device(replica, at, pages),
        };
        match begun {
            Begun::Reading(read) => Outcome::Deferred {
                pages: rising + read,
            },
            _ if rising > 0 => Outcome::Deferred { pages: rising },
            Begun::Looking(looked) if pages < asked_pages => Outcome::Deferred { pages: looked },
            Begun::Looking(_) | Begun::Nothing if pages == 0 => Outcome::Missing,
            Begun::Looking(_) | Begun::Nothing if there == asked_pages => {
                Outcome::Accepted { pages: there }
            }
            Begun::Looking(_) | Begun::Nothing => Outcome::Clipped {
                pages: there,
                asked_pages,
            },
        }
    }

    /// Where the tree ends on the way of a prefix: the last node, which may be covered in part, and
    /// the pages.
    fn in_tree(&self, ns: NamespaceId, tokens: &[Token]) -> Option<(u32, u32)> {
        let (mut at, mut pages) = (self.namespaces.root(ns)?, 0);
        while let Some(child) = self.tree.child(at, &tokens[self.tokens_of(pages)..]) {
            let rest = &tokens[self.tokens_of(pages)..];
            let common = self.tree.common_pages(child, rest);
            pages += common;
            at = child;
            if common < self.tree.node(child).pages {
                break;
            }
        }
        Some((at, pages))
    }

    /// Looks for what may be in storage after the node `at`, or reads what is known to be.
    fn bring_up(&mut self, at: u32, errand: impl FnOnce() -> Errand) -> Begun {
        let Some(store) = self.store.as_ref().filter(|store| store.attached) else {
            return Begun::Nothing;
        };
        let full = store.flights.len() >= self.max_copies;
        if full || (store.known.is_empty() && store.probes == 0) {
            return Begun::Nothing;
        }
        let errand = errand();
        if let Some(looked) = self.look_up(at, &errand) {
            return Begun::Looking(looked);
        }
        let read = self.read_up(at, &errand);
        read.map_or(Begun::Nothing, |(_, pages)| Begun::Reading(pages))
    }

    /// Tokens of a prefix that storage is known to have, right after what other tiers have of it.
    pub fn stored_of(&self, key: Key<'_>) -> u32 {
        let place = self.in_tree(key.ns, key.tokens);
        place.map_or(0, |(at, pages)| self.stored_tokens(at, pages, key.tokens))
    }

    /// Of what host has right after a lease, the pages that were read from storage and not used
    /// since.
    pub(crate) fn read_pages(&self, lease: &Lease) -> u32 {
        let (Some(host), Some((node, _, pages))) = (self.host, lease.ahead) else {
            return 0;
        };
        let below = self.nodes_between(node, lease.pages, pages);
        let read = below.iter().filter(|&&at| self.tiers[host].span(at).read);
        read.map(|&at| self.tree.node(at).pages).sum()
    }

    /// Tokens of `tokens` that storage is known to have right after their first `pages`, which end
    /// in `at`.
    pub(crate) fn stored_tokens(&self, at: u32, pages: u32, tokens: &[Token]) -> u32 {
        if self.store.is_none() {
            return 0;
        }
        narrow(self.stored_after(at, pages, tokens).len()) * self.page_tokens()
    }

    fn stored_after(&self, at: u32, pages: u32, tokens: &[Token]) -> Vec<PageAddress> {
        let Some(store) = self.store.as_ref().filter(|store| store.attached) else {
            return Vec::new();
        };
        if store.known.is_empty() {
            return Vec::new();
        }
        let found = self.addresses_after(at, pages, tokens);
        found
            .take_while(|address| store.known.contains(address))
            .collect()
    }

    /// The addresses of the whole pages of `tokens` after the first `pages`, which end in `at`.
    fn addresses_after(
        &self,
        at: u32,
        pages: u32,
        tokens: &[Token],
    ) -> impl Iterator<Item = PageAddress> {
        let before = self.address_at(at, pages);
        let rest = tokens.get(self.tokens_of(pages)..).unwrap_or_default();
        let rest = rest.chunks_exact(self.tree.page_tokens());
        rest.scan(before, |address, page| {
            *address = Some((*address)?.next(page));
            *address
        })
    }

    /// Plans to look for the pages that nobody told of; returns how many. `None` where that is not
    /// asked for, or nothing is left to look for.
    fn look_up(&mut self, at: u32, errand: &Errand) -> Option<u32> {
        let seed = self.namespaces.store_seed_of(self.tree.root_of(at))?;
        let probes = self.store.as_ref()?.probes;
        let known = self.stored_after(at, errand.start, &errand.tokens).len();
        let all = self.addresses_after(at, errand.start, &errand.tokens);
        let wanted: Vec<PageAddress> = all.skip(known).take(probes).collect();
        if wanted.is_empty() {
            return None;
        }
        let p = self.tree.page_tokens();
        let first = self.tokens_of(errand.start) + known * p;
        let tokens = errand.tokens[first..].chunks_exact(p);
        let pages = wanted
            .iter()
            .zip(tokens)
            .map(|(&address, tokens)| StorePage {
                host: PageId::SCRATCH,
                address,
                parent: address,
                tokens: tokens.into(),
            });
        let pages = pages.collect();
        let looked = narrow(wanted.len());
        let flight = Flight::Look(errand.clone(), wanted);
        self.launch_store(StoreOp::Look, seed, pages, flight);
        Some(looked)
    }

    /// A look has ended: what is there is known from now on, and read.
    pub(super) fn look_done(
        &mut self,
        errand: &Errand,
        addresses: Vec<PageAddress>,
        ok: &[bool],
        now: Nanos,
    ) {
        let Some(store) = self.store.as_mut().filter(|store| store.attached) else {
            return;
        };
        let there = ok.iter().take_while(|&&ok| ok).count();
        addresses
            .into_iter()
            .take(there)
            .for_each(|address| store.learn(address));
        // The tree may have grown or shrunk meanwhile.
        let Some((at, pages)) = self.in_tree(errand.ns, &errand.tokens) else {
            return;
        };
        let errand = Errand {
            start: pages,
            ..errand.clone()
        };
        let reads = self.read_up(at, &errand).is_some();
        if let Some(replica) = errand.then.filter(|_| !reads) {
            self.promote_ahead(replica, at, pages, Cost::Unused, now);
        }
    }

    /// Plans the read of what is known to be stored after the node `at`, where the tree ends on the
    /// way of the errand; returns its id and pages.
    fn read_up(&mut self, at: u32, errand: &Errand) -> Option<(CopyId, u32)> {
        let host = self.host?;
        let (start, tokens) = (errand.start, &errand.tokens);
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
        let mut parent = self.address_at(at, start)?;
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
        let errand = Errand {
            tokens: tokens[..self.tokens_of(start + room)].into(),
            ..errand.clone()
        };
        let id = self.launch_store(StoreOp::Read, seed, pages, Flight::Read(errand, dest));
        Some((id, room))
    }

    /// A read has ended: what arrived goes into the tree, and on to the device that wants it.
    pub(super) fn read_done(&mut self, errand: &Errand, pages: Pages, ok: &[bool], now: Nanos) {
        let Some(host) = self.host else { return };
        let ids = pages.disband();
        self.tiers[host].in_transit -= narrow(ids.len());
        let arrived = ok.iter().take_while(|&&ok| ok).count().min(ids.len());
        let placed = self.place_read(errand, &ids[..arrived], now);
        self.tiers[host].pool.release_ids(&ids[placed..]);
        if let Some(store) = &mut self.store {
            store.hit_tokens += (arrived * self.tree.page_tokens()) as u64;
        }
        if let Some(replica) = errand.then
            && let Some((at, pages)) = self.in_tree(errand.ns, &errand.tokens)
        {
            self.promote_ahead(replica, at, pages, Cost::Unused, now);
        }
    }

    /// Puts pages that were read into the tree, on host: those from page `start` of the errand on.
    /// Returns how many it has dealt with; the rest is the caller's.
    fn place_read(&mut self, errand: &Errand, ids: &[PageId], now: Nanos) -> usize {
        let start = errand.start;
        let (Some(host), Some(mut at)) = (self.host, self.namespaces.root(errand.ns)) else {
            return 0;
        };
        let end = start + narrow(ids.len());
        let (tokens, mut page) = (&errand.tokens[..self.tokens_of(end)], 0);
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
        self.judge_arrival(host, at);
        self.tiers[host].set_resident(at, &self.tree, ids.to_vec(), |span| {
            span.stamp = stamp;
            span.read = true;
        });
        self.tell_stored(host, at, narrow(ids.len()));
    }
}
