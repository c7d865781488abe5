//! The scheduler's state and its edge: add, abort, finish, and the clockwork around a step.
//!
//! What is where: `policy.rs` and `queue.rs` order those who wait, `batch.rs` fills a step,
//! `admit.rs` gives seats, `preempt.rs` takes them back, `settle.rs` takes results in,
//! `holding.rs` owns pages, `check.rs` recounts everything.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rootstock_memory::{Nanos, StepId};
use rootstock_radix::{Fate, PrefixCache};

use crate::admit::Pace;
use crate::config::{ConfigError, SchedulerConfig};
use crate::emit::{Admission, Emit, FinishReason, Reason};
use crate::gate::Held;
use crate::groups::path_of;
use crate::holding::{device, pages_for};
use crate::live::{Draining, Live, Next, Phase, count};
use crate::lookup::Record;
use crate::policy::{Order, QueueKey, seconds_to_ns};
use crate::programs::Programs;
use crate::queue::{Entry, WaitQueue};
use crate::rematch::Rematch;
use crate::request::{Class, NewRequest, RequestId};
use crate::settle::Flight;
use crate::stats::SchedulerStats;
use crate::time::StepTime;

/// Wait after which a request that does not fit keeps later ones from passing, while aging is
/// off.
const PATIENCE_NS: u64 = 30_000_000_000;

/// What a call works with.
pub(crate) struct Cx<'a> {
    pub(crate) cache: &'a mut PrefixCache,
    pub(crate) now: Nanos,
    pub(crate) out: &'a mut Vec<Emit>,
}

/// Decides which request computes which chunk in the next step of one replica.
///
/// The cache is an argument of every call that touches pages: one cache serves the schedulers of
/// all replicas. Pass the same one every time.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) cfg: SchedulerConfig,
    pub(crate) order: Order,
    pub(crate) live: BTreeMap<RequestId, Live>,
    pub(crate) queue: WaitQueue,
    /// Waiting outside of the queue: somebody else decides when they may start.
    pub(crate) aside: BTreeSet<RequestId>,
    /// Waiting beside the queue for a place of their program, in the order of the queue, and by the
    /// time at which they have waited for long enough.
    pub(crate) held: BTreeSet<QueueKey>,
    pub(crate) held_until: BTreeSet<Held>,
    pub(crate) held_places: BTreeMap<RequestId, Held>,
    pub(crate) programs: Programs,
    /// Who is to be looked up in the cache again.
    pub(crate) rematch: Rematch,
    /// Live speculative requests without their final event.
    pub(crate) speculative: BTreeSet<RequestId>,
    pub(crate) running: BTreeSet<RequestId>,
    pub(crate) draining: BTreeSet<RequestId>,
    /// Deadlines, and ends of patience of those that have not run.
    pub(crate) expiry: BTreeSet<(Nanos, RequestId)>,
    /// Steps out, oldest first.
    pub(crate) flights: VecDeque<Flight>,
    /// The waiting request for which others are giving way.
    pub(crate) claim: Option<RequestId>,
    /// The first that found no seat or no pages when it was last tried.
    pub(crate) turned_away: Option<RequestId>,
    pub(crate) pace: Pace,
    pub(crate) time: StepTime,
    /// How well texts foretell themselves, over all requests.
    pub(crate) guessed: Record,
    /// When the last step landed.
    pub(crate) landed_at: Nanos,
    pub(crate) next_step: u64,
    next_request: u64,
    /// Events of calls that return none.
    pub(crate) outbox: Vec<Emit>,
    pub(crate) stats: SchedulerStats,
}

