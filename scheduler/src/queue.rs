//! Who waits, in the order of the policy, and by priority for those who may take a running
//! request's place.
//!
//! The queue holds keys, not requests: the scheduler passes the parts, the queue keeps three
//! sorted sets in step. Costs are logarithmic in the queue's length; nothing here scans it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rootstock_memory::Nanos;

use crate::live::Rank;
use crate::policy::QueueKey;
use crate::request::RequestId;

/// One waiting request's entries in the sets.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: QueueKey,
    rank: Rank,
    age_at: Option<Nanos>,
}

/// The waiting requests of one scheduler.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    entries: BTreeMap<RequestId, Entry>,
    order: BTreeSet<QueueKey>,
    by_rank: BTreeSet<(Reverse<Rank>, QueueKey)>,
    /// When each request's key changes next by aging.
    aging: BTreeSet<(Nanos, RequestId)>,
    /// Where the rotating look at the cache stands.
    cursor: Option<RequestId>,
}

impl WaitQueue {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a request or gives it a new key.
    pub(crate) fn put(&mut self, key: QueueKey, rank: Rank, age_at: Option<Nanos>) {
        self.remove(key.id);
        self.order.insert(key);
        self.by_rank.insert((Reverse(rank), key));
        if let Some(at) = age_at {
            self.aging.insert((at, key.id));
        }
        self.entries.insert(key.id, Entry { key, rank, age_at });
    }

    /// Whether the request was waiting.
    pub(crate) fn remove(&mut self, id: RequestId) -> bool {
        let Some(entry) = self.entries.remove(&id) else {
            return false;
        };
        self.order.remove(&entry.key);
        self.by_rank.remove(&(Reverse(entry.rank), entry.key));
        if let Some(at) = entry.age_at {
            self.aging.remove(&(at, id));
        }
        true
    }

    /// The next request due for a new key by aging.
    pub(crate) fn pop_aged(&mut self, now: Nanos) -> Option<RequestId> {
        let &(at, id) = self.aging.first()?;
        if at > now {
            return None;
        }
        self.aging.remove(&(at, id));
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.age_at = None;
        }
        Some(id)
    }

    /// First of the order, or the first after a key.
    pub(crate) fn next_after(&self, after: Option<QueueKey>) -> Option<QueueKey> {
        use std::ops::Bound::{Excluded, Unbounded};
        match after {
            None => self.order.first().copied(),
            Some(key) => self.order.range((Excluded(key), Unbounded)).next().copied(),
        }
    }

    /// Up to `n` of the waiting with the highest rank, first of the order among equals.
    pub(crate) fn highest_ranks(&self, n: usize) -> Vec<(Rank, RequestId)> {
        self.by_rank
            .iter()
            .take(n)
            .map(|&(Reverse(rank), key)| (rank, key.id))
            .collect()
    }

    /// The first `head` of the order, then up to `round` more, a different part of the queue
    /// each time, so that in the end everyone is looked at.
    pub(crate) fn take_probes(&mut self, head: usize, round: usize) -> Vec<RequestId> {
        use std::ops::Bound::{Excluded, Unbounded};
        let mut ids: Vec<RequestId> = self.order.iter().take(head).map(|k| k.id).collect();
        if self.entries.len() <= head {
            return ids;
        }
        let from = self.cursor.map_or(Unbounded, Excluded);
        let mut rest: Vec<RequestId> = self
            .entries
            .range((from, Unbounded))
            .take(round)
            .map(|(&id, _)| id)
            .collect();
        self.cursor = if rest.len() == round {
            rest.last().copied()
        } else {
            None
        };
        ids.append(&mut rest);
        ids
    }

    /// Recounts: every request is in each set exactly once.
    pub(crate) fn is_consistent(&self) -> bool {
        let ageing = self.entries.values().filter(|e| e.age_at.is_some()).count();
        self.entries.len() == self.order.len()
            && self.entries.len() == self.by_rank.len()
            && ageing == self.aging.len()
            && self.entries.iter().all(|(id, e)| {
                e.key.id == *id
                    && self.order.contains(&e.key)
                    && self.by_rank.contains(&(Reverse(e.rank), e.key))
                    && e.age_at.is_none_or(|at| self.aging.contains(&(at, *id)))
            })
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.entries.contains_key(&id)
    }
}
