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
//! Three rules go beyond the cost. A replica over the queue threshold is busy, and a request parks
//! only while all it may go to are busy; [`Router::place_in_queue`] orders those that do. A replica
//! over an overload threshold is no candidate, and without a candidate a request is refused. And an
//! idle replica always takes a request: where the choice is busy, has more than a step to prefill
//! or no seat, and some replica has nothing to do, the cheapest of those is chosen instead.
//!
//! What is what: `config.rs` has the knobs, `load.rs` what requests under way weigh, `sessions.rs`
//! who is bound where. Not here: the parked requests themselves, worker discovery, the wire.
//!
//! Source: Dynamo's documented router (docs and flags of 1.6); own code.

mod config;
mod load;
mod sessions;

use std::cmp::Reverse;

use rootstock_memory::{Nanos, ReplicaId};
use serde::{Deserialize, Serialize};

pub use config::{Affinity, Mode, Overload, QueueOrder, RouterConfig, RouterError};

use load::{Load, Placed, UnderWay};
use sessions::Sessions;

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
    /// Nowhere: all it may go to are over an overload threshold.
    Overloaded,
}

/// Why a replica was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// Least cost, or drawn by cost; in other modes than `Kv` the mode's choice.
    Cost,
    /// The request may go nowhere else.
    Pinned,
    /// Its session is there.
    Affinity,
    /// It had nothing to do.
    Idle,
}

/// Place among parked requests; the least goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ParkedKey {
    tier: Reverse<u64>,
    rank: i128,
    id: u64,
}

/// What the place of a parked request depends on.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ParkedParts {
    /// The caller's id of it.
    pub id: u64,
    /// Strict tier asked for.
    pub strict: u32,
    /// Seconds of jump asked for.
    pub jump_s: f64,
    /// When it came.
    pub arrival: Nanos,
    /// Prompt tokens that are cached nowhere it may go.
    pub uncached_tokens: u32,
}

/// Places requests on replicas.
#[derive(Debug)]
pub struct Router {
    cfg: RouterConfig,
    replicas: usize,
    under_way: UnderWay,
    sessions: Sessions,
    /// Requests chosen for, for `Mode::RoundRobin`.
    turns: usize,
}

impl Router {
    /// A router over `replicas` replicas with the ids from 0.
    ///
    /// # Errors
    /// A value out of range.
    pub fn new(cfg: RouterConfig, replicas: u16) -> Result<Self, RouterError> {
        if replicas == 0 {
            return Err(RouterError::Zero { name: "replicas" });
        }
        cfg.validate()?;
        let replicas = usize::from(replicas);
        Ok(Self {
            replicas,
            under_way: UnderWay::new(replicas),
            sessions: Sessions::new(cfg.affinity_ttl_s),
            turns: 0,
            cfg,
        })
    }

