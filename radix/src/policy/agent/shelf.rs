//! What can go, in cells: one list for each class and bin of time. Whoever is first in the cell
//! that is worth least goes first, found in a bitmap of the cells in order of worth.
//!
//! Things change their cell only as time passes, at most once a bin, and whole runs of them at
//! once: what has left a bin is a run at the front of its list, which is hung behind the next
//! one without touching what is in it. That happens when somebody asks who goes first and at no
//! other time. A list is as old as its front to within the bin, so a move may come late by a part
//! of the bin's width and never early. Lists are rings through a head of their own, so that a
//! thing can leave without knowing where it is.
//!
//! Importance goes before worth: each priority in use has its own cells.

use super::ages::{self, BINS};
use super::class::{CELLS, CLASSES, Mark};
use super::ranks::Ranks;
use crate::node::NIL;
use rootstock_memory::Nanos;
use std::sync::Arc;

/// Priorities with cells of their own; of more, one counts as the next lower that has them.
const LEVELS_MAX: usize = 8;

/// How often the front of a bin is looked at while it lasts.
const LOOKS: Nanos = 4;

/// How many priorities are told apart, and how often the front of a bin is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detail {
    pub(crate) levels_max: usize,
    pub(crate) looks: Nanos,
}

/// Heads of lists are named from here on, things below.
const HEADS: u32 = 1 << 31;

const WORDS: usize = CELLS / 64;

const _: () = assert!(CLASSES <= 128 && WORDS <= 128, "a bit for each");
const _: () = assert!(BINS <= 64, "a bit for each bin");

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// On no list.
const OUT: Link = Link {
    prev: NIL,
    next: NIL,
};

#[derive(Clone, Copy, Debug)]
struct Item {
    mark: Mark,
    /// Order of equal origins.
    stamp: u64,
    link: Link,
}

const _: () = assert!(size_of::<Item>() <= 32, "two in a cache line");

const ABSENT: Item = Item {
    mark: Mark::NONE,
    stamp: 0,
    link: OUT,
};

/// What is known of the cells of one priority.
#[derive(Debug)]
struct Level {
    priority: i32,
    /// By place in the order of worth: whether the cell there holds anything.
    filled: [u64; WORDS],
    /// The words of `filled` that are not 0.
    words: u128,
    /// By bin: the classes that have anything there.
    held: [u128; BINS],
    /// The bins that hold anything.
    bins: u64,
}

impl Level {
    const fn new(priority: i32) -> Self {
        Self {
            priority,
            filled: [0; WORDS],
            words: 0,
            held: [0; BINS],
            bins: 0,
        }
    }

    fn mark(&mut self, place: u16, filled: bool) {
        let (word, bit) = (usize::from(place) / 64, place % 64);
        let bits = self.filled[word] & !(1 << bit) | u64::from(filled) << bit;
        self.filled[word] = bits;
        self.words = self.words & !(1 << word) | u128::from(bits != 0) << word;
    }

    /// The list of `cell`, which is at `place`, has got its first or lost its last.
    fn hold(&mut self, cell: usize, place: u16, holds: bool) {
        self.mark(place, holds);
        let (class, bin) = (1 << (cell / BINS), cell % BINS);
        let held = &mut self.held[bin];
        *held = if holds { *held | class } else { *held & !class };
        self.bins = self.bins & !(1 << bin) | u64::from(*held != 0) << bin;
    }

    /// The first place that is filled.
    const fn first(&self) -> Option<usize> {
        if self.words == 0 {
            return None;
        }
        let word = self.words.trailing_zeros() as usize;
        Some(word * 64 + self.filled[word].trailing_zeros() as usize)
    }
}

/// The cells of all priorities; things are named by numbers that are dense.
#[derive(Debug)]
pub(crate) struct Shelf {
    now: Nanos,
    /// When the fronts of each bin are looked at next.
    looks: [Nanos; BINS],
    next_look: Nanos,
    items: Vec<Item>,
    /// By slot and cell.
    heads: Vec<Link>,
    /// By slot; those that are not ranked are empty.
    levels: Vec<Level>,
    /// Slots by ascending priority; that of priority 0 is always there.
    ranked: Vec<u8>,
    detail: Detail,
    ranks: Arc<Ranks>,
}

