//! Insertion, cut where the host has to act: at each backup that a node has earned.

use super::digest::Digest;
use super::programs::Owner;
use super::worth::Asker;
use super::{Handle, SlotError, SlotTree, SpaceName};
use crate::{ContextKind, ProgramId, SpanMeta, Token};

/// What the host has to do. Nothing of it is done by the tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotAction {
    /// These device slots are nobody's: they hold what the tree has already.
    Free(Vec<i64>),
    /// Copy these nodes to the host tier, in this order, until one fails.
    BackUp(Vec<Handle>),
    /// A node with a copy under way was cut.
    Split {
        /// The acknowledgment that is awaited.
        ack: u64,
        /// The new upper part.
        upper: Handle,
        /// What is left of the node.
        lower: Handle,
    },
}

/// What is inserted.
#[derive(Clone, Debug, Default)]
pub struct Insertion {
    /// Namespace.
    pub space: SpaceName,
    /// What its first pages chain on, in stores and in events.
    pub seeds: [Option<Digest>; 2],
    /// Whole pages.
    pub tokens: Vec<Token>,
    /// A slot for each token.
    pub slots: Vec<i64>,
    /// Tokens whose slots are the tree's already, so never free.
    pub owned: usize,
    /// Tokens that the same request inserted before: nodes below count it no second time.
    pub counted: usize,
    /// The highest stays.
    pub priority: i64,
    /// For events.
    pub session: Option<String>,
    /// Whose program inserts.
    pub program: Option<ProgramId>,
    /// The request; none where it says nothing new.
    pub asker: Option<Asker>,
}

/// What became of an insertion.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inserted {
    /// Tokens that were there.
    pub found: usize,
    /// The node at the end.
    pub last: Handle,
    /// Ranges of tokens whose slots the tree took.
    pub taken: Vec<(usize, usize)>,
}

/// One step: the host acts, then resumes while there is no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// In this order.
    pub actions: Vec<SlotAction>,
    /// At the end.
    pub result: Option<Inserted>,
}

/// An insertion under way.
#[derive(Debug)]
pub(super) struct Walking {
    pub(super) what: Insertion,
    pub(super) at: u32,
    /// Tokens that are behind.
    done: usize,
    /// Those that were there.
    found: usize,
    is_at_end: bool,
    taken: Vec<(usize, usize)>,
    actions: Vec<SlotAction>,
}

impl Walking {
    fn take(&mut self, end: usize) {
        match self.taken.last_mut() {
            Some(last) if last.1 == self.done => last.1 = end,
            Some(_) | None => self.taken.push((self.done, end)),
        }
    }
}

impl SlotTree {
    /// Starts an insertion and runs it to the first backup, or to its end.
    ///
    /// # Errors
    /// When another one is under way, or the key is not of whole pages with a slot each.
    pub fn begin_insert(&mut self, what: Insertion) -> Result<Step, SlotError> {
        if self.walking.is_some() {
            return Err(SlotError::Insertion("under way"));
        }
        let (tokens, slots) = (what.tokens.len(), what.slots.len());
        if !tokens.is_multiple_of(self.tree.page_tokens()) || tokens != slots {
            let page_tokens = self.config.page_tokens;
            return Err(SlotError::Length {
                tokens,
                slots,
                page_tokens,
            });
        }
        // What hangs below the root without a priority of its own inherits the highest one seen.
        let root = self.root;
        let above = self.cell_mut(root);
        above.priority = above.priority.max(what.priority);
        if tokens == 0 {
            let result = Inserted {
                found: 0,
                last: self.root(),
                taken: Vec::new(),
            };
            return Ok(Step {
                actions: Vec::new(),
                result: Some(result),
            });
        }
        let at = self.space(&what.space, what.seeds);
        self.walking = Some(Walking {
            what,
            at,
            done: 0,
            found: 0,
            is_at_end: false,
            taken: Vec::new(),
            actions: Vec::new(),
        });
        self.resume_insert()
    }

    /// Goes on after the actions of the last step were done.
    ///
    /// # Errors
    /// When there is none to go on with.
    pub fn resume_insert(&mut self) -> Result<Step, SlotError> {
        let missing = SlotError::Insertion("not under way");
        let mut walk = self.walking.take().ok_or(missing)?;
        while !walk.is_at_end {
            let backup = self.insert_next(&mut walk);
            let is_barrier = backup.is_some();
            walk.actions.extend(backup);
            if is_barrier && !walk.is_at_end {
                let actions = std::mem::take(&mut walk.actions);
                self.walking = Some(walk);
                return Ok(Step {
                    actions,
                    result: None,
                });
            }
        }
        self.conclude(&walk);
        let result = Inserted {
            found: walk.found,
            last: self.handle(walk.at),
            taken: walk.taken,
        };
        Ok(Step {
            actions: walk.actions,
            result: Some(result),
        })
    }

    /// Whether an insertion waits for its actions to be done.
    #[must_use]
    pub const fn is_inserting(&self) -> bool {
        self.walking.is_some()
    }

