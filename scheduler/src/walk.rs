//! The walk over prompts that fills a step: running prefills and waiting requests in one order,
//! each of the latter looked at once.
//!
//! ```text
//!   running prefills, by key  ----------------------------+
//!                                                         +--> the lesser key is next
//!   waiting: first of each tenant, by shares (fair) --+   |
//!            groups, the heaviest first (grouped) ----+---+
//!            all others, by key ----------------------+
//! ```
//! It knows keys alone: whether one can start is for `batch.rs` to try, which closes the walk to
//! those who wait when no more of them may.

use std::collections::{BTreeSet, VecDeque};

use rootstock_memory::Nanos;

use crate::live::{Next, Phase};
use crate::policy::{Order, QueueKey};
use crate::queue::WaitQueue;
use crate::request::RequestId;
use crate::scheduler::Scheduler;

/// Waiting requests that may be considered in one step.
const SEEN_MAX: usize = 64;

/// Whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// It runs, and more of its prompt is to be computed.
    Prefill(RequestId),
    /// It waits for a seat.
    Waiting(RequestId),
}

/// Where the walk stands.
#[derive(Debug)]
pub(crate) struct Walk {
    prefills: VecDeque<QueueKey>,
    /// Waiting requests considered in this step.
    seen: BTreeSet<RequestId>,
    after: Option<QueueKey>,
    /// Whether waiting requests may still start.
    open: bool,
    fair: bool,
    /// What goes before the order among those that have not aged.
    grouped: VecDeque<RequestId>,
}

impl Walk {
    /// The next turn, each request once; None when there is none left, or only closed ones.
    pub(crate) fn next(&mut self, queue: &WaitQueue) -> Option<Turn> {
        let waiting = self.next_waiting(queue);
        if let Some(&first) = self.prefills.front()
            && waiting.is_none_or(|key| first < key)
        {
            self.prefills.pop_front();
            return Some(Turn::Prefill(first.id));
        }
        let id = waiting?.id;
        self.seen.insert(id);
        Some(Turn::Waiting(id))
    }

    /// Nobody who waits has a turn any more.
    pub(crate) fn close(&mut self) {
        self.open = false;
    }

    /// The next waiting request: the tenants' first ones by their shares, or the groups from the
    /// heaviest on, then all others.
    fn next_waiting(&mut self, queue: &WaitQueue) -> Option<QueueKey> {
        if !self.open || self.seen.len() >= SEEN_MAX {
            return None;
        }
        let head = queue
            .heads()
            .find(|key| !self.seen.contains(&key.id))
            .filter(|_| self.fair);
        if head.is_some() {
            return head;
        }
        let mut next = queue.next_after(self.after);
        while let Some(key) = next.filter(|key| self.seen.contains(&key.id)) {
            self.after = Some(key);
            next = queue.next_after(self.after);
        }
        if next.is_some_and(|key| key.is_plain()) {
            while let Some(&id) = self.grouped.front() {
                let key = queue.key_of(id).filter(|key| key.is_plain());
                if key.is_some_and(|key| !self.seen.contains(&key.id)) {
                    return key;
                }
                self.grouped.pop_front();
            }
        }
        next
    }
}

impl Scheduler {
    /// A walk over all that could have a prompt computed now.
    pub(crate) fn walk(&self, now: Nanos) -> Walk {
        let begins = self.cfg.begin_in_transit;
        let prefills = self.seated().filter(|live| {
            let fetches = begins && matches!(live.phase, Phase::Fetching(_));
            fetches || matches!(live.next(), Next::Prefill(_))
        });
        let mut prefills: Vec<QueueKey> = prefills
            .map(|live| self.order.key(&live.key_parts(&self.order, now)))
            .collect();
        prefills.sort_unstable();
        let grouped = match self.order.is_grouped() {
            true => self.queue.groups.first(SEEN_MAX).into(),
            false => VecDeque::new(),
        };
        Walk {
            prefills: prefills.into(),
            seen: BTreeSet::new(),
            after: None,
            open: true,
            fair: Order::is_fair(&self.cfg),
            grouped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{SchedulePolicy, SchedulerConfig};
    use crate::live::Live;
    use crate::queue::Entry;
    use crate::request::NewRequest;
    use rootstock_radix::NamespaceId;

    #[test]
    fn a_prefill_that_goes_first_does_not_cost_the_heaviest_group_its_turn() {
        let cfg = SchedulerConfig {
            policy: SchedulePolicy::DfsWeight,
            ..SchedulerConfig::default()
        };
        let order = Order::new(&cfg);
        let live = |n: u64| {
            let new = NewRequest::new(NamespaceId::from_raw(0), vec![1], 1);
            Live::new(RequestId(n), new, &cfg, n)
        };
        let key = |n: u64| order.key(&live(n).key_parts(&order, n));
        let mut queue = WaitQueue::default();
        for (n, path) in [(1, [9]), (2, [7]), (3, [7])] {
            let (rank, tenant) = (live(n).rank(), live(n).tenant);
            queue.put(Entry {
                key: key(n),
                rank,
                tenant,
                age_at: None,
            });
            queue.groups.insert(RequestId(n), n, &path.into());
        }
        let mut walk = Walk {
            prefills: [key(0)].into(),
            seen: BTreeSet::new(),
            after: None,
            open: true,
            fair: false,
            grouped: queue.groups.first(SEEN_MAX).into(),
        };
        let turns: Vec<Turn> = std::iter::from_fn(|| walk.next(&queue)).collect();
        let waiting = [2, 3, 1].map(|n| Turn::Waiting(RequestId(n)));
        assert_eq!(turns[0], Turn::Prefill(RequestId(0)));
        assert_eq!(turns[1..], waiting, "each once, the largest group first");
    }
}
