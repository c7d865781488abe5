//! The engine thread: takes plans, runs them on the backend in order, sends back the outcome.
//!
//! It keeps up to `max_in_flight` steps launched and waits for the oldest. A panic of the backend
//! is caught at the call and becomes the outcome of that step. Outcomes go back in launch order,
//! but for a plan that overtakes: when the core thread has sent one, the step under way pauses
//! where the backend can, the other runs, and its outcome goes first. When the thread ends, for
//! whatever reason, its last word says so.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rootstock::memory::{CopyDone, CopyId, CopyPlan, Nanos, ReplicaId, StepId};
use rootstock::scheduler::{StepOutput, StepPlan};
use rootstock::{Backend, StepError};

use super::clock::Clock;
use super::core_thread::Message;
use super::stats::StepClass;

/// How long the thread sleeps between looks at copies under way, when it has nothing else to do.
const COPY_POLL: Duration = Duration::from_micros(200);
/// How long it waits for a plan between looks at a step that a device computes, while another one
/// may be launched behind it.
const STEP_POLL: Duration = Duration::from_micros(100);

/// What became of a step.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) replica: ReplicaId,
    pub(super) step: StepId,
    pub(super) result: Result<StepOutput, StepError>,
    /// Time in the backend.
    pub(super) took: Nanos,
    /// Tokens put through the model.
    pub(super) tokens: u64,
    /// What they were.
    pub(super) class: StepClass,
}

/// Everything the thread owns.
pub(super) struct EngineThread {
    pub(super) backend: Box<dyn Backend>,
    pub(super) replica: ReplicaId,
    pub(super) plans: flume::Receiver<StepPlan>,
    /// Set by the core thread when it has sent a plan that overtakes.
    pub(super) pause: Arc<AtomicBool>,
    pub(super) inbox: flume::Sender<Message>,
    pub(super) clock: Clock,
}

struct Flying {
    step: StepId,
    tokens: u64,
    class: StepClass,
    launched: Result<(), StepError>,
    /// Time in the backend so far.
    took: Nanos,
}

/// Sends the last word also when the thread unwinds.
struct LastWord {
    replica: ReplicaId,
    inbox: flume::Sender<Message>,
}

impl Drop for LastWord {
    fn drop(&mut self) {
        // The core thread may have ended first; then nobody needs the word.
        let _gone = self.inbox.send(Message::EngineGone(self.replica));
    }
}

impl EngineThread {
    /// Runs until the core thread hangs up or the backend is lost.
    pub(super) fn run(mut self) {
        let _last_word = LastWord {
            replica: self.replica,
            inbox: self.inbox.clone(),
        };
        let in_flight_max = usize::from(self.backend.caps().max_in_flight.max(1));
        let mut flying: VecDeque<Flying> = VecDeque::new();
        let mut copying = Copying::default();
        loop {
            while flying.len() < in_flight_max {
                let start = self.clock.now();
                let runs = flying.front().map(|oldest| self.runs(oldest));
                match self.next_plan(Patience::of(runs, &copying)) {
                    Next::Plan(plan) => {
                        let flight = self.launch(plan, &mut copying);
                        flying.push_back(flight);
                    }
                    Next::Nothing if runs == Some(true) => {
                        if let Some(oldest) = flying.front_mut() {
                            oldest.took += self.clock.now() - start;
                        }
                        if !self.report_copies(&mut copying) {
                            return;
                        }
                    }
                    Next::Nothing => break,
                    Next::HungUp => return,
                }
            }
            if let Some(oldest) = flying.pop_front()
                && !self.land(oldest, &mut copying)
            {
                return;
            }
            if !self.report_copies(&mut copying) {
                return;
            }
        }
    }

    /// Whether a device computes a step, so that there is time to launch another.
    fn runs(&mut self, flight: &Flying) -> bool {
        let step = flight.step;
        let done = guard(step, || Ok(self.backend.is_done(step)));
        flight.launched.is_ok() && !done.unwrap_or(true)
    }

    fn next_plan(&self, patience: Patience) -> Next {
        match patience {
            Patience::None => match self.plans.try_recv() {
                Ok(plan) => Next::Plan(plan),
                Err(flume::TryRecvError::Empty) => Next::Nothing,
                Err(flume::TryRecvError::Disconnected) => Next::HungUp,
            },
            Patience::For(limit) => match self.plans.recv_timeout(limit) {
                Ok(plan) => Next::Plan(plan),
                Err(flume::RecvTimeoutError::Timeout) => Next::Nothing,
                Err(flume::RecvTimeoutError::Disconnected) => Next::HungUp,
            },
            Patience::Endless => match self.plans.recv() {
                Ok(plan) => Next::Plan(plan),
                Err(flume::RecvError::Disconnected) => Next::HungUp,
            },
        }
    }

