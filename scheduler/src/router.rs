//! Which replica a request goes to: cached prefix against load. Pure: the caller tells what is
//! cached where, and what happens to the requests it was told to place.
//!
//! Cost of a replica, in blocks of `block_tokens`, lower is better, after Dynamo 1.6:
//!
//! ```text
//! raw     = (active prefill tokens + prompt tokens) / block
//! excess  = (active prefill tokens - least of all eligible) / block / max(1, request blocks)
//! credit  = device blocks * overlap credit / (1 + decay * excess)
//!           + host weight * host blocks + storage weight * storage blocks
//! prefill = prefill scale * max(0, raw - credit)
//! cost    = prefill + decode blocks + active weight * active requests
//! ```
//! Decode blocks are the distinct blocks of the requests under way there, shared prefixes once,
//! and the new ones of this request. Where output is tracked, generated blocks count too, and
//! with an expected output length `osl` whatever only one request holds fades by
//! `max(0, 1 - generated / max(1, osl))`.
//!
//! Temperature 0 takes the least; ties go to fewer active requests, then to the lower id, so that
//! equal inputs give equal choices. Otherwise a softmax over scaled costs is drawn from with a
//! number the caller passes.
//!
//! Two rules go beyond the cost. A replica over the queue threshold is busy, and a request parks
//! only while all it may go to are busy. And an idle replica always takes a request: where the
//! choice is busy, has more than a step to prefill or no seat, and some replica has nothing to
//! do, the cheapest of those is chosen instead.
//!
//! Not here: the queue of parked requests (a [`crate::Scheduler`]-like order belongs to the
//! caller), worker discovery, the wire.
//!
//! Source: Dynamo's documented router (docs and flags of 1.6); own code.

use std::collections::BTreeMap;

use rootstock_memory::{Nanos, ReplicaId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Knobs of the router; names and defaults follow Dynamo's flags.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterConfig {
    /// Tokens a block.
    pub block_tokens: u32,
    /// Worth of a cached device block, in blocks to prefill.
    pub overlap_score_credit: f64,
    /// How fast that worth decays with prefill load above the least loaded replica.
    pub overlap_score_credit_decay: f64,
    /// Weight of prefill against decode.
    pub prefill_load_scale: f64,
    /// Worth of a cached host block.
    pub host_cache_hit_weight: f64,
    /// Worth of a cached storage block.
    pub storage_cache_hit_weight: f64,
    /// Cost of each active request.
    pub decode_active_request_weight: f64,
    /// 0 takes the least cost; above, how evenly requests spread.
    pub temperature: f64,
    /// A replica is busy with more active prefill tokens than this times `step_tokens`; None:
    /// nobody is ever busy.
    pub queue_threshold: Option<f64>,
    /// Tokens a replica computes in a step.
    pub step_tokens: u32,
    /// Requests a replica can run at a time.
    pub seats: u32,
    /// Whether blocks of the output count as they are generated.
    pub track_output_blocks: bool,
    /// Seconds after which a request nobody reported the end of is forgotten; 0 is never.
    pub stale_after_s: u32,
    /// Seconds for which an idle session stays with its replica; 0 is no affinity.
    pub affinity_ttl_s: u32,
    /// What a session's binding is worth.
    pub affinity: Affinity,
}

/// What the binding of a session to a replica is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Affinity {
    /// It goes there unless that replica is busy.
    #[default]
    Soft,
    /// It goes there, and parks while that replica is busy.
    Hard,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            block_tokens: 16,
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            host_cache_hit_weight: 0.75,
            storage_cache_hit_weight: 0.25,
            decode_active_request_weight: 0.0,
            temperature: 0.0,
            queue_threshold: None,
            step_tokens: 512,
            seats: 64,
            track_output_blocks: false,
            stale_after_s: 300,
            affinity_ttl_s: 0,
            affinity: Affinity::Soft,
        }
    }
}

