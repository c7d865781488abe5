//! Counters of a scheduler. Monotonic, but for the sizes at the top.

use serde::{Deserialize, Serialize};

use crate::emit::{FinishReason, PinReport, Usage};

/// What a scheduler has done, and how full it is.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SchedulerStats {
    /// Requests waiting now, preempted ones included.
    pub waiting: u32,
    /// Of those, held back until the router has a replica for them.
    pub parked: u32,
    /// Of those, held back until their program has a place in the cache.
    pub held_now: u32,
    /// Programs that have a place in the cache now.
    pub programs_inside: u32,
    /// Requests with a seat now.
    pub running: u32,
    /// Of those, waiting for a prefix to come up from host.
    pub fetching: u32,
    /// Ended requests whose pages a step in flight may touch now.
    pub draining: u32,
    /// Steps out now.
    pub in_flight: u32,
    /// Requests taken into the queue.
    pub added: u64,
    /// Requests refused because the queue was full.
    pub deferred: u64,
    /// Requests refused because they can never run.
    pub rejected: u64,
    /// Admissions to the batch, resumptions included.
    pub admissions: u64,
    /// Requests that ended by stop token, stop string or length.
    pub finished: u64,
    /// Requests that ended by the caller.
    pub aborted: u64,
    /// Requests that ended by deadline or queue timeout.
    pub expired: u64,
    /// Requests that ended by a failed step or a bad output.
    pub failed: u64,
    /// Requests that ended for want of pages, or by giving way too often.
    pub starved: u64,
    /// Requests that gave their place in the full queue to a better one.
    pub displaced: u64,
    /// Requests that were held back for a place of their program.
    pub held: u64,
    /// Of those, let in although others were in their way.
    pub let_in_over: u64,
    /// Requests that left for an idle replica before they ran.
    pub moved_out: u64,
    /// Requests taken over from another replica.
    pub moved_in: u64,
    /// Times a request gave way.
    pub preemptions: u64,
    /// Prompt tokens of requests at their first admission.
    pub prompt_tokens: u64,
    /// Of those, found in the cache.
    pub cached_tokens: u64,
    /// Tokens taken over from others that computed them meanwhile.
    pub shared_tokens: u64,
    /// Prefixes copied up from host for a request.
    pub fetches: u64,
    /// Tokens that they brought.
    pub fetched_tokens: u64,
    /// Such copies that brought less than they should.
    pub fetches_failed: u64,
    /// Requests that began to compute before the copy of their prefix had ended.
    pub begun_in_transit: u64,
    /// Pins asked for by requests whose prompt was cached.
    pub pins_asked: u64,
    /// Of those, not or not wholly granted.
    pub pins_cut: u64,
    /// Positions computed, recomputation included, guesses not.
    pub computed_tokens: u64,
    /// Output tokens.
    pub generated_tokens: u64,
    /// Tokens guessed from the text of their request and verified.
    pub guessed_tokens: u64,
    /// Of those, right ones.
    pub right_guesses: u64,
    /// Plans with rows.
    pub steps: u64,
    /// Of those, kept short for requests that hurry.
    pub hurried_steps: u64,
    /// Of those, such as overtake the step in flight.
    pub overtaking_steps: u64,
    /// Plans of copies alone.
    pub copy_plans: u64,
    /// Results for steps that are not out; ignored.
    pub stray_results: u64,
}

impl SchedulerStats {
    pub(crate) fn count_pins(&mut self, report: &PinReport) {
        self.pins_asked += u64::from(report.asked);
        self.pins_cut += u64::from(report.clipped + report.rejected);
    }

    pub(crate) fn count_final(&mut self, reason: FinishReason, usage: &Usage) {
        self.generated_tokens += u64::from(usage.completion_tokens);
        let counter = match reason {
            FinishReason::Stop | FinishReason::StopString | FinishReason::Length => {
                &mut self.finished
            }
            FinishReason::Aborted => &mut self.aborted,
            FinishReason::Expired => &mut self.expired,
            FinishReason::Failed(_) => &mut self.failed,
            FinishReason::OutOfPages | FinishReason::TooManyPreemptions => &mut self.starved,
            FinishReason::Displaced => &mut self.displaced,
        };
        *counter += 1;
    }
}