    /// Chooses a replica. Changes nothing but what is stale and whose turn it is; tell
    /// [`Router::placed`] when the request has been handed over.
    ///
    /// # Cost
    /// O(replicas + requests under way).
    pub fn route(&mut self, request: &RouteRequest<'_>, now: Nanos) -> Route {
        self.forget_stale(now);
        let loads = self.under_way.loads(&self.cfg);
        let usable = |at: &usize| !self.is_overloaded(*at, &loads[*at]);
        let busy = |at: &usize| self.is_busy(&loads[*at]);
        let eligible: Vec<usize> = (0..self.replicas).filter(usable).collect();
        let prefills = eligible.iter().map(|&at| loads[at].prefill_tokens);
        let least = prefills.fold(f64::INFINITY, f64::min);
        let cost = |at: usize| self.cost(at, &loads[at], least, request);
        let to = |at: usize, why| Route::To {
            replica: ReplicaId(u16::try_from(at).unwrap_or(u16::MAX)),
            cost: cost(at),
            why,
        };
        let pinned = request.pinned.map(|pinned| usize::from(pinned.0));
        if let Some(at) = pinned.filter(|&at| at < self.replicas) {
            return match (usable(&at), busy(&at)) {
                (false, _) => Route::Overloaded,
                (true, true) => Route::Park,
                (true, false) => to(at, Why::Pinned),
            };
        }
        if eligible.is_empty() {
            return Route::Overloaded;
        }
        match self.bound_to(request, now).filter(usable) {
            Some(at) if !busy(&at) => return to(at, Why::Affinity),
            Some(_) if self.cfg.affinity == Affinity::Hard => return Route::Park,
            Some(_) | None => {}
        }
        if eligible.iter().all(busy) {
            return Route::Park;
        }
        let costs: Vec<f64> = (0..self.replicas).map(cost).collect();
        let chosen = self.choose(&eligible, &costs, &loads, request.draw);
        let full = loads[chosen].requests >= self.cfg.seats;
        let idle = eligible.iter().filter(|&&at| loads[at].requests == 0);
        let idle = idle
            .min_by(|&&a, &&b| costs[a].total_cmp(&costs[b]))
            .copied();
        let loaded = full || busy(&chosen) || self.is_loaded(&loads[chosen]);
        let route = match idle {
            Some(at) if loaded => to(at, Why::Idle),
            Some(_) | None => to(chosen, Why::Cost),
        };
        self.turns = self.turns.wrapping_add(1);
        route
    }

    /// The request `id` (the caller's, unique among those under way) was handed to a replica.
    pub fn placed(&mut self, id: u64, request: &RouteRequest<'_>, replica: ReplicaId, now: Nanos) {
        self.ended(id, now);
        let at = usize::from(replica.0);
        if at >= self.replicas {
            return;
        }
        if let Some(session) = request.session {
            self.sessions.begin(session, at, now);
        }
        let placed = Placed {
            replica: at,
            prefill_tokens: self.uncached(request, at),
            blocks: request.blocks.to_vec(),
            nameless_blocks: match request.blocks {
                [] => request.prompt_tokens / self.cfg.block_tokens,
                _ => 0,
            },
            prompt_tokens: request.prompt_tokens,
            output_tokens: 0,
            osl: request.osl,
            session: request.session.map(str::to_owned),
            heard_at: now,
        };
        self.under_way.insert(id, placed);
    }

    /// A request that was placed and has not begun went on to another replica, where `overlap` of
    /// its prompt is cached: its load and its session go with it.
    pub fn moved(&mut self, id: u64, replica: ReplicaId, overlap: Overlap, now: Nanos) {
        let at = usize::from(replica.0);
        if at >= self.replicas {
            return;
        }
        let Some(mut placed) = self.under_way.remove(id) else {
            return;
        };
        placed.replica = at;
        placed.prefill_tokens = placed
            .prompt_tokens
            .saturating_sub(overlap.blocks() * self.cfg.block_tokens);
        placed.heard_at = now;
        if let Some(session) = &placed.session {
            self.sessions.follow(session, at);
        }
        self.under_way.insert(id, placed);
    }

    /// The first token of a request came: its prefill is done.
    pub fn prefill_done(&mut self, id: u64) {
        if let Some(placed) = self.under_way.get_mut(id) {
            placed.prefill_tokens = 0;
        }
    }

    /// A request has generated this many tokens in all.
    pub fn generated(&mut self, id: u64, output_tokens: u32, now: Nanos) {
        if let Some(placed) = self.under_way.get_mut(id) {
            placed.output_tokens = output_tokens;
            placed.heard_at = now;
        }
    }

    /// A request has ended, however.
    pub fn ended(&mut self, id: u64, now: Nanos) {
        let placed = self.under_way.remove(id);
        if let Some(session) = placed.and_then(|placed| placed.session) {
            self.sessions.end(&session, now);
        }
    }

