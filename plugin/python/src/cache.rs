//! The prefix cache for engines in Python that schedule themselves: token ids come in buffers
//! (numpy, array, memoryview of 32-bit integers), pages go out into a buffer of the caller, and
//! one call matches a prompt, keeps what is cached, and allocates the rest.

use std::collections::BTreeMap;
use std::sync::Mutex;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyKeyError, PyMemoryError};
use pyo3::prelude::*;
use rootstock::memory::{Pages, ReplicaId, TierId};
use rootstock::radix::{
    Action, CacheConfig, Fate, Key, Lease, NamespaceId, NamespaceKey, Outcome, PrefixCache,
    SpanMeta, Target, TenantId, Ttl,
};

use crate::failure::{invalid, poisoned, policy as policy_of};

const REPLICA: ReplicaId = ReplicaId(0);
const DEVICE: TierId = TierId::Device(REPLICA);

/// Tokens from which on other Python threads run while a prompt is matched.
const DETACH_TOKENS: usize = 4096;

#[derive(Debug)]
struct Request {
    lease: Lease,
    tokens: Vec<u32>,
    /// Pages behind the lease.
    own: Pages,
}

#[derive(Debug)]
struct State {
    cache: PrefixCache,
    requests: BTreeMap<u64, Request>,
    page_tokens: usize,
    next: u64,
}

/// A prefix cache over the pages of one device.
#[pyclass(frozen, module = "rootstock")]
#[derive(Debug)]
pub(crate) struct Cache {
    state: Mutex<State>,
}

fn tokens_of(py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(buffer) = PyBuffer::<u32>::get(tokens) {
        return buffer.to_vec(py);
    }
    let buffer = PyBuffer::<i32>::get(tokens).map_err(|_| {
        invalid("tokens is no buffer of 32-bit integers: use numpy.asarray(tokens, numpy.int32)")
    })?;
    let signed = buffer.to_vec(py)?;
    let read = signed.into_iter().map(u32::try_from);
    read.collect::<Result<_, _>>()
        .map_err(|_| invalid("tokens has a negative id"))
}

/// Writes ids to the head of a buffer of 32-bit integers.
fn write(py: Python<'_>, out: &Bound<'_, PyAny>, ids: &[u32]) -> PyResult<()> {
    let fits = |room: usize| match room < ids.len() {
        true => Err(invalid(format!(
            "pages has room for {room}, {} are needed",
            ids.len()
        ))),
        false => Ok(()),
    };
    if let Ok(buffer) = PyBuffer::<u32>::get(out) {
        let mut all = buffer.to_vec(py)?;
        fits(all.len())?;
        all[..ids.len()].copy_from_slice(ids);
        return buffer.copy_from_slice(py, &all);
    }
    let buffer =
        PyBuffer::<i32>::get(out).map_err(|_| invalid("pages is no buffer of 32-bit integers"))?;
    let mut all = buffer.to_vec(py)?;
    fits(all.len())?;
    for (slot, &id) in all.iter_mut().zip(ids) {
        *slot = i32::try_from(id).map_err(invalid)?;
    }
    buffer.copy_from_slice(py, &all)
}

fn outcome(done: Outcome) -> String {
    match done {
        Outcome::Accepted { .. } => "accepted".to_owned(),
        Outcome::Clipped { pages, asked_pages } => format!("clipped to {pages} of {asked_pages}"),
        Outcome::Deferred { .. } => "deferred".to_owned(),
        Outcome::Rejected(reason) => format!("rejected: {reason:?}").to_lowercase(),
        Outcome::Missing => "missing".to_owned(),
    }
}

impl State {
    fn request(&mut self, id: u64) -> PyResult<&mut Request> {
        let found = self.requests.get_mut(&id);
        found.ok_or_else(|| PyKeyError::new_err(format!("request {id} does not live")))
    }

    /// Pages of a request in the order of its tokens.
    fn pages(&self, request: &Request) -> Vec<u32> {
        let mut ids = Vec::new();
        self.cache.pages(&request.lease, &mut ids);
        let all = ids.iter().chain(request.own.ids());
        all.map(|page| page.get()).collect()
    }

    fn allocate(&mut self, count: usize, now: u64) -> PyResult<Pages> {
        let count = u32::try_from(count).map_err(invalid)?;
        let reserved = self.cache.reserve(DEVICE, count, now);
        let (mut room, _) = reserved.map_err(|short| PyMemoryError::new_err(short.to_string()))?;
        let pages = self.cache.acquire(&mut room, count);
        self.cache.cancel(room);
        Ok(pages)
    }

