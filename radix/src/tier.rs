//! What one tier holds: its pool, which nodes have their pages in it, who leases them, and the
//! order in which they go. A node is in a tier as a whole or not at all; where a part differs,
//! the node is split.
//!
//! Conservation: free + evictable + leased + held + in transit = total, where cached pages are
//! those of resident nodes, and held are those reserved, owned by requests, or waiting for a
//! step.

use crate::TierStats;
use crate::node::Node;
use crate::order::{Order, Ranking};
use crate::tree::Tree;
use rootstock_memory::{PageId, PagePool, Pages, Reservation, StepId, TierId};

/// A node's state in one tier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Span {
    /// Leases that cover it.
    pub(crate) leases: u32,
    /// Children that are in this tier.
    pub(crate) kids: u32,
    /// When it was last used here, as a count of calls.
    pub(crate) stamp: u64,
    pub(crate) resident: bool,
    /// Its last user expects nobody to ask for it again.
    pub(crate) spent: bool,
}

impl Span {
    /// Whether it can be evicted at once.
    pub(crate) const fn is_free_leaf(&self) -> bool {
        self.resident && self.leases == 0 && self.kids == 0
    }
}

/// How a lease used a node that it leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    /// When, as a count of calls.
    pub(crate) until: u64,
    /// Whether nobody is expected to ask for the node again.
    pub(crate) last: bool,
}

/// One tier.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) pool: PagePool,
    /// By node.
    pub(crate) spans: Vec<Span>,
    /// By run, parallel to its tokens; `SCRATCH` where a node is not resident.
    pub(crate) pages: Vec<Vec<PageId>>,
    pub(crate) order: Order,
    /// Pages of resident nodes.
    pub(crate) cached: u32,
    /// Those that are leased.
    pub(crate) leased: u32,
    /// Pages that requests own: acquired, neither released nor put into the tree.
    pub(crate) owned: u32,
    pub(crate) hit_tokens: u64,
    pub(crate) evicted_pages: u64,
    pub(crate) dropped_pages: u64,
}

impl Tier {
    pub(crate) fn new(id: TierId, total: u32, ranking: Ranking) -> Self {
        Self {
            pool: PagePool::new(id, total),
            spans: Vec::new(),
            pages: Vec::new(),
            order: Order::new(ranking),
            cached: 0,
            leased: 0,
            owned: 0,
            hit_tokens: 0,
            evicted_pages: 0,
            dropped_pages: 0,
        }
    }

    pub(crate) fn span(&self, at: u32) -> Span {
        self.spans.get(at as usize).copied().unwrap_or_default()
    }

    pub(crate) fn is_resident(&self, at: u32) -> bool {
        self.spans
            .get(at as usize)
            .is_some_and(|span| span.resident)
    }

    /// Pages that `reserve` could grant now.
    pub(crate) fn available(&self) -> u32 {
        self.pool.free() + self.evictable()
    }

    pub(crate) const fn evictable(&self) -> u32 {
        self.cached - self.leased
    }

    /// Pages that requests hold: reserved, owned, or waiting for a step.
    pub(crate) fn held(&self) -> u32 {
        self.pool.reserved() + self.owned + self.pool.waiting()
    }

    pub(crate) fn stats(&self) -> TierStats {
        TierStats {
            tier: self.pool.tier(),
            total: self.pool.total(),
            free: self.pool.free(),
            evictable: self.evictable(),
            leased: self.leased,
            held: self.held(),
            in_transit: 0,
            hit_tokens: self.hit_tokens,
            evicted_pages: self.evicted_pages,
            dropped_pages: self.dropped_pages,
        }
    }

    // Pages of requests.

    pub(crate) fn acquire(&mut self, reservation: &mut Reservation, n: u32) -> Pages {
        self.owned += n;
        self.pool.acquire(reservation, n)
    }

    pub(crate) fn release(&mut self, pages: Pages, busy_until: Option<StepId>) {
        self.owned -= crate::tree::narrow(pages.len());
        match busy_until {
            Some(step) => self.pool.release_after(pages, step),
            None => self.pool.release(pages),
        }
    }

    // Nodes.

    /// A root is resident everywhere and has no pages.
    pub(crate) fn add_root(&mut self, at: u32) {
        *self.slot(at) = Span {
            resident: true,
            ..Span::default()
        };
    }

    pub(crate) fn remove_root(&mut self, at: u32) {
        let span = std::mem::take(self.slot(at));
        assert!(
            span.leases == 0 && span.kids == 0,
            "a root that goes is unused"
        );
    }

