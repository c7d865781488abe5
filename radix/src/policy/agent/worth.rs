//! What a cell is worth: learned from how much entered it and how much of that was used there.
//!
//! `used / entered` is the hazard of use of one bin. From it follows, for each cell, the highest
//! rate of uses per second of memory that keeping a page can bring, over all times one may keep
//! it: Gittins' index of the page. Cells go in the order of that rate, the lowest first. Before
//! anything is learned a hazard that is the same for each bin stands in, which makes the order
//! that of recency. Counts fade, so that the order follows the load.

use super::ages::{self, BINS, ORIGIN};
use super::class::{CELLS, is_due, is_given_up};

/// One page in the counts.
const ONE: u32 = 16;

/// Pages' worth of doubt about a cell.
const DOUBT: f64 = 8.0;

/// Hazard of a bin of which nothing is known.
const PRIOR: f64 = 1.0 / 16.0;

/// Hazard of the bins around the moment that a program has named, before it is known to lie.
const PRIOR_DUE: f64 = 0.5;

/// The counts of all cells.
#[derive(Debug)]
pub(crate) struct Worth {
    entered: Box<[u32]>,
    used: Box<[u32]>,
}

impl Worth {
    pub(crate) fn new() -> Self {
        Self {
            entered: vec![0; CELLS].into(),
            used: vec![0; CELLS].into(),
        }
    }

    /// A page came into a cell.
    pub(crate) fn enter(&mut self, cell: usize) {
        self.entered[cell] = self.entered[cell].saturating_add(ONE);
    }

    /// A page was used while in a cell.
    pub(crate) fn hit(&mut self, cell: usize) {
        self.used[cell] = self.used[cell].saturating_add(ONE);
    }

    /// Lets what was counted fade by a sixteenth.
    pub(crate) fn fade(&mut self) {
        for count in self.entered.iter_mut().chain(&mut self.used) {
            *count -= *count >> 4;
        }
    }

    /// All cells, the one worth least first.
    pub(crate) fn order(&self) -> Vec<u16> {
        let mut rates = vec![0.0; CELLS];
        for (class, rates) in rates.chunks_exact_mut(BINS).enumerate() {
            self.rate(class, rates);
        }
        // Rates are not negative, so their bits order like they do; of equal ones the older first.
        let mut order: Vec<(u64, usize, u16)> = (0..)
            .zip(&rates)
            .map(|(cell, rate)| (rate.to_bits(), BINS - usize::from(cell) % BINS, cell))
            .collect();
        order.sort_unstable();
        order.into_iter().map(|(_, _, cell)| cell).collect()
    }

    /// The order of recency, as far as bins tell it.
    pub(crate) fn by_age() -> Vec<u16> {
        let mut order: Vec<u16> = (0..).take(CELLS).collect();
        order.sort_by_key(|&cell| (BINS - usize::from(cell) % BINS, cell));
        order
    }

    /// The rates of the bins of one class.
    fn rate(&self, class: usize, rates: &mut [f64]) {
        let first = if is_due(class) { 0 } else { ORIGIN };
        let mut hazards = [0.0; BINS];
        let mut seconds = [0.0; BINS];
        for bin in first..BINS {
            let prior = match bin {
                _ if is_given_up(class) => 0.0,
                _ if !is_due(class) => PRIOR,
                0..31 => 0.0,
                31..=33 => PRIOR_DUE,
                _ => PRIOR,
            };
            let count = |counts: &[u32]| f64::from(counts[class * BINS + bin]) / f64::from(ONE);
            let (used, entered) = (count(&self.used), count(&self.entered));
            hazards[bin] = ((used + DOUBT * prior) / (entered + DOUBT)).min(1.0);
            seconds[bin] = ages::width(bin) as f64 / 1e9;
        }
        for (bin, rate) in rates.iter_mut().enumerate().skip(first) {
            let (mut left, mut uses, mut time) = (1.0, 0.0, 0.0);
            for (hazard, seconds) in hazards[bin..].iter().zip(&seconds[bin..]) {
                uses += left * hazard;
                time += left * (1.0 - hazard / 2.0) * seconds;
                left *= 1.0 - hazard;
                *rate = f64::max(*rate, uses / time);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::class::{CLASSES, Group, Mark};
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn place(order: &[u16], group: Group, uses: u32, now: u64) -> usize {
        let cell = Mark::new(group, uses, 100 * SECOND).cell(now * SECOND);
        order
            .iter()
            .position(|&one| usize::from(one) == cell)
            .unwrap()
    }

    #[test]
    fn before_anything_is_learned_the_order_is_that_of_recency() {
        let order = Worth::new().order();
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
        for _ in 0..1000 {
            for now in 100..=116 {
                let cell = Mark::new(Group::Plain, 1, 100 * SECOND).cell(now * SECOND);
                worth.enter(cell);
            }
            worth.hit(Mark::new(Group::Plain, 1, 100 * SECOND).cell(116 * SECOND));
        }
        let order = worth.order();
        let [young, due, late] = [102, 116, 160].map(|now| place(&order, Group::Plain, 1, now));
        assert!(due > young, "the nearer the use, the dearer");
        assert!(late < young, "after it nothing is expected");
    }

    #[test]
    fn a_named_moment_that_never_comes_true_is_worth_less_than_one_that_does() {
        let mut worth = Worth::new();
        let before = place(&worth.order(), Group::Due, 1, 100);
        for _ in 0..1000 {
            for bin in 0..BINS {
                worth.enter(Mark::new(Group::Due, 1, 0).cell(0) / BINS * BINS + bin);
            }
        }
        assert!(place(&worth.order(), Group::Due, 1, 100) < before);
    }

    #[test]
    fn counts_fade() {
        let mut worth = Worth::new();
        worth.enter(7);
        for _ in 0..100 {
            worth.fade();
        }
        assert!(worth.entered[7] < ONE);
    }
}
