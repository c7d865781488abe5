//! Taking pages and seats back from running requests.
//!
//! Two occasions. A decoding request finds no page for its next token: the first of those that
//! give way (lowest rank, least work done, newest) give their pages, the request itself when it
//! is the first; alone, it ends with what it has. A waiting request outranks running ones by the
//! gap: they give their seat or pages. In both as few as are needed, and none when they cannot
//! give enough.
//!
//! A request that gives way keeps its tokens, its place and its age; its complete pages stay in
//! the cache until somebody needs them. With a step in flight it gives way when that step has
//! ended (`yielding`), so no drawn token is lost. After `max_preemptions` times it is passed
//! over by those who outrank it, and is the last to give way for want of pages; when even then
//! there is no other way, it ends.

use std::collections::BTreeSet;

use rootstock_memory::PageId;
use rootstock_radix::{Fate, Short};

use crate::draft::Draft;
use crate::emit::FinishReason;
use crate::holding::{Holding, device, missing_pages, pages_for};
use crate::live::{Live, Phase, count};
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};

/// Waiting requests that may look for someone to give way in one step.
const RANK_TRIES_MAX: usize = 4;

/// What came of a decoding request's search for pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Relief {
    /// Pages are there now.
    Freed,
    /// Pages are coming.
    Wait,
    /// The request itself has given way or ended.
    Gone,
}

/// When a request has given way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Yield {
    Now,
    /// With the last of its steps in flight.
    Later,
}

impl Scheduler {
    /// Finds pages for the next token of the decoding request `id`.
    pub(crate) fn relieve(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
        short: &Short,
        draft: &mut Draft,
    ) -> Relief {
        let owed = draft.owed_pages + missing_pages(short);
        let leaving = self.leaving();
        // Copies under way bring back pages by themselves.
        let wanted = owed.saturating_sub(short.in_transit_pages);
        if self.freed_by(&leaving, &[]) >= wanted {
            draft.owed_pages = owed;
            return Relief::Wait;
        }
        let copies = cx.cache.copies_at(device(self.cfg.replica)) > 0;
        let order = self.victims(|_| true);
        let before = order.iter().position(|&victim| victim == id).unwrap_or(0);
        let alone = order.len() == 1;
        let landing = self.live[&id].is_in_flight();
        match self.fewest(&order[..before], &leaving, wanted, &[]) {
            Some(victims) => match self.give_way(cx, &victims, draft) {
                Yield::Now if draft.owed_pages == 0 => Relief::Freed,
                Yield::Now | Yield::Later => {
                    draft.owed_pages = owed;
                    Relief::Wait
                }
            },
            None if alone && (landing || copies || !leaving.is_empty()) => Relief::Wait,
            None if alone => {
                self.end(cx, id, FinishReason::OutOfPages);
                Relief::Gone
            }
            None => {
                self.give_way(cx, &[id], draft);
                Relief::Gone
            }
        }
    }

    /// Starts waiting requests in place of running ones that they outrank.
    pub(crate) fn admit_by_rank(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        let Some(gap) = self.cfg.preempt_gap else {
            return;
        };
        for (rank, id) in self.queue.highest_ranks(RANK_TRIES_MAX) {
            if self.claim.is_some() || draft.budget == 0 {
                return;
            }
            // Nobody gives way to one that waits for storage.
            if self.is_read(cx, id) {
                continue;
            }
            let order = self.victims(|live| {
                let spared = live.preemptions >= self.cfg.max_preemptions;
                !spared && rank.outranks(live.rank(), gap)
            });
            if order.is_empty() {
                return;
            }
            self.take_place(cx, id, &order, draft);
        }
    }

    fn take_place(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
        order: &[RequestId],
        draft: &mut Draft,
    ) {
        let full = count(self.running.len()) >= self.cfg.max_running;
        let found = self.find(cx, id);
        if found.cached.below() > 0 && cx.cache.is_coming(&found.lease) {
            cx.cache.end(found.lease, Fate::Unused, cx.now);
            return;
        }
        let available = cx.cache.available(device(self.cfg.replica));
        let missing = found.needed_pages.saturating_sub(available);
        let in_transit = match missing {
            0 => 0,
            _ => cx.cache.returning(device(self.cfg.replica)),
        };
        if in_transit > 0 && in_transit >= missing && !full {
            cx.cache.end(found.lease, Fate::Unused, cx.now);
            return;
        }
        let missing = missing.saturating_sub(in_transit);
        let mut leased = Vec::new();
        cx.cache.pages(&found.lease, &mut leased);
        let leaving = self.leaving();
        let victims = match (full, missing) {
            (false, 0) => None,
            (true, 0) => Some(order[..1].to_vec()),
            (_, _) => self.fewest(order, &leaving, missing, &leased),
        };
        let Some(victims) = victims else {
            cx.cache.end(found.lease, Fate::Unused, cx.now);
            return;
        };
        let when = self.give_way(cx, &victims, draft);
        let room = count(self.running.len()) < self.cfg.max_running
            && found.needed_pages <= cx.cache.available(device(self.cfg.replica));
        if when == Yield::Later || !room {
            cx.cache.end(found.lease, Fate::Unused, cx.now);
            self.claim = Some(id);
            return;
        }
        if let Ok(mut copies) = self.seat(cx, id, found) {
            draft.copies.append(&mut copies);
            self.plan_chunk(cx, draft, id);
        }
    }

