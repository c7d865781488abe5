//! The end of a lease: what its span is worth from now on, and what of it goes to host.

use crate::cache::PrefixCache;
use crate::lease::Kept;
use crate::node::NIL;
use crate::order::Place;
use crate::{Fate, Lease, WritePolicy};
use rootstock_memory::{CopyClass, Nanos};

/// Matches after which the selective policy writes a node to host.
const SELECTIVE_HITS: u32 = 2;

impl PrefixCache {
    /// Ends a lease. The leased span counts as used now; `fate` says what it is worth. What the
    /// write policy wants on host is copied down: see [`PrefixCache::drain_copies`].
    pub fn end(&mut self, mut lease: Lease, fate: Fate, now: Nanos) {
        self.expire(now);
        self.clock += 1;
        self.settle_copy(&mut lease, true);
        let at = usize::from(lease.replica.0);
        if let Some(kept) = lease.kept.take() {
            let Kept {
                pages, busy_until, ..
            } = *kept;
            self.tiers[at].release(pages, busy_until);
        }
        let last = self.end_of(&lease);
        if self.host.is_some() && fate != Fate::Unused {
            self.write_on_end(at, last, fate);
            if fate != Fate::Ephemeral {
                self.store_down(last);
            }
        }
        let mut node = last;
        let mut alone = matches!(fate, Fate::Superseded | Fate::Ephemeral);
        if lease.grown.0 > 0 {
            self.tree.promised -= 1;
        }
        if alone {
            self.cut_own(&lease, last);
        }
        let mut below = None;
        while node != NIL {
            let parent = self.tree.node(node).parent;
            alone = alone && self.is_alone(at, node, below, &lease);
            let place = if alone {
                Place::Front(below)
            } else {
                Place::Tail
            };
            self.retention.touch(node, now);
            let mark = self.judge(node, &lease);
            let free = self.tiers[at].unlease(node, self.tree.node(node), place, self.clock);
            below = free.then_some(node);
            self.settle(node, mark.filter(|_| free));
            if alone && fate == Fate::Ephemeral {
                let dropped = self.drop_from(at, node);
                self.tiers[at].dropped_pages += u64::from(dropped);
                below = None;
            }
            node = parent;
        }
        if let Some(program) = lease.said.program {
            self.programs.went(program);
        }
        if fate != Fate::Preempted {
            self.conclude(&lease, last, now);
        }
        lease.node = NIL;
        self.leases -= 1;
    }

    /// Marks a path as used on host, and copies down what is to be there.
    fn write_on_end(&mut self, device: usize, last: u32, fate: Fate) {
        let Some(host) = self.host else { return };
        let mut at = last;
        while at != NIL {
            self.tiers[host].refresh(at, self.tree.node(at), self.clock);
            at = self.tree.node(at).parent;
        }
        let class = match fate {
            Fate::Keep | Fate::Superseded => CopyClass::Demote,
            Fate::Preempted => CopyClass::Preempt,
            Fate::Ephemeral | Fate::Unused => return,
        };
        self.write_down(device, last, class, |cache, at| match cache.write_policy {
            _ if class == CopyClass::Preempt || cache.is_pinned(at) => true,
            WritePolicy::Through => true,
            WritePolicy::Selective => cache.tree.node(at).hits >= SELECTIVE_HITS,
            WritePolicy::Back => false,
        });
    }

    /// Cuts what a lease put into a leaf that it had found from the leaf, where nobody has matched
    /// it since.
    fn cut_own(&mut self, lease: &Lease, last: u32) {
        let at = self.normal(last, lease.own_from.saturating_add(1));
        let node = self.tree.node(at);
        let is_grown = node.depth < lease.own_from && lease.own_from < node.end();
        if is_grown && node.hits == lease.own_hits(node.depth) {
            let keep = lease.own_from - node.depth;
            self.split(at, keep).expect("a node was promised for it");
        }
    }

    /// Whether only the lease that ends now used a node, which it put in, and nothing hangs from it
    /// but `below`, which that lease leaves too.
    fn is_alone(&self, tier: usize, at: u32, below: Option<u32>, lease: &Lease) -> bool {
        let (node, span) = (self.tree.node(at), self.tiers[tier].span(at));
        node.depth >= lease.own_from
            && node.hits == lease.own_hits(node.depth)
            && !node.is_root()
            && span.leases == 1
            && span.busy == 0
            && !self.is_pinned(at)
            && span.kids == u32::from(below.is_some())
    }
}
