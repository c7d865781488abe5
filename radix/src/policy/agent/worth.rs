//! What a cell is worth: learned from how much was in it and how much of that was used there.
//!
//! `used / entered` is the hazard of use of one bin. From it follows, for each cell, the highest
//! rate of uses per second of memory that keeping a page can bring, over all times one may keep
//! it: Gittins' index of the page. Cells go in the order of that rate, the lowest first. Before
//! anything is learned a hazard that is the same for each bin stands in, which makes the order
//! that of recency. A class of which little is known is taken to be like its group. Counts fade,
//! so that the order follows the load.
//!
//! Pages are counted when their stay in a class ends; what is still there is told when the order
//! is asked for. Classes that nothing was ever in keep the order that they began with.

use super::ages::{self, BINS, ORIGIN};
use super::class::{CELLS, CLASSES, Stay, USES, is_due, is_given_up};
use super::ranks::Ranks;
use std::sync::Arc;

/// Pages' worth of doubt about a group.
const DOUBT: f64 = 8.0;

/// Pages' worth of doubt that a class differs from its group.
const DOUBT_CLASS: f64 = 64.0;

/// What is left of a count when it fades.
const FADE: f32 = 15.0 / 16.0;

/// Hazard of a bin of which nothing is known.
const PRIOR: f64 = 1.0 / 16.0;

/// Hazard of the bins around the moment that a program has named, before it is known to lie.
const PRIOR_DUE: f64 = 0.5;

/// As many as bins.
const AGES: u16 = 64;

const _: () = assert!(AGES as usize == BINS);

/// Orders cells: the rate, which is not negative, so that its bits order like it does; of equal
/// ones the older first.
type Key = (u64, u16, u16);

/// What was counted in one class, by bin.
#[derive(Clone, Copy, Debug)]
struct Counts {
    begun: [f32; BINS],
    ended: [f32; BINS],
    used: [f32; BINS],
}

const NOTHING: Counts = Counts {
    begun: [0.0; BINS],
    ended: [0.0; BINS],
    used: [0.0; BINS],
};

impl Counts {
    /// Adds up what entered and what was used, by bin.
    fn add_to(&self, sum: &mut [(f64, f64); BINS]) {
        let mut inside = 0.0;
        for (bin, (entered, used)) in sum.iter_mut().enumerate() {
            inside += f64::from(self.begun[bin]);
            *entered += inside.max(f64::from(self.used[bin]));
            *used += f64::from(self.used[bin]);
            inside -= f64::from(self.ended[bin]);
        }
    }
}

/// The counts of all classes, and the order that follows.
#[derive(Debug)]
pub(crate) struct Worth {
    counts: Vec<Counts>,
    /// Whether anything was ever in the class.
    met: u128,
    /// Cells of the classes that are not met, in order.
    unmet: Vec<Key>,
}

impl Worth {
    pub(crate) fn new() -> Self {
        let mut worth = Self {
            counts: vec![NOTHING; CLASSES],
            met: 0,
            unmet: Vec::new(),
        };
        worth.unmet = worth.keys(|_| true);
        worth
    }

    /// The order before anything is learned.
    pub(crate) fn first_ranks(&self) -> Arc<Ranks> {
        Ranks::new(self.unmet.iter().map(|key| key.2).collect())
    }

    /// A page's stay in a class is over, by a use or otherwise.
    pub(crate) fn leave(&mut self, stay: Stay, by_use: bool) {
        let counts = &mut self.counts[stay.last / BINS];
        counts.begun[stay.first % BINS] += 1.0;
        counts.ended[stay.last % BINS] += 1.0;
        if by_use {
            counts.used[stay.last % BINS] += 1.0;
        }
    }

    /// Lets what was counted fade by a sixteenth.
    pub(crate) fn fade(&mut self) {
        for counts in &mut self.counts {
            let bins = counts.begun.iter_mut().chain(&mut counts.ended);
            for count in bins.chain(&mut counts.used) {
                *count *= FADE;
            }
        }
    }

