//! Agent programs: who asks, who started it, how often, how far apart, and which prefix is theirs.
//!
//! A program is what a client names: a session, a run, a conversation. Its requests extend one
//! prefix; one that leaves it elsewhere makes the rest of the old prefix worthless. The table is
//! bounded: of too many programs the one that asked longest ago is forgotten, which costs nothing
//! but what was known of it. A program belongs to a tenant and a namespace: the same name under
//! another salt is another program.
//!
//! A program may have a parent, which started it. Each has one parent at most, so that all links
//! together are bounded by the table. What is told of a parent ends nothing of its children; a
//! child that is done says that its parent comes back ([`returning`]).

mod returning;

pub use returning::Returns;

use crate::cache::PrefixCache;
use crate::{Hints, Lease, NamespaceId, ProgramId, TenantId};
use rootstock_memory::{Nanos, ReplicaId};
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

/// Where the prompt tokens of requests came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Served {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Of those, found on the device.
    pub device_tokens: u64,
    /// Copied up from host.
    pub host_tokens: u64,
    /// Read from storage, and copied up.
    pub storage_tokens: u64,
}

/// What is known of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProgramStats {
    /// Requests that have ended.
    pub turns: u32,
    /// Requests that have a lease.
    pub running: u32,
    /// Requests that found a part of their prompt.
    pub hits: u32,
    /// Where the tokens of its prompts came from, as told by [`PrefixCache::served`].
    pub served: Served,
    /// When the last request came or ended.
    pub seen_ns: Nanos,
    /// When the next request is expected; `None` where nothing is known, and while one runs.
    pub due_ns: Option<Nanos>,
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
    running: u32,
    hits: u32,
    served: Served,
    arrived: Nanos,
    seen: Nanos,
    gaps: Nanos,
    /// When it is expected back.
    due: Option<Nanos>,
    /// When what it needs is to be brought up for that.
    wake: Option<Nanos>,
    /// Where its last request ran.
    replica: ReplicaId,
    parent: Option<ProgramId>,
    children: BTreeSet<ProgramId>,
    last: Option<(u32, NonZeroU32)>,
    /// Where its prefixes end, none within another, the newest last.
    ends: Vec<(u32, NonZeroU32)>,
    done: bool,
}

impl Program {
    const fn new(owner: Owner, name: String, used: u64) -> Self {
        Self {
            owner,
            name,
            used,
            turns: 0,
            running: 0,
            hits: 0,
            served: Served {
                prompt_tokens: 0,
                device_tokens: 0,
                host_tokens: 0,
                storage_tokens: 0,
            },
            arrived: 0,
            seen: 0,
            gaps: 0,
            due: None,
            wake: None,
            replica: ReplicaId(0),
            parent: None,
            children: BTreeSet::new(),
            last: None,
            ends: Vec::new(),
            done: false,
        }
    }

    /// Mean time from the arrival of a request to that of the next.
    fn gap(&self) -> Option<Nanos> {
        let gaps = self.turns.checked_sub(1).filter(|&gaps| gaps > 0)?;
        Some(self.gaps / u64::from(gaps))
    }
}

/// Whose program it is, and where what it caches is.
pub(crate) type Owner = (TenantId, NamespaceId);

/// The gap that was named last, in milliseconds, and by how many requests in a row.
#[derive(Debug, Default)]
pub(crate) struct NamedGaps(u32, u32);

impl NamedGaps {
    /// What a request says of its gap, unless everybody says the same.
    pub(crate) const fn telling(&mut self, iat_ms: u32) -> Option<u32> {
        self.1 = if self.0 == iat_ms {
            self.1.saturating_add(1)
        } else {
            1
        };
        self.0 = iat_ms;
        if self.1 > SAME_GAPS {
            None
        } else {
            Some(iat_ms)
        }
    }
}

/// All programs.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    by_id: BTreeMap<ProgramId, Program>,
    by_name: BTreeMap<Owner, BTreeMap<String, ProgramId>>,
    /// (last use, program).
    by_use: BTreeSet<(u64, ProgramId)>,
    /// (when to bring up what it needs, program).
    wakes: BTreeSet<(Nanos, ProgramId)>,
    clock: u64,
    named: u64,
    gaps: NamedGaps,
    pub(crate) returns: Returns,
}

