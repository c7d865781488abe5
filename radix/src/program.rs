//! Agent programs: who asks, how often, how far apart, and which prefix is theirs now.
//!
//! A program is what a client names: a session, a run, a conversation. Its requests extend one
//! prefix; one that leaves it elsewhere makes the rest of the old prefix worthless. The table is
//! bounded: of too many programs the one that asked longest ago is forgotten, which costs nothing
//! but what was known of it. A program belongs to a tenant and a namespace: the same name under
//! another salt is another program.

use crate::cache::PrefixCache;
use crate::{Hints, Lease, NamespaceId, ProgramId, TenantId};
use rootstock_memory::Nanos;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

/// Requests in a row that name the same gap before it counts as a default, which says nothing.
const SAME_GAPS: u32 = 8;

/// Programs that are known at a time.
const PROGRAMS_MAX: usize = 1 << 16;

/// Prefixes of a program that are known: those of its last branches.
const PREFIXES_MAX: usize = 8;

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
    owner: Owner,
    name: String,
    used: u64,
    turns: u32,
    arrived: Nanos,
    gaps: Nanos,
    last: Option<(u32, NonZeroU32)>,
    /// Where its prefixes end, none within another, the newest last.
    ends: Vec<(u32, NonZeroU32)>,
    done: bool,
}

/// Whose program it is, and where what it caches is.
pub(crate) type Owner = (TenantId, NamespaceId);

/// All programs.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    by_id: BTreeMap<ProgramId, Program>,
    by_name: BTreeMap<Owner, BTreeMap<String, ProgramId>>,
    /// (last use, program).
    by_use: BTreeSet<(u64, ProgramId)>,
    clock: u64,
    named: u64,
    /// The gap that was named last, in milliseconds, and by how many requests in a row.
    gap_named: (u32, u32),
}

impl Programs {
    /// The program of that name, new or known.
    fn named(&mut self, owner: Owner, name: &str) -> ProgramId {
        if let Some(id) = self.known(owner, name) {
            return id;
        }
        if self.by_id.len() >= PROGRAMS_MAX
            && let Some((_, oldest)) = self.by_use.pop_first()
            && let Some(gone) = self.by_id.remove(&oldest)
            && let Some(names) = self.by_name.get_mut(&gone.owner)
        {
            names.remove(&gone.name);
            if names.is_empty() {
                self.by_name.remove(&gone.owner);
            }
        }
        self.named += 1;
        self.clock += 1;
        let id = ProgramId(self.named);
        let names = self.by_name.entry(owner).or_default();
        names.insert(name.to_owned(), id);
        self.by_use.insert((self.clock, id));
        let program = Program {
            owner,
            name: name.to_owned(),
            used: self.clock,
            turns: 0,
            arrived: 0,
            gaps: 0,
            last: None,
            ends: Vec::new(),
            done: false,
        };
        self.by_id.insert(id, program);
        id
    }

    fn known(&self, owner: Owner, name: &str) -> Option<ProgramId> {
        self.by_name.get(&owner)?.get(name).copied()
    }

    /// What a request says of its gap, unless everybody says the same.
    const fn telling_gap(&mut self, iat_ms: u32) -> Option<u32> {
        let (before, times) = self.gap_named;
        let times = if before == iat_ms {
            times.saturating_add(1)
        } else {
            1
        };
        self.gap_named = (iat_ms, times);
        if times > SAME_GAPS {
            None
        } else {
            Some(iat_ms)
        }
    }

    /// A request of the program ended in the node `here`, if it left one; returns where the one
    /// before did.
    pub(crate) fn ended(
        &mut self,
        id: ProgramId,
        lease: &Lease,
        here: Option<(u32, NonZeroU32)>,
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
        program.done = lease.said.last;
        let before = program.last;
        program.last = here.or(before);
        before
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn owner(&self, id: ProgramId) -> Option<Owner> {
        Some(self.by_id.get(&id)?.owner)
    }

    /// Where the prefixes of a program end, as nodes and their generations.
    pub(crate) fn ends(&self, id: ProgramId) -> &[(u32, NonZeroU32)] {
        self.by_id.get(&id).map_or(&[], |program| &program.ends)
    }

    pub(crate) fn set_ends(&mut self, id: ProgramId, mut ends: Vec<(u32, NonZeroU32)>) {
        if let Some(program) = self.by_id.get_mut(&id) {
            ends.drain(..ends.len().saturating_sub(PREFIXES_MAX));
            program.ends = ends;
        }
    }

    pub(crate) fn set_done(&mut self, id: ProgramId) {
        if let Some(program) = self.by_id.get_mut(&id) {
            program.done = true;
        }
    }
}

impl PrefixCache {
    /// The id of a program of `tenant` in a namespace, new or known.
    pub fn program(&mut self, tenant: TenantId, ns: NamespaceId, name: &str) -> ProgramId {
        self.programs.named((tenant, ns), name)
    }

    /// The id of a program that has asked lately.
    pub fn find_program(&self, tenant: TenantId, ns: NamespaceId, name: &str) -> Option<ProgramId> {
        self.programs.known((tenant, ns), name)
    }

    /// The programs of this name in all namespaces of a tenant. Cost: the namespaces that have
    /// programs.
    pub fn programs_named(&self, tenant: TenantId, name: &str) -> impl Iterator<Item = ProgramId> {
        let owned = self.programs.by_name.iter();
        let owned = owned.filter(move |((owner, _), _)| *owner == tenant);
        owned.filter_map(move |(_, names)| names.get(name).copied())
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
        let owner = (tenant, lease.ns);
        lease.said.program = name.map(|name| self.programs.named(owner, name));
        lease.said.last = hints.session_final;
        lease.said.osl = hints.osl;
        let due = |iat_ms| {
            lease
                .arrived
                .saturating_add(u64::from(iat_ms) * MILLISECOND)
        };
        let gap = hints.iat_ms.and_then(|gap| self.programs.telling_gap(gap));
        lease.said.due = gap.map(due);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client library that sends a default with every request is not believed; one that says
    /// what it knows is.
    #[test]
    fn a_gap_that_every_request_names_says_nothing() {
        let mut programs = Programs::default();
        let mut ask = |gap| programs.telling_gap(gap);
        assert!((0..SAME_GAPS).all(|_| ask(250) == Some(250)));
        assert_eq!([ask(250), ask(250)], [None, None]);
        assert_eq!([ask(9000), ask(250)], [Some(9000), Some(250)]);
    }
}
