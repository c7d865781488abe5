//! The cells of the table, replayed on all processors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::ProgressBar;
use rootstock::radix::HitCurve;

use super::columns::Column;
use super::error::ReplayError;
use super::optimum::{self, Future};
use super::policy::Policy;
use super::step_model::StepModel;
use super::tally::{Found, Tally, Totals};
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
    pub(crate) column: Column,
}

/// What all jobs have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) page_tokens: u32,
    pub(crate) model: Option<&'a StepModel>,
}

/// What a cell came to, what that says of other capacities, and how long it took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) totals: Totals,
    pub(crate) curve: Option<HitCurve>,
    pub(crate) took: Duration,
}

/// Runs all jobs; the outcomes are in the order of the jobs.
///
/// # Errors
/// The first job that failed.
pub(crate) fn run_all(
    setting: Setting<'_>,
    jobs: &[Job],
    progress: &ProgressBar,
) -> Result<Vec<Outcome>, ReplayError> {
    let future = Future::of(setting.trace);
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
            done.push((index, run_one(setting, &future, job, progress)?));
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
    setting: Setting<'_>,
    future: &Future,
    job: &Job,
    progress: &ProgressBar,
) -> Result<Outcome, ReplayError> {
    let Setting {
        trace,
        page_tokens,
        model,
    } = setting;
    let Column {
        device,
        host,
        storage,
    } = job.column;
    let mut ticker = Ticker::new(progress.clone());
    let mut tally = Tally::new(trace, page_tokens, model);
    let start = crate::clock::now();
    let curve = match job.line {
        Line::Policy(policy) => {
            let room = Room {
                device: device.blocks,
                host: host.blocks,
                storage: storage.blocks,
            };
            tree::run(trace, policy.kind, room, &mut tally, &mut ticker)?
        }
        Line::Optimum => {
            let blocks = device.blocks + host.blocks + storage.blocks;
            let found = |request, device| {
                let found = Found {
                    device,
                    ..Found::default()
                };
                tally.add(request, found);
            };
            optimum::run(trace, future, blocks, &mut ticker, found);
            None
        }
    };
    Ok(Outcome {
        totals: tally.totals(),
        curve,
        took: start.elapsed(),
    })
}
