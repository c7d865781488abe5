//! Where requests are: the router of `rootstock_scheduler` fed with what the core knows.
//!
//! Each arrival goes where the router says, by cached prefix and load. Where all it may go to are
//! over the queue threshold it is parked: it waits beside the queue of the replica with the least
//! in front of it, in the router's order, and is placed when one has come below the threshold, by
//! what is cached then. And an idle replica takes over the request that another has just tried in
//! vain to start, so that nobody waits for a seat while one is free elsewhere.
//!
//! Speculative work goes where most of its prefix is, and weighs nothing.

use rootstock_memory::{Nanos, ReplicaId};
use rootstock_radix::{Key, PrefixCache, Probe, Token};
use rootstock_scheduler::router::{
    Overlap, ParkedParts, Route, RouteRequest, Router, RouterError, Why,
};
use rootstock_scheduler::{Admission, Class, Emit, NewRequest, RequestId, Scheduler};
use serde::Serialize;
use std::collections::BTreeMap;

use crate::config::CoreConfig;

/// Parked requests that are looked at when a replica has come below the threshold, at most.
const RELEASE_TRIES_MAX: usize = 64;
/// Seconds after which a refused request may try again.
const OVERLOAD_RETRY_S: u32 = 1;

/// How requests were placed, over all replicas. All zero with one replica and no thresholds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RouteStats {
    /// By cost.
    pub by_cost: u64,
    /// Where their session is.
    pub by_affinity: u64,
    /// To a replica that had nothing to do, although another was cheaper.
    pub to_idle: u64,
    /// Parked, because every replica was over the queue threshold.
    pub parked: u64,
    /// Refused, because every replica was over an overload threshold.
    pub overloaded: u64,
    /// Taken over by an idle replica while they waited.
    pub moved: u64,
}

/// A request that waits for a replica below the threshold.
#[derive(Debug)]
struct Parked {
    parts: ParkedParts,
    osl: Option<u32>,
    blocks: Vec<u64>,
    prompt_tokens: u32,
    session: Option<String>,
    parent: Option<String>,
    draw: u64,
}

/// Places requests and remembers where those are that moved.
#[derive(Debug)]
pub(crate) struct Replicas {
    router: Router,
    count: u16,
    /// Whether there is anything to decide.
    routes: bool,
    page_tokens: u32,
    moved: BTreeMap<RequestId, ReplicaId>,
    generated: BTreeMap<RequestId, u32>,
    parked: BTreeMap<RequestId, Parked>,
    /// Load has become less since parked requests were last looked at.
    lighter: bool,
    draws: u64,
    pub(crate) stats: RouteStats,
}

impl Replicas {
    pub(crate) fn new(config: &CoreConfig) -> Result<Self, RouterError> {
        let count = u16::try_from(config.replicas()).unwrap_or(u16::MAX);
        let router = config.router();
        let limits = router.queue_threshold.is_some() || router.overload.is_set();
        Ok(Self {
            router: Router::new(router, count)?,
            count,
            routes: count > 1 || limits,
            page_tokens: config.cache.page_tokens,
            moved: BTreeMap::new(),
            generated: BTreeMap::new(),
            parked: BTreeMap::new(),
            lighter: false,
            draws: 0,
            stats: RouteStats::default(),
        })
    }

    /// Where a live request is.
    pub(crate) fn home(&self, request: RequestId) -> ReplicaId {
        let moved = self.moved.get(&request).copied();
        moved.unwrap_or_else(|| request.replica())
    }

    /// Adds a request at the replica of the router's choice; where its queue is full, at any that
    /// takes it.
    pub(crate) fn add(
        &mut self,
        request: NewRequest,
        cache: &PrefixCache,
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) -> Admission {
        if let ([only], false) = (&mut *schedulers, self.routes) {
            return only.add(request, cache, now);
        }
        let key = Key {
            ns: request.ns,
            tokens: &request.tokens,
        };
        let overlaps = self.overlaps(cache, key);
        if request.class == Class::Speculative {
            let most = |at: &usize| (overlaps[*at].device, overlaps[*at].blocks());
            let at = (0..schedulers.len()).rev().max_by_key(most).unwrap_or(0);
            return schedulers[at].add(request, cache, now);
        }
        let blocks = block_hashes(request.ns.get(), &request.tokens, self.page_tokens as usize);
        let hints = &request.hints;
        let (session, parent) = (hints.program.clone(), hints.parent.clone());
        self.draws += 1;
        let route = RouteRequest {
            prompt_tokens: u32::try_from(request.tokens.len()).unwrap_or(u32::MAX),
            osl: hints.osl,
            overlaps: &overlaps,
            blocks: &blocks,
            pinned: None,
            session: session.as_deref(),
            parent: parent.as_deref(),
            draw: mix(self.draws),
        };
        // Nobody passes those who wait already.
        let chosen = match self.parked.is_empty() {
            true => self.router.route(&route, now),
            false => self.behind_parked(&route, now),
        };
        let chosen = match chosen {
            Route::To { replica, why, .. } => {
                self.count_why(why);
                usize::from(replica.0)
            }
            Route::Park => return self.park(request, &route, cache, schedulers, now),
            Route::Overloaded => {
                self.stats.overloaded += 1;
                return Admission::Deferred {
                    queue_len: schedulers.iter().map(Scheduler::waiting).sum(),
                    queue_cap: schedulers.iter().map(|s| s.config().max_queue).sum(),
                    retry_after_s: OVERLOAD_RETRY_S,
                };
            }
        };
        self.add_at(request, &route, (cache, chosen), schedulers, now)
    }