/// A value the router cannot work with.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum RouterError {
    /// Must be 1 or more.
    #[error("{name} is 0; at least 1 is needed")]
    Zero {
        /// Name of the value.
        name: &'static str,
    },
    /// Must be a finite number, 0 or more.
    #[error("{name} is {value}; 0 or more is possible")]
    Weight {
        /// Name of the value.
        name: &'static str,
        /// The value.
        value: f64,
    },
}

/// Cached part of a prompt on one replica, in whole blocks; disjoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Overlap {
    /// Blocks on the device.
    pub device: u32,
    /// Further blocks on the host.
    pub host: u32,
    /// Further blocks in storage.
    pub storage: u32,
}

/// A request to place.
#[derive(Clone, Debug, Default)]
pub struct RouteRequest<'a> {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Output tokens expected, when something is known.
    pub osl: Option<u32>,
    /// What is cached, one a replica, by its index.
    pub overlaps: &'a [Overlap],
    /// Hashes of the prompt's whole blocks, each over all before it. Empty: no block is shared.
    pub blocks: &'a [u64],
    /// The only replica it may go to; one that does not exist is as none.
    pub pinned: Option<ReplicaId>,
    /// Session it belongs to.
    pub session: Option<&'a str>,
    /// Session that started it; a new session's first choice is where its parent is.
    pub parent: Option<&'a str>,
    /// A random number, for temperatures above 0.
    pub draw: u64,
}

/// Where a request goes.
#[derive(Clone, PartialEq, Debug)]
pub enum Route {
    /// To this replica.
    To {
        /// The replica.
        replica: ReplicaId,
        /// Its cost in blocks.
        cost: f64,
        /// Why it and not the cheapest.
        why: Why,
    },
    /// Nowhere yet: all it may go to are busy. Ask again when one has finished a prefill.
    Park,
}

/// Why a replica was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// Least cost, or drawn by cost.
    Cost,
    /// The request may go nowhere else.
    Pinned,
    /// Its session is there.
    Affinity,
    /// It had nothing to do.
    Idle,
}

/// A request under way, for its load.
#[derive(Debug)]
struct Placed {
    replica: usize,
    /// Uncached prompt tokens, until the prefill is done.
    prefill_tokens: u32,
    /// Hashes of the prompt's blocks; or, without hashes, how many there are.
    blocks: Vec<u64>,
    nameless_blocks: u32,
    prompt_tokens: u32,
    output_tokens: u32,
    osl: Option<u32>,
    session: Option<String>,
    since: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    replica: usize,
    active: u32,
    used_at: Nanos,
}

/// Places requests on replicas.
#[derive(Debug)]
pub struct Router {
    cfg: RouterConfig,
    replicas: usize,
    placed: BTreeMap<u64, Placed>,
    /// Requests that hold each block, one map a replica.
    held: Vec<BTreeMap<u64, u32>>,
    sessions: BTreeMap<String, Binding>,
}

/// Sessions remembered at a time; the longest unused goes first.
const SESSIONS_MAX: usize = 65_536;

