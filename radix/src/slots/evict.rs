//! Eviction, node by node: the host frees what each step gave up before the next one.

use super::{Handle, SlotError, SlotTree};

/// What a step gave up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Freed {
    /// Device slots, one list a node.
    pub device: Vec<Vec<i64>>,
    /// Host slots, one list a node.
    pub host: Vec<Vec<i64>>,
    /// Tokens that count towards the request: of the tier that was evicted from.
    pub tokens: usize,
    /// Device tokens among them of which there is no copy.
    pub unbacked: usize,
}

/// What became of a candidate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LeafEnd {
    /// It left the device.
    Gone(Freed),
    /// Copy these nodes to the host tier first, in this order, then [`SlotTree::demote`] it.
    NeedsCopy(Vec<Handle>),
}

/// A walk over the candidates of the device.
#[derive(Debug)]
pub(super) struct Walk {
    tokens: usize,
    last: Option<u32>,
    /// Offered, and still there.
    passed: Vec<u32>,
}

const DEVICE: usize = 0;
const HOST: usize = 1;

/// Fold of reclaimed nodes: 42 bits, so that it fits 64-bit signed reductions between ranks.
const FOLD_MASK: u64 = (1 << 42) - 1;
const FOLD_FACTOR: u64 = 1_000_003;

impl SlotTree {
    /// Starts a walk over the device's candidates that wants `tokens` back.
    pub fn begin_walk(&mut self, tokens: usize) {
        self.end_walk();
        self.walk = Some(Walk {
            tokens,
            last: None,
            passed: Vec::new(),
        });
    }

    /// The next candidate while fewer than the tokens wanted are `freed`; each is offered once.
    ///
    /// # Errors
    /// When no walk is under way.
    pub fn next_leaf(&mut self, freed: usize) -> Result<Option<Handle>, SlotError> {
        let Some(walk) = &mut self.walk else {
            return Err(SlotError::Insertion("a walk, and none is under way"));
        };
        let (last, is_enough) = (walk.last.take(), freed >= walk.tokens);
        if let Some(last) = last
            && self.cells[last as usize].ranks[DEVICE].is_some()
        {
            walk.passed.push(last);
            self.cell_mut(last).passed = true;
            self.refresh(last);
        }
        if is_enough {
            return Ok(None);
        }
        let next = self.orders[DEVICE].first();
        if let Some(walk) = &mut self.walk {
            walk.last = next;
        }
        Ok(next.map(|at| self.handle(at)))
    }

    /// Ends the walk.
    pub fn end_walk(&mut self) {
        let passed = self.walk.take().map_or_else(Vec::new, |walk| walk.passed);
        for at in passed {
            if std::mem::take(&mut self.cell_mut(at).passed) {
                self.refresh(at);
            }
        }
    }

    fn device_leaf(&self, handle: Handle) -> Result<u32, SlotError> {
        let at = self.find(handle)?;
        match self.ranks_of(at)[DEVICE] {
            Some(_) => Ok(at),
            None => Err(SlotError::State {
                node: handle.0,
                what: "is no candidate of the device",
            }),
        }
    }

    /// Evicts a candidate from the device: demotes it where there is a copy, drops it where
    /// copies are made early, and asks for a copy where they are made late.
    ///
    /// # Errors
    /// When the node is gone, or no candidate.
    pub fn take_leaf(&mut self, handle: Handle) -> Result<LeafEnd, SlotError> {
        let at = self.device_leaf(handle)?;
        let mut freed = Freed::default();
        if self.cell(at).host.is_some() {
            self.leave_device(at, &mut freed);
        } else if self.host.write_back {
            return Ok(LeafEnd::NeedsCopy(vec![handle]));
        } else if self.host.enabled && self.cell(at).pins > 0 {
            return Ok(LeafEnd::NeedsCopy(self.chain_to_back_up(at)));
        } else {
            self.drop_unbacked(at, &mut freed)?;
        }
        Ok(LeafEnd::Gone(freed))
    }

    /// Takes a node off the device whose host copy exists now.
    ///
    /// # Errors
    /// When the node is gone or not on both tiers.
    pub fn demote(&mut self, handle: Handle) -> Result<Freed, SlotError> {
        let at = self.find(handle)?;
        let cell = self.cell(at);
        if cell.device.is_none() || cell.host.is_none() || self.is_root_at(at) {
            let what = "is not on both tiers";
            return Err(SlotError::State {
                node: handle.0,
                what,
            });
        }
        let mut freed = Freed::default();
        self.leave_device(at, &mut freed);
        Ok(freed)
    }

    fn leave_device(&mut self, at: u32, freed: &mut Freed) {
        self.empty_device(at, freed);
        self.refresh(at);
        self.tell_removed(at, true);
        let parent = self.parent(at);
        self.refresh(parent);
    }

    /// Gives the device slots of a node up.
    fn empty_device(&mut self, at: u32, freed: &mut Freed) {
        let parent = self.parent(at);
        let cell = self.cell_mut(at);
        let (leases, is_backed) = (cell.leases, cell.host.is_some());
        let Some(slots) = cell.device.take() else {
            return;
        };
        let tokens = slots.len();
        let ledger = if leases > 0 {
            &mut self.protected
        } else {
            &mut self.evictable
        };
        *ledger -= tokens as u64;
        self.cell_mut(parent).kids -= 1;
        freed.tokens += tokens;
        if !is_backed {
            freed.unbacked += tokens;
        }
        freed.device.push(slots);
    }

