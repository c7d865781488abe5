//! Prefixes on the host tier: whether copying one up is worth it, and what happens when the copy
//! has ended.
//!
//! ```text
//!   admitted, copying is quicker       -> Fetching: all pages reserved, a copy out
//!   copy done                          -> Running: the lease covers what came
//!   copy failed, or brought less       -> Running: the rest is computed
//!     and the rest's pages are gone    -> back to the queue, in its old place
//!   abort, deadline, giving way        -> everything goes back; the copy lands in the cache
//! ```
//! Where the backend orders each layer of a step behind its copies, the first row does not wait for
//! the copy to end:
//! ```text
//!   admitted, and there is budget      -> Running on pages in transit; plans name the copy
//!   copy done                          -> the lease covers what came
//!   copy failed                        -> its steps fail, and the request with them
//! ```
//! A fetch blocks nobody: the step goes on without the request. It holds a seat and its pages. A
//! request never fetches again after a copy for it has failed, so it cannot fail for ever.

use rootstock_radix::{Fate, Key, Served};
use smallvec::SmallVec;

use crate::draft::Draft;
use crate::emit::{CachedTokens, Emit, FailKind, FinishReason};
use crate::holding::{Holding, pages_for};
use crate::live::{Fetching, Live, Phase, Running};
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};
use crate::stats::SchedulerStats;

impl Scheduler {
    /// Whether copying these tokens up is at least as quick as computing them.
    pub(crate) fn worth_fetching(&self, tokens: u32) -> bool {
        tokens > 0 && self.copying_ns(tokens) <= self.computing_ns(tokens)
    }

    /// What becomes of the KV of a request that gives way: copied down when that, and up again, is
    /// quicker than computing it once more.
    pub(crate) fn fate_of_preempted(&self, tokens: u32) -> Fate {
        let worth = self.copying_ns(tokens).saturating_mul(2) < self.computing_ns(tokens);
        if worth { Fate::Preempted } else { Fate::Keep }
    }

    fn copying_ns(&self, tokens: u32) -> u64 {
        let pages = u64::from(pages_for(tokens, self.cfg.page_tokens));
        u64::from(self.cfg.copy_ns) + pages * u64::from(self.cfg.copy_ns_per_page)
    }

    fn computing_ns(&self, tokens: u32) -> u64 {
        u64::from(tokens).saturating_mul(self.order.prefill_ns_per_token)
    }

    /// Whether a seated request fetches the very page that a waiting one needs next.
    pub(crate) fn fetched_by_another(&self, id: RequestId) -> bool {
        let live = &self.live[&id];
        let page = self.cfg.page_tokens;
        let (from, to) = (live.device_probe, live.device_probe + page);
        if live.cached_probe < to {
            return false;
        }
        let wanted = &live.tokens[..to as usize];
        let fetches = |other: &Live| {
            let (hold, until) = match &other.phase {
                Phase::Fetching(fetch) => (&fetch.hold, fetch.until),
                Phase::Running(run) if run.hold.stands() => (&run.hold, run.hold.covered_tokens()),
                Phase::Queued | Phase::Preempted | Phase::Running(_) | Phase::Draining(_) => {
                    return false;
                }
            };
            hold.leased_tokens() <= from
                && until >= to
                && other.ns == live.ns
                && other.tokens.get(..to as usize) == Some(wanted)
        };
        self.seated().any(fetches)
    }

    /// Seats whose copies have ended start to compute.
    pub(crate) fn settle_fetches(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        let ended = |live: &&Live| match &live.phase {
            Phase::Fetching(fetch) => !fetch.hold.is_fetching(cx.cache),
            Phase::Queued | Phase::Preempted | Phase::Running(_) | Phase::Draining(_) => false,
        };
        let ended = self.seated().filter(ended).map(|live| live.id);
        for id in ended.collect::<Vec<RequestId>>() {
            self.settle_fetch(cx, draft, id);
        }
        if self.cfg.begin_in_transit {
            self.end_lost(cx);
        }
    }

    /// Requests that stood on a copy that failed, and have no step in flight that would tell.
    fn end_lost(&mut self, cx: &mut Cx<'_>) {
        let lost = |id: &&RequestId| {
            let run = self.live[id].running();
            run.is_some_and(|run| run.flight.is_empty() && run.hold.is_lost(cx.cache))
        };
        let lost: Vec<RequestId> = self.running.iter().filter(lost).copied().collect();
        for id in lost {
            self.stats.fetches_failed += 1;
            self.end(cx, id, FinishReason::Failed(FailKind::Step));
        }
    }