impl Router {
    /// A router over `replicas` replicas with the ids from 0.
    ///
    /// # Errors
    /// A value out of range.
    pub fn new(cfg: RouterConfig, replicas: u16) -> Result<Self, RouterError> {
        let counts = [
            ("replicas", u32::from(replicas)),
            ("block_tokens", cfg.block_tokens),
            ("step_tokens", cfg.step_tokens),
            ("seats", cfg.seats),
        ];
        if let Some(&(name, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(RouterError::Zero { name });
        }
        let weights = [
            ("overlap_score_credit", cfg.overlap_score_credit),
            ("overlap_score_credit_decay", cfg.overlap_score_credit_decay),
            ("prefill_load_scale", cfg.prefill_load_scale),
            ("host_cache_hit_weight", cfg.host_cache_hit_weight),
            ("storage_cache_hit_weight", cfg.storage_cache_hit_weight),
            (
                "decode_active_request_weight",
                cfg.decode_active_request_weight,
            ),
            ("temperature", cfg.temperature),
            ("queue_threshold", cfg.queue_threshold.unwrap_or(0.0)),
        ];
        if let Some(&(name, value)) = weights.iter().find(|(_, v)| !(0.0..=1e12).contains(v)) {
            return Err(RouterError::Weight { name, value });
        }
        let replicas = usize::from(replicas);
        let held = vec![BTreeMap::new(); replicas];
        Ok(Self {
            cfg,
            replicas,
            placed: BTreeMap::new(),
            held,
            sessions: BTreeMap::new(),
        })
    }

    /// Chooses a replica. Changes nothing but what is stale; tell [`Router::placed`] when the
    /// request has been handed over.
    ///
    /// # Cost
    /// O(replicas + requests under way).
    pub fn route(&mut self, request: &RouteRequest<'_>, now: Nanos) -> Route {
        self.forget_stale(now);
        let loads = self.loads();
        let busy = |at: &usize| self.is_busy(&loads[*at]);
        let pinned = request.pinned.map(|pinned| usize::from(pinned.0));
        if let Some(at) = pinned.filter(|&at| at < self.replicas) {
            return if busy(&at) {
                Route::Park
            } else {
                self.to(at, &loads, request, Why::Pinned)
            };
        }
        match self.bound_to(request, now) {
            Some(at) if !busy(&at) => return self.to(at, &loads, request, Why::Affinity),
            Some(_) if self.cfg.affinity == Affinity::Hard => return Route::Park,
            Some(_) | None => {}
        }
        if (0..self.replicas).all(|at| busy(&at)) {
            return Route::Park;
        }
        let costs: Vec<f64> = (0..self.replicas)
            .map(|at| self.cost(at, &loads, request))
            .collect();
        let chosen = self.choose(&costs, &loads, request.draw);
        let full = loads[chosen].requests >= self.cfg.seats;
        if full || busy(&chosen) || self.is_loaded(&loads[chosen]) {
            let idle = (0..self.replicas).filter(|&at| loads[at].requests == 0);
            if let Some(at) = idle.min_by(|&a, &b| costs[a].total_cmp(&costs[b])) {
                return self.to(at, &loads, request, Why::Idle);
            }
        }
        self.to(chosen, &loads, request, Why::Cost)
    }

    /// The request `id` (the caller's, unique among those under way) was handed to a replica.
    pub fn placed(&mut self, id: u64, request: &RouteRequest<'_>, replica: ReplicaId, now: Nanos) {
        self.ended(id, now);
        let at = usize::from(replica.0);
        if at >= self.replicas {
            return;
        }
        let overlap = request.overlaps.get(at).copied().unwrap_or_default();
        let cached = (overlap.device + overlap.host + overlap.storage) * self.cfg.block_tokens;
        let placed = Placed {
            replica: at,
            prefill_tokens: request.prompt_tokens.saturating_sub(cached),
            blocks: request.blocks.to_vec(),
            nameless_blocks: match request.blocks {
                [] => request.prompt_tokens / self.cfg.block_tokens,
                _ => 0,
            },
            prompt_tokens: request.prompt_tokens,
            output_tokens: 0,
            osl: request.osl,
            session: request.session.map(str::to_owned),
            since: now,
        };
        if let Some(session) = request.session.filter(|_| self.cfg.affinity_ttl_s > 0) {
            self.bind(session, at, now);
        }
        for &block in request.blocks {
            *self.held[at].entry(block).or_default() += 1;
        }
        self.placed.insert(id, placed);
    }

    /// The first token of a request came: its prefill is done.
    pub fn prefill_done(&mut self, id: u64) {
        if let Some(placed) = self.placed.get_mut(&id) {
            placed.prefill_tokens = 0;
        }
    }

    /// A request has generated this many tokens in all.
    pub fn generated(&mut self, id: u64, output_tokens: u32) {
        if let Some(placed) = self.placed.get_mut(&id) {
            placed.output_tokens = output_tokens;
        }
    }

    /// A request has ended, however.
    pub fn ended(&mut self, id: u64, now: Nanos) {
        let Some(placed) = self.placed.remove(&id) else {
            return;
        };
        let held = &mut self.held[placed.replica];
        for block in &placed.blocks {
            match held.get_mut(block) {
                Some(owners) if *owners > 1 => *owners -= 1,
                Some(_) | None => drop(held.remove(block)),
            }
        }
        let binding = placed
            .session
            .and_then(|session| self.sessions.get_mut(&session));
        if let Some(binding) = binding {
            binding.active = binding.active.saturating_sub(1);
            binding.used_at = now;
        }
    }

    /// Requests under way on a replica.
    pub fn active(&self, replica: ReplicaId) -> usize {
        let at = usize::from(replica.0);
        self.placed
            .values()
            .filter(|placed| placed.replica == at)
            .count()
    }

    fn to(&self, at: usize, loads: &[Load], request: &RouteRequest<'_>, why: Why) -> Route {
        let cost = self.cost(at, loads, request);
        let replica = ReplicaId(u16::try_from(at).unwrap_or(u16::MAX));
        Route::To { replica, cost, why }
    }

    /// More prefill than the threshold allows.
    fn is_busy(&self, load: &Load) -> bool {
        let limit = self
            .cfg
            .queue_threshold
            .map(|t| t * f64::from(self.cfg.step_tokens));
        limit.is_some_and(|limit| load.prefill_tokens > limit)
    }

    /// More than a step of prefill: a newcomer would wait, threshold or not.
    fn is_loaded(&self, load: &Load) -> bool {
        load.prefill_tokens > f64::from(self.cfg.step_tokens)
    }

    fn loads(&self) -> Vec<Load> {
        let mut loads = vec![Load::default(); self.replicas];
        for (load, held) in loads.iter_mut().zip(&self.held) {
            load.decode_blocks = u32::try_from(held.len()).map_or(f64::INFINITY, f64::from);
        }
        for placed in self.placed.values() {
            let load = &mut loads[placed.replica];
            load.requests += 1;
            load.prefill_tokens += f64::from(placed.prefill_tokens);
            load.decode_blocks += self.blocks_beside_held(placed);
        }
        for load in &mut loads {
            load.decode_blocks = load.decode_blocks.round();
        }
        loads
    }

    /// Blocks of a request that the map of held ones does not count: those without a hash and
    /// its output; less what fades of its own.
    fn blocks_beside_held(&self, placed: &Placed) -> f64 {
        let nameless = f64::from(placed.nameless_blocks);
        if !self.cfg.track_output_blocks {
            return nameless;
        }
        let block = self.cfg.block_tokens;
        let all = (placed.prompt_tokens + placed.output_tokens).div_ceil(block);
        let output = f64::from(all - placed.prompt_tokens / block);
        let Some(osl) = placed.osl else {
            return nameless + output;
        };
        let done = f64::from(placed.output_tokens) / f64::from(osl.max(1));
        let fade = if osl == 0 { 0.0 } else { (1.0 - done).max(0.0) };
        let held = &self.held[placed.replica];
        let alone = placed
            .blocks
            .iter()
            .filter(|block| held.get(block) == Some(&1))
            .count();
        let alone = u32::try_from(alone).map_or(0.0, f64::from);
        (nameless + output) * fade - alone * (1.0 - fade)
    }

    fn cost(&self, at: usize, loads: &[Load], request: &RouteRequest<'_>) -> f64 {
        let cfg = &self.cfg;
        let block = f64::from(cfg.block_tokens);
        let request_blocks = f64::from(request.prompt_tokens / cfg.block_tokens);
        let least = loads
            .iter()
            .map(|load| load.prefill_tokens)
            .fold(f64::INFINITY, f64::min);
        let load = &loads[at];
        let overlap = request.overlaps.get(at).copied().unwrap_or_default();
        let raw = (load.prefill_tokens + f64::from(request.prompt_tokens)) / block;
        let excess = (load.prefill_tokens - least) / block / request_blocks.max(1.0);
        let decay = 1.0 / (1.0 + cfg.overlap_score_credit_decay * excess);
        let credit = cfg.overlap_score_credit * decay * f64::from(overlap.device)
            + cfg.host_cache_hit_weight * f64::from(overlap.host)
            + cfg.storage_cache_hit_weight * f64::from(overlap.storage);
        let held = &self.held[at];
        let shared = request
            .blocks
            .iter()
            .filter(|block| held.contains_key(block))
            .count();
        let new_blocks = request_blocks - u32::try_from(shared).map_or(0.0, f64::from);
        cfg.prefill_load_scale * (raw - credit).max(0.0)
            + load.decode_blocks
            + new_blocks.max(0.0)
            + cfg.decode_active_request_weight * f64::from(load.requests)
    }

    /// The replica of least cost, or one drawn by cost.
    fn choose(&self, costs: &[f64], loads: &[Load], draw: u64) -> usize {
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let by_cost = |&a: &usize, &b: &usize| {
            costs[a]
                .total_cmp(&costs[b])
                .then(loads[a].requests.cmp(&loads[b].requests))
        };
        let best = (0..costs.len()).min_by(by_cost).unwrap_or(0);
        if self.cfg.temperature == 0.0 {
            return best;
        }
        let spread = if most > least { most - least } else { 1.0 };
        let weight = |cost: &f64| (-(cost - least) / spread / self.cfg.temperature).exp();
        let weights: Vec<f64> = costs.iter().map(weight).collect();
        let mut left = unit(draw) * weights.iter().sum::<f64>();
        for (at, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return at;
            }
        }
        best
    }

