//! Prefixes on the host tier: whether copying one up is worth it, and what happens when the copy
//! has ended.
//!
//! ```text
//!   admitted, copying is quicker       -> Fetching: all pages reserved, a copy out
//!   copy done                          -> Running: the lease covers what came
//!   copy failed, or brought less       -> Running: the rest is computed
//!     and the rest's pages are gone    -> back to the queue, in its old place
//!   abort, deadline, giving way        -> everything goes back; the copy lands in the cache
//! ```
//! A fetch blocks nobody: the step goes on without the request. It holds a seat and its pages. A
//! request never fetches again after a copy for it has failed, so it cannot fail for ever.

use rootstock_radix::{Fate, Key, Served};
use smallvec::SmallVec;

use crate::draft::Draft;
use crate::emit::{CachedTokens, Emit};
use crate::holding::{Holding, pages_for};
use crate::live::{Fetching, Live, Phase, Running};
use crate::request::{Class, RequestId};
use crate::scheduler::{Cx, Scheduler};

impl Scheduler {
    /// Whether copying these tokens up is at least as quick as computing them.
    pub(crate) fn worth_fetching(&self, tokens: u32) -> bool {
        tokens > 0 && self.copying_ns(tokens) <= self.computing_ns(tokens)
    }

    /// What becomes of the KV of a request that gives way: copied down when that, and up again, is
    /// quicker than computing it once more.
    pub(crate) fn fate_of_preempted(&self, tokens: u32) -> Fate {
        let worth = self.copying_ns(tokens).saturating_mul(2) < self.computing_ns(tokens);
        if worth { Fate::Preempted } else { Fate::Keep }
    }

    fn copying_ns(&self, tokens: u32) -> u64 {
        let pages = u64::from(pages_for(tokens, self.cfg.page_tokens));
        u64::from(self.cfg.copy_ns) + pages * u64::from(self.cfg.copy_ns_per_page)
    }

    fn computing_ns(&self, tokens: u32) -> u64 {
        u64::from(tokens).saturating_mul(self.order.prefill_ns_per_token)
    }

    /// Whether a seated request fetches the very page that a waiting one needs next.
    pub(crate) fn fetched_by_another(&self, id: RequestId) -> bool {
        let live = &self.live[&id];
        let page = self.cfg.page_tokens;
        let (from, to) = (live.device_probe, live.device_probe + page);
        if live.cached_probe < to {
            return false;
        }
        let wanted = &live.tokens[..to as usize];
        let fetches = |other: &Live| {
            let Phase::Fetching(fetch) = &other.phase else {
                return false;
            };
            fetch.hold.leased_tokens() <= from
                && fetch.until >= to
                && other.ns == live.ns
                && other.tokens.get(..to as usize) == Some(wanted)
        };
        self.running.iter().any(|other| fetches(&self.live[other]))
    }

    /// Seats whose copies have ended start to compute.
    pub(crate) fn settle_fetches(&mut self, cx: &mut Cx<'_>, draft: &mut Draft) {
        let ended = |id: &&RequestId| match &self.live[id].phase {
            Phase::Fetching(fetch) => !fetch.hold.is_fetching(cx.cache),
            Phase::Queued | Phase::Preempted | Phase::Running(_) | Phase::Draining(_) => false,
        };
        let ended: Vec<RequestId> = self.running.iter().filter(ended).copied().collect();
        for id in ended {
            self.settle_fetch(cx, draft, id);
        }
    }

    fn settle_fetch(&mut self, cx: &mut Cx<'_>, draft: &mut Draft, id: RequestId) {
        let page_tokens = self.cfg.page_tokens;
        let live = self.live.get_mut(&id).expect("a seated request is live");
        let waits = if live.preemptions > 0 {
            Phase::Preempted
        } else {
            Phase::Queued
        };
        let Phase::Fetching(fetch) = std::mem::replace(&mut live.phase, waits) else {
            return;
        };
        let Fetching {
            mut hold,
            found,
            until,
        } = fetch;
        let promised = until - hold.leased_tokens();
        let key = Key {
            ns: live.ns,
            tokens: &live.tokens,
        };
        let gained = hold.arrive(cx.cache, key, live.len() - 1, cx.now);
        let fetched = gained.min(promised);
        live.fetch_failed = fetched < promised;
        self.stats.fetches_failed += u64::from(live.fetch_failed);
        self.stats.fetched_tokens += u64::from(fetched);
        self.stats.shared_tokens += u64::from(gained - fetched);
        let wanted = pages_for(live.len(), page_tokens);
        match hold.promise(cx.cache, wanted, cx.now) {
            Ok(mut copies) => draft.copies.append(&mut copies),
            Err(_) => {
                live.cached_probe = hold.leased_tokens();
                live.device_probe = live.cached_probe;
                hold.close(cx.cache, Fate::Keep, cx.now);
                self.running.remove(&id);
                self.enqueue(id, cx.now);
                return;
            }
        }
        // What was read from storage stands behind what host had.
        let cached = CachedTokens {
            host: fetched.min(found.host),
            storage: fetched.saturating_sub(found.host),
            ..found
        };
        self.begin(cx, id, hold, cached);
    }

    /// A seated request starts to compute after what it has.
    pub(crate) fn begin(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
        hold: Holding,
        cached: CachedTokens,
    ) {
        let live = self.live.get_mut(&id).expect("a seated request is live");
        let computed = hold.leased_tokens();
        if live.first_admission.is_none() && live.class == Class::Client {
            let served = Served {
                prompt_tokens: live.prompt_tokens.into(),
                device_tokens: cached.device.into(),
                host_tokens: cached.host.into(),
                storage_tokens: cached.storage.into(),
            };
            cx.cache.served(hold.lease(), served);
        }
        live.phase = Phase::Running(Running {
            hold,
            computed,
            launched: computed,
            pending: 0,
            flight: SmallVec::new(),
            last_row: None,
            drafting: false,
            yielding: false,
        });
        if live.first_admission.is_some() {
            return;
        }
        live.first_admission = Some((cx.now, cached));
        let (tenant, uncached) = (live.tenant, live.len() - computed);
        let billed = live.class == Class::Client;
        if billed {
            self.stats.prompt_tokens += u64::from(live.prompt_tokens);
            self.stats.cached_tokens += u64::from(cached.total());
        }
        cx.out.push(Emit::Started {
            request: id,
            label: live.label,
            cached,
            prompt_tokens: live.prompt_tokens,
        });
        if billed {
            self.queue.charge(tenant, uncached);
        }
    }
}