    /// Gives an insertion up; returns what is still to be done.
    pub fn end_insert(&mut self) -> Vec<SlotAction> {
        self.walking
            .take()
            .map_or_else(Vec::new, |walk| walk.actions)
    }

    /// One node: one that is there, or the new leaf.
    fn insert_next(&mut self, walk: &mut Walking) -> Option<SlotAction> {
        let rest = &walk.what.tokens[walk.done..];
        let Some(child) = self.tree.child(walk.at, rest) else {
            return self.insert_rest(walk);
        };
        let pages = self.tree.common_pages(child, rest);
        self.touch(child);
        let mut at = child;
        if pages < self.tree.node(child).pages {
            let (upper, action) = self.split(child, pages);
            walk.actions.extend(action);
            at = upper;
        }
        let end = walk.done + self.len_of(at);
        let cell = self.cell_mut(at);
        cell.priority = cell.priority.max(walk.what.priority);
        cell.owner = cell.owner.joined(walk.what.program);
        self.refresh(at);
        let slots = &walk.what.slots[walk.done..end];
        if self.cell(at).device.is_none() {
            self.fill(at, slots.to_vec());
            self.track_twin(at);
            self.tell_stored(at, true, walk.what.session.as_deref());
            walk.take(end);
        } else {
            let own = walk.what.owned.saturating_sub(walk.done).min(slots.len());
            if own < slots.len() {
                walk.actions.push(SlotAction::Free(slots[own..].to_vec()));
            }
        }
        let is_new = end > walk.what.counted;
        if is_new {
            self.found(at);
        }
        let backup = is_new && self.count(at);
        (walk.at, walk.done, walk.found) = (at, end, end);
        backup.then(|| SlotAction::BackUp(self.chain_to_back_up(at)))
    }

    fn insert_rest(&mut self, walk: &mut Walking) -> Option<SlotAction> {
        let start = walk.done;
        if start == walk.what.tokens.len() {
            walk.is_at_end = true;
            return None;
        }
        let (end, kind) = self.run_of(walk, start);
        walk.is_at_end = end == walk.what.tokens.len();
        walk.take(end);
        let slots = walk.what.slots[start..end].to_vec();
        let rest = &walk.what.tokens[start..end];
        let at = self.add(walk.at, rest, walk.what.priority, kind);
        self.cell_mut(at).owner = walk.what.program.map_or(Owner::Unknown, Owner::One);
        self.fill(at, slots);
        self.name(at);
        self.tell_stored(at, true, walk.what.session.as_deref());
        (walk.at, walk.done) = (at, end);
        self.computed(at, walk);
        let backup = end > walk.what.counted && self.count(at);
        backup.then(|| SlotAction::BackUp(self.chain_to_back_up(at)))
    }

    /// A new leaf on no tier.
    pub(super) fn add(
        &mut self,
        parent: u32,
        tokens: &[Token],
        priority: i64,
        kind: ContextKind,
    ) -> u32 {
        let meta = SpanMeta {
            kind,
            ..SpanMeta::default()
        };
        let at = self.tree.add_leaf(parent, tokens, &meta, 0);
        let (used, created) = (self.tick(), self.tick());
        let page_tokens = u64::from(self.config.page_tokens);
        let reach = u64::from(self.tree.node(at).end()) * page_tokens;
        *self.cell_slot(at) = super::cell::Cell {
            priority,
            used,
            created,
            crest: reach,
            ..super::cell::Cell::default()
        };
        let mut above = parent;
        while !self.is_root_at(above) && self.cell(above).crest < reach {
            self.cell_mut(above).crest = reach;
            self.refresh(above);
            above = self.parent(above);
        }
        at
    }

    /// A node comes onto the device.
    pub(super) fn fill(&mut self, at: u32, slots: Vec<i64>) {
        let tokens = slots.len() as u64;
        let cell = self.cell_mut(at);
        assert!(cell.device.is_none(), "node {at} is on the device already");
        cell.device = Some(slots);
        if cell.leases > 0 {
            self.protected += tokens;
        } else {
            self.evictable += tokens;
        }
        let parent = self.parent(at);
        self.cell_mut(parent).kids += 1;
        self.refresh(at);
        self.refresh(parent);
    }

    /// Counts an insertion; whether the node has now earned a copy on the host tier.
    fn count(&mut self, at: u32) -> bool {
        let host = self.host;
        let cell = self.cell_mut(at);
        if cell.device.is_none() || host.write_back {
            return false;
        }
        cell.hits = cell.hits.saturating_add(1);
        let is_due = cell.host.is_none() && cell.hits >= host.write_through_hits;
        self.refresh(at);
        host.enabled && is_due
    }

    /// The node and what is above it without a copy, from the top.
    pub(super) fn chain_to_back_up(&self, at: u32) -> Vec<Handle> {
        let mut chain = vec![self.handle(at)];
        let mut above = self.parent(at);
        while !self.is_root_at(above) && self.cell(above).host.is_none() {
            chain.push(self.handle(above));
            above = self.parent(above);
        }
        chain.reverse();
        chain
    }
}
