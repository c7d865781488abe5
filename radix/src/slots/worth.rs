//! Policy `agent` over slots: what the host's calls mean for what is learned. The policy itself is
//! the one of the page cache ([`crate::policy::agent`]).
//!
//! A request uses a node when it inserts it for the first time: hosts look a prompt up many times
//! before they run it. A node is idle from the end of its last lease on, or from the insertion
//! where there is none. What a request says is believed at its last insertion.

use super::insert::Walking;
use super::order::Candidates;
use super::{Handle, SlotPolicy, SlotTree};
use crate::hints::{Hints, Retention as Statement};
use crate::policy::agent::{Agent, Group, Mark, Said, Shelf, branch};
use crate::{ContextKind, CurvePoint, Duel, HitCurve, ProgramId};
use rootstock_memory::Nanos;
use std::collections::BTreeSet;
use std::sync::Arc;

const MILLISECOND: Nanos = 1_000_000;

/// A request, as far as it is known when it inserts.
#[derive(Clone, Debug, Default)]
pub struct Asker {
    /// What it says.
    pub hints: Option<Arc<Hints>>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// When it came.
    pub arrived: Nanos,
    /// This is its last insertion.
    pub is_done: bool,
}

/// What policy `agent` has learned.
#[derive(Clone, PartialEq, Debug)]
pub struct Learned {
    /// The duel with least recently used.
    pub duel: Duel,
    /// Hits at other capacities.
    pub curve: Vec<CurvePoint>,
}

impl SlotTree {
    /// Empty orders, and what learns them.
    pub(super) fn new_orders(&self) -> ([Candidates; 2], Option<Box<Agent>>) {
        if self.config.policy != SlotPolicy::Agent {
            let empty = || Candidates::Ranked(BTreeSet::new());
            return ([empty(), empty()], None);
        }
        let worth = || Candidates::Worth(Box::new(Shelf::new(Agent::first_ranks())));
        let page_tokens = u64::from(self.config.page_tokens);
        let pages = (self.config.device_tokens + self.host.tokens).div_ceil(page_tokens);
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        ([worth(), worth()], Some(Box::new(Agent::new(pages.max(1)))))
    }

    /// The host tier has room for so many tokens; called before anything is inserted.
    pub fn set_host_tokens(&mut self, tokens: u64) {
        self.host.tokens = tokens;
        if self.all_nodes().next().is_none() {
            (self.orders, self.agent) = self.new_orders();
            self.set_now(self.now);
        }
    }

    /// Time passes; it never goes back. What is retained while it is used may end.
    pub fn set_now(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        if let Some(agent) = &mut self.agent {
            agent.set_now(self.now);
        }
        for shelf in self.orders.iter_mut().filter_map(Candidates::shelf) {
            shelf.set_now(self.now);
        }
        loop {
            let cells = &self.cells;
            let is_used = |at: u32| cells[at as usize].leases > 0;
            let Some((at, priority)) = self.retention.expire(self.now, is_used) else {
                break;
            };
            self.set_retained(at, priority);
        }
    }

    /// Sets what a node is worth by in both tiers.
    pub(super) fn remark(&mut self, at: u32, mark: Mark) {
        self.unrank(at);
        for shelf in self.orders.iter_mut().filter_map(Candidates::shelf) {
            shelf.mark(at, mark);
        }
        self.refresh(at);
    }

    /// A request uses a node that was there.
    pub(super) fn found(&mut self, at: u32) {
        if let Some(agent) = &mut self.agent {
            agent.found(at);
            let node = self.tree.node_mut(at);
            node.hits = node.hits.saturating_add(1);
        }
    }

    /// A request has computed a new leaf.
    pub(super) fn computed(&mut self, at: u32, walk: &Walking) {
        let Some(agent) = &mut self.agent else { return };
        let page_tokens = self.config.page_tokens;
        let asked = walk.what.asker.as_ref().map_or(0, |one| one.prompt_tokens) / page_tokens;
        let pages = self.tree.node(at).pages;
        agent.computed(&self.tree, at, pages, asked);
        let owner = walk.what.program.map_or(0, |program| program.0);
        let answers = agent.answers_beside(&self.tree, at, asked, owner);
        self.remark(at, Mark::new(Group::Plain, 1, self.now));
        for answer in answers {
            for at in branch::below(&self.tree, answer) {
                self.give_up(at);
                let cell = self.cell_mut(at);
                if cell.leases == 0 && cell.pins == 0 {
                    cell.spent = true;
                    self.refresh(at);
                }
            }
        }
    }

    /// Nobody uses a node any more.
    pub(super) fn settle(&mut self, at: u32) {
        if let Some(agent) = &mut self.agent {
            agent.settle(at, self.tree.node(at), self.orders[0].mark_of(at));
        }
    }

    /// The node is expected to be worth nothing.
    fn give_up(&mut self, at: u32) {
        let before = self.orders[0].mark_of(at);
        let mark = before.moved(Group::Dead, before.origin.min(self.now));
        self.remark(at, mark);
        if let Some(agent) = &mut self.agent {
            agent.marked(at, self.tree.node(at), mark);
        }
    }