    /// Requests under way on a replica.
    pub fn active(&self, replica: ReplicaId) -> usize {
        self.under_way.count(usize::from(replica.0))
    }

    /// Whether no replica is below the queue threshold: whoever parks has to wait on.
    pub fn all_busy(&self) -> bool {
        let loads = self.under_way.loads(&self.cfg);
        loads.iter().all(|load| self.is_busy(load))
    }

    /// Where a parked request stands among the others. Waiting raises its tier as it does in a
    /// scheduler's queue, so that in either order nobody waits for ever.
    pub fn place_in_queue(&self, parts: &ParkedParts, now: Nanos) -> ParkedKey {
        let jump_s = parts.jump_s.clamp(0.0, 1e9);
        let waited_s = seconds(now.saturating_sub(parts.arrival));
        let aged = match self.cfg.aging_s {
            aging_s if aging_s > 0.0 => whole(waited_s / aging_s),
            _ => 0,
        };
        let rank = match self.cfg.queue_order {
            QueueOrder::Fcfs => i128::from(parts.arrival) - i128::from(whole(jump_s * 1e9)),
            QueueOrder::Wspt => {
                let weight = (1.0 + jump_s) / f64::from(parts.uncached_tokens.max(1));
                -i128::from(whole(weight * 1e9))
            }
        };
        ParkedKey {
            tier: Reverse(u64::from(parts.strict).saturating_add(aged)),
            rank,
            id: parts.id,
        }
    }

    /// Prompt tokens of a request that a replica has nowhere.
    pub fn uncached(&self, request: &RouteRequest<'_>, replica: usize) -> u32 {
        let overlap = request.overlaps.get(replica).copied().unwrap_or_default();
        let cached = overlap.blocks() * self.cfg.block_tokens;
        request.prompt_tokens.saturating_sub(cached)
    }

    /// More prefill than the threshold allows.
    fn is_busy(&self, load: &Load) -> bool {
        let limit = self
            .cfg
            .queue_threshold
            .map(|t| t * f64::from(self.cfg.step_tokens));
        limit.is_some_and(|limit| load.prefill_tokens > limit)
    }

    /// Above a limit beyond which nothing more is taken. An idle replica never is.
    fn is_overloaded(&self, at: usize, load: &Load) -> bool {
        let overload = self.cfg.overload;
        let prefill = [
            overload.prefill_tokens.map(f64::from),
            overload
                .prefill_frac
                .map(|frac| frac * f64::from(self.cfg.step_tokens)),
        ];
        let blocks = overload.decode_blocks.and_then(|share| {
            let all = self.cfg.kv_blocks.get(at)?;
            Some(share * f64::from(*all))
        });
        let over = prefill
            .into_iter()
            .flatten()
            .any(|limit| load.prefill_tokens > limit);
        load.requests > 0 && (over || blocks.is_some_and(|limit| load.decode_blocks > limit))
    }

    /// More than a step of prefill: a newcomer would wait, threshold or not.
    fn is_loaded(&self, load: &Load) -> bool {
        load.prefill_tokens > f64::from(self.cfg.step_tokens)
    }

    /// Cost of a replica with this load, in blocks; `least` is the least prefill of all eligible.
    fn cost(&self, at: usize, load: &Load, least: f64, request: &RouteRequest<'_>) -> f64 {
        let cfg = &self.cfg;
        let block = f64::from(cfg.block_tokens);
        let request_blocks = f64::from(request.prompt_tokens / cfg.block_tokens);
        let overlap = request.overlaps.get(at).copied().unwrap_or_default();
        let raw = match cfg.track_prefill_tokens {
            true => (load.prefill_tokens + f64::from(request.prompt_tokens)) / block,
            false => 0.0,
        };
        let excess = (load.prefill_tokens - least) / block / request_blocks.max(1.0);
        let decay = 1.0 / (1.0 + cfg.overlap_score_credit_decay * excess);
        let credit = cfg.overlap_score_credit * decay * f64::from(overlap.device)
            + cfg.host_cache_hit_weight * f64::from(overlap.host)
            + cfg.storage_cache_hit_weight * f64::from(overlap.storage);
        let shared = f64::from(self.under_way.shared(at, request.blocks));
        let new_blocks = match cfg.track_active_blocks {
            true => (request_blocks - shared).max(0.0),
            false => 0.0,
        };
        cfg.prefill_load_scale * (raw - credit).max(0.0)
            + load.decode_blocks
            + new_blocks
            + cfg.decode_active_request_weight * f64::from(load.requests)
    }