    /// A newcomer parks behind others, or is refused.
    fn behind_parked(&mut self, route: &RouteRequest<'_>, now: Nanos) -> Route {
        match self.router.route(route, now) {
            Route::Overloaded => Route::Overloaded,
            Route::To { .. } | Route::Park => Route::Park,
        }
    }

    fn count_why(&mut self, why: Why) {
        match why {
            Why::Cost | Why::Pinned => self.stats.by_cost += 1,
            Why::Affinity => self.stats.by_affinity += 1,
            Why::Idle => self.stats.to_idle += 1,
        }
    }

    fn add_at(
        &mut self,
        request: NewRequest,
        route: &RouteRequest<'_>,
        (cache, chosen): (&PrefixCache, usize),
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) -> Admission {
        let mut order: Vec<usize> = (0..schedulers.len()).collect();
        order.sort_by_key(|&at| (at != chosen, schedulers[at].waiting(), at));
        let added = offer(&order, request, schedulers, cache, |scheduler, request| {
            scheduler.add(request, cache, now)
        });
        if let Admission::Admitted(id) = added {
            self.router.placed(id.0, route, id.replica(), now);
        }
        added
    }

    /// The request waits beside the queue of the replica with the least in front of it.
    fn park(
        &mut self,
        request: NewRequest,
        route: &RouteRequest<'_>,
        cache: &PrefixCache,
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) -> Admission {
        let mut order: Vec<usize> = (0..schedulers.len()).collect();
        order.sort_by_key(|&at| (schedulers[at].waiting(), at));
        let (strict, jump_s) = (request.hints.strict, request.hints.jump_s);
        let added = offer(&order, request, schedulers, cache, |scheduler, request| {
            scheduler.add_parked(request, cache, now)
        });
        let Admission::Admitted(id) = added else {
            return added;
        };
        let uncached = (0..schedulers.len()).map(|at| self.router.uncached(route, at));
        let parts = ParkedParts {
            id: id.0,
            strict,
            jump_s,
            arrival: now,
            uncached_tokens: uncached.min().unwrap_or(0),
        };
        let parked = Parked {
            parts,
            osl: route.osl,
            blocks: route.blocks.to_vec(),
            prompt_tokens: route.prompt_tokens,
            session: route.session.map(str::to_owned),
            parent: route.parent.map(str::to_owned),
            draw: route.draw,
        };
        self.parked.insert(id, parked);
        self.lighter = true;
        self.stats.parked += 1;
        added
    }

    /// Whether parked requests are to be looked at.
    pub(crate) fn is_due(&self) -> bool {
        self.lighter && !self.parked.is_empty()
    }

    /// Places parked requests, in the router's order, as long as some replica is below the
    /// threshold. One that may only go to a busy one is passed by.
    pub(crate) fn release(
        &mut self,
        cache: &PrefixCache,
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) {
        if !self.is_due() {
            return;
        }
        self.lighter = false;
        let mut order: Vec<_> = self
            .parked
            .iter()
            .map(|(&id, parked)| (self.router.place_in_queue(&parked.parts, now), id))
            .collect();
        order.sort_unstable();
        for (_, id) in order.into_iter().take(RELEASE_TRIES_MAX) {
            if self.router.all_busy() {
                return;
            }
            self.release_one(id, cache, schedulers, now);
        }
    }

    fn release_one(
        &mut self,
        id: RequestId,
        cache: &PrefixCache,
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) {
        let home = usize::from(id.replica().0);
        let Some(parked) = self.parked.remove(&id) else {
            return;
        };
        let key = schedulers.get(home).and_then(|at| at.parked_key(id));
        let Some(overlaps) = key.map(|key| self.overlaps(cache, key)) else {
            return;
        };
        let route = RouteRequest {
            prompt_tokens: parked.prompt_tokens,
            osl: parked.osl,
            overlaps: &overlaps,
            blocks: &parked.blocks,
            pinned: None,
            session: parked.session.as_deref(),
            parent: parked.parent.as_deref(),
            draw: parked.draw,
        };
        let Route::To { replica, why, .. } = self.router.route(&route, now) else {
            self.parked.insert(id, parked);
            return;
        };
        self.count_why(why);
        let mut at = usize::from(replica.0);
        if let Ok([from, to]) = schedulers.get_disjoint_mut([home, at])
            && let Some(moving) = from.take_parked(id, cache, to, now)
        {
            self.moved.insert(id, replica);
            to.take_over_waiting(moving, cache, now);
        } else if let Some(scheduler) = schedulers.get_mut(home) {
            scheduler.unpark(cache, id, now);
            at = home;
        }
        let replica = ReplicaId(u16::try_from(at).unwrap_or(u16::MAX));
        self.router.placed(id.0, &route, replica, now);
    }