    /// Takes pages of a request as those of `at`, which is not resident and whose parent is.
    /// The node gets the lease of that request.
    pub(crate) fn place(&mut self, at: u32, node: &Node, pages: Pages) {
        assert_eq!(
            pages.len(),
            node.pages as usize,
            "a page for each page of the edge"
        );
        self.owned -= node.pages;
        self.write_pages(node, node.start, pages);
        let span = self.slot(at);
        assert!(!span.resident, "node {at} is placed once");
        *span = Span {
            leases: 1,
            resident: true,
            ..Span::default()
        };
        self.cached += node.pages;
        self.leased += node.pages;
        let parent = self.slot(node.parent);
        assert!(
            parent.resident && parent.leases > 0,
            "a path is placed from the root"
        );
        parent.kids += 1;
    }

    /// Appends pages of a request to a resident node that has already grown by them.
    pub(crate) fn grow(&mut self, at: u32, node: &Node, pages: Pages) {
        let grown = crate::tree::narrow(pages.len());
        assert!(self.span(at).leases > 0, "a node grows under a lease");
        self.owned -= grown;
        self.write_pages(node, node.start + node.pages - grown, pages);
        self.cached += grown;
        self.leased += grown;
    }

    /// `upper` was cut from `lower`: it has the same state.
    pub(crate) fn split(&mut self, lower: u32, upper: u32) {
        let span = self.span(lower);
        *self.slot(upper) = Span {
            kids: u32::from(span.resident),
            ..span
        };
        if span.resident && span.leases == 0 {
            self.order.split(lower, upper);
        }
    }

    /// One lease more on a resident node.
    pub(crate) fn lease(&mut self, at: u32, node: &Node) {
        let span = self.span(at);
        assert!(span.resident, "only what is resident is leased");
        if span.leases == 0 && !node.is_root() {
            self.unrank(at, node);
            self.order.leave(at);
            self.leased += node.pages;
        }
        let span = self.slot(at);
        span.leases += 1;
        span.spent = false;
    }

    /// One lease less; true when it was the last. The node was used until `now`; `below` is the
    /// node of the same path that came before.
    pub(crate) fn unlease(&mut self, at: u32, node: &Node, below: Option<u32>, use_: Use) -> bool {
        let span = self.slot(at);
        assert!(span.leases > 0, "node {at} is leased");
        span.leases -= 1;
        span.stamp = use_.until;
        span.spent = use_.last;
        if span.leases > 0 {
            return false;
        }
        if !node.is_root() {
            self.leased -= node.pages;
            self.order.enter(at, use_.last, below);
            self.rank(at, node);
        }
        true
    }

    /// The key of `at` is about to change.
    pub(crate) fn unrank(&mut self, at: u32, node: &Node) {
        let span = self.span(at);
        if span.is_free_leaf() && !node.is_root() {
            self.order.unrank(at, node, &span);
        }
    }

    /// The key of `at` has changed.
    pub(crate) fn rank(&mut self, at: u32, node: &Node) {
        let span = self.span(at);
        if span.is_free_leaf() && !node.is_root() {
            self.order.rank(at, node, &span);
        }
    }

    /// Frees the pages of `at` after the first `keep`; the edge is cut by the caller.
    pub(crate) fn free_tail(&mut self, at: u32, node: &Node, keep: u32) -> u32 {
        let span = self.span(at);
        assert!(span.is_free_leaf(), "only a free leaf is cut");
        let first = (node.start + keep) as usize;
        let run = &mut self.pages[node.run as usize];
        self.pool.release_ids(&run[first..]);
        let freed = crate::tree::narrow(run.len() - first);
        run.truncate(first);
        if run.capacity() > 4 * run.len() + 16 {
            run.shrink_to(2 * run.len());
        }
        self.cached -= freed;
        freed
    }

    /// Frees all pages of `at`, which is unleased and has no child in this tier.
    pub(crate) fn vacate(&mut self, at: u32, tree: &Tree) -> u32 {
        let node = tree.node(at);
        self.unrank(at, node);
        self.order.leave(at);
        let freed = self.free_tail(at, node, 0);
        *self.slot(at) = Span::default();
        let parent = self.slot(node.parent);
        parent.kids -= 1;
        self.rank(node.parent, tree.node(node.parent));
        freed
    }

    /// The pages of a resident node.
    pub(crate) fn pages_of(&self, node: &Node) -> &[PageId] {
        match self.pages.get(node.run as usize) {
            Some(run) => &run[node.start as usize..(node.start + node.pages) as usize],
            None => &[],
        }
    }

    fn slot(&mut self, at: u32) -> &mut Span {
        let at = at as usize;
        if self.spans.len() <= at {
            self.spans.resize(at + 1, Span::default());
        }
        &mut self.spans[at]
    }

    /// Residency on a device is a prefix of each path, so what a run has here is one too.
    fn write_pages(&mut self, node: &Node, first: u32, pages: Pages) {
        let run = node.run as usize;
        if self.pages.len() <= run {
            self.pages.resize_with(run + 1, Vec::new);
        }
        let slot = &mut self.pages[run];
        assert_eq!(slot.len(), first as usize, "pages of a run come in order");
        if slot.is_empty() {
            *slot = pages.disband();
        } else {
            slot.extend(pages.disband());
        }
    }
}
