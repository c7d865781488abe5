//! Seats: which waiting request starts, what it needs to start, and what the pace of starting
//! says about when to come back.
//!
//! A request starts when a seat is free and the pages of everything it knows (prompt, and output
//! from before a preemption) are reserved, less what the cache holds. So a prefill, once begun,
//! never runs out of pages; only decoding asks for more. Beside its own pages a newcomer leaves
//! one page for each running request that need not give way to it, so that starting it does not
//! preempt someone a few tokens later.

use rootstock_memory::{CopyPlan, Nanos};
use rootstock_radix::{Fate, Lease, PrefixCache};

use crate::emit::CachedTokens;
use crate::holding::{Holding, device, missing_pages, pages_for};
use crate::live::{Fetching, Live, Phase, count};
use crate::request::RequestId;
use crate::scheduler::{Cx, Scheduler};

/// Why a request cannot start now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denied {
    /// Every seat is taken.
    Seats,
    /// Not enough pages are free or evictable.
    Pages {
        /// Pages missing.
        missing: u32,
        /// Pages that copies under way will free.
        in_transit: u32,
    },
    /// A copy that somebody else asked for brings what it needs.
    Coming,
}

/// A matched prefix and the pages still needed: an admission in the making.
#[derive(Debug)]
pub(crate) struct Match {
    pub(crate) lease: Lease,
    pub(crate) cached: CachedTokens,
    pub(crate) needed_pages: u32,
}

impl Scheduler {
    /// Gives a waiting request a seat and its pages, or changes nothing but the recency of what
    /// it matched.
    pub(crate) fn admit(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
    ) -> Result<Vec<CopyPlan>, Denied> {
        if count(self.running.len()) >= self.cfg.max_running {
            return Err(Denied::Seats);
        }
        if let Some(denied) = self.hopeless(cx.cache, id) {
            return Err(denied);
        }
        let found = self.find(cx, id);
        let tier = device(self.cfg.replica);
        let available = cx.cache.available(tier);
        let wanted = found.needed_pages + self.headroom(id);
        if available < wanted {
            cx.cache.end(found.lease, Fate::Unused, cx.now);
            return Err(Denied::Pages {
                missing: wanted - available,
                in_transit: cx.cache.returning(tier),
            });
        }
        self.seat(cx, id, found)
    }

    /// Matches and leases what is cached of a waiting request. What is on a lower tier counts
    /// only where it will be copied up.
    pub(crate) fn find(&self, cx: &mut Cx<'_>, id: RequestId) -> Match {
        let live = &self.live[&id];
        let replica = self.cfg.replica;
        let found = cx
            .cache
            .match_lease(live.cache_key(), replica, live.len() - 1, cx.now);
        let leased_pages = found.lease.len_tokens() / self.cfg.page_tokens;
        let fetch = !live.fetch_failed && self.worth_fetching(found.host_tokens);
        Match {
            cached: CachedTokens {
                device: found.device_tokens,
                host: if fetch {
                    found.host_tokens - found.read_tokens
                } else {
                    0
                },
                storage: if fetch { found.read_tokens } else { 0 },
            },
            needed_pages: pages_for(live.len(), self.cfg.page_tokens) - leased_pages,
            lease: found.lease,
        }
    }

    /// Reserves what is missing and seats the request; ends the lease when that fails. With a
    /// prefix on host it waits for that in its seat.
    pub(crate) fn seat(
        &mut self,
        cx: &mut Cx<'_>,
        id: RequestId,
        found: Match,
    ) -> Result<Vec<CopyPlan>, Denied> {
        let tier = device(self.cfg.replica);
        let Match {
            mut lease,
            mut cached,
            needed_pages,
        } = found;
        if cached.below() > 0 && cx.cache.is_coming(&lease) {
            cx.cache.end(lease, Fate::Unused, cx.now);
            return Err(Denied::Coming);
        }
        let (mut rest, mut copies) = match cx.cache.reserve(tier, needed_pages, cx.now) {
            Ok(granted) => granted,
            Err(short) => {
                cx.cache.end(lease, Fate::Unused, cx.now);
                return Err(Denied::Pages {
                    missing: missing_pages(&short),
                    in_transit: short.in_transit_pages,
                });
            }
        };
        let live = &self.live[&id];
        cx.cache.describe(live.tenant, &mut lease, &live.hints);
        let copy = match cached.below() {
            0 => None,
            _ => cx.cache.promote(&mut lease, &mut rest, cx.now),
        };
        self.queue.groups.serve(id);
        self.queue.remove(id);
        self.running.insert(id);
        self.claim = self.claim.filter(|&claimant| claimant != id);
        self.pace.admitted(cx.now);
        self.stats.admissions += 1;
        let hold = Holding::open(cx.cache, lease, rest, self.cfg.page_tokens);
        match copy {
            Some(copy) => {
                let pages = count(copy.to.1.len());
                let until = hold.leased_tokens() + pages * self.cfg.page_tokens;
                let pages = copy.to.1.clone();
                copies.push(copy);
                self.stats.fetches += 1;
                let live = self.live.get_mut(&id).expect("a seated request is live");
                live.phase = Phase::Fetching(Fetching {
                    hold,
                    found: cached,
                    until,
                    pages,
                });
            }
            None => {
                (cached.host, cached.storage) = (0, 0);
                self.begin(cx, id, hold, cached);
            }
        }
        Ok(copies)
    }

    /// Pages to leave free for those running that need not give way to `id`.
    fn headroom(&self, id: RequestId) -> u32 {
        let rank = self.live[&id].rank();
        let stays = |other: &&Live| match self.cfg.preempt_gap {
            Some(gap) => !rank.outranks(other.rank(), gap),
            None => true,
        };
        count(self.seated().filter(stays).count())
    }

    /// By the last look at the cache, whether trying would be in vain. Keeps long queues of
    /// requests that do not fit from being matched every step. Always worth trying when nobody
    /// holds pages.
    fn hopeless(&self, cache: &PrefixCache, id: RequestId) -> Option<Denied> {
        if self.running.is_empty() && self.draining.is_empty() {
            return None;
        }
        let live = &self.live[&id];
        let page_tokens = self.cfg.page_tokens;
        let needed = pages_for(live.len(), page_tokens) - live.device_probe / page_tokens;
        let tier = device(self.cfg.replica);
        let missing = needed.saturating_sub(cache.available(tier));
        (missing > 0).then(|| Denied::Pages {
            missing,
            in_transit: cache.returning(tier),
        })
    }
}

/// The pace at which requests leave the queue, for `retry_after_s`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    last: Option<Nanos>,
    /// Running mean of the time between admissions.
    gap_ns: u64,
}

impl Pace {
    fn admitted(&mut self, now: Nanos) {
        if let Some(last) = self.last {
            let gap = now.saturating_sub(last);
            self.gap_ns = self.gap_ns - self.gap_ns / 8 + gap / 8;
        }
        self.last = Some(now);
    }

    /// Seconds until half the queue has left: by then a place is likely. Between 1 and 60.
    pub(crate) fn retry_after_s(&self, queue_len: u32) -> u32 {
        let ns = self.gap_ns.saturating_mul(u64::from(queue_len) / 2);
        u32::try_from(ns / 1_000_000_000).unwrap_or(60).clamp(1, 60)
    }
}
