//! The pages of one running request, and every change of who owns them.
//!
//! ```text
//!  page table of the request:   [ leased .............. | coming ... | own ....... ] | rest
//!                                 owned by the cache,      the copy's,  owned here,    promised,
//!                                 held by the lease        on their way private        not taken
//!
//!  open      lease + reservation          -> leased | - | rest
//!  take      n pages of rest (or more from the cache) -> own
//!  publish   complete pages of own        -> the cache; the lease now covers them; a page the
//!            cache already had is swapped in the table first, then the duplicate is released
//!  arrive    what a copy brought up       -> leased; promises it replaces go back
//!  stand_on  pages that a copy fills      -> coming: they are read before the copy has ended
//!  settle    the copy has ended           -> leased, and nothing is coming any more
//!  promise   more pages, or fewer         -> rest
//!  share     pages others computed        -> leased; own pages and promises they replace go back
//!  close     own, rest -> released; lease -> ended. Takes `self`: the one way out.
//! ```
//! Invariants: `table = pages(lease) ++ coming ++ own.ids()`; complete pages are never written
//! again.

use rootstock_memory::{CopyPlan, Nanos, PageId, Pages, ReplicaId, Reservation, StepId, TierId};
use rootstock_radix::{Fate, Hints, Key, Lease, PrefixCache, Short, SpanMeta, Token};

use crate::live::count;

/// Pages of one request on the device of one replica.
#[derive(Debug)]
pub(crate) struct Holding {
    lease: Lease,
    /// Of the copy that the lease waits for.
    coming: Vec<PageId>,
    own: Pages,
    rest: Reservation,
    table: Vec<PageId>,
    page_tokens: u32,
}