    /// Something came from a store, of which nothing else is known.
    pub(super) fn judge_arrival(&mut self, at: u32) {
        if let Some(agent) = &mut self.agent {
            let mark = agent.used(at, self.tree.node(at), &Said::default());
            self.remark(at, mark);
        }
    }

    /// An insertion has ended: its path is marked as the request says, and where the request is
    /// done, what its program went on without is given up.
    pub(super) fn conclude(&mut self, walk: &Walking) {
        self.note_program(walk.what.program, walk.at);
        let Some(asker) = &walk.what.asker else {
            return;
        };
        if let Some(hints) = &asker.hints {
            self.retain_as_said(walk.at, hints, asker.prompt_tokens);
        }
        if self.agent.is_none() {
            return;
        }
        let said = self.said_by(asker, walk.what.program);
        let mut at = walk.at;
        while !self.is_root_at(at)
            && let Some(agent) = &mut self.agent
        {
            let mark = agent.used(at, self.tree.node(at), &said);
            self.remark(at, mark);
            if self.cell(at).leases == 0 {
                self.settle(at);
            }
            at = self.parent(at);
        }
        if asker.is_done {
            self.learn(walk);
        }
    }

    fn learn(&mut self, walk: &Walking) {
        if let Some(program) = walk.what.program
            && let Some(before) = self.done_program(program, walk.at)
            && let Ok(old) = self.find(before)
            && let Some(agent) = &self.agent
        {
            for at in agent.own_branch(&self.tree, old, Some(walk.at), program.0) {
                self.give_up(at);
            }
        }
        let Some(ranks) = self.agent.as_mut().and_then(|agent| agent.learn()) else {
            return;
        };
        for shelf in self.orders.iter_mut().filter_map(Candidates::shelf) {
            shelf.reorder(&ranks);
        }
    }

    fn said_by(&mut self, asker: &Asker, program: Option<ProgramId>) -> Said {
        let mut said = Said {
            program,
            ..Said::default()
        };
        let Some(hints) = &asker.hints else {
            return said;
        };
        said.osl = hints.osl;
        if asker.is_done {
            said.last = hints.session_final;
            let gap = hints.iat_ms.and_then(|gap| self.gaps.telling(gap));
            said.due = gap.map(|gap| asker.arrived + u64::from(gap) * MILLISECOND);
        }
        said
    }

    /// Where the run of tokens ends, from `done` on, of which the same is said, and what they are.
    pub(super) fn run_of(&self, walk: &Walking, done: usize) -> (usize, ContextKind) {
        let end = walk.what.tokens.len();
        let asker = walk.what.asker.as_ref().filter(|_| self.agent.is_some());
        let Some((asker, hints)) = asker.and_then(|one| Some((one, one.hints.as_deref()?))) else {
            return (end, ContextKind::Unknown);
        };
        let page_tokens = self.tree.page_tokens();
        let pages = crate::tree::narrow(done / page_tokens)..crate::tree::narrow(end / page_tokens);
        let (last, meta) = hints.span(pages, self.config.page_tokens, asker.prompt_tokens);
        (last as usize * page_tokens, meta.kind)
    }

    /// What is said about the parts of a path: what holds for a prefix holds for all before it.
    fn retain_as_said(&mut self, last: u32, hints: &Hints, prompt_tokens: u32) {
        if hints.priority == 0 && hints.retain.is_empty() && hints.retain_output.is_none() {
            return;
        }
        let (mut at, mut strongest) = (last, Statement::default());
        let page_tokens = self.config.page_tokens;
        while !self.is_root_at(at) {
            let node = self.tree.node(at);
            let part = node.depth * page_tokens..node.end() * page_tokens;
            let said = hints.retention_of(part, prompt_tokens);
            strongest = if at == last {
                said
            } else {
                strongest.max(said)
            };
            self.say(at, strongest);
            at = self.parent(at);
        }
    }

    /// Retains the path of a node: `priority` holds until it idles for `seconds`, or for good.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn retain(
        &mut self,
        handle: Handle,
        priority: i32,
        seconds: Option<u32>,
    ) -> Result<(), super::SlotError> {
        let mut at = self.find(handle)?;
        while !self.is_root_at(at) {
            self.say(at, Statement { priority, seconds });
            at = self.parent(at);
        }
        Ok(())
    }

    fn say(&mut self, at: u32, said: Statement) {
        let now = self.cell(at).retained;
        if let Some(priority) = self.retention.say(at, now, said, self.now) {
            self.set_retained(at, priority);
        }
    }

    fn set_retained(&mut self, at: u32, priority: i32) {
        self.cell_mut(at).retained = priority;
        self.tree.node_mut(at).priority = priority;
        self.refresh(at);
    }

    /// What policy `agent` has learned; none with others. `lookup_tokens` were asked for, and
    /// `hit_tokens` of them found.
    #[must_use]
    pub fn learned(&self, lookup_tokens: u64, hit_tokens: u64) -> Option<Learned> {
        let agent = self.agent.as_ref()?;
        let HitCurve { points, .. } =
            agent.curve(lookup_tokens, hit_tokens, self.config.page_tokens);
        Some(Learned {
            duel: agent.duel(),
            curve: points,
        })
    }
}
