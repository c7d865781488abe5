//! The cache for hosts that count references to pages themselves and know content by hashes: an
//! engine whose block pool hands out ids, counts who uses each, and frees them one by one.
//!
//! ```text
//!           allocate              cache                     free (last count)
//!   free -------------> owned ------------> cached, held ---------------------> cached, idle
//!    ^                    | free                ^    touch                          |
//!    +--------------------+                     +----------------------------------+
//!    +------------------------------------------------ allocate (evicts) ----------+
//! ```
//! A page is named by a chained hash over all tokens up to its end, so equal hashes are equal
//! prefixes, as the host itself believes. The tree is keyed by these hashes: one page of it is
//! the eight words of one. What a request holds is one [`crate::radix::Lease`] over its cached
//! pages and whatever it owns beyond them; the list of pages of each lease is kept here, because
//! hosts free pages, not leases. Pages that are freed in another order than from the end keep the
//! lease until they are all back: more is kept than must be, never less.
//!
//! The host's tables only grow, so a page that was computed twice stays with who computed it, and
//! is free when that request is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rootstock_memory::{Corruption, Nanos, PageId, Pages, ReplicaId, Reservation, TierId};
use rootstock_radix::{
    Action, CacheConfig, CacheError, Fate, Hints, Key, NamespaceId, NamespaceKey, Outcome,
    PolicyKind, PrefixCache, SpanMeta, Target, TenantId, Ttl,
};
use thiserror::Error;

mod holding;

use crate::hints::WHOLE_PROMPT;
use holding::{Holding, span};

/// Words of a content hash: 256 bits; shorter hashes are filled with zeros.
pub const HASH_WORDS: usize = 8;

/// Name of a page: a hash over all tokens up to its end.
pub type ContentHash = [u32; HASH_WORDS];

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);
const NONE: u32 = u32::MAX;

/// Lookups that are remembered until the cache changes.
const MEMOS: usize = 256;

/// Sizes and choices of a ledger.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LedgerConfig {
    /// Usable pages, with ids from 1 on; id 0 is the host's null page.
    pub pages: u32,
    /// In which order pages go.
    pub policy: PolicyKind,
    /// Share of the pages that pins may hold.
    pub pin_budget: f64,
    /// Pages that the longest possible request needs: pins always leave that many.
    pub request_pages: u32,
}

/// What the host asked for cannot be.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// More pages than can be had.
    #[error("{asked} pages asked for, {free} can be had: wait for a request to end")]
    Short {
        /// Pages asked for.
        asked: u32,
        /// Pages that are free or can be evicted.
        free: u32,
    },
    /// A page that does not exist.
    #[error("page {page} does not exist, 0 to {last} do")]
    Unknown {
        /// Its id.
        page: u32,
        /// The last id.
        last: u32,
    },
    /// A page that nobody uses is given back, or used without being asked for.
    #[error("page {page} is not in use: it was freed before")]
    NotHeld {
        /// Its id.
        page: u32,
    },
    /// A cache that cannot be made.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In the pool, or the duplicate of a page of the tree, which its lease gives back.
    Other,
    /// Handed out, content unnamed.
    Owned,
    /// In the tree.
    Cached,
}

/// What is kept of one page.
#[derive(Clone, Copy, Debug)]
struct Entry {
    state: State,
    /// Content known to be bad: it is not found any more.
    bad: bool,
    /// The page before it in the tree; `NONE` at the root.
    parent: u32,
    /// First holding that ends here.
    holding: u32,
    /// Uses given back although a holding does not end here yet.
    early: u32,
    hash: ContentHash,
}

/// A lookup and its answer.
#[derive(Clone, Default, Debug)]
struct Memo {
    asked: usize,
    last: ContentHash,
    at: u64,
    found: Vec<u32>,
}

/// What a host says about the request that it caches pages of.
#[derive(Debug, Default)]
pub struct About {
    /// Its hints.
    pub hints: Hints,
    /// Whose pins and programs these are.
    pub tenant: TenantId,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens a page of the host.
    pub page_tokens: u32,
    pinned: AtomicBool,
}

impl About {
    /// What a request says.
    pub fn new(hints: Hints, tenant: TenantId, prompt_tokens: u32, page_tokens: u32) -> Self {
        Self {
            hints,
            tenant,
            prompt_tokens,
            page_tokens: page_tokens.max(1),
            pinned: AtomicBool::new(false),
        }
    }
}