impl Scheduler {
    /// An empty scheduler.
    ///
    /// # Errors
    /// A configuration value out of range.
    pub fn new(cfg: SchedulerConfig) -> Result<Self, ConfigError> {
        cfg.validate()?;
        Ok(Self {
            order: Order::new(&cfg),
            cfg,
            live: BTreeMap::new(),
            queue: WaitQueue::default(),
            aside: BTreeSet::new(),
            held: BTreeSet::new(),
            held_until: BTreeSet::new(),
            held_places: BTreeMap::new(),
            programs: Programs::default(),
            rematch: Rematch::default(),
            speculative: BTreeSet::new(),
            running: BTreeSet::new(),
            draining: BTreeSet::new(),
            expiry: BTreeSet::new(),
            flights: VecDeque::new(),
            claim: None,
            turned_away: None,
            pace: Pace::default(),
            time: StepTime::default(),
            guessed: Record::default(),
            landed_at: 0,
            next_step: 1,
            next_request: 1,
            outbox: Vec::new(),
            stats: SchedulerStats::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &SchedulerConfig {
        &self.cfg
    }

    /// Takes a request into the queue, or says why not. A request that can never run is refused
    /// here, with the numbers. A full queue defers it, unless it outranks the last of those that
    /// have not run and goes before it in the order: then that one ends as `Displaced`, with the
    /// next events.
    ///
    /// # Cost
    /// One look at the cache and a few sorted inserts.
    pub fn add(&mut self, new: NewRequest, cache: &PrefixCache, now: Nanos) -> Admission {
        let admission = self.admit_at_the_door(new, cache, now);
        if let Admission::Admitted(id) = admission {
            self.enter(cache, id, now);
        }
        admission
    }

    /// Takes a request in, without a place in the queue.
    pub(crate) fn admit_at_the_door(
        &mut self,
        new: NewRequest,
        cache: &PrefixCache,
        now: Nanos,
    ) -> Admission {
        if let Err(reason) = self.fits(&new, cache) {
            self.stats.rejected += 1;
            return Admission::Rejected(reason);
        }
        let id = RequestId::new(self.cfg.replica, self.next_request);
        let mut live = Live::new(id, new, &self.cfg, now);
        if self.order.uses_cache() {
            (live.cached_probe, live.device_probe) = self.probe(cache, &live);
        }
        let queue_len = self.waiting();
        if queue_len >= self.cfg.max_queue && !self.displace(&live, now) {
            self.stats.deferred += 1;
            let queue_cap = self.cfg.max_queue;
            let retry_after_s = self.pace.retry_after_s(queue_len);
            return Admission::Deferred {
                queue_len,
                queue_cap,
                retry_after_s,
            };
        }
        self.next_request += 1;
        self.stats.added += 1;
        self.expiry.extend(self.expiries(&live));
        if live.class == Class::Speculative {
            self.speculative.insert(id);
        }
        self.live.insert(id, live);
        Admission::Admitted(id)
    }

    /// The caller gave up. Returns the final event, or None when the request is unknown or has
    /// had it. Pages go back at once, or with the last step that may touch them.
    pub fn abort(&mut self, cache: &mut PrefixCache, id: RequestId, now: Nanos) -> Option<Emit> {
        self.finish(cache, id, FinishReason::Aborted, now)
    }

    /// The caller ends a request, for example because it found a stop string. What was computed
    /// stays cached. Returns the final event, or None when the request is unknown or has had it.
    pub fn finish(
        &mut self,
        cache: &mut PrefixCache,
        id: RequestId,
        reason: FinishReason,
        now: Nanos,
    ) -> Option<Emit> {
        let mut out = Vec::new();
        self.end(
            &mut Cx {
                cache,
                now,
                out: &mut out,
            },
            id,
            reason,
        );
        out.pop()
    }

    /// Counters and sizes.
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            waiting: self.waiting(),
            parked: count(self.aside.len()),
            held_now: count(self.held_places.len()),
            programs_inside: self.programs.inside(),
            running: count(self.running.len()),
            fetching: self.fetching(),
            draining: count(self.draining.len()),
            in_flight: count(self.flights.len()),
            ..self.stats.clone()
        }
    }

    /// Whether no request is live.
    pub fn is_idle(&self) -> bool {
        self.live.is_empty()
    }

    /// Whether nobody waits for a place or for memory.
    pub fn is_at_ease(&self) -> bool {
        self.waiting() == 0
    }

    /// When time alone changes something: a deadline or a queue timeout passes. None: nothing will.
    pub fn due_at(&self) -> Option<Nanos> {
        let expiry = self.expiry.first().map(|&(at, _)| at);
        expiry.into_iter().chain(self.gate_due_at()).min()
    }

    /// Name of the phase of a live request, for people and tests.
    pub fn phase(&self, id: RequestId) -> Option<&'static str> {
        let live = self.live.get(&id)?;
        Some(match &live.phase {
            Phase::Queued => "queued",
            Phase::Preempted => "preempted",
            Phase::Fetching(_) => "fetching",
            Phase::Running(run) if run.yielding => "yielding",
            Phase::Running(run) if run.computed < live.prompt_tokens => "prefill",
            Phase::Running(_) => "decode",
            Phase::Draining(_) => "draining",
        })
    }

