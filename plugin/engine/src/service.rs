//! The running engine: one core thread, one engine thread a replica, and handles to them.
//!
//! ```text
//! Service::submit --inbox--> core thread (ServingCore) --plans--> engine thread (Backend)
//! Ticket.events  <--events--        |       ^------- outputs -------------+
//! ```
//!
//! The core thread owns every decision and takes whatever is in its inbox in one batch before it
//! plans; the engine thread only runs plans. All channels are bounded: the inbox refuses new
//! requests when full, and the channel of a request holds every event it can ever get, so a
//! reader that never reads cannot hold up anybody. With nothing to do, all threads block.
//!
//! Each request ends with exactly one [`Event::Final`]: at its end, on a failed or panicked step,
//! when its [`Ticket`] is dropped, and also when the engine itself is lost.

mod attach;
mod clock;
mod config;
mod core_thread;
mod deliver;
mod engine_thread;
mod kv_teller;
mod memory;
mod request;
mod start;
#[cfg(feature = "cuda")]
mod start_cuda;
mod stats;
mod store;
mod visit;
mod watch;
mod wish;

/// What `wish.rs` is made of; `tests/schedules` has another.
mod sync {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
}

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rootstock::radix::FlushRefused;
use rootstock::scheduler::RequestId;

pub use attach::AttachError;
pub use clock::Clock;
pub use config::{DeviceChoice, EightBits, JournalSink, KvEventSink, KvNews, ServiceConfig};
pub use request::{Event, FlushError, Submission, SubmitError, Ticket};
pub use start::ModelIdentity;
pub use stats::{CachedTotals, Finished, Histogram, Stats, StepClass, StepTimes};
pub use store::StorageConfig;
pub use visit::{EngineGone, Visit};

use crate::constrained::{Grammar, GrammarMasks};
use core_thread::Message;
use request::SubmitMessage;
use wish::{Control, Wishes};

/// What is served: constants of a running service.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Name of the model.
    pub name: String,
    /// Prompt and output of a request together, in tokens.
    pub max_model_len: u32,
    /// Positions that the model was trained on; beyond them its text gets worse.
    pub trained_len: u32,
    /// Number of token ids.
    pub vocab: u32,
    /// Names the arithmetic; part of the key of every cached page.
    pub numerics_id: String,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Engines over the same weights and the same host tier.
    pub replicas: u16,
    /// Usable pages of each replica's device tier.
    pub device_pages: u32,
    /// Usable pages of the host tier; 0 is no host tier.
    pub host_pages: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of the weights; 0 where a backend was given that has none.
    pub weight_bytes: u64,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every request came to its own end.
    Finished,
    /// The deadline passed; the requests left were aborted.
    Aborted,
}

/// A handle to a running service; clones share it. The threads end with the last handle.
#[derive(Clone, Debug)]
pub struct Service {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    inbox: flume::Sender<Message>,
    shared: Arc<Shared>,
    info: ModelInfo,
    limits: request::RequestLimits,
    place: store::Place,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What handles, tickets and the core thread share.
#[derive(Debug, Default)]
struct Shared {
    draining: AtomicBool,
    dead: AtomicBool,
    /// Wishes that the core thread has not looked at.
    wishes: Wishes,
    stats: Mutex<Stats>,
    /// What grammars allow; set at the start when all backends apply it.
    masks: OnceLock<Arc<GrammarMasks>>,
}

impl Shared {
    /// An admitted request with a grammar gets its masks.
    fn begin(&self, request: RequestId, grammar: Option<&Grammar>) {
        if let (Some(grammar), Some(masks)) = (grammar, self.masks.get()) {
            masks.begin(request, grammar);
        }
    }
}

impl Service {
    /// Queues a request, or says why not. Waits for the core thread, which answers within
    /// microseconds also while a step runs.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing is kept of a refused request.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, SubmitError> {
        let (ticket, answer) = self.send_submission(submission)?;
        answer.recv().map_err(|_| SubmitError::EngineDead)??;
        Ok(ticket)
    }