impl Shelf {
    /// Empty cells in this order.
    pub(crate) fn new(ranks: Arc<Ranks>) -> Self {
        let detail = Detail {
            levels_max: LEVELS_MAX,
            looks: LOOKS,
        };
        Self::with_detail(ranks, detail)
    }

    pub(crate) fn with_detail(ranks: Arc<Ranks>, detail: Detail) -> Self {
        let mut shelf = Self {
            now: 0,
            looks: [0; BINS],
            next_look: 0,
            items: Vec::new(),
            heads: Vec::new(),
            levels: Vec::new(),
            ranked: Vec::new(),
            detail,
            ranks,
        };
        shelf.add_level(0, 0);
        shelf
    }

    /// Time passes; it never goes back.
    pub(crate) fn set_now(&mut self, now: Nanos) {
        self.now = self.now.max(now);
    }

    /// Sets what `at` is worth by; it is on no list.
    pub(crate) fn mark(&mut self, at: u32, mark: Mark) {
        assert!(!self.holds(at), "a mark changes off the lists");
        let at = at as usize;
        if self.items.len() <= at {
            self.items.resize(at + 1, ABSENT);
        }
        self.items[at].mark = mark;
    }

    pub(crate) fn mark_of(&self, at: u32) -> Mark {
        self.items
            .get(at as usize)
            .map_or(Mark::NONE, |item| item.mark)
    }

    pub(crate) fn holds(&self, at: u32) -> bool {
        let item = self.items.get(at as usize);
        item.is_some_and(|item| item.link.next != NIL)
    }

    /// Puts `at` into the cell of its mark and this moment.
    pub(crate) fn insert(&mut self, at: u32, priority: i32, stamp: u64) {
        if self.items.len() <= at as usize {
            self.items.resize(at as usize + 1, ABSENT);
        }
        assert!(!self.holds(at), "{at} is on a list already");
        let item = &mut self.items[at as usize];
        item.stamp = stamp;
        let (origin, cell) = match self.ranks.is_recency {
            true => (0, ages::bin(self.now, item.mark.origin.min(self.now))),
            false => (item.mark.origin, item.mark.cell(self.now)),
        };
        let slot = self.slot_for(priority);
        let head = head_of(slot, cell);
        let Link { prev: last, next } = self.link(head);
        // A parent is as old as the child that went before it: it comes next.
        let in_front = next != head && {
            let first = &self.items[next as usize];
            let first_origin = if self.ranks.is_recency {
                0
            } else {
                first.mark.origin
            };
            (origin, stamp) <= (first_origin, first.stamp)
        };
        let (prev, next) = if in_front { (head, next) } else { (last, head) };
        self.items[at as usize].link = Link { prev, next };
        self.link_mut(prev).next = at;
        self.link_mut(next).prev = at;
        if prev == next {
            self.hold(slot, cell, true);
            self.next_look = self.next_look.min(self.looks[cell % BINS]);
        }
    }

    /// Takes `at` off its list.
    pub(crate) fn remove(&mut self, at: u32) {
        assert!(self.holds(at), "{at} is on a list");
        let item = &mut self.items[at as usize];
        let Link { prev, next } = std::mem::replace(&mut item.link, OUT);
        self.link_mut(prev).next = next;
        self.link_mut(next).prev = prev;
        if prev == next {
            let (slot, cell) = place_of(prev);
            self.hold(slot, cell, false);
            self.retire(slot);
        }
    }

    /// The place of the cell where `at` belongs in the order of worth.
    pub(crate) fn place_of(&self, at: u32) -> u64 {
        self.ranks.places[self.mark_of(at).cell(self.now)].into()
    }

    /// Who goes first.
    pub(crate) fn first(&mut self) -> Option<u32> {
        self.advance();
        let slots = self.ranked.iter();
        let found = slots.filter_map(|&slot| {
            let level = &self.levels[usize::from(slot)];
            Some((usize::from(slot), level.first()?))
        });
        let (slot, place) = found.into_iter().next()?;
        Some(self.front(slot, place))
    }