    /// Requests waiting now, preempted and parked ones and those held back included.
    ///
    /// # Cost
    /// O(1), where [`Scheduler::stats`] goes through all that run.
    pub fn waiting(&self) -> u32 {
        count(self.queue.len() + self.aside.len() + self.held_places.len())
    }

    fn fetching(&self) -> u32 {
        let fetches = |live: &&Live| matches!(live.phase, Phase::Fetching(_));
        count(self.seated().filter(fetches).count())
    }

    /// Requests with a seat, by id.
    pub(crate) fn seated(&self) -> impl Iterator<Item = &Live> {
        self.running.iter().map(|id| &self.live[id])
    }

    /// Of those, the ones that can compute one more token now.
    pub(crate) fn decoding(&self) -> impl Iterator<Item = &Live> {
        self.seated().filter(|live| live.next() == Next::Decode)
    }

    /// Whether [`Scheduler::add`] would take this request, with nobody turned away for it.
    ///
    /// # Cost
    /// O(1).
    pub fn has_room_for(&self, new: &NewRequest, cache: &PrefixCache) -> bool {
        self.waiting() < self.cfg.max_queue && self.fits(new, cache).is_ok()
    }

    fn fits(&self, new: &NewRequest, cache: &PrefixCache) -> Result<(), Reason> {
        if new.tokens.is_empty() {
            return Err(Reason::Empty);
        }
        if new.max_tokens == 0 {
            return Err(Reason::MaxTokensZero);
        }
        let limit = self.cfg.max_model_len - 1;
        let tokens = u32::try_from(new.tokens.len()).unwrap_or(u32::MAX);
        if tokens > limit {
            return Err(Reason::TooLong { tokens, limit });
        }
        let needed_pages = pages_for(tokens, self.cfg.page_tokens);
        let usable_pages = cache.total(device(self.cfg.replica));
        if needed_pages > usable_pages {
            return Err(Reason::NeverFits {
                needed_pages,
                usable_pages,
            });
        }
        Ok(())
    }

    /// Makes a place in the full queue for a strictly better request, if there is a worse one.
    fn displace(&mut self, better: &Live, now: Nanos) -> bool {
        let key = self.order.key(&better.key_parts(&self.order, now));
        let unstarted = |key: &QueueKey| matches!(self.live[&key.id].phase, Phase::Queued);
        let Some(worst) = self.queue.backwards().find(unstarted) else {
            return false;
        };
        if key >= worst || better.rank() <= self.live[&worst.id].rank() {
            return false;
        }
        self.queue.remove(worst.id);
        self.speculative.remove(&worst.id);
        if let Some(live) = self.live.remove(&worst.id) {
            let last = self.last_event(&live, FinishReason::Displaced, now);
            self.outbox.push(last);
        }
        true
    }

    /// Tokens of a waiting request that are cached now: on device and host, on the device; pure.
    pub(crate) fn probe(&self, cache: &PrefixCache, live: &Live) -> (u32, u32) {
        let found = cache.probe(live.cache_key(), self.cfg.replica);
        let total = found.device_tokens + found.host_tokens;
        let most = live.len() - 1;
        (total.min(most), found.device_tokens.min(most))
    }

