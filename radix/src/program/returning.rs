//! Programs that come back: when they are expected, and what they need brought up ahead of that.
//!
//! A program is expected when it says so, or a mean gap after its last request, or when a child of
//! it has closed: then it is expected at once. What of its newest prefix lies on host goes up to
//! the device where it ran last, at a part of the time before, so that its request finds it there.
//!
//! ```text
//!   request ends ------------- 7/8 of the time ---> brought up --- expected
//!   child closes ---> parent is expected: brought up at once, and marked as due
//! ```
//! Nobody waits for it, so it costs nobody anything: not more than a share of a device is on its
//! way, room is made only at the cost of what is worth less, and under pressure it is left out.

use super::Programs;
use crate::cache::PrefixCache;
use crate::copies::Cost;
use crate::policy::agent::Group;
use crate::{Lease, ProgramId};
use rootstock_memory::{Nanos, ReplicaId};
use serde::{Deserialize, Serialize};

/// What a program needs is brought up this part of the time before it is expected, one of so many.
const EARLIER: u64 = 8;

/// Programs that are looked at in one call, at most.
const AWAKE_MAX: usize = 64;

/// What was brought up for programs that were expected. Counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Returns {
    /// Times that something was brought up.
    pub programs: u64,
    /// Pages of it.
    pub pages: u64,
    /// Times that it was left out because requests needed the memory.
    pub pressed: u64,
}

impl Programs {
    /// When what a program needs is to be brought up, if at all.
    pub(super) fn set_wake(&mut self, id: ProgramId, wake: Option<Nanos>) {
        let Some(program) = self.by_id.get_mut(&id) else {
            return;
        };
        if let Some(before) = std::mem::replace(&mut program.wake, wake) {
            self.wakes.remove(&(before, id));
        }
        if let Some(wake) = wake {
            self.wakes.insert((wake, id));
        }
    }

    /// A request of the program has come.
    pub(super) fn came(&mut self, id: ProgramId, lease: &Lease) {
        self.set_wake(id, None);
        if let Some(program) = self.by_id.get_mut(&id) {
            program.running = program.running.saturating_add(1);
            program.due = None;
            program.seen = program.seen.max(lease.arrived);
            program.replica = lease.replica;
        }
    }

    /// A request of the program has no lease any more.
    pub(crate) fn went(&mut self, id: ProgramId) {
        if let Some(program) = self.by_id.get_mut(&id) {
            assert!(program.running > 0, "who goes has come");
            program.running -= 1;
        }
    }

    /// The program is expected at `due`: what it needs is brought up somewhat earlier. Not while
    /// it runs, and not when it is done.
    pub(super) fn expect(&mut self, id: ProgramId, due: Option<Nanos>, now: Nanos) {
        let Some(program) = self.by_id.get_mut(&id) else {
            return;
        };
        program.due = due.filter(|_| program.running == 0 && !program.done);
        let wake = program.due.map(|due| {
            let wait = due.saturating_sub(now);
            now + (wait - wait / EARLIER)
        });
        self.set_wake(id, wake);
    }

    /// Whether what a program needs is to be brought up by now: its id, and where it ran.
    fn next_awake(&mut self, now: Nanos) -> Option<(ProgramId, ReplicaId)> {
        let &(_, id) = self.wakes.first().filter(|first| first.0 <= now)?;
        self.set_wake(id, None);
        Some((id, self.by_id.get(&id)?.replica))
    }

    fn wakes_at(&self) -> Option<Nanos> {
        Some(self.wakes.first()?.0)
    }

    /// The parent of a program that has closed, as far as it may come back because of that.
    fn waiting_parent(&self, id: ProgramId) -> Option<ProgramId> {
        let parent = self.by_id.get(&id)?.parent?;
        let known = self.by_id.get(&parent)?;
        (known.running == 0 && !known.done).then_some(parent)
    }
}

impl PrefixCache {
    /// Brings up what programs need that are expected soon. `at_ease` says of a replica that no
    /// request waits for its memory; elsewhere it is left out. To be called as time passes:
    /// [`PrefixCache::returns_at`].
    pub fn bring_back(&mut self, now: Nanos, at_ease: impl Fn(ReplicaId) -> bool) {
        for _ in 0..AWAKE_MAX {
            let Some((id, replica)) = self.programs.next_awake(now) else {
                break;
            };
            let end = self.programs.ends(id).last().copied();
            let Some((at, _)) = end.filter(|&(at, generation)| self.is_node(at, generation)) else {
                continue;
            };
            let pages = self.tree.node(at).end();
            if self.on_device(replica, at, pages) == pages {
                continue;
            }
            if !at_ease(replica) {
                self.programs.returns.pressed += 1;
                continue;
            }
            let lifted = self.promote_ahead(replica, at, pages, Cost::WorthLess, now);
            self.programs.returns.programs += u64::from(lifted > 0);
            self.programs.returns.pages += u64::from(lifted);
        }
    }

    /// When [`PrefixCache::bring_back`] has something to look at. None: not by time alone.
    pub fn returns_at(&self) -> Option<Nanos> {
        self.host.and(self.programs.wakes_at())
    }

    /// A program has closed: who started it and waits for it comes back now.
    pub(crate) fn closed(&mut self, id: ProgramId, now: Nanos) {
        if let Some(parent) = self.programs.waiting_parent(id) {
            self.expect_now(parent, now);
        }
    }

    /// A program comes back at once: what it alone uses of its newest prefix is marked as due.
    pub(crate) fn expect_now(&mut self, id: ProgramId, now: Nanos) {
        self.programs.expect(id, Some(now), now);
        let end = self.programs.ends(id).last().copied();
        let Some((mut at, _)) = end.filter(|&(at, generation)| self.is_node(at, generation)) else {
            return;
        };
        while !self.tree.node(at).is_root() {
            let agent = self.agent.as_ref();
            if agent.is_some_and(|agent| agent.is_owned(at, id.0)) {
                self.regroup(at, Group::Due, |_| now);
            }
            at = self.tree.node(at).parent;
        }
    }
}