    fn launch(&mut self, mut plan: StepPlan, copying: &mut Copying) -> Flying {
        let step = plan.id;
        let tokens = plan.rows.iter().map(|row| u64::from(row.len)).sum();
        let class = StepClass::of(&plan);
        let copies = std::mem::take(&mut plan.copies);
        let launched = guard(step, || {
            copying.submit(&mut *self.backend, copies);
            if !self.backend.orders_layers() {
                copying.wait_for(&mut *self.backend, &std::mem::take(&mut plan.after));
            }
            self.backend.launch(plan)
        });
        Flying {
            step,
            tokens,
            class,
            launched,
            took: 0,
        }
    }

    /// Waits for a step and reports it; false: the thread has to end.
    fn land(&mut self, flight: Flying, copying: &mut Copying) -> bool {
        let (step, mut took) = (flight.step, flight.took);
        let result = loop {
            let start = self.clock.now();
            let paused = match &flight.launched {
                Ok(()) => guard(step, || self.backend.advance(step, &self.pause)),
                Err(error) => Err(error.clone()),
            };
            took += self.clock.now() - start;
            match paused {
                Ok(Some(output)) => break Ok(output),
                Err(error) => break Err(error),
                // The flag goes down first: a plan that comes now sets it again.
                Ok(None) => self.pause.store(false, Ordering::Release),
            }
            if let Ok(plan) = self.plans.try_recv()
                && !self.interpose(plan, copying)
            {
                return false;
            }
        };
        // What the step stood on is told before what it drew.
        self.report_copies(copying)
            && self.report(Outcome {
                replica: self.replica,
                step,
                result,
                took,
                tokens: flight.tokens,
                class: flight.class,
            })
    }

    /// Runs a step in the middle of another; false: the thread has to end.
    fn interpose(&mut self, plan: StepPlan, copying: &mut Copying) -> bool {
        let Flying {
            step,
            tokens,
            class,
            launched,
            took: _,
        } = self.launch(plan, copying);
        let start = self.clock.now();
        let result = launched.and_then(|()| guard(step, || self.backend.wait(step)));
        let took = self.clock.now() - start;
        self.report(Outcome {
            replica: self.replica,
            step,
            result,
            took,
            tokens,
            class,
        })
    }

    /// Sends the outcome of a step; false: the thread has to end.
    fn report(&self, outcome: Outcome) -> bool {
        let fatal = outcome.result.as_ref().is_err_and(StepError::is_fatal);
        self.inbox.send(Message::Step(Box::new(outcome))).is_ok() && !fatal
    }

    /// Passes acknowledgements on; false: the core thread is gone.
    fn report_copies(&mut self, copying: &mut Copying) -> bool {
        if !copying.under_way.is_empty() {
            copying.poll(&mut *self.backend);
        }
        if copying.done.is_empty() {
            return true;
        }
        let done = std::mem::take(&mut copying.done);
        self.inbox.send(Message::Copies(done)).is_ok()
    }
}

/// How long the thread may wait for a plan.
enum Patience {
    None,
    For(Duration),
    Endless,
}

impl Patience {
    /// `runs`: whether a device computes the oldest step in flight, if there is one.
    fn of(runs: Option<bool>, copying: &Copying) -> Self {
        match (runs, copying.under_way.is_empty()) {
            (Some(true), _) => Self::For(STEP_POLL),
            (Some(false), _) => Self::None,
            (None, false) => Self::For(COPY_POLL),
            (None, true) => Self::Endless,
        }
    }
}

enum Next {
    Plan(StepPlan),
    Nothing,
    HungUp,
}

/// Copies handed to the backend: those it works on, and acknowledgements not yet passed on.
#[derive(Default)]
struct Copying {
    under_way: Vec<CopyId>,
    done: Vec<CopyDone>,
}

impl Copying {
    fn poll(&mut self, backend: &mut dyn Backend) {
        let before = self.done.len();
        backend.copies().poll(&mut self.done);
        for done in self.done.iter().skip(before) {
            self.under_way.retain(|id| *id != done.id);
        }
    }

    /// Submits all copies, waiting for room where the queue is full.
    fn submit(&mut self, backend: &mut dyn Backend, copies: Vec<CopyPlan>) {
        for copy in copies {
            self.under_way.push(copy.id);
            let mut next = Some(copy);
            while let Some(copy) = next.take() {
                if let Err((copy, _full)) = backend.copies().submit(copy) {
                    next = Some(copy);
                    std::thread::sleep(COPY_POLL);
                    self.poll(backend);
                }
            }
        }
    }

    /// Waits until none of `after` is under way.
    fn wait_for(&mut self, backend: &mut dyn Backend, after: &[CopyId]) {
        while after.iter().any(|id| self.under_way.contains(id)) {
            self.poll(backend);
            if after.iter().any(|id| self.under_way.contains(id)) {
                std::thread::sleep(COPY_POLL);
            }
        }
    }
}

/// Runs a call of the backend; a panic becomes the outcome of the step.
fn guard<T>(step: StepId, call: impl FnOnce() -> Result<T, StepError>) -> Result<T, StepError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result,
        Err(panic) => Err(StepError::Panicked {
            step,
            message: text(&*panic).into(),
        }),
    }
}

/// The message of a panic, one line.
pub(super) fn text(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<&str>().copied();
    let message = message.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    message
        .and_then(|message| message.lines().next())
        .unwrap_or("no message")
}
