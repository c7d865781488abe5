//! The plain model of the cache, obviously right and slow: a map from (namespace, replica, prefix)
//! to one page, searched linearly, and a list of requests. `World` drives the real cache and the
//! model with the same operations and compares everything after each.
//!
//! Shared by the property tests, the exhaustive tests, the long seeded run and the fuzz target.

#![allow(
    unreachable_pub,
    reason = "a module of several test binaries and of the fuzz target"
)]
#![allow(dead_code, reason = "each user takes its own part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test model"
)]
#![allow(clippy::cast_possible_truncation, reason = "sizes of tests are tiny")]

use rootstock_memory::{PageId, ReplicaId, Reservation, StepId, TierId};
use rootstock_radix::{
    CacheConfig, Dedup, Fate, Key, Lease, Match, NamespaceId, NamespaceKey, PrefixCache, SpanMeta,
    Token,
};
use std::collections::BTreeMap;

#[path = "ops.rs"]
mod ops;
#[path = "rules.rs"]
mod rules;

pub use ops::{Op, REQUEST_PAGES, Setup};

/// A page on one device.
#[derive(Clone, Debug)]
struct Entry {
    page: PageId,
    stamp: u64,
    spent: bool,
}

/// What all devices know about a prefix.
#[derive(Clone, Debug, Default)]
struct Common {
    priority: i32,
    hits: u32,
}

type Prefix = (u8, Vec<Token>);

struct Request {
    ns: u8,
    replica: usize,
    tokens: Vec<Token>,
    lease: Lease,
    /// Pages covered in the cache.
    covered: usize,
    own_from: usize,
    /// Pages that the request itself owns, by index.
    kept: BTreeMap<usize, PageId>,
    /// Pages at the end that are not in the cache.
    tail: usize,
    busy: Option<StepId>,
}

impl Request {
    fn prefix(&self, pages: usize, page_tokens: usize) -> Prefix {
        (self.ns, self.tokens[..pages * page_tokens].to_vec())
    }
}

/// The real cache and the model.
pub struct World {
    cache: PrefixCache,
    setup: Setup,
    page_tokens: usize,
    namespaces: [NamespaceId; 2],
    cached: Vec<BTreeMap<Prefix, Entry>>,
    common: BTreeMap<Prefix, Common>,
    requests: Vec<Request>,
    waiting: Vec<Vec<(StepId, PageId)>>,
    steps: Vec<u64>,
    clock: u64,
}

impl World {
    pub fn new(setup: &Setup) -> Self {
        let config = CacheConfig {
            page_tokens: setup.page_tokens,
            device_pages: setup.device_pages.clone(),
            policy: setup.policy,
            max_nodes: setup.max_nodes,
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).unwrap();
        let salts = [None, Some("a".to_owned())];
        let namespaces = salts.map(|salt| {
            cache
                .namespace(&NamespaceKey {
                    salt,
                    ..NamespaceKey::default()
                })
                .unwrap()
        });
        let replicas = setup.device_pages.len();
        Self {
            cache,
            setup: setup.clone(),
            page_tokens: setup.page_tokens as usize,
            namespaces,
            cached: vec![BTreeMap::new(); replicas],
            common: BTreeMap::new(),
            requests: Vec::new(),
            waiting: vec![Vec::new(); replicas],
            steps: vec![0; replicas],
            clock: 0,
        }
    }

