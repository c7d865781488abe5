//! Policies that need more than a rank of their own: where the cache asks them.

pub(crate) mod agent;

use crate::Lease;
use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::order::Place;
use crate::policy::agent::{Group, Mark, Said, branch};
use rootstock_memory::Nanos;

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
        self.count_hit(at);
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
        at: u32,
        other: Option<u32>,
        owner: u64,
        now: Nanos,
    ) -> u32 {
        let agent = self.agent.as_ref();
        let branch = agent.map(|agent| agent.own_branch(&self.tree, at, other, owner));
        let mut pages = 0;
        for at in branch.unwrap_or_default() {
            self.give_up_node(at, now);
            pages += self.tree.node(at).pages;
        }
        pages
    }

    /// What is left of answers that the conversation went on without goes first.
    fn strip_answers(&mut self, lease: &Lease, last: u32, now: Nanos) {
        let mut own = last;
        while !self.tree.node(own).is_root() && self.tree.node(own).depth > lease.own_from {
            own = self.tree.node(own).parent;
        }
        let Some(agent) = &self.agent else { return };
        if self.tree.node(own).depth != lease.own_from {
            return;
        }
        let owner = lease.said.program.map_or(0, |program| program.0);
        for answer in agent.answers_beside(&self.tree, own, lease.asked_pages, owner) {
            self.strip_below(answer, now);
        }
    }

    /// A node and what hangs below it, as far as that is little, goes first, whatever its
    /// importance; not what is pinned or in use. A match takes that back.
    fn strip_below(&mut self, at: u32, now: Nanos) {
        for at in branch::below(&self.tree, at) {
            self.give_up_node(at, now);
            let node = self.tree.node(at);
            for tier in &mut self.tiers {
                let span = tier.span(at);
                if span.resident && span.leases == 0 && !span.pinned {
                    tier.change(at, node, Place::Tail, |span| span.spent = true);
                }
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
