//! What the policy in force would have found at other capacities, over the watched pages.
//!
//! The order in which pages go does not depend on how many fit, so what a smaller cache holds a
//! larger one holds as well: one number a page, the least capacity that holds it, stands for all
//! capacities at once. When a page is used all of them hold it; each that is over its size lets go
//! what comes first in the order, which then is held by the next larger one at best. The order is
//! that of the cache itself: importance, then worth by class and age.
//!
//! What the watched pages do not tell is the same at all capacities, most of all the few pages
//! that every request uses: so only differences to the real capacity are estimated, and added to
//! what the cache has really found.

use super::class::{CELLS, Mark};
use super::ranks::Ranks;
use super::rivals::{EIGHTHS, REAL};
use super::shelf::{Detail, Shelf};
use crate::node::NIL;
use crate::tree::narrow;
use rootstock_memory::Nanos;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const SIZES: usize = EIGHTHS.len();

/// Held by no capacity.
const OUTSIDE: u8 = 7;

const _: () = assert!(OUTSIDE as usize == SIZES);

/// Priorities below 0, 0, and above.
const IMPORTANCES: u8 = 3;

/// A level for each capacity and importance.
const LEVELS: u8 = OUTSIDE * IMPORTANCES;

/// Expected hits over capacity, as counters since the cache was made.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct HitCurve {
    /// Tokens asked for.
    pub lookup_tokens: u64,
    /// Of these, what the cache has found.
    pub hit_tokens: u64,
    /// By ascending capacity of all tiers together.
    pub points: Vec<CurvePoint>,
}

/// What one capacity would have found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Capacity in pages.
    pub pages: u64,
    /// Tokens that the policy in force would have found.
    pub hit_tokens: u64,
    /// Tokens that least recently used would have found.
    pub lru_hit_tokens: u64,
}

/// Who goes first of each level, and the order of these: by importance, then by worth.
struct Firsts {
    keys: [u32; LEVELS as usize],
    all: [u32; LEVELS as usize],
}

/// The key of a level that holds nothing.
const EMPTY: u32 = u32::MAX;

impl Firsts {
    fn new(shelf: &mut Shelf) -> Self {
        let mut firsts = Self {
            keys: [EMPTY; LEVELS as usize],
            all: [NIL; LEVELS as usize],
        };
        for (level, place, at) in shelf.firsts() {
            let level = u8::try_from(level).expect("levels are few");
            firsts.set(level, Some((place, at)));
        }
        firsts
    }

    /// A level has changed.
    fn look(&mut self, shelf: &Shelf, level: u8) {
        self.set(level, shelf.first_of(level.into()));
    }

    fn set(&mut self, level: u8, first: Option<(usize, u32)>) {
        let importance = usize::from(level % IMPORTANCES);
        let key = |place| narrow((importance * CELLS + place) * usize::from(LEVELS));
        let (key, at) = first.map_or((EMPTY, NIL), |(place, at)| {
            (key(place) + u32::from(level), at)
        });
        (self.keys[usize::from(level)], self.all[usize::from(level)]) = (key, at);
    }

    /// Who goes first of what a capacity holds, and its level.
    fn of_capacity(&self, size: u8) -> Option<(u8, u32)> {
        let held = &self.keys[..usize::from((size + 1) * IMPORTANCES)];
        let first = held.iter().fold(EMPTY, |first, &key| first.min(key));
        let level = u8::try_from(first % u32::from(LEVELS)).expect("levels are few");
        (first != EMPTY).then(|| (level, self.all[usize::from(level)]))
    }
}

/// All capacities.
#[derive(Debug)]
pub(crate) struct Curve {
    /// What nobody uses, with a priority for each capacity and importance.
    shelf: Shelf,
    /// By watched page: the least capacity that holds it.
    least: Vec<u8>,
    /// By capacity: watched pages that it holds, and can hold.
    held: [u32; SIZES],
    rooms: [u32; SIZES],
    /// By least capacity: uses of known pages.
    hits: [u64; SIZES + 1],
}

impl Curve {
    /// A cache of which `pages` are watched.
    pub(crate) fn new(pages: u32, ranks: Arc<Ranks>) -> Self {
        let room = |eighths: u32| (pages.saturating_mul(eighths) / 8).max(1);
        let detail = Detail {
            levels_max: LEVELS.into(),
            looks: 1,
        };
        Self {
            shelf: Shelf::with_detail(ranks, detail),
            least: Vec::new(),
            held: [0; SIZES],
            rooms: EIGHTHS.map(room),
            hits: [0; SIZES + 1],
        }
    }

    pub(crate) fn set_now(&mut self, now: Nanos) {
        self.shelf.set_now(now);
    }

    pub(crate) fn reorder(&mut self, ranks: &Arc<Ranks>) {
        self.shelf.reorder(ranks);
    }

    /// Whether no capacity holds the page.
    pub(crate) fn is_outside(&self, at: u32) -> bool {
        self.least_of(at) == OUTSIDE
    }

