//! Our cache as a peer, with one policy or another.

use rootstock_memory::{PageId, Pages, ReplicaId, TierId};
use rootstock_radix::{
    CacheConfig, Fate, Key, Lease, NamespaceId, NamespaceKey, PolicyKind, PrefixCache, SpanMeta,
};

use crate::peer::{Kind, Peer};

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);

/// Our cache with the policy `POLICY` of [`PolicyKind`]: 0 for lru, 1 for agent.
pub(crate) struct Ours<const POLICY: usize> {
    cache: PrefixCache,
    ns: NamespaceId,
    now: u64,
    /// Page ids of one match, as a host keeps a buffer for them.
    ids: Vec<PageId>,
}

pub(crate) struct Held {
    lease: Lease,
    pages: Option<Pages>,
    found: u32,
}

impl<const POLICY: usize> Peer for Ours<POLICY> {
    const NAME: &'static str = if POLICY == 0 {
        "rootstock"
    } else {
        "rootstock-agent"
    };
    const KIND: Kind = Kind::Exact;
    type Held = Held;

    fn new(page_tokens: u32, pages: u32) -> Self {
        let config = CacheConfig {
            page_tokens,
            device_pages: vec![pages],
            policy: if POLICY == 0 {
                PolicyKind::Lru
            } else {
                PolicyKind::Agent
            },
            max_nodes: pages.saturating_add(16),
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).expect("a configuration that can be");
        let ns = cache
            .namespace(&NamespaceKey::default())
            .expect("room for a namespace");
        Self {
            cache,
            ns,
            now: 0,
            ids: Vec::new(),
        }
    }

    fn begin(&mut self, tokens: &[u32], pages: &mut Vec<u32>) -> Held {
        self.now += 1_000_000;
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let found = self.cache.match_lease(key, REPLICA, u32::MAX, self.now);
        self.ids.clear();
        self.cache.pages(&found.lease, &mut self.ids);
        pages.extend(self.ids.iter().map(|id| id.get()));
        Held {
            lease: found.lease,
            pages: None,
            found: found.device_tokens,
        }
    }

    fn found(held: &Held) -> u32 {
        held.found
    }

    fn take(&mut self, held: &mut Held, pages: u32) -> bool {
        let Ok((mut reservation, _)) = self.cache.reserve(DEVICE, pages, self.now) else {
            return false;
        };
        held.pages = Some(self.cache.acquire(&mut reservation, pages));
        self.cache.cancel(reservation);
        true
    }

    fn insert(&mut self, held: &mut Held, tokens: &[u32]) {
        let Some(pages) = held.pages.take() else {
            return;
        };
        let computed = &tokens[held.found as usize..];
        let meta = SpanMeta::default();
        self.cache
            .extend(&mut held.lease, computed, pages, &meta, self.now);
    }

    fn end(&mut self, held: Held) {
        if let Some(pages) = held.pages {
            self.cache.release(pages, None);
        }
        self.cache.end(held.lease, Fate::Keep, self.now);
    }

    fn probe(&self, tokens: &[u32]) -> u32 {
        self.cache
            .probe(
                Key {
                    ns: self.ns,
                    tokens,
                },
                REPLICA,
            )
            .device_tokens
    }

    fn evict(&mut self, free: u32, pages: u32) -> bool {
        let room = self.cache.make_room(DEVICE, free + pages, self.now);
        room.is_ok()
    }

    fn free(&self) -> u32 {
        self.cache.stats().tiers[0].free
    }
}