    /// Who goes first of each priority that anything has, and its place in the order of worth.
    pub(crate) fn firsts(&mut self) -> impl Iterator<Item = (i32, usize, u32)> {
        self.advance();
        self.ranked.iter().filter_map(|&slot| {
            let level = &self.levels[usize::from(slot)];
            let place = level.first()?;
            Some((level.priority, place, self.front(usize::from(slot), place)))
        })
    }

    /// Who goes first of one priority, as [`Self::firsts`] last found things to lie, and its place.
    pub(crate) fn first_of(&self, priority: i32) -> Option<(usize, u32)> {
        let slot = usize::from(self.ranked[self.find(priority).ok()?]);
        let place = self.levels[slot].first()?;
        Some((place, self.front(slot, place)))
    }

    fn front(&self, slot: usize, place: usize) -> u32 {
        let cell = usize::from(self.ranks.order[place]);
        self.heads[slot * CELLS + cell].next
    }

    /// Moves what has come into another bin.
    fn advance(&mut self) {
        if self.now < self.next_look {
            return;
        }
        let slots = self.ranked.iter();
        let mut left = slots.fold(0, |bins, &slot| bins | self.levels[usize::from(slot)].bins);
        self.next_look = Nanos::MAX;
        while left != 0 {
            let bin = left.trailing_zeros() as usize;
            left &= left - 1;
            if bin + 1 >= BINS {
                break;
            }
            if self.looks[bin] <= self.now {
                self.looks[bin] = self
                    .now
                    .saturating_add(ages::width(bin) / self.detail.looks);
                if self.advance_bin(bin) && bin + 2 < BINS {
                    self.looks[bin + 1] = self.now;
                    left |= 1 << (bin + 1);
                }
            }
            self.next_look = self.next_look.min(self.looks[bin]);
        }
    }

    /// True when anything has moved.
    fn advance_bin(&mut self, bin: usize) -> bool {
        let Some(limit) = ages::past(bin, self.now) else {
            return false;
        };
        let mut moved = false;
        for rank in 0..self.ranked.len() {
            let slot = usize::from(self.ranked[rank]);
            let mut classes = self.levels[slot].held[bin];
            while classes != 0 {
                let class = classes.trailing_zeros() as usize;
                classes &= classes - 1;
                moved |= self.advance_list(slot, class * BINS + bin, limit);
            }
        }
        moved
    }

    /// Hangs the things at the front of a list whose origin is at most `limit` behind the next.
    fn advance_list(&mut self, slot: usize, cell: usize, limit: Nanos) -> bool {
        let head = head_of(slot, cell);
        let first = self.link(head).next;
        let (mut last, mut next) = (head, first);
        while next != head && self.items[next as usize].mark.origin <= limit {
            (last, next) = (next, self.items[next as usize].link.next);
        }
        if last == head {
            return false;
        }
        let target = head_of(slot, cell + 1);
        let end = self.link(target).prev;
        self.link_mut(head).next = next;
        self.link_mut(next).prev = head;
        self.link_mut(end).next = first;
        self.link_mut(first).prev = end;
        self.link_mut(last).next = target;
        self.link_mut(target).prev = last;
        if end == target {
            self.hold(slot, cell + 1, true);
        }
        if next == head {
            self.hold(slot, cell, false);
        }
        true
    }

    /// Another order of the cells; what is in them stays.
    pub(crate) fn reorder(&mut self, ranks: &Arc<Ranks>) {
        self.ranks = Arc::clone(ranks);
        for level in &mut self.levels {
            (level.filled, level.words) = ([0; WORDS], 0);
            for bin in 0..BINS {
                let mut classes = level.held[bin];
                while classes != 0 {
                    let cell = classes.trailing_zeros() as usize * BINS + bin;
                    classes &= classes - 1;
                    level.mark(ranks.places[cell], true);
                }
            }
        }
    }

    fn hold(&mut self, slot: usize, cell: usize, holds: bool) {
        self.levels[slot].hold(cell, self.ranks.places[cell], holds);
    }

