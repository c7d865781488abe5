//! Random requests on a cache of two tiers, each change told to a publisher.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rootstock_memory::{CopyDone, CopyPlan, ReplicaId, TierId};
use rootstock_radix::{
    Action, CacheConfig, EventTier, Fate, Key, KvEvent, Lease, NamespaceId, NamespaceKey,
    PrefixCache, Probe, SpanMeta, Target, TenantId, Token, Ttl, WritePolicy,
};
use rootstock_server::kv_events::publisher::{Feed, Publisher};

/// Tokens a page.
pub(crate) const PAGE_TOKENS: u32 = 4;
/// Namespaces by salt and adapter.
pub(crate) const NAMES: [(Option<&str>, Option<&str>); 4] = [
    (None, None),
    (Some("tenant-a"), None),
    (None, Some("my-lora")),
    (Some("tenant-a"), Some("my-lora")),
];
const PROMPT_PAGES: usize = 12;
const SECOND: u64 = 1_000_000_000;

/// splitmix64.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The next number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

struct Request {
    lease: Lease,
    tokens: Vec<Token>,
    replica: u16,
}

/// The cache, its load, and what it tells.
pub(crate) struct World {
    cache: PrefixCache,
    /// Draws everything.
    pub(crate) random: Random,
    namespaces: Vec<NamespaceId>,
    replicas: u16,
    requests: Vec<Request>,
    copies: Vec<CopyPlan>,
    feed: Feed,
    account_wanted: Arc<AtomicBool>,
    now: u64,
    /// Whether the cache is emptied now and then.
    pub(crate) flushes: bool,
    /// Operations done.
    pub(crate) ops: u64,
    /// Events told, by kind: stored on device, stored on host, removed, cleared.
    pub(crate) told: [u64; 4],
}

impl World {
    /// An empty cache that tells `publisher`.
    pub(crate) fn new(seed: u64, replicas: u16, publisher: &Publisher) -> World {
        let config = CacheConfig {
            page_tokens: PAGE_TOKENS,
            device_pages: vec![96; replicas.into()],
            host_pages: 160,
            write_policy: WritePolicy::Selective,
            max_events: 1 << 16,
            ..CacheConfig::default()
        };
        let mut cache = PrefixCache::new(&config).expect("a valid configuration");
        let name = |(salt, lora): (Option<&str>, Option<&str>)| NamespaceKey {
            model: "m".into(),
            numerics: "n".into(),
            salt: salt.map(Into::into),
            lora: lora.map(Into::into),
        };
        let namespaces = NAMES
            .map(|names| cache.namespace(&name(names)).expect("room for names"))
            .to_vec();
        let account_wanted = Arc::new(AtomicBool::new(false));
        let wish = Arc::clone(&account_wanted);
        publisher.spawn_accounts(move || {
            wish.store(true, Ordering::Release);
            Some(true)
        });
        World {
            cache,
            random: Random(seed),
            namespaces,
            replicas,
            requests: Vec::new(),
            copies: Vec::new(),
            feed: publisher.feed(),
            account_wanted,
            now: 1,
            flushes: true,
            ops: 0,
            told: [0; 4],
        }
    }

    /// One operation; what it changes is told.
    pub(crate) fn step(&mut self) {
        self.now += self.random.below(2) * SECOND;
        self.ops += 1;
        match self.random.below(40) {
            0..=13 => self.start(),
            14..=21 => self.compute(),
            22..=29 => self.end(),
            30..=35 => self.acknowledge(),
            36..=37 => self.act(),
            38 => self.cache.tick(self.now),
            _ => self.flush_sometimes(),
        }
        self.cache.drain_copies(&mut self.copies);
        self.tell();
    }

    /// Tells what changed, or everything when somebody asked for it.
    pub(crate) fn tell(&mut self) {
        let mut events = Vec::new();
        self.cache.drain_events(&mut events);
        for event in &events {
            let kind = match event {
                KvEvent::Stored { tier, .. } => usize::from(*tier == EventTier::Host),
                KvEvent::Removed { .. } => 2,
                KvEvent::Cleared { .. } | KvEvent::Gap { .. } | _ => 3,
            };
            self.told[kind] += 1;
        }
        let cache = &self.cache;
        let name = |ns| cache.namespace_key(ns);
        if self.account_wanted.swap(false, Ordering::AcqRel) {
            events.clear();
            cache.dump_events(&mut events);
            self.feed.tell_all(&events, name);
        } else if !events.is_empty() {
            self.feed.tell_changes(&events, name);
        }
    }

