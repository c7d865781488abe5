//! The page pool of one tier: reserve, then acquire, then release. Counts only, no bytes.
//!
//! ```text
//!            reserve            acquire            release
//!   free  ------------>  reserved ------->  out  ------------>  free
//!     ^                     |               | release_after(step)
//!     |       cancel        |               v
//!     +---------------------+            waiting --step_done(>= step)--> free
//! ```
//! Invariant: free + reserved + out + waiting = total. Reserved pages have no identity yet:
//! `free + reserved` ids are those that came back and those that were never handed out. What came
//! back is a stack and goes out before what is new, so the same calls give the same ids.

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

/// Counts and hands out the pages `1..=total` of one tier.
#[derive(Debug)]
pub struct PagePool {
    tier: TierId,
    total: u32,
    /// Free and reserved ids that came back, taken from the end.
    free: Vec<PageId>,
    /// Those above it were never handed out, and are taken from the lowest on.
    highest: u32,
    reserved: u32,
    waiting: BTreeMap<StepId, Vec<PageId>>,
    waiting_pages: u32,
    /// The last step that has ended.
    ended: Option<StepId>,
    /// The pages that are out.
    out: Bits,
    stray_releases: u64,
}

impl PagePool {
    /// A pool of `total` usable pages.
    ///
    /// # Cost
    /// A bit a page; and four bytes for each of the most that were free again at a time.
    pub fn new(tier: TierId, total: u32) -> Self {
        Self {
            tier,
            total,
            free: Vec::new(),
            highest: 0,
            reserved: 0,
            waiting: BTreeMap::new(),
            waiting_pages: 0,
            ended: None,
            out: Bits::new(total as usize + 1),
            stray_releases: 0,
        }
    }

    /// The tier.
    pub const fn tier(&self) -> TierId {
        self.tier
    }

    /// Usable pages.
    pub const fn total(&self) -> u32 {
        self.total
    }

    /// Pages that can be reserved now.
    pub const fn free(&self) -> u32 {
        self.not_in_use() - self.reserved
    }

    /// Free and reserved.
    const fn not_in_use(&self) -> u32 {
        count(self.free.len()) + (self.total - self.highest)
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
    pub const fn out(&self) -> u32 {
        self.total - self.not_in_use() - self.waiting_pages
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
        let again = self.free.len().min(n as usize);
        let left = self.free.len() - again;
        let mut ids = Vec::with_capacity(n as usize);
        ids.extend(self.free.drain(left..).rev());
        let new = n - count(again);
        let highest = self.highest + new;
        assert!(highest <= self.total, "reserved pages are not in use");
        ids.extend((self.highest + 1..=highest).map(PageId::new));
        self.highest = highest;
        for &id in &ids {
            self.out.set(id);
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
        let mut free = std::mem::take(&mut self.free);
        self.take_back(ids, &mut free);
        self.free = free;
    }

    /// Gives pages back once step `step` has ended, because it may still touch them: at once, when
    /// [`Self::step_done`] has told of that step already.
    ///
    /// # Panics
    /// When they belong to another tier.
    pub fn release_after(&mut self, pages: Pages, step: StepId) {
        assert_eq!(pages.tier, self.tier, "pages of another tier");
        self.release_ids_after(&pages.disband(), step);
    }

    /// The same for disbanded pages, as [`PagePool::release_ids`].
    pub fn release_ids_after(&mut self, ids: &[PageId], step: StepId) {
        if self.ended.is_some_and(|ended| step <= ended) {
            self.release_ids(ids);
            return;
        }
        let mut waiting = Vec::with_capacity(ids.len());
        self.take_back(ids, &mut waiting);
        if !waiting.is_empty() {
            self.waiting_pages += count(waiting.len());
            self.waiting.entry(step).or_default().append(&mut waiting);
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
            self.free.extend(ids);
        }
    }

    /// Whether page `id` is acquired and not given back.
    pub fn is_out(&self, id: PageId) -> bool {
        self.out.has(id)
    }

    /// Recounts everything.
    ///
    /// # Errors
    /// The first contradiction found.
    /// # Cost
    /// Linear in the pool.
    pub fn check(&self) -> Result<(), Corruption> {
        let bad = |detail: String| Err(Corruption::new("page pool", detail));
        let mut listed = Bits::new(self.total as usize + 1);
        for id in self.waiting.values().flatten().chain(&self.free) {
            if *id == PageId::SCRATCH || id.get() > self.highest {
                return bad(format!("page {} was never handed out", id.get()));
            }
            if listed.has(*id) {
                return bad(format!("page {} is listed twice", id.get()));
            }
            listed.set(*id);
        }
        let is_out = |id: PageId| (1..=self.highest).contains(&id.get()) && !listed.has(id);
        let mut ids = (0..=self.total).map(PageId::new);
        if let Some(id) = ids.find(|&id| is_out(id) != self.out.has(id)) {
            return bad(format!(
                "page {} is out: {}, listed as free or waiting: {}",
                id.get(),
                self.out.has(id),
                listed.has(id)
            ));
        }
        let waiting: usize = self.waiting.values().map(Vec::len).sum();
        if count(waiting) != self.waiting_pages {
            return bad(format!(
                "{waiting} pages wait, counted {}",
                self.waiting_pages
            ));
        }
        if self.reserved > self.not_in_use() {
            return bad(format!(
                "{} reserved of {} that are not in use",
                self.reserved,
                self.not_in_use()
            ));
        }
        Ok(())
    }

    /// Pages that are out are so no more and go to `to`; one that is not out is counted.
    fn take_back(&mut self, ids: &[PageId], to: &mut Vec<PageId>) {
        to.reserve(ids.len());
        for &id in ids {
            let (number, tier) = (id.get(), self.tier);
            let was_out = self.out.take(id);
            debug_assert!(was_out, "page {number} of {tier:?} is released but not out");
            if was_out {
                to.push(id);
            } else {
                self.stray_releases += 1;
            }
        }
    }
}

/// A bit for each page, so that those of a large pool stay in the cache of the processor.
#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    fn has(&self, id: PageId) -> bool {
        let word = self.0.get(word_of(id));
        word.is_some_and(|word| word & bit_of(id) != 0)
    }

    fn set(&mut self, id: PageId) {
        self.0[word_of(id)] |= bit_of(id);
    }

    /// Clears the bit of a page; whether it was set.
    fn take(&mut self, id: PageId) -> bool {
        let Some(word) = self.0.get_mut(word_of(id)) else {
            return false;
        };
        let was_set = *word & bit_of(id) != 0;
        *word &= !bit_of(id);
        was_set
    }
}

const fn word_of(id: PageId) -> usize {
    id.index() / 64
}

const fn bit_of(id: PageId) -> u64 {
    1 << (id.index() % 64)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a pool has at most u32::MAX pages"
)]
const fn count(n: usize) -> u32 {
    n as u32
}
