//! What least recently used would have found, at several capacities at once, over the watched
//! pages; and the duel of the policy in force with it.
//!
//! Pages lie in one list by last use, cut into segments at the capacities: a page in the first
//! three segments would have been found by a cache of the third capacity. Using a page moves it to
//! the front and one page across each border it crossed, so a use costs a few steps.

use crate::node::NIL;
use serde::{Deserialize, Serialize};

/// Capacities of which the hits are known, in eighths of the real one.
pub(crate) const EIGHTHS: [u32; 7] = [1, 2, 4, 6, 8, 16, 32];

/// The one of them that is the real capacity.
pub(crate) const REAL: usize = 4;

const SEGMENTS: usize = EIGHTHS.len() + 1;

/// Uses in a round of the duel, at least, and for each watched page that fits: long enough that
/// what one rule left behind is gone before the other is judged.
const ROUND: u32 = 4096;
const ROUND_A_PAGE: u32 = 16;

/// The policy may be behind by this part of the rival's hits before it has lost a round.
const MARGIN: u32 = 128;

/// A round is lost only by more than this, times what was found by one of both alone, as a square:
/// four standard deviations if all those were independent.
const CHANCE: u64 = 16;

/// Rounds that the rival rules after a loss, at most: half of them more each time.
const REST_MAX: u32 = 32;

/// The state of the duel and the curve, for reports.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Duel {
    /// Whether least recently used rules for now.
    pub lru_rules: bool,
    /// Counter: rounds that the policy lost.
    pub rounds_lost: u32,
    /// Counter: uses of watched pages that were known.
    pub watched_uses: u64,
    /// Counter: those that the cache found.
    pub watched_hits: u64,
    /// Capacities in pages, and counters of what least recently used would have found with them.
    pub lru_curve: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    prev: u32,
    next: u32,
    segment: u8,
}

/// Where a page was when it was used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// In the cache.
    pub(crate) found: bool,
    /// In a cache of this size that the policy rules all the time.
    pub(crate) by_policy: bool,
}

/// What was found in a round.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    uses: u32,
    /// By the cache.
    found: u32,
    /// By the rival.
    rival: u32,
    /// By one of them and not by the other.
    apart: u32,
    /// By the policy had it ruled all the time.
    policy: u32,
}

/// The list, and the score.
#[derive(Debug)]
pub(crate) struct Rivals {
    places: Vec<Place>,
    head: u32,
    lasts: [u32; SEGMENTS],
    lens: [u32; SEGMENTS],
    rooms: [u32; SEGMENTS],
    hits: [u64; SEGMENTS],
    uses: u64,
    found: u64,
    round: Round,
    round_len: u32,
    lost: u32,
    /// Rounds until the policy is tried again, while the rival rules.
    rest: u32,
    next_rest: u32,
    /// The round under way began with a change of rule, and does not count.
    settling: bool,
}

const ABSENT: Place = Place {
    prev: NIL,
    next: NIL,
    segment: u8::MAX,
};

impl Rivals {
    /// A cache of which `pages` are watched.
    pub(crate) fn new(pages: u32) -> Self {
        let mut rooms = [u32::MAX; SEGMENTS];
        let mut before = 0;
        for (room, eighths) in rooms.iter_mut().zip(EIGHTHS) {
            let capacity = (pages.saturating_mul(eighths) / 8).max(before + 1);
            *room = capacity - before;
            before = capacity;
        }
        Self {
            places: Vec::new(),
            head: NIL,
            lasts: [NIL; SEGMENTS],
            lens: [0; SEGMENTS],
            rooms,
            hits: [0; SEGMENTS],
            uses: 0,
            found: 0,
            round: Round::default(),
            round_len: ROUND.max(pages.saturating_mul(ROUND_A_PAGE)),
            lost: 0,
            rest: 0,
            next_rest: 2,
            settling: false,
        }
    }

