//! A tiny host of the cache: whole-sequence insert, match and evict, with `check()` after each.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![expect(clippy::unwrap_used, reason = "a helper of tests")]

use rootstock_memory::{CopyPlan, PageId, ReplicaId, TierId};
use rootstock_radix::{
    CacheConfig, ContextKind, Fate, Key, Lease, Match, NamespaceId, NamespaceKey, PolicyKind,
    PrefixCache, SpanMeta, TierStats, Token,
};

pub(crate) const DEVICE: TierId = TierId::Device(ReplicaId(0));
pub(crate) const R0: ReplicaId = ReplicaId(0);

pub(crate) struct Host {
    pub(crate) cache: PrefixCache,
    pub(crate) ns: NamespaceId,
    pub(crate) page: usize,
    pub(crate) now: u64,
    /// Copies that came with reservations.
    pub(crate) plans: Vec<CopyPlan>,
}

impl Host {
    pub(crate) fn new(config: &CacheConfig) -> Self {
        let mut cache = PrefixCache::new(config).unwrap();
        let ns = cache.namespace(&NamespaceKey::default()).unwrap();
        Self {
            cache,
            ns,
            page: config.page_tokens as usize,
            now: 0,
            plans: Vec::new(),
        }
    }

    pub(crate) fn of(page_tokens: u32, pages: u32) -> Self {
        let device_pages = vec![pages];
        Self::new(&CacheConfig {
            page_tokens,
            device_pages,
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        })
    }

    pub(crate) fn find(&mut self, tokens: &[Token]) -> Match {
        self.now += 1;
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let found = self.cache.match_lease(key, R0, u32::MAX, self.now);
        self.cache.check().unwrap();
        found
    }

    /// Matched tokens, without keeping the lease.
    pub(crate) fn hit(&mut self, tokens: &[Token]) -> u32 {
        let found = self.find(tokens);
        self.end(found.lease);
        found.device_tokens
    }

    pub(crate) fn peek(&self, tokens: &[Token]) -> u32 {
        self.cache
            .probe(
                Key {
                    ns: self.ns,
                    tokens,
                },
                R0,
            )
            .device_tokens
    }

    pub(crate) fn end(&mut self, lease: Lease) {
        self.finish(lease, Fate::Keep);
    }

    pub(crate) fn finish(&mut self, lease: Lease, fate: Fate) {
        self.cache.end(lease, fate, self.now);
        self.cache.check().unwrap();
    }

    /// Matches, computes the rest and keeps the lease.
    pub(crate) fn run(&mut self, tokens: &[Token], priority: i32) -> Lease {
        let mut lease = self.find(tokens).lease;
        self.extend(&mut lease, tokens, priority);
        lease
    }

    pub(crate) fn extend(&mut self, lease: &mut Lease, tokens: &[Token], priority: i32) {
        let covered = lease.len_tokens() as usize;
        let rest = &tokens[covered..tokens.len() / self.page * self.page];
        let n = u32::try_from(rest.len() / self.page).unwrap();
        let (mut reservation, plans) = self.cache.reserve(DEVICE, n, self.now).unwrap();
        self.plans.extend(plans);
        let pages = self.cache.acquire(&mut reservation, n);
        self.cache.cancel(reservation);
        let meta = SpanMeta {
            priority,
            kind: ContextKind::Unknown,
            ..SpanMeta::default()
        };
        let _ = self.cache.extend(lease, rest, pages, &meta, self.now);
        self.cache.check().unwrap();
    }

    pub(crate) fn insert(&mut self, tokens: &[Token], priority: i32) {
        let lease = self.run(tokens, priority);
        self.end(lease);
    }

    /// Evicts exactly `n` pages; false when fewer can go.
    pub(crate) fn evict(&mut self, n: u32) -> bool {
        let free = self.tier().free;
        let made = self.cache.make_room(DEVICE, free + n, self.now);
        self.cache.check().unwrap();
        made.is_ok_and(|room| room.freed_pages == n)
    }

    /// Evicts all that can go.
    pub(crate) fn evict_all(&mut self) -> u32 {
        let n = self.tier().evictable;
        assert!(self.evict(n));
        n
    }

    pub(crate) fn pages(&self, lease: &Lease) -> Vec<PageId> {
        let mut out = Vec::new();
        self.cache.pages(lease, &mut out);
        out
    }

    pub(crate) fn tier(&self) -> TierStats {
        self.cache.stats().tiers[0]
    }

    /// Nothing runs: leased and held are 0, free and cached are all there is.
    pub(crate) fn assert_idle(&self) {
        let tier = self.tier();
        assert_eq!((tier.leased, tier.held, tier.in_transit), (0, 0, 0));
        assert_eq!(tier.free + tier.evictable, tier.total);
        self.cache.check().unwrap();
    }
}
