//! Computed pages go into the tree.
//!
//! ```text
//!   request's page, tokens not cached        -> the tree's, leased
//!   request's page, tokens cached here       -> released (Swap) or the lease's (Keep)
//!   request's page, tokens cached elsewhere  -> the tree's here, leased
//!   request's page, all nodes in use         -> the lease's until it ends
//! ```

use crate::cache::PrefixCache;
use crate::lease::Kept;
use crate::node::Ends;
use crate::tree::narrow;
use crate::{Dedup, Extended, Lease, SpanMeta, Token};
use rootstock_memory::{Nanos, Pages, TierId};

impl PrefixCache {
    /// Puts computed pages into the cache and extends the lease over them. `tokens` are whole
    /// pages that follow the lease; from now on they are matchable.
    ///
    /// Where another request was faster, its pages stay and the caller's are duplicates: with
    /// [`Dedup::Swap`] the caller changes its page table as the answer says, before the next
    /// step; with [`Dedup::Keep`] the lease holds them. Without tokens, only the importance of the
    /// leased path is raised.
    ///
    /// # Panics
    /// When the numbers of tokens and pages differ, or the pages are not of the lease's device.
    /// # Cost
    /// One copy of the tokens; independent of the length of the lease.
    pub fn extend(
        &mut self,
        lease: &mut Lease,
        tokens: &[Token],
        pages: Pages,
        meta: &SpanMeta,
        now: Nanos,
    ) -> Extended {
        assert_eq!(
            tokens.len(),
            pages.len() * self.tree.page_tokens(),
            "whole pages only"
        );
        assert_eq!(
            pages.tier(),
            TierId::Device(lease.replica),
            "pages of the lease's device"
        );
        self.clock += 1;
        self.retain(self.end_of(lease), meta, now);
        let mut work = Work {
            tokens,
            pages,
            meta,
            now,
            done: Extended::default(),
        };
        if lease.tail() == 0 && self.extend_over_cached(lease, &mut work) {
            self.extend_by_new(lease, &mut work);
        }
        let Work { pages, done, .. } = work;
        if !pages.is_empty() {
            let more = narrow(pages.len());
            self.uncached_pages += u64::from(more);
            keep(lease, lease.len_pages(), pages, meta).tail += more;
        }
        done
    }

    /// Follows what is cached of the tokens. False when the rest cannot go into the tree, because
    /// it leaves a node in its middle and no node is free for the split.
    fn extend_over_cached(&mut self, lease: &mut Lease, work: &mut Work<'_>) -> bool {
        let tier = usize::from(lease.replica.0);
        let mut end = self.end_of(lease);
        while let Some((child, common)) = self.tree.step(end, work.tokens) {
            let child = if common == self.tree.node(child).pages {
                child
            } else if let Some(upper) = self.split(child, common) {
                upper
            } else {
                return false;
            };
            let pages = work.take(common, self.tree.page_tokens());
            if self.tiers[tier].is_resident(child) {
                self.tiers[tier].lease(child, self.tree.node(child));
                self.count_hit(child);
                self.settle_duplicates(lease, child, pages, work);
            } else {
                self.tiers[tier].place(child, &self.tree, pages);
                self.tell_stored(tier, child, common);
                lease.own_from = lease.own_from.min(lease.pages);
                work.done.inserted_pages += common;
            }
            self.retain(child, work.meta, work.now);
            lease.node = child;
            lease.pages += common;
            end = child;
        }
        true
    }

    /// The caller computed `pages`, the tree has others for the same tokens.
    fn settle_duplicates(
        &mut self,
        lease: &mut Lease,
        cached: u32,
        pages: Pages,
        work: &mut Work<'_>,
    ) {
        let tier = &mut self.tiers[usize::from(lease.replica.0)];
        match work.meta.dedup {
            Dedup::Swap => {
                let ids = tier.pages_of(cached).iter().copied();
                work.done.swapped.extend((lease.pages..).zip(ids));
                tier.release(pages, work.meta.busy_until);
            }
            Dedup::Keep => {
                keep(lease, lease.pages, pages, work.meta);
            }
        }
    }

