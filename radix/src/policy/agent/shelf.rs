//! What can go, in cells: one list for each class and bin of time. Whoever heads the list of the
//! cell that is worth least goes first, found in a bitmap of the cells in order of worth.
//!
//! Things change their cell only as time passes, at most once a bin, and the lists are looked
//! through from their heads alone: nothing is scanned, nothing is drawn at random. A list is as
//! old as its head to within the bin, so a move may come late by a part of the bin's width and
//! never early.
//!
//! Importance goes before worth: each priority in use has its own cells.

use super::ages::{self, BINS};
use super::class::{CELLS, CLASSES, Mark};
use crate::node::NIL;
use rootstock_memory::Nanos;

/// Priorities with cells of their own; of more, one counts as the next lower that has them.
const LEVELS_MAX: usize = 8;

/// How often the heads of a bin are looked at while it lasts.
const LOOKS: Nanos = 8;

/// Place of one thing in the list of its cell.
#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
    level: i32,
    /// `u16::MAX` where it is on no list.
    cell: u16,
    /// Order of equal origins.
    stamp: u64,
}

const OUT: Link = Link {
    prev: NIL,
    next: NIL,
    level: 0,
    cell: u16::MAX,
    stamp: 0,
};

/// The cells of one priority.
#[derive(Debug)]
struct Level {
    priority: i32,
    /// Head and tail, by cell.
    ends: Box<[(u32, u32)]>,
    /// By place in the order of worth: whether the cell there holds anything.
    filled: Box<[u64]>,
    /// By bin: the classes that have anything there.
    held: [u128; BINS],
    len: u32,
}

const _: () = assert!(CLASSES <= 128, "a bit for each class");

impl Level {
    fn new(priority: i32) -> Self {
        Self {
            priority,
            ends: vec![(NIL, NIL); CELLS].into(),
            filled: vec![0; CELLS / 64].into(),
            held: [0; BINS],
            len: 0,
        }
    }

    fn mark(&mut self, place: u16, filled: bool) {
        let (word, bit) = (usize::from(place) / 64, place % 64);
        self.filled[word] = self.filled[word] & !(1 << bit) | u64::from(filled) << bit;
    }

    /// The list of `cell`, which is at `place`, has got its first or lost its last.
    fn hold(&mut self, cell: usize, place: u16, holds: bool) {
        self.mark(place, holds);
        let class = 1 << (cell / BINS);
        let held = &mut self.held[cell % BINS];
        *held = if holds { *held | class } else { *held & !class };
    }

    /// The first place that is filled.
    fn first(&self) -> Option<usize> {
        let word = self.filled.iter().position(|&bits| bits != 0)?;
        Some(word * 64 + self.filled[word].trailing_zeros() as usize)
    }
}

/// The cells of all priorities; things are named by numbers that are dense.
#[derive(Debug)]
pub(crate) struct Shelf {
    now: Nanos,
    /// When the heads of each bin are looked at next.
    looks: [Nanos; BINS],
    next_look: Nanos,
    marks: Vec<Mark>,
    links: Vec<Link>,
    /// Ascending; that of priority 0 is always there.
    levels: Vec<Level>,
    /// Cells by worth, and the place of each.
    order: Box<[u16]>,
    places: Box<[u16]>,
}

impl Shelf {
    /// Empty cells in this order.
    pub(crate) fn new(order: &[u16]) -> Self {
        let mut shelf = Self {
            now: 0,
            looks: [0; BINS],
            next_look: 0,
            marks: Vec::new(),
            links: Vec::new(),
            levels: vec![Level::new(0)],
            order: vec![0; CELLS].into(),
            places: vec![0; CELLS].into(),
        };
        shelf.reorder(order);
        shelf
    }

    /// Sets what `at` is worth by; it is on no list.
    pub(crate) fn mark(&mut self, at: u32, mark: Mark) {
        assert!(!self.holds(at), "a mark changes off the lists");
        let at = at as usize;
        if self.marks.len() <= at {
            self.marks.resize(at + 1, Mark::default());
        }
        self.marks[at] = mark;
    }

    pub(crate) fn mark_of(&self, at: u32) -> Mark {
        self.marks.get(at as usize).copied().unwrap_or_default()
    }

    pub(crate) fn holds(&self, at: u32) -> bool {
        self.links
            .get(at as usize)
            .is_some_and(|link| link.cell != u16::MAX)
    }

