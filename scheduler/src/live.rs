//! A request inside the scheduler: what it is, and which phase it is in.
//!
//! ```text
//!            admit              copy ended             preempt
//!  Queued --------+--> Fetching ---------> Running --------------> Preempted
//!    |            |  (host tier)              |  ^                    |  |
//!    |            +---------------------------|--+--------------------+  |
//!    | abort, expire    (nothing to fetch)    | end      admit           | abort, expire
//!    v                                        v                          v
//!   done                             Draining(step) --step done-->     done
//! ```
//! Each phase has its own fields. `Fetching`, `Running` and `Draining` hold pages, the others none.
//! `Fetching` is a seat whose prefix is on its way from the host tier: it becomes `Running` when
//! the copy has ended, well or badly, or before that where the backend orders each layer of a step
//! behind its copies. A request that has had its final event while a step still
//! works on its pages is `Draining`; "done" is being no longer in the map.

use std::cmp::Reverse;
use std::sync::Arc;

use rootstock_memory::{Nanos, PageId, StepId};
use rootstock_radix::{Hints, Key, NamespaceId, TenantId, Token};
use smallvec::SmallVec;

use crate::config::SchedulerConfig;
use crate::emit::{CachedTokens, PinReport, Usage};
use crate::holding::Holding;
use crate::lookup::Lookup;
use crate::policy::{KeyParts, Order, seconds_to_ns};
use crate::request::{Class, NewRequest, RequestId, SamplingParams};

/// Importance for preemption: client before speculative, then priority; higher is more.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Rank {
    class: Class,
    priority: i32,
}

impl Rank {
    /// Whether a request of this rank may take the place of one of `other`.
    pub(crate) fn outranks(self, other: Rank, gap: u32) -> bool {
        match self.class.cmp(&other.class) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Equal => {
                i64::from(self.priority) - i64::from(other.priority) >= i64::from(gap.max(1))
            }
        }
    }
}

/// Order in which running requests give way; the least goes first: those that may still be
/// preempted, lowest rank, least work done, newest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct VictimKey {
    exhausted: bool,
    rank: Rank,
    work: u64,
    newest: Reverse<RequestId>,
}

/// A live request.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) id: RequestId,
    pub(crate) label: u64,
    pub(crate) tenant: TenantId,
    pub(crate) ns: NamespaceId,
    pub(crate) class: Class,
    pub(crate) hints: Hints,
    pub(crate) deadline: Option<Nanos>,
    pub(crate) sampling: Arc<SamplingParams>,
    pub(crate) stop_tokens: Arc<[Token]>,
    /// Prompt and all output so far.
    pub(crate) tokens: Vec<Token>,
    pub(crate) prompt_tokens: u32,
    /// Output tokens at which the request ends, within the model length.
    pub(crate) output_max: u32,
    pub(crate) output_min: u32,
    pub(crate) ignore_eos: bool,
    /// Whether its decode rows may guess several tokens.
    pub(crate) drafts: bool,
    /// Whether its draws may be planned before the token before them is known.
    pub(crate) late_history: bool,
    /// How well its text foretells itself, where guesses come from it.
    pub(crate) lookup: Option<Lookup>,
    pub(crate) arrival: Nanos,
    pub(crate) first_admission: Option<(Nanos, CachedTokens)>,
    pub(crate) first_token: Option<Nanos>,
    pub(crate) preemptions: u32,
    /// Tokens computed for the request in all its stays: its sunk cost.
    pub(crate) work: u64,
    /// Nanoseconds waited in earlier waits.
    pub(crate) waited_before: Nanos,
    /// Start of the present wait, which lasts until a token is drawn.
    pub(crate) waiting_since: Option<Nanos>,
    /// Tokens found in the cache at the last look, on device and host.
    pub(crate) cached_probe: u32,
    /// Of those, on the device.
    pub(crate) device_probe: u32,
    /// Its program knows of it.
    pub(crate) in_program: bool,
    /// Hashes of its prefixes, for who waits for the same; computed once.
    pub(crate) path: Option<Arc<[u64]>>,
    /// A copy for it failed: it computes from now on.
    pub(crate) fetch_failed: bool,
    /// What came of its pins; None before its prompt is cached.
    pub(crate) pins: Option<PinReport>,
    pub(crate) phase: Phase,
}

