//! Where a prompt leaves the cache, what was removed, and what the tree looks like from outside.

#![expect(clippy::unwrap_used, reason = "a test of tiny sizes")]

use rootstock_memory::{ReplicaId, TierId};
use rootstock_radix::{
    CacheConfig, ContextKind, EventTier, Fate, Ghosts, Key, KvEvent, NamespaceId, NamespaceKey,
    Nearest, PolicyKind, PrefixCache, SpanMeta, Token,
};

const P: u32 = 4;
const DEVICE: ReplicaId = ReplicaId(0);

struct Cache {
    cache: PrefixCache,
    ns: NamespaceId,
    ghosts: Ghosts,
    now: u64,
}

impl Cache {
    fn new(pages: u32, ghosts: usize) -> Self {
        let config = CacheConfig {
            page_tokens: P,
            device_pages: vec![pages],
            max_events: 1024,
            policy: PolicyKind::Lru,
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).unwrap();
        let ns = cache.namespace(&NamespaceKey::default()).unwrap();
        Self {
            cache,
            ns,
            ghosts: Ghosts::new(ghosts),
            now: 0,
        }
    }

    /// A request computes a prompt and ends.
    fn run(&mut self, tokens: &[Token], fate: Fate) {
        self.now += 1;
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let mut found = self.cache.match_lease(key, DEVICE, u32::MAX, self.now);
        let done = found.lease.len_tokens() as usize;
        let n = u32::try_from(tokens.len() - done).unwrap() / P;
        let (mut room, _) = self
            .cache
            .reserve(TierId::Device(DEVICE), n, self.now)
            .unwrap();
        let pages = self.cache.acquire(&mut room, n);
        self.cache.cancel(room);
        let meta = SpanMeta {
            kind: ContextKind::System,
            ..SpanMeta::default()
        };
        let whole = &tokens[done..done + (n * P) as usize];
        let _ = self
            .cache
            .extend(&mut found.lease, whole, pages, &meta, self.now);
        self.cache.end(found.lease, fate, self.now);
        self.hear(fate == Fate::Ephemeral);
    }

    fn hear(&mut self, ephemeral: bool) {
        let mut events: Vec<KvEvent> = Vec::new();
        self.cache.drain_events(&mut events);
        for event in &events {
            self.ghosts.hear(event, ephemeral, self.now);
        }
    }

    fn nearest(&self, tokens: &[Token]) -> Nearest {
        self.cache.nearest(Key {
            ns: self.ns,
            tokens,
        })
    }

    fn hashes(&self, tokens: &[Token]) -> Vec<u64> {
        self.cache.page_hashes(Key {
            ns: self.ns,
            tokens,
        })
    }
}

fn prompt(len: u32) -> Vec<Token> {
    (100..100 + len).collect()
}

#[test]
fn a_prompt_leaves_the_path_at_the_token_that_differs() {
    let mut cache = Cache::new(64, 64);
    cache.run(&prompt(32), Fate::Keep);
    for at in 0..32_u32 {
        let mut other = prompt(32);
        other[at as usize] = 7;
        let nearest = cache.nearest(&other);
        assert_eq!(nearest.common_tokens, at, "{nearest:?}");
        assert_eq!(nearest.cached_tokens, at / P * P);
        assert_eq!(nearest.other, Some(100 + at));
        assert_eq!(nearest.kind, ContextKind::System);
    }
}

#[test]
fn a_prompt_that_goes_on_where_the_path_ends_differs_from_nothing() {
    let mut cache = Cache::new(64, 64);
    cache.run(&prompt(32), Fate::Keep);
    for len in [5, 31, 32, 33, 40] {
        let nearest = cache.nearest(&prompt(len));
        assert_eq!(nearest.other, None, "{len}: {nearest:?}");
        assert_eq!(nearest.cached_tokens, len.min(32) / P * P);
    }
    assert_eq!(cache.nearest(&[]).common_tokens, 0);
}

#[test]
fn of_several_continuations_the_most_similar_is_named() {
    let mut cache = Cache::new(64, 64);
    let with = |page: [Token; 4]| [&prompt(8)[..], &page].concat();
    cache.run(&with([1, 2, 3, 4]), Fate::Keep);
    cache.run(&with([1, 2, 9, 9]), Fate::Keep);
    let nearest = cache.nearest(&with([1, 2, 9, 5]));
    assert_eq!((nearest.common_tokens, nearest.other), (11, Some(9)));
    assert_eq!(nearest.cached_tokens, 8);
}

