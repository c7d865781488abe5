//! `ServingCore`: one prefix cache and one scheduler per replica behind one set of calls.
//!
//! It is what the engine's core thread, the C ABI and Python drive: plain data in, plain data
//! out. It has no thread, no clock and no randomness; `now` is an argument everywhere. Every call
//! that changes it is an input: with a [`Journal`] set, each is recorded before it takes effect.
//!
//! One step of a host, in order:
//!
//! ```text
//! add / abort / finish      as requests come and go
//! schedule(replica)         -> StepPlan: what to compute on which pages; None: nothing to do
//! (the backend computes)
//! complete | fail_step      exactly once per plan
//! drain_emits               -> what callers hear; drain after each call that may emit
//! ```

use rootstock_memory::{CopyDone, CopyId, Nanos, ReplicaId, StepId, StoreEvent, StorePlan};
use rootstock_radix::{
    Action, CacheError, CacheStats, Corruption, FlushRefused, Key, KvEvent, NamespaceId,
    NamespaceKey, Outcome, PrefixCache, Probe, TenantId,
};
use rootstock_scheduler::{
    Admission, Emit, FinishReason, NewRequest, RequestId, Scheduler, SchedulerStats, StepOutput,
    StepPlan,
};
use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::config::{ConfigError, CoreConfig};
use crate::journal::{Entry, Journal, JournalStats};
use crate::replicas::{Replicas, RouteStats};

/// Copies that a dropped core gives up at most, should giving up begin new ones for ever.
const COPIES_GIVEN_UP_MAX: usize = 1 << 20;

/// Cache and schedulers of one process.
#[derive(Debug)]
pub struct ServingCore {
    config: CoreConfig,
    cache: PrefixCache,
    schedulers: Vec<Scheduler>,
    replicas: Replicas,
    emits: Vec<Emit>,
    /// Copies that plans have carried out and nobody has acknowledged.
    copies_out: BTreeSet<CopyId>,
    /// Latest time seen.
    latest: Nanos,
    journal: Option<Journal>,
}

/// Counters of all parts.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CoreStats {
    /// Of the cache.
    pub cache: CacheStats,
    /// Of each replica's scheduler.
    pub schedulers: Vec<SchedulerStats>,
    /// How requests found their replica.
    pub routes: RouteStats,
    /// Of the journal, if one was ever set.
    pub journal: Option<JournalStats>,
}

impl ServingCore {
    /// A core with an empty cache and empty queues.
    ///
    /// # Errors
    /// The configuration is refused; the message says which value and what is possible.
    pub fn new(config: CoreConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let cache = PrefixCache::new(&config.cache)?;
        let mut schedulers = Vec::with_capacity(config.replicas());
        for index in 0..config.replicas() {
            let replica = ReplicaId(u16::try_from(index).unwrap_or(u16::MAX));
            schedulers.push(Scheduler::new(config.scheduler_of(replica))?);
        }
        let replicas = Replicas::new(&config)?;
        Ok(Self {
            config,
            cache,
            schedulers,
            replicas,
            emits: Vec::new(),
            copies_out: BTreeSet::new(),
            latest: 0,
            journal: None,
        })
    }

    /// The configuration it was built from.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Records all inputs from here on. Set it before the first input: a replay starts empty.
    /// The former journal, if any, is returned and closes when dropped.
    pub fn set_journal(&mut self, journal: Option<Journal>) -> Option<Journal> {
        std::mem::replace(&mut self.journal, journal)
    }

    /// The journal that records now.
    pub fn journal_mut(&mut self) -> Option<&mut Journal> {
        self.journal.as_mut()
    }

    /// The id of a namespace; the same key always gives the same id.
    ///
    /// # Errors
    /// The bound on namespaces is reached and none can be forgotten.
    pub fn namespace(&mut self, key: &NamespaceKey) -> Result<NamespaceId, CacheError> {
        self.input(0, || Entry::Namespace(Cow::Borrowed(key)));
        self.cache.namespace(key)
    }

    /// How much of a prompt is cached for a replica. Changes nothing.
    pub fn probe(&self, key: Key<'_>, replica: ReplicaId) -> Probe {
        self.cache.probe(key, replica)
    }