    /// An idle replica takes over a request that another has tried in vain to start.
    pub(crate) fn help(
        &mut self,
        idle: ReplicaId,
        cache: &PrefixCache,
        schedulers: &mut [Scheduler],
        now: Nanos,
    ) {
        let at = usize::from(idle.0);
        if schedulers.len() < 2 || !schedulers.get(at).is_some_and(Scheduler::is_idle) {
            return;
        }
        let mut others: Vec<usize> = (0..schedulers.len()).filter(|&other| other != at).collect();
        others.sort_by_key(|&other| (std::cmp::Reverse(schedulers[other].waiting()), other));
        for other in others {
            let Ok([busy, idler]) = schedulers.get_disjoint_mut([other, at]) else {
                continue;
            };
            if let Some(moving) = busy.take_waiting(cache, idler, now) {
                let (id, found) = (moving.id(), cache.probe(moving.key(), idle));
                let overlap = overlap(found, self.page_tokens);
                self.moved.insert(id, idle);
                self.router.moved(id.0, idle, overlap, now);
                self.stats.moved += 1;
                self.lighter = true;
                idler.take_over_waiting(moving, cache, now);
                return;
            }
        }
    }

    /// Takes in what requests did.
    pub(crate) fn hear(&mut self, emits: &[Emit], now: Nanos) {
        if !self.routes {
            return;
        }
        for emit in emits {
            let id = emit.request();
            match emit {
                Emit::Started { .. } => {}
                Emit::Tokens { tokens, .. } => {
                    let made = self.generated.entry(id).or_default();
                    let first = *made == 0;
                    *made += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                    if first {
                        self.router.prefill_done(id.0);
                        self.lighter = true;
                    }
                    self.router.generated(id.0, *made, now);
                }
                Emit::Final { .. } => {
                    self.moved.remove(&id);
                    self.generated.remove(&id);
                    self.parked.remove(&id);
                    self.router.ended(id.0, now);
                    self.lighter = true;
                }
            }
        }
    }

    fn overlaps(&self, cache: &PrefixCache, key: Key<'_>) -> Vec<Overlap> {
        let found = (0..self.count).map(|at| cache.probe(key, ReplicaId(at)));
        found
            .map(|probe| overlap(probe, self.page_tokens))
            .collect()
    }
}

/// Offers a request to replicas in this order until one takes it. Where none does: the answer of
/// the last that may take it later, else of the first.
fn offer(
    order: &[usize],
    request: NewRequest,
    schedulers: &mut [Scheduler],
    cache: &PrefixCache,
    mut add: impl FnMut(&mut Scheduler, NewRequest) -> Admission,
) -> Admission {
    let mut answer = None;
    for &at in order {
        let scheduler = &mut schedulers[at];
        // The prompt is not copied for whoever certainly takes it.
        if scheduler.has_room_for(&request, cache) {
            return add(scheduler, request);
        }
        let added = add(scheduler, request.clone());
        if matches!(added, Admission::Admitted(_)) {
            return added;
        }
        answer = answer
            .filter(|_| matches!(added, Admission::Rejected(_)))
            .or(Some(added));
    }
    // Where there is nobody to ask, later is the answer.
    answer.unwrap_or(Admission::Deferred {
        queue_len: 0,
        queue_cap: 0,
        retry_after_s: OVERLOAD_RETRY_S,
    })
}

fn overlap(probe: Probe, page_tokens: u32) -> Overlap {
    Overlap {
        device: probe.device_tokens / page_tokens,
        host: probe.host_tokens / page_tokens,
        storage: probe.storage_tokens / page_tokens,
    }
}

/// Hashes of the whole blocks of a prompt, each over all before it. Only for loads: a collision
/// makes a cost wrong, nothing else.
fn block_hashes(ns: u64, tokens: &[Token], block: usize) -> Vec<u64> {
    let mut hash = mix(ns);
    let chained = tokens.chunks_exact(block).map(|block| {
        hash = block
            .iter()
            .fold(hash, |h, &token| mix(h ^ u64::from(token)));
        hash
    });
    chained.collect()
}

/// Steele's SplitMix64 finish.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