impl Holding {
    /// A lease on what is cached and a promise for what is not.
    pub(crate) fn open(
        cache: &PrefixCache,
        lease: Lease,
        rest: Reservation,
        page_tokens: u32,
    ) -> Self {
        let mut table = Vec::new();
        cache.pages(&lease, &mut table);
        let own = Pages::none(rest.tier());
        Self {
            lease,
            coming: Vec::new(),
            own,
            rest,
            table,
            page_tokens,
        }
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    pub(crate) fn table(&self) -> &[PageId] {
        &self.table
    }

    /// Pages held by the lease.
    pub(crate) fn leased_pages(&self) -> u32 {
        self.lease.len_tokens() / self.page_tokens
    }

    /// Tokens whose KV the cache holds for this request.
    pub(crate) fn leased_tokens(&self) -> u32 {
        self.lease.len_tokens()
    }

    /// Pages that go back to the pool at once when the request gives way.
    pub(crate) fn private_pages(&self) -> u32 {
        count(self.own.len()) + self.rest.left()
    }

    /// Pages of the request's table that the cache owns.
    pub(crate) fn leased(&self) -> &[PageId] {
        &self.table[..self.leased_pages() as usize]
    }

    /// Pages missing for a table of `pages`, beyond what was promised.
    pub(crate) fn missing(&self, pages: u32) -> u32 {
        pages.saturating_sub(count(self.table.len()) + self.rest.left())
    }

    /// Lengthens the table to `pages`. Changes nothing when it cannot.
    pub(crate) fn take(
        &mut self,
        cache: &mut PrefixCache,
        pages: u32,
        now: Nanos,
    ) -> Result<Vec<CopyPlan>, Short> {
        let mut copies = Vec::new();
        let missing = self.missing(pages);
        if missing > 0 {
            let (more, demotions) = cache.reserve(self.rest.tier(), missing, now)?;
            self.rest.merge(more);
            copies = demotions;
        }
        let wanted = pages.saturating_sub(count(self.table.len()));
        if wanted > 0 {
            let taken = cache.acquire(&mut self.rest, wanted);
            self.table.extend_from_slice(taken.ids());
            self.own.merge(taken);
        }
        Ok(copies)
    }

    /// Gives complete pages to the cache, where everyone can match them at once. `tokens` are
    /// those of the request, of which the first `computed` have their KV.
    pub(crate) fn publish(
        &mut self,
        cache: &mut PrefixCache,
        tokens: &[Token],
        computed: u32,
        args: &PublishArgs<'_>,
    ) {
        // What is leased has no gaps.
        let complete = match self.coming.is_empty() {
            true => computed / self.page_tokens,
            false => 0,
        };
        while self.leased_pages() < complete {
            let from = self.leased_pages();
            let said = args
                .hints
                .span(from..complete, self.page_tokens, args.prompt_tokens);
            let (to, meta) = said;
            let tail = self.own.split_off((to - from) as usize);
            let pages = std::mem::replace(&mut self.own, tail);
            let span = (from * self.page_tokens) as usize..(to * self.page_tokens) as usize;
            let meta = SpanMeta {
                busy_until: args.busy_until,
                ..meta
            };
            let done = cache.extend(&mut self.lease, &tokens[span], pages, &meta, args.now);
            for (index, page) in done.swapped {
                self.table[index as usize] = page;
            }
            assert_eq!(
                self.leased_pages(),
                to,
                "the lease covers what it was extended by"
            );
        }
    }

    /// Takes up what others computed since the lease was made. Returns the tokens gained.
    pub(crate) fn share(
        &mut self,
        cache: &mut PrefixCache,
        key: Key<'_>,
        max_tokens: u32,
        busy_until: Option<StepId>,
        now: Nanos,
    ) -> u32 {
        if !self.coming.is_empty() {
            return 0;
        }
        let before = self.leased_pages();
        let gained = cache.grow(&mut self.lease, key, max_tokens, now);
        if gained == 0 {
            return 0;
        }
        let after = self.leased_pages();
        let replaced = (after - before).min(count(self.own.len()));
        let tail = self.own.split_off(replaced as usize);
        let dropped = std::mem::replace(&mut self.own, tail);
        self.table.clear();
        cache.pages(&self.lease, &mut self.table);
        self.table.extend_from_slice(self.own.ids());
        cache.release(dropped, busy_until);
        let spare = (after - before - replaced).min(self.rest.left());
        let surplus = self.rest.split_off(spare);
        cache.cancel(surplus);
        gained
    }

    /// Puts the pages that the lease's copy fills into the table, before it has ended. For a
    /// request that has computed nothing itself.
    pub(crate) fn stand_on(&mut self, pages: &[PageId]) {
        self.coming = pages.to_vec();
        self.table.extend_from_slice(pages);
    }

    /// Whether rows stand on pages of a copy that was still under way.
    pub(crate) fn stands(&self) -> bool {
        !self.coming.is_empty()
    }

    /// Tokens that are leased or coming.
    pub(crate) fn covered_tokens(&self) -> u32 {
        self.leased_tokens() + count(self.coming.len()) * self.page_tokens
    }

    /// Whether rows stand on pages of a copy that failed.
    pub(crate) fn is_lost(&self, cache: &PrefixCache) -> bool {
        self.stands() && !self.is_fetching(cache) && !cache.has_arrived(&self.lease)
    }

    /// Takes up the pages of a copy that has ended. False: they will never hold what they should.
    pub(crate) fn settle(&mut self, cache: &mut PrefixCache, key: Key<'_>, now: Nanos) -> bool {
        if !self.stands() || self.is_fetching(cache) {
            return true;
        }
        let until = self.leased_pages() + count(self.coming.len());
        if !cache.has_arrived(&self.lease) {
            return false;
        }
        let until_tokens = until * self.page_tokens;
        cache.grow(&mut self.lease, key, until_tokens, now);
        self.table.clear();
        cache.pages(&self.lease, &mut self.table);
        let whole = self.leased_pages() == until;
        if whole {
            self.coming.clear();
        } else {
            let short = until - self.leased_pages().min(until);
            let gone = self.coming.len().saturating_sub(short as usize);
            self.coming.drain(..gone);
            self.table.extend_from_slice(&self.coming);
        }
        self.table.extend_from_slice(self.own.ids());
        whole
    }

    /// Whether the copy that the lease asked for is under way.
    pub(crate) fn is_fetching(&self, cache: &PrefixCache) -> bool {
        cache.is_promoting(&self.lease)
    }

    /// The copy has ended: takes up what is there now. Returns the tokens gained. For a request
    /// that has computed nothing itself.
    pub(crate) fn arrive(
        &mut self,
        cache: &mut PrefixCache,
        key: Key<'_>,
        max_tokens: u32,
        now: Nanos,
    ) -> u32 {
        let gained = cache.grow(&mut self.lease, key, max_tokens, now);
        self.table.clear();
        cache.pages(&self.lease, &mut self.table);
        gained
    }

    /// Makes the promise exactly what a table of `pages` needs beyond what it has.
    pub(crate) fn promise(
        &mut self,
        cache: &mut PrefixCache,
        pages: u32,
        now: Nanos,
    ) -> Result<Vec<CopyPlan>, Short> {
        let wanted = pages.saturating_sub(count(self.table.len()));
        let missing = self.missing(pages);
        let surplus = self.rest.split_off(self.rest.left().saturating_sub(wanted));
        cache.cancel(surplus);
        if missing == 0 {
            return Ok(Vec::new());
        }
        let (more, copies) = cache.reserve(self.rest.tier(), missing, now)?;
        self.rest.merge(more);
        Ok(copies)
    }

    /// Gives everything back. No step in flight may touch the pages any more.
    pub(crate) fn close(self, cache: &mut PrefixCache, fate: Fate, now: Nanos) {
        cache.release(self.own, None);
        cache.cancel(self.rest);
        cache.end(self.lease, fate, now);
    }

    /// Whether the table is what the lease and the own pages say; counts (own, promised) pages.
    pub(crate) fn recount(&self, cache: &PrefixCache) -> Option<(u32, u32)> {
        let mut table = Vec::new();
        cache.pages(&self.lease, &mut table);
        let leased_ok = table.len() == self.leased_pages() as usize;
        table.extend_from_slice(&self.coming);
        table.extend_from_slice(self.own.ids());
        (leased_ok && table == self.table).then(|| (count(self.own.len()), self.rest.left()))
    }
}

/// What goes with published pages.
#[derive(Debug)]
pub(crate) struct PublishArgs<'a> {
    pub(crate) hints: &'a Hints,
    pub(crate) prompt_tokens: u32,
    /// Last step in flight that may read this request's table.
    pub(crate) busy_until: Option<StepId>,
    pub(crate) now: Nanos,
}

/// Pages that `tokens` take.
pub(crate) fn pages_for(tokens: u32, page_tokens: u32) -> u32 {
    tokens.div_ceil(page_tokens)
}

/// Pages that have to become free before a refused reservation can be made, 1 or more.
pub(crate) fn missing_pages(short: &Short) -> u32 {
    let held = short.free_pages + short.evictable_pages;
    short.needed_pages.saturating_sub(held).max(1)
}

/// The device tier of a replica.
pub(crate) fn device(replica: ReplicaId) -> TierId {
    TierId::Device(replica)
}
