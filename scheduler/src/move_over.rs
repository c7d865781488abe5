//! A waiting request moves to the scheduler of another replica: one that has nothing to do, or the
//! one that the router has chosen late.
//!
//! ```text
//!   add_parked   -> aside, at one scheduler     the router has no replica for it yet
//!   unpark       -> the queue of the same       it stays
//!   take_parked  -> Moving                      it goes elsewhere
//!   take_waiting -> Moving                      it was tried in vain here
//!   Moving       -> take_over_waiting           the queue of another
//! ```
//! Only one that has not run moves: what merely waits for the step in flight stays where its prefix
//! is. It keeps its id, its arrival and its age. Its id names the replica it came to first: whoever
//! moves requests knows where they are.

use rootstock_memory::Nanos;
use rootstock_radix::{Key, PrefixCache};

use crate::emit::Admission;
use crate::holding::{device, pages_for};
use crate::live::{Live, Phase};
use crate::request::{Class, NewRequest, RequestId};
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

    /// What it is found by in the cache.
    pub fn key(&self) -> Key<'_> {
        self.0.cache_key()
    }
}

impl Scheduler {
    /// As [`Scheduler::add`], but the request does not start before [`Scheduler::unpark`], here or,
    /// after [`Scheduler::take_parked`], elsewhere. It counts as waiting, and deadline and queue
    /// timeout hold.
    pub fn add_parked(&mut self, new: NewRequest, cache: &PrefixCache, now: Nanos) -> Admission {
        let admission = self.admit_at_the_door(new, cache, now);
        if let Admission::Admitted(id) = admission {
            self.aside.insert(id);
        }
        admission
    }

    /// Puts a parked request into the queue. False when it is not parked here.
    pub fn unpark(&mut self, cache: &PrefixCache, id: RequestId, now: Nanos) -> bool {
        let parked = self.aside.remove(&id);
        if parked {
            self.enter(cache, id, now);
        }
        parked
    }

    /// What a parked request is found by in the cache; None when it is not parked here.
    pub fn parked_key(&self, id: RequestId) -> Option<Key<'_>> {
        let live = self.aside.get(&id).and_then(|id| self.live.get(id))?;
        Some(live.cache_key())
    }

    /// Takes a parked request out, if `to` has the pages for all of it, or no fewer than there are
    /// here.
    pub fn take_parked(
        &mut self,
        id: RequestId,
        cache: &PrefixCache,
        to: &Scheduler,
        now: Nanos,
    ) -> Option<Moving> {
        let parked = self.aside.contains(&id) && self.fits_at(cache, id, to);
        parked.then(|| self.take_out(id, now))?
    }

    /// Takes out the request that found no seat or no pages here when it was last tried, if `to`
    /// has the pages for all of it, or no fewer than there are here. Speculative work stays where
    /// what it goes on from is.
    pub fn take_waiting(
        &mut self,
        cache: &PrefixCache,
        to: &Scheduler,
        now: Nanos,
    ) -> Option<Moving> {
        let id = self.turned_away?;
        let live = self.live.get(&id)?;
        let may_go = matches!(live.phase, Phase::Queued) && live.class == Class::Client;
        if !may_go || !self.fits_at(cache, id, to) {
            return None;
        }
        self.take_out(id, now)
    }

    fn fits_at(&self, cache: &PrefixCache, id: RequestId, to: &Scheduler) -> bool {
        let usable = |of: &Scheduler| cache.total(device(of.cfg.replica));
        self.live.get(&id).is_some_and(|live| {
            let whole = pages_for(live.prompt_tokens + live.output_max, self.cfg.page_tokens);
            whole <= usable(to) || usable(self) <= usable(to)
        })
    }

    fn take_out(&mut self, id: RequestId, now: Nanos) -> Option<Moving> {
        self.turned_away = self.turned_away.filter(|&other| other != id);
        self.claim = self.claim.filter(|&claimant| claimant != id);
        self.queue.remove(id);
        self.aside.remove(&id);
        self.speculative.remove(&id);
        let mut live = self.live.remove(&id)?;
        self.leave_program(&live, now);
        live.in_program = false;
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
        if live.class == Class::Speculative {
            self.speculative.insert(id);
        }
        self.live.insert(id, live);
        self.enter(cache, id, now);
        self.stats.moved_in += 1;
    }
}