    /// A known page was used; whether the real capacity would have held it.
    pub(crate) fn score(&mut self, at: u32) -> bool {
        let least = usize::from(self.least_of(at));
        self.hits[least] += 1;
        least <= REAL
    }

    /// A request uses the page: all hold it. `gone` hears of pages that none holds any more.
    pub(crate) fn hold(&mut self, at: u32, gone: impl FnMut(u32)) {
        if self.least.len() <= at as usize {
            self.least.resize(at as usize + 1, OUTSIDE);
        }
        if self.shelf.holds(at) {
            self.shelf.remove(at);
        }
        let least = self.least_of(at);
        for held in &mut self.held[..usize::from(least)] {
            *held += 1;
        }
        self.least[at as usize] = 0;
        self.shrink(gone);
    }

    /// Nobody uses the page any more.
    pub(crate) fn settle(&mut self, at: u32, mark: Mark, importance: i32) {
        self.shelf.mark(at, mark);
        self.shelf.insert(at, level(0, importance), 0);
    }

    /// What nobody uses has got another mark.
    pub(crate) fn remark(&mut self, at: u32, mark: Mark, importance: i32) {
        let least = self.least_of(at);
        if self.shelf.holds(at) {
            self.shelf.remove(at);
            self.shelf.mark(at, mark);
            self.shelf.insert(at, level(least, importance), 0);
        }
    }

    /// The page is not known any more.
    pub(crate) fn forget(&mut self, at: u32) {
        let least = self.least_of(at);
        if self.shelf.holds(at) {
            self.shelf.remove(at);
        }
        for held in &mut self.held[usize::from(least)..] {
            *held -= 1;
        }
        if let Some(least) = self.least.get_mut(at as usize) {
            *least = OUTSIDE;
        }
    }

    /// Uses of known pages that each capacity would have found.
    pub(crate) fn hits(&self) -> [u64; SIZES] {
        let mut sum = 0;
        std::array::from_fn(|size| {
            sum += self.hits[size];
            sum
        })
    }

    fn least_of(&self, at: u32) -> u8 {
        self.least.get(at as usize).copied().unwrap_or(OUTSIDE)
    }

    /// Lets go what is too much, the smallest capacity first.
    fn shrink(&mut self, mut gone: impl FnMut(u32)) {
        let mut sizes = self.held.iter().zip(self.rooms);
        if sizes.all(|(&held, room)| held <= room) {
            return;
        }
        let mut firsts = Firsts::new(&mut self.shelf);
        for size in 0..OUTSIDE {
            let (at_size, next) = (usize::from(size), size + 1);
            while self.held[at_size] > self.rooms[at_size] {
                let Some((level, at)) = firsts.of_capacity(size) else {
                    break;
                };
                let (least, importance) = (level / IMPORTANCES, level % IMPORTANCES);
                self.shelf.remove(at);
                for held in &mut self.held[usize::from(least)..=at_size] {
                    *held -= 1;
                }
                self.least[at as usize] = next;
                firsts.look(&self.shelf, level);
                if next == OUTSIDE {
                    gone(at);
                } else {
                    let below = next * IMPORTANCES + importance;
                    self.shelf.insert(at, below.into(), 0);
                    firsts.look(&self.shelf, below);
                }
            }
        }
    }

    /// What contradicts itself, given whether a page is known and whether nobody uses it.
    pub(crate) fn fault(&self, is_idle: impl Fn(u32) -> bool) -> Option<String> {
        let listed = match self.shelf.check() {
            Ok(listed) => listed,
            Err(fault) => return Some(fault),
        };
        let mut held = [0; SIZES];
        let mut expected = 0;
        for (at, &least) in (0..).zip(&self.least) {
            let inside = usize::from(least) < SIZES;
            held[usize::from(least)..]
                .iter_mut()
                .for_each(|held| *held += 1);
            let lists = inside && is_idle(at);
            if lists != self.shelf.holds(at) {
                return Some(format!("watched page {at} is listed: {lists}"));
            }
            expected += usize::from(lists);
        }
        (held != self.held || listed != expected)
            .then(|| format!("capacities hold {held:?}, counted {:?}", self.held))
    }
}

/// The priority of what `least` is the least capacity to hold.
fn level(least: u8, importance: i32) -> i32 {
    i32::from(least * IMPORTANCES) + importance.signum() + 1
}

/// Tokens found, from what was found in fact and what the watched pages say of the difference.
pub(crate) fn estimate(real: u64, here: u64, there: u64, tokens: u64, most: u64) -> u64 {
    let (more, less) = (there.saturating_sub(here), here.saturating_sub(there));
    let raised = real.saturating_add(more.saturating_mul(tokens));
    raised.saturating_sub(less.saturating_mul(tokens)).min(most)
}

/// The hits of the real capacity among those of all.
pub(crate) const fn at_real(hits: &[u64; SIZES]) -> u64 {
    hits[REAL]
}