    fn begin(&mut self, ns: NamespaceId, tokens: Vec<u32>, now: u64) -> PyResult<(u64, u32)> {
        let most = u32::try_from(tokens.len().saturating_sub(1)).map_err(invalid)?;
        let key = Key {
            ns,
            tokens: &tokens,
        };
        let found = self.cache.match_lease(key, REPLICA, most, now);
        let rest = tokens.len().div_ceil(self.page_tokens) - found.lease.len_pages() as usize;
        let own = match self.allocate(rest, now) {
            Ok(own) => own,
            Err(short) => {
                self.cache.end(found.lease, Fate::Preempted, now);
                return Err(short);
            }
        };
        self.next += 1;
        let request = Request {
            lease: found.lease,
            tokens,
            own,
        };
        self.requests.insert(self.next, request);
        Ok((self.next, found.device_tokens))
    }

    /// Puts complete pages up to `computed` tokens into the cache; whether the page table changed.
    fn commit(&mut self, id: u64, computed: usize, meta: &SpanMeta, now: u64) -> PyResult<bool> {
        let page_tokens = self.page_tokens;
        let Self {
            cache, requests, ..
        } = self;
        let request = requests
            .get_mut(&id)
            .ok_or_else(|| PyKeyError::new_err(format!("request {id} does not live")))?;
        let known = request.tokens.len();
        if computed > known {
            return Err(invalid(format!(
                "{computed} tokens are computed, {known} are known: append them first"
            )));
        }
        let from = request.lease.len_tokens() as usize;
        let to = computed / page_tokens * page_tokens;
        if to <= from {
            return Ok(false);
        }
        let rest = request.own.split_off((to - from) / page_tokens);
        let pages = std::mem::replace(&mut request.own, rest);
        let tokens = &request.tokens[from..to];
        let done = cache.extend(&mut request.lease, tokens, pages, meta, now);
        Ok(!done.swapped.is_empty())
    }
}

#[pymethods]
impl Cache {
    /// An empty cache of `pages` pages of `page_tokens` tokens; page 0 is never handed out.
    #[new]
    #[pyo3(signature = (pages, *, page_tokens = 16, policy = "agent", pin_budget = 0.5))]
    fn new(pages: u32, page_tokens: u32, policy: &str, pin_budget: f64) -> PyResult<Self> {
        let cache = PrefixCache::new(&CacheConfig {
            page_tokens,
            device_pages: vec![pages],
            policy: policy_of(policy)?,
            pin_budget,
            ..CacheConfig::default()
        });
        let state = State {
            cache: cache.map_err(invalid)?,
            requests: BTreeMap::new(),
            page_tokens: page_tokens as usize,
            next: 0,
        };
        Ok(Self {
            state: Mutex::new(state),
        })
    }

    /// The id of a namespace: what else than its tokens says whose KV it is.
    #[pyo3(signature = (model, *, numerics = "", lora = None, salt = None))]
    fn namespace(
        &self,
        model: &str,
        numerics: &str,
        lora: Option<String>,
        salt: Option<String>,
    ) -> PyResult<u64> {
        let key = NamespaceKey {
            model: model.to_owned(),
            numerics: numerics.to_owned(),
            lora,
            salt,
        };
        let mut state = self.state.lock().map_err(poisoned)?;
        let ns = state.cache.namespace(&key);
        Ok(ns
            .map_err(|full| PyMemoryError::new_err(full.to_string()))?
            .get())
    }

    /// How many tokens of a prompt are cached. Changes nothing.
    fn probe(&self, py: Python<'_>, namespace: u64, tokens: &Bound<'_, PyAny>) -> PyResult<u32> {
        let tokens = tokens_of(py, tokens)?;
        let state = self.state.lock().map_err(poisoned)?;
        let key = Key {
            ns: NamespaceId::from_raw(namespace),
            tokens: &tokens,
        };
        Ok(state.cache.probe(key, REPLICA).device_tokens)
    }

    /// Matches a prompt, keeps what is cached of it (all but its last token at most), allocates
    /// the rest, and writes the ids of all its pages into `pages`: the request and its cached
    /// tokens.
    ///
    /// Raises MemoryError when not enough pages can be had; nothing has changed then.
    #[pyo3(signature = (namespace, tokens, pages, *, now_ns = None))]
    fn begin(
        &self,
        py: Python<'_>,
        namespace: u64,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        now_ns: Option<u64>,
    ) -> PyResult<(u64, u32)> {
        let tokens = tokens_of(py, tokens)?;
        let is_long = tokens.len() >= DETACH_TOKENS;
        let now = now_ns.unwrap_or_else(crate::clock::now_ns);
        let ns = NamespaceId::from_raw(namespace);
        let work = || {
            let mut state = self.state.lock().map_err(poisoned)?;
            let (id, cached) = state.begin(ns, tokens, now)?;
            let ids = state.pages(&state.requests[&id]);
            PyResult::Ok((id, cached, ids))
        };
        let (id, cached, ids) = if is_long { py.detach(work)? } else { work()? };
        if let Err(error) = write(py, pages, &ids) {
            self.end(id, "keep", Some(now))?;
            return Err(error);
        }
        Ok((id, cached))
    }