    fn settle_fetch(&mut self, cx: &mut Cx<'_>, draft: &mut Draft, id: RequestId) {
        let page_tokens = self.cfg.page_tokens;
        let live = self.live.get_mut(&id).expect("a seated request is live");
        let waits = if live.preemptions > 0 {
            Phase::Preempted
        } else {
            Phase::Queued
        };
        let Phase::Fetching(fetch) = std::mem::replace(&mut live.phase, waits) else {
            return;
        };
        let Fetching {
            mut hold,
            found,
            until,
            pages: _,
        } = fetch;
        let promised = until - hold.leased_tokens();
        let key = Key {
            ns: live.ns,
            tokens: &live.tokens,
        };
        let gained = hold.arrive(cx.cache, key, live.len() - 1, cx.now);
        let fetched = gained.min(promised);
        live.fetch_failed = fetched < promised;
        self.stats.fetches_failed += u64::from(live.fetch_failed);
        self.stats.fetched_tokens += u64::from(fetched);
        self.stats.shared_tokens += u64::from(gained - fetched);
        let wanted = pages_for(live.len(), page_tokens);
        match hold.promise(cx.cache, wanted, cx.now) {
            Ok(mut copies) => draft.copies.append(&mut copies),
            Err(_) => {
                live.cached_probe = hold.leased_tokens();
                live.device_probe = live.cached_probe;
                hold.close(cx.cache, Fate::Keep, cx.now);
                self.running.remove(&id);
                self.enqueue(id, cx.now);
                return;
            }
        }
        // What was read from storage stands behind what host had.
        let cached = CachedTokens {
            host: fetched.min(found.host),
            storage: fetched.saturating_sub(found.host),
            ..found
        };
        self.begin(cx, id, hold, cached);
    }

    /// A seated request whose copy is under way starts to compute, on the pages that the copy
    /// fills, where the backend allows that.
    pub(crate) fn begin_in_transit(&mut self, cx: &mut Cx<'_>, id: RequestId) {
        let live = self.live.get_mut(&id).expect("a seated request is live");
        let fetching = |phase: &mut Phase| match phase {
            Phase::Fetching(fetch) => fetch.hold.is_fetching(cx.cache),
            Phase::Queued | Phase::Preempted | Phase::Running(_) | Phase::Draining(_) => false,
        };
        if !self.cfg.begin_in_transit || !fetching(&mut live.phase) {
            return;
        }
        let phase = std::mem::replace(&mut live.phase, Phase::Queued);
        let Phase::Fetching(fetch) = phase else {
            return;
        };
        let Fetching {
            mut hold,
            found,
            until,
            pages,
        } = fetch;
        let fetched = until - hold.leased_tokens();
        let cached = CachedTokens {
            host: fetched.min(found.host),
            storage: fetched.saturating_sub(found.host),
            ..found
        };
        hold.stand_on(&pages);
        self.stats.begun_in_transit += 1;
        self.begin(cx, id, hold, cached);
        let live = self.live.get_mut(&id).expect("a seated request is live");
        if let Some(run) = live.running_mut() {
            (run.computed, run.launched) = (until, until);
        }
    }

    /// A seated request starts to compute after what it has.
    pub(crate) fn begin(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
        hold: Holding,
        cached: CachedTokens,
    ) {
        let live = self.live.get_mut(&id).expect("a seated request is live");
        let computed = hold.leased_tokens();
        if live.first_admission.is_none() && live.class == Class::Client {
            let served = Served {
                prompt_tokens: live.prompt_tokens.into(),
                device_tokens: cached.device.into(),
                host_tokens: cached.host.into(),
                storage_tokens: cached.storage.into(),
            };
            cx.cache.served(hold.lease(), served);
        }
        live.phase = Phase::Running(Running {
            hold,
            computed,
            launched: computed,
            pending: 0,
            flight: SmallVec::new(),
            last_row: None,
            drafting: false,
            yielding: false,
        });
        if live.first_admission.is_some() {
            return;
        }
        live.first_admission = Some((cx.now, cached));
        let coming = cached.host + cached.storage;
        let computed = computed.max(cached.device + coming).min(live.len());
        let (tenant, uncached) = (live.tenant, live.len() - computed);
        let billed = live.class == Class::Client;
        if billed {
            self.stats.prompt_tokens += u64::from(live.prompt_tokens);
            self.stats.cached_tokens += u64::from(cached.total());
        }
        cx.out.push(Emit::Started {
            request: id,
            label: live.label,
            cached,
            prompt_tokens: live.prompt_tokens,
        });
        if billed {
            self.queue.charge(tenant, uncached);
        }
    }
}

impl Live {
    /// Takes up what has arrived of the pages that its rows stand on. False: they never will hold
    /// what they should.
    pub(crate) fn settle_in_transit(
        &mut self,
        cx: &mut Cx<'_>,
        stats: &mut SchedulerStats,
    ) -> bool {
        let Live {
            tokens, ns, phase, ..
        } = self;
        let Phase::Running(run) = phase else {
            return true;
        };
        if !run.hold.stands() {
            return true;
        }
        let before = run.hold.leased_tokens();
        let right = run.hold.settle(cx.cache, Key { ns: *ns, tokens }, cx.now);
        stats.fetched_tokens += u64::from(run.hold.leased_tokens() - before);
        right
    }
}
