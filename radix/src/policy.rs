//! Policies that need more than a rank of their own: where the cache asks them.

pub(crate) mod agent;

use crate::Lease;
use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::order::Place;
use crate::policy::agent::{Group, Mark, Said};
use rootstock_memory::Nanos;

/// Branches that are looked at where a prompt leaves a path, and nodes of one, at most.
const SIBLINGS_MAX: usize = 16;
const BRANCH_MAX: usize = 256;

impl PrefixCache {
    /// Time passes for what is ordered by age.
    pub(crate) fn age(&mut self, now: Nanos) {
        let Some(agent) = &mut self.agent else { return };
        agent.set_now(now);
        for shelf in self.tiers.iter_mut().filter_map(|tier| tier.order.shelf()) {
            shelf.set_now(now);
        }
    }

    /// What the cache would find at other capacities.
    pub(crate) fn hit_curve(&self) -> Option<crate::HitCurve> {
        let agent = self.agent.as_ref()?;
        let hit_tokens = self.tiers.iter().map(|tier| tier.hit_tokens).sum();
        Some(agent.curve(self.lookup_tokens, hit_tokens, self.page_tokens()))
    }

    /// A request found a node.
    pub(crate) fn matched(&mut self, at: u32, now: Nanos) {
        if let Some(agent) = &mut self.agent {
            agent.found(at);
        }
        self.retention.touch(at, now);
        self.update(at, |node| node.hits = node.hits.saturating_add(1));
    }

    /// Notes what a request that ends says about the node `at` that it used.
    pub(crate) fn judge(&mut self, at: u32, lease: &Lease) -> Option<Mark> {
        let node = self.tree.node(at);
        let agent = self.agent.as_mut().filter(|_| !node.is_root())?;
        let mark = agent.used(at, node, &lease.said);
        let used = [Some(usize::from(lease.replica.0)), self.host];
        for tier in used.into_iter().flatten() {
            self.tiers[tier].remark(at, node, mark);
        }
        Some(mark)
    }

    /// A node came from storage, of which nothing else is known.
    pub(crate) fn judge_arrival(&mut self, tier: usize, at: u32) {
        if let Some(agent) = &mut self.agent {
            let node = self.tree.node(at);
            let mark = agent.used(at, node, &Said::default());
            self.tiers[tier].remark(at, node, mark);
        }
    }

    /// Nobody uses `at` any more.
    pub(crate) fn settle(&mut self, at: u32, mark: Option<Mark>) {
        if let (Some(agent), Some(mark)) = (&mut self.agent, mark) {
            agent.settle(at, self.tree.node(at), mark);
        }
    }

    /// A request has ended: what its program left behind is marked, and what was learned counts.
    pub(crate) fn conclude(&mut self, lease: &Lease, last: u32, now: Nanos) {
        // What was ephemeral is gone already.
        let node = self.tree.nodes.get(last as usize);
        let here = node.map(|node| (last, node.generation));
        if let Some(program) = lease.said.program {
            let before = self.programs.ended(program, lease, here, now);
            let is_left = |&(at, generation): &(u32, _)| self.is_node(at, generation);
            if let Some((old, _)) = before.filter(is_left).filter(|_| here.is_some()) {
                self.give_up_branch(old, Some(last), program.0, now);
            }
            if here.is_some() {
                self.note_branch(program, last);
            }
            if lease.said.last {
                self.closed(program, now);
            }
        }
        if here.is_some() {
            self.strip_answers(lease, last, now);
        }
        if let Some(ranks) = self.agent.as_mut().and_then(|agent| agent.learn()) {
            for shelf in self.tiers.iter_mut().filter_map(|tier| tier.order.shelf()) {
                shelf.reorder(&ranks);
            }
        }
    }

    /// Marks what `owner` alone uses from the path of `at`, as far as it is not that of `other`,
    /// as given up; returns its pages.
    pub(crate) fn give_up_branch(
        &mut self,
        mut at: u32,
        other: Option<u32>,
        owner: u64,
        now: Nanos,
    ) -> u32 {
        let mut pages = 0;
        let mut other = other.unwrap_or_else(|| self.tree.root_of(at));
        while at != other && !self.tree.node(at).is_root() {
            if self.tree.node(at).end() < self.tree.node(other).end() {
                other = self.tree.node(other).parent;
                continue;
            }
            if self
                .agent
                .as_ref()
                .is_some_and(|agent| agent.is_owned(at, owner))
            {
                self.give_up_node(at, now);
                pages += self.tree.node(at).pages;
            }
            at = self.tree.node(at).parent;
        }
        pages
    }

    /// A conversation is known by its prefix: where a longer prompt leaves the path right where an
    /// answer began, it went on without that answer, as templates do that strip thinking. What is
    /// left of it goes first. An answer that another program used is that program's too.
    fn strip_answers(&mut self, lease: &Lease, last: u32, now: Nanos) {
        let mut own = last;
        while !self.tree.node(own).is_root() && self.tree.node(own).depth > lease.own_from {
            own = self.tree.node(own).parent;
        }
        if self.agent.is_none() || self.tree.node(own).depth != lease.own_from {
            return;
        }
        let parent = self.tree.node(own).parent;
        if parent == NIL {
            return;
        }
        let owner = lease.said.program.map_or(0, |program| program.0);
        let mut sibling = self.tree.node(parent).first_child;
        for _ in 0..SIBLINGS_MAX {
            if sibling == NIL {
                break;
            }
            let node = self.tree.node(sibling);
            let agent = self.agent.as_ref();
            let is_answer =
                agent.is_some_and(|agent| agent.is_answer(sibling, node, lease.asked_pages, owner));
            let next = node.next_sibling;
            if is_answer && sibling != own {
                self.strip_below(sibling, now);
            }
            sibling = next;
        }
    }

    /// A node and what hangs below it, as far as that is little, goes first, whatever its
    /// importance; not what is pinned or in use. A match takes that back.
    fn strip_below(&mut self, at: u32, now: Nanos) {
        let mut left = vec![at];
        for _ in 0..BRANCH_MAX {
            let Some(at) = left.pop() else { break };
            self.give_up_node(at, now);
            let node = self.tree.node(at);
            for tier in &mut self.tiers {
                let span = tier.span(at);
                if span.resident && span.leases == 0 && !span.pinned {
                    tier.change(at, node, Place::Tail, |span| span.spent = true);
                }
            }
            let mut child = self.tree.node(at).first_child;
            while child != NIL && left.len() < BRANCH_MAX {
                left.push(child);
                child = self.tree.node(child).next_sibling;
            }
        }
    }

    fn give_up_node(&mut self, at: u32, now: Nanos) {
        self.regroup(at, Group::Dead, |origin| origin.min(now));
    }

    /// Moves a node to another group, with the moment from which its time counts made of that
    /// from which it did.
    pub(crate) fn regroup(&mut self, at: u32, group: Group, origin: impl Fn(Nanos) -> Nanos) {
        let node = self.tree.node(at);
        for tier in &mut self.tiers {
            let span = tier.span(at);
            let Some(shelf) = tier.order.shelf().filter(|_| span.resident) else {
                continue;
            };
            let mark = shelf.mark_of(at);
            let mark = mark.moved(group, origin(mark.origin));
            tier.remark(at, node, mark);
            if let Some(agent) = &mut self.agent {
                agent.marked(at, node, mark);
            }
        }
    }

    pub(crate) fn is_node(&self, at: u32, generation: std::num::NonZeroU32) -> bool {
        let node = self.tree.nodes.get(at as usize);
        at != NIL && node.is_some_and(|node| node.generation == generation)
    }
}