impl Programs {
    /// The program of that name, new or known.
    fn named(&mut self, owner: Owner, name: &str) -> ProgramId {
        if let Some(id) = self.known(owner, name) {
            return id;
        }
        if self.by_id.len() >= PROGRAMS_MAX
            && let Some(&(_, oldest)) = self.by_use.first()
        {
            self.forget(oldest);
        }
        self.named += 1;
        self.clock += 1;
        let id = ProgramId(self.named);
        let names = self.by_name.entry(owner).or_default();
        names.insert(name.to_owned(), id);
        self.by_use.insert((self.clock, id));
        let program = Program::new(owner, name.to_owned(), self.clock);
        self.by_id.insert(id, program);
        id
    }

    fn known(&self, owner: Owner, name: &str) -> Option<ProgramId> {
        self.by_name.get(&owner)?.get(name).copied()
    }

    fn forget(&mut self, id: ProgramId) {
        self.set_wake(id, None);
        self.set_parent(id, None);
        let Some(gone) = self.by_id.remove(&id) else {
            return;
        };
        self.by_use.remove(&(gone.used, id));
        for child in gone.children {
            if let Some(child) = self.by_id.get_mut(&child) {
                child.parent = None;
            }
        }
        if let Some(names) = self.by_name.get_mut(&gone.owner) {
            names.remove(&gone.name);
            if names.is_empty() {
                self.by_name.remove(&gone.owner);
            }
        }
    }

    /// The program is the one that asked last.
    fn touch(&mut self, id: ProgramId) {
        let Some(program) = self.by_id.get_mut(&id) else {
            return;
        };
        self.clock += 1;
        self.by_use.remove(&(program.used, id));
        program.used = self.clock;
        self.by_use.insert((self.clock, id));
    }

    /// A program is a child of another, or of none.
    fn set_parent(&mut self, id: ProgramId, parent: Option<ProgramId>) {
        let Some(program) = self.by_id.get_mut(&id) else {
            return;
        };
        let before = std::mem::replace(&mut program.parent, parent);
        if before == parent {
            return;
        }
        if let Some(before) = before.and_then(|before| self.by_id.get_mut(&before)) {
            before.children.remove(&id);
        }
        if let Some(parent) = parent.and_then(|parent| self.by_id.get_mut(&parent)) {
            parent.children.insert(id);
        }
    }

    /// A request of the program ended in the node `here`, if it left one; returns where the one
    /// before did.
    pub(crate) fn ended(
        &mut self,
        id: ProgramId,
        lease: &Lease,
        here: Option<(u32, NonZeroU32)>,
        now: Nanos,
    ) -> Option<(u32, NonZeroU32)> {
        // Who started it is still there.
        if let Some(parent) = self.by_id.get(&id)?.parent {
            self.touch(parent);
        }
        self.touch(id);
        let program = self.by_id.get_mut(&id)?;
        if program.turns > 0 {
            let gap = lease.arrived.saturating_sub(program.arrived);
            program.gaps = program.gaps.saturating_add(gap);
        }
        program.turns = program.turns.saturating_add(1);
        program.arrived = lease.arrived.max(program.arrived);
        program.seen = program.seen.max(now);
        program.done = lease.said.last;
        let before = program.last;
        program.last = here.or(before);
        let gap = program.gap();
        let learned = gap.map(|gap| program.arrived.saturating_add(gap));
        self.expect(id, lease.said.due.or(learned), now);
        before
    }