    /// Does one operation on both sides, and compares.
    pub fn apply(&mut self, op: Op) {
        self.clock += 1;
        let replicas = self.setup.device_pages.len();
        match op {
            Op::Start {
                ns,
                replica,
                bits,
                len,
            } => {
                if self.requests.len() < 4 {
                    self.start(ns & 1, usize::from(replica) % replicas, bits, len);
                }
            }
            Op::Compute {
                slot,
                pages,
                keep,
                busy,
                priority,
            } => {
                if let Some(at) = self.slot(slot) {
                    let dedup = if keep && self.strict() {
                        Dedup::Keep
                    } else {
                        Dedup::Swap
                    };
                    let step = StepId(self.steps[self.requests[at].replica] + 1);
                    let busy_until = (busy > 0).then_some(step);
                    let priority = priority.into();
                    let meta = SpanMeta {
                        priority,
                        dedup,
                        busy_until,
                        ..SpanMeta::default()
                    };
                    self.compute(at, usize::from(pages), &meta);
                }
            }
            Op::Grow { slot } => self.on(slot, Self::grow),
            Op::End { slot, fate } => self.on(slot, |world, at| world.end(at, fate)),
            Op::MakeRoom { replica, pages } => {
                let replica = usize::from(replica) % replicas;
                let n = u32::from(pages) % (self.total(replica) as u32 + 2);
                let made = self.cache.make_room(device(replica), n, self.clock);
                assert_eq!(
                    made.is_ok(),
                    self.model_make_room(replica, n as usize),
                    "{made:?}"
                );
            }
            Op::StepDone { replica, step } => {
                self.step_done(usize::from(replica) % replicas, step);
            }
            Op::Flush => self.flush(),
            Op::Borrow {
                replica,
                pages,
                take,
                busy,
            } => {
                let replica = usize::from(replica) % replicas;
                let n = u32::from(pages) % (self.total(replica) as u32 + 2);
                self.borrow(replica, n, u32::from(take).min(n), busy);
            }
        }
        self.compare();
    }

    /// Ends all requests; nothing may be held then.
    pub fn finish(mut self) {
        while !self.requests.is_empty() {
            self.end(0, 0);
            self.compare();
        }
        for replica in 0..self.waiting.len() {
            self.cache
                .step_done(ReplicaId(replica as u16), StepId(u64::MAX));
            self.waiting[replica].clear();
        }
        self.compare();
        for tier in self.cache.stats().tiers {
            assert_eq!((tier.leased, tier.held, tier.in_transit), (0, 0, 0));
        }
        self.flush();
        self.compare();
        let left = self.cached.iter().map(BTreeMap::len).sum::<usize>();
        assert_eq!(left, 0, "a flush of an idle cache empties it");
    }

    fn strict(&self) -> bool {
        self.setup.max_nodes >= 1 << 20
    }

    fn total(&self, replica: usize) -> usize {
        self.setup.device_pages[replica] as usize
    }

    /// Does something with a request, if there is one.
    fn on(&mut self, slot: u8, act: impl FnOnce(&mut Self, usize)) {
        if let Some(at) = self.slot(slot) {
            act(self, at);
        }
    }

    fn slot(&self, slot: u8) -> Option<usize> {
        let count = self.requests.len();
        (count > 0).then(|| usize::from(slot) % count)
    }

    // The operations.

    fn start(&mut self, ns: u8, replica: usize, bits: u8, len: u8) {
        let p = self.page_tokens;
        // Half of the requests vary inside their pages, half from page to page.
        let tokens: Vec<Token> = (0..REQUEST_PAGES * p)
            .map(|at| Token::from(bits >> (if len & 128 == 0 { at } else { at / p } % 8) & 1))
            .collect();
        let max_tokens = u32::from(len & 127) % (tokens.len() as u32 + 1);
        let key = Key {
            ns: self.namespaces[usize::from(ns)],
            tokens: &tokens,
        };
        let id = ReplicaId(replica as u16);
        let probe = self.cache.probe(
            Key {
                tokens: &tokens[..max_tokens as usize],
                ..key
            },
            id,
        );
        let Match {
            lease,
            device_tokens,
            ..
        } = self.cache.match_lease(key, id, max_tokens, self.clock);
        if self.strict() {
            assert_eq!(device_tokens, probe.device_tokens);
        }
        assert_eq!(device_tokens, lease.len_tokens());
        let covered = device_tokens as usize / p;
        let mut request = Request {
            ns,
            replica,
            tokens,
            lease,
            covered: 0,
            own_from: usize::MAX,
            kept: BTreeMap::new(),
            tail: 0,
            busy: None,
        };
        let cap = max_tokens as usize / p;
        let expected = self.longest(&request, cap);
        if self.strict() {
            assert_eq!(covered, expected, "longest cached prefix");
        }
        assert!(covered <= expected, "matched what is not cached");
        for pages in 1..=covered {
            self.hit(replica, &request.prefix(pages, p));
        }
        request.covered = covered;
        self.requests.push(request);
    }