    /// A prompt that shares its beginning with others, more often than not.
    pub(crate) fn prompt(&mut self) -> Vec<Token> {
        let pages = 1 + self.random.below(PROMPT_PAGES as u64) as usize;
        let family = self.random.below(6) as Token;
        let mut tokens = Vec::new();
        let mut branch = 0;
        for page in 0..pages {
            branch = branch * 3
                + if page % 3 == 2 {
                    self.random.below(3) as Token
                } else {
                    0
                };
            let page = page as Token;
            tokens
                .extend((0..PAGE_TOKENS).map(|at| family * 100_000 + branch * 64 + page * 4 + at));
        }
        let tail = self.random.below(PAGE_TOKENS.into()) as usize;
        tokens.extend(std::iter::repeat_n(7, tail));
        tokens
    }

    /// What the tree says about a prompt.
    pub(crate) fn probe(&self, name: usize, tokens: &[Token], replica: u16) -> Probe {
        let ns = self.namespaces[name];
        self.cache.probe(Key { ns, tokens }, ReplicaId(replica))
    }

    fn start(&mut self) {
        if self.requests.len() >= 6 {
            return;
        }
        let tokens = self.prompt();
        let ns = self.namespaces[self.random.below(NAMES.len() as u64) as usize];
        let replica = self.random.below(self.replicas.into()) as u16;
        let key = Key {
            ns,
            tokens: &tokens,
        };
        let max = tokens.len() as u32;
        let mut found = self
            .cache
            .match_lease(key, ReplicaId(replica), max, self.now);
        if found.host_tokens > 0 {
            let device = TierId::Device(ReplicaId(replica));
            let pages = found.host_tokens / PAGE_TOKENS;
            if let Ok((mut room, copies)) = self.cache.reserve(device, pages, self.now) {
                self.copies.extend(copies);
                let plan = self.cache.promote(&mut found.lease, &mut room, self.now);
                self.copies.extend(plan);
                self.cache.cancel(room);
            }
        }
        self.requests.push(Request {
            lease: found.lease,
            tokens,
            replica,
        });
    }

    /// Computes some pages of a request.
    fn compute(&mut self) {
        let Some(at) = self.pick() else { return };
        let request = &self.requests[at];
        let (p, done) = (PAGE_TOKENS as usize, request.lease.len_pages() as usize);
        let left = request.tokens.len() / p - done;
        let n = left.min(1 + self.random.below(6) as usize);
        let device = TierId::Device(ReplicaId(request.replica));
        let Ok((mut room, copies)) = self.cache.reserve(device, n as u32, self.now) else {
            return;
        };
        self.copies.extend(copies);
        let pages = self.cache.acquire(&mut room, n as u32);
        self.cache.cancel(room);
        let request = &mut self.requests[at];
        let tokens = &request.tokens[done * p..(done + n) * p];
        let meta = SpanMeta::default();
        let _ = self
            .cache
            .extend(&mut request.lease, tokens, pages, &meta, self.now);
    }

    fn end(&mut self) {
        let Some(at) = self.pick() else { return };
        let fate = match self.random.below(8) {
            0 => Fate::Ephemeral,
            1 => Fate::Superseded,
            _ => Fate::Keep,
        };
        let request = self.requests.swap_remove(at);
        self.cache.end(request.lease, fate, self.now);
    }

    fn acknowledge(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let at = self.random.below(self.copies.len() as u64) as usize;
        let id = self.copies.swap_remove(at).id;
        let ok = self.random.below(10) > 0;
        self.cache.copy_done(CopyDone { id, ok }, self.now);
    }

    fn act(&mut self) {
        let tokens = self.prompt();
        let ns = self.namespaces[self.random.below(NAMES.len() as u64) as usize];
        let target = Target::Prefix { ns, tokens };
        let ttl = Ttl {
            seconds: 1 + self.random.below(30),
            clamped: false,
        };
        let action = match self.random.below(3) {
            0 => Action::Pin { target, ttl },
            1 => Action::Demote { target },
            _ => Action::Release { target },
        };
        let _ = self.cache.act(TenantId(0), &action, self.now);
    }

    fn flush_sometimes(&mut self) {
        if !self.flushes || self.random.below(12) > 0 {
            return;
        }
        self.end_all();
        self.cache.flush(self.now).expect("nothing is in use");
    }

    /// Nothing is in use any more.
    fn end_all(&mut self) {
        while !self.requests.is_empty() {
            self.end();
        }
        self.cache.drain_copies(&mut self.copies);
        while !self.copies.is_empty() {
            self.acknowledge();
            self.cache.drain_copies(&mut self.copies);
        }
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.requests.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end_all();
    }
}