    /// Running requests that pass the filter and are not giving way already, first to give way
    /// first.
    fn victims(&self, filter: impl Fn(&Live) -> bool) -> Vec<RequestId> {
        let mut order: Vec<&Live> = self
            .seated()
            .filter(|live| live.can_give_way() && filter(live))
            .collect();
        order.sort_by_key(|live| live.victim_key(self.cfg.max_preemptions));
        order.iter().map(|live| live.id).collect()
    }

    /// The fewest of `order`, from its front, that free `wanted` pages together with those that
    /// are leaving anyway; None when all of them are too few.
    fn fewest(
        &self,
        order: &[RequestId],
        leaving: &BTreeSet<RequestId>,
        wanted: u32,
        kept: &[PageId],
    ) -> Option<Vec<RequestId>> {
        let mut gone = leaving.clone();
        let mut chosen = Vec::new();
        for &id in order {
            gone.insert(id);
            chosen.push(id);
            if self.freed_by(&gone, kept) >= wanted {
                break;
            }
        }
        if chosen.is_empty() || self.freed_by(&gone, kept) < wanted {
            return None;
        }
        // The last was needed; an earlier one may have become superfluous by it.
        for at in (0..chosen.len() - 1).rev() {
            gone.remove(&chosen[at]);
            if self.freed_by(&gone, kept) >= wanted {
                chosen.remove(at);
            } else {
                gone.insert(chosen[at]);
            }
        }
        Some(chosen)
    }

    /// Pages that become free or evictable when all of `gone` have left and `kept` stay leased:
    /// their private ones, and those leased by nobody else.
    fn freed_by(&self, gone: &BTreeSet<RequestId>, kept: &[PageId]) -> u32 {
        if gone.is_empty() {
            return 0;
        }
        let holds = |id: &RequestId| self.live[id].holding();
        let private: u32 = gone
            .iter()
            .filter_map(holds)
            .map(Holding::private_pages)
            .sum();
        let stay = self
            .running
            .iter()
            .chain(&self.draining)
            .filter(|id| !gone.contains(id));
        let mut others: Vec<PageId> = kept.to_vec();
        stay.filter_map(holds)
            .for_each(|hold| others.extend_from_slice(hold.leased()));
        others.sort_unstable();
        let mut leased: Vec<PageId> = Vec::new();
        gone.iter()
            .filter_map(holds)
            .for_each(|hold| leased.extend_from_slice(hold.leased()));
        leased.sort_unstable();
        leased.dedup();
        private
            + count(
                leased
                    .iter()
                    .filter(|page| others.binary_search(page).is_err())
                    .count(),
            )
    }

    /// Those whose pages are coming back with a step in flight.
    fn leaving(&self) -> BTreeSet<RequestId> {
        let yielding = self.seated().filter(|live| live.is_yielding());
        let yielding = yielding.map(|live| live.id);
        yielding.chain(self.draining.iter().copied()).collect()
    }

    /// Whether a running request gives way with its step in flight.
    pub(crate) fn someone_yields(&self) -> bool {
        self.seated().any(Live::is_yielding)
    }

    fn give_way(&mut self, cx: &mut Cx<'_>, victims: &[RequestId], draft: &mut Draft) -> Yield {
        let mut when = Yield::Now;
        for &id in victims {
            draft.withdraw(id);
            let live = self.live.get_mut(&id).expect("a victim is live");
            // Speculative work does not come back.
            let idle = live.class == Class::Speculative;
            let spent = live.preemptions >= self.cfg.max_preemptions;
            let landing = live.is_in_flight();
            if landing {
                when = Yield::Later;
            }
            if idle {
                self.end(cx, id, FinishReason::Displaced);
            } else if spent {
                self.end(cx, id, FinishReason::TooManyPreemptions);
            } else if !landing {
                self.preempt(cx, id);
            } else if let Some(run) = live.running_mut() {
                run.yielding = true;
            }
        }
        when
    }

    /// Puts a seated request without steps in flight back into the queue.
    pub(crate) fn preempt(&mut self, cx: &mut Cx<'_>, id: RequestId) {
        let live = self.live.get_mut(&id).expect("a victim is live");
        let usable = cx.cache.total(device(self.cfg.replica));
        if pages_for(live.len(), self.cfg.page_tokens) > usable {
            self.end(cx, id, FinishReason::OutOfPages);
            return;
        }
        live.preemptions += 1;
        live.waiting_since.get_or_insert(cx.now);
        let leased = live.holding().map_or(0, Holding::leased_tokens);
        (live.cached_probe, live.device_probe) = (leased, leased);
        match std::mem::replace(&mut live.phase, Phase::Preempted) {
            Phase::Running(run) => {
                assert!(
                    run.flight.is_empty(),
                    "a request with steps in flight holds its pages"
                );
                let fate = self.fate_of_preempted(leased);
                run.hold.close(cx.cache, fate, cx.now);
            }
            Phase::Fetching(fetch) => fetch.hold.close(cx.cache, Fate::Keep, cx.now),
            Phase::Queued | Phase::Preempted | Phase::Draining(_) => {}
        }
        self.running.remove(&id);
        self.stats.preemptions += 1;
        self.enqueue(id, cx.now);
    }
}

impl Live {
    /// The pages the request holds, if it holds any.
    pub(crate) fn holding(&self) -> Option<&Holding> {
        match &self.phase {
            Phase::Running(run) => Some(&run.hold),
            Phase::Fetching(fetch) => Some(&fetch.hold),
            Phase::Draining(rest) => Some(&rest.hold),
            Phase::Queued | Phase::Preempted => None,
        }
    }
}
