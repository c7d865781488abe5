//! Program-aware admission: when the programs under way do not fit the cache together, some are
//! kept whole and the others wait, instead of all losing their tails before they return.
//!
//! ```text
//!            fits, or nothing else to do, or waited long enough
//!   outside ----------------------------------------------------> inside
//!      ^                                                             |
//!      +--- gives its place: idle, cheapest to compute again per ----+
//!           second until it is expected back; or ended, or unseen for long
//! ```
//! A program is inside while its KV is meant to stay: what it holds of its own (prompt and output
//! beyond what was cached when it began, so that shared beginnings are counted once at most) is
//! charged against the pages of device and host. Requests of programs inside go straight to the
//! queue. Those of others wait beside it for at most [`SchedulerConfig::program_wait_s`]; then
//! their program comes in whatever the room, and others give theirs; with a jump in its hints a
//! request does not wait at all, as somebody does. Requests without a program, and a cache that is
//! large enough, are never touched.
//!
//! Being inside is a plan, not a lease: which pages go is the cache's affair, which sees the same
//! programs return in time.
//!
//! [`SchedulerConfig::program_wait_s`]: crate::SchedulerConfig::program_wait_s

use std::collections::{BTreeMap, BTreeSet};

use rootstock_memory::{Corruption, Nanos};

/// Programs remembered at a time, but for those at work; beyond, the first to be forgotten goes.
const PROGRAMS_MAX: usize = 16_384;
/// Weight of the newest gap in the mean: 1 in so many.
const GAP_FADE: u64 = 4;
/// Expected absence before any was seen.
const GAP_NS: Nanos = 5_000_000_000;
/// A program unseen for so many expected absences, and at least so long, gives its place.
const ABSENCES_MAX: u64 = 8;
const ABSENCE_NS_MIN: Nanos = 30_000_000_000;

/// Its namespace and its name.
pub(crate) type ProgramKey = (u64, String);

#[derive(Clone, Copy, Debug)]
struct Program {
    inside: bool,
    /// Pages that were cached before its first request began: others'. None before that.
    base: Option<u32>,
    /// Pages of its own.
    pages: u32,
    /// Live requests.
    live: u32,
    /// Mean absence between two requests.
    gap_ns: Nanos,
    seen_at: Nanos,
}

/// The programs of one replica.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    all: BTreeMap<ProgramKey, Program>,
    /// Those without a live request, by the time after which they are forgotten.
    idle: BTreeSet<(Nanos, ProgramKey)>,
    /// How many are inside.
    inside: u32,
    /// Pages of all that are inside.
    pages: u64,
}

impl Programs {
    /// Whether a program is inside.
    pub(crate) fn is_inside(&self, key: &ProgramKey) -> bool {
        self.all.get(key).is_some_and(|program| program.inside)
    }

    /// Whether `pages` more fit beside those inside.
    pub(crate) fn fits(&self, pages: u32, capacity: u64) -> bool {
        self.pages + u64::from(pages) <= capacity
    }

    /// Pages of its own that a program needs for a request of `pages` in all.
    pub(crate) fn needs(&self, key: &ProgramKey, pages: u32) -> u32 {
        self.all
            .get(key)
            .map_or(pages, |program| program.pages.max(program.own(pages)))
    }

    /// A program comes in, with so many pages of its own.
    pub(crate) fn enter(&mut self, key: &ProgramKey, pages: u32, now: Nanos) {
        self.change(key, now, |program| {
            program.inside = true;
            program.pages = program.pages.max(pages);
        });
    }

    /// A request of a program comes, of which so many pages are cached.
    pub(crate) fn begin(&mut self, key: &ProgramKey, cached_pages: u32, now: Nanos) {
        self.change(key, now, |program| {
            if program.base.is_none() {
                program.base = Some(cached_pages);
            } else if program.live == 0 {
                let gap = now.saturating_sub(program.seen_at);
                program.gap_ns = program.gap_ns - program.gap_ns / GAP_FADE + gap / GAP_FADE;
            }
            program.live += 1;
        });
    }

    /// A request of a program has ended, at so many pages in all; the last one is its end.
    pub(crate) fn end(&mut self, key: &ProgramKey, pages: u32, last: bool, now: Nanos) {
        self.change(key, now, |program| {
            let live = program.live.checked_sub(1);
            program.live = live.expect("a request ends once, at the program that it began");
            program.pages = program.pages.max(program.own(pages));
            program.inside &= !(last && program.live == 0);
        });
    }

