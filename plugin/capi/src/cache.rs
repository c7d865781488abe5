//! Depth one: the prefix cache alone, for hosts that schedule themselves.
//!
//! In order, for one request of a host:
//!
//! ```text
//! match       what is cached of the prompt -> a lease that keeps it
//! allocate    pages for the rest; what is worth least is evicted
//! (compute onto the pages)
//! extend      complete pages become matchable; end gives the lease back
//! ```

use std::collections::BTreeMap;
use std::ffi::c_char;

use rootstock::memory::{CopyDone, CopyId, CopyPlan, Pages, ReplicaId, StepId, TierId};
use rootstock::radix::{Fate, Key, Lease, NamespaceId, NamespaceKey, PrefixCache};

use crate::args::{self, Host};
use crate::handle::{self, Handle};
use crate::settings;
use crate::status::{Failure, RootstockStatus};

/// A prefix cache. Opaque.
#[derive(Debug)]
pub struct Cache {
    pub(crate) cache: PrefixCache,
    pub(crate) leases: BTreeMap<u64, Lease>,
    pub(crate) allocations: BTreeMap<u64, Pages>,
    /// Copies that the host has not fetched.
    pub(crate) copies: Vec<CopyPlan>,
    page_tokens: usize,
    next_id: u64,
}

/// What is cached of a prefix: three parts that follow each other, each whole pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RootstockFound {
    /// Tokens on the device of the replica asked for.
    pub device_tokens: u32,
    /// Tokens after those, on host.
    pub host_tokens: u32,
    /// Tokens after those, in storage.
    pub storage_tokens: u32,
}

/// What becomes of the KV of a lease that ends.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RootstockFate {
    /// Stays cached by the ordinary rules.
    Keep = 0,
    /// A later prompt has replaced it: it goes first.
    Superseded = 1,
    /// Nobody will ask for it again: it goes at once.
    Ephemeral = 2,
    /// The request will be back.
    Preempted = 3,
}

impl Cache {
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) const fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    pub(crate) fn lease(&mut self, id: u64) -> Result<&mut Lease, Failure> {
        self.leases
            .get_mut(&id)
            .ok_or_else(|| Failure::unknown("lease", id))
    }

    fn give_back(&mut self) {
        for (_, lease) in std::mem::take(&mut self.leases) {
            self.cache.end(lease, Fate::Keep, u64::MAX);
        }
        for (_, pages) in std::mem::take(&mut self.allocations) {
            self.cache.release(pages, None);
        }
    }
}

/// A replica of this cache.
pub(crate) fn replica(cache: &PrefixCache, replica: u32) -> Result<ReplicaId, Failure> {
    let id = u16::try_from(replica).map(ReplicaId);
    match id {
        Ok(id) if cache.total(TierId::Device(id)) > 0 => Ok(id),
        _ => Err(Failure::unknown("replica", replica.into())),
    }
}

/// A cache of the configuration `config`, JSON with the fields of CacheConfig:
/// {"page_tokens": 16, "device_pages": [1024], "host_pages": 4096, "policy": "agent"}.
/// Free it with rootstock_cache_free.
///
/// # Safety
/// `config` has `config_length` bytes; `cache` has room for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_new(
    config: *const c_char,
    config_length: usize,
    cache: *mut *mut Handle<Cache>,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::guard(|| {
        args::check_out("cache", cache)?;
        let text = host.text("config", config, config_length)?;
        let config = settings::cache(text)?;
        let made = PrefixCache::new(&config);
        let made = made.map_err(|error| Failure::invalid(error.to_string()))?;
        let handle = Handle::new(Cache {
            cache: made,
            leases: BTreeMap::new(),
            allocations: BTreeMap::new(),
            copies: Vec::new(),
            page_tokens: config.page_tokens as usize,
            next_id: 0,
        });
        host.write("cache", cache, handle)
    })
}

/// Frees a cache with all its leases and allocations. Null is nothing.
///
/// # Safety
/// `cache` came from rootstock_cache_new, is not used by another thread, and never again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_free(cache: *mut Handle<Cache>) {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::free(host, cache, Cache::give_back);
}

/// What else than the tokens says whose KV it is. Texts of a length; null is absent.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockNamespace {
    /// sizeof(RootstockNamespace).
    pub struct_size: u32,
    /// Model and its revision.
    pub model: *const c_char,
    /// Bytes of `model`.
    pub model_length: usize,
    /// What else changes the numbers: kernels, element type, layout.
    pub numerics: *const c_char,
    /// Bytes of `numerics`.
    pub numerics_length: usize,
    /// Adapter, or null.
    pub lora: *const c_char,
    /// Bytes of `lora`.
    pub lora_length: usize,
    /// Salt of the tenant, or null.
    pub salt: *const c_char,
    /// Bytes of `salt`.
    pub salt_length: usize,
}

/// Reads a namespace.
pub(crate) fn namespace_key(
    host: Host,
    namespace: *const RootstockNamespace,
) -> Result<NamespaceKey, Failure> {
    let it = host.sized("namespace", namespace)?;
    Ok(NamespaceKey {
        model: host.text("model", it.model, it.model_length)?.to_owned(),
        numerics: host
            .text("numerics", it.numerics, it.numerics_length)?
            .to_owned(),
        lora: host.optional_text("lora", it.lora, it.lora_length)?,
        salt: host.optional_text("salt", it.salt, it.salt_length)?,
    })
}

/// The id of a namespace; the same namespace always has the same.
///
/// # Safety
/// `cache` is live, `namespace` as its structure says, `id` has room for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_namespace(
    cache: *mut Handle<Cache>,
    namespace: *const RootstockNamespace,
    id: *mut u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("id", id)?;
        let found = it.cache.namespace(&namespace_key(host, namespace)?);
        let found = found.map_err(|error| Failure(RootstockStatus::Full, error.to_string()))?;
        host.write("id", id, found.get())
    })
}

