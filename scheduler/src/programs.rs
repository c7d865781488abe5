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

/// Programs remembered at a time; the longest unseen goes first.
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
    /// Pages that were cached before it began: others'.
    base: u32,
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
    by_age: BTreeSet<(Nanos, ProgramKey)>,
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
        self.all.get(key).map_or(pages, |program| {
            program.pages.max(pages.saturating_sub(program.base))
        })
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
            if program.seen_at == 0 {
                program.base = cached_pages;
            }
            if program.live == 0 && program.seen_at > 0 {
                let gap = now.saturating_sub(program.seen_at);
                program.gap_ns = program.gap_ns - program.gap_ns / GAP_FADE + gap / GAP_FADE;
            }
            program.live += 1;
        });
    }

    /// A request of a program has ended, at so many pages in all; the last one is its end.
    pub(crate) fn end(&mut self, key: &ProgramKey, pages: u32, last: bool, now: Nanos) {
        self.change(key, now, |program| {
            program.live = program.live.saturating_sub(1);
            program.pages = program.pages.max(pages.saturating_sub(program.base));
            program.inside &= !(last && program.live == 0);
        });
    }

    /// Programs that have not been seen for long give their place.
    pub(crate) fn forget(&mut self, now: Nanos) {
        while let Some((seen_at, key)) = self.by_age.first().cloned() {
            let Some(program) = self.all.get(&key).copied() else {
                self.by_age.remove(&(seen_at, key));
                continue;
            };
            let patience = (program.gap_ns.saturating_mul(ABSENCES_MAX)).max(ABSENCE_NS_MIN);
            let absent = now.saturating_sub(seen_at) > patience;
            let crowded = self.all.len() > PROGRAMS_MAX;
            if program.live > 0 || !(absent || crowded) {
                return;
            }
            self.by_age.remove(&(seen_at, key.clone()));
            self.all.remove(&key);
            if program.inside {
                self.pages -= u64::from(program.pages);
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

    /// Programs inside and outside, and pages of those inside.
    pub(crate) fn counts(&self) -> (u32, u32, u64) {
        let inside = self.all.values().filter(|program| program.inside).count();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        (count(inside), count(self.all.len() - inside), self.pages)
    }

    /// Recounts.
    ///
    /// # Errors
    /// The sums differ.
    pub(crate) fn check(&self) -> Result<(), Corruption> {
        let inside = self.all.values().filter(|program| program.inside);
        let pages: u64 = inside.map(|program| u64::from(program.pages)).sum();
        if pages == self.pages && self.by_age.len() == self.all.len() {
            return Ok(());
        }
        Err(Corruption::new("programs", "pages or ages do not add up"))
    }

    fn change(&mut self, key: &ProgramKey, now: Nanos, change: impl FnOnce(&mut Program)) {
        let program = self.all.entry(key.clone()).or_insert(Program {
            inside: false,
            base: 0,
            pages: 0,
            live: 0,
            gap_ns: GAP_NS,
            seen_at: 0,
        });
        self.by_age.remove(&(program.seen_at, key.clone()));
        if program.inside {
            self.pages -= u64::from(program.pages);
        }
        change(program);
        if program.inside {
            self.pages += u64::from(program.pages);
        }
        program.seen_at = now;
        self.by_age.insert((now, key.clone()));
    }
}

impl Program {
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
}
