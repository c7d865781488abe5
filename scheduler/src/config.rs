//! Limits and policy of a scheduler, checked once.

use rootstock_memory::ReplicaId;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Order in which waiting requests are considered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum SchedulePolicy {
    /// Arrival, then id. Hints do not count.
    Fcfs,
    /// Longest cached prefix first, then arrival; aging bounds the wait of the cold.
    Lpm,
    /// Depth first over shared prefixes of those who wait, the largest group first; aging bounds
    /// the wait of the lonely.
    DfsWeight,
    /// Most output tokens asked for first, then arrival; aging bounds the wait of the short.
    Lof,
    /// Strict tier, then arrival less jump less the time the cache saves; aging raises the tier.
    #[default]
    Priority,
}

/// Limits and policy of one scheduler; one replica.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerConfig {
    /// Whose device pages requests run on.
    pub replica: ReplicaId,
    /// Tokens a page; the same as the cache's.
    pub page_tokens: u32,
    /// Seats: requests that may hold pages at a time.
    pub max_running: u32,
    /// Requests that may wait. Preempted ones are never refused a place.
    pub max_queue: u32,
    /// Tokens a step may compute, decodes and prefill chunks together.
    pub step_tokens: u32,
    /// Prompt and output of a request together, in tokens.
    pub max_model_len: u32,
    /// Order of the queue.
    pub policy: SchedulePolicy,
    /// Seconds of waiting that raise a request by one strict tier; 0 is off.
    pub aging_s: f64,
    /// Least difference of priority at which a waiting request takes the pages or the seat of a
    /// running one; None is never.
    pub preempt_gap: Option<u32>,
    /// Plans that may be out before the first is completed, 1 or more.
    pub max_in_flight: u8,
    /// Times a request may give way to another.
    pub max_preemptions: u32,
    /// Seconds a request may wait for its first step; 0 is no limit.
    pub queue_timeout_s: u32,
    /// Tokens a decode row may guess and verify; 0 unless the backend speculates.
    pub max_drafts: u8,
    /// Whether the guesses come from what the request's own text has said before, where that
    /// pays, and are part of the plan; otherwise the backend makes them.
    pub prompt_lookup: bool,
    /// Nanoseconds to compute one prompt token, for the worth of a cached prefix in the order of
    /// the queue until steps have been measured.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds that a copy between host and device takes whatever its size: planning, the
    /// hand-over, the acknowledgement.
    pub copy_ns: u32,
    /// Nanoseconds to copy one page. A prefix on host is copied up when
    /// `copy_ns + pages * copy_ns_per_page` is less than the time to compute its tokens; a
    /// preempted request is copied down when twice that (down and up again) is.
    pub copy_ns_per_page: u32,
    /// Milliseconds a step should take, by what was learned from the steps so far; 0 leaves
    /// `step_tokens` alone. A step computes a page of prompt at least, `step_tokens` at most.
    pub target_step_ms: u32,
    /// Whether the backend lets a step of those who hurry overtake the one in flight. Only with a
    /// target and one step in flight.
    pub overtake: bool,
    /// Whether the backend adds the token that a row continues from to the row's history, so that
    /// requests with penalties run ahead of results by one step.
    pub late_history: bool,
    /// Whether the backend orders each layer of a step behind the copies that the plan names, so
    /// that a request begins while its prefix is on its way up.
    pub begin_in_transit: bool,
    /// Seconds for which a request waits at most when the programs under way do not fit the cache
    /// together, so that those inside are kept whole; 0 is off. Programs are those of
    /// `hints.program`; requests without one are not held.
    pub program_wait_s: f64,
    /// Whether tenants share admissions of a tier evenly, by uncached prompt tokens. Not in
    /// `Fcfs` and `DfsWeight`.
    pub fair_shares: bool,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            replica: ReplicaId(0),
            page_tokens: 16,
            max_running: 64,
            max_queue: 1024,
            step_tokens: 512,
            max_model_len: 8192,
            policy: SchedulePolicy::Priority,
            aging_s: 30.0,
            preempt_gap: Some(1),
            max_in_flight: 1,
            max_preemptions: 16,
            queue_timeout_s: 600,
            max_drafts: 0,
            prompt_lookup: false,
            prefill_ns_per_token: 1_000_000,
            copy_ns: 1_000_000,
            copy_ns_per_page: 100_000,
            target_step_ms: 0,
            overtake: false,
            late_history: false,
            begin_in_transit: false,
            program_wait_s: 0.0,
            fair_shares: true,
        }
    }
}

impl SchedulerConfig {
    /// Refuses values no scheduler can work with.
    ///
    /// # Errors
    /// The first value out of range, with the range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least_one = [
            ("page_tokens", u64::from(self.page_tokens)),
            ("max_running", u64::from(self.max_running)),
            ("max_queue", u64::from(self.max_queue)),
            ("step_tokens", u64::from(self.step_tokens)),
            ("max_in_flight", u64::from(self.max_in_flight)),
        ];
        if let Some(&(name, _)) = at_least_one.iter().find(|(_, v)| *v == 0) {
            return Err(ConfigError::Zero { name });
        }
        if self.max_model_len < 2 {
            return Err(ConfigError::ModelLen {
                max_model_len: self.max_model_len,
            });
        }
        if !(0.0..=1e9).contains(&self.aging_s) {
            return Err(ConfigError::Aging {
                aging_s: self.aging_s,
            });
        }
        if !(0.0..=1e9).contains(&self.program_wait_s) {
            return Err(ConfigError::ProgramWait {
                program_wait_s: self.program_wait_s,
            });
        }
        Ok(())
    }
}

/// A configuration value no scheduler can work with.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Must be 1 or more.
    #[error("{name} is 0; at least 1 is needed")]
    Zero {
        /// Name of the value.
        name: &'static str,
    },
    /// Too short to generate anything.
    #[error("max_model_len is {max_model_len}; at least 2 is needed, one token in and one out")]
    ModelLen {
        /// The value.
        max_model_len: u32,
    },
    /// Not a duration either.
    #[error("program_wait_s is {program_wait_s}; 0 (off) to 1e9 seconds are possible")]
    ProgramWait {
        /// The value.
        program_wait_s: f64,
    },
    /// Not a duration.
    #[error("aging_s is {aging_s}; 0 (off) to 1e9 seconds are possible")]
    Aging {
        /// The value.
        aging_s: f64,
    },
}
