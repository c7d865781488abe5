//! The storage tier: pages in a folder, or by further features in Redis or S3, behind Apache
//! OpenDAL. One worker thread owns the store; plans go in through a bounded queue, events come
//! back. Nothing here decides what is stored: it reads, writes, compares and keeps the quota.
//! Somebody waits for reads, so they go before writes, and each has an end.
//!
//! A page counts only when it is whole and is what was asked for: [`record`] says how that is
//! checked. Whatever else is found is a miss, is counted by kind, and is removed. Writes are
//! atomic (a file appears whole, by renaming), so a process may end at any moment.

mod operator;
mod queue;
mod record;
mod shelf;
mod unfinished;
mod worker;

use crate::{CopyId, KvLayout, PageId, StoreEngine, StoreEvent, StorePlan, StoreStats};
use queue::{Queue, Submitted};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use thiserror::Error;

/// The bytes of the host tier, as the worker sees them. A page that a plan names is not changed
/// by anybody else until the plan is acknowledged.
pub trait HostPages: Send {
    /// Copies a page out; false when there is no such page.
    fn read(&mut self, page: PageId, out: &mut [u8]) -> bool;
    /// Copies a page in; false when there is no such page.
    fn write(&mut self, page: PageId, bytes: &[u8]) -> bool;
}

/// Where and how.
#[derive(Clone, Debug)]
pub struct StorageOptions {
    /// `fs:///folder`; with features `storage-redis` and `storage-s3` also
    /// `redis://name:password@host:port/db/prefix` and `s3://bucket/prefix?endpoint=..&region=..`.
    pub uri: String,
    /// How pages are laid out; pages of another layout are foreign.
    pub layout: KvLayout,
    /// How the numbers were computed; pages of other numerics are foreign.
    pub numerics: String,
    /// Most bytes in the store; beyond it the least recently used pages go. Where a store cannot
    /// be listed, only what this process wrote counts.
    pub quota_bytes: u64,
    /// Most plans that wait.
    pub queue: usize,
    /// What has not been read this long after it was asked for does not count: its request
    /// computes it. A page is not written, looked for or deleted for longer either.
    pub read_timeout: Duration,
}

/// Why a store cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The address has no scheme that this build knows.
    #[error("cannot store in {uri:?}: this build knows {known}")]
    Scheme {
        /// What was given.
        uri: String,
        /// What would do.
        known: &'static str,
    },
    /// The store refuses.
    #[error("cannot open the store {uri:?}: {reason}")]
    Open {
        /// What was given.
        uri: String,
        /// What the store said.
        reason: String,
    },
    /// The system gives no thread.
    #[error("cannot start the storage thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// The counters, shared with the worker.
#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    read: AtomicU64,
    missing: AtomicU64,
    corrupt: AtomicU64,
    truncated: AtomicU64,
    foreign: AtomicU64,
    errors: AtomicU64,
    timeouts: AtomicU64,
    evicted: AtomicU64,
    pages: AtomicU64,
    bytes: AtomicU64,
}

/// What the worker tells, and which plans it has still to answer, by the number of their pages.
#[derive(Debug)]
struct Events {
    told: Receiver<StoreEvent>,
    waiting: BTreeMap<CopyId, usize>,
}

