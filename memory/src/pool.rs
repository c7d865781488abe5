//! The page pool of one tier: reserve, then acquire, then release. Counts only, no bytes.
//!
//! ```text
//!            reserve            acquire            release
//!   free  ------------>  reserved ------->  out  ------------>  free
//!     ^                     |               | release_after(step)
//!     |       cancel        |               v
//!     +---------------------+            waiting --step_done(>= step)--> free
//! ```
//! Invariant: free + reserved + out + waiting = total. Reserved pages have no identity yet: the
//! free list holds `free + reserved` ids. It is a stack, so the same calls give the same ids.

use crate::{PageId, StepId, TierId};
use std::collections::BTreeMap;
use thiserror::Error;

/// Bookkeeping that contradicts itself, found by a `check` that recounts from scratch.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("corrupt {part}: {detail}")]
pub struct Corruption {
    /// Which part was checked.
    pub part: &'static str,
    /// What was expected and what was found.
    pub detail: String,
}

impl Corruption {
    /// A finding in `part`.
    pub fn new(part: &'static str, detail: impl Into<String>) -> Self {
        Self {
            part,
            detail: detail.into(),
        }
    }
}

/// Pages of one tier that somebody owns. Goes back by [`PagePool::release`], or into a structure
/// that takes over the duty by [`Pages::disband`]. Not `Clone`; dropping a non-empty one is a
/// bug that debug builds report.
#[derive(Debug)]
#[must_use = "pages that are dropped are lost to the pool"]
pub struct Pages {
    tier: TierId,
    ids: Vec<PageId>,
}

impl Pages {
    /// No pages of `tier`.
    pub const fn none(tier: TierId) -> Self {
        Self {
            tier,
            ids: Vec::new(),
        }
    }

    /// The tier they belong to.
    pub const fn tier(&self) -> TierId {
        self.tier
    }

    /// How many.
    pub const fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The ids in order.
    pub fn ids(&self) -> &[PageId] {
        &self.ids
    }

    /// Pages that [`Self::disband`] gave out as ids: the duty to release them goes from whoever
    /// kept the ids to the value. Each id is named once; the pool checks that it is out when it
    /// goes back.
    pub const fn adopt(tier: TierId, ids: Vec<PageId>) -> Self {
        Self { tier, ids }
    }

    /// Keeps the first `at` pages and returns the rest.
    ///
    /// # Panics
    /// When `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self {
            tier: self.tier,
            ids: self.ids.split_off(at),
        }
    }

    /// Appends the pages of `other`.
    ///
    /// # Panics
    /// When `other` belongs to another tier.
    pub fn merge(&mut self, mut other: Self) {
        assert_eq!(self.tier, other.tier, "pages of two tiers do not mix");
        self.ids.append(&mut other.ids);
    }

    /// Gives the ids to a structure that takes over the duty to release each exactly once, by
    /// [`PagePool::release_ids`].
    pub fn disband(mut self) -> Vec<PageId> {
        std::mem::take(&mut self.ids)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        debug_assert!(
            self.ids.is_empty() || std::thread::panicking(),
            "{} pages of {:?} were dropped, not released",
            self.ids.len(),
            self.tier
        );
    }
}

/// Pages promised but not yet taken. Goes back by [`PagePool::cancel`].
#[derive(Debug)]
#[must_use = "a reservation that is dropped is lost to the pool"]
pub struct Reservation {
    tier: TierId,
    left: u32,
}

impl Reservation {
    /// A reservation of nothing, for callers that need no page.
    pub const fn none(tier: TierId) -> Self {
        Self { tier, left: 0 }
    }

    /// The tier it belongs to.
    pub const fn tier(&self) -> TierId {
        self.tier
    }

    /// Pages that can still be acquired from it.
    pub const fn left(&self) -> u32 {
        self.left
    }

    /// Adds `other` to this one.
    ///
    /// # Panics
    /// When `other` belongs to another tier.
    pub fn merge(&mut self, mut other: Self) {
        assert_eq!(
            self.tier, other.tier,
            "reservations of two tiers do not mix"
        );
        self.left += std::mem::take(&mut other.left);
    }

