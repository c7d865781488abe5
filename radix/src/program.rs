//! Agent programs: who asks, how often, how far apart, and which prefix is theirs now.
//!
//! A program is what a client names: a session, a run, a conversation. Its requests extend one
//! prefix; one that leaves it elsewhere makes the rest of the old prefix worthless. The table is
//! bounded: of too many programs the one that asked longest ago is forgotten, which costs nothing
//! but what was known of it.

use crate::cache::PrefixCache;
use crate::{Action, Hints, Lease, NamespaceId, Outcome, ProgramId, Target, TenantId, Token};
use rootstock_memory::Nanos;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

/// Programs that are known at a time.
const PROGRAMS_MAX: usize = 1 << 16;

const MILLISECOND: Nanos = 1_000_000;

const SECOND: Nanos = 1_000_000_000;

/// What is known of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramStats {
    /// Requests that have ended.
    pub turns: u32,
    /// Mean nanoseconds from the arrival of a request to that of the next.
    pub gap_ns: Option<u64>,
    /// Seconds that its prefix is worth a pin: as many further turns as there were, at its gap.
    pub derived_ttl_s: Option<u64>,
    /// Whether it has said that it is done.
    pub done: bool,
}

#[derive(Debug)]
struct Program {
    tenant: TenantId,
    name: String,
    used: u64,
    turns: u32,
    arrived: Nanos,
    gaps: Nanos,
    ns: Option<NamespaceId>,
    last: Option<(u32, NonZeroU32)>,
    done: bool,
}

/// All programs.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    by_id: BTreeMap<ProgramId, Program>,
    by_name: BTreeMap<TenantId, BTreeMap<String, ProgramId>>,
    /// (last use, program).
    by_use: BTreeSet<(u64, ProgramId)>,
    clock: u64,
    named: u64,
}

impl Programs {
    /// The program of that name, new or known.
    fn named(&mut self, tenant: TenantId, name: &str) -> ProgramId {
        let known = self.by_name.get(&tenant).and_then(|names| names.get(name));
        if let Some(&id) = known {
            return id;
        }
        if self.by_id.len() >= PROGRAMS_MAX
            && let Some((_, oldest)) = self.by_use.pop_first()
            && let Some(gone) = self.by_id.remove(&oldest)
            && let Some(names) = self.by_name.get_mut(&gone.tenant)
        {
            names.remove(&gone.name);
            if names.is_empty() {
                self.by_name.remove(&gone.tenant);
            }
        }
        self.named += 1;
        self.clock += 1;
        let id = ProgramId(self.named);
        let names = self.by_name.entry(tenant).or_default();
        names.insert(name.to_owned(), id);
        self.by_use.insert((self.clock, id));
        let program = Program {
            tenant,
            name: name.to_owned(),
            used: self.clock,
            turns: 0,
            arrived: 0,
            gaps: 0,
            ns: None,
            last: None,
            done: false,
        };
        self.by_id.insert(id, program);
        id
    }

    /// A request of the program ended in the node `here`; returns where the one before did.
    pub(crate) fn ended(
        &mut self,
        id: ProgramId,
        lease: &Lease,
        here: (u32, NonZeroU32),
    ) -> Option<(u32, NonZeroU32)> {
        let program = self.by_id.get_mut(&id)?;
        self.clock += 1;
        self.by_use.remove(&(program.used, id));
        program.used = self.clock;
        self.by_use.insert((self.clock, id));
        if program.turns > 0 {
            let gap = lease.arrived.saturating_sub(program.arrived);
            program.gaps = program.gaps.saturating_add(gap);
        }
        program.turns = program.turns.saturating_add(1);
        program.arrived = lease.arrived.max(program.arrived);
        program.ns = Some(lease.ns);
        program.done = lease.said.last;
        program.last.replace(here)
    }

    pub(crate) fn last(&self, id: ProgramId) -> Option<(u32, NonZeroU32)> {
        self.by_id.get(&id)?.last
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }
}

impl PrefixCache {
    /// The id of a program of `tenant`, new or known.
    pub fn program(&mut self, tenant: TenantId, name: &str) -> ProgramId {
        self.programs.named(tenant, name)
    }

    /// What is known of a program; `None` when nothing is.
    pub fn program_stats(&self, program: ProgramId) -> Option<ProgramStats> {
        let known = self.programs.by_id.get(&program)?;
        let gap_ns = known.turns.checked_sub(1).filter(|&gaps| gaps > 0);
        let gap_ns = gap_ns.map(|gaps| known.gaps / u64::from(gaps));
        let ttl_s = |gap: Nanos| gap.saturating_mul(u64::from(known.turns)).div_ceil(SECOND);
        Some(ProgramStats {
            turns: known.turns,
            gap_ns,
            derived_ttl_s: gap_ns.map(|gap| ttl_s(gap).max(1)),
            done: known.done,
        })
    }

    /// Says of a request that has its lease what its hints say. Without this its pages are judged
    /// by what the cache sees alone.
    pub fn describe(&mut self, tenant: TenantId, lease: &mut Lease, hints: &Hints) {
        let name = hints.program.as_deref();
        lease.said.program = name.map(|name| self.programs.named(tenant, name));
        lease.said.last = hints.session_final;
        lease.said.osl = hints.osl;
        let due = |iat_ms| {
            lease
                .arrived
                .saturating_add(u64::from(iat_ms) * MILLISECOND)
        };
        lease.said.due = hints.iat_ms.map(due);
    }

    /// A verb on a program as the same verb on the prefix of its last request.
    pub(crate) fn on_prefix(&self, action: &Action) -> Option<Action> {
        let mut action = action.clone();
        let (Action::Pin { target, .. }
        | Action::Retain { target, .. }
        | Action::Prefetch { target, .. }
        | Action::Demote { target }
        | Action::Release { target }) = &mut action;
        if let Target::Program(program) = *target {
            let ns = self.programs.by_id.get(&program)?.ns?;
            let tokens = self.path_tokens(self.last_of(program)?);
            *target = Target::Prefix { ns, tokens };
        }
        Some(action)
    }

    /// Lets what a program alone uses go first.
    pub(crate) fn release_program(
        &mut self,
        tenant: TenantId,
        id: ProgramId,
        now: Nanos,
    ) -> Outcome {
        let known = self.programs.by_id.get_mut(&id);
        let Some(program) = known.filter(|program| program.tenant == tenant) else {
            return Outcome::Missing;
        };
        program.done = true;
        let Some(last) = self.last_of(id) else {
            return Outcome::Missing;
        };
        match self.give_up_branch(last, self.tree.root_of(last), id.0, now) {
            0 => Outcome::Missing,
            pages => Outcome::Accepted { pages },
        }
    }

    /// The tokens of the prefix that ends with `at`.
    fn path_tokens(&self, mut at: u32) -> Vec<Token> {
        let mut edges = Vec::new();
        while !self.tree.node(at).is_root() {
            edges.push(self.tree.edge(self.tree.node(at)));
            at = self.tree.node(at).parent;
        }
        edges.into_iter().rev().flatten().copied().collect()
    }
}