    fn drop_unbacked(&mut self, at: u32, freed: &mut Freed) -> Result<(), SlotError> {
        if !self.tree.node(at).is_leaf() {
            let what = "has children and no copy";
            return Err(SlotError::State {
                node: self.handle(at).0,
                what,
            });
        }
        self.tell_removed(at, true);
        self.empty_device(at, freed);
        self.remove(at);
        Ok(())
    }

    /// Drops a candidate of which no copy could be made, with the host copies below it; `None`
    /// when something still uses one of them.
    ///
    /// # Errors
    /// When the node is gone, or no candidate without a copy.
    pub fn drop_branch(&mut self, handle: Handle) -> Result<Option<Freed>, SlotError> {
        let at = self.device_leaf(handle)?;
        let cell = self.cell(at);
        if cell.host.is_some() || cell.writing.is_some() {
            let what = "has a copy";
            return Err(SlotError::State {
                node: handle.0,
                what,
            });
        }
        let mut branch = vec![at];
        let mut seen = 0;
        while let Some(&next) = branch.get(seen) {
            let cell = self.cell(next);
            let is_moving = cell.writing.is_some() || cell.loading.is_some();
            if is_moving || cell.leases > 0 || cell.host_leases > 0 {
                return Ok(None);
            }
            branch.extend(self.children(next));
            seen += 1;
        }
        let mut freed = Freed::default();
        for &below in branch[1..].iter().rev() {
            self.tell_removed(below, false);
            let slots = self.cell_mut(below).host.take();
            freed.host.extend(slots);
            self.unlink(below);
        }
        self.drop_unbacked(at, &mut freed)?;
        Ok(Some(freed))
    }

    /// Frees at least `tokens` of the host tier, as far as nothing holds them. Where copies are
    /// made late, those go first that the device has as well, unless `keep_twins`.
    pub fn evict_host(&mut self, tokens: usize, keep_twins: bool) -> Freed {
        let mut freed = Freed::default();
        if self.host.write_back && !keep_twins {
            self.reclaim_twins(tokens, &mut freed);
        }
        while freed.tokens < tokens {
            let Some(at) = self.orders[HOST].first() else {
                break;
            };
            self.tell_removed(at, false);
            self.empty_host(at, &mut freed);
            self.remove(at);
        }
        freed
    }

    fn empty_host(&mut self, at: u32, freed: &mut Freed) {
        if let Some(slots) = self.cell_mut(at).host.take() {
            freed.tokens += slots.len();
            freed.host.push(slots);
        }
    }

    /// Gives copies up that the device has as well: first those of nodes that will not leave the
    /// device soon.
    fn reclaim_twins(&mut self, tokens: usize, freed: &mut Freed) {
        let mut swept = Vec::new();
        for spares_leaves in [true, false] {
            let twins: Vec<_> = self.twins.values().copied().collect();
            for at in twins {
                if freed.tokens >= tokens {
                    break;
                }
                let cell = self.cell(at);
                if cell.device.is_none() || cell.host.is_none() {
                    swept.push(at);
                    continue;
                }
                let is_spared = spares_leaves && cell.ranks[DEVICE].is_some();
                let is_held = cell.host_leases > 0 || cell.pins > 0;
                if is_spared || is_held || !self.is_twin(at) {
                    continue;
                }
                self.tell_removed(at, false);
                self.empty_host(at, freed);
                self.refresh(at);
                let folded = self.reclaimed * FOLD_FACTOR + (self.handle(at).0 & FOLD_MASK) + 1;
                self.reclaimed = folded & FOLD_MASK;
                swept.push(at);
            }
        }
        for at in swept {
            self.untrack_twin(at);
        }
    }

    /// Removes a node that is on no tier, and what is left of its path without children or data.
    fn remove(&mut self, at: u32) {
        let mut parent = self.parent(at);
        self.unlink(at);
        self.refresh(parent);
        while !self.is_root_at(parent) && self.tree.node(parent).is_leaf() {
            let cell = self.cell(parent);
            let is_used = cell.leases > 0 || cell.host_leases > 0;
            if is_used || cell.device.is_some() || cell.host.is_some() {
                break;
            }
            let above = self.parent(parent);
            self.unlink(parent);
            self.refresh(above);
            parent = above;
        }
        let is_spent = self.is_root_at(parent) && self.tree.node(parent).is_leaf();
        if is_spent && parent != self.root && self.walking.is_none() {
            if let Some(space) = self.spaces.remove(&parent) {
                self.roots.remove(&space.name);
            }
            self.tree.remove_root(parent);
        }
    }

    fn unlink(&mut self, at: u32) {
        self.unrank(at);
        self.untrack_twin(at);
        self.shorten_pins(at);
        self.shorten_ends(at);
        self.retention.forget(at);
        if let Some(agent) = &mut self.agent {
            agent.forget(at);
        }
        self.tree.remove(at);
        *self.cell_mut(at) = super::cell::Cell::default();
    }
}