    /// Takes `n` pages out of this reservation into a new one.
    ///
    /// # Panics
    /// When fewer than `n` are left.
    pub fn split_off(&mut self, n: u32) -> Self {
        assert!(
            n <= self.left,
            "split of {n} pages from a reservation of {}",
            self.left
        );
        self.left -= n;
        Self {
            tier: self.tier,
            left: n,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        debug_assert!(
            self.left == 0 || std::thread::panicking(),
            "a reservation of {} pages of {:?} was dropped, not cancelled",
            self.left,
            self.tier
        );
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Out,
    Waiting,
}

/// Counts and hands out the pages `1..=total` of one tier.
#[derive(Debug)]
pub struct PagePool {
    tier: TierId,
    /// Free and reserved ids, taken from the end.
    free: Vec<PageId>,
    reserved: u32,
    waiting: BTreeMap<StepId, Vec<PageId>>,
    waiting_pages: u32,
    /// The last step that has ended.
    ended: Option<StepId>,
    /// Indexed by page id; entry 0 is the scratch page and stays `Out`.
    state: Vec<State>,
    stray_releases: u64,
}

impl PagePool {
    /// A pool of `total` usable pages.
    ///
    /// # Cost
    /// Five bytes a page.
    pub fn new(tier: TierId, total: u32) -> Self {
        let mut state = vec![State::Free; total as usize + 1];
        state[0] = State::Out;
        let free = (1..=total).rev().map(PageId::new).collect();
        let waiting = BTreeMap::new();
        Self {
            tier,
            free,
            reserved: 0,
            waiting,
            waiting_pages: 0,
            ended: None,
            state,
            stray_releases: 0,
        }
    }

    /// The tier.
    pub const fn tier(&self) -> TierId {
        self.tier
    }

    /// Usable pages.
    pub fn total(&self) -> u32 {
        count(self.state.len() - 1)
    }

    /// Pages that can be reserved now.
    pub fn free(&self) -> u32 {
        count(self.free.len()) - self.reserved
    }

    /// Pages promised and not yet acquired.
    pub const fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Pages that wait for a step to end.
    pub const fn waiting(&self) -> u32 {
        self.waiting_pages
    }

    /// Pages that were acquired and not given back.
    pub fn out(&self) -> u32 {
        self.total() - count(self.free.len()) - self.waiting_pages
    }

    /// Releases that named a page which was not out; each was ignored.
    pub const fn stray_releases(&self) -> u64 {
        self.stray_releases
    }

    /// Promises `n` pages, or nothing when fewer are free.
    pub fn reserve(&mut self, n: u32) -> Option<Reservation> {
        if n > self.free() {
            return None;
        }
        self.reserved += n;
        Some(Reservation {
            tier: self.tier,
            left: n,
        })
    }

    /// Takes `n` pages of a reservation.
    ///
    /// # Panics
    /// When the reservation has fewer than `n` left or belongs to another tier.
    pub fn acquire(&mut self, reservation: &mut Reservation, n: u32) -> Pages {
        assert_eq!(reservation.tier, self.tier, "reservation of another tier");
        assert!(
            n <= reservation.left,
            "acquired {n} pages of {} reserved",
            reservation.left
        );
        assert!(n <= self.reserved, "reservation is not of this pool");
        reservation.left -= n;
        self.reserved -= n;
        let left = self.free.len().checked_sub(n as usize);
        let left = left.expect("reserved pages are in the free list");
        let ids: Vec<PageId> = self.free.drain(left..).rev().collect();
        for id in &ids {
            self.state[id.index()] = State::Out;
        }
        Pages {
            tier: self.tier,
            ids,
        }
    }

    /// Gives the rest of a reservation back.
    ///
    /// # Panics
    /// When it belongs to another tier.
    pub fn cancel(&mut self, mut reservation: Reservation) {
        assert_eq!(reservation.tier, self.tier, "reservation of another tier");
        assert!(
            reservation.left <= self.reserved,
            "reservation is not of this pool"
        );
        self.reserved -= std::mem::take(&mut reservation.left);
    }

    /// Gives pages back.
    ///
    /// # Panics
    /// When they belong to another tier.
    pub fn release(&mut self, pages: Pages) {
        assert_eq!(pages.tier, self.tier, "pages of another tier");
        self.release_ids(&pages.disband());
    }

    /// Gives disbanded pages back. A page that is not out is ignored and counted in
    /// [`Self::stray_releases`]; in debug builds it panics.
    pub fn release_ids(&mut self, ids: &[PageId]) {
        for &id in ids {
            if self.mark(id, State::Free) {
                self.free.push(id);
            }
        }
    }

    /// Gives pages back once step `step` has ended, because it may still touch them: at once, when
    /// [`Self::step_done`] has told of that step already.
    ///
    /// # Panics
    /// When they belong to another tier.
    pub fn release_after(&mut self, pages: Pages, step: StepId) {
        assert_eq!(pages.tier, self.tier, "pages of another tier");
        let mut ids = pages.disband();
        if self.ended.is_some_and(|ended| step <= ended) {
            self.release_ids(&ids);
            return;
        }
        ids.retain(|&id| self.mark(id, State::Waiting));
        if !ids.is_empty() {
            self.waiting_pages += count(ids.len());
            self.waiting.entry(step).or_default().append(&mut ids);
        }
    }

    /// Step `step` and all before it have ended: frees what waited for them.
    pub fn step_done(&mut self, step: StepId) {
        self.ended = self.ended.max(Some(step));
        while let Some(entry) = self.waiting.first_entry() {
            if *entry.key() > step {
                break;
            }
            let ids = entry.remove();
            self.waiting_pages -= count(ids.len());
            for &id in &ids {
                self.state[id.index()] = State::Free;
            }
            self.free.extend(ids);
        }
    }

    /// Whether page `id` is acquired and not given back.
    pub fn is_out(&self, id: PageId) -> bool {
        id != PageId::SCRATCH && self.state.get(id.index()) == Some(&State::Out)
    }

    /// Recounts everything.
    ///
    /// # Errors
    /// The first contradiction found.
    /// # Cost
    /// Linear in the pool.
    pub fn check(&self) -> Result<(), Corruption> {
        let bad = |detail: String| Err(Corruption::new("page pool", detail));
        let mut seen = vec![State::Out; self.state.len()];
        let waiting = self
            .waiting
            .values()
            .flatten()
            .map(|id| (id, State::Waiting));
        let free = self.free.iter().map(|id| (id, State::Free));
        for (id, state) in free.chain(waiting) {
            if *id == PageId::SCRATCH || id.index() >= seen.len() {
                return bad(format!("page {} does not exist", id.get()));
            }
            if seen[id.index()] != State::Out {
                return bad(format!("page {} is listed twice", id.get()));
            }
            seen[id.index()] = state;
        }
        if let Some(at) = (0..seen.len()).find(|&at| seen[at] != self.state[at]) {
            return bad(format!(
                "page {at} is {:?}, listed as {:?}",
                self.state[at], seen[at]
            ));
        }
        let waiting: usize = self.waiting.values().map(Vec::len).sum();
        if count(waiting) != self.waiting_pages {
            return bad(format!(
                "{waiting} pages wait, counted {}",
                self.waiting_pages
            ));
        }
        if self.reserved as usize > self.free.len() {
            return bad(format!(
                "{} reserved of {} free",
                self.reserved,
                self.free.len()
            ));
        }
        Ok(())
    }

    /// Moves a page that is out to `next`; false, counted, when it is not out.
    fn mark(&mut self, id: PageId, next: State) -> bool {
        let out = self.is_out(id);
        debug_assert!(
            out,
            "page {} of {:?} is released but not out",
            id.get(),
            self.tier
        );
        if out {
            self.state[id.index()] = next;
        } else {
            self.stray_releases += 1;
        }
        out
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a pool has at most u32::MAX pages"
)]
const fn count(n: usize) -> u32 {
    n as u32
}
