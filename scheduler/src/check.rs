//! Recounts everything the scheduler keeps twice. For tests, fuzzers and idle moments.

use rootstock_memory::{Corruption, StepId};
use rootstock_radix::PrefixCache;

use crate::live::{Live, Phase, Running};
use crate::request::{Class, RequestId};
use crate::scheduler::Scheduler;

fn bad(id: RequestId, detail: &str) -> Corruption {
    Corruption::new("scheduler", format!("request {}: {detail}", id.0))
}

impl Scheduler {
    /// Recounts queues, phases, page tables and steps in flight.
    ///
    /// # Errors
    /// The first contradiction found.
    /// # Cost
    /// Linear in the tokens of all live requests.
    pub fn check(&self, cache: &PrefixCache) -> Result<(), Corruption> {
        if !self.queue.is_consistent() {
            return Err(Corruption::new("scheduler", "the sets of the queue differ"));
        }
        let waiting = self.queue.len() + self.aside.len() + self.held_places.len();
        let members = waiting + self.running.len() + self.draining.len();
        if members != self.live.len() {
            let detail = format!("{members} requests in sets, {} live", self.live.len());
            return Err(Corruption::new("scheduler", detail));
        }
        let speculative = self.live.values().filter(|live| {
            live.class == Class::Speculative && !matches!(live.phase, Phase::Draining(_))
        });
        if !speculative.map(|live| &live.id).eq(&self.speculative) {
            return Err(Corruption::new("scheduler", "speculative requests differ"));
        }
        let held = self.held_places.len();
        if self.held.len() != held || self.held_until.len() != held {
            return Err(Corruption::new("scheduler", "the sets of the held differ"));
        }
        self.programs.check()?;
        if self.running.len() > self.cfg.max_running as usize {
            let detail = format!(
                "{} running, {} seats",
                self.running.len(),
                self.cfg.max_running
            );
            return Err(Corruption::new("scheduler", detail));
        }
        self.live
            .values()
            .try_for_each(|live| self.check_live(cache, live))
    }

    fn check_live(&self, cache: &PrefixCache, live: &Live) -> Result<(), Corruption> {
        let id = live.id;
        let at_home = match &live.phase {
            Phase::Queued => {
                let places = [
                    self.queue.contains(id),
                    self.aside.contains(&id),
                    self.held_places.contains_key(&id),
                ];
                places.into_iter().filter(|&is_there| is_there).count() == 1
            }
            Phase::Preempted => self.queue.contains(id),
            Phase::Running(_) | Phase::Fetching(_) => self.running.contains(&id),
            Phase::Draining(rest) => self.draining.contains(&id) && !rest.flight.is_empty(),
        };
        if !at_home {
            return Err(bad(id, "its phase and its set differ"));
        }
        if let Some(hold) = live.holding()
            && hold.recount(cache).is_none()
        {
            return Err(bad(id, "its table is not its lease and its own pages"));
        }
        let flight: &[StepId] = match &live.phase {
            Phase::Queued | Phase::Preempted | Phase::Fetching(_) => &[],
            Phase::Running(run) => &run.flight,
            Phase::Draining(rest) => &rest.flight,
        };
        let mut out = self
            .flights
            .iter()
            .filter(|f| f.rows.iter().any(|row| row.id == id));
        if !flight
            .iter()
            .all(|step| out.next().is_some_and(|f| f.step == *step))
            || out.next().is_some()
        {
            return Err(bad(id, "its steps and the steps in flight differ"));
        }
        live.running()
            .map_or(Ok(()), |run| check_running(live, run))
    }
}

fn check_running(live: &Live, run: &Running) -> Result<(), Corruption> {
    let id = live.id;
    if run.hold.leased_tokens() > run.computed {
        return Err(bad(id, "leased beyond what is computed"));
    }
    if run.computed > run.launched {
        return Err(bad(id, "computed beyond what was launched"));
    }
    if run.launched >= live.len() + run.pending {
        return Err(bad(id, "nothing left to compute"));
    }
    if run.flight.is_empty() && (run.computed != run.launched || run.pending > 0) {
        return Err(bad(id, "waits for a step that is not in flight"));
    }
    Ok(())
}