/// Complete pages of a request that are to be named.
#[derive(Clone, Copy, Debug)]
pub struct Complete<'a> {
    /// How many pages of the request come before them, all named.
    pub cached: usize,
    /// The last of those.
    pub after: Option<u32>,
    /// The pages.
    pub pages: &'a [u32],
    /// The words of their hashes.
    pub words: &'a [u32],
    /// What is said about the request.
    pub about: Option<&'a About>,
}

/// A page that went, and what it was.
pub type Evicted = (u32, ContentHash);

/// Counts of a ledger. Counters only grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LedgerStats {
    /// Counter: lookups.
    pub lookups: u64,
    /// Counter: those answered from memory, because nothing had changed since.
    pub repeated: u64,
    /// Counter: pages evicted.
    pub evicted_pages: u64,
    /// Counter: pages that two requests computed.
    pub duplicate_pages: u64,
    /// Counter: pages that could not be named, because they follow none that is.
    pub unnamed_pages: u64,
    /// Distinct pages pinned.
    pub pinned_pages: u32,
    /// Counter: pins that gave way before their deadline.
    pub pins_yielded: u64,
}

/// How many use each page. Shared with whoever shows the counts.
pub type Counts = Arc<[AtomicU32]>;

/// A prefix cache behind ids, counts and content hashes.
#[derive(Debug)]
pub struct PageLedger {
    cache: PrefixCache,
    ns: NamespaceId,
    counts: Counts,
    entries: Vec<Entry>,
    holdings: Vec<Holding>,
    spare: Vec<u32>,
    memos: Vec<Memo>,
    generation: u64,
    words: Vec<u32>,
    found: Vec<PageId>,
    stats: LedgerStats,
}

impl PageLedger {
    /// A ledger with all pages free.
    ///
    /// # Errors
    /// A size that cannot be, with its bounds.
    pub fn new(config: &LedgerConfig) -> Result<Self, LedgerError> {
        let pages = config.pages;
        let spare = pages.saturating_sub(config.request_pages);
        // Half a page more, so that no rounding takes one away.
        let spare = (f64::from(spare) + 0.5) / f64::from(pages.max(1));
        let mut cache = PrefixCache::new(&CacheConfig {
            page_tokens: 8,
            device_pages: vec![pages],
            policy: config.policy,
            pin_budget: config.pin_budget.min(spare),
            // A node has a page of its own, so that one is always free for a split.
            max_nodes: pages.saturating_add(64),
            max_namespaces: 1,
            ..CacheConfig::default()
        })?;
        let ns = cache.namespace(&NamespaceKey::default())?;
        let blank = Entry {
            state: State::Other,
            bad: false,
            parent: NONE,
            holding: NONE,
            early: 0,
            hash: [0; HASH_WORDS],
        };
        Ok(Self {
            cache,
            ns,
            counts: (0..=pages).map(|_| AtomicU32::new(0)).collect(),
            entries: vec![blank; pages as usize + 1],
            holdings: Vec::new(),
            spare: Vec::new(),
            memos: vec![Memo::default(); MEMOS],
            generation: 1,
            words: Vec::new(),
            found: Vec::new(),
            stats: LedgerStats::default(),
        })
    }

    /// How many use each page, by id.
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The name of a page, while it is cached.
    pub fn hash_of(&self, page: u32) -> Option<ContentHash> {
        let entry = self.entries.get(page as usize)?;
        (entry.state == State::Cached && !entry.bad).then_some(entry.hash)
    }

    /// Pages of the prompt up to the end of a page, while it is cached.
    ///
    /// # Cost
    /// Linear in them.
    pub fn depth_of(&self, page: u32) -> Option<u32> {
        self.hash_of(page)?;
        let (mut at, mut pages) = (page, 0);
        while at != NONE {
            at = self.entries[at as usize].parent;
            pages += 1;
        }
        Some(pages)
    }

    /// Pages that can be had: free, or cached and idle. Pinned ones are not counted.
    pub fn available(&self) -> u32 {
        self.cache.available(DEVICE) - self.cache.pinned_idle(DEVICE)
    }

    /// The page of one hash.
    ///
    /// # Cost
    /// Linear in the pages: for whole prompts there is [`Self::find`].
    pub fn page_of(&self, hash: &ContentHash) -> Option<u32> {
        let at = self
            .entries
            .iter()
            .position(|entry| entry.state == State::Cached && !entry.bad && entry.hash == *hash)?;
        u32::try_from(at).ok()
    }