/// Looks a prefix up and changes nothing.
///
/// # Safety
/// `cache` is live, `tokens` has `length` tokens, `found` has room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_probe(
    cache: *mut Handle<Cache>,
    namespace: u64,
    tokens: *const u32,
    length: usize,
    replica_id: u32,
    found: *mut RootstockFound,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let tokens = host.slice("tokens", tokens, length)?;
        let ns = NamespaceId::from_raw(namespace);
        let probe = it
            .cache
            .probe(Key { ns, tokens }, replica(&it.cache, replica_id)?);
        let answer = RootstockFound {
            device_tokens: probe.device_tokens,
            host_tokens: probe.host_tokens,
            storage_tokens: probe.storage_tokens,
        };
        host.write("found", found, answer)
    })
}

/// A prompt to look up.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RootstockPrompt {
    /// sizeof(RootstockPrompt).
    pub struct_size: u32,
    /// On whose device.
    pub replica: u32,
    /// From rootstock_cache_namespace.
    pub namespace_id: u64,
    /// The tokens.
    pub tokens: *const u32,
    /// How many.
    pub length: usize,
    /// Match so many at most; length - 1 leaves one to compute.
    pub max_tokens: u32,
}

/// Matches a prompt and leases what is on the device: it stays until rootstock_cache_end. What is
/// on host comes up by rootstock_cache_promote.
///
/// # Safety
/// `cache` is live, `prompt` as its structure says, `lease` and `found` have room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_match(
    cache: *mut Handle<Cache>,
    prompt: *const RootstockPrompt,
    now_ns: u64,
    lease: *mut u64,
    found: *mut RootstockFound,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        args::check_out("lease", lease)?;
        args::check_out("found", found)?;
        let prompt = host.sized("prompt", prompt)?;
        let key = Key {
            ns: NamespaceId::from_raw(prompt.namespace_id),
            tokens: host.slice("tokens", prompt.tokens, prompt.length)?,
        };
        let replica = replica(&it.cache, prompt.replica)?;
        let matched = it
            .cache
            .match_lease(key, replica, prompt.max_tokens, now_ns);
        let answer = RootstockFound {
            device_tokens: matched.device_tokens,
            host_tokens: matched.host_tokens,
            storage_tokens: matched.storage_tokens,
        };
        let id = it.fresh_id();
        it.leases.insert(id, matched.lease);
        host.write("found", found, answer)?;
        host.write("lease", lease, id)
    })
}

const KEEP: u32 = RootstockFate::Keep as u32;
const SUPERSEDED: u32 = RootstockFate::Superseded as u32;
const EPHEMERAL: u32 = RootstockFate::Ephemeral as u32;
const PREEMPTED: u32 = RootstockFate::Preempted as u32;

fn fate_of(fate: u32) -> Result<Fate, Failure> {
    match fate {
        KEEP => Ok(Fate::Keep),
        SUPERSEDED => Ok(Fate::Superseded),
        EPHEMERAL => Ok(Fate::Ephemeral),
        PREEMPTED => Ok(Fate::Preempted),
        _ => Err(Failure::invalid(format!(
            "fate is {fate}, 0 to 3 (RootstockFate) are possible"
        ))),
    }
}

/// Ends a lease; `fate` is a RootstockFate.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_end(
    cache: *mut Handle<Cache>,
    lease: u64,
    fate: u32,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let fate = fate_of(fate)?;
        let ended = it.leases.remove(&lease);
        let ended = ended.ok_or_else(|| Failure::unknown("lease", lease))?;
        it.cache.end(ended, fate, now_ns);
        Ok(())
    })
}

/// Acknowledges a copy, once; `ok` is false when it did not happen.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_copy_done(
    cache: *mut Handle<Cache>,
    copy: u64,
    ok: bool,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let id = CopyId(copy);
        it.cache.copy_done(CopyDone { id, ok }, now_ns);
        Ok(())
    })
}

/// Says that no step up to `step` of a replica touches pages any more.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_step_done(
    cache: *mut Handle<Cache>,
    replica_id: u32,
    step: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let replica = replica(&it.cache, replica_id)?;
        it.cache.step_done(replica, StepId(step));
        Ok(())
    })
}

/// Lets time pass: pins expire without traffic.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_tick(
    cache: *mut Handle<Cache>,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        it.cache.tick(now_ns);
        Ok(())
    })
}

/// Empties all tiers; with leases, allocations or copies out nothing changes
/// (ROOTSTOCK_STATUS_REFUSED).
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_flush(
    cache: *mut Handle<Cache>,
    now_ns: u64,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let flushed = it.cache.flush(now_ns);
        flushed.map_err(|error| Failure(RootstockStatus::Refused, error.to_string()))
    })
}

/// Recounts everything from scratch; for tests.
///
/// # Safety
/// `cache` is live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_check(cache: *mut Handle<Cache>) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let checked = it.cache.check();
        checked.map_err(|error| Failure(RootstockStatus::Corrupt, error.to_string()))
    })
}

/// The counters as JSON, the fields of CacheStats. `length` is what is needed, without a final 0.
///
/// # Safety
/// `cache` is live, `buffer` has room for `capacity` bytes, `length` for one number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rootstock_cache_stats(
    cache: *mut Handle<Cache>,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> RootstockStatus {
    // SAFETY: the contract of this function.
    let host = unsafe { Host::promises() };
    handle::with(host, cache, |it| {
        let text = serde_json::to_string(&it.cache.stats());
        let text = text.map_err(|error| Failure::invalid(error.to_string()))?;
        host.copy_out(text.as_bytes(), buffer.cast::<u8>(), capacity, length)
    })
}