    fn grow(&mut self, at: usize) {
        let request = &mut self.requests[at];
        let ns = self.namespaces[usize::from(request.ns)];
        let key = Key {
            ns,
            tokens: &request.tokens,
        };
        let max = request.tokens.len() as u32;
        let added = self.cache.grow(&mut request.lease, key, max, self.clock);
        let request = &self.requests[at];
        let from = request.covered;
        let to = from + added as usize / self.page_tokens;
        if request.tail > 0 {
            assert_eq!(added, 0);
            return;
        }
        let expected = self.longest(request, REQUEST_PAGES);
        assert!(to <= expected && (to == expected || !self.strict()));
        for pages in from + 1..=to {
            let (replica, prefix) = (
                self.requests[at].replica,
                self.requests[at].prefix(pages, self.page_tokens),
            );
            self.hit(replica, &prefix);
        }
        self.requests[at].covered = to;
    }

    fn compute(&mut self, at: usize, pages: usize, meta: &SpanMeta) {
        let p = self.page_tokens;
        let (replica, done) = (self.requests[at].replica, self.requests[at].len());
        let n = pages.min(REQUEST_PAGES - done);
        let reserved = self.cache.reserve(device(replica), n as u32, self.clock);
        assert_eq!(
            reserved.is_ok(),
            self.model_make_room(replica, n),
            "{reserved:?}"
        );
        let Ok((mut reservation, copies)) = reserved else {
            return;
        };
        assert!(copies.is_empty());
        let pages = self.cache.acquire(&mut reservation, n as u32);
        self.cache.cancel(reservation);
        self.assert_unowned(replica, pages.ids());
        let ids = pages.ids().to_vec();
        let request = &mut self.requests[at];
        let tokens = request.tokens[done * p..(done + n) * p].to_vec();
        let now = self.clock;
        let result = self
            .cache
            .extend(&mut request.lease, &tokens, pages, meta, now);
        self.raise(at, meta.priority);
        // With few nodes the real cache says how far it came.
        let in_cache = match self.strict() {
            true => n,
            false => result.inserted_pages as usize + result.swapped.len(),
        };
        let (mut swapped, mut inserted) = (Vec::new(), 0);
        for &id in &ids[..in_cache] {
            match self.put(at, id, meta) {
                Some(cached) if meta.dedup == Dedup::Swap => swapped.push(cached),
                Some(_) => {}
                None => inserted += 1,
            }
        }
        let request = &mut self.requests[at];
        for (index, &id) in (done..).zip(&ids).skip(in_cache) {
            request.kept.insert(index, id);
            request.tail += 1;
            request.busy = request.busy.max(meta.busy_until);
        }
        assert_eq!((result.inserted_pages, result.swapped), (inserted, swapped));
    }

    /// The next page of a request goes into the cache. The page that was there already, if one
    /// was, with its index in the request.
    fn put(&mut self, at: usize, id: PageId, meta: &SpanMeta) -> Option<(u32, PageId)> {
        let request = &mut self.requests[at];
        let (replica, index) = (request.replica, request.covered);
        let prefix = request.prefix(index + 1, self.page_tokens);
        request.covered += 1;
        let new = Common {
            priority: meta.priority,
            hits: 0,
        };
        let common = self.common.entry(prefix.clone()).or_insert(new);
        common.priority = common.priority.max(meta.priority);
        let Some(entry) = self.cached[replica].get_mut(&prefix) else {
            let entry = Entry {
                page: id,
                stamp: 0,
                spent: false,
            };
            self.cached[replica].insert(prefix, entry);
            request.own_from = request.own_from.min(index);
            return None;
        };
        common.hits += 1;
        entry.spent = false;
        if meta.dedup == Dedup::Keep {
            request.kept.insert(index, id);
            request.busy = request.busy.max(meta.busy_until);
        } else if let Some(step) = meta.busy_until {
            self.waiting[replica].push((step, id));
        }
        Some((index as u32, entry.page))
    }

