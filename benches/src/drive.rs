//! Drives a prefix cache with a workload and adds up the time spent in the cache alone. Own.

use std::time::Duration;

use rootstock_memory::{Nanos, Pages, ReplicaId, TierId};
use rootstock_radix::{
    CacheConfig, CacheError, Fate, Key, Lease, NamespaceId, NamespaceKey, PolicyKind, PrefixCache,
    SpanMeta,
};
use rustix::time::{ClockId, clock_gettime};

use crate::workload::{Op, Request, Workload};

/// The one replica of the benches.
pub const REPLICA: ReplicaId = ReplicaId(0);

/// Its pages.
pub const DEVICE: TierId = TierId::Device(REPLICA);

/// A cache with one namespace.
#[derive(Debug)]
pub struct Bench {
    /// The cache.
    pub cache: PrefixCache,
    /// Its namespace.
    pub ns: NamespaceId,
    /// What it is told of the time.
    pub now: Nanos,
    page_tokens: u32,
}

impl Bench {
    /// A cache of `pages` pages.
    ///
    /// # Errors
    /// The cache's.
    pub fn new(page_tokens: u32, pages: u32, policy: PolicyKind) -> Result<Self, CacheError> {
        Self::with(&CacheConfig {
            page_tokens,
            device_pages: vec![pages],
            policy,
            max_nodes: pages.saturating_add(16),
            ..CacheConfig::default()
        })
    }

    /// A cache with one replica.
    ///
    /// # Errors
    /// The cache's.
    pub fn with(config: &CacheConfig) -> Result<Self, CacheError> {
        let mut cache = PrefixCache::new(config)?;
        let ns = cache.namespace(&NamespaceKey::default())?;
        Ok(Self {
            cache,
            ns,
            now: 0,
            page_tokens: config.page_tokens,
        })
    }

    /// Matches and leases; the tokens found.
    pub fn begin(&mut self, tokens: &[u32]) -> (Lease, u32) {
        let key = Key {
            ns: self.ns,
            tokens,
        };
        let found = self.cache.match_lease(key, REPLICA, u32::MAX, self.now);
        (found.lease, found.device_tokens)
    }

    /// Pages for `count` more, evicted for where needed; `None` where too much is leased.
    pub fn take(&mut self, count: u32) -> Option<Pages> {
        let (mut reservation, _) = self.cache.reserve(DEVICE, count, self.now).ok()?;
        let pages = self.cache.acquire(&mut reservation, count);
        self.cache.cancel(reservation);
        Some(pages)
    }

    /// Puts the pages of `tokens`, which follow the lease, into the cache.
    pub fn extend(&mut self, lease: &mut Lease, tokens: &[u32], pages: Pages) {
        self.cache
            .extend(lease, tokens, pages, &SpanMeta::default(), self.now);
    }

    /// Ends a lease.
    pub fn end(&mut self, lease: Lease) {
        self.cache.end(lease, Fate::Keep, self.now);
    }

    /// Caches the whole pages of `tokens`: match, reserve, extend, end. False without room.
    pub fn insert(&mut self, tokens: &[u32]) -> bool {
        let (mut lease, found) = self.begin(tokens);
        let rest = tokens.get(found as usize..).unwrap_or_default();
        let count = self.whole_pages(rest.len());
        let rest = rest
            .get(..(count * self.page_tokens) as usize)
            .unwrap_or_default();
        let pages = if count == 0 { None } else { self.take(count) };
        let done = count == 0 || pages.is_some();
        if let Some(pages) = pages {
            self.extend(&mut lease, rest, pages);
        }
        self.end(lease);
        done
    }

    fn whole_pages(&self, tokens: usize) -> u32 {
        u32::try_from(tokens).unwrap_or(u32::MAX) / self.page_tokens
    }
}

/// What a workload came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Driven {
    /// Processor time in the cache: match, lease, reserve and evict, extend, end.
    pub spent: Duration,
    /// Tokens of prompts that were found.
    pub hit_tokens: u64,
    /// Requests that found no room and were not cached.
    pub refused: u32,
}

/// A request between begin and finish.
struct Running {
    lease: Lease,
    cached: u32,
    pages: Option<Pages>,
}

