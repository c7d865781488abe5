//! What one tier holds: its pool, which nodes have their pages in it, who keeps them there, and
//! the order in which they go. A node is in a tier as a whole or not at all; where a part
//! differs, the node is split.
//!
//! Conservation: free + evictable + leased + held + in transit = total. Evictable and leased are
//! pages of resident nodes, held are those reserved, owned by requests or waiting for a step, in
//! transit are destinations of copies.

use crate::TierStats;
use crate::node::Node;
use crate::order::{Links, Order, Place, Rank, Ranking};
use crate::policy::agent::Mark;
use crate::tree::{Tree, narrow, reserve_a_little};
use rootstock_memory::{PageId, PagePool, Pages, Reservation, StepId, TierId};
use smallvec::SmallVec;

/// Bits of a rank by worth that are recency.
const STAMP_BITS: u32 = 48;

/// A node's state in one tier. Half a cache line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// Leases that cover it.
    pub(crate) leases: u32,
    /// Children that are in this tier.
    pub(crate) kids: u32,
    /// When it was last used here, as a count of calls.
    pub(crate) stamp: u64,
    /// Its place in the order of recency.
    pub(crate) links: Links,
    /// Copies that read it, or that need it as the way to what they read or write.
    pub(crate) busy: u16,
    pub(crate) resident: bool,
    /// Its last user expects nobody to ask for it again.
    pub(crate) spent: bool,
    /// A copy to this tier is under way.
    pub(crate) incoming: bool,
    /// Goes only when nothing else is left.
    pub(crate) pinned: bool,
    /// A copy to a lower tier has failed: drop it rather than try again.
    pub(crate) stuck: bool,
    /// It was read from storage, and not used since.
    pub(crate) read: bool,
}

const _: () = assert!(size_of::<Span>() <= 32);

impl Default for Span {
    fn default() -> Self {
        Self {
            leases: 0,
            kids: 0,
            stamp: 0,
            links: Links::NONE,
            busy: 0,
            resident: false,
            spent: false,
            incoming: false,
            pinned: false,
            stuck: false,
            read: false,
        }
    }
}

impl Span {
    /// Whether leases or copies keep it.
    pub(crate) const fn is_kept(&self) -> bool {
        self.leases > 0 || self.busy > 0
    }

    /// Whether it has a place in the order of recency.
    pub(crate) const fn is_listed(&self) -> bool {
        self.resident && self.leases == 0 && !self.pinned
    }

    /// Whether it can be evicted at once.
    pub(crate) const fn is_candidate(&self) -> bool {
        self.resident && !self.is_kept() && self.kids == 0 && !self.pinned
    }
}

/// Pages of a node that need no allocation of their own.
const FEW: usize = 6;

/// A node in one tier. One cache line, so that what a lookup changes of a node here and what it
/// asks for is in one.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Seat {
    pub(crate) span: Span,
    /// The pages of the edge; none where it is not resident.
    pub(crate) pages: SmallVec<[PageId; FEW]>,
}

const _: () = assert!(size_of::<Seat>() == 64);

/// One tier.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) pool: PagePool,
    /// By node.
    pub(crate) seats: Vec<Seat>,
    pub(crate) order: Order,
    pub(crate) ranking: Ranking,
    /// Pages of resident nodes.
    pub(crate) cached: u32,
    /// Those that leases or copies keep.
    pub(crate) leased: u32,
    /// Pages that requests own: acquired, neither released nor put into the tree.
    pub(crate) owned: u32,
    /// Destinations of copies under way.
    pub(crate) in_transit: u32,
    /// Pages that copies to a lower tier read, to make room here.
    pub(crate) leaving: u32,
    pub(crate) hit_tokens: u64,
    pub(crate) evicted_pages: u64,
    pub(crate) dropped_pages: u64,
}

impl Tier {
    pub(crate) fn new(id: TierId, total: u32, ranking: Ranking) -> Self {
        // Arrivals on lower tiers come in no order of use, so recency is a rank there.
        let order = match id {
            TierId::Host | TierId::Storage if ranking != Ranking::Worth => Order::ranked(ranking),
            TierId::Device(_) | TierId::Host | TierId::Storage => Order::new(ranking),
        };
        Self {
            pool: PagePool::new(id, total),
            seats: Vec::new(),
            order,
            ranking,
            cached: 0,
            leased: 0,
            owned: 0,
            in_transit: 0,
            leaving: 0,
            hit_tokens: 0,
            evicted_pages: 0,
            dropped_pages: 0,
        }
    }

