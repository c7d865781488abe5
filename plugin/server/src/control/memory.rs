//! What the server remembers to explain misses: removed pages, who came when, and findings by the
//! id of their answer, for the salt they belong to. All of it is bounded, the oldest goes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rootstock::memory::Nanos;
use rootstock::radix::{CacheStats, Ghosts, KvEvent, PrefixCache};
use serde_json::Value;

use crate::control::departures::{Departure, Departures, Reason};
use crate::control::why::{self, Asked, Evictor, Finding};

/// Removed pages that are remembered, for each page that the tiers hold.
const GHOSTS_A_PAGE: u64 = 8;
/// At least, and at most.
const GHOSTS: std::ops::RangeInclusive<u64> = 1 << 12..=1 << 17;
/// Findings that are kept.
pub const FINDINGS_MAX: usize = 1024;
/// Arrivals that are remembered.
const ARRIVALS_MAX: usize = 4096;

/// A request that came.
#[derive(Debug)]
struct Arrival {
    at: Nanos,
    salt: Option<String>,
    evictor: Evictor,
}

/// The memory.
#[derive(Debug, Default)]
pub struct Memory {
    ghosts: OnceLock<Mutex<Ghosts>>,
    arrivals: Mutex<VecDeque<Arrival>>,
    findings: Mutex<Findings>,
    departures: Mutex<Departures>,
}

#[derive(Debug, Default)]
struct Findings {
    by_id: BTreeMap<String, (Option<String>, Value)>,
    order: VecDeque<String>,
}

impl Memory {
    /// Hears what changed in a cache of the given state. `dropped_only`: whatever was removed, none
    /// of it went for room.
    pub fn hear(&self, events: &[KvEvent], cache: &CacheStats, dropped_only: bool, now: Nanos) {
        let mut ghosts = self.ghosts(cache);
        for event in events {
            ghosts.hear(event, dropped_only, now);
        }
        drop(ghosts);
        let mut departures = self.departures();
        for event in events {
            departures.hear(event, dropped_only, now);
        }
    }

    /// The removed pages: as many as say something about a cache of this size.
    fn ghosts(&self, cache: &CacheStats) -> MutexGuard<'_, Ghosts> {
        let fresh = || {
            let pages: u64 = cache.tiers.iter().map(|tier| u64::from(tier.total)).sum();
            let limit = (GHOSTS_A_PAGE * pages).clamp(*GHOSTS.start(), *GHOSTS.end());
            Mutex::new(Ghosts::new(usize::try_from(limit).unwrap_or(usize::MAX)))
        };
        let ghosts = self.ghosts.get_or_init(fresh);
        ghosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn departures(&self) -> MutexGuard<'_, Departures> {
        let departures = self.departures.lock();
        departures.unwrap_or_else(PoisonError::into_inner)
    }

    /// Counter: pages that left devices while host kept them.
    pub fn moved_down_pages(&self) -> u64 {
        self.departures().moved_down()
    }

    /// What left the cache lately, the newest first, and for whom room was made.
    pub fn departed(&self) -> Vec<(Departure, Option<Evictor>)> {
        let list: Vec<Departure> = self.departures().list().copied().collect();
        let with_evictor = |one: Departure| {
            let made_room = one.reason == Reason::Room;
            let by = made_room.then(|| self.evictor(one.at, None)).flatten();
            (one, by)
        };
        list.into_iter().map(with_evictor).collect()
    }

    /// Looks a prompt up, and notes that it came.
    pub fn find(&self, cache: &PrefixCache, asked: Asked<'_>, now: Nanos) -> Finding {
        let ghosts = self.ghosts(&cache.stats());
        let evictor = |then| self.evictor(then, asked.salt);
        let found = why::find(cache, &ghosts, asked, now, evictor);
        drop(ghosts);
        self.note(asked, now);
        found
    }

    fn note(&self, asked: Asked<'_>, at: Nanos) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.len() == ARRIVALS_MAX {
            arrivals.pop_front();
        }
        arrivals.push_back(Arrival {
            at,
            salt: asked.salt.map(str::to_owned),
            evictor: Evictor {
                is_own: true,
                session: asked.session.map(str::to_owned),
                prompt_tokens: Some(why::count(asked.tokens.len())),
            },
        });
    }

    /// The newest request that had come when room was made. Of others than `salt` only that.
    fn evictor(&self, then: Nanos, salt: Option<&str>) -> Option<Evictor> {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = arrivals.iter().rev().find(|arrival| arrival.at <= then)?;
        Some(if newest.salt.as_deref() == salt {
            newest.evictor.clone()
        } else {
            Evictor::default()
        })
    }

    /// Keeps the report of an answer.
    pub fn keep(&self, id: &str, salt: Option<String>, report: Value) {
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if findings
            .by_id
            .insert(id.to_owned(), (salt, report))
            .is_none()
        {
            findings.order.push_back(id.to_owned());
        }
        while findings.order.len() > FINDINGS_MAX {
            if let Some(oldest) = findings.order.pop_front() {
                findings.by_id.remove(&oldest);
            }
        }
    }

    /// The report of an answer, for its own salt only.
    pub fn report(&self, id: &str, salt: Option<&str>) -> Option<Value> {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, report) = findings.by_id.get(id)?;
        (owner.as_deref() == salt).then(|| report.clone())
    }
}

#[cfg(test)]
mod tests {
    use rootstock::memory::TierId;
    use rootstock::radix::{EventTier, TierStats};

    use super::*;

    fn remembered(pages: u32, removed: u64) -> usize {
        let tier = TierStats {
            tier: TierId::Host,
            total: pages,
            free: pages,
            evictable: 0,
            leased: 0,
            held: 0,
            in_transit: 0,
            hit_tokens: 0,
            evicted_pages: 0,
            dropped_pages: 0,
        };
        let cache = CacheStats {
            tiers: vec![tier],
            ..CacheStats::default()
        };
        let hashes = (0..removed).collect();
        let tier = EventTier::Host;
        let memory = Memory::default();
        memory.hear(&[KvEvent::Removed { tier, hashes }], &cache, false, 0);
        memory.ghosts(&cache).len()
    }

    #[test]
    fn as_many_removed_pages_are_remembered_as_the_size_of_the_cache_asks_for() {
        assert_eq!(remembered(10, 5_000), 4_096);
        assert_eq!(remembered(1_000, 9_000), 8_000);
        assert_eq!(remembered(1_000_000, 140_000), 131_072);
    }
}