    /// All cells, the one worth least first; `stays` are those that last.
    pub(crate) fn ranks(&mut self, stays: impl Iterator<Item = Stay>) -> Arc<Ranks> {
        let before = self.counts.clone();
        stays.for_each(|stay| self.leave(stay, false));
        let met = (0..CLASSES).fold(0, |met, class| {
            let begun = self.counts[class].begun.iter().any(|&count| count > 0.0);
            met | u128::from(begun) << class
        });
        if met & !self.met != 0 {
            self.met |= met;
            let met = self.met;
            self.unmet
                .retain(|&(_, _, cell)| met >> (usize::from(cell) / BINS) & 1 == 0);
        }
        let known = self.keys(|class| self.met >> class & 1 == 1);
        self.counts = before;
        let (mut known, mut unmet) = (known.into_iter().peekable(), self.unmet.iter().peekable());
        let order = std::iter::from_fn(|| match (known.peek(), unmet.peek()) {
            (Some(one), Some(other)) if one <= *other => known.next(),
            (_, Some(_)) => unmet.next().copied(),
            (_, None) => known.next(),
        });
        Ranks::new(order.map(|(_, _, cell)| cell).collect())
    }

    /// The order of recency, as far as bins tell it; what comes in from then on is not told apart
    /// by class, so that among it the order is exactly that.
    pub(crate) fn by_age() -> Arc<Ranks> {
        let mut order: Vec<u16> = (0..).take(CELLS).collect();
        order.sort_by_key(|&cell| (BINS - usize::from(cell) % BINS, cell));
        Ranks::of_recency(order)
    }

    /// The cells of some classes, in order.
    fn keys(&self, wanted: impl Fn(usize) -> bool) -> Vec<Key> {
        let mut keys = Vec::new();
        for group in 0..CLASSES / USES {
            let classes = group * USES..(group + 1) * USES;
            let group_hazards = self.group_hazards(classes.clone());
            for class in classes.filter(|&class| wanted(class)) {
                let first = if is_due(class) { 0 } else { ORIGIN };
                let rates = rates(&self.hazards(class, &group_hazards), first);
                let cells = (class * BINS..(class + 1) * BINS).zip((0..AGES).rev());
                keys.extend(cells.zip(rates).map(|((cell, older), rate)| {
                    let cell = u16::try_from(cell).expect("cells fit 16 bits");
                    (rate.to_bits(), older, cell)
                }));
            }
        }
        keys.sort_unstable();
        keys
    }

    /// The hazards of all classes of a group together.
    fn group_hazards(&self, classes: std::ops::Range<usize>) -> [f64; BINS] {
        let first = classes.start;
        let mut sums = [(0.0, 0.0); BINS];
        for counts in &self.counts[classes] {
            counts.add_to(&mut sums);
        }
        std::array::from_fn(|bin| {
            let prior = match bin {
                _ if is_given_up(first) => 0.0,
                _ if !is_due(first) => PRIOR,
                0..31 => 0.0,
                31..=33 => PRIOR_DUE,
                _ => PRIOR,
            };
            hazard(sums[bin], prior, DOUBT)
        })
    }

    /// The hazards of a class.
    fn hazards(&self, class: usize, of_group: &[f64; BINS]) -> [f64; BINS] {
        let mut sums = [(0.0, 0.0); BINS];
        self.counts[class].add_to(&mut sums);
        std::array::from_fn(|bin| hazard(sums[bin], of_group[bin], DOUBT_CLASS))
    }
}

fn hazard((entered, used): (f64, f64), prior: f64, doubt: f64) -> f64 {
    ((used + doubt * prior) / (entered + doubt)).min(1.0)
}