/// Where a request stands.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Has not run.
    Queued,
    /// Gave way; waits to go on.
    Preempted,
    /// Has a seat and pages; its prefix is being copied up.
    Fetching(Fetching),
    /// Has a seat and pages.
    Running(Running),
    /// Has ended; a step in flight may still touch its pages.
    Draining(Draining),
}

/// A seat whose prefix is on its way.
#[derive(Debug)]
pub(crate) struct Fetching {
    pub(crate) hold: Holding,
    /// What the match found.
    pub(crate) found: CachedTokens,
    /// Tokens on the device when all has arrived.
    pub(crate) until: u32,
    /// Pages that the copy fills.
    pub(crate) pages: Box<[PageId]>,
}

/// A seat in the batch.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) hold: Holding,
    /// Positions whose KV is known to be right.
    pub(crate) computed: u32,
    /// Positions covered by plans, completed or not.
    pub(crate) launched: u32,
    /// Draws in flight whose tokens are not known yet.
    pub(crate) pending: u32,
    /// Steps in flight with a row of this request, oldest first.
    pub(crate) flight: SmallVec<[StepId; 2]>,
    /// Where the last row was: the source of the next row's first token.
    pub(crate) last_row: Option<(StepId, u32)>,
    /// Whether a row in flight may accept several tokens, so that the next position is open.
    pub(crate) drafting: bool,
    /// Chosen to give way; does so when its steps have ended.
    pub(crate) yielding: bool,
}

/// What is left of an ended request.
#[derive(Debug)]
pub(crate) struct Draining {
    pub(crate) hold: Holding,
    /// Steps in flight with a row of this request, oldest first; never empty.
    pub(crate) flight: SmallVec<[StepId; 2]>,
}

/// What a request would compute next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Up to this many known positions from `launched` on; the last of them draws a token.
    Prefill(u32),
    /// One position; draws a token.
    Decode,
    /// Nothing before results of a step in flight are known.
    Wait,
}

impl Live {
    pub(crate) fn new(id: RequestId, new: NewRequest, cfg: &SchedulerConfig, now: Nanos) -> Self {
        let prompt_tokens = count(new.tokens.len());
        let drafts = cfg.max_drafts > 0 && !new.sampling.has_penalties();
        Self {
            id,
            label: new.label,
            tenant: new.tenant,
            ns: new.ns,
            class: new.class,
            hints: new.hints,
            deadline: new.deadline,
            sampling: Arc::new(new.sampling),
            stop_tokens: new.stop_tokens.into(),
            tokens: new.tokens,
            prompt_tokens,
            output_max: new.max_tokens.min(cfg.max_model_len - prompt_tokens),
            output_min: new.min_tokens,
            ignore_eos: new.ignore_eos,
            drafts,
            late_history: cfg.late_history,
            lookup: (drafts && cfg.prompt_lookup).then(Lookup::default),
            arrival: now,
            first_admission: None,
            first_token: None,
            preemptions: 0,
            work: 0,
            waited_before: 0,
            waiting_since: Some(now),
            cached_probe: 0,
            device_probe: 0,
            in_program: false,
            path: None,
            fetch_failed: false,
            pins: None,
            phase: Phase::Queued,
        }
    }

    /// Tokens known: prompt and output.
    pub(crate) fn len(&self) -> u32 {
        count(self.tokens.len())
    }

    pub(crate) fn output_len(&self) -> u32 {
        self.len() - self.prompt_tokens
    }

    /// Whether the row that draws output token `index` may guess the ones after it. Such rows do
    /// not run ahead of results: how far they get is open.
    pub(crate) fn can_draft(&self, index: u32) -> bool {
        let hopes = |lookup: &Lookup| lookup.hopes(index);
        self.drafts && index >= self.suppress_until() && self.lookup.as_ref().is_none_or(hopes)
    }

    /// Output length below which stop tokens must not be drawn.
    pub(crate) fn suppress_until(&self) -> u32 {
        if self.ignore_eos || self.stop_tokens.is_empty() {
            0
        } else {
            self.output_min
        }
    }