    /// Puts a request without a seat in its place in the queue, or gives it a new key.
    pub(crate) fn enqueue(&mut self, id: RequestId, now: Nanos) {
        let live = &self.live[&id];
        let key = self.order.key(&live.key_parts(&self.order, now));
        let (rank, tenant) = (live.rank(), live.tenant);
        let age_at = live.age_at(&self.order, now);
        self.queue.put(Entry {
            key,
            rank,
            tenant,
            age_at,
        });
        if !self.order.is_grouped() && !self.order.uses_cache() {
            return;
        }
        let page_tokens = self.cfg.page_tokens;
        if let Some(live) = self.live.get_mut(&id) {
            let path = live
                .path
                .get_or_insert_with(|| path_of(live.ns, &live.tokens, page_tokens).into());
            self.queue.groups.insert(id, live.arrival, path);
        }
    }

    pub(crate) fn expiries(&self, live: &Live) -> impl Iterator<Item = (Nanos, RequestId)> + use<> {
        let id = live.id;
        let timeout = self.queue_timeout(live.arrival);
        live.deadline
            .into_iter()
            .chain(timeout)
            .map(move |at| (at, id))
    }

    fn queue_timeout(&self, arrival: Nanos) -> Option<Nanos> {
        let s = u64::from(self.cfg.queue_timeout_s);
        (s > 0).then(|| arrival.saturating_add(s * 1_000_000_000))
    }

    /// Ends what has passed its deadline, and what has waited too long for its first step.
    pub(crate) fn expire(&mut self, cx: &mut Cx<'_>) {
        while let Some(&(at, id)) = self.expiry.first() {
            if at > cx.now {
                break;
            }
            self.expiry.pop_first();
            let live = &self.live[&id];
            let late = live.deadline.is_some_and(|d| d <= cx.now);
            if late || matches!(live.phase, Phase::Queued | Phase::Fetching(_)) {
                self.end(cx, id, FinishReason::Expired);
            }
        }
    }

    /// The one way to a final event. Does nothing for a request that has had it.
    pub(crate) fn end(&mut self, cx: &mut Cx<'_>, id: RequestId, reason: FinishReason) {
        let Some(mut live) = self.live.remove(&id) else {
            return;
        };
        if matches!(live.phase, Phase::Draining(_)) {
            self.live.insert(id, live);
            return;
        }
        let last = self.last_event(&live, reason, cx.now);
        cx.out.push(last);
        self.unhold(id);
        self.queue.remove(id);
        self.aside.remove(&id);
        self.running.remove(&id);
        self.speculative.remove(&id);
        let run = match live.phase {
            Phase::Running(run) => run,
            Phase::Fetching(fetch) => return fetch.hold.close(cx.cache, Fate::Keep, cx.now),
            Phase::Queued | Phase::Preempted | Phase::Draining(_) => return,
        };
        if run.flight.is_empty() {
            run.hold.close(cx.cache, Fate::Keep, cx.now);
        } else {
            live.phase = Phase::Draining(Draining {
                hold: run.hold,
                flight: run.flight,
            });
            self.draining.insert(id);
            self.live.insert(id, live);
        }
    }

    /// The final event, and the end of what is kept for it.
    fn last_event(&mut self, live: &Live, reason: FinishReason, now: Nanos) -> Emit {
        for entry in self.expiries(live) {
            self.expiry.remove(&entry);
        }
        self.leave_program(live, now);
        let usage = live.usage(now);
        self.stats.count_final(reason, &usage);
        self.claim = self.claim.filter(|&claimant| claimant != live.id);
        Emit::Final {
            request: live.id,
            label: live.label,
            reason,
            usage,
        }
    }

    /// Wait after which a request that does not fit lets nobody pass any more.
    pub(crate) fn patience_ns(&self) -> u64 {
        let ns = seconds_to_ns(self.cfg.aging_s);
        if ns == 0 { PATIENCE_NS } else { ns }
    }

    pub(crate) fn step_id(&mut self) -> StepId {
        let id = StepId(self.next_step);
        self.next_step += 1;
        id
    }
}