    /// A known page was used. True when the rule has changed.
    pub(crate) fn score(&mut self, at: u32, held: Held) -> bool {
        let place = self.places.get(at as usize).copied().unwrap_or(ABSENT);
        self.uses += 1;
        self.found += u64::from(held.found);
        if let Some(hits) = self.hits.get_mut(usize::from(place.segment)) {
            *hits += 1;
        }
        let rival = usize::from(place.segment) <= REAL;
        let round = &mut self.round;
        round.uses += 1;
        round.found += u32::from(held.found);
        round.rival += u32::from(rival);
        round.apart += u32::from(held.found != rival);
        round.policy += u32::from(held.by_policy);
        round.uses >= self.round_len && self.close_round()
    }

    /// Whether the rival's order is in force.
    pub(crate) const fn lru_rules(&self) -> bool {
        self.rest > 0
    }

    fn close_round(&mut self) -> bool {
        let round = std::mem::take(&mut self.round);
        let behind = |hits: u32| hits + round.rival / MARGIN < round.rival;
        if std::mem::take(&mut self.settling) {
            return false;
        }
        if self.rest > 0 {
            // There is no point in a trial that would be lost.
            self.rest = (self.rest - 1).max(u32::from(behind(round.policy)));
            self.settling = self.rest == 0;
            return self.settling;
        }
        // What few pages of chance can bring about is no loss.
        let by = round.rival.saturating_sub(round.found);
        let is_chance = u64::from(by).pow(2) <= u64::from(round.apart) * CHANCE;
        if !behind(round.found) || is_chance {
            self.next_rest = 2;
            return false;
        }
        self.lost += 1;
        self.rest = self.next_rest;
        self.next_rest = (self.next_rest + self.next_rest / 2).min(REST_MAX);
        self.settling = true;
        true
    }

    /// The page counts as used last. Those of a request come deepest first.
    pub(crate) fn touch(&mut self, at: u32) {
        if self.places.len() <= at as usize {
            self.places.resize(at as usize + 1, ABSENT);
        }
        self.forget(at);
        self.places[at as usize] = Place {
            prev: NIL,
            next: self.head,
            segment: 0,
        };
        if self.head != NIL {
            self.places[self.head as usize].prev = at;
        }
        self.head = at;
        if self.lasts[0] == NIL {
            self.lasts[0] = at;
        }
        self.lens[0] += 1;
        for segment in 0..SEGMENTS - 1 {
            if self.lens[segment] <= self.rooms[segment] {
                break;
            }
            let last = self.lasts[segment];
            self.lens[segment] -= 1;
            self.lasts[segment] = self.places[last as usize].prev;
            self.places[last as usize].segment += 1;
            self.lens[segment + 1] += 1;
            if self.lasts[segment + 1] == NIL {
                self.lasts[segment + 1] = last;
            }
        }
    }

    /// The page is not known any more.
    pub(crate) fn forget(&mut self, at: u32) {
        let Some(&place) = self.places.get(at as usize) else {
            return;
        };
        let segment = usize::from(place.segment);
        if segment >= SEGMENTS {
            return;
        }
        self.lens[segment] -= 1;
        if self.lasts[segment] == at {
            let same = |prev: &u32| self.places[*prev as usize].segment == place.segment;
            let before = Some(place.prev).filter(|prev| *prev != NIL);
            self.lasts[segment] = before.filter(same).unwrap_or(NIL);
        }
        if place.prev == NIL {
            self.head = place.next;
        } else {
            self.places[place.prev as usize].next = place.next;
        }
        if place.next != NIL {
            self.places[place.next as usize].prev = place.prev;
        }
        self.places[at as usize] = ABSENT;
    }

    /// Uses that caches of each capacity would have found, and those that this one has.
    pub(crate) fn hits(&self) -> ([u64; EIGHTHS.len()], u64) {
        let mut sum = 0;
        let hits = std::array::from_fn(|segment| {
            sum += self.hits[segment];
            sum
        });
        (hits, self.found)
    }

