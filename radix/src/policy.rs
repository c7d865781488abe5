//! Policies that need more than a rank of their own: where the cache asks them.

pub(crate) mod agent;

use crate::Lease;
use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::policy::agent::{Group, Mark};
use rootstock_memory::Nanos;

impl PrefixCache {
    /// Time passes for what is ordered by age.
    pub(crate) fn age(&mut self, now: Nanos) {
        let Some(agent) = &mut self.agent else { return };
        agent.advance(now);
        for shelf in self.tiers.iter_mut().filter_map(|tier| tier.order.shelf()) {
            shelf.advance(now, |_| ());
        }
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
        let mark = agent.used(at, node, &lease.said, lease.arrived);
        if let Some(shelf) = self.tiers[usize::from(lease.replica.0)].order.shelf() {
            shelf.mark(at, mark);
        }
        Some(mark)
    }

    /// Nobody uses `at` any more.
    pub(crate) fn settle(&mut self, at: u32, mark: Option<Mark>) {
        if let (Some(agent), Some(mark)) = (&mut self.agent, mark) {
            agent.settle(at, self.tree.node(at), mark);
        }
    }

    /// A request has ended: what its program left behind is marked, and what was learned counts.
    pub(crate) fn conclude(&mut self, lease: &Lease, last: u32, now: Nanos) {
        if let Some(program) = lease.said.program {
            let here = (last, self.tree.node(last).generation);
            let before = self.programs.ended(program, lease, here);
            if let Some((old, _)) = before.filter(|&(at, generation)| self.is_node(at, generation))
            {
                self.give_up_branch(old, Some(last), program.0, now);
            }
            self.note_branch(program, last);
        }
        if let Some(order) = self.agent.as_mut().and_then(|agent| agent.learn()) {
            for shelf in self.tiers.iter_mut().filter_map(|tier| tier.order.shelf()) {
                shelf.reorder(&order);
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

    fn give_up_node(&mut self, at: u32, now: Nanos) {
        let node = self.tree.node(at);
        for tier in &mut self.tiers {
            let span = tier.span(at);
            let Some(shelf) = tier.order.shelf().filter(|_| span.resident) else {
                continue;
            };
            let mark = shelf.mark_of(at);
            let mark = mark.moved(Group::Dead, mark.origin.min(now));
            tier.unrank(at, node);
            if let Some(shelf) = tier.order.shelf() {
                shelf.mark(at, mark);
            }
            tier.rank(at, node);
            if let Some(agent) = &mut self.agent {
                agent.marked(at, mark);
            }
        }
    }

    pub(crate) fn is_node(&self, at: u32, generation: std::num::NonZeroU32) -> bool {
        let node = self.tree.nodes.get(at as usize);
        at != NIL && node.is_some_and(|node| node.generation == generation)
    }
}