    /// Queues a request at the replica of the router's choice ([`CoreConfig::router`]), or says why
    /// not.
    ///
    /// Hints above the configured ceiling are lowered to it. Exactly one `Emit::Final` follows an
    /// `Admitted` request, whatever happens; none follows the other answers.
    pub fn add(&mut self, mut request: NewRequest, now: Nanos) -> Admission {
        self.input(now, || Entry::Add(Cow::Borrowed(&request), now));
        let ceiling = &self.config.limits.ceiling;
        let hints = &mut request.hints;
        hints.priority = hints.priority.min(ceiling.priority);
        hints.strict = hints.strict.min(ceiling.strict);
        hints.jump_s = hints.jump_s.min(ceiling.jump_s);
        let key = Key {
            ns: request.ns,
            tokens: &request.tokens,
        };
        self.cache.read_ahead(key, now);
        let Self {
            replicas,
            cache,
            schedulers,
            ..
        } = self;
        let admission = replicas.add(request, cache, schedulers, now);
        self.release(now);
        admission
    }

    /// Ends a request at its caller's wish. False when it is unknown or has already ended.
    pub fn abort(&mut self, request: RequestId, now: Nanos) -> bool {
        self.input(now, || Entry::Abort(request, now));
        self.end(request, FinishReason::Aborted, now)
    }

    /// Ends a request as finished: the caller found a stop string. Its KV stays, as at any normal
    /// end. False when it is unknown or has already ended.
    pub fn finish(&mut self, request: RequestId, reason: FinishReason, now: Nanos) -> bool {
        self.input(now, || Entry::Finish(request, reason, now));
        self.end(request, reason, now)
    }

    /// The next step of a replica. Its `copies` are all that begin at that replica's device, those
    /// that the cache began by itself (write through, pins) included; acknowledge each by
    /// [`ServingCore::copy_done`], once. A plan may have copies and no rows; it is a step like any
    /// other.
    ///
    /// None when there is nothing to compute now, when as many plans are out as may be, or when
    /// there is no such replica. It stands until an input changes something: call again for every
    /// replica after each other call, until None, and when [`ServingCore::due_at`] has come.
    pub fn schedule(&mut self, replica: ReplicaId, now: Nanos) -> Option<StepPlan> {
        self.input(now, || Entry::Schedule(replica, now));
        let before = self.emits.len();
        self.replicas
            .help(replica, &self.cache, &mut self.schedulers, now);
        let scheduler = self.schedulers.get_mut(replica_index(replica));
        let plan = scheduler
            .and_then(|scheduler| scheduler.schedule(&mut self.cache, now, &mut self.emits));
        if let Some(plan) = &plan {
            self.copies_out
                .extend(plan.copies.iter().map(|copy| copy.id));
        }
        self.heard(before);
        if let Some(journal) = &mut self.journal {
            journal.record_plan(plan.as_ref());
        }
        plan
    }

    /// Takes a step's output: what it computed becomes matchable, callers get their tokens.
    /// A step that is not out is ignored.
    pub fn complete(&mut self, replica: ReplicaId, step: StepId, output: &StepOutput, now: Nanos) {
        self.input(now, || {
            Entry::Complete(replica, step, Cow::Borrowed(output), now)
        });
        let before = self.emits.len();
        if let Some(scheduler) = self.schedulers.get_mut(replica_index(replica)) {
            scheduler.complete(&mut self.cache, step, output, now, &mut self.emits);
        }
        self.heard(before);
        self.release(now);
    }

    /// Gives up a step that failed: its requests end as failed, their pages come back, nothing of
    /// them is matchable. A step that is not out is ignored.
    pub fn fail_step(&mut self, replica: ReplicaId, step: StepId, now: Nanos) {
        self.input(now, || Entry::FailStep(replica, step, now));
        let before = self.emits.len();
        if let Some(scheduler) = self.schedulers.get_mut(replica_index(replica)) {
            scheduler.fail_step(&mut self.cache, step, now, &mut self.emits);
        }
        self.heard(before);
        self.release(now);
    }

    /// Takes the acknowledgement of a copy.
    pub fn copy_done(&mut self, done: CopyDone, now: Nanos) {
        self.input(now, || Entry::CopyDone(done, now));
        self.copies_out.remove(&done.id);
        self.cache.copy_done(done, now);
    }

    /// Takes what the owner of the storage tier tells: answers to plans, pages found or gone.
    pub fn store_event(&mut self, event: StoreEvent, now: Nanos) {
        self.input(now, || Entry::StoreEvent(Cow::Borrowed(&event), now));
        self.cache.store_event(event, now);
    }