    /// Programs that have not been seen for long give their place. One at work is never forgotten,
    /// and keeps no other from it.
    pub(crate) fn forget(&mut self, now: Nanos) {
        while let Some((forget_at, key)) = self.idle.pop_first() {
            let crowded = self.all.len() > PROGRAMS_MAX;
            if forget_at >= now && !crowded {
                self.idle.insert((forget_at, key));
                return;
            }
            if let Some(program) = self.all.remove(&key) {
                self.uncount(&program);
            }
        }
    }

    /// Has programs give their places until `pages` more fit: idle ones, that which is cheapest to
    /// compute again per second of absence to come first. Whether that was enough.
    ///
    /// # Cost
    /// O(programs inside).
    pub(crate) fn make_room(&mut self, pages: u32, capacity: u64, now: Nanos) -> bool {
        if self.fits(pages, capacity) {
            return true;
        }
        let idle = self
            .all
            .iter()
            .filter(|(_, program)| program.inside && program.live == 0);
        let mut order: Vec<(u64, ProgramKey)> = idle
            .map(|(key, program)| (program.worth(now), key.clone()))
            .collect();
        order.sort();
        for (_, key) in order {
            if self.fits(pages, capacity) {
                return true;
            }
            let seen_at = self.all.get(&key).map_or(now, |program| program.seen_at);
            self.change(&key, seen_at, |program| program.inside = false);
        }
        self.fits(pages, capacity)
    }

    /// Programs inside.
    pub(crate) fn inside(&self) -> u32 {
        self.inside
    }

    /// Recounts.
    ///
    /// # Errors
    /// The sums differ, or who is idle.
    pub(crate) fn check(&self) -> Result<(), Corruption> {
        let mut counted = Self::default();
        for (key, program) in &self.all {
            counted.count(program);
            if program.live == 0 {
                counted.idle.insert((program.forget_at(), key.clone()));
            }
        }
        if (counted.inside, counted.pages) != (self.inside, self.pages) {
            return Err(Corruption::new("programs", "those inside do not add up"));
        }
        if counted.idle != self.idle {
            return Err(Corruption::new("programs", "the idle ones differ"));
        }
        Ok(())
    }

    fn change(&mut self, key: &ProgramKey, now: Nanos, change: impl FnOnce(&mut Program)) {
        let before = self.all.get(key).copied();
        if let Some(program) = &before {
            if program.live == 0 {
                self.idle.remove(&(program.forget_at(), key.clone()));
            }
            self.uncount(program);
        }
        let mut program = before.unwrap_or(Program {
            inside: false,
            base: None,
            pages: 0,
            live: 0,
            gap_ns: GAP_NS,
            seen_at: now,
        });
        change(&mut program);
        program.seen_at = now;
        if program.live == 0 {
            self.idle.insert((program.forget_at(), key.clone()));
        }
        self.count(&program);
        self.all.insert(key.clone(), program);
    }

    fn count(&mut self, program: &Program) {
        if program.inside {
            self.inside += 1;
            self.pages += u64::from(program.pages);
        }
    }

    fn uncount(&mut self, program: &Program) {
        if program.inside {
            self.inside -= 1;
            self.pages -= u64::from(program.pages);
        }
    }
}

impl Program {
    /// Of so many pages in all, those beyond what was cached when it began.
    fn own(&self, pages: u32) -> u32 {
        pages.saturating_sub(self.base.unwrap_or(0))
    }

    /// When it has been unseen for long.
    fn forget_at(&self) -> Nanos {
        let patience = self.gap_ns.saturating_mul(ABSENCES_MAX);
        self.seen_at.saturating_add(patience.max(ABSENCE_NS_MIN))
    }

