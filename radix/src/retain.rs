//! Retention: importance that lasts while something is in use and falls back when it idles.
//!
//! Rules. A statement is (priority, seconds); without seconds it holds for good. A node counts
//! with the highest statement that still holds; one that holds no longer says nothing, and what
//! nobody says anything about counts as 0. A node idles from its last match or the end of its
//! last lease on; idle for longer than the seconds of a statement, and the statement is gone: a
//! later match does not bring it back. What is said about a prefix holds for all of it, so shared
//! parts take the maximum: the higher priority, of equal ones the longer. A split divides a node
//! and renews nothing.
//!
//! Deadlines are a list in order of time, so expiry takes no scan and no traffic, and the order of
//! eviction changes exactly for the nodes whose priority does. Nodes of which only lasting
//! statements were made are not in here at all.

use crate::SpanMeta;
use crate::cache::PrefixCache;
use crate::hints::Retention as Statement;
use crate::node::NIL;
use rootstock_memory::Nanos;
use std::collections::{BTreeMap, BTreeSet};

const SECOND: Nanos = 1_000_000_000;

/// Statements kept of one node; of more, the one of the lowest priority is let go.
const GRANTS_MAX: usize = 4;

/// Holds until the node has idled for longer than `idle`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Grant {
    priority: i32,
    idle: Nanos,
}

/// What was said about one node.
#[derive(Clone, Debug)]
struct Retained {
    /// The highest lasting statement.
    base: Option<i32>,
    /// By falling priority and rising time: no other is worth keeping.
    grants: Vec<Grant>,
    used: Nanos,
}

impl Retained {
    fn priority(&self) -> i32 {
        let first = self.grants.first().map(|grant| grant.priority);
        self.base.max(first).unwrap_or(0)
    }

    /// When the next statement stops to hold.
    fn due(&self) -> Option<Nanos> {
        let first = self.grants.first()?;
        Some(self.used.saturating_add(first.idle))
    }

    fn add(&mut self, new: Grant) {
        let covers =
            |one: &Grant, other: &Grant| one.priority >= other.priority && one.idle >= other.idle;
        if self.grants.iter().any(|old| covers(old, &new)) {
            return;
        }
        self.grants.retain(|old| !covers(&new, old));
        let at = self
            .grants
            .partition_point(|old| old.priority > new.priority);
        self.grants.insert(at, new);
        self.grants.truncate(GRANTS_MAX);
    }
}

/// All nodes with statements that end.
#[derive(Debug, Default)]
pub(crate) struct Retention {
    by_node: BTreeMap<u32, Retained>,
    /// (deadline, node).
    due: BTreeSet<(Nanos, u32)>,
}

impl Retention {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_node.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_node.len()
    }

    pub(crate) fn has(&self, at: u32) -> bool {
        self.by_node.contains_key(&at)
    }

    /// What lasts of the priority of a node that has `priority` now.
    fn base(&self, at: u32, priority: i32) -> Option<i32> {
        match self.by_node.get(&at) {
            Some(retained) => retained.base,
            None => Some(priority),
        }
    }

    /// Changes an entry and its deadline; returns the priority that follows. An entry without
    /// deadlines goes.
    fn change(&mut self, at: u32, change: impl FnOnce(&mut Retained)) -> Option<i32> {
        let retained = self.by_node.get_mut(&at)?;
        if let Some(due) = retained.due() {
            self.due.remove(&(due, at));
        }
        change(retained);
        let priority = retained.priority();
        match retained.due() {
            Some(due) => {
                self.due.insert((due, at));
            }
            None => {
                self.by_node.remove(&at);
            }
        }
        Some(priority)
    }

    /// Something is said about a node of this `priority`: for good without seconds. Returns the
    /// priority that follows; None where what holds already is as strong.
    pub(crate) fn say(
        &mut self,
        at: u32,
        priority: i32,
        said: Statement,
        now: Nanos,
    ) -> Option<i32> {
        if self.base(at, priority) >= Some(said.priority) {
            return None;
        }
        let Some(seconds) = said.seconds else {
            let raised = self.change(at, |retained| retained.base = Some(said.priority));
            return Some(raised.unwrap_or(said.priority));
        };
        self.by_node.entry(at).or_insert(Retained {
            base: Some(priority),
            grants: Vec::new(),
            used: now,
        });
        let grant = Grant {
            priority: said.priority,
            idle: Nanos::from(seconds).saturating_mul(SECOND),
        };
        self.change(at, |retained| {
            retained.used = now;
            retained.add(grant);
        })
    }

    /// The next node of which a statement stops to hold before `now`, and the priority that it
    /// has then; what is in use does not idle.
    pub(crate) fn expire(
        &mut self,
        now: Nanos,
        is_used: impl Fn(u32) -> bool,
    ) -> Option<(u32, i32)> {
        let &(_, at) = self.due.first().filter(|&&(due, _)| due < now)?;
        let used = is_used(at);
        let left = self.change(at, |retained| {
            if used {
                retained.used = now;
            } else {
                retained.grants.remove(0);
            }
        });
        left.map(|priority| (at, priority))
    }

    /// The node is in use, or was until now.
    pub(crate) fn touch(&mut self, at: u32, now: Nanos) {
        if !self.is_empty() {
            self.change(at, |retained| retained.used = now);
        }
    }

    /// `upper` was cut from `lower`.
    pub(crate) fn split(&mut self, lower: u32, upper: u32) {
        let Some(retained) = self.by_node.get(&lower).cloned() else {
            return;
        };
        self.due.extend(retained.due().map(|due| (due, upper)));
        self.by_node.insert(upper, retained);
    }

    /// The node is gone.
    pub(crate) fn forget(&mut self, at: u32) {
        if self.is_empty() {
            return;
        }
        if let Some(retained) = self.by_node.remove(&at) {
            retained.due().map(|due| self.due.remove(&(due, at)));
        }
    }

    /// What contradicts itself, given the priority that a node has.
    pub(crate) fn fault(&self, priority_of: impl Fn(u32) -> Option<i32>) -> Option<String> {
        for (&at, retained) in &self.by_node {
            let due = retained
                .due()
                .is_some_and(|due| self.due.contains(&(due, at)));
            if !due {
                return Some(format!("the statements about node {at} are not due"));
            }
            if priority_of(at) != Some(retained.priority()) {
                let (has, says) = (priority_of(at), retained.priority());
                return Some(format!("node {at} has priority {has:?}, not {says}"));
            }
        }
        (self.due.len() != self.by_node.len()).then(|| "a deadline has no statement".to_owned())
    }
}

