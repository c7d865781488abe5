//! What a simulated run tells: its counts, or what went wrong and how to see it again.

use std::collections::BTreeMap;
use std::fmt;

use rootstock::CoreStats;
use rootstock_scheduler::{FinishReason, RequestId};

use crate::double::EngineDouble;
use crate::swarm::Swarm;

/// Something that happened, for the account of a failure.
#[derive(Clone, Debug)]
#[expect(
    dead_code,
    reason = "the fields are read by Debug, which is what they are for"
)]
pub(crate) enum Event {
    Added(RequestId, u32, u32),
    NotAdded(String),
    Launched(u64, Vec<(u64, u32, u32)>, usize),
    Landed(u64),
    Failed(u64),
    Asked(RequestId, FinishReason),
    Ended(RequestId, FinishReason),
}

/// What a run did; equal seeds give equal reports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Steps of the virtual world.
    pub steps: u64,
    /// Calls into the scheduler and events out of it.
    pub events: u64,
    /// Requests that ended, by reason.
    pub ended: BTreeMap<String, u64>,
    /// Times a request gave way.
    pub preemptions: u64,
    /// Steps kept short for those who hurry.
    pub hurried_steps: u64,
    /// Of those, such as overtake the one in flight.
    pub overtaking_steps: u64,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u64,
    /// Tokens taken over from others during the prefill.
    pub shared_tokens: u64,
    /// Tokens copied up from host for requests, and copies for them that brought less.
    pub fetched_tokens: u64,
    /// Fetches that brought less than they should.
    pub fetches_failed: u64,
    /// Copies done down, up, and failed.
    pub copies: [u64; 3],
    /// Pins whose pages were watched.
    pub pins_watched: u64,
    /// Pins that had to give way.
    pub pins_yielded: u64,
    /// Requests that met a fault, by fault and phase.
    pub met: BTreeMap<String, u64>,
    /// Times everything was recounted.
    pub checks: u64,
    /// Rows run.
    pub rows: u64,
    /// Rows that took their input from a step in flight.
    pub rows_ahead: u64,
    /// Copies under way that a step stood on when it ran.
    pub in_transit: u64,
    /// Rows that accepted several tokens.
    pub rows_many: u64,
    /// Hash over all plans.
    pub plans: u64,
}

impl Report {
    /// Takes in the counters at the end of a run.
    pub(crate) fn take_in(&mut self, steps: u64, stats: &CoreStats, engine: &EngineDouble) {
        self.steps = steps;
        for scheduler in &stats.schedulers {
            self.preemptions += scheduler.preemptions;
            self.hurried_steps += scheduler.hurried_steps;
            self.overtaking_steps += scheduler.overtaking_steps;
            self.cached_tokens += scheduler.cached_tokens;
            self.shared_tokens += scheduler.shared_tokens;
            self.fetched_tokens += scheduler.fetched_tokens;
            self.fetches_failed += scheduler.fetches_failed;
        }
        self.pins_yielded = stats.cache.pins_yielded;
        let [down, up] = engine.copies_done;
        self.copies = [down, up, engine.copies_failed];
        self.rows = engine.rows_run;
        self.rows_ahead = engine.rows_ahead;
        self.in_transit = engine.steps_in_transit;
        self.rows_many = engine.rows_many;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Report) {
        self.steps += other.steps;
        self.events += other.events;
        self.preemptions += other.preemptions;
        self.hurried_steps += other.hurried_steps;
        self.overtaking_steps += other.overtaking_steps;
        self.cached_tokens += other.cached_tokens;
        self.shared_tokens += other.shared_tokens;
        self.fetched_tokens += other.fetched_tokens;
        self.fetches_failed += other.fetches_failed;
        for (sum, more) in self.copies.iter_mut().zip(other.copies) {
            *sum += more;
        }
        self.pins_watched += other.pins_watched;
        self.pins_yielded += other.pins_yielded;
        self.checks += other.checks;
        self.rows += other.rows;
        self.rows_ahead += other.rows_ahead;
        self.in_transit += other.in_transit;
        self.rows_many += other.rows_many;
        for (reason, count) in &other.ended {
            *self.ended.entry(reason.clone()).or_default() += count;
        }
        for (pair, count) in &other.met {
            *self.met.entry(pair.clone()).or_default() += count;
        }
    }
}

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The world; its seed shows it again.
    pub swarm: Swarm,
    /// Step at which it showed.
    pub step: u64,
    /// What was found.
    pub finding: String,
    pub(crate) events: Vec<Event>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}, step {}: {}",
            self.swarm.seed, self.step, self.finding
        )?;
        writeln!(f, "{:?}\n{:?}", self.swarm.cache, self.swarm.scheduler)?;
        for event in &self.events {
            writeln!(f, "  {event:?}")?;
        }
        write!(
            f,
            "SIM_SEED={} cargo test -p rootstock-tests --test sim_swarm",
            self.swarm.seed
        )
    }
}
