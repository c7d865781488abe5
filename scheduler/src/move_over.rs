//! A waiting request moves to the scheduler of another replica, which has nothing to do.
//!
//! Only one that has not run and that was tried here in vain moves: what merely waits for the step
//! in flight stays where its prefix is. It keeps its id, its arrival and its age. Its id names the
//! replica it came to first: whoever moves requests knows where they are.

use rootstock_memory::Nanos;
use rootstock_radix::PrefixCache;

use crate::holding::{device, pages_for};
use crate::live::{Live, Phase};
use crate::request::RequestId;
use crate::scheduler::Scheduler;

/// A request on its way from one scheduler to another.
#[derive(Debug)]
#[must_use = "a request that is dropped never ends"]
pub struct Moving(Live);

impl Moving {
    /// Which.
    pub fn id(&self) -> RequestId {
        self.0.id
    }
}

impl Scheduler {
    /// Takes out the request that found no seat or no pages here when it was last tried, if `to`
    /// has the pages for all of it, or no fewer than there are here.
    pub fn take_waiting(&mut self, cache: &PrefixCache, to: &Scheduler) -> Option<Moving> {
        let id = self.turned_away?;
        let live = self.live.get(&id)?;
        let usable = |of: &Scheduler| cache.total(device(of.cfg.replica));
        let whole = pages_for(live.prompt_tokens + live.output_max, self.cfg.page_tokens);
        let fits = whole <= usable(to) || usable(self) <= usable(to);
        if !matches!(live.phase, Phase::Queued) || !fits {
            return None;
        }
        self.turned_away = None;
        self.claim = self.claim.filter(|&claimant| claimant != id);
        self.queue.remove(id);
        let live = self.live.remove(&id)?;
        for entry in self.expiries(&live) {
            self.expiry.remove(&entry);
        }
        self.stats.moved_out += 1;
        Some(Moving(live))
    }

    /// Takes a request over from another scheduler, with its place by age.
    pub fn take_over_waiting(&mut self, moving: Moving, cache: &PrefixCache, now: Nanos) {
        let mut live = moving.0;
        let id = live.id;
        (live.cached_probe, live.device_probe) = if self.order.uses_cache() {
            self.probe(cache, &live)
        } else {
            (0, 0)
        };
        self.expiry.extend(self.expiries(&live));
        self.live.insert(id, live);
        self.enqueue(id, now);
        self.stats.moved_in += 1;
    }
}