    fn end(&mut self, at: usize, fate: u8) {
        let fate = [
            Fate::Keep,
            Fate::Superseded,
            Fate::Ephemeral,
            Fate::Preempted,
        ][usize::from(fate) % 4];
        let p = self.page_tokens;
        let mut request = self.requests.remove(at);
        let replica = request.replica;
        let ended = StepId(self.steps[replica]);
        if let Some(step) = request.busy.filter(|&step| step > ended) {
            let kept = request.kept.values().map(|&id| (step, id));
            self.waiting[replica].extend(kept);
        }
        let mut alone = matches!(fate, Fate::Superseded | Fate::Ephemeral);
        let mut below = None;
        for pages in (1..=request.covered).rev() {
            let prefix = request.prefix(pages, p);
            let others = self
                .requests
                .iter()
                .any(|other| other.covers(&prefix, replica, p));
            alone = alone
                && pages > request.own_from
                && self.common[&prefix].hits == 0
                && !others
                && self.children(replica, &prefix) == usize::from(below.is_some());
            let entry = self.cached[replica]
                .get_mut(&prefix)
                .expect("leased pages are cached");
            entry.stamp = self.clock;
            entry.spent = alone;
            below = (!others).then_some(());
            if alone && fate == Fate::Ephemeral {
                self.forget(replica, &prefix);
                below = None;
            }
        }
        request.kept.clear();
        self.cache.end(request.lease, fate, self.clock);
    }

    fn step_done(&mut self, replica: usize, step: u8) {
        self.steps[replica] += u64::from(step % 3);
        let done = StepId(self.steps[replica]);
        self.cache.step_done(ReplicaId(replica as u16), done);
        self.waiting[replica].retain(|&(step, _)| step > done);
    }

    fn flush(&mut self) {
        let held = (0..self.waiting.len()).any(|replica| self.held(replica) > 0);
        let refuse = held || !self.requests.is_empty();
        assert_eq!(self.cache.flush(self.clock).is_err(), refuse);
        if !refuse {
            self.cached.iter_mut().for_each(BTreeMap::clear);
            self.common.clear();
        }
    }

    fn borrow(&mut self, replica: usize, n: u32, take: u32, busy: u8) {
        let reserved = self.cache.reserve(device(replica), n, self.clock);
        assert_eq!(
            reserved.is_ok(),
            self.model_make_room(replica, n as usize),
            "{reserved:?}"
        );
        let Ok((mut reservation, _)) = reserved else {
            return;
        };
        assert_eq!(Reservation::left(&reservation), n);
        let pages = self.cache.acquire(&mut reservation, take);
        self.assert_unowned(replica, pages.ids());
        let step = (busy > 0).then(|| StepId(self.steps[replica] + u64::from(busy)));
        if let Some(step) = step {
            self.waiting[replica].extend(pages.ids().iter().map(|&id| (step, id)));
        }
        self.cache.release(pages, step);
        self.cache.cancel(reservation);
    }

    /// Compares the real cache with the model, in both directions.
    fn compare(&self) {
        self.cache.check().unwrap();
        let stats = self.cache.stats();
        for (replica, tier) in stats.tiers.iter().enumerate() {
            let real = (tier.free, tier.evictable, tier.leased, tier.held);
            let model = (
                self.free(replica) as u32,
                self.evictable(replica) as u32,
                self.leased(replica) as u32,
                self.held(replica) as u32,
            );
            assert_eq!(real, model, "free, evictable, leased, held of {replica}");
            for (ns, tokens) in self.cached[replica].keys() {
                let key = Key {
                    ns: self.namespaces[usize::from(*ns)],
                    tokens,
                };
                let found = self
                    .cache
                    .probe(key, ReplicaId(replica as u16))
                    .device_tokens;
                assert_eq!(found as usize, tokens.len(), "{tokens:?} is cached");
            }
        }
        assert_eq!(stats.leases as usize, self.requests.len());
        assert_eq!(stats.stray_releases, 0);
        for request in &self.requests {
            let mut real = Vec::new();
            self.cache.pages(&request.lease, &mut real);
            let model: Vec<PageId> = (0..request.len())
                .map(|index| match request.kept.get(&index) {
                    Some(&id) => id,
                    None => {
                        let prefix = request.prefix(index + 1, self.page_tokens);
                        self.cached[request.replica][&prefix].page
                    }
                })
                .collect();
            assert_eq!(real, model, "page table of a request");
        }
    }
}

impl Request {
    fn len(&self) -> usize {
        self.covered + self.tail
    }

    fn covers(&self, prefix: &Prefix, replica: usize, page_tokens: usize) -> bool {
        let pages = prefix.1.len() / page_tokens;
        self.replica == replica
            && self.ns == prefix.0
            && pages <= self.covered
            && self.tokens.starts_with(&prefix.1)
    }
}

fn device(replica: usize) -> TierId {
    TierId::Device(ReplicaId(replica as u16))
}
