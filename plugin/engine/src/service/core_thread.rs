//! The core thread: the only owner of the serving core.
//!
//! One turn: wait for a message, take all that are there, apply them in order, look at the wishes
//! of tickets, plan for every replica that has room, then hand events to their readers. Planning
//! comes before delivery so that the engine is never kept waiting for channels.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rootstock::ServingCore;
use rootstock::memory::{CopyDone, Nanos, ReplicaId, StepId, StoreEngine, StoreEvent};
use rootstock::radix::{FlushRefused, NamespaceKey};
use rootstock::scheduler::{
    Admission, Class, Emit, FailKind, FinishReason, NewRequest, RequestId, StepPlan,
};

use super::Shared;
use super::attach::{Arrival, Departure};
use super::clock::Clock;
use super::deliver::Live;
use super::engine_thread::{Outcome, text};
use super::kv_teller::KvTeller;
use super::request::{Event, SubmitError, SubmitMessage};
use super::stats::Stats;
use super::store;
use super::visit::{Visit, Visitor};
use super::watch::Watch;
use super::wish::Wish;

/// With requests waiting and nothing running, time alone can change things (deadlines).
const WAITING_TICK: Duration = Duration::from_millis(20);
/// Between two looks at a time that is already due, should nothing come of it.
const LEAST_WAIT: Duration = Duration::from_millis(1);
/// An idle service recounts itself after this long, out of the way of the next request.
const IDLE_CHECK_AFTER: Duration = Duration::from_millis(500);

/// What the core thread is told.
#[derive(Debug)]
pub(super) enum Message {
    /// A new request.
    Submit(Box<SubmitMessage>),
    /// A ticket's wish is set.
    Wake,
    /// Empty the cache.
    Flush(flume::Sender<Result<(), FlushRefused>>),
    /// Somebody wants to see the core.
    Visit(Visitor),
    /// Tell the sink of cache events all that is cached.
    TellAllCached,
    /// Answer when no request is live.
    TellWhenIdle(flume::Sender<()>),
    /// Abort every request.
    AbortAll,
    /// A step is over.
    Step(Box<Outcome>),
    /// Copies are over.
    Copies(Vec<CopyDone>),
    /// A storage tier is to be used.
    Attach(Arrival),
    /// The storage tier is to be used no more.
    Detach(Departure),
    /// A store has ended, and had this to tell.
    StoreEnded(Vec<StoreEvent>),
    /// An engine thread has ended.
    EngineGone(ReplicaId),
    /// The last handle is gone.
    Stop,
}

/// The way to one replica's engine thread.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) replica: ReplicaId,
    pub(super) plans: flume::Sender<StepPlan>,
    /// Set when a plan that overtakes has been sent.
    pub(super) pause: Arc<AtomicBool>,
    pub(super) flying: VecDeque<StepId>,
}

/// Everything the core thread owns.
pub(super) struct CoreThread {
    pub(super) core: ServingCore,
    pub(super) clock: Clock,
    pub(super) inbox: flume::Receiver<Message>,
    pub(super) ports: Vec<Port>,
    pub(super) shared: Arc<Shared>,
    /// Model and numerics part of every namespace.
    pub(super) namespace: NamespaceKey,
    pub(super) live: BTreeMap<u64, Live>,
    pub(super) next_label: u64,
    pub(super) stats: Stats,
    pub(super) emits: Vec<Emit>,
    /// Events on their way to readers; empty between turns.
    pub(super) outgoing: Vec<(flume::Sender<Event>, Event)>,
    pub(super) when_idle: Vec<flume::Sender<()>>,
    pub(super) kv_events: Option<KvTeller>,
    pub(super) storage: Option<Box<dyn StoreEngine>>,
    pub(super) watch: Watch,
    /// Work was done since the last idle check.
    pub(super) dirty: bool,
}

enum Turn {
    Go,
    Stop,
}