    fn link(&self, at: u32) -> Link {
        match at.checked_sub(HEADS) {
            Some(head) => self.heads[head as usize],
            None => self.items[at as usize].link,
        }
    }

    fn link_mut(&mut self, at: u32) -> &mut Link {
        match at.checked_sub(HEADS) {
            Some(head) => &mut self.heads[head as usize],
            None => &mut self.items[at as usize].link,
        }
    }

    fn find(&self, priority: i32) -> Result<usize, usize> {
        let priority_of = |slot: &u8| self.levels[usize::from(*slot)].priority;
        self.ranked.binary_search_by_key(&priority, priority_of)
    }

    /// The slot of a priority, made where there may be another.
    fn slot_for(&mut self, priority: i32) -> usize {
        let rank = match self.find(priority) {
            Ok(rank) => rank,
            Err(rank) if self.ranked.len() < self.detail.levels_max => {
                self.add_level(rank, priority);
                rank
            }
            Err(rank) => rank.saturating_sub(1),
        };
        usize::from(self.ranked[rank])
    }

    fn add_level(&mut self, rank: usize, priority: i32) {
        let used = |slot: &u8| self.ranked.contains(slot);
        let slot = (0..).find(|slot| !used(slot)).unwrap_or_default();
        if usize::from(slot) == self.levels.len() {
            self.levels.push(Level::new(priority));
            let heads = (0..CELLS).map(|cell| head_of(usize::from(slot), cell));
            self.heads.extend(heads.map(|head| Link {
                prev: head,
                next: head,
            }));
        }
        self.levels[usize::from(slot)].priority = priority;
        self.ranked.insert(rank, slot);
    }

    /// A level lasts as long as what is on it.
    fn retire(&mut self, slot: usize) {
        let level = &self.levels[slot];
        if level.bins == 0 && level.priority != 0 {
            self.ranked.retain(|&other| usize::from(other) != slot);
        }
    }

    /// Recounts the lists; returns how much is on them, or what contradicts itself.
    pub(crate) fn check(&self) -> Result<usize, String> {
        let mut count = 0;
        for (slot, level) in self.levels.iter().enumerate() {
            let ranked = self.ranked.iter().any(|&one| usize::from(one) == slot);
            if !ranked && level.bins != 0 {
                return Err(format!("priority {} is out of rank", level.priority));
            }
            let mut again = Level::new(level.priority);
            for bin in 0..BINS {
                let mut classes = level.held[bin];
                while classes != 0 {
                    let cell = classes.trailing_zeros() as usize * BINS + bin;
                    classes &= classes - 1;
                    again.hold(cell, self.ranks.places[cell], true);
                    count += self.check_list(slot, cell)?;
                }
            }
            let same = (again.filled, again.words, again.bins);
            if same != (level.filled, level.words, level.bins) {
                return Err(format!("priority {} is not in the bitmaps", level.priority));
            }
        }
        let on_lists = self.items.iter().filter(|item| item.link.next != NIL);
        match on_lists.count() {
            all if all == count => Ok(count),
            all => Err(format!("{all} are on lists, {count} were found there")),
        }
    }

    fn check_list(&self, slot: usize, cell: usize) -> Result<usize, String> {
        let head = head_of(slot, cell);
        let (mut at, mut prev, mut count) = (self.link(head).next, head, 0);
        while at != head {
            if self.link(at).prev != prev {
                return Err(format!("{at} is unlinked in cell {cell}"));
            }
            count += 1;
            (prev, at) = (at, self.link(at).next);
        }
        if count == 0 || prev != self.link(head).prev {
            return Err(format!("the tail of cell {cell} is lost"));
        }
        Ok(count)
    }
}

/// The name of the head of a list.
fn head_of(slot: usize, cell: usize) -> u32 {
    HEADS + crate::tree::narrow(slot * CELLS + cell)
}

/// Slot and cell of a head.
const fn place_of(head: u32) -> (usize, usize) {
    let at = (head - HEADS) as usize;
    (at / CELLS, at % CELLS)
}