    /// Puts `at` into the cell of its mark and this moment; returns the cell.
    pub(crate) fn insert(&mut self, at: u32, priority: i32, stamp: u64) -> usize {
        if self.links.len() <= at as usize {
            self.links.resize(at as usize + 1, OUT);
        }
        assert!(!self.holds(at), "{at} is on a list already");
        let mark = self.mark_of(at);
        let cell = mark.cell(self.now);
        let level = self.level_for(priority);
        self.links[at as usize] = Link {
            level: self.levels[level].priority,
            stamp,
            ..OUT
        };
        self.levels[level].len += 1;
        let (head, _) = self.levels[level].ends[cell];
        // A parent is as old as the child that went before it: it comes next.
        let older = |other: u32| {
            let key = |at: u32| (self.mark_of(at).origin, self.links[at as usize].stamp);
            key(at) <= key(other)
        };
        let in_front = head != NIL && older(head);
        self.link(at, level, cell, in_front);
        cell
    }

    /// Takes `at` off its list; returns the cell.
    pub(crate) fn remove(&mut self, at: u32) -> usize {
        assert!(self.holds(at), "{at} is on a list");
        let level = self.level_of(self.links[at as usize].level);
        let cell = self.unlink(at, level);
        self.levels[level].len -= 1;
        if self.levels[level].len == 0 && self.levels[level].priority != 0 {
            self.levels.remove(level);
        }
        cell
    }

    /// Who goes first.
    pub(crate) fn first(&self) -> Option<u32> {
        self.levels.iter().find_map(|level| {
            let cell = self.order[level.first()?];
            Some(level.ends[usize::from(cell)].0)
        })
    }

    /// Moves what has come into another bin; `moved` hears of each cell entered. Time never goes
    /// back.
    pub(crate) fn advance(&mut self, now: Nanos, mut moved: impl FnMut(usize)) {
        self.now = self.now.max(now);
        if self.now < self.next_look {
            return;
        }
        for bin in 0..BINS - 1 {
            if self.looks[bin] > self.now {
                continue;
            }
            self.looks[bin] = self.now.saturating_add(ages::width(bin) / LOOKS);
            for level in 0..self.levels.len() {
                let mut classes = self.levels[level].held[bin];
                while classes != 0 {
                    let class = classes.trailing_zeros() as usize;
                    classes &= classes - 1;
                    self.advance_list(level, class * BINS + bin, &mut moved);
                }
            }
        }
        self.next_look = self.looks[..BINS - 1].iter().copied().min().unwrap_or(0);
    }

    fn advance_list(&mut self, level: usize, cell: usize, moved: &mut impl FnMut(usize)) {
        loop {
            let (head, _) = self.levels[level].ends[cell];
            if head == NIL || ages::end(cell % BINS, self.mark_of(head).origin) > self.now {
                return;
            }
            self.unlink(head, level);
            let new = self.mark_of(head).cell(self.now);
            (cell + 1..=new).for_each(&mut *moved);
            self.link(head, level, new, false);
        }
    }

    /// Another order of the cells; what is in them stays.
    pub(crate) fn reorder(&mut self, order: &[u16]) {
        self.order.copy_from_slice(order);
        for (place, &cell) in (0..).zip(order) {
            self.places[usize::from(cell)] = place;
        }
        for level in &mut self.levels {
            for (cell, place) in self.places.iter().enumerate() {
                level.mark(*place, level.ends[cell].0 != NIL);
            }
        }
    }

    fn level_of(&self, priority: i32) -> usize {
        let found = self
            .levels
            .binary_search_by_key(&priority, |level| level.priority);
        found.expect("a level lasts as long as what is on it")
    }

    /// The level of a priority, made where there may be another.
    fn level_for(&mut self, priority: i32) -> usize {
        match self
            .levels
            .binary_search_by_key(&priority, |level| level.priority)
        {
            Ok(at) => at,
            Err(at) if self.levels.len() < LEVELS_MAX => {
                self.levels.insert(at, Level::new(priority));
                at
            }
            Err(at) => at.saturating_sub(1),
        }
    }