/// Runs `workload` on a new cache of `capacity_tokens`. The whole answer is reserved at the begin,
/// as engines do that never run out in the middle. Making the tokens is not timed.
///
/// # Errors
/// The cache's.
pub fn drive(
    workload: &Workload,
    page_tokens: u32,
    capacity_tokens: u32,
    policy: PolicyKind,
) -> Result<Driven, CacheError> {
    let mut bench = Bench::new(page_tokens, capacity_tokens / page_tokens, policy)?;
    let mut running: Vec<Option<Running>> = workload.requests.iter().map(|_| None).collect();
    let (mut driven, mut tokens) = (Driven::default(), Vec::new());
    let clock_cost = clock_cost();
    for op in &workload.ops {
        let (Op::Begin(at) | Op::Finish(at)) = *op;
        let Some(request) = workload.requests.get(at as usize) else {
            continue;
        };
        let Some(place) = running.get_mut(at as usize) else {
            continue;
        };
        tokens.clear();
        request.tokens(&mut tokens);
        let begin = now();
        match op {
            Op::Begin(_) => *place = begin_request(&mut bench, request, &tokens, &mut driven),
            Op::Finish(_) => {
                if let Some(running) = place.take() {
                    finish_request(&mut bench, running, &tokens);
                }
            }
        }
        driven.spent += since(begin).saturating_sub(clock_cost);
    }
    for Running { lease, pages, .. } in running.into_iter().flatten() {
        if let Some(pages) = pages {
            bench.cache.release(pages, None);
        }
        bench.end(lease);
    }
    Ok(driven)
}

fn begin_request(
    bench: &mut Bench,
    request: &Request,
    tokens: &[u32],
    driven: &mut Driven,
) -> Option<Running> {
    let prompt = tokens
        .get(..request.prompt_len as usize)
        .unwrap_or_default();
    let (lease, cached) = bench.begin(prompt);
    driven.hit_tokens += u64::from(cached);
    let missing = (request.total_len - cached) / bench.page_tokens;
    if missing == 0 {
        return Some(Running {
            lease,
            cached,
            pages: None,
        });
    }
    if let Some(pages) = bench.take(missing) {
        return Some(Running {
            lease,
            cached,
            pages: Some(pages),
        });
    }
    bench.end(lease);
    driven.refused += 1;
    None
}

fn finish_request(bench: &mut Bench, running: Running, tokens: &[u32]) {
    let Running {
        mut lease,
        cached,
        pages,
    } = running;
    if let Some(pages) = pages {
        let computed = tokens.get(cached as usize..).unwrap_or_default();
        let whole = pages.len() * bench.page_tokens as usize;
        bench.extend(&mut lease, computed.get(..whole).unwrap_or_default(), pages);
    }
    bench.end(lease);
}

/// Processor time of this thread: what else runs on the machine does not count, but for what it
/// displaces from the caches.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap_or_default()
}

/// Processor time since `begin`.
pub fn since(begin: Duration) -> Duration {
    now().saturating_sub(begin)
}

/// What one look at the clock adds to a measured span, the mean of many.
fn clock_cost() -> Duration {
    const LOOKS: u32 = 1000;
    let begin = now();
    for _ in 0..LOOKS {
        std::hint::black_box(now());
    }
    since(begin) / LOOKS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Span;

    /// Prompts of 40 tokens, of which 32 are shared, and 8 tokens of output.
    fn pair() -> Workload {
        let request = |own| {
            let spans = [(1, 32), (own, 16)];
            let spans = spans.map(|(stream, len)| Span {
                stream,
                start: 0,
                len,
            });
            Request::new(spans.to_vec(), 8)
        };
        Workload::one_by_one(vec![request(2), request(3), request(2)])
    }

    #[test]
    fn hits_are_whole_pages_of_what_came_before() {
        // 48 tokens a request: 32 shared, then the third finds its own page of prompt, not that
        // which ends in the output.
        let driven = drive(&pair(), 8, 800, PolicyKind::Lru).unwrap();
        assert_eq!((driven.hit_tokens, driven.refused), (32 + 40, 0));
    }

    #[test]
    fn a_request_without_room_is_counted_and_leaves_nothing_behind() {
        let driven = drive(&pair(), 8, 40, PolicyKind::Lru).unwrap();
        assert_eq!((driven.hit_tokens, driven.refused), (0, 3));
    }
}