    /// The pages of the longest cached prefix of a prompt of `asked` pages; `hash_at` reads the
    /// name of one. Nothing keeps them until they are touched.
    ///
    /// # Cost
    /// Reads one name when nothing has changed since the same question, else all.
    pub fn find(&mut self, asked: usize, mut hash_at: impl FnMut(usize) -> ContentHash) -> &[u32] {
        self.stats.lookups += 1;
        let Some(end) = asked.checked_sub(1) else {
            return &[];
        };
        let last = hash_at(end);
        let slot = last[0] as usize % MEMOS;
        let memo = &self.memos[slot];
        if memo.at == self.generation && memo.asked == asked && memo.last == last {
            self.stats.repeated += 1;
            return &self.memos[slot].found;
        }
        self.words.clear();
        (0..asked).for_each(|at| self.words.extend(hash_at(at)));
        self.found.clear();
        let key = Key {
            ns: self.ns,
            tokens: &self.words,
        };
        self.cache.peek(key, REPLICA, &mut self.found);
        let entries = &self.entries;
        let good = self
            .found
            .iter()
            .take_while(|page| !entries[page.index()].bad);
        let memo = &mut self.memos[slot];
        (memo.asked, memo.last, memo.at) = (asked, last, self.generation);
        memo.found.clear();
        memo.found.extend(good.map(|page| page.get()));
        &memo.found
    }

    /// One more user of each of these pages, which keeps them.
    ///
    /// # Errors
    /// A page that does not exist, or that is neither cached nor in use; nothing is changed.
    pub fn touch(&mut self, pages: &[u32], now: Nanos) -> Result<(), LedgerError> {
        for &page in pages {
            let entry = self.entry(page)?;
            if entry.state != State::Cached && page != 0 && self.count(page) == 0 {
                return Err(LedgerError::NotHeld { page });
            }
        }
        let mut rest = pages;
        while let Some((&first, _)) = rest.split_first() {
            let run = self.run_length(rest);
            let (run, after) = rest.split_at(run.max(1));
            for &page in run {
                self.add(page);
            }
            if self.entries[first as usize].state == State::Cached {
                self.hold(run, now);
            }
            rest = after;
        }
        Ok(())
    }

    /// Hands out `count` pages, evicting what is worth least; each has one user. Appends their ids
    /// to `out`, and to `gone` what had to go for them.
    ///
    /// # Errors
    /// Fewer can be had; nothing is changed.
    pub fn allocate(
        &mut self,
        count: u32,
        now: Nanos,
        out: &mut Vec<u32>,
        gone: &mut Vec<Evicted>,
    ) -> Result<(), LedgerError> {
        let free = self.available();
        if count > free {
            return Err(LedgerError::Short { asked: count, free });
        }
        // What is free first, then page by page, so that ids come in the order of eviction.
        let mut left = count;
        while left > 0 {
            let n = self.cache.free(DEVICE).clamp(1, left);
            let reserved = self.cache.reserve(DEVICE, n, now);
            let (mut room, _): (Reservation, _) = reserved.map_err(|_| LedgerError::Short {
                asked: left,
                free: n,
            })?;
            let got = self.cache.acquire(&mut room, n).disband();
            self.cache.cancel(room);
            for id in got {
                self.hand_out(id.get(), gone);
                out.push(id.get());
            }
            left -= n;
        }
        Ok(())
    }

    /// Names complete pages of a request, so that others find them. Returns how many of them are
    /// in the cache now; the others stay with their request, because they are there already.
    ///
    /// # Errors
    /// A page that does not exist; nothing is changed.
    /// # Cost
    /// Linear in the pages that are named.
    pub fn cache(&mut self, complete: Complete<'_>, now: Nanos) -> Result<usize, LedgerError> {
        let Complete {
            cached,
            after,
            pages,
            words,
            about,
        } = complete;
        for &page in pages.iter().chain(&after) {
            self.entry(page)?;
        }
        let owned = pages
            .iter()
            .take_while(|&&page| self.entries[page as usize].state == State::Owned)
            .count()
            .min(words.len() / HASH_WORDS);
        let Some(at) = self.holding_to_extend(cached, after, now) else {
            self.stats.unnamed_pages += owned as u64;
            return Ok(0);
        };
        let (mut from, mut inserted) = (0, 0);
        while from < owned {
            let (to, meta) = match about {
                Some(about) => span(about, cached + from, cached + owned),
                None => (cached + owned, SpanMeta::default()),
            };
            let to = to - cached;
            let part = &words[from * HASH_WORDS..to * HASH_WORDS];
            inserted += self.extend(at, &pages[from..to], part, meta, now);
            from = to;
        }
        if let Some(about) = about {
            self.describe(at, about);
            self.pin_prompt(at, about, now);
        }
        self.close_or_hang(at, Fate::Keep, now);
        if inserted > 0 {
            self.generation += 1;
        }
        Ok(inserted)
    }

