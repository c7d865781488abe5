//! The threads of a step: tasks are handed out one by one, idle threads spin briefly, then park.
//!
//! A run is open while tasks are left. A worker joins an open run by raising the count in the
//! state word; the caller works too, closes the run when no task is left and waits only for the
//! workers that joined. So a worker that the kernel has not scheduled yet delays nobody, and on
//! a busy machine the caller simply does more of the tasks itself.
//!
//! State word: `[epoch: 32][open: 1][joined: 31]`. The closure's lifetime ends after `run`, which
//! is sound because no worker reads it without having joined, and joining needs an open run.
//!
//! Which thread takes which task is not fixed; results must not depend on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::error::KernelError;

/// Rounds of `spin_loop` before a thread parks: some 20 microseconds, the length of the
/// serial parts between two products of a decode step.
const SPINS: u32 = 2000;

const OPEN: u64 = 1 << 31;
const JOINED: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 32;

/// A task: called with its index and the index of the thread that runs it.
type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A fixed number of threads, the caller's included, that share the tasks of one call.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run; a second caller, or a task that calls back, works alone.
    turn: Mutex<()>,
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadPool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

struct Shared {
    state: AtomicU64,
    next: AtomicUsize,
    job: Mutex<Option<Job>>,
    failed: AtomicBool,
    failure: Mutex<Option<KernelError>>,
    sleepers: AtomicUsize,
    stopping: AtomicBool,
    spins: u32,
    gate: Mutex<()>,
    wake: Condvar,
    done: Condvar,
}

/// The run's closure with its lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

// SAFETY: the closure is `Sync`, and `run` keeps it alive until every joined worker has left.
unsafe impl Send for Job {}

impl ThreadPool {
    /// A pool of `threads` threads, of which the caller of [`ThreadPool::run`] is one.
    ///
    /// Zero counts as one. Threads that the system refuses to start are left out: fewer threads
    /// give the same results.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let shared = Arc::new(Shared::new(if threads <= cores { SPINS } else { 0 }));
        let workers = (1..threads)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("rootstock-kernel-{index}"))
                    .spawn(move || shared.work(index))
                    .ok()
            })
            .collect();
        Self {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// Threads that share a run, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f` once for each index below `tasks`, on all threads, and waits for all of them.
    ///
    /// Indices are handed out in ascending order. A call from inside a task, or while another
    /// thread's run is on, does all its tasks on the calling thread.
    ///
    /// # Errors
    /// [`KernelError::TaskPanicked`] for the first panic; tasks not begun by then are skipped.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) -> Result<(), KernelError> {
        self.run_indexed(tasks, &|task, _| f(task))
    }

    /// [`ThreadPool::run`] whose closure also learns which thread it is on (`0..threads()`).
    ///
    /// # Errors
    /// As [`ThreadPool::run`].
    pub(crate) fn run_indexed(&self, tasks: usize, f: &Task<'_>) -> Result<(), KernelError> {
        let turn = match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(std::sync::TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        };
        match turn {
            Some(_turn) if tasks > 1 && !self.workers.is_empty() => self.shared.run(tasks, f),
            _ => run_alone(tasks, f),
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.state.fetch_add(EPOCH, Ordering::SeqCst);
        {
            let _gate = lock(&self.shared.gate);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panics are caught inside; a failed join leaves nothing to do.
            drop(worker.join());
        }
    }
}

fn run_alone(tasks: usize, f: &Task<'_>) -> Result<(), KernelError> {
    (0..tasks).try_for_each(|task| call(f, task, 0))
}

fn call(f: &Task<'_>, task: usize, thread: usize) -> Result<(), KernelError> {
    catch_unwind(AssertUnwindSafe(|| f(task, thread))).map_err(|payload| {
        let message = if let Some(text) = payload.downcast_ref::<&str>() {
            (*text).into()
        } else if let Some(text) = payload.downcast_ref::<String>() {
            text.as_str().into()
        } else {
            "a payload that is no text".into()
        };
        KernelError::TaskPanicked { task, message }
    })
}