#[cfg(test)]
mod tests {
    use super::super::class::Group;
    use super::super::worth::Worth;
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn shelf() -> Shelf {
        Shelf::new(Worth::new().first_ranks())
    }

    fn put(shelf: &mut Shelf, at: u32, priority: i32, group: Group, origin: u64) {
        shelf.mark(at, Mark::new(group, 1, origin));
        shelf.insert(at, priority, u64::from(at));
        shelf.check().unwrap();
    }

    fn drain(shelf: &mut Shelf) -> Vec<u32> {
        let next = |shelf: &mut Shelf| {
            let at = shelf.first()?;
            shelf.remove(at);
            shelf.check().unwrap();
            Some(at)
        };
        std::iter::from_fn(|| next(shelf)).collect()
    }

    #[test]
    fn what_is_worth_least_goes_first_and_importance_before_worth() {
        let mut shelf = shelf();
        shelf.set_now(100 * SECOND);
        put(&mut shelf, 1, 0, Group::Plain, 99 * SECOND);
        put(&mut shelf, 2, 0, Group::Plain, 10 * SECOND);
        put(&mut shelf, 3, 0, Group::Final, 100 * SECOND);
        put(&mut shelf, 4, 7, Group::Final, 0);
        put(&mut shelf, 5, -7, Group::Plain, 100 * SECOND);
        let firsts: Vec<_> = shelf.firsts().map(|(level, _, at)| (level, at)).collect();
        assert_eq!(firsts, [(-7, 5), (0, 3), (7, 4)]);
        assert_eq!(drain(&mut shelf), [5, 3, 2, 1, 4]);
    }

    #[test]
    fn time_moves_things_through_every_bin_and_no_further() {
        let mut shelf = shelf();
        put(&mut shelf, 1, 0, Group::Plain, 0);
        put(&mut shelf, 2, 0, Group::Due, 64 * SECOND);
        put(&mut shelf, 3, 0, Group::Plain, 0);
        put(&mut shelf, 4, 0, Group::Due, 30_000 * SECOND);
        let cell = |shelf: &Shelf, at: u32| {
            let mut at = shelf.link(at).next;
            while at < HEADS {
                at = shelf.link(at).next;
            }
            place_of(at).1
        };
        for now in 0..1000 {
            let now = now * SECOND / 4;
            shelf.set_now(now);
            assert!(shelf.first().is_some());
            shelf.check().unwrap();
            for at in 1..5 {
                let (is, should) = (cell(&shelf, at), shelf.mark_of(at).cell(now));
                assert!((0..=1).contains(&(should - is)), "{at}: {is} at {now}");
            }
        }
        // Long nothing, then all at once.
        for now in [20_000 * SECOND, 60_000 * SECOND] {
            shelf.set_now(now);
            assert!(shelf.first().is_some());
            shelf.check().unwrap();
            for at in 1..5 {
                assert_eq!(cell(&shelf, at), shelf.mark_of(at).cell(now), "{at}");
            }
        }
    }

    /// Also where no time passes, and for what says that it comes back later.
    #[test]
    fn where_recency_rules_the_last_use_alone_decides() {
        let mut shelf = shelf();
        shelf.reorder(&Worth::by_age());
        shelf.set_now(SECOND);
        let groups = [Group::Shared, Group::Due, Group::Plain, Group::Final];
        for (at, group) in (0..).zip(groups.into_iter().cycle().take(40)) {
            let origin = if group == Group::Due {
                9 * SECOND
            } else {
                SECOND
            };
            put(&mut shelf, at, 0, group, origin);
        }
        assert!(drain(&mut shelf).into_iter().eq(0..40));
    }

    #[test]
    fn priorities_beyond_the_limit_share_cells() {
        let mut shelf = shelf();
        for at in 0..40 {
            let priority = i32::try_from(at).unwrap() - 20;
            put(&mut shelf, at, priority, Group::Plain, 0);
        }
        assert_eq!(shelf.ranked.len(), LEVELS_MAX);
        assert_eq!(drain(&mut shelf).len(), 40);
        assert_eq!(shelf.ranked.len(), 1);
    }
}