    /// [`Service::submit`] for async callers.
    ///
    /// # Errors
    /// As [`Service::submit`].
    pub async fn submit_async(&self, submission: Submission) -> Result<Ticket, SubmitError> {
        let (ticket, answer) = self.send_submission(submission)?;
        answer
            .recv_async()
            .await
            .map_err(|_| SubmitError::EngineDead)??;
        Ok(ticket)
    }

    /// Empties the cache, or changes nothing and says why.
    ///
    /// # Errors
    /// Something is in use, or the service is gone.
    pub fn flush(&self) -> Result<(), FlushError> {
        let (reply, answer) = flume::bounded::<Result<(), FlushRefused>>(1);
        let sent = self.inner.inbox.send(Message::Flush(reply));
        sent.map_err(|_| FlushError::EngineDead)?;
        Ok(answer.recv().map_err(|_| FlushError::EngineDead)??)
    }

    /// Has the sink of cache events told all that is cached, in its turn. False: not now, the
    /// inbox is full, or the service is gone.
    #[must_use]
    pub fn tell_all_cached(&self) -> bool {
        self.inner.inbox.try_send(Message::TellAllCached).is_ok()
    }

    /// Refuses new requests from now on, waits for the running ones, and after `patience` aborts
    /// what is left. Blocks the caller.
    pub fn drain(&self, patience: Duration) -> Drained {
        self.inner.shared.draining.store(true, Ordering::Release);
        let (reply, answer) = flume::bounded(1);
        if self.inner.inbox.send(Message::TellWhenIdle(reply)).is_err() {
            return Drained::Finished;
        }
        match answer.recv_timeout(patience) {
            Ok(()) | Err(flume::RecvTimeoutError::Disconnected) => Drained::Finished,
            Err(flume::RecvTimeoutError::Timeout) => {
                if self.inner.inbox.send(Message::AbortAll).is_ok() {
                    // Aborts are answered at once; a lost core thread closes the channel.
                    let _closed = answer.recv();
                }
                Drained::Aborted
            }
        }
    }

    /// Counters and histograms as of the last step.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner
            .shared
            .stats
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Constants of the model and its memory.
    #[must_use]
    pub fn model_info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// False once the engine or the core thread is lost: no request will ever be served again.
    #[must_use]
    pub fn alive(&self) -> bool {
        !self.inner.shared.dead.load(Ordering::Acquire)
    }

    /// True while new requests are taken.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.alive() && !self.inner.shared.draining.load(Ordering::Acquire)
    }

    /// Checks and sends a submission. The ticket exists before the request does, so that a caller
    /// who gives up in between aborts it.
    fn send_submission(
        &self,
        submission: Submission,
    ) -> Result<(Ticket, flume::Receiver<Result<(), SubmitError>>), SubmitError> {
        if !self.alive() {
            return Err(SubmitError::EngineDead);
        }
        if !self.ready() {
            return Err(SubmitError::Draining);
        }
        let limits = &self.inner.limits;
        request::check(&submission, limits)?;
        if submission.grammar.is_some() && self.inner.shared.masks.get().is_none() {
            return Err(SubmitError::NoGrammars);
        }
        // One event a token at most, one for the start, one for the end.
        let events_max = submission.max_tokens.min(limits.max_model_len) as usize + 2;
        let (events, reader) = flume::bounded(events_max);
        let (reply, answer) = flume::bounded(1);
        let control = Arc::new(Control::default());
        let ticket = Ticket {
            events: reader,
            control: Arc::clone(&control),
            shared: Arc::clone(&self.inner.shared),
            inbox: self.inner.inbox.clone(),
        };
        let message = SubmitMessage {
            submission,
            events,
            control,
            reply,
        };
        match self
            .inner
            .inbox
            .try_send(Message::Submit(Box::new(message)))
        {
            Ok(()) => Ok((ticket, answer)),
            Err(flume::TrySendError::Full(_)) => Err(SubmitError::Deferred {
                queue_len: limits.max_queue,
                queue_cap: limits.max_queue,
                retry_after_s: 1,
            }),
            Err(flume::TrySendError::Disconnected(_)) => Err(SubmitError::EngineDead),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A lost core thread has closed the inbox and needs no word.
        let _closed = self.inbox.send(Message::Stop);
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the service panicked");
            }
        }
    }
}
