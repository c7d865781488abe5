//! TTL pins: a bounded promise that the bytes of a prefix stay somewhere until a deadline.
//!
//! Rules. A pin covers whole nodes from the root; a split divides it, its pages counted once. Of
//! two pins the longer deadline wins. A match before the deadline moves it to the match plus the
//! pin's lifetime, for exactly the matched pages; nothing else renews. At the deadline the pages
//! are ordinary, in the place of their last use, whether or not anybody asks.
//!
//! With a host tier pins bind host pages: on the device a pinned node is ordinary, but it is
//! copied down at once, and not dropped before it is. Without one they bind device pages, softly:
//! when nothing else is left, the pin with the earliest deadline gives way.

use crate::cache::PrefixCache;
use crate::order::Place;
use crate::{ActReason, Action, NamespaceId, Outcome, SpanMeta, Target, TenantId, Token, Ttl};
use rootstock_memory::{CopyClass, Nanos};
use std::collections::{BTreeMap, BTreeSet};

const SECOND: Nanos = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pin {
    pub(crate) until: Nanos,
    ttl: Nanos,
    owner: TenantId,
}

/// All pins, by node.
#[derive(Debug)]
pub(crate) struct Pins {
    pub(crate) by_node: BTreeMap<u32, Pin>,
    /// (deadline, deepest first, node).
    pub(crate) due: BTreeSet<(Nanos, u32, u32)>,
    /// Distinct pages pinned.
    pub(crate) pages: u32,
    pub(crate) budget: u32,
}

impl Pins {
    pub(crate) const fn new(budget: u32) -> Self {
        Self {
            by_node: BTreeMap::new(),
            due: BTreeSet::new(),
            pages: 0,
            budget,
        }
    }
}

impl PrefixCache {
    /// Does a verb for a tenant.
    pub fn act(&mut self, tenant: TenantId, action: &Action, now: Nanos) -> Outcome {
        self.expire(now);
        self.clock += 1;
        match *action.target() {
            Target::Program(id) => self.act_on_program(tenant, id, action, now),
            Target::Prefix { .. } => self.act_on_prefix(tenant, action, now),
        }
    }

    pub(crate) fn act_on_prefix(
        &mut self,
        tenant: TenantId,
        action: &Action,
        now: Nanos,
    ) -> Outcome {
        let Target::Prefix { ns, tokens } = action.target() else {
            return Outcome::Rejected(ActReason::Unsupported);
        };
        match *action {
            Action::Pin { ttl, .. } => self.pin(tenant, *ns, tokens, ttl, now),
            Action::Release { .. } => self.release_pin(tenant, *ns, tokens),
            Action::Retain {
                priority, seconds, ..
            } => {
                let path = self.cached_path(*ns, tokens);
                let Some(&last) = path.last() else {
                    return Outcome::Missing;
                };
                let retention_s = seconds.map(|s| u32::try_from(s).unwrap_or(u32::MAX));
                let meta = SpanMeta {
                    priority,
                    retention_s,
                    ..SpanMeta::default()
                };
                self.retain(last, &meta, now);
                self.answer(&path, tokens)
            }
            Action::Demote { .. } => self.copy_down(*ns, tokens),
            Action::Prefetch { replica, .. } => self.prefetch(*ns, tokens, replica, now),
        }
    }

    /// Lets what is due happen: pins and retention expire. Every call that takes the time does
    /// this first.
    pub fn tick(&mut self, now: Nanos) {
        self.expire(now);
    }

    #[inline]
    pub(crate) fn expire(&mut self, now: Nanos) {
        if self.agent.is_some() || !self.pins.due.is_empty() || !self.retention.is_empty() {
            self.expire_what_is_due(now);
        }
    }

    fn expire_what_is_due(&mut self, now: Nanos) {
        self.age(now);
        while let Some(&(until, _, at)) = self.pins.due.first() {
            if until > now {
                break;
            }
            self.unpin(at);
        }
        self.expire_retention(now);
    }

    /// A match used the path of `at`: its pins last their whole lifetimes again.
    pub(crate) fn renew_pins(&mut self, mut at: u32, now: Nanos) {
        while !self.pins.by_node.is_empty() && !self.tree.node(at).is_root() {
            if let Some(&pin) = self.pins.by_node.get(&at) {
                let until = pin.until.max(now.saturating_add(pin.ttl));
                self.set_pin(at, Pin { until, ..pin });
            }
            at = self.tree.node(at).parent;
        }
    }