/// No data is left half-changed under these locks, so a poisoned one is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(spins: u32) -> Self {
        Self {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: Mutex::new(None),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            spins,
            gate: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// The caller's side of one run.
    fn run(&self, tasks: usize, f: &Task<'_>) -> Result<(), KernelError> {
        let erased: *const Task<'_> = f;
        // SAFETY: only the lifetime changes; the pointer is dropped before this call returns and
        // is read by nobody but workers that joined, for which `close` waits.
        let task = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(erased) };
        *lock(&self.job) = Some(Job { task, tasks });
        self.failed.store(false, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        let before = self.state.load(Ordering::Relaxed);
        debug_assert_eq!(before & (OPEN | JOINED), 0, "a run began inside another");
        self.state.store((before + EPOCH) | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _gate = lock(&self.gate);
            self.wake.notify_all();
        }
        self.drain(tasks, f, 0);
        self.close();
        *lock(&self.job) = None;
        if self.failed.load(Ordering::Acquire)
            && let Some(error) = lock(&self.failure).take()
        {
            return Err(error);
        }
        Ok(())
    }

    /// Takes tasks until none is left.
    fn drain(&self, tasks: usize, f: &Task<'_>, thread: usize) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks || self.failed.load(Ordering::Relaxed) {
                return;
            }
            if let Err(error) = call(f, task, thread) {
                lock(&self.failure).get_or_insert(error);
                self.failed.store(true, Ordering::Release);
            }
        }
    }

    /// Lets no further worker join and waits for those that did.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::SeqCst);
        for _ in 0..self.spins {
            if self.state.load(Ordering::Acquire) & JOINED == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut gate = lock(&self.gate);
        while self.state.load(Ordering::SeqCst) & JOINED != 0 {
            gate = self.done.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A worker's life: wait for a run it has not seen, join, drain, leave.
    fn work(&self, thread: usize) {
        let mut seen = 0;
        loop {
            seen = self.await_epoch(seen);
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            if self.join() {
                let job = *lock(&self.job);
                if let Some(Job { task, tasks }) = job {
                    // SAFETY: this worker joined an open run, whose caller waits in `close`
                    // until it has left, so the closure is alive.
                    self.drain(tasks, unsafe { &*task }, thread);
                }
                self.leave();
            }
        }
    }

    /// Waits for an epoch other than `seen` and returns it.
    fn await_epoch(&self, seen: u64) -> u64 {
        for _ in 0..self.spins {
            let epoch = self.state.load(Ordering::Acquire) / EPOCH;
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut gate = lock(&self.gate);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let epoch = loop {
            let epoch = self.state.load(Ordering::SeqCst) / EPOCH;
            if epoch != seen {
                break epoch;
            }
            gate = self.wake.wait(gate).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        epoch
    }

    fn join(&self) -> bool {
        let raise = |state: u64| (state & OPEN != 0).then_some(state + 1);
        self.state
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, raise)
            .is_ok()
    }

    fn leave(&self) {
        let before = self.state.fetch_sub(1, Ordering::SeqCst);
        if before & JOINED == 1 && before & OPEN == 0 {
            let _gate = lock(&self.gate);
            self.done.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_for_any_thread_and_task_count() {
        for threads in [0, 1, 2, 5] {
            let pool = ThreadPool::new(threads);
            for tasks in [0, 1, 2, 3, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn thousands_of_short_runs_lose_no_task() {
        let pool = ThreadPool::new(3);
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(4, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert_eq!(sum.load(Ordering::Relaxed), 20_000 * 6);
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_works_on() {
        let pool = ThreadPool::new(2);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let error = pool
            .run(8, &|task| assert!(task != 3, "task three"))
            .unwrap_err();
        std::panic::set_hook(hook);
        assert!(error.to_string().contains("task three"), "{error}");
        let ran = AtomicUsize::new(0);
        pool.run(8, &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(ran.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn a_run_inside_a_task_works_alone() {
        let pool = ThreadPool::new(2);
        let inner = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(4, &|_| {
                inner.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert_eq!(inner.load(Ordering::Relaxed), 16);
    }

    #[test]
    fn two_callers_at_once_both_finish() {
        let pool = ThreadPool::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(3, &|_| {
                            sum.fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3000);
    }
}