    fn link(&mut self, at: u32, level: usize, cell: usize, in_front: bool) {
        let level = &mut self.levels[level];
        let (head, tail) = level.ends[cell];
        let (prev, next) = if in_front { (NIL, head) } else { (tail, NIL) };
        let link = &mut self.links[at as usize];
        (link.prev, link.next) = (prev, next);
        link.cell = u16::try_from(cell).expect("cells fit 16 bits");
        if prev != NIL {
            self.links[prev as usize].next = at;
        }
        if next != NIL {
            self.links[next as usize].prev = at;
        }
        level.ends[cell] = match (head, in_front) {
            (NIL, _) => (at, at),
            (_, true) => (at, tail),
            (_, false) => (head, at),
        };
        if head == NIL {
            level.hold(cell, self.places[cell], true);
        }
    }

    fn unlink(&mut self, at: u32, level: usize) -> usize {
        let level = &mut self.levels[level];
        let Link {
            prev, next, cell, ..
        } = self.links[at as usize];
        self.links[at as usize].cell = u16::MAX;
        let cell = usize::from(cell);
        let (mut head, mut tail) = level.ends[cell];
        if prev == NIL {
            head = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next == NIL {
            tail = prev;
        } else {
            self.links[next as usize].prev = prev;
        }
        level.ends[cell] = (head, tail);
        if head == NIL {
            level.hold(cell, self.places[cell], false);
        }
        cell
    }

    /// Recounts the lists; returns how much is on them, or what contradicts itself.
    pub(crate) fn check(&self) -> Result<usize, String> {
        let mut count = 0;
        for level in &self.levels {
            let before = count;
            for (cell, &(head, tail)) in level.ends.iter().enumerate() {
                let place = usize::from(self.places[cell]);
                let filled = level.filled[place / 64] >> (place % 64) & 1 == 1;
                let held = level.held[cell % BINS] >> (cell / BINS) & 1 == 1;
                if filled != (head != NIL) || held != filled {
                    return Err(format!("cell {cell} is not in the bitmap as it is"));
                }
                let (mut at, mut prev) = (head, NIL);
                while at != NIL {
                    let link = self.links[at as usize];
                    let here = (link.prev, usize::from(link.cell), link.level);
                    if here != (prev, cell, level.priority) {
                        return Err(format!("{at} is unlinked in cell {cell}"));
                    }
                    count += 1;
                    (prev, at) = (at, link.next);
                }
                if prev != tail {
                    return Err(format!("the tail of cell {cell} is lost"));
                }
            }
            if count - before != level.len as usize {
                return Err(format!("priority {} counts {}", level.priority, level.len));
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::super::class::Group;
    use super::super::worth::Worth;
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn shelf() -> Shelf {
        Shelf::new(&Worth::new().order())
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
        shelf.advance(100 * SECOND, |_| ());
        put(&mut shelf, 1, 0, Group::Plain, 99 * SECOND);
        put(&mut shelf, 2, 0, Group::Plain, 10 * SECOND);
        put(&mut shelf, 3, 0, Group::Final, 100 * SECOND);
        put(&mut shelf, 4, 7, Group::Final, 0);
        put(&mut shelf, 5, -7, Group::Plain, 100 * SECOND);
        assert_eq!(drain(&mut shelf), [5, 3, 2, 1, 4]);
    }

    #[test]
    fn time_moves_things_through_every_bin_and_no_further() {
        let mut shelf = shelf();
        put(&mut shelf, 1, 0, Group::Plain, 0);
        put(&mut shelf, 2, 0, Group::Due, 64 * SECOND);
        let mut entered = Vec::new();
        for now in 0..1000 {
            shelf.advance(now * SECOND / 4, |cell| entered.push(cell % BINS));
            shelf.check().unwrap();
        }
        let now = 249 * SECOND + SECOND * 3 / 4;
        for at in [1, 2] {
            let (is, should) = (shelf.remove(at), shelf.mark_of(at).cell(now));
            assert!(should - is <= 1, "bin {} for {}", is % BINS, should % BINS);
        }
        assert!(entered.len() < 2 * BINS, "a bounded number of moves");
        for pair in entered.windows(2) {
            assert!(pair[1] <= pair[0] + 40);
        }
    }

    #[test]
    fn priorities_beyond_the_limit_share_cells() {
        let mut shelf = shelf();
        for at in 0..40 {
            let priority = i32::try_from(at).unwrap() - 20;
            put(&mut shelf, at, priority, Group::Plain, 0);
        }
        assert_eq!(shelf.levels.len(), LEVELS_MAX);
        assert_eq!(drain(&mut shelf).len(), 40);
        assert_eq!(shelf.levels.len(), 1);
    }
}
