//! What a simulated run tells: its counts, or what went wrong and how to see it again.

use std::collections::BTreeMap;
use std::fmt;

use rootstock_scheduler::{FinishReason, RequestId};

/// Something that happened, for the account of a failure.
#[derive(Clone, Debug)]
#[expect(
    dead_code,
    reason = "the fields are read by Debug, which is what they are for"
)]
pub(crate) enum Event {
    Added(RequestId, u32, u32),
    NotAdded(String),
    Launched(u64, Vec<(u64, u32, u32)>),
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
    /// Prompt tokens found in the cache.
    pub cached_tokens: u64,
    /// Tokens taken over from others during the prefill.
    pub shared_tokens: u64,
    /// Rows run.
    pub rows: u64,
    /// Rows that took their input from a step in flight.
    pub rows_ahead: u64,
    /// Rows that accepted several tokens.
    pub rows_many: u64,
    /// Hash over all plans.
    pub plans: u64,
}

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Seed that shows it again.
    pub seed: u64,
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
            self.seed, self.step, self.finding
        )?;
        for event in &self.events {
            writeln!(f, "  {event:?}")?;
        }
        write!(
            f,
            "SIM_SEED={} cargo test -p rootstock-tests --test sim_swarm",
            self.seed
        )
    }
}