    /// The pin of `lower` covers `upper`, cut from it, too.
    pub(crate) fn split_pin(&mut self, lower: u32, upper: u32) {
        let Some(&pin) = self.pins.by_node.get(&lower) else {
            return;
        };
        let (node, cut) = (self.tree.node(lower), self.tree.node(upper));
        self.pins
            .due
            .remove(&(pin.until, u32::MAX - cut.depth, lower));
        self.pins
            .due
            .insert((pin.until, u32::MAX - node.depth, lower));
        self.pins
            .due
            .insert((pin.until, u32::MAX - cut.depth, upper));
        self.pins.by_node.insert(upper, pin);
    }

    /// Ends the pin of a node, if it has one.
    pub(crate) fn unpin(&mut self, at: u32) -> bool {
        if self.pins.by_node.is_empty() {
            return false;
        }
        let Some(pin) = self.pins.by_node.remove(&at) else {
            return false;
        };
        let node = self.tree.node(at);
        self.pins
            .due
            .remove(&(pin.until, u32::MAX - node.depth, at));
        self.pins.pages -= node.pages;
        self.mark_pinned(at, false);
        true
    }

    pub(crate) fn is_pinned(&self, at: u32) -> bool {
        !self.pins.by_node.is_empty() && self.pins.by_node.contains_key(&at)
    }

    /// Without a host tier: the weakest pin on a device gives way.
    pub(crate) fn yield_pin(&mut self, tier: usize) -> u32 {
        let here = |entry: &&(Nanos, u32, u32)| self.tiers[tier].is_resident(entry.2);
        let weakest = self.pins.due.iter().find(here);
        weakest
            .map(|entry| entry.2)
            .map_or(0, |at| self.unpin_below(at))
    }

    /// Ends the pin of a node and those of what hangs below it, which are worth nothing without;
    /// returns how many ended.
    pub(crate) fn unpin_below(&mut self, at: u32) -> u32 {
        let mut pinned = Vec::new();
        let mut stack = vec![at];
        while let Some(at) = stack.pop() {
            if self.is_pinned(at) {
                pinned.push(at);
                stack.extend(self.children(at));
            }
        }
        // Deepest first, which is also their order of eviction.
        pinned
            .iter()
            .rev()
            .for_each(|&at| assert!(self.unpin(at), "node {at} is pinned"));
        crate::tree::narrow(pinned.len())
    }

    fn pin(
        &mut self,
        tenant: TenantId,
        ns: NamespaceId,
        tokens: &[Token],
        ttl: Ttl,
        now: Nanos,
    ) -> Outcome {
        if ttl.seconds == 0 {
            return Outcome::Rejected(ActReason::ZeroTtl);
        }
        let path = self.cached_path(ns, tokens);
        if path.is_empty() {
            return Outcome::Missing;
        }
        let ttl = ttl.seconds.saturating_mul(SECOND);
        let new = Pin {
            until: now.saturating_add(ttl),
            ttl,
            owner: tenant,
        };
        let mut pinned = Vec::new();
        for at in path {
            let Some(at) = self.pin_node(at, new) else {
                break;
            };
            pinned.push(at);
        }
        let Some(&last) = pinned.last() else {
            return Outcome::Rejected(ActReason::Budget);
        };
        for device in 0..self.devices() {
            self.write_down(device, last, CopyClass::Pin, Self::is_pinned);
        }
        self.answer(&pinned, tokens)
    }

    /// Pins as much of a node as the budget allows; the part that is pinned now.
    fn pin_node(&mut self, at: u32, new: Pin) -> Option<u32> {
        if let Some(&old) = self.pins.by_node.get(&at) {
            let owner = if new.until > old.until {
                new.owner
            } else {
                old.owner
            };
            let (until, ttl) = (old.until.max(new.until), old.ttl.max(new.ttl));
            self.set_pin(at, Pin { until, ttl, owner });
            return Some(at);
        }
        let room = self.pins.budget - self.pins.pages;
        let pages = self.tree.node(at).pages;
        let at = match room {
            0 => return None,
            _ if room < pages => self.split(at, room)?,
            _ => at,
        };
        self.pins.pages += self.tree.node(at).pages;
        self.set_pin(at, new);
        self.mark_pinned(at, true);
        Some(at)
    }

