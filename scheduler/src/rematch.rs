//! Who of the waiting is looked up in the cache again, when what is cached has changed.
//!
//! Two ways. When a request computes pages, those who wait for the very same prefix are found by
//! its hashes (`groups.rs`) and looked up in the next step. And after any change of the cache, by
//! whomever and where pages went, the queue is gone through once, a few at a time, the first of it
//! each time. While nothing changes nobody is looked up.

use std::collections::BTreeSet;
use std::ops::Range;

use rootstock_radix::PrefixCache;

use crate::groups::path_of;
use crate::request::RequestId;
use crate::scheduler::Scheduler;

/// First of the queue that are looked up in a step after a change.
const HEAD: usize = 4;
/// Others of the queue that are looked up in a step after a change.
const ROUND: usize = 8;
/// Waiting requests that a computed prefix may mark.
const MARKS_MAX: usize = 64;

/// What is to be looked up.
#[derive(Debug, Default)]
pub(crate) struct Rematch {
    /// Of the cache, at the last step.
    revision: u64,
    /// Requests of the queue that a change may concern and that were not looked up since.
    left: usize,
    /// Those whose prefix has been computed.
    marked: BTreeSet<RequestId>,
}

impl Scheduler {
    /// Whose cached prefix may have changed; a bounded number.
    pub(crate) fn take_rematch(&mut self, cache: &PrefixCache) -> Vec<RequestId> {
        let revision = cache.revision();
        if revision != self.rematch.revision {
            self.rematch.revision = revision;
            self.rematch.left = self.queue.len();
        }
        let mut ids: Vec<RequestId> = std::mem::take(&mut self.rematch.marked)
            .into_iter()
            .filter(|&id| self.queue.contains(id))
            .collect();
        if self.rematch.left > 0 {
            self.rematch.left = self.rematch.left.saturating_sub(ROUND);
            ids.extend(self.queue.take_probes(HEAD, ROUND));
        }
        ids
    }

    /// A request has published these pages of its tokens: marks those who wait for them. Only
    /// where a doubling of the prefix is passed, at which those who wait are grouped.
    pub(crate) fn mark_waiting(&mut self, id: RequestId, pages: Range<u32>) {
        let Range {
            start: from,
            end: to,
        } = pages;
        let grouped = self.order.is_grouped() || self.order.uses_cache();
        if self.queue.len() == 0 || !grouped || from >= to {
            return;
        }
        // The largest power of two in from + 1..=to, if any.
        let level = to.ilog2();
        if 1_u32 << level <= from {
            return;
        }
        let Some(live) = self.live.get(&id) else {
            return;
        };
        let end = ((1_u32 << level) * self.cfg.page_tokens) as usize;
        let Some(tokens) = live.tokens.get(..end) else {
            return;
        };
        let path = path_of(live.ns, tokens, self.cfg.page_tokens);
        if let Some(&hash) = path.last() {
            let same = self.queue.groups.under(hash, MARKS_MAX);
            self.rematch.marked.extend(same);
        }
    }
}
