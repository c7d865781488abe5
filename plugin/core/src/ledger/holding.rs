//! What a request holds: one lease, and the list of pages that its host will give back.

use std::sync::atomic::Ordering;

use rootstock_memory::{Nanos, PageId, Pages};
use rootstock_radix::{Dedup, Fate, Key, Lease, SpanMeta};

use super::{
    About, ContentHash, DEVICE, Evicted, HASH_WORDS, NONE, PageLedger, REPLICA, State, WHOLE_PROMPT,
};

/// Cached pages that one user of them holds, in the order of the prompt.
#[derive(Debug)]
pub(super) struct Holding {
    /// None in a spare one.
    pub(super) lease: Option<Lease>,
    pub(super) pages: Vec<u32>,
    /// The next one that ends in the same page.
    next: u32,
    /// Its program is done.
    last: bool,
}

impl PageLedger {
    /// Pages at the head of a list of which each is cached and follows the one before.
    pub(super) fn run_length(&self, pages: &[u32]) -> usize {
        let cached = |page: u32| self.entries[page as usize].state == State::Cached;
        let Some(&first) = pages.first().filter(|&&page| cached(page)) else {
            return 0;
        };
        let mut last = first;
        let follows = pages[1..].iter().take_while(|&&page| {
            let follows = cached(page) && self.entries[page as usize].parent == last;
            last = page;
            follows
        });
        1 + follows.count()
    }

    /// Leases the path to the end of a run of cached pages.
    pub(super) fn hold(&mut self, run: &[u32], now: Nanos) {
        self.words.clear();
        let mut before = Vec::new();
        let mut at = self.entries[run[0] as usize].parent;
        while at != NONE {
            before.push(at);
            at = self.entries[at as usize].parent;
        }
        for &page in before.iter().rev().chain(run) {
            self.words.extend(self.entries[page as usize].hash);
        }
        let key = Key {
            ns: self.ns,
            tokens: &self.words,
        };
        let found = self.cache.match_lease(key, REPLICA, NONE, now);
        let at = self.put(found.lease, run.to_vec());
        self.hang(at);
    }

    pub(super) fn put(&mut self, lease: Lease, pages: Vec<u32>) -> u32 {
        let holding = Holding {
            lease: Some(lease),
            pages,
            next: NONE,
            last: false,
        };
        if let Some(at) = self.spare.pop() {
            self.holdings[at as usize] = holding;
            return at;
        }
        self.holdings.push(holding);
        u32::try_from(self.holdings.len() - 1).unwrap_or(NONE)
    }

    pub(super) fn holding(&mut self, at: u32) -> &mut Holding {
        &mut self.holdings[at as usize]
    }

    /// Puts a holding under the page in which it ends.
    pub(super) fn hang(&mut self, at: u32) {
        let Some(&last) = self.holding(at).pages.last() else {
            return;
        };
        self.holding(at).next = self.entries[last as usize].holding;
        self.entries[last as usize].holding = at;
    }

    /// Takes a holding from under the page in which it ends.
    pub(super) fn unhang(&mut self, at: u32) {
        let Some(&last) = self.holding(at).pages.last() else {
            return;
        };
        let next = self.holding(at).next;
        let mut one = self.entries[last as usize].holding;
        if one == at {
            self.entries[last as usize].holding = next;
            return;
        }
        while one != NONE {
            let holding = self.holding(one);
            if holding.next == at {
                holding.next = next;
                return;
            }
            one = holding.next;
        }
    }

    /// The holding of `cached` pages that ends in `after`, taken from under it; a new one for
    /// none.
    pub(super) fn holding_to_extend(
        &mut self,
        cached: usize,
        after: Option<u32>,
        now: Nanos,
    ) -> Option<u32> {
        let Some(last) = after.filter(|_| cached > 0) else {
            let key = Key {
                ns: self.ns,
                tokens: &[],
            };
            let found = self.cache.match_lease(key, REPLICA, 0, now);
            return Some(self.put(found.lease, Vec::new()));
        };
        let mut at = self.entries[last as usize].holding;
        while at != NONE {
            let holding = self.holding(at);
            let leased = holding.lease.as_ref().map_or(0, Lease::len_pages);
            if holding.pages.len() == cached && leased as usize == cached {
                self.unhang(at);
                return Some(at);
            }
            at = holding.next;
        }
        None
    }

    /// Puts pages behind a holding and into the tree; those that are in it.
    pub(super) fn extend(
        &mut self,
        at: u32,
        pages: &[u32],
        words: &[u32],
        meta: SpanMeta,
        now: Nanos,
    ) -> usize {
        let holding = &mut self.holdings[at as usize];
        let Some(lease) = &mut holding.lease else {
            return 0;
        };
        let ids = pages.iter().map(|&page| PageId::new(page)).collect();
        let meta = SpanMeta {
            dedup: Dedup::Keep,
            ..meta
        };
        let ids = Pages::adopt(DEVICE, ids);
        let depth = holding.pages.len();
        let done = self.cache.extend(lease, words, ids, &meta, now);
        holding.pages.extend_from_slice(pages);
        let inserted = done.inserted_pages as usize;
        let twice = pages.len() - inserted;
        self.stats.duplicate_pages += twice as u64;
        for &page in &pages[..twice] {
            self.entries[page as usize].state = State::Other;
        }
        if inserted == 0 {
            return 0;
        }
        // Where pages were computed twice, the tree's own come before these.
        let mut parent = (depth + twice)
            .checked_sub(1)
            .and_then(|before| self.cache.tree_page(lease, before))
            .map_or(NONE, PageId::get);
        for (page, hash) in pages[twice..]
            .iter()
            .zip(words[twice * HASH_WORDS..].chunks_exact(HASH_WORDS))
        {
            let entry = &mut self.entries[*page as usize];
            entry.state = State::Cached;
            entry.bad = false;
            entry.parent = parent;
            entry.hash.copy_from_slice(hash);
            parent = *page;
        }
        inserted
    }