    /// One user less of each of these pages, from the end of the prompt to its start. `fate` says
    /// what becomes of what is cached of them; a program that is done overrides
    /// [`Fate::Keep`].
    ///
    /// # Errors
    /// A page that does not exist, or that nobody uses: the pages before it are given back.
    pub fn free(&mut self, pages: &[u32], fate: Fate, now: Nanos) -> Result<(), LedgerError> {
        let mut back = Vec::new();
        let mut done = Ok(());
        let mut at = 0;
        while let Some(&page) = pages.get(at) {
            done = self.entry(page).map(|_| ());
            if done.is_ok() && page != 0 && self.count(page) == 0 {
                done = Err(LedgerError::NotHeld { page });
            }
            if done.is_err() {
                break;
            }
            let holding = self.entries[page as usize].holding;
            if holding == NONE || page == 0 {
                at += 1;
                self.free_alone(page, &mut back);
                continue;
            }
            at += self.free_held(holding, &pages[at..], fate, now);
        }
        // The first one freed is the first one handed out again.
        back.reverse();
        self.cache.release(Pages::adopt(DEVICE, back), None);
        done
    }

    /// Content that must not be found any more. Its page goes when nobody uses it.
    pub fn spoil(&mut self, page: u32) -> Option<ContentHash> {
        let hash = self.hash_of(page)?;
        self.entries[page as usize].bad = true;
        self.generation += 1;
        Some(hash)
    }

    /// Empties the cache. False, and nothing changed, while pages are in use.
    pub fn reset(&mut self, now: Nanos) -> bool {
        if self.cache.flush(now).is_err() {
            return false;
        }
        for entry in &mut self.entries {
            entry.state = State::Other;
            entry.bad = false;
        }
        self.generation += 1;
        true
    }

    /// Pins the cached part of a prefix for a time.
    pub fn pin_prefix(&mut self, tenant: TenantId, words: &[u32], ttl: Ttl, now: Nanos) -> Outcome {
        let target = Target::Prefix {
            ns: self.ns,
            tokens: words.to_vec(),
        };
        self.cache.act(tenant, &Action::Pin { target, ttl }, now)
    }

    /// Lets time pass: pins expire without traffic.
    pub fn tick(&mut self, now: Nanos) {
        self.cache.tick(now);
    }

    /// Counts.
    pub fn stats(&self) -> LedgerStats {
        let cache = self.cache.stats();
        LedgerStats {
            evicted_pages: cache.tiers.iter().map(|tier| tier.evicted_pages).sum(),
            pinned_pages: cache.pinned_pages,
            pins_yielded: cache.pins_yielded,
            ..self.stats
        }
    }

    fn entry(&self, page: u32) -> Result<&Entry, LedgerError> {
        let last = u32::try_from(self.entries.len() - 1).unwrap_or(NONE);
        let entry = self.entries.get(page as usize);
        entry.ok_or(LedgerError::Unknown { page, last })
    }

    fn count(&self, page: u32) -> u32 {
        self.counts[page as usize].load(Ordering::Relaxed)
    }

    fn add(&self, page: u32) {
        let count = &self.counts[page as usize];
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Takes a user from a page. False where it has none.
    fn take(&self, page: u32) -> bool {
        let left = self.count(page).checked_sub(1);
        if let Some(left) = left {
            self.counts[page as usize].store(left, Ordering::Relaxed);
        }
        left.is_some()
    }

    /// Recounts everything from scratch; for tests.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn check(&self) -> Result<(), Corruption> {
        self.cache.check()?;
        let bad = |detail: String| Err(Corruption::new("page ledger", detail));
        let mut held = vec![0; self.entries.len()];
        for holding in &self.holdings {
            for &page in &holding.pages {
                held[page as usize] += 1;
            }
        }
        for (page, entry) in self.entries.iter().enumerate().skip(1) {
            let uses = self.counts[page].load(Ordering::Relaxed);
            let known = match entry.state {
                State::Owned => uses > 0 && held[page] == 0,
                State::Cached | State::Other => uses + entry.early == held[page],
            };
            if !known {
                return bad(format!(
                    "page {page} ({:?}) has {uses} uses and {} early ones, {} holdings",
                    entry.state, entry.early, held[page]
                ));
            }
        }
        Ok(())
    }
}