    /// The mode's choice among those eligible, of which there is at least one.
    fn choose(&self, eligible: &[usize], costs: &[f64], loads: &[Load], draw: u64) -> usize {
        let first = eligible.first().copied().unwrap_or(0);
        let fewest = |of: &[usize]| {
            let fewest = of.iter().min_by_key(|&&at| (loads[at].requests, at));
            fewest.copied().unwrap_or(first)
        };
        let drawn = |draw: u64| {
            let n = u64::try_from(eligible.len()).unwrap_or(1).max(1);
            let at = usize::try_from(draw % n).unwrap_or(0);
            eligible.get(at).copied().unwrap_or(first)
        };
        match self.cfg.mode {
            Mode::Kv => self.choose_by_cost(eligible, costs, loads, draw),
            Mode::RoundRobin => eligible[self.turns % eligible.len()],
            Mode::Random => drawn(draw >> 32),
            Mode::PowerOfTwo => fewest(&[drawn(draw >> 32), drawn(draw & 0xffff_ffff)]),
            Mode::LeastLoaded => fewest(eligible),
        }
    }

    /// The replica of least cost, or one drawn by cost.
    fn choose_by_cost(&self, of: &[usize], costs: &[f64], loads: &[Load], draw: u64) -> usize {
        let among = || of.iter().map(|&at| costs[at]);
        let least = among().fold(f64::INFINITY, f64::min);
        let most = among().fold(f64::NEG_INFINITY, f64::max);
        let by_cost = |&&a: &&usize, &&b: &&usize| {
            costs[a]
                .total_cmp(&costs[b])
                .then(loads[a].requests.cmp(&loads[b].requests))
        };
        let best = of.iter().min_by(by_cost).copied().unwrap_or(0);
        if self.cfg.temperature == 0.0 {
            return best;
        }
        let spread = if most > least { most - least } else { 1.0 };
        let weight = |cost: f64| (-(cost - least) / spread / self.cfg.temperature).exp();
        let weights: Vec<f64> = among().map(weight).collect();
        let mut left = unit(draw) * weights.iter().sum::<f64>();
        for (&at, weight) in of.iter().zip(&weights) {
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
        let live = |session: &str| self.sessions.replica_of(session, now);
        let own = request.session.and_then(live);
        own.or_else(|| request.parent.and_then(live))
    }

    fn forget_stale(&mut self, now: Nanos) {
        let limit = u64::from(self.cfg.stale_after_s) * 1_000_000_000;
        if limit == 0 {
            return;
        }
        for id in self.under_way.silent(now.saturating_sub(limit)) {
            self.ended(id, now);
        }
    }
}

impl Overlap {
    /// Blocks on all tiers.
    pub fn blocks(&self) -> u32 {
        self.device + self.host + self.storage
    }
}

/// A number in 0..1.
fn unit(draw: u64) -> f64 {
    const STEPS: f64 = 4_294_967_296.0;
    f64::from(u32::try_from(draw >> 32).unwrap_or(0)) / STEPS
}

fn seconds(ns: Nanos) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "2^53 ns are 104 days")]
    let ns = ns as f64;
    ns / 1e9
}

/// The whole part of a number that is not negative.
fn whole(x: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "float to integer casts saturate"
    )]
    let whole = x as u64;
    whole
}