    pub(crate) fn cache_key(&self) -> Key<'_> {
        Key {
            ns: self.ns,
            tokens: &self.tokens,
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank {
            class: self.class,
            priority: self.hints.priority,
        }
    }

    pub(crate) fn victim_key(&self, max_preemptions: u32) -> VictimKey {
        VictimKey {
            exhausted: self.preemptions >= max_preemptions,
            rank: self.rank(),
            work: self.work,
            newest: Reverse(self.id),
        }
    }

    /// Nanoseconds waited for a token to be drawn: in the queue and through the prefill, over
    /// all stays.
    pub(crate) fn waited(&self, now: Nanos) -> Nanos {
        let present = self
            .waiting_since
            .map_or(0, |since| now.saturating_sub(since));
        self.waited_before.saturating_add(present)
    }

    /// A token was drawn: the wait is over.
    pub(crate) fn served(&mut self, now: Nanos) {
        self.waited_before = self.waited(now);
        self.waiting_since = None;
        self.first_token.get_or_insert(now);
    }

    pub(crate) fn key_parts(&self, order: &Order, now: Nanos) -> KeyParts {
        KeyParts {
            id: self.id,
            class: self.class,
            strict: self.hints.strict,
            jump_ns: seconds_to_ns(self.hints.jump_s),
            arrival: self.arrival,
            aged: order.aged(self.waited(now)),
            cached_tokens: self.cached_probe,
            output_max: self.output_max,
        }
    }

    /// When the key changes next by aging.
    pub(crate) fn age_at(&self, order: &Order, now: Nanos) -> Option<Nanos> {
        if order.aging_ns == 0 {
            return None;
        }
        let waited = self.waited(now);
        let to_next = order.aging_ns - waited % order.aging_ns;
        now.checked_add(to_next)
    }

    pub(crate) fn running(&self) -> Option<&Running> {
        match &self.phase {
            Phase::Running(run) => Some(run),
            Phase::Queued | Phase::Preempted | Phase::Fetching(_) | Phase::Draining(_) => None,
        }
    }

    pub(crate) fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.phase {
            Phase::Running(run) => Some(run),
            Phase::Queued | Phase::Preempted | Phase::Fetching(_) | Phase::Draining(_) => None,
        }
    }

    /// Whether a step in flight has a row of it.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.running().is_some_and(|run| !run.flight.is_empty())
    }

    /// Whether it gives way with the last of its steps in flight.
    pub(crate) fn is_yielding(&self) -> bool {
        self.running().is_some_and(|run| run.yielding)
    }

    /// Whether it has a seat that a more important one could take.
    pub(crate) fn can_give_way(&self) -> bool {
        match &self.phase {
            Phase::Running(run) => !run.yielding,
            Phase::Fetching(_) => true,
            Phase::Queued | Phase::Preempted | Phase::Draining(_) => false,
        }
    }

    /// What could be computed next; `Wait` for a request without a seat.
    pub(crate) fn next(&self) -> Next {
        let Some(run) = self.running() else {
            return Next::Wait;
        };
        let known = self.len() - run.launched.min(self.len());
        if run.yielding || run.drafting {
            return Next::Wait;
        }
        if run.pending == 0 {
            return if known > 1 {
                Next::Prefill(known)
            } else {
                Next::Decode
            };
        }
        let made = self.output_len() + run.pending;
        // A history is at most the token short that its row continues from.
        let blind = self.sampling.has_penalties() && !(self.late_history && run.pending == 1);
        let open = blind || self.can_draft(made);
        if open || made >= self.output_max {
            Next::Wait
        } else {
            Next::Decode
        }
    }

    pub(crate) fn usage(&self, now: Nanos) -> Usage {
        let (admitted, cached) = self
            .first_admission
            .unwrap_or((now, CachedTokens::default()));
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached,
            completion_tokens: self.output_len(),
            preemptions: self.preemptions,
            queue_ns: admitted.saturating_sub(self.arrival),
            ttft_ns: self.first_token.map(|at| at.saturating_sub(self.arrival)),
            pins: self.pins.unwrap_or_default(),
        }
    }
}

/// A length that is bounded by the model length, or was checked at the door.
pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).expect("token, page and row counts are bounded by the configuration")
}