/// The rate of each bin; before the first there is nobody.
fn rates(hazards: &[f64; BINS], first: usize) -> [f64; BINS] {
    let seconds: [f64; BINS] = std::array::from_fn(|bin| ages::width(bin) as f64 / 1e9);
    let mut rates = [0.0; BINS];
    for (bin, rate) in rates.iter_mut().enumerate().skip(first) {
        let (mut left, mut uses, mut time) = (1.0, 0.0, 0.0);
        for (hazard, seconds) in hazards[bin..].iter().zip(&seconds[bin..]) {
            uses += left * hazard;
            time += left * (1.0 - hazard / 2.0) * seconds;
            left *= 1.0 - hazard;
            *rate = f64::max(*rate, uses / time);
        }
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::super::class::{Group, Mark};
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn stay(mark: Mark, since_s: u64, now_s: u64) -> Stay {
        let first = u16::try_from(mark.cell(since_s * SECOND)).unwrap();
        mark.stay(first, now_s * SECOND)
    }

    fn order(worth: &mut Worth) -> Vec<usize> {
        let ranks = worth.ranks(std::iter::empty());
        let order: Vec<usize> = ranks.order().iter().map(|&cell| cell.into()).collect();
        let mut all = order.clone();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..CELLS), "each cell once");
        order
    }

    fn place(order: &[usize], group: Group, uses: u32, now: u64) -> usize {
        let cell = Mark::new(group, uses, 100 * SECOND).cell(now * SECOND);
        order.iter().position(|&one| one == cell).unwrap()
    }

    #[test]
    fn before_anything_is_learned_the_order_is_that_of_recency() {
        let order = order(&mut Worth::new());
        let mut ages = [101, 103, 110, 150, 300, 9000].map(|now| {
            let [a, b] = [1, 100].map(|uses| place(&order, Group::Plain, uses, now));
            assert!(a.abs_diff(b) < CLASSES, "uses alone say nothing yet");
            a
        });
        ages.reverse();
        assert!(ages.is_sorted(), "{ages:?}");
        let given_up = place(&order, Group::Final, 1, 101);
        assert!(given_up < ages[0], "what is given up goes first");
    }

    #[test]
    fn what_is_used_often_at_an_age_is_kept_up_to_it() {
        let mut worth = Worth::new();
        let mark = Mark::new(Group::Plain, 1, 100 * SECOND);
        for _ in 0..1000 {
            worth.leave(stay(mark, 100, 116), true);
        }
        let order = order(&mut worth);
        let [young, due, late] = [102, 116, 160].map(|now| place(&order, Group::Plain, 1, now));
        assert!(due > young, "the nearer the use, the dearer");
        assert!(late < young, "after it nothing is expected");
    }

    #[test]
    fn a_class_of_which_little_is_known_is_like_its_group() {
        let mut worth = Worth::new();
        let mark = Mark::new(Group::Plain, 1, 100 * SECOND);
        for _ in 0..1000 {
            worth.leave(stay(mark, 100, 116), true);
        }
        let rare = Mark::new(Group::Plain, 200, 100 * SECOND);
        worth.leave(stay(rare, 100, 101), false);
        let order = order(&mut worth);
        let [young, due] = [102, 116].map(|now| place(&order, Group::Plain, 200, now));
        assert!(due > young, "as with those that were used once");
    }

    #[test]
    fn what_still_waits_counts_as_unused_so_far() {
        let mut worth = Worth::new();
        let mark = Mark::new(Group::Plain, 1, 100 * SECOND);
        let wait = || std::iter::repeat_n(stay(mark, 100, 116), 1000);
        let before = worth.ranks(std::iter::empty());
        let after = worth.ranks(wait());
        let place = |ranks: &Ranks| {
            place(
                &ranks
                    .order()
                    .iter()
                    .map(|&cell| cell.into())
                    .collect::<Vec<_>>(),
                Group::Plain,
                1,
                110,
            )
        };
        assert!(place(&after) < place(&before));
        assert_eq!(worth.counts[0].ended, [0.0; BINS], "they were not counted");
    }

    #[test]
    fn a_named_moment_that_never_comes_true_is_worth_less_than_one_that_does() {
        let mut worth = Worth::new();
        let before = place(&order(&mut worth), Group::Due, 1, 100);
        let mark = Mark::new(Group::Due, 1, 100 * SECOND);
        for _ in 0..1000 {
            worth.leave(stay(mark, 0, 20_000), false);
        }
        assert!(place(&order(&mut worth), Group::Due, 1, 100) < before);
    }

    #[test]
    fn counts_fade() {
        let mut worth = Worth::new();
        worth.leave(
            Stay {
                first: 40,
                last: 41,
            },
            true,
        );
        for _ in 0..100 {
            worth.fade();
        }
        assert!(worth.counts[0].used[41] < 0.1);
    }
}
