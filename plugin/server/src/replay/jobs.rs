//! The cells of the table, replayed on all processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;
use rootstock::radix::HitCurve;

use super::error::ReplayError;
use super::optimum::{self, Future};
use super::policy::Policy;
use super::ticker::Ticker;
use super::trace::Trace;
use super::tree::{self, Room};

/// What a line of the table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A policy of the cache.
    Policy(Policy),
    /// The offline optimum.
    Optimum,
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) line: Line,
    pub(crate) tokens: u64,
    pub(crate) blocks: u32,
    pub(crate) host_blocks: u32,
}

/// Hits of a cell, what they say of other capacities, and how long they took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) hits: u64,
    pub(crate) curve: Option<HitCurve>,
    pub(crate) took: Duration,
}

/// Runs all jobs; the outcomes are in the order of the jobs.
///
/// # Errors
/// The first job that failed.
pub(crate) fn run_all(
    trace: &Trace,
    jobs: &[Job],
    progress: &ProgressBar,
) -> Result<Vec<Outcome>, ReplayError> {
    let future = Future::of(trace);
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(jobs.len());
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<(usize, Outcome)>, ReplayError> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else {
                return Ok(done);
            };
            done.push((index, run_one(trace, &future, job, progress)?));
        }
    };
    let finished = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .map(thread::ScopedJoinHandle::join)
            .collect::<Vec<_>>()
    });
    let mut outcomes = vec![Outcome::default(); jobs.len()];
    for done in finished {
        for (index, outcome) in done.map_err(|_| ReplayError::Thread)?? {
            if let Some(place) = outcomes.get_mut(index) {
                *place = outcome;
            }
        }
    }
    Ok(outcomes)
}

fn run_one(
    trace: &Trace,
    future: &Future,
    job: &Job,
    progress: &ProgressBar,
) -> Result<Outcome, ReplayError> {
    let mut ticker = Ticker::new(progress.clone());
    let start = crate::clock::now();
    let (hits, curve) = match job.line {
        Line::Policy(policy) => {
            let room = Room {
                device: job.blocks,
                host: job.host_blocks,
            };
            tree::hits(trace, policy.kind, room, &mut ticker)?
        }
        Line::Optimum => {
            let blocks = job.blocks + job.host_blocks;
            (optimum::hits(trace, future, blocks, &mut ticker), None)
        }
    };
    Ok(Outcome {
        hits,
        curve,
        took: start.elapsed(),
    })
}