    /// Appends generated tokens to a request and allocates pages for them and `ahead` more;
    /// writes the ids of all its pages into `pages`.
    #[pyo3(signature = (request, tokens, pages, *, ahead = 0, now_ns = None))]
    fn append(
        &self,
        py: Python<'_>,
        request: u64,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        ahead: usize,
        now_ns: Option<u64>,
    ) -> PyResult<()> {
        let tokens = tokens_of(py, tokens)?;
        let now = now_ns.unwrap_or_else(crate::clock::now_ns);
        let mut state = self.state.lock().map_err(poisoned)?;
        let page_tokens = state.page_tokens;
        let one = state.request(request)?;
        let needed = (one.tokens.len() + tokens.len() + ahead).div_ceil(page_tokens);
        let more = needed.saturating_sub(one.lease.len_pages() as usize + one.own.len());
        let got = state.allocate(more, now)?;
        let one = state.request(request)?;
        one.own.merge(got);
        one.tokens.extend_from_slice(&tokens);
        let ids = state.pages(&state.requests[&request]);
        write(py, pages, &ids)
    }

    /// The first `computed` tokens of a request have their KV: complete pages are found by others
    /// from now on. True when other pages of the same content were there first: `pages` has the
    /// page table to use from now on.
    #[pyo3(signature = (request, computed, pages, *, priority = 0, now_ns = None))]
    fn commit(
        &self,
        py: Python<'_>,
        request: u64,
        computed: usize,
        pages: &Bound<'_, PyAny>,
        priority: i32,
        now_ns: Option<u64>,
    ) -> PyResult<bool> {
        let now = now_ns.unwrap_or_else(crate::clock::now_ns);
        let meta = SpanMeta {
            priority,
            ..SpanMeta::default()
        };
        let mut state = self.state.lock().map_err(poisoned)?;
        let changed = state.commit(request, computed, &meta, now)?;
        if changed {
            let ids = state.pages(&state.requests[&request]);
            write(py, pages, &ids)?;
        }
        Ok(changed)
    }

    /// Ends a request. `fate` says what its KV is worth: keep, superseded, ephemeral, preempted.
    #[pyo3(signature = (request, fate = "keep", *, now_ns = None))]
    fn end(&self, request: u64, fate: &str, now_ns: Option<u64>) -> PyResult<()> {
        let fate = match fate {
            "keep" => Fate::Keep,
            "superseded" => Fate::Superseded,
            "ephemeral" => Fate::Ephemeral,
            "preempted" => Fate::Preempted,
            other => {
                let known = "keep, superseded, ephemeral or preempted is possible";
                return Err(invalid(format!("fate is {other:?}, {known}")));
            }
        };
        let now = now_ns.unwrap_or_else(crate::clock::now_ns);
        let mut state = self.state.lock().map_err(poisoned)?;
        let ended = state.requests.remove(&request);
        let ended =
            ended.ok_or_else(|| PyKeyError::new_err(format!("request {request} does not live")))?;
        state.cache.release(ended.own, None);
        state.cache.end(ended.lease, fate, now);
        Ok(())
    }

    /// Pins the cached part of a prefix for `ttl_s` seconds; what came of it.
    #[pyo3(signature = (namespace, tokens, ttl_s, *, now_ns = None))]
    fn pin(
        &self,
        py: Python<'_>,
        namespace: u64,
        tokens: &Bound<'_, PyAny>,
        ttl_s: u64,
        now_ns: Option<u64>,
    ) -> PyResult<String> {
        let action = Action::Pin {
            target: Target::Prefix {
                ns: NamespaceId::from_raw(namespace),
                tokens: tokens_of(py, tokens)?,
            },
            ttl: Ttl {
                seconds: ttl_s,
                clamped: false,
            },
        };
        let now = now_ns.unwrap_or_else(crate::clock::now_ns);
        let mut state = self.state.lock().map_err(poisoned)?;
        Ok(outcome(state.cache.act(TenantId(0), &action, now)))
    }

    /// Pages that a request could have now.
    fn available(&self) -> PyResult<u32> {
        let state = self.state.lock().map_err(poisoned)?;
        Ok(state.cache.available(DEVICE))
    }

    /// The counters as JSON text.
    fn stats(&self) -> PyResult<String> {
        let state = self.state.lock().map_err(poisoned)?;
        serde_json::to_string(&state.cache.stats()).map_err(invalid)
    }

    /// Recounts everything from scratch; raises ValueError with the first contradiction.
    fn check(&self) -> PyResult<()> {
        let state = self.state.lock().map_err(poisoned)?;
        state.cache.check().map_err(invalid)
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let Ok(state) = self.state.get_mut() else {
            return;
        };
        for (_, request) in std::mem::take(&mut state.requests) {
            state.cache.release(request.own, None);
            state.cache.end(request.lease, Fate::Keep, u64::MAX);
        }
    }
}