impl CoreThread {
    /// Runs until told to stop. A panic of the core (a broken invariant) ends the service, not
    /// the promises: every live request gets its final event.
    pub(super) fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.turns()));
        if let Err(panic) = outcome {
            tracing::error!("the core panicked, the service is dead: {}", text(&*panic));
            self.shared.dead.store(true, Ordering::Release);
        }
        let dead = self.shared.dead.load(Ordering::Acquire);
        let reason = if dead {
            FinishReason::Failed(FailKind::Step)
        } else {
            FinishReason::Aborted
        };
        self.end_all_without_core(reason);
        self.publish(false);
    }

    fn turns(&mut self) {
        let mut batch = Vec::new();
        loop {
            batch.extend(self.wait());
            batch.extend(self.inbox.try_iter());
            let now = self.clock.now();
            for message in batch.drain(..) {
                if matches!(self.apply(message, now), Turn::Stop) {
                    return;
                }
            }
            self.grant_wishes(now);
            self.core.tick(now);
            if let Some(storage) = &mut self.storage {
                store::hear(&mut **storage, &mut self.core, now);
            }
            self.plan(now);
            if let Some(storage) = &mut self.storage {
                store::feed(&mut **storage, &mut self.core, now);
            }
            self.deliver(now);
            if let Some(teller) = &mut self.kv_events {
                teller.tell(&mut self.core);
            }
            if self.is_idle() && !self.when_idle.is_empty() {
                self.check_idle();
                self.publish(true);
                for waiter in self.when_idle.drain(..) {
                    let _gave_up_waiting = waiter.try_send(());
                }
            }
        }
    }

    /// No request is live and no step is under way.
    fn is_idle(&self) -> bool {
        self.live.is_empty() && self.ports.iter().all(|port| port.flying.is_empty())
    }

    /// The next message; None when only time has passed. With nothing to wait for, blocks without
    /// a limit.
    fn wait(&mut self) -> Option<Message> {
        let flying = self.ports.iter().any(|port| !port.flying.is_empty());
        let idle = self.live.is_empty();
        let due = self.core.due_at().map(|due| {
            let now = self.clock.now();
            Duration::from_nanos(due.saturating_sub(now)).max(LEAST_WAIT)
        });
        let own = match (flying, idle) {
            (true, _) => None,
            (false, true) => self.dirty.then_some(IDLE_CHECK_AFTER),
            (false, false) => Some(WAITING_TICK),
        };
        let Some(limit) = due.into_iter().chain(own).min() else {
            return self.inbox.recv().ok().or(Some(Message::Stop));
        };
        match self.inbox.recv_timeout(limit) {
            Ok(message) => Some(message),
            Err(flume::RecvTimeoutError::Disconnected) => Some(Message::Stop),
            Err(flume::RecvTimeoutError::Timeout) => {
                if self.dirty && self.is_idle() && limit >= IDLE_CHECK_AFTER {
                    self.check_idle();
                }
                None
            }
        }
    }

    fn apply(&mut self, message: Message, now: Nanos) -> Turn {
        match message {
            Message::Submit(submit) => self.submit(*submit, now),
            Message::Wake => {}
            Message::Flush(reply) => {
                // A caller that is gone needs no answer.
                let _gone = reply.try_send(self.core.flush(now));
            }
            Message::Visit(visitor) => {
                self.dirty = true;
                (visitor.0)(Visit {
                    core: &mut self.core,
                    namespace: &self.namespace,
                    now,
                });
            }
            Message::TellAllCached => {
                if let Some(teller) = &mut self.kv_events {
                    teller.want_snapshot();
                }
            }
            Message::TellWhenIdle(waiter) => self.when_idle.push(waiter),
            Message::AbortAll => self.end_all(FinishReason::Aborted, now),
            Message::Step(outcome) => self.step_over(*outcome, now),
            Message::Copies(done) => {
                done.into_iter()
                    .for_each(|done| self.core.copy_done(done, now));
            }
            Message::Attach(arrival) => self.attach(arrival),
            Message::Detach(departure) => self.detach(&departure, now),
            Message::StoreEnded(rest) => self.store_ended(rest, now),
            Message::EngineGone(replica) => self.engine_gone(replica, now),
            Message::Stop => {
                self.end_all(FinishReason::Aborted, now);
                self.deliver(now);
                return Turn::Stop;
            }
        }
        Turn::Go
    }

    fn submit(&mut self, message: SubmitMessage, now: Nanos) {
        let SubmitMessage {
            submission,
            events,
            control,
            reply,
        } = message;
        if self.shared.dead.load(Ordering::Acquire) {
            let _gone = reply.try_send(Err(SubmitError::EngineDead));
            return;
        }
        self.dirty = true;
        let key = NamespaceKey {
            salt: submission.salt,
            ..self.namespace.clone()
        };
        let label = self.next_label;
        self.next_label += 1;
        let (grammar, class) = (submission.grammar, submission.class);
        let admission = self.core.namespace(&key).map(|ns| {
            let request = NewRequest {
                tenant: submission.tenant,
                ns,
                tokens: submission.tokens,
                max_tokens: submission.max_tokens,
                min_tokens: submission.min_tokens,
                stop_tokens: submission.stop_tokens,
                ignore_eos: submission.ignore_eos,
                sampling: submission.sampling,
                hints: submission.hints,
                class,
                deadline: submission.patience.map(|patience| after(now, patience)),
                label,
            };
            self.core.add(request, now)
        });
        let answer = match admission {
            Ok(Admission::Admitted(request)) => {
                self.stats.admitted += u64::from(class == Class::Client);
                // A wish that came before the request was live has to be looked at again.
                if control.wish().is_some() {
                    self.shared.wishes.count();
                }
                self.shared.begin(request, grammar.as_ref());
                self.live
                    .insert(label, Live::new(request, events, control, class));
                Ok(())
            }
            Ok(Admission::Deferred {
                queue_len,
                queue_cap,
                retry_after_s,
            }) => {
                self.stats.deferred += 1;
                Err(SubmitError::Deferred {
                    queue_len,
                    queue_cap,
                    retry_after_s,
                })
            }
            Ok(Admission::Rejected(reason)) => {
                self.stats.rejected += 1;
                Err(SubmitError::Rejected(reason))
            }
            Err(error) => {
                self.stats.rejected += 1;
                Err(SubmitError::Namespace(error))
            }
        };
        // A caller that gave up has dropped its ticket, which aborts the request.
        let _gone = reply.try_send(answer);
    }

    fn step_over(&mut self, outcome: Outcome, now: Nanos) {
        let Outcome {
            replica,
            step,
            result,
            took,
            tokens,
            class,
        } = outcome;
        if let Some(port) = self.ports.iter_mut().find(|port| port.replica == replica) {
            port.flying.retain(|flying| *flying != step);
        }
        match result {
            Ok(output) => {
                self.stats.steps += 1;
                self.stats.computed_tokens += tokens;
                self.stats.step_s.observe(class, took);
                self.core.complete(replica, step, &output, now);
            }
            Err(error) => {
                tracing::error!(replica = replica.0, "{error}");
                self.stats.steps_failed += 1;
                self.core.fail_step(replica, step, now);
                if error.is_fatal() {
                    self.engine_gone(replica, now);
                }
            }
        }
    }

    /// No step of this replica will ever end: fail what it has, and stop serving.
    fn engine_gone(&mut self, replica: ReplicaId, now: Nanos) {
        if !self.shared.dead.swap(true, Ordering::AcqRel) {
            tracing::error!(
                replica = replica.0,
                "the engine thread is gone, the service is dead"
            );
        }
        for port in self.ports.iter_mut().filter(|port| port.replica == replica) {
            for step in std::mem::take(&mut port.flying) {
                self.core.fail_step(replica, step, now);
            }
        }
        self.end_all(FinishReason::Failed(FailKind::Step), now);
    }

    fn grant_wishes(&mut self, now: Nanos) {
        if !self.shared.wishes.take() {
            return;
        }
        for live in self.live.values() {
            match live.control.wish() {
                Some(Wish::Finish) => {
                    self.core
                        .finish(live.request, FinishReason::StopString, now);
                }
                Some(Wish::Abort) => {
                    self.core.abort(live.request, now);
                }
                None => {}
            }
        }
    }

    /// Fills every replica up to its number of steps in flight.
    fn plan(&mut self, now: Nanos) {
        if self.shared.dead.load(Ordering::Acquire) {
            return;
        }
        let mut gone = None;
        for port in &mut self.ports {
            while let Some(plan) = self.core.schedule(port.replica, now) {
                let overtakes = plan.overtakes;
                port.flying.push_back(plan.id);
                // The channel holds as many plans as may be in flight: only a dead thread fails.
                if port.plans.try_send(plan).is_err() {
                    gone = Some(port.replica);
                    break;
                }
                if overtakes {
                    port.pause.store(true, Ordering::Release);
                }
            }
        }
        if let Some(replica) = gone {
            self.engine_gone(replica, now);
        }
    }

    fn end_all(&mut self, reason: FinishReason, now: Nanos) {
        let requests: Vec<RequestId> = self.live.values().map(|live| live.request).collect();
        for request in requests {
            if reason == FinishReason::Aborted {
                self.core.abort(request, now);
            } else {
                self.core.finish(request, reason, now);
            }
        }
    }

    /// Idle law: no request left behind, nothing leased or held, and a full recount agrees. A
    /// breach is told and counted; the service goes on.
    fn check_idle(&mut self) {
        self.dirty = false;
        self.stats.idle_checks += 1;
        if let Err(corruption) = self.core.check_idle() {
            self.stats.idle_breaches += 1;
            tracing::error!("idle recount: {corruption}");
        }
        if !self.core.is_idle() {
            self.stats.idle_breaches += 1;
            tracing::error!("the core has requests of which the service knows nothing");
        }
    }

    pub(super) fn publish(&mut self, with_core: bool) {
        self.stats.live = self.live.len() as u64;
        if with_core {
            self.stats.core = Some(self.core.stats());
            self.stats.store = self.storage.as_ref().map(|store| store.stats());
            let journal = self
                .stats
                .core
                .as_ref()
                .and_then(|core| core.journal.as_ref());
            if let Some(line) = self.watch.journal(journal) {
                tracing::error!("{line}");
            }
            if let Some(line) = self
                .watch
                .store(self.stats.store.as_ref(), self.clock.now())
            {
                tracing::warn!("{line}");
            }
        }
        let mut shared = self
            .shared
            .stats
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        shared.clone_from(&self.stats);
    }
}

/// A moment on the core's clock, as far as it reaches.
fn after(now: Nanos, wait: Duration) -> Nanos {
    let wait = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
    now.saturating_add(wait)
}