    /// Pages to compute again per second until it is expected back, times a million.
    fn worth(&self, now: Nanos) -> u64 {
        let absent = now.saturating_sub(self.seen_at);
        // The longer it has been away beyond what is usual, the longer it will stay away.
        let to_come = match self.gap_ns.checked_sub(absent) {
            Some(left) => left,
            None => absent,
        };
        let millis = (to_come / 1_000_000).max(1);
        u64::from(self.pages) * 1_000_000_000 / millis
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    impl Programs {
        /// Programs inside and outside, and pages of those inside.
        fn counts(&self) -> (u32, u32, u64) {
            assert_eq!(self.check(), Ok(()));
            let all = u32::try_from(self.all.len()).expect("a few");
            (self.inside, all - self.inside, self.pages)
        }
    }

    fn key(name: &str) -> ProgramKey {
        (0, name.to_owned())
    }

    /// A program inside that was seen at `seen_s` and is usually away for `gap_s`.
    fn inside(programs: &mut Programs, name: &str, pages: u32, gap_s: u64, seen_s: u64) {
        programs.enter(&key(name), pages, SECOND);
        for _ in 0..64 {
            programs.begin(&key(name), 0, SECOND * (1 + gap_s));
            programs.end(&key(name), pages, false, SECOND);
        }
        programs.begin(&key(name), 0, SECOND * seen_s);
        programs.end(&key(name), pages, false, SECOND * seen_s);
    }

    #[test]
    fn those_far_from_their_return_and_cheap_give_their_place_first() {
        let mut programs = Programs::default();
        inside(&mut programs, "soon", 100, 2, 100);
        inside(&mut programs, "late", 100, 60, 100);
        inside(&mut programs, "small", 10, 60, 100);
        assert_eq!(programs.counts(), (3, 0, 210));
        assert!(programs.fits(40, 250) && !programs.fits(41, 250));
        assert!(programs.make_room(45, 250, 101 * SECOND));
        assert!(!programs.is_inside(&key("small")), "cheapest per second");
        assert!(programs.make_room(140, 250, 101 * SECOND));
        assert!(!programs.is_inside(&key("late")) && programs.is_inside(&key("soon")));
        assert_eq!(programs.counts(), (1, 2, 100));
    }

    #[test]
    fn a_program_at_work_keeps_its_place_and_the_last_request_ends_it() {
        let mut programs = Programs::default();
        inside(&mut programs, "a", 100, 5, 10);
        programs.begin(&key("a"), 0, 11 * SECOND);
        assert!(!programs.make_room(200, 250, 12 * SECOND));
        assert!(programs.is_inside(&key("a")));
        programs.forget(10_000 * SECOND);
        assert!(programs.is_inside(&key("a")));
        programs.end(&key("a"), 120, true, 13 * SECOND);
        assert_eq!(programs.counts(), (0, 1, 0));
    }

    #[test]
    fn what_was_cached_before_a_program_began_is_not_its_own() {
        let mut programs = Programs::default();
        programs.begin(&key("a"), 64, SECOND);
        assert_eq!(programs.needs(&key("a"), 80), 16);
        programs.enter(&key("a"), 16, SECOND);
        programs.end(&key("a"), 90, false, 2 * SECOND);
        assert_eq!(programs.counts(), (1, 0, 26));
        programs.begin(&key("a"), 90, 3 * SECOND);
        assert_eq!(programs.needs(&key("a"), 100), 36, "the first look counts");
    }

    #[test]
    fn the_unseen_are_forgotten_with_their_pages() {
        let mut programs = Programs::default();
        inside(&mut programs, "a", 100, 5, 10);
        inside(&mut programs, "b", 50, 5, 100);
        programs.forget(101 * SECOND);
        assert_eq!(
            programs.counts(),
            (1, 0, 50),
            "8 usual absences, 30 s at least"
        );
        programs.forget(1_000 * SECOND);
        assert_eq!(programs.counts(), (0, 0, 0));
    }

    #[test]
    fn neither_one_at_work_nor_a_patient_one_keeps_others_from_being_forgotten() {
        let mut programs = Programs::default();
        programs.begin(&key("works"), 0, SECOND);
        inside(&mut programs, "patient", 20, 3600, 2);
        inside(&mut programs, "quick", 50, 5, 3);
        programs.forget(100 * SECOND);
        assert_eq!(programs.counts(), (1, 1, 20));
        assert!(programs.is_inside(&key("patient")));
        programs.end(&key("works"), 7, false, 101 * SECOND);
        programs.forget(100_000 * SECOND);
        assert_eq!(programs.counts(), (0, 0, 0));
    }

    #[test]
    fn the_first_look_counts_at_time_0_as_at_any_other() {
        let mut programs = Programs::default();
        programs.begin(&key("a"), 64, 0);
        programs.begin(&key("a"), 90, 0);
        assert_eq!(programs.needs(&key("a"), 100), 36);
    }
}
