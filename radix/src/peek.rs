//! What hosts ask that keep pages by their own counts: the pages of a prefix without a lease, and
//! how many can be had.

use crate::cache::PrefixCache;
use crate::{Key, Lease};
use rootstock_memory::{PageId, ReplicaId, TierId};

impl PrefixCache {
    /// Appends the device pages of the longest cached prefix, in order. Nothing keeps them: they
    /// are the host's only once it has leased them. Changes nothing.
    ///
    /// # Cost
    /// One table lookup a node, one comparison a token.
    pub fn peek(&self, key: Key<'_>, replica: ReplicaId, out: &mut Vec<PageId>) {
        let Some(root) = self.namespaces.root(key.ns) else {
            return;
        };
        let Some(at) = self.index(TierId::Device(replica)) else {
            return;
        };
        let (tier, page_tokens) = (&self.tiers[at], self.tree.page_tokens());
        let (mut end, mut rest) = (root, key.tokens);
        while let Some(child) = self.tree.child(end, rest) {
            if !tier.is_resident(child) {
                break;
            }
            let pages = tier.pages_of(child);
            let common = self.tree.common_pages(child, rest) as usize;
            out.extend_from_slice(&pages[..common]);
            if common < pages.len() {
                break;
            }
            end = child;
            rest = &rest[common * page_tokens..];
        }
    }

    /// The page of the tree at an index of a leased prefix, whatever the lease keeps in its place.
    ///
    /// # Cost
    /// Linear in the nodes from the end of the lease.
    pub fn tree_page(&self, lease: &Lease, at: usize) -> Option<PageId> {
        let tier = self.tiers.get(usize::from(lease.replica.0))?;
        let mut node = self.end_of(lease);
        while !self.tree.node(node).is_root() && self.tree.node(node).depth as usize > at {
            node = self.tree.node(node).parent;
        }
        let depth = self.tree.node(node).depth as usize;
        tier.pages_of(node).get(at.checked_sub(depth)?).copied()
    }

    /// Pages of a tier that are free: what [`Self::reserve`] takes before it evicts.
    pub fn free(&self, tier: TierId) -> u32 {
        self.index(tier).map_or(0, |at| self.tiers[at].pool.free())
    }

    /// Pages of a tier that nothing but pins keeps. [`Self::available`] counts them, because pins
    /// give way in the end; who wants to wait rather than break a pin subtracts them.
    ///
    /// # Cost
    /// Linear in the pinned nodes.
    pub fn pinned_idle(&self, tier: TierId) -> u32 {
        let Some(at) = self.index(tier) else { return 0 };
        let idle = |node: &&u32| {
            let span = self.tiers[at].span(**node);
            span.resident && !span.is_kept()
        };
        let idle = self.pins.by_node.keys().filter(idle);
        idle.map(|&node| self.tree.node(node).pages).sum()
    }
}