    /// What contradicts itself.
    pub(crate) fn fault(&self) -> Option<String> {
        let names = self.by_name.values().map(BTreeMap::len).sum::<usize>();
        let (known, used) = (self.by_id.len(), self.by_use.len());
        if names != known || used != known {
            return Some(format!("{known} programs, {names} names, {used} uses"));
        }
        let awake = self.by_id.values().filter(|one| one.wake.is_some());
        if awake.count() != self.wakes.len() {
            return Some(format!("{} programs are expected", self.wakes.len()));
        }
        self.by_id.iter().find_map(|(&id, one)| {
            let is_child_of = |other: ProgramId| {
                let other = self.by_id.get(&other);
                other.is_some_and(|other| other.children.contains(&id))
            };
            let is_parent_of = |child: &ProgramId| {
                let child = self.by_id.get(child);
                child.is_some_and(|child| child.parent == Some(id))
            };
            let linked =
                one.parent.is_none_or(is_child_of) && one.children.iter().all(is_parent_of);
            let listed = self.by_use.contains(&(one.used, id))
                && one.wake.is_none_or(|wake| self.wakes.contains(&(wake, id)));
            (!linked || !listed).then(|| format!("{id:?} is linked wrongly: {one:?}"))
        })
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
            program.due = None;
        }
        self.set_wake(id, None);
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
        let gap_ns = known.gap();
        let ttl_s = |gap: Nanos| gap.saturating_mul(u64::from(known.turns)).div_ceil(SECOND);
        Some(ProgramStats {
            turns: known.turns,
            running: known.running,
            hits: known.hits,
            served: known.served,
            seen_ns: known.seen,
            due_ns: known.due,
            gap_ns,
            derived_ttl_s: gap_ns.map(|gap| ttl_s(gap).max(1)),
            done: known.done,
        })
    }

    /// The name of a program.
    pub fn program_name(&self, program: ProgramId) -> Option<&str> {
        Some(&self.programs.by_id.get(&program)?.name)
    }

    /// The program that started another, where that was said.
    pub fn program_parent(&self, program: ProgramId) -> Option<ProgramId> {
        self.programs.by_id.get(&program)?.parent
    }

    /// The programs that a program started, in the order in which they were heard of.
    pub fn program_children(&self, program: ProgramId) -> impl Iterator<Item = ProgramId> {
        let known = self.programs.by_id.get(&program);
        known.into_iter().flat_map(|known| &known.children).copied()
    }

    /// All that a program has started, directly or through others, itself left out.
    pub fn program_descendants(&self, program: ProgramId) -> BTreeSet<ProgramId> {
        let mut found = BTreeSet::new();
        let mut left = vec![program];
        while let Some(id) = left.pop() {
            let children = self.program_children(id);
            left.extend(children.filter(|&child| child != program && found.insert(child)));
        }
        found
    }

    /// The replica where the last request of a program ran.
    pub fn program_replica(&self, program: ProgramId) -> Option<ReplicaId> {
        Some(self.programs.by_id.get(&program)?.replica)
    }

    /// The programs of a tenant in a namespace, the one that asked last first. Cost: linear in the
    /// programs that asked later than the last that is taken.
    pub fn programs_of(
        &self,
        tenant: TenantId,
        ns: NamespaceId,
    ) -> impl Iterator<Item = ProgramId> {
        let all = self.programs.by_use.iter().rev().map(|&(_, id)| id);
        all.filter(move |id| self.programs.owner(*id) == Some((tenant, ns)))
    }

    /// Says of a request that has its lease what its hints say. Without this its pages are judged
    /// by what the cache sees alone.
    pub fn describe(&mut self, tenant: TenantId, lease: &mut Lease, hints: &Hints) {
        if let Some(before) = lease.said.program.take() {
            self.programs.went(before);
        }
        let owner = (tenant, lease.ns);
        if let Some(name) = hints.program.as_deref() {
            let id = self.programs.named(owner, name);
            if let Some(parent) = hints.parent.as_deref().filter(|&parent| parent != name) {
                let parent = self.programs.named(owner, parent);
                self.programs.set_parent(id, Some(parent));
            }
            self.programs.came(id, lease);
            lease.said.program = Some(id);
        }
        lease.said.last = hints.session_final;
        lease.said.osl = hints.osl;
        let due = |iat_ms| {
            lease
                .arrived
                .saturating_add(u64::from(iat_ms) * MILLISECOND)
        };
        let gap = hints.iat_ms.and_then(|gap| self.programs.gaps.telling(gap));
        lease.said.due = gap.map(due);
    }

    /// Notes where the prompt of a described request came from, once a request: for
    /// [`ProgramStats`] alone.
    pub fn served(&mut self, lease: &Lease, served: Served) {
        let id = lease.said.program;
        let Some(program) = id.and_then(|id| self.programs.by_id.get_mut(&id)) else {
            return;
        };
        let Served {
            prompt_tokens,
            device_tokens,
            host_tokens,
            storage_tokens,
        } = served;
        let found = device_tokens > 0 || host_tokens > 0 || storage_tokens > 0;
        program.hits = program.hits.saturating_add(u32::from(found));
        program.served.prompt_tokens += prompt_tokens;
        program.served.device_tokens += device_tokens;
        program.served.host_tokens += host_tokens;
        program.served.storage_tokens += storage_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client library that sends a default with every request is not believed; one that says
    /// what it knows is.
    #[test]
    fn a_gap_that_every_request_names_says_nothing() {
        let mut gaps = NamedGaps::default();
        let mut ask = |gap| gaps.telling(gap);
        assert!((0..SAME_GAPS).all(|_| ask(250) == Some(250)));
        assert_eq!([ask(250), ask(250)], [None, None]);
        assert_eq!([ask(9000), ask(250)], [Some(9000), Some(250)]);
    }
}