    /// Puts what is left into the tree, in the leaf where the lease ends or in a new one.
    fn extend_by_new(&mut self, lease: &mut Lease, work: &mut Work<'_>) {
        let count = narrow(work.pages.len());
        if count == 0 {
            return;
        }
        let tier = usize::from(lease.replica.0);
        let end = self.end_of(lease);
        if self.grows_in_place(lease, end, work.meta) {
            let node = self.tree.node(end);
            let (depth, hits) = (node.depth, node.hits);
            let is_found = depth < lease.own_from.min(lease.pages);
            self.tree.promised += u32::from(is_found && lease.grown.0 == 0);
            if is_found || depth < lease.grown.0 {
                lease.grown = (lease.pages + count, hits);
            }
            self.tree.grow_leaf(end, work.tokens);
            let pages = work.take(count, self.tree.page_tokens());
            self.tiers[tier].grow(end, pages);
        } else if self.tree.has_slots(1) {
            let leaf = self.tree.add_leaf(end, work.tokens, work.meta, self.clock);
            let pages = work.take(count, self.tree.page_tokens());
            self.tiers[tier].place(leaf, &self.tree, pages);
            self.retain_new(leaf, work.meta, work.now);
            lease.node = leaf;
        } else {
            return;
        }
        let end = self.normal(lease.node, lease.pages + count);
        self.hash_pages(end, count);
        self.address_pages(end, count);
        if let Some(agent) = &mut self.agent {
            agent.computed(&self.tree, end, count, lease.asked_pages);
        }
        self.tell_stored(tier, end, count);
        lease.own_from = lease.own_from.min(lease.pages);
        lease.pages += count;
        work.done.inserted_pages += count;
    }

    /// Whether the edge of `at`, where a lease ends, may take more pages of that lease: nobody else
    /// uses it, and nothing has come to depend on where it ends. What the lease itself put in it
    /// nobody has matched since.
    fn grows_in_place(&self, lease: &Lease, at: u32, meta: &SpanMeta) -> bool {
        let node = self.tree.node(at);
        let tier = usize::from(lease.replica.0);
        let is_grown = lease.own_from < node.end();
        let is_own = node.depth >= lease.own_from;
        let may_grow = match () {
            () if is_own || is_grown => node.hits == lease.own_hits(node.depth),
            () => self.grows_found && self.tree.has_slots(1) && self.is_end_of(at, lease),
        };
        may_grow
            && self.tree.can_grow(at)
            && self.is_retained_as(at, meta)
            && node.kind == meta.kind
            && self.tiers[tier].span(at).leases == 1
            && self.tiers[tier].span(at).busy == 0
            && !self.is_pinned(at)
            && self.only_in(tier, at)
    }

    /// Whether no program but that of the lease knows a prefix of its own by the end of `at`.
    fn is_end_of(&self, at: u32, lease: &Lease) -> bool {
        let node = self.tree.node(at);
        match (node.ends, lease.said.program) {
            (Ends::None, _) => true,
            (Ends::One, Some(program)) => {
                let ends = self.programs.ends(program);
                ends.contains(&(at, node.generation))
            }
            (Ends::One, None) | (Ends::Many, _) => false,
        }
    }
}

/// Gives pages to the lease; `first` is the index in the request of the first one.
fn keep<'a>(lease: &'a mut Lease, first: u32, pages: Pages, meta: &SpanMeta) -> &'a mut Kept {
    let tier = pages.tier();
    let kept = lease.kept.get_or_insert_with(|| {
        Box::new(Kept {
            at: Vec::new(),
            pages: Pages::none(tier),
            tail: 0,
            busy_until: None,
        })
    });
    kept.at.extend((first..).take(pages.len()));
    kept.pages.merge(pages);
    kept.busy_until = kept.busy_until.max(meta.busy_until);
    kept
}

/// What is still to be put in.
struct Work<'a> {
    tokens: &'a [Token],
    pages: Pages,
    meta: &'a SpanMeta,
    now: Nanos,
    done: Extended,
}

impl Work<'_> {
    /// Takes the first `n` pages and their tokens off.
    fn take(&mut self, n: u32, page_tokens: usize) -> Pages {
        let rest = self.pages.split_off(n as usize);
        self.tokens = &self.tokens[n as usize * page_tokens..];
        std::mem::replace(&mut self.pages, rest)
    }
}
