//! One policy at one capacity, on the cache that serves requests.
//!
//! A block is a page of one token, and its number is that token: equal prefixes of blocks become
//! equal prefixes of tokens, exactly. Requests run one after another, each from match to end, as
//! the offline optimum takes them. Own.

use rootstock::memory::{ReplicaId, TierId};
use rootstock::radix::{
    CacheConfig, Fate, Key, NamespaceId, NamespaceKey, PolicyKind, PrefixCache, SpanMeta,
};

use super::error::ReplayError;
use super::ticker::Ticker;
use super::trace::Trace;

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);

/// Nodes beside those that hold pages: the root of the one namespace.
const SPARE_NODES: u32 = 16;

/// Blocks that `policy` hits with room for `capacity` blocks.
///
/// A prompt longer than the whole cache keeps as many of its first blocks as fit.
///
/// # Errors
/// The cache refuses its configuration, or breaks its contract.
pub(crate) fn hits(
    trace: &Trace,
    policy: PolicyKind,
    capacity: u32,
    ticker: &mut Ticker,
) -> Result<u64, ReplayError> {
    let config = CacheConfig {
        page_tokens: 1,
        device_pages: vec![capacity],
        policy,
        max_nodes: capacity + SPARE_NODES,
        ..CacheConfig::default()
    };
    let mut cache = PrefixCache::new(&config)?;
    let ns = cache.namespace(&NamespaceKey::default())?;
    let mut hits = 0;
    for request in 0..trace.len() {
        let path = trace.path(request);
        let found = serve(&mut cache, ns, path, capacity, trace.arrival_ns(request));
        hits += u64::from(found.map_err(|what| ReplayError::Broken { request, what })?);
        ticker.tick();
    }
    Ok(hits)
}

/// One request from match to end; the blocks found.
fn serve(
    cache: &mut PrefixCache,
    ns: NamespaceId,
    path: &[u32],
    capacity: u32,
    now_ns: u64,
) -> Result<u32, &'static str> {
    let key = Key { ns, tokens: path };
    let found = cache.match_lease(key, REPLICA, u32::MAX, now_ns);
    let (mut lease, hits) = (found.lease, found.device_tokens);
    let missing = path.get(hits as usize..).unwrap_or_default();
    let room = capacity.saturating_sub(hits) as usize;
    let computed = missing.get(..room).unwrap_or(missing);
    if let Ok(count) = u32::try_from(computed.len())
        && count > 0
    {
        let Ok((mut reservation, _)) = cache.reserve(DEVICE, count, now_ns) else {
            cache.end(lease, Fate::Keep, now_ns);
            return Err("no room although nothing but this request is leased");
        };
        let pages = cache.acquire(&mut reservation, count);
        cache.cancel(reservation);
        let extended = cache.extend(&mut lease, computed, pages, &SpanMeta::default(), now_ns);
        if extended.inserted_pages != count {
            cache.end(lease, Fate::Keep, now_ns);
            return Err("computed pages did not all become cached");
        }
    }
    cache.end(lease, Fate::Keep, now_ns);
    Ok(hits)
}