    /// Moves all plans for the storage tier so far to `out`. Each is answered by exactly one
    /// [`StoreEvent::Done`], also when it was never begun.
    pub fn drain_store(&mut self, out: &mut Vec<StorePlan>) {
        self.cache.drain_store(out);
    }

    /// Takes a storage tier into use while requests run: see
    /// [`rootstock_radix::PrefixCache::attach_storage`].
    pub fn attach_storage(&mut self, limit_pages: u32, probes: u32) -> bool {
        self.input(0, || Entry::AttachStorage(limit_pages, probes));
        self.cache.attach_storage(limit_pages, probes)
    }

    /// Uses the storage tier no more. Plans that are out are still to be answered.
    pub fn detach_storage(&mut self) {
        self.input(0, || Entry::DetachStorage);
        self.cache.detach_storage();
    }

    /// Pages of plans for the storage tier that are not answered.
    pub fn storage_under_way(&self) -> u32 {
        self.cache.storage_under_way()
    }

    /// Lets time pass: expiries need no traffic to take effect, and what programs need that are
    /// expected soon is brought up to where they ran, unless requests wait there.
    pub fn tick(&mut self, now: Nanos) {
        self.input(now, || Entry::Tick(now));
        self.cache.tick(now);
        let schedulers = &self.schedulers;
        self.cache.bring_back(now, |replica| {
            let scheduler = schedulers.get(replica_index(replica));
            scheduler.is_some_and(Scheduler::is_at_ease)
        });
        self.release(now);
    }

    /// Carries out a verb on cached content. An importance above the configured ceiling is lowered
    /// to it.
    pub fn act(&mut self, tenant: TenantId, action: &Action, now: Nanos) -> Outcome {
        self.input(now, || Entry::Act(tenant, Cow::Borrowed(action), now));
        let most = self.config.limits.ceiling.priority;
        if let Action::Retain {
            target,
            priority,
            seconds,
        } = action
            && *priority > most
        {
            let lowered = Action::Retain {
                target: target.clone(),
                priority: most,
                seconds: *seconds,
            };
            return self.cache.act(tenant, &lowered, now);
        }
        self.cache.act(tenant, action, now)
    }

    /// Empties all tiers, or changes nothing and says why.
    ///
    /// # Errors
    /// Something is leased, held or in transit.
    pub fn flush(&mut self, now: Nanos) -> Result<(), FlushRefused> {
        self.input(now, || Entry::Flush(now));
        self.cache.flush(now)
    }

    /// Ends every request as aborted and gives up every step that is out: for a drain that ran out
    /// of time. Each live request gets its final event; results that still come are ignored.
    pub fn end_all(&mut self, now: Nanos) {
        self.input(now, || Entry::EndAll(now));
        let before = self.emits.len();
        self.end_all_unrecorded(now);
        self.heard(before);
    }

    fn end_all_unrecorded(&mut self, now: Nanos) {
        for scheduler in &mut self.schedulers {
            scheduler.end_all(&mut self.cache, now, &mut self.emits);
        }
    }

    /// The replica that has this request, from its admission to its last event.
    pub fn replica_of(&self, request: RequestId) -> ReplicaId {
        self.replicas.home(request)
    }

    /// Moves all events so far to `out`, in order. Drain after each call that may emit: they are
    /// kept until then.
    pub fn drain_emits(&mut self, out: &mut Vec<Emit>) {
        out.append(&mut self.emits);
    }

    /// Moves all cache events so far to `out`, in order.
    pub fn drain_events(&mut self, out: &mut Vec<KvEvent>) {
        self.cache.drain_events(out);
    }

    /// Appends events that tell a new consumer what is cached now; see
    /// [`PrefixCache::dump_events`].
    pub fn dump_events(&self, out: &mut Vec<KvEvent>) {
        self.cache.dump_events(out);
    }

    /// The name of a namespace, as long as it is known.
    pub fn namespace_key(&self, ns: NamespaceId) -> Option<&NamespaceKey> {
        self.cache.namespace_key(ns)
    }

    /// The latest time it was told.
    pub fn latest(&self) -> Nanos {
        self.latest
    }

    /// The cache, to look at.
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// Counters of all parts.
    pub fn stats(&self) -> CoreStats {
        CoreStats {
            cache: self.cache.stats(),
            schedulers: self.schedulers.iter().map(Scheduler::stats).collect(),
            routes: self.replicas.stats,
            journal: self.journal.as_ref().map(Journal::stats),
        }
    }