    /// Puts a holding back under its last page, or ends it when it has none.
    pub(super) fn close_or_hang(&mut self, at: u32, fate: Fate, now: Nanos) {
        if !self.holding(at).pages.is_empty() {
            self.hang(at);
            return;
        }
        let holding = self.holding(at);
        let is_last = holding.last;
        let Some(lease) = holding.lease.take() else {
            return;
        };
        self.spare.push(at);
        let fate = if is_last && fate == Fate::Keep {
            Fate::Superseded
        } else {
            fate
        };
        self.cache.end(lease, fate, now);
    }

    /// Says of a holding what is known of its request.
    pub(super) fn describe(&mut self, at: u32, about: &About) {
        let holding = &mut self.holdings[at as usize];
        holding.last = about.hints.session_final;
        if let Some(lease) = &mut holding.lease {
            self.cache.describe(about.tenant, lease, &about.hints);
        }
    }

    /// Pins what a request asks to pin, once its whole prompt is cached.
    pub(super) fn pin_prompt(&mut self, at: u32, about: &About, now: Nanos) {
        let prompt_pages = (about.prompt_tokens / about.page_tokens) as usize;
        let whole = self.holding(at).pages.len() >= prompt_pages && prompt_pages > 0;
        if !whole || about.hints.pins.is_empty() || about.pinned.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(lease) = &self.holdings[at as usize].lease else {
            return;
        };
        let last = self.cache.tree_page(lease, prompt_pages - 1);
        let mut path = Vec::new();
        let mut page = last.map_or(NONE, PageId::get);
        while page != NONE {
            path.push(page);
            page = self.entries[page as usize].parent;
        }
        let names = path.iter().rev();
        let names = names.flat_map(|&page| self.entries[page as usize].hash);
        let words: Vec<u32> = names.collect();
        for &(tokens, ttl) in &about.hints.pins {
            let pages = match tokens {
                WHOLE_PROMPT => prompt_pages,
                tokens => ((tokens / about.page_tokens) as usize).min(prompt_pages),
            };
            let part = &words[..(pages * HASH_WORDS).min(words.len())];
            let _outcome = self.pin_prefix(about.tenant, part, ttl, now);
        }
    }

    /// Gives back the pages at the head of a list that a holding has at its end; how many.
    pub(super) fn free_held(&mut self, at: u32, pages: &[u32], fate: Fate, now: Nanos) -> usize {
        self.unhang(at);
        let mut freed = 0;
        while let Some(&last) = self.holding(at).pages.last() {
            if pages.get(freed) == Some(&last) && self.take(last) {
                freed += 1;
            } else if self.entries[last as usize].early > 0 {
                self.entries[last as usize].early -= 1;
            } else {
                break;
            }
            self.holding(at).pages.pop();
        }
        self.close_or_hang(at, fate, now);
        freed
    }

    /// Gives back a page in which no holding ends.
    pub(super) fn free_alone(&mut self, page: u32, back: &mut Vec<PageId>) {
        if page == 0 || !self.take(page) {
            return;
        }
        let idle = self.count(page) == 0;
        let entry = &mut self.entries[page as usize];
        if entry.state != State::Owned {
            // A holding has it in its middle, and will come to it.
            entry.early += 1;
        } else if idle {
            entry.state = State::Other;
            back.push(PageId::new(page));
        }
    }

    /// A page leaves the pool for its first user.
    pub(super) fn hand_out(&mut self, page: u32, gone: &mut Vec<Evicted>) {
        let entry = &mut self.entries[page as usize];
        let was: Option<ContentHash> =
            (entry.state == State::Cached && !entry.bad).then_some(entry.hash);
        entry.state = State::Owned;
        entry.bad = false;
        entry.early = 0;
        entry.parent = NONE;
        if let Some(hash) = was {
            gone.push((page, hash));
            self.generation += 1;
        }
        self.add(page);
    }
}

/// What is said about the pages from `from` on, and up to which that is the same.
pub(super) fn span(about: &About, from: usize, to: usize) -> (usize, SpanMeta) {
    let narrow = |at: usize| u32::try_from(at).unwrap_or(NONE);
    let pages = narrow(from)..narrow(to);
    let (end, meta) = about
        .hints
        .span(pages, about.page_tokens, about.prompt_tokens);
    (end as usize, meta)
}

impl Drop for PageLedger {
    /// Ends what is held: a host may let its pool go at any time.
    fn drop(&mut self) {
        for lease in self.holdings.drain(..).filter_map(|holding| holding.lease) {
            self.cache.end(lease, Fate::Preempted, Nanos::MAX);
        }
    }
}