    /// Where the request's session is, or its parent's while it has none.
    fn bound_to(&self, request: &RouteRequest<'_>, now: Nanos) -> Option<usize> {
        if self.cfg.affinity_ttl_s == 0 {
            return None;
        }
        let live = |session: &str| self.sessions.get(session).filter(|b| self.holds(b, now));
        let own = request.session.and_then(live);
        own.or_else(|| request.parent.and_then(live))
            .map(|binding| binding.replica)
    }

    fn holds(&self, binding: &Binding, now: Nanos) -> bool {
        let ttl = u64::from(self.cfg.affinity_ttl_s) * 1_000_000_000;
        binding.active > 0 || now.saturating_sub(binding.used_at) <= ttl
    }

    fn bind(&mut self, session: &str, replica: usize, now: Nanos) {
        if !self.sessions.contains_key(session) && self.sessions.len() >= SESSIONS_MAX {
            let mut bindings: Vec<&Binding> = self.sessions.values().collect();
            bindings.sort_by_key(|b| (b.active > 0, b.used_at));
            let median = bindings[bindings.len() / 2].used_at;
            self.sessions
                .retain(|_, b| b.active > 0 || b.used_at > median);
        }
        if self.sessions.len() >= SESSIONS_MAX && !self.sessions.contains_key(session) {
            return;
        }
        let fresh = Binding {
            replica,
            active: 0,
            used_at: now,
        };
        let binding = self.sessions.entry(session.to_owned()).or_insert(fresh);
        *binding = Binding {
            replica,
            active: binding.active + 1,
            used_at: now,
        };
    }

    fn forget_stale(&mut self, now: Nanos) {
        let limit = u64::from(self.cfg.stale_after_s) * 1_000_000_000;
        if limit == 0 {
            return;
        }
        let stale = |(_, placed): &(&u64, &Placed)| now.saturating_sub(placed.since) > limit;
        let ids: Vec<u64> = self
            .placed
            .iter()
            .filter(stale)
            .map(|(&id, _)| id)
            .collect();
        ids.into_iter().for_each(|id| self.ended(id, now));
    }
}

/// Load of one replica.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    requests: u32,
    prefill_tokens: f64,
    decode_blocks: f64,
}

/// A number in 0..1.
fn unit(draw: u64) -> f64 {
    const STEPS: f64 = 4_294_967_296.0;
    f64::from(u32::try_from(draw >> 32).unwrap_or(0)) / STEPS
}