    /// Recounts everything from scratch.
    ///
    /// # Errors
    /// The first thing that does not add up.
    ///
    /// # Cost
    /// Linear in nodes and pages: for tests, and for a server that has gone idle.
    pub fn check(&self) -> Result<(), Corruption> {
        self.cache.check()?;
        self.schedulers
            .iter()
            .try_for_each(|scheduler| scheduler.check(&self.cache))
    }

    /// Recounts everything, and when no request is live and no copy is under way also the idle law:
    /// nothing is leased or held. For a server to call when it has gone idle; a breach is to be
    /// reported, not to be died of.
    ///
    /// # Errors
    /// The first thing that does not add up.
    pub fn check_idle(&self) -> Result<(), Corruption> {
        self.check()?;
        if !self.is_idle() {
            return Ok(());
        }
        let tiers = self.cache.stats().tiers;
        let storing = self.cache.storage_under_way() > 0;
        if storing || tiers.iter().any(|tier| tier.in_transit > 0) {
            return Ok(());
        }
        let busy = tiers.iter().find(|tier| tier.leased + tier.held > 0);
        if let Some(busy) = busy {
            let detail = format!("no request is live, yet pages are in use: {busy:?}");
            return Err(Corruption::new("serving core", detail));
        }
        Ok(())
    }

    /// When time alone changes something: a deadline passes, a pin expires, a program is expected.
    /// Call [`ServingCore::tick`] and schedule then, even without traffic. None: nothing will.
    pub fn due_at(&self) -> Option<Nanos> {
        let requests = self.schedulers.iter().filter_map(Scheduler::due_at).min();
        let parked = self.replicas.is_due().then_some(self.latest);
        let due = requests
            .into_iter()
            .chain(self.cache.due_at())
            .chain(self.cache.returns_at())
            .chain(parked);
        due.min()
    }

    /// Name of the phase of a live request, for people and tests.
    pub fn phase(&self, request: RequestId) -> Option<&'static str> {
        let scheduler = self
            .schedulers
            .get(replica_index(self.replicas.home(request)))?;
        scheduler.phase(request)
    }

    /// Copies that are planned and not acknowledged; a flush is refused while there are any.
    pub fn copies_under_way(&self) -> u32 {
        self.cache.stats().copies_under_way
    }

    /// True when no request is live, waiting ones included.
    pub fn is_idle(&self) -> bool {
        self.schedulers.iter().all(Scheduler::is_idle)
    }

    /// Ends a request; false when it is unknown or has already ended.
    fn end(&mut self, request: RequestId, reason: FinishReason, now: Nanos) -> bool {
        let home = replica_index(self.replicas.home(request));
        let Some(scheduler) = self.schedulers.get_mut(home) else {
            return false;
        };
        let emit = scheduler.finish(&mut self.cache, request, reason, now);
        let ended = emit.is_some();
        let before = self.emits.len();
        self.emits.extend(emit);
        self.heard(before);
        self.release(now);
        ended
    }

    /// Places parked requests where load has become less. Only at the end of an input: a request
    /// may go to a replica that was asked for a plan before.
    fn release(&mut self, now: Nanos) {
        self.replicas
            .release(&self.cache, &mut self.schedulers, now);
    }

    /// Tells router and journal which events a call has added.
    fn heard(&mut self, before: usize) {
        self.replicas.hear(&self.emits[before..], self.latest);
        if let Some(journal) = &mut self.journal {
            journal.hear(&self.emits[before..]);
        }
    }

    /// Records an input in front of its effect.
    fn input<'a>(&mut self, now: Nanos, entry: impl FnOnce() -> Entry<'a>) {
        self.latest = self.latest.max(now);
        if let Some(journal) = &mut self.journal {
            journal.record(&entry());
        }
    }
}

impl Drop for ServingCore {
    /// Gives everything back, so that dropping a core with requests running, or with copies under
    /// way, is in order.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let now = self.latest;
        self.end_all_unrecorded(now);
        // Each round gives up one copy; what it lets the cache begin instead is given up as well.
        let mut waiting = Vec::new();
        self.cache.abandon_storage(now);
        for _ in 0..COPIES_GIVEN_UP_MAX {
            self.cache.drain_copies(&mut waiting);
            self.copies_out
                .extend(waiting.drain(..).map(|copy| copy.id));
            let Some(id) = self.copies_out.pop_first() else {
                return;
            };
            self.cache.copy_done(CopyDone { id, ok: false }, now);
        }
    }
}

fn replica_index(replica: ReplicaId) -> usize {
    usize::from(replica.0)
}