fn one_more(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// An open store. Dropping it detaches: plans that wait are acknowledged as not done, the one
/// under way is finished first.
pub struct Storage {
    plans: Option<SyncSender<Submitted>>,
    events: Mutex<Events>,
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    worker: Option<JoinHandle<()>>,
    lists: bool,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Storage {
    /// Opens a store and starts its worker, which first tells what is there. `wake` is called
    /// from the worker whenever there is something to poll.
    ///
    /// # Errors
    /// The address cannot be used, or the system gives no thread.
    pub fn open(
        options: &StorageOptions,
        host: impl HostPages + 'static,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, StorageError> {
        let (store, unfinished) = operator::open(&options.uri)?;
        let lists = store.info().capability().list;
        let (plans, work) = sync_channel(options.queue.max(1));
        let (tell, events) = channel();
        let counts = Arc::new(Counts::default());
        let stop = Arc::new(AtomicBool::new(false));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let ties = worker::Ties {
            tell,
            wake: Box::new(wake),
            counts: Arc::clone(&counts),
            stop: Arc::clone(&stop),
            _unfinished: unfinished,
        };
        let queue = Queue::new(work, options.queue.max(1));
        let worker = worker::Worker::new(options, store, Box::new(host), ties, queue);
        let thread = std::thread::Builder::new().name("rootstock-storage".to_owned());
        let worker = thread.spawn(move || runtime.block_on(worker.run(lists)))?;
        Ok(Self {
            plans: Some(plans),
            events: Mutex::new(Events {
                told: events,
                waiting: BTreeMap::new(),
            }),
            counts,
            stop,
            worker: Some(worker),
            lists,
        })
    }

    /// Whether the store can tell what is in it. Where it cannot, pages are looked for.
    pub const fn lists(&self) -> bool {
        self.lists
    }

    /// Queues a plan. Does not wait.
    ///
    /// # Errors
    /// Gives the plan back when the queue is full, or the worker has ended.
    pub fn submit(&self, plan: StorePlan) -> Result<(), StorePlan> {
        let Some(plans) = &self.plans else {
            return Err(plan);
        };
        let (id, pages) = (plan.id, plan.pages.len());
        // Locked first, so that the answer finds it.
        let mut events = self.events();
        let submitted = Submitted::now(plan);
        plans.try_send(submitted).map_err(|error| match error {
            TrySendError::Full(back) | TrySendError::Disconnected(back) => back.plan,
        })?;
        events.waiting.insert(id, pages);
        Ok(())
    }

    /// Appends what the store told since the last call. Does not wait.
    pub fn poll(&self, out: &mut Vec<StoreEvent>) {
        let mut events = self.events();
        let lost = loop {
            match events.told.try_recv() {
                Ok(event) => {
                    if let StoreEvent::Done { id, .. } = &event {
                        events.waiting.remove(id);
                    }
                    out.push(event);
                }
                Err(TryRecvError::Empty) => break BTreeMap::new(),
                // The worker has ended: whatever it has not answered is not done.
                Err(TryRecvError::Disconnected) => break std::mem::take(&mut events.waiting),
            }
        };
        let failed = |(id, pages)| StoreEvent::Done {
            id,
            pages: vec![false; pages],
        };
        out.extend(lost.into_iter().map(failed));
    }

    /// Ends the worker; returns what it had still to tell: an answer to each plan.
    pub fn close(mut self) -> Vec<StoreEvent> {
        self.end();
        let mut rest = Vec::new();
        self.poll(&mut rest);
        rest
    }

    /// Counts.
    pub fn stats(&self) -> StoreStats {
        let counts = &*self.counts;
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        StoreStats {
            written: get(&counts.written),
            read: get(&counts.read),
            missing: get(&counts.missing),
            corrupt: get(&counts.corrupt),
            truncated: get(&counts.truncated),
            foreign: get(&counts.foreign),
            errors: get(&counts.errors),
            timeouts: get(&counts.timeouts),
            evicted: get(&counts.evicted),
            pages: get(&counts.pages),
            bytes: get(&counts.bytes),
        }
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.plans = None;
        if let Some(worker) = self.worker.take() {
            // What a worker that panicked has left is answered by `poll`.
            worker.join().ok();
        }
    }
}

impl StoreEngine for Storage {
    fn submit(&mut self, plan: StorePlan) -> Result<(), StorePlan> {
        Self::submit(self, plan)
    }

    fn poll(&mut self, events: &mut Vec<StoreEvent>) {
        Self::poll(self, events);
    }

    fn stats(&self) -> StoreStats {
        Self::stats(self)
    }

    fn close(self: Box<Self>) -> Vec<StoreEvent> {
        Self::close(*self)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.end();
    }
}
