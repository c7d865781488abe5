//! Where requests are: the router of `rootstock_scheduler` fed with what the core knows.
//!
//! Each arrival goes where the router says, by cached prefix and load. Where all replicas are over
//! the queue threshold it waits at the one with the least in front of it. And an idle replica takes
//! over the request that another has just tried in vain to start, so that nobody waits for a seat
//! while one is free elsewhere.

use rootstock_memory::{Nanos, ReplicaId};
use rootstock_radix::{Key, PrefixCache, Probe, Token};
use rootstock_scheduler::router::{Overlap, Route, RouteRequest, Router, RouterError, Why};
use rootstock_scheduler::{Admission, Emit, NewRequest, RequestId, Scheduler};
use serde::Serialize;
use std::collections::BTreeMap;

use crate::config::CoreConfig;

/// How requests were placed, over all replicas. All zero with one replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RouteStats {
    /// By cost.
    pub by_cost: u64,
    /// Where their session is.
    pub by_affinity: u64,
    /// To a replica that had nothing to do, although another was cheaper.
    pub to_idle: u64,
    /// While every replica was over the queue threshold.
    pub parked: u64,
    /// Taken over by an idle replica while they waited.
    pub moved: u64,
}

/// Places requests and remembers where those are that moved.
#[derive(Debug)]
pub(crate) struct Replicas {
    router: Router,
    count: u16,
    page_tokens: u32,
    moved: BTreeMap<RequestId, ReplicaId>,
    generated: BTreeMap<RequestId, u32>,
    draws: u64,
    pub(crate) stats: RouteStats,
}

impl Replicas {
    pub(crate) fn new(config: &CoreConfig) -> Result<Self, RouterError> {
        let count = u16::try_from(config.replicas()).unwrap_or(u16::MAX);
        Ok(Self {
            router: Router::new(config.router(), count)?,
            count,
            page_tokens: config.cache.page_tokens,
            moved: BTreeMap::new(),
            generated: BTreeMap::new(),
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
        if let [only] = schedulers {
            return only.add(request, cache, now);
        }
        let key = Key {
            ns: request.ns,
            tokens: &request.tokens,
        };
        let page = self.page_tokens;
        let found = (0..self.count).map(|at| cache.probe(key, ReplicaId(at)));
        let overlaps: Vec<Overlap> = found.map(|probe| overlap(probe, page)).collect();
        let blocks = block_hashes(request.ns.get(), &request.tokens, page as usize);
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
        let chosen = self.choose(&route, schedulers, now);
        let mut order: Vec<usize> = (0..schedulers.len()).collect();
        order.sort_by_key(|&at| (at != chosen, schedulers[at].stats().waiting, at));
        let mut answer = None;
        for at in order {
            let added = schedulers[at].add(request.clone(), cache, now);
            if let Admission::Admitted(id) = added {
                self.router.placed(id.0, &route, id.replica(), now);
                return added;
            }
            // A larger pool may take what this one can never run.
            answer = answer
                .filter(|_| matches!(added, Admission::Rejected(_)))
                .or(Some(added));
        }
        answer.unwrap_or_else(|| schedulers[chosen].add(request, cache, now))
    }

    fn choose(&mut self, route: &RouteRequest<'_>, schedulers: &[Scheduler], now: Nanos) -> usize {
        match self.router.route(route, now) {
            Route::To { replica, why, .. } => {
                match why {
                    Why::Cost | Why::Pinned => self.stats.by_cost += 1,
                    Why::Affinity => self.stats.by_affinity += 1,
                    Why::Idle => self.stats.to_idle += 1,
                }
                usize::from(replica.0)
            }
            Route::Park => {
                self.stats.parked += 1;
                let load = |at: &usize| {
                    let stats = schedulers[*at].stats();
                    (stats.waiting, stats.running, *at)
                };
                (0..schedulers.len()).min_by_key(load).unwrap_or(0)
            }
        }
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
        others.sort_by_key(|&other| (std::cmp::Reverse(schedulers[other].stats().waiting), other));
        for other in others {
            let Ok([busy, idler]) = schedulers.get_disjoint_mut([other, at]) else {
                continue;
            };
            if let Some(moving) = busy.take_waiting(cache, idler) {
                self.moved.insert(moving.id(), idle);
                self.stats.moved += 1;
                idler.take_over_waiting(moving, cache, now);
                return;
            }
        }
    }

    /// Takes in what requests did.
    pub(crate) fn hear(&mut self, emits: &[Emit], now: Nanos) {
        if self.count < 2 {
            return;
        }
        for emit in emits {
            let id = emit.request();
            match emit {
                Emit::Started { .. } => {}
                Emit::Tokens { tokens, .. } => {
                    let made = self.generated.entry(id).or_default();
                    *made += u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                    self.router.prefill_done(id.0);
                    self.router.generated(id.0, *made);
                }
                Emit::Final { .. } => {
                    self.moved.remove(&id);
                    self.generated.remove(&id);
                    self.router.ended(id.0, now);
                }
            }
        }
    }
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
