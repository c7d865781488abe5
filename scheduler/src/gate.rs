//! The door between arrivals and the queue: requests whose program is outside wait beside it until
//! their program comes in (`programs.rs`), in the order of the queue, for a bounded time.

use rootstock_memory::{Nanos, TierId};
use rootstock_radix::PrefixCache;

use crate::holding::{device, pages_for};
use crate::live::Live;
use crate::policy::{QueueKey, seconds_to_ns};
use crate::programs::ProgramKey;
use crate::request::{Class, RequestId};
use crate::scheduler::Scheduler;

/// Output tokens that are reckoned with when nothing is said.
const OUTPUT_TOKENS: u32 = 256;

impl Scheduler {
    /// A request that has not run comes to the queue, or waits beside it.
    pub(crate) fn enter(&mut self, cache: &PrefixCache, id: RequestId, now: Nanos) {
        let wait_ns = seconds_to_ns(self.cfg.program_wait_s);
        let live = &self.live[&id];
        let Some(key) = program_of(live).filter(|_| wait_ns > 0) else {
            return self.enqueue(id, now);
        };
        let (found, _) = self.probe(cache, live);
        let capacity = self.capacity(cache);
        self.programs.forget(now);
        self.programs.begin(&key, found / self.cfg.page_tokens, now);
        let pages = self.programs.needs(&key, self.pages_wanted(id));
        if let Some(live) = self.live.get_mut(&id) {
            live.in_program = true;
        }
        let watched = self.live.get(&id).is_some_and(Live::is_watched);
        if self.programs.is_inside(&key) || watched || self.programs.fits(pages, capacity) {
            self.let_in(&key, pages, capacity, now);
            return self.enqueue(id, now);
        }
        self.stats.held += 1;
        let live = &self.live[&id];
        let place = self.order.key(&live.key_parts(&self.order, now));
        let until = live.arrival.saturating_add(wait_ns);
        self.held.insert(place);
        self.held_until.insert((until, place));
        self.held_places.insert(id, (until, place));
    }

    /// Lets in whose program fits now, who has waited for long enough, and, with nothing else to
    /// do, the first.
    ///
    /// # Cost
    /// O(log held) where nobody comes in; else O(programs inside) for each that does.
    pub(crate) fn open_gate(&mut self, cache: &PrefixCache, now: Nanos) {
        if self.held.is_empty() {
            return;
        }
        let capacity = self.capacity(cache);
        self.programs.forget(now);
        loop {
            let overdue = self.held_until.first().filter(|(until, _)| *until <= now);
            let idle = self.running.is_empty() && self.queue.len() == 0;
            let (place, forced) = match (overdue, self.held.first()) {
                (Some(&(_, place)), _) => (place, true),
                (None, Some(&place)) => (place, idle),
                (None, None) => return,
            };
            let Some(key) = self.live.get(&place.id).and_then(program_of) else {
                return;
            };
            let pages = self.programs.needs(&key, self.pages_wanted(place.id));
            let inside = self.programs.is_inside(&key);
            if !inside && !forced && !self.programs.fits(pages, capacity) {
                return;
            }
            self.let_in(&key, pages, capacity, now);
            self.unhold(place.id);
            self.enqueue(place.id, now);
        }
    }

    /// A program comes in; where it does not fit, others give their places.
    fn let_in(&mut self, key: &ProgramKey, pages: u32, capacity: u64, now: Nanos) {
        let whole = self.programs.is_inside(key)
            || self.programs.fits(pages, capacity)
            || self.programs.make_room(pages, capacity, now);
        self.stats.let_in_over += u64::from(!whole);
        self.programs.enter(key, pages, now);
    }

    /// Forgets that a request waits beside the queue.
    pub(crate) fn unhold(&mut self, id: RequestId) {
        if let Some((until, place)) = self.held_places.remove(&id) {
            self.held.remove(&place);
            self.held_until.remove(&(until, place));
        }
    }

    /// A request leaves: its program is told.
    pub(crate) fn leave_program(&mut self, live: &Live, now: Nanos) {
        if let Some(key) = program_of(live).filter(|_| live.in_program) {
            let pages = pages_for(live.len(), self.cfg.page_tokens);
            self.programs
                .end(&key, pages, live.hints.session_final, now);
        }
    }

    /// When the next of those beside the queue has waited for long enough.
    pub(crate) fn gate_due_at(&self) -> Option<Nanos> {
        self.held_until.first().map(|&(until, _)| until)
    }

    /// Pages of a request with the output that is to be expected.
    fn pages_wanted(&self, id: RequestId) -> u32 {
        self.live.get(&id).map_or(0, |live| {
            let said = live.hints.osl.unwrap_or(OUTPUT_TOKENS);
            pages_for(live.len() + said.min(live.output_max), self.cfg.page_tokens)
        })
    }

    fn capacity(&self, cache: &PrefixCache) -> u64 {
        let tiers = [device(self.cfg.replica), TierId::Host];
        tiers
            .into_iter()
            .map(|tier| u64::from(cache.total(tier)))
            .sum()
    }
}

/// Whose place among those beside the queue, and until when.
pub(crate) type Held = (Nanos, QueueKey);

fn program_of(live: &Live) -> Option<ProgramKey> {
    let name = live.hints.program.clone()?;
    (live.class == Class::Client).then_some((live.ns.get(), name))
}