    /// For reports; one watched page stands for `scale`.
    pub(crate) fn report(&self, pages: u64) -> Duel {
        let mut hits = 0;
        let curve = EIGHTHS.iter().zip(self.hits).map(|(&eighths, more)| {
            hits += more;
            ((pages * u64::from(eighths) / 8).max(1), hits)
        });
        Duel {
            lru_rules: self.lru_rules(),
            rounds_lost: self.lost,
            watched_uses: self.uses,
            watched_hits: self.found,
            lru_curve: curve.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISSED: Held = Held {
        found: false,
        by_policy: false,
    };

    #[test]
    fn the_segments_count_what_caches_of_each_capacity_find() {
        let mut rivals = Rivals::new(16);
        let mut recent: Vec<u32> = Vec::new();
        let mut expected = [0_u64; 7];
        let mut seed = 1_u32;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let at = (seed >> 16) % 97 * ((seed >> 28) % 3) / 2;
            if seed >> 8 & 63 == 0 {
                rivals.forget(at);
                recent.retain(|&one| one != at);
                continue;
            }
            let distance = recent.iter().position(|&one| one == at);
            for (hits, eighths) in expected.iter_mut().zip(EIGHTHS) {
                *hits += u64::from(distance.is_some_and(|at| at < 2 * eighths as usize));
            }
            rivals.score(at, MISSED);
            rivals.touch(at);
            recent.retain(|&one| one != at);
            recent.insert(0, at);
        }
        let found = rivals.report(16).lru_curve;
        // A forgotten page leaves a gap that is closed only when a border is crossed.
        for ((_, found), expected) in found.into_iter().zip(expected) {
            assert!(
                found <= expected && found + expected / 10 >= expected,
                "{found} {expected}"
            );
        }
    }

    #[test]
    fn a_policy_that_finds_less_than_its_rival_is_relieved_for_a_while() {
        let mut rivals = Rivals::new(64);
        let mut changes = 0;
        for round in 0..40_u32 {
            for at in 0..ROUND {
                rivals.touch(at % 64);
                let found = rivals.lru_rules() || at % 64 < 32;
                changes += u32::from(rivals.score(
                    at % 64,
                    Held {
                        found,
                        by_policy: round % 8 > 3,
                    },
                ));
            }
            assert!(round > 0 || rivals.lru_rules(), "the first round counts");
        }
        assert!(changes >= 3, "{changes} changes");
        let duel = rivals.report(64);
        assert!(duel.watched_hits * 10 > duel.watched_uses * 7, "{duel:?}");
        let mut good = Rivals::new(64);
        for at in 0..10 * ROUND {
            good.touch(at % 64);
            assert!(
                !good.score(
                    at % 64,
                    Held {
                        found: at % 200 != 0,
                        ..MISSED
                    }
                ),
                "within the margin"
            );
        }
    }

    /// Behind by 2 % of what the rival finds, which is more than the margin: chance where as many
    /// again were found by the cache alone, a loss where none was.
    #[test]
    fn a_round_is_not_lost_by_chance() {
        let lost = |found_alone: u32| {
            let mut rivals = Rivals::new(64);
            for at in 0..ROUND {
                let (by_rival, found) = match at % 64 {
                    0 | 1 => (true, at % 128 < 64),
                    rest => (rest >= 2 + found_alone, true),
                };
                rivals.touch(at % 64);
                if !by_rival {
                    rivals.forget(at % 64);
                }
                let held = Held {
                    found: found && (by_rival || at % 256 < 64),
                    by_policy: true,
                };
                rivals.score(at % 64, held);
            }
            rivals.lru_rules()
        };
        assert!(lost(0));
        assert!(!lost(40));
    }

    #[test]
    fn each_trial_that_is_lost_makes_the_rest_before_the_next_half_as_long_again() {
        let mut rivals = Rivals::new(64);
        let mut rounds = Vec::new();
        while rounds.len() < 40 {
            for at in 0..ROUND {
                rivals.touch(at % 64);
                // It would find all, and finds nothing where it rules.
                let held = Held {
                    found: false,
                    by_policy: true,
                };
                rivals.score(at % 64, held);
            }
            rounds.push(rivals.lru_rules());
        }
        let rests = rounds.split(|&rules| !rules).map(<[bool]>::len);
        let rests: Vec<_> = rests.filter(|&len| len > 0).collect();
        assert_eq!(
            rests[..5],
            [3, 4, 5, 7, 10],
            "2 rounds at first, and the one that lost"
        );
    }
}