#[test]
fn a_page_that_went_for_room_is_remembered_with_what_would_have_kept_it() {
    let mut cache = Cache::new(8, 64);
    let first = prompt(16);
    cache.run(&first, Fate::Keep);
    let others: Vec<Vec<Token>> = (1..=3).map(|at| vec![at; 16]).collect();
    for other in &others {
        cache.run(other, Fate::Keep);
    }
    let hashes = cache.hashes(&first);
    let ghost = cache.ghosts.of(hashes[0]).unwrap();
    assert_eq!(ghost.tier, EventTier::Device(DEVICE));
    assert!(!ghost.ephemeral);
    // Leaf first: the first page went last of its four, and four others after it.
    assert_eq!(cache.ghosts.pages_short(&ghost), 5);
    let deepest = cache.ghosts.of(hashes[3]).unwrap();
    assert_eq!(cache.ghosts.pages_short(&deepest), 8);
    let newest = cache.hashes(&others[2]);
    assert_eq!(cache.ghosts.of(newest[0]), None, "it is cached");
    cache.run(&first, Fate::Keep);
    assert_eq!(cache.ghosts.of(hashes[0]), None, "it is cached again");
}

#[test]
fn ghosts_are_bounded_and_the_oldest_is_forgotten() {
    let mut cache = Cache::new(4, 6);
    let runs: Vec<Vec<Token>> = (1..=4).map(|at| vec![at; 16]).collect();
    for run in &runs {
        cache.run(run, Fate::Keep);
    }
    assert_eq!(cache.ghosts.len(), 6);
    let first = cache.hashes(&runs[0]);
    assert!(first.iter().all(|&hash| cache.ghosts.of(hash).is_none()));
    let third = cache.hashes(&runs[2]);
    assert!(third.iter().all(|&hash| cache.ghosts.of(hash).is_some()));
}

#[test]
fn what_was_dropped_with_its_request_and_what_was_flushed_are_told_apart() {
    let mut cache = Cache::new(64, 64);
    cache.run(&prompt(8), Fate::Ephemeral);
    let hash = cache.hashes(&prompt(8))[1];
    assert!(cache.ghosts.of(hash).unwrap().ephemeral);
    cache.run(&prompt(16), Fate::Keep);
    cache.now = 77;
    cache.cache.flush(77).unwrap();
    cache.hear(false);
    assert_eq!(cache.ghosts.flushed(), Some(77));
    assert!(cache.ghosts.is_empty());
}

#[test]
fn hashes_from_the_root_give_the_tokens_back() {
    let mut cache = Cache::new(64, 64);
    let (long, fork) = (prompt(32), [&prompt(16)[..], &[9; 16]].concat());
    cache.run(&long, Fate::Keep);
    cache.run(&fork, Fate::Keep);
    let tokens = |hashes: &[u64]| cache.cache.tokens_of_hashes(cache.ns, hashes);
    for run in [&long, &fork] {
        let hashes = cache.hashes(run);
        for pages in 0..=hashes.len() {
            assert_eq!(tokens(&hashes[..pages]), run[..pages * P as usize]);
        }
    }
    let mut wrong = cache.hashes(&long);
    wrong[5] += 1;
    assert_eq!(tokens(&wrong), long[..5 * P as usize]);
    assert!(tokens(&[1, 2]).is_empty());
}

#[test]
fn an_outline_shows_each_node_after_its_parent_and_stops_at_its_limit() {
    let mut cache = Cache::new(64, 64);
    let (long, fork) = (prompt(32), [&prompt(16)[..], &[9; 16]].concat());
    cache.run(&long, Fate::Keep);
    cache.run(&fork, Fate::Keep);
    let of = |tokens: &[Token], limit| {
        let key = Key {
            ns: cache.ns,
            tokens,
        };
        cache.cache.outline(key, limit)
    };
    let all = of(&[], 10);
    let shape: Vec<_> = all
        .iter()
        .map(|node| (node.depth_pages, node.pages))
        .collect();
    assert_eq!(shape, [(0, 4), (4, 4), (4, 4)]);
    assert_eq!(all[0].children, 2);
    assert_eq!(all[0].devices, [0]);
    assert_eq!(all[0].hash, cache.hashes(&long)[3]);
    let ends = [cache.hashes(&long)[7], cache.hashes(&fork)[7]];
    assert!(all[1..].iter().all(|node| ends.contains(&node.hash)));
    assert_eq!(of(&[], 2).len(), 2);
    let way = of(&fork, 10);
    let hashes: Vec<_> = way.iter().map(|node| node.hash).collect();
    assert_eq!(hashes, [all[0].hash, ends[1]], "the way of a prefix");
    assert_eq!(of(&long[..16], 10).len(), 3, "and all below its end");
    assert_eq!(of(&[5; 8], 10), []);
}
