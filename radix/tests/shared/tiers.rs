//! A world of random requests over all tiers, with the bytes followed: what a page holds is the
//! prefix that it was computed for. Copies finish late, in any order, or fail; a store loses pages
//! and fails; requests end at any time; pins and importance come and expire. A lease must find the
//! right bytes at every moment, the books must balance after every call, and in the end nothing is
//! kept and the device can be emptied.

#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test of tiny sizes"
)]

use crate::random::Random;
use crate::store::FakeStore;
use rootstock_memory::{CopyDone, CopyPlan, PageId, Pages, ReplicaId, StepId, TierId};
use rootstock_radix::{
    Action, CacheConfig, Dedup, EventTier, Fate, Key, KvEvent, Lease, NamespaceId, NamespaceKey,
    PolicyKind, PrefixCache, SpanMeta, Target, TenantId, Token, Ttl, WritePolicy,
};
use std::collections::{BTreeMap, BTreeSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const REQUEST_PAGES: usize = 6;
const SECOND: u64 = 1_000_000_000;

/// What a page holds: the prefix that ends with it; nothing when its content is undefined.
pub(crate) type Bytes = Option<(u64, Vec<Token>)>;

pub(crate) struct Request {
    pub(crate) ns: NamespaceId,
    pub(crate) replica: u16,
    pub(crate) tokens: Vec<Token>,
    pub(crate) lease: Lease,
}

pub(crate) struct World {
    pub(crate) cache: PrefixCache,
    pub(crate) random: Random,
    pub(crate) config: CacheConfig,
    pub(crate) namespaces: Vec<NamespaceId>,
    pub(crate) memory: BTreeMap<(TierId, PageId), Bytes>,
    pub(crate) requests: Vec<Request>,
    pub(crate) copies: Vec<CopyPlan>,
    pub(crate) store: FakeStore,
    pub(crate) steps: u64,
    pub(crate) now: u64,
    pub(crate) promoted: u64,
    /// What a consumer of the events believes.
    pub(crate) told: BTreeMap<EventTier, BTreeSet<u64>>,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let pages = |random: &mut Random| random.below(12) as u32 + 1;
        let device_pages = (0..=random.below(2)).map(|_| pages(&mut random)).collect();
        let policies = [
            PolicyKind::Lru,
            PolicyKind::Priority,
            PolicyKind::Lfu,
            PolicyKind::Fifo,
            PolicyKind::Filo,
            PolicyKind::Mru,
            PolicyKind::Slru,
            PolicyKind::Agent,
        ];
        let writes = [
            WritePolicy::Through,
            WritePolicy::Selective,
            WritePolicy::Back,
        ];
        let host_pages = if random.below(5) == 0 {
            0
        } else {
            pages(&mut random)
        };
        let config = CacheConfig {
            storage_pages: [0, 3, 50][random.below(3) as usize].min(host_pages * 50),
            storage_probes: random.below(4).saturating_sub(2) as u32,
            page_tokens: [1, 2, 3][random.below(3) as usize],
            device_pages,
            host_pages,
            policy: policies[random.below(7) as usize],
            write_policy: writes[random.below(3) as usize],
            pin_budget: [0.0, 0.5, 1.0][random.below(3) as usize],
            max_nodes: if random.below(4) == 0 {
                pages(&mut random)
            } else {
                1 << 20
            },
            max_copies: if random.below(4) == 0 { 1 } else { 64 },
            max_events: if random.below(2) == 0 { 1 << 20 } else { 0 },
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).unwrap();
        let salts = [None, Some("a".to_owned())];
        let named = |salt| NamespaceKey {
            salt,
            ..NamespaceKey::default()
        };
        let namespaces = salts
            .map(|salt| cache.namespace(&named(salt)).unwrap())
            .to_vec();
        Self {
            cache,
            random,
            config,
            namespaces,
            memory: BTreeMap::new(),
            requests: Vec::new(),
            copies: Vec::new(),
            store: FakeStore::default(),
            steps: 0,
            now: 1,
            promoted: 0,
            told: BTreeMap::new(),
        }
    }

    /// Kinds of operations.
    pub(crate) const KINDS: u64 = 23;

    pub(crate) fn step(&mut self) {
        let kind = self.random.below(Self::KINDS);
        self.apply(kind);
    }

    /// One operation of a kind; what it does in particular comes from `random`.
    pub(crate) fn apply(&mut self, kind: u64) {
        self.now += self.random.below(3) * SECOND;
        match kind {
            0..=3 => self.start(),
            4..=8 => self.compute(),
            9 => self.grow(),
            10 | 11 => self.end(),
            12..=14 => self.acknowledge(),
            15 => self.promote(),
            16 => self.make_room(),
            17 => self.act(),
            18 => {
                self.steps += 1;
                for replica in 0..self.config.device_pages.len() {
                    self.cache
                        .step_done(ReplicaId(replica as u16), StepId(self.steps));
                }
                self.cache.tick(self.now);
            }
            19 => self.flush(),
            20 => self.meddle(),
            _ => self.fetch(),
        }
        self.compare();
    }

    fn tokens(&mut self) -> Vec<Token> {
        let (p, bits) = (self.config.page_tokens as usize, self.random.next());
        let stride = if bits >> 60 & 1 == 1 { p } else { 1 };
        let all = 0..REQUEST_PAGES * p;
        all.map(|at| (bits >> (at / stride % 4) & 1) as Token)
            .collect()
    }

    fn start(&mut self) {
        if self.requests.len() == 4 {
            return;
        }
        let tokens = self.tokens();
        let ns = self.namespaces[self.random.below(2) as usize];
        let replica = self.random.below(self.config.device_pages.len() as u64) as u16;
        let max_tokens = self.random.below(tokens.len() as u64 + 1) as u32;
        let key = Key {
            ns,
            tokens: &tokens,
        };
        let found = self
            .cache
            .match_lease(key, ReplicaId(replica), max_tokens, self.now);
        let lower = found.host_tokens + found.storage_tokens;
        assert!(found.device_tokens + lower <= max_tokens);
        if found.storage_tokens > 0 && self.random.below(4) > 0 {
            // What it starts comes out with the plans.
            let _ = self.cache.fetch(&found.lease, key, max_tokens, self.now);
        }
        self.requests.push(Request {
            ns,
            replica,
            tokens,
            lease: found.lease,
        });
        if found.host_tokens > 0 && self.random.below(4) > 0 {
            let last = self.requests.len() - 1;
            self.promote_for(last);
        }
    }

    fn compute(&mut self) {
        let Some(at) = self.pick() else { return };
        let n = self.random.below(4) as usize;
        let (p, done) = (self.config.page_tokens as usize, self.requests[at].pages());
        let n = n.min(REQUEST_PAGES - done);
        let device = TierId::Device(ReplicaId(self.requests[at].replica));
        let Some(pages) = self.acquire(device, n as u32) else {
            return;
        };
        let request = &mut self.requests[at];
        for (index, &id) in (done..).zip(pages.ids()) {
            let prefix = request.tokens[..(index + 1) * p].to_vec();
            self.memory
                .insert((device, id), Some((request.ns.get(), prefix)));
        }
        let tokens = &request.tokens[done * p..(done + n) * p];
        let meta = SpanMeta {
            priority: self.random.below(3) as i32 - 1,
            retention_s: (self.random.below(2) == 0).then(|| self.random.below(20) as u32),
            dedup: if self.random.below(2) == 0 {
                Dedup::Swap
            } else {
                Dedup::Keep
            },
            busy_until: (self.random.below(2) == 0).then_some(StepId(self.steps + 1)),
            ..SpanMeta::default()
        };
        let _ = self
            .cache
            .extend(&mut request.lease, tokens, pages, &meta, self.now);
    }

    fn acquire(&mut self, tier: TierId, n: u32) -> Option<Pages> {
        self.cache.tick(self.now);
        let available = self.cache.available(tier);
        match self.cache.reserve(tier, n, self.now) {
            Ok((mut reservation, copies)) => {
                self.submit(copies);
                let pages = self.cache.acquire(&mut reservation, n);
                self.cache.cancel(reservation);
                for &id in pages.ids() {
                    self.memory.insert((tier, id), None);
                }
                Some(pages)
            }
            Err(short) => {
                assert!(short.in_transit_pages > 0 || available < n, "{short}");
                None
            }
        }
    }

    fn grow(&mut self) {
        let Some(at) = self.pick() else { return };
        let max = self.random.below(30) as u32;
        let Request {
            ns, tokens, lease, ..
        } = &mut self.requests[at];
        self.cache
            .grow(lease, Key { ns: *ns, tokens }, max, self.now);
    }

    fn end(&mut self) {
        let Some(at) = self.pick() else { return };
        let fates = [
            Fate::Keep,
            Fate::Superseded,
            Fate::Ephemeral,
            Fate::Preempted,
        ];
        let fate = fates[self.random.below(4) as usize];
        let request = self.requests.swap_remove(at);
        self.cache.end(request.lease, fate, self.now);
    }

    fn promote(&mut self) {
        if let Some(at) = self.pick() {
            self.promote_for(at);
        }
    }

    fn promote_for(&mut self, at: usize) {
        let device = TierId::Device(ReplicaId(self.requests[at].replica));
        let n = self.random.below(5) as u32;
        let Ok((mut reservation, copies)) = self.cache.reserve(device, n, self.now) else {
            return;
        };
        self.submit(copies);
        let lease = &mut self.requests[at].lease;
        let plan = self.cache.promote(lease, &mut reservation, self.now);
        self.cache.cancel(reservation);
        self.promoted += u64::from(plan.is_some());
        self.submit(plan);
    }

    fn make_room(&mut self) {
        let tiers = self.config.device_pages.len() as u64 + 1;
        let tier = match self.random.below(tiers) {
            n if n + 1 == tiers => TierId::Host,
            n => TierId::Device(ReplicaId(n as u16)),
        };
        let n = self.random.below(14) as u32;
        if self.cache.total(tier) == 0 {
            return;
        }
        self.cache.tick(self.now);
        let (available, before) = (self.cache.available(tier), self.cache.stats());
        match self.cache.make_room(tier, n, self.now) {
            Ok(room) => self.submit(room.copies),
            Err(short) if short.in_transit_pages == 0 => {
                assert!(available < n, "{short}, {available} available");
                assert_eq!(before, self.cache.stats(), "a refusal changes nothing");
            }
            Err(_) => {}
        }
    }

    fn act(&mut self) {
        let tokens = self.tokens();
        let len = self.random.below(tokens.len() as u64 + 1) as usize;
        let ns = self.namespaces[self.random.below(2) as usize];
        let target = Target::Prefix {
            ns,
            tokens: tokens[..len].to_vec(),
        };
        let action = match self.random.below(8) {
            0..=2 => {
                let ttl = Ttl {
                    seconds: self.random.below(20),
                    clamped: false,
                };
                Action::Pin { target, ttl }
            }
            3 => Action::Release { target },
            4 => Action::Demote { target },
            5 | 6 => {
                let replicas = self.config.device_pages.len() as u64;
                let replica = ReplicaId(self.random.below(replicas) as u16);
                Action::Prefetch {
                    target,
                    replica: (self.random.below(4) > 0).then_some(replica),
                }
            }
            _ => {
                let priority = self.random.below(5) as i32 - 2;
                Action::Retain {
                    target,
                    priority,
                    seconds: (self.random.below(2) == 0).then(|| self.random.below(30)),
                }
            }
        };
        let tenant = TenantId(self.random.below(2) as u32);
        let _ = self.cache.act(tenant, &action, self.now);
    }

    /// A plan is made: its destination holds nothing until the copy is acknowledged.
    fn submit(&mut self, plans: impl IntoIterator<Item = CopyPlan>) {
        for plan in plans {
            assert_eq!(plan.from.1.len(), plan.to.1.len());
            for &id in &plan.to.1 {
                self.memory.insert((plan.to.0, id), None);
            }
            self.copies.push(plan);
        }
    }

    /// A copy is made as late as can be: at its acknowledgement. So its source must still hold
    /// what it held, and nobody may have used the destination.
    fn acknowledge(&mut self) {
        if self.copies.is_empty() || (!self.store.is_idle() && self.random.below(2) == 0) {
            self.acknowledge_store();
            return;
        }
        let at = self.random.below(self.copies.len() as u64) as usize;
        let ok = self.random.below(4) > 0;
        let plan = self.copies.swap_remove(at);
        for (&from, &to) in plan.from.1.iter().zip(&plan.to.1) {
            let bytes = self.memory[&(plan.from.0, from)].clone();
            assert!(bytes.is_some(), "a copy reads undefined bytes");
            assert!(
                self.memory[&(plan.to.0, to)].is_none(),
                "a destination was used"
            );
            self.memory.insert((plan.to.0, to), bytes.filter(|_| ok));
        }
        self.cache.copy_done(CopyDone { id: plan.id, ok }, self.now);
    }

    fn flush(&mut self) {
        let idle = self
            .cache
            .stats()
            .tiers
            .iter()
            .all(|tier| tier.held + tier.in_transit == 0);
        let idle = idle && self.requests.is_empty() && !self.store.keeps();
        assert_eq!(self.cache.flush(self.now).is_ok(), idle);
        if idle {
            assert!(
                self.cache
                    .stats()
                    .tiers
                    .iter()
                    .all(|tier| tier.free == tier.total)
            );
        }
    }

    pub(crate) fn pick(&mut self) -> Option<usize> {
        let count = self.requests.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    fn compare(&mut self) {
        let mut plans = Vec::new();
        self.cache.drain_copies(&mut plans);
        self.submit(plans);
        self.submit_store();
        self.cache.check().unwrap();
        self.listen();
        let stats = self.cache.stats();
        assert_eq!((stats.stray_releases, stats.copies_stray), (0, 0));
        assert_eq!(stats.copies_under_way as usize, self.copies.len());
        assert!(self.copies.len() <= self.config.max_copies as usize);
        for request in &self.requests {
            let p = self.config.page_tokens as usize;
            let mut pages = Vec::new();
            self.cache.pages(&request.lease, &mut pages);
            assert_eq!(pages.len(), request.pages());
            for (index, id) in pages.into_iter().enumerate() {
                let device = TierId::Device(ReplicaId(request.replica));
                let expected = (request.ns.get(), request.tokens[..(index + 1) * p].to_vec());
                assert_eq!(
                    self.memory[&(device, id)],
                    Some(expected),
                    "bytes of a lease"
                );
            }
        }
    }

    /// A consumer that applies the events has what a dump of the tree says, after every call.
    fn listen(&mut self) {
        let (mut events, mut dump) = (Vec::new(), Vec::new());
        self.cache.drain_events(&mut events);
        for event in events {
            hear(&mut self.told, event);
        }
        self.cache.dump_events(&mut dump);
        let mut cached = BTreeMap::new();
        dump.into_iter().for_each(|event| hear(&mut cached, event));
        self.told.retain(|_, hashes| !hashes.is_empty());
        assert_eq!(self.told, cached, "what was told is what is cached");
        if self.config.max_events > 0 {
            let count = |tier| self.told.get(&tier).map_or(0, BTreeSet::len) as u32;
            for tier in self.cache.stats().tiers {
                let id = match tier.tier {
                    TierId::Device(replica) => EventTier::Device(replica),
                    TierId::Host => EventTier::Host,
                    TierId::Storage => continue,
                };
                assert_eq!(count(id), tier.evictable + tier.leased);
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.copies.is_empty() && self.store.is_idle()
    }

    pub(crate) fn finish(mut self) -> (u64, u64, u64) {
        while !self.requests.is_empty() {
            self.end();
            self.compare();
        }
        while !self.is_quiet() {
            self.acknowledge();
            self.compare();
        }
        for (replica, &total) in self.config.device_pages.clone().iter().enumerate() {
            let id = ReplicaId(replica as u16);
            self.cache.step_done(id, StepId(u64::MAX));
            // Pins, full tiers and failing copies or not: the device can be emptied.
            let mut rounds = 0;
            while self
                .cache
                .make_room(TierId::Device(id), total, self.now)
                .is_err()
            {
                self.compare();
                assert!(!self.is_quiet(), "a device that waits for nothing is stuck");
                while !self.is_quiet() {
                    self.acknowledge();
                    self.compare();
                }
                rounds += 1;
                assert!(rounds < 50, "the device is not emptied");
            }
            self.compare();
        }
        while !self.is_quiet() {
            self.acknowledge();
            self.compare();
        }
        for tier in self.cache.stats().tiers {
            assert_eq!(
                (tier.leased, tier.held, tier.in_transit),
                (0, 0, 0),
                "{tier:?}"
            );
        }
        self.cache.flush(self.now).unwrap();
        self.compare();
        for tier in self.cache.stats().tiers {
            assert_eq!(tier.free, tier.total);
        }
        (self.promoted, self.store.arrived, self.store.seen)
    }
}

/// Applies an event. Nothing is stored twice, nothing is removed that is not there, and a page
/// comes after the one before it, hashed as documented.
fn hear(told: &mut BTreeMap<EventTier, BTreeSet<u64>>, event: KvEvent) {
    match event {
        KvEvent::Stored {
            tier,
            mut parent,
            pages,
            ..
        } => {
            let known = |hash: &u64| told.values().any(|hashes| hashes.contains(hash));
            assert!(
                parent.as_ref().is_none_or(known),
                "a parent was not announced"
            );
            for page in pages {
                let mut bytes = parent.map_or(Vec::new(), |parent| parent.to_le_bytes().to_vec());
                bytes.extend(page.local_hash.to_le_bytes());
                let chained = match parent {
                    None => page.local_hash,
                    Some(_) => xxh3_64_with_seed(&bytes, 1337),
                };
                assert_eq!(page.sequence_hash, chained);
                assert!(
                    told.entry(tier).or_default().insert(chained),
                    "stored twice"
                );
                parent = Some(chained);
            }
        }
        KvEvent::Removed { tier, hashes } => {
            let here = told.entry(tier).or_default();
            hashes
                .iter()
                .for_each(|hash| assert!(here.remove(hash), "removed what is not there"));
        }
        KvEvent::Cleared { tier } => told.entry(tier).or_default().clear(),
        KvEvent::Gap { .. } | _ => unreachable!("the log is large enough"),
    }
}

impl Request {
    fn pages(&self) -> usize {
        self.lease.len_pages() as usize
    }
}