impl PrefixCache {
    /// Raises the importance of `at` and of what it hangs from as `meta` says.
    pub(crate) fn retain(&mut self, at: u32, meta: &SpanMeta, now: Nanos) {
        match meta.retention_s {
            None => self.retain_for_good(at, meta.priority),
            seconds => {
                let priority = meta.priority;
                self.retain_while_used(at, Statement { priority, seconds }, now);
            }
        }
    }

    /// A new leaf has no history: only what `meta` says holds.
    pub(crate) fn retain_new(&mut self, at: u32, meta: &SpanMeta, now: Nanos) {
        let Some(seconds) = meta.retention_s else {
            return;
        };
        let grant = Grant {
            priority: meta.priority,
            idle: Nanos::from(seconds).saturating_mul(SECOND),
        };
        let retained = Retained {
            base: None,
            grants: vec![grant],
            used: now,
        };
        self.retention
            .due
            .extend(retained.due().map(|due| (due, at)));
        self.retention.by_node.insert(at, retained);
    }

    /// Whether exactly what `meta` says was said about `at`.
    pub(crate) fn is_retained_as(&self, at: u32, meta: &SpanMeta) -> bool {
        let said = self.retention.by_node.get(&at);
        let seconds = meta.retention_s.map(Nanos::from);
        match (said, seconds) {
            (None, None) => self.tree.node(at).priority == meta.priority,
            (Some(said), Some(seconds)) => {
                let grant = Grant {
                    priority: meta.priority,
                    idle: seconds.saturating_mul(SECOND),
                };
                said.base.is_none() && said.grants == [grant]
            }
            (None, Some(_)) | (Some(_), None) => false,
        }
    }

    /// What lasts of a parent is never below what lasts of its child, so the climb ends at the
    /// first that is high enough.
    fn retain_for_good(&mut self, mut at: u32, priority: i32) {
        let said = Statement {
            priority,
            seconds: None,
        };
        while at != NIL {
            let node = self.tree.node(at);
            let (now, parent) = (node.priority, node.parent);
            let Some(raised) = self.retention.say(at, now, said, 0) else {
                break;
            };
            self.set_priority(at, raised);
            at = parent;
        }
    }

    fn retain_while_used(&mut self, mut at: u32, said: Statement, now: Nanos) {
        while !self.tree.node(at).is_root() {
            let priority = self.tree.node(at).priority;
            // What holds for good and is as high already needs no deadline.
            if let Some(raised) = self.retention.say(at, priority, said, now) {
                self.set_priority(at, raised);
            }
            at = self.tree.node(at).parent;
        }
    }

    /// Statements about nodes that idle for too long stop to hold.
    pub(crate) fn expire_retention(&mut self, now: Nanos) {
        loop {
            let tiers = &self.tiers;
            let is_used = |at| tiers.iter().any(|tier| tier.span(at).leases > 0);
            let Some((at, left)) = self.retention.expire(now, is_used) else {
                break;
            };
            self.set_priority(at, left);
            // What counted as less than 0 for a while is ordinary again, and so is its prefix.
            if left == 0 {
                self.retain_for_good(self.tree.node(at).parent, 0);
            }
        }
    }

    fn set_priority(&mut self, at: u32, priority: i32) {
        if self.tree.node(at).priority != priority {
            self.update(at, |node| node.priority = priority);
        }
    }
}