    pub(crate) fn span(&self, at: u32) -> Span {
        let seat = self.seats.get(at as usize);
        seat.map_or_else(Span::default, |seat| seat.span)
    }

    pub(crate) fn is_resident(&self, at: u32) -> bool {
        let seat = self.seats.get(at as usize);
        seat.is_some_and(|seat| seat.span.resident)
    }

    /// Free pages and those that can be evicted.
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
            in_transit: self.in_transit,
            hit_tokens: self.hit_tokens,
            evicted_pages: self.evicted_pages,
            dropped_pages: self.dropped_pages,
        }
    }

    // Pages without a node.

    pub(crate) fn acquire(&mut self, reservation: &mut Reservation, n: u32) -> Pages {
        self.owned += n;
        self.pool.acquire(reservation, n)
    }

    pub(crate) fn release(&mut self, pages: Pages, busy_until: Option<StepId>) {
        self.owned -= narrow(pages.len());
        match busy_until {
            Some(step) => self.pool.release_after(pages, step),
            None => self.pool.release(pages),
        }
    }

    /// Takes `n` reserved pages as the destination of a copy.
    pub(crate) fn acquire_for_copy(&mut self, reservation: &mut Reservation, n: u32) -> Pages {
        self.in_transit += n;
        self.pool.acquire(reservation, n)
    }

    // Nodes.

    /// A root is resident everywhere and has no pages.
    pub(crate) fn add_root(&mut self, at: u32) {
        *self.slot(at) = Span {
            resident: true,
            ..Span::default()
        };
    }

    /// The node is gone from the tree.
    pub(crate) fn forget(&mut self, at: u32) {
        let Some(seat) = self.seats.get_mut(at as usize) else {
            return;
        };
        let Seat { span, .. } = std::mem::take(seat);
        assert!(!span.is_kept() && span.kids == 0, "what goes is unused");
    }

    /// Changes the state of a node, and with it the counts and the order. `place` is where the
    /// node goes in the order of recency if it enters it.
    pub(crate) fn change(
        &mut self,
        at: u32,
        node: &Node,
        place: Place,
        change: impl FnOnce(&mut Span),
    ) {
        let slot = self.slot(at);
        let old = *slot;
        change(slot);
        let new = *slot;
        if node.is_root() {
            return;
        }
        if old.resident != new.resident || old.is_kept() != new.is_kept() {
            let pages = |counted: bool| if counted { node.pages } else { 0 };
            self.leased -= pages(old.resident && old.is_kept());
            self.leased += pages(new.resident && new.is_kept());
            self.cached -= pages(old.resident);
            self.cached += pages(new.resident);
        }
        if let Order::Recency(_) = self.order {
            if old.is_listed() && !new.is_listed() {
                self.order.leave(at, &mut self.seats);
            } else if !old.is_listed() && new.is_listed() {
                self.order.enter(at, place, &mut self.seats);
            }
            return;
        }
        if old.is_candidate() {
            self.order.unrank(at, node, &old);
        }
        if new.is_candidate() {
            self.order.rank(at, node, &new);
        }
    }

    /// Takes pages of a request as those of `at`, which is not resident and whose parent is
    /// leased. The node gets the lease of that request.
    pub(crate) fn place(&mut self, at: u32, tree: &Tree, pages: Pages) {
        let node = tree.node(at);
        self.owned -= node.pages;
        let parent = self.span(node.parent);
        assert!(
            parent.resident && parent.leases > 0,
            "a path is placed from the root"
        );
        self.set_resident(at, tree, pages.disband(), |span| span.leases = 1);
    }

    /// Makes `at` resident on `ids`, as the one used last but for what `change` says.
    pub(crate) fn set_resident(
        &mut self,
        at: u32,
        tree: &Tree,
        ids: Vec<PageId>,
        change: impl FnOnce(&mut Span),
    ) {
        let node = tree.node(at);
        assert_eq!(
            ids.len(),
            node.pages as usize,
            "a page for each page of the edge"
        );
        assert!(!self.is_resident(at), "node {at} is placed once");
        self.seat(at).pages = SmallVec::from_vec(ids);
        self.change(at, node, Place::Tail, |span| {
            span.resident = true;
            span.spent = false;
            span.stuck = false;
            span.read = false;
            change(span);
        });
        self.count_kid(node.parent, tree.node(node.parent), |kids| kids + 1);
    }

    /// Appends pages of a request to a leased node that has already grown by them.
    pub(crate) fn grow(&mut self, at: u32, pages: Pages) {
        let grown = narrow(pages.len());
        assert!(self.span(at).leases > 0, "a node grows under a lease");
        self.owned -= grown;
        self.seat(at).pages.extend_from_slice(&pages.disband());
        self.cached += grown;
        self.leased += grown;
    }

    /// `upper` was cut from `lower` after `keep` pages: it has the same state.
    pub(crate) fn split(&mut self, lower: u32, upper: u32, keep: u32) {
        let Seat { span, pages } = self.seat(lower);
        let span = *span;
        let keep = (keep as usize).min(pages.len());
        let kept = SmallVec::from_slice(&pages[..keep]);
        *pages = SmallVec::from_slice(&pages[keep..]);
        *self.seat(upper) = Seat {
            span: Span {
                kids: u32::from(span.resident),
                links: Links::NONE,
                ..span
            },
            pages: kept,
        };
        if span.is_listed() {
            self.order.split(lower, upper, &mut self.seats);
        }
        if let Some(shelf) = self.order.shelf() {
            let mark = shelf.mark_of(lower);
            shelf.mark(upper, mark);
        }
    }

    /// One lease more on a resident node.
    pub(crate) fn lease(&mut self, at: u32, node: &Node) {
        let slot = self.slot(at);
        let old = *slot;
        assert!(old.resident, "only what is resident is leased");
        slot.leases += 1;
        slot.spent = false;
        slot.stuck = false;
        // No count of pages and no order changes with another lease.
        if old.leases > 0 || node.is_root() {
            return;
        }
        self.leased += if old.busy == 0 { node.pages } else { 0 };
        if let Order::Recency(_) = self.order {
            if old.is_listed() {
                self.order.leave(at, &mut self.seats);
            }
        } else if old.is_candidate() {
            self.order.unrank(at, node, &old);
        }
    }

    /// One lease less; true when it was the last. The node was used until `now`.
    pub(crate) fn unlease(&mut self, at: u32, node: &Node, place: Place, now: u64) -> bool {
        let slot = self.slot(at);
        assert!(slot.leases > 0, "node {at} is leased");
        slot.leases -= 1;
        slot.stamp = now;
        slot.spent = matches!(place, Place::Front(_));
        let new = *slot;
        if new.leases > 0 {
            return false;
        }
        if node.is_root() {
            return true;
        }
        self.leased -= if new.busy == 0 { node.pages } else { 0 };
        if let Order::Recency(_) = self.order {
            if new.is_listed() {
                self.order.enter(at, place, &mut self.seats);
            }
        } else if new.is_candidate() {
            self.order.rank(at, node, &new);
        }
        true
    }

    /// A child of `at` came to this tier or went from it.
    fn count_kid(&mut self, at: u32, node: &Node, count: impl FnOnce(u32) -> u32) {
        if let Order::Recency(_) = self.order {
            // Those with children are in that order too.
            let slot = self.slot(at);
            slot.kids = count(slot.kids);
        } else {
            self.change(at, node, Place::Tail, |span| span.kids = count(span.kids));
        }
    }

    /// The node counts as used now, if it is here. Paths come leaf first.
    pub(crate) fn refresh(&mut self, at: u32, node: &Node, now: u64) {
        let span = self.span(at);
        if !span.resident || node.is_root() {
            return;
        }
        if span.is_listed() {
            self.order.leave(at, &mut self.seats);
            self.order.enter(at, Place::Tail, &mut self.seats);
        }
        self.change(at, node, Place::Tail, |span| {
            span.stamp = now;
            span.spent = false;
        });
    }

    /// What the node is ranked by is about to change.
    pub(crate) fn unrank(&mut self, at: u32, node: &Node) {
        if let Order::Recency(_) = self.order {
            return;
        }
        let span = self.span(at);
        if span.is_candidate() && !node.is_root() {
            self.order.unrank(at, node, &span);
        }
    }

    /// What the node is ranked by has changed.
    pub(crate) fn rank(&mut self, at: u32, node: &Node) {
        if let Order::Recency(_) = self.order {
            return;
        }
        let span = self.span(at);
        if span.is_candidate() && !node.is_root() {
            self.order.rank(at, node, &span);
        }
    }

    /// What the node is worth by from now on, where the order is by learned worth.
    pub(crate) fn remark(&mut self, at: u32, node: &Node, mark: Mark) {
        if self.order.shelf().is_none() {
            return;
        }
        self.unrank(at, node);
        if let Some(shelf) = self.order.shelf() {
            shelf.mark(at, mark);
        }
        self.rank(at, node);
    }

    /// Where a node would stand in the order of this tier with this state; lower goes first.
    pub(crate) fn rank_of(&self, at: u32, node: &Node, span: &Span) -> Rank {
        match &self.order {
            Order::Worth(shelf) if !span.spent => {
                // What is leased is being used now.
                let place = if span.leases > 0 {
                    u64::from(u16::MAX)
                } else {
                    shelf.place_of(at)
                };
                (node.priority.into(), place << STAMP_BITS | span.stamp)
            }
            Order::Worth(_) | Order::Recency(_) | Order::Ranked(..) => {
                self.ranking.rank(node, span)
            }
        }
    }

    /// Who goes first.
    pub(crate) fn first(&mut self) -> Option<u32> {
        self.order.first(&self.seats)
    }

    /// Frees the pages of a candidate after the first `keep`; the edge is cut by the caller.
    pub(crate) fn free_tail(&mut self, at: u32, node: &Node, keep: u32) -> u32 {
        assert!(
            self.span(at).is_candidate() && keep > 0,
            "only a free leaf is cut"
        );
        let Self { seats, pool, .. } = self;
        let pages = &mut seats[at as usize].pages;
        pool.release_ids(&pages[keep as usize..]);
        pages.truncate(keep as usize);
        // Amortized: memory follows what is alive within a factor of 4.
        if pages.spilled() && pages.capacity() > 4 * pages.len() + 16 {
            pages.shrink_to_fit();
        }
        self.cached -= node.pages - keep;
        node.pages - keep
    }

    /// Frees all pages of `at`, a candidate. The node may stay for other tiers.
    pub(crate) fn vacate(&mut self, at: u32, tree: &Tree) -> u32 {
        let node = tree.node(at);
        let seat = &mut self.seats[at as usize];
        let old = seat.span;
        assert!(old.is_candidate(), "only a free leaf is vacated");
        seat.span.resident = false;
        self.pool.release_ids(&seat.pages);
        if seat.pages.spilled() {
            seat.pages = SmallVec::new();
        } else {
            seat.pages.clear();
        }
        self.cached -= node.pages;
        if let Order::Recency(_) = self.order {
            self.order.leave(at, &mut self.seats);
        } else {
            self.order.unrank(at, node, &old);
        }
        self.count_kid(node.parent, tree.node(node.parent), |kids| kids - 1);
        node.pages
    }

    /// The pages of a node; none where it is not resident.
    pub(crate) fn pages_of(&self, at: u32) -> &[PageId] {
        self.seats.get(at as usize).map_or(&[], |seat| &seat.pages)
    }

    fn slot(&mut self, at: u32) -> &mut Span {
        &mut self.seat(at).span
    }

    #[inline]
    fn seat(&mut self, at: u32) -> &mut Seat {
        let at = at as usize;
        if self.seats.len() <= at {
            self.add_seats(at + 1);
        }
        &mut self.seats[at]
    }

    #[cold]
    fn add_seats(&mut self, len: usize) {
        reserve_a_little(&mut self.seats, len);
        self.seats.resize_with(len, Seat::default);
    }
}