    fn copy_down(&mut self, ns: NamespaceId, tokens: &[Token]) -> Outcome {
        let path = self.cached_path(ns, tokens);
        let Some(&last) = path.last() else {
            return Outcome::Missing;
        };
        let (pages, answer) = (self.tree.node(last).end(), self.answer(&path, tokens));
        let before = self.flights.under_way();
        for device in 0..self.devices() {
            // What is on a device does not go when host makes room for it.
            let here = path
                .iter()
                .rev()
                .find(|&&at| self.tiers[device].is_resident(at));
            if let Some(&last) = here {
                self.write_down(device, last, CopyClass::Demote, |_, _| true);
            }
        }
        let started = self.flights.under_way() > before;
        if started {
            Outcome::Deferred { pages }
        } else {
            answer
        }
    }

    fn release_pin(&mut self, tenant: TenantId, ns: NamespaceId, tokens: &[Token]) -> Outcome {
        let path = self.cached_path(ns, tokens);
        let pages = path.last().map_or(0, |&last| self.unpin_path(tenant, last));
        if pages == 0 {
            Outcome::Missing
        } else {
            Outcome::Accepted { pages }
        }
    }

    /// Ends the pins of a tenant on the path of `last`; returns its pages.
    pub(crate) fn unpin_path(&mut self, tenant: TenantId, last: u32) -> u32 {
        let path = self.nodes_between(last, 0, self.tree.node(last).end());
        let mine = |at: &u32| {
            self.pins
                .by_node
                .get(at)
                .is_some_and(|pin| pin.owner == tenant)
        };
        // From the end, as long as nothing pinned hangs below: other pins need their prefix.
        let mut pages = 0;
        for &at in path.iter().rev().filter(|&at| mine(at)).collect::<Vec<_>>() {
            let mut below = self.children(at);
            if below.any(|child| self.pins.by_node.contains_key(&child)) {
                break;
            }
            drop(below);
            pages += self.tree.node(at).pages;
            self.unpin(at);
        }
        pages
    }

    fn set_pin(&mut self, at: u32, pin: Pin) {
        let depth = u32::MAX - self.tree.node(at).depth;
        if let Some(old) = self.pins.by_node.insert(at, pin) {
            self.pins.due.remove(&(old.until, depth, at));
        }
        self.pins.due.insert((pin.until, depth, at));
    }

    fn mark_pinned(&mut self, at: u32, pinned: bool) {
        let node = self.tree.node(at);
        let tiers = match self.host {
            Some(host) => &mut self.tiers[host..=host],
            None => &mut self.tiers[..],
        };
        for tier in tiers {
            tier.change(at, node, Place::ByStamp, |span| span.pinned = pinned);
        }
    }

    /// The nodes that cover the cached part of a prefix on any tier, from the root on, the last
    /// one cut to it. The part that cannot be cut off is left out.
    fn cached_path(&mut self, ns: NamespaceId, tokens: &[Token]) -> Vec<u32> {
        let mut path = Vec::new();
        let Some(mut at) = self.namespaces.root(ns) else {
            return path;
        };
        let mut rest = tokens;
        while let Some((child, common)) = self.tree.step(at, rest) {
            if common < self.tree.node(child).pages {
                path.extend(self.split(child, common));
                break;
            }
            path.push(child);
            at = child;
            rest = &rest[common as usize * self.tree.page_tokens()..];
        }
        path
    }

    fn children(&self, at: u32) -> impl Iterator<Item = u32> {
        let some = |at: u32| (at != crate::node::NIL).then_some(at);
        let first = some(self.tree.node(at).first_child);
        std::iter::successors(first, move |&at| some(self.tree.node(at).next_sibling))
    }

    fn answer(&self, done: &[u32], tokens: &[Token]) -> Outcome {
        let pages = done.last().map_or(0, |&last| self.tree.node(last).end());
        let asked_pages = crate::tree::narrow(tokens.len() / self.tree.page_tokens());
        if pages == asked_pages {
            Outcome::Accepted { pages }
        } else {
            Outcome::Clipped { pages, asked_pages }
        }
    }
}
