//! The end of everything at once: for a drain that ran out of time, and before a core is dropped.

use rootstock_memory::{Nanos, StepId};
use rootstock_radix::PrefixCache;

use crate::emit::Emit;
use crate::request::RequestId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Ends every request as aborted and gives up every step that is out: each live request gets
    /// its final event, all pages and leases go back. Results that still come are ignored.
    pub fn end_all(&mut self, cache: &mut PrefixCache, now: Nanos, out: &mut Vec<Emit>) {
        let requests: Vec<RequestId> = self.live.keys().copied().collect();
        for id in requests {
            out.extend(self.abort(cache, id, now));
        }
        let steps: Vec<StepId> = self.flights.iter().map(|flight| flight.step).collect();
        for step in steps {
            self.fail_step(cache, step, now, out);
        }
    }
}
