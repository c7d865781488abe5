//! Who waits, in the order of the policy, and by priority for those who may take a running
//! request's place.
//!
//! The queue holds keys, not requests: the scheduler passes the parts, the queue keeps its sorted
//! sets in step. Costs are logarithmic in the queue's length; nothing here scans it.
//!
//! Shares: each tenant has a count of uncached tokens served. Among the first requests of all
//! tenants, class and tier decide, then the smaller count, then the key. A tenant that comes
//! back from idling starts at the count served last, so that nobody saves up a share. This is
//! fair queueing by virtual counters: the shares of deficit round robin without a quantum.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

use rootstock_memory::Nanos;
use rootstock_radix::TenantId;

use crate::groups::Groups;
use crate::live::Rank;
use crate::policy::QueueKey;
use crate::request::{Class, RequestId};

/// Tenants without waiting requests whose counts are kept.
const IDLE_TENANTS_MAX: usize = 1024;

/// What the queue needs to know of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: QueueKey,
    pub(crate) rank: Rank,
    pub(crate) tenant: TenantId,
    /// When the key changes next by aging.
    pub(crate) age_at: Option<Nanos>,
}

/// A tenant's first request in the order of shares.
type Head = ((Reverse<Class>, Reverse<u64>), u64, QueueKey);

#[derive(Debug, Default)]
struct Tenant {
    order: BTreeSet<QueueKey>,
    served: u64,
}

/// The waiting requests of one scheduler.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    entries: BTreeMap<RequestId, Entry>,
    order: BTreeSet<QueueKey>,
    by_rank: BTreeSet<(Reverse<Rank>, QueueKey)>,
    aging: BTreeSet<(Nanos, RequestId)>,
    tenants: BTreeMap<TenantId, Tenant>,
    heads: BTreeSet<Head>,
    /// Count of the tenant served last, before it was served.
    served_last: u64,
    pub(crate) groups: Groups,
    /// Where the rotating look at the cache stands.
    cursor: Option<RequestId>,
}

impl WaitQueue {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a request or gives it a new key.
    pub(crate) fn put(&mut self, entry: Entry) {
        let key = entry.key;
        self.unlink(key.id);
        self.order.insert(key);
        self.by_rank.insert((Reverse(entry.rank), key));
        if let Some(at) = entry.age_at {
            self.aging.insert((at, key.id));
        }
        self.change_tenant(entry.tenant, |tenant| {
            tenant.order.insert(key);
        });
        self.entries.insert(key.id, entry);
    }

    /// Takes a request out, if it waits.
    pub(crate) fn remove(&mut self, id: RequestId) {
        self.groups.remove(id);
        self.unlink(id);
    }

    /// As [`WaitQueue::remove`], but its group keeps it.
    fn unlink(&mut self, id: RequestId) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        self.order.remove(&entry.key);
        self.by_rank.remove(&(Reverse(entry.rank), entry.key));
        if let Some(at) = entry.age_at {
            self.aging.remove(&(at, id));
        }
        self.change_tenant(entry.tenant, |tenant| {
            tenant.order.remove(&entry.key);
        });
    }

    /// A tenant's request starts and computes this many tokens.
    pub(crate) fn charge(&mut self, tenant: TenantId, tokens: u32) {
        let before = self.tenants.get(&tenant).map_or(0, |t| t.served);
        self.served_last = self.served_last.max(before);
        self.change_tenant(tenant, |tenant| tenant.served += u64::from(tokens));
        let idle = self.tenants.len().saturating_sub(self.heads.len());
        if idle > IDLE_TENANTS_MAX {
            let last = self.served_last;
            self.tenants
                .retain(|_, tenant| !tenant.order.is_empty() || tenant.served > last);
        }
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

    /// The key of a waiting request.
    pub(crate) fn key_of(&self, id: RequestId) -> Option<QueueKey> {
        self.entries.get(&id).map(|entry| entry.key)
    }

    /// First requests of the tenants, in the order of shares.
    pub(crate) fn heads(&self) -> impl Iterator<Item = QueueKey> + '_ {
        self.heads.iter().map(|&(_, _, key)| key)
    }

    /// First of the order, or the first after a key.
    pub(crate) fn next_after(&self, after: Option<QueueKey>) -> Option<QueueKey> {
        self.order
            .range((after.map_or(Unbounded, Excluded), Unbounded))
            .next()
            .copied()
    }

    /// The order backwards.
    pub(crate) fn backwards(&self) -> impl Iterator<Item = QueueKey> + '_ {
        self.order.iter().rev().copied()
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
        let mut ids: Vec<RequestId> = self.order.iter().take(head).map(|k| k.id).collect();
        if self.entries.len() <= head {
            return ids;
        }
        let from = self.cursor.map_or(Unbounded, Excluded);
        let rest: Vec<RequestId> = self
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
        ids.extend(rest);
        ids
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.entries.contains_key(&id)
    }

    /// Recounts: every request is in each set exactly once, every tenant's first in the heads.
    pub(crate) fn is_consistent(&self) -> bool {
        let ageing = self.entries.values().filter(|e| e.age_at.is_some()).count();
        let shared: usize = self.tenants.values().map(|tenant| tenant.order.len()).sum();
        let heads: BTreeSet<Head> = self.tenants.values().filter_map(Tenant::head).collect();
        self.entries.len() == self.order.len()
            && self.entries.len() == self.by_rank.len()
            && self.entries.len() == shared
            && ageing == self.aging.len()
            && heads == self.heads
            && self.groups.is_consistent()
            && self.entries.iter().all(|(id, e)| {
                e.key.id == *id
                    && self.order.contains(&e.key)
                    && self.by_rank.contains(&(Reverse(e.rank), e.key))
                    && self
                        .tenants
                        .get(&e.tenant)
                        .is_some_and(|t| t.order.contains(&e.key))
                    && e.age_at.is_none_or(|at| self.aging.contains(&(at, *id)))
            })
    }

    /// Changes a tenant and keeps its place among the heads.
    fn change_tenant(&mut self, id: TenantId, change: impl FnOnce(&mut Tenant)) {
        let last = self.served_last;
        let tenant = self.tenants.entry(id).or_default();
        if let Some(head) = tenant.head() {
            self.heads.remove(&head);
        } else {
            tenant.served = tenant.served.max(last);
        }
        change(tenant);
        self.heads.extend(tenant.head());
    }
}

impl Tenant {
    fn head(&self) -> Option<Head> {
        self.order
            .first()
            .map(|key| (key.urgency(), self.served, *key))
    }
}
