//! The host tier: copies that are made, loaded back, and found in stores.

use super::digest::Digest;
use super::{Handle, SlotAction, SlotError, SlotTree, SpaceName};
use crate::{ContextKind, Token};

/// What to load for a node: host slots in the order of the path, and whose they are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LoadPlan {
    /// Sources.
    pub slots: Vec<i64>,
    /// Nodes, from the top.
    pub nodes: Vec<Handle>,
}

/// A node to insert below: valid until the tree changes.
#[derive(Clone, Copy, Debug)]
pub struct Place(u32);

/// What became of pages that came from a store.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostInserted {
    /// Tokens at the head that the tree had already: their host slots are the caller's again.
    pub found: usize,
    /// The node at the end, when the host tier has it.
    pub last: Option<Handle>,
    /// They were not taken: what they hang below has no copy.
    pub dropped: bool,
    /// What the caller has to do.
    pub actions: Vec<SlotAction>,
}

impl SlotTree {
    /// The device slots to copy for a node; none when it has a copy.
    ///
    /// # Errors
    /// When the node is gone or not on the device.
    pub fn backup_source(&self, handle: Handle) -> Result<&[i64], SlotError> {
        let cell = self.cell(self.find(handle)?);
        let what = "is not on the device";
        let state = SlotError::State {
            node: handle.0,
            what,
        };
        let slots = cell.device.as_deref().ok_or(state)?;
        Ok(if cell.host.is_some() { &[] } else { slots })
    }

    /// A copy of a node was made to these host slots.
    ///
    /// # Errors
    /// When the node is gone, or the slots are not as many as its tokens.
    pub fn commit_backup(&mut self, handle: Handle, slots: Vec<i64>) -> Result<(), SlotError> {
        let at = self.find(handle)?;
        if slots.is_empty() {
            return Ok(());
        }
        self.fits(at, slots.len())?;
        self.cell_mut(at).host = Some(slots);
        self.refresh(at);
        Ok(())
    }

    fn fits(&self, at: u32, slots: usize) -> Result<(), SlotError> {
        let tokens = self.len_of(at);
        if tokens == slots && !self.is_root_at(at) {
            return Ok(());
        }
        Err(SlotError::Length {
            tokens,
            slots,
            page_tokens: self.config.page_tokens,
        })
    }

    /// What to load so that the path of a node is on the device; nothing while a part of it is
    /// being loaded for another node.
    ///
    /// # Errors
    /// When the node is gone, or a part of its path is nowhere.
    pub fn load_plan(&self, handle: Handle) -> Result<LoadPlan, SlotError> {
        let mut at = self.find(handle)?;
        let mut parts = Vec::new();
        while !self.is_root_at(at) && self.cell(at).device.is_none() {
            let cell = self.cell(at);
            if cell.loading.is_some_and(|other| other != handle) {
                return Ok(LoadPlan::default());
            }
            let what = "is on no tier";
            let state = SlotError::State {
                node: handle.0,
                what,
            };
            parts.push((at, cell.host.as_deref().ok_or(state)?));
            at = self.parent(at);
        }
        let mut plan = LoadPlan::default();
        for (at, slots) in parts.into_iter().rev() {
            plan.slots.extend_from_slice(slots);
            plan.nodes.push(self.handle(at));
        }
        Ok(plan)
    }

    /// The plan is under way into these device slots.
    ///
    /// # Errors
    /// When a node is gone or on the device, or there are fewer slots than tokens.
    pub fn commit_load(
        &mut self,
        handle: Handle,
        nodes: &[Handle],
        slots: &[i64],
    ) -> Result<(), SlotError> {
        let anchor = self.find(handle)?;
        let mut rest = slots;
        for &node in nodes {
            let at = self.find(node)?;
            let tokens = self.len_of(at);
            let part = rest.split_off(..tokens);
            let state = SlotError::State {
                node: node.0,
                what: "is on the device, or has fewer slots than tokens",
            };
            let part = part
                .filter(|_| self.cell(at).device.is_none())
                .ok_or(state)?;
            if self.host.write_back {
                self.cell_mut(at).loading = Some(handle);
            }
            self.fill(at, part.to_vec());
        }
        for &node in nodes {
            let at = self.find(node)?;
            self.tell_stored(at, true, None);
        }
        self.refresh(anchor);
        Ok(())
    }

    /// What was loaded for a node has arrived.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn finish_load(&mut self, handle: Handle) -> Result<(), SlotError> {
        let mut at = self.find(handle)?;
        while !self.is_root_at(at) {
            let is_its = self.cell(at).loading == Some(handle);
            if is_its {
                self.cell_mut(at).loading = None;
            }
            if is_its || !self.host.write_back {
                self.track_twin(at);
            }
            at = self.parent(at);
        }
        Ok(())
    }

    /// One copy is under way for all these nodes; returns them from the top.
    ///
    /// # Errors
    /// When a node is gone, or another copy of it is under way.
    pub fn begin_write(&mut self, nodes: &[Handle], ack: u64) -> Result<Vec<Handle>, SlotError> {
        let mut marked = Vec::with_capacity(nodes.len());
        for &node in nodes {
            let at = self.find(node)?;
            if self.cell(at).writing.is_some_and(|other| other != ack) {
                let what = "is being copied under another acknowledgment";
                return Err(SlotError::State { node: node.0, what });
            }
            self.cell_mut(at).writing = Some(ack);
            marked.push((self.tree.node(at).depth, node));
        }
        marked.sort_unstable();
        Ok(marked.into_iter().map(|(_, node)| node).collect())
    }

    /// The copy of these nodes has arrived.
    ///
    /// # Errors
    /// When a node is gone.
    pub fn finish_write(&mut self, nodes: &[Handle], ack: u64) -> Result<(), SlotError> {
        for &node in nodes {
            let at = self.find(node)?;
            if self.cell(at).writing == Some(ack) {
                self.cell_mut(at).writing = None;
                self.track_twin(at);
            }
            self.tell_stored(at, false, None);
        }
        Ok(())
    }

    /// Where to insert in a namespace when the host names the root of all.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn place_in(
        &mut self,
        below: Handle,
        space: &SpaceName,
        seeds: [Option<Digest>; 2],
    ) -> Result<Place, SlotError> {
        let at = self.find(below)?;
        if at == self.root {
            return Ok(Place(self.space(space, seeds)));
        }
        Ok(Place(at))
    }

    /// Pages that came from a store into host slots, below a node. They are not taken where
    /// copies are made early and what is above them has none.
    ///
    /// # Errors
    /// When the node is gone, or the key is not of whole pages with a slot and a name each.
    pub fn insert_host(
        &mut self,
        below: Place,
        tokens: &[Token],
        slots: &[i64],
        names: &[Digest],
    ) -> Result<HostInserted, SlotError> {
        let mut at = below.0;
        let page_tokens = self.tree.page_tokens();
        if tokens.len() != slots.len() || tokens.len() != names.len() * page_tokens {
            return Err(SlotError::Length {
                tokens: tokens.len(),
                slots: slots.len(),
                page_tokens: self.config.page_tokens,
            });
        }
        self.touch(at);
        let mut result = HostInserted::default();
        let (mut done, mut has_refilled) = (0, false);
        while let Some(child) = self.tree.child(at, &tokens[done..]) {
            let pages = self.tree.common_pages(child, &tokens[done..]);
            self.touch(child);
            at = child;
            if pages < self.tree.node(child).pages {
                let (upper, action) = self.split(child, pages);
                result.actions.extend(action);
                at = upper;
            }
            let end = done + self.len_of(at);
            if !self.host.write_back && self.cell(at).host.is_some() {
                result.found += end - done;
            } else if !self.host.write_back {
                let named = &names[done / page_tokens..end / page_tokens];
                self.refill(at, &slots[done..end], named);
                has_refilled = true;
            }
            done = end;
        }
        if self.host.write_back {
            result.found = done;
        }
        let is_root = self.is_root_at(at);
        let is_backed = self.cell(at).host.is_some();
        if done == tokens.len() {
            let is_there = !is_root && (has_refilled || is_backed) && done > 0;
            result.last = is_there.then(|| self.handle(at));
        } else if !is_root && !is_backed && !self.host.write_back {
            result.dropped = true;
        } else {
            let priority = self.cell(if is_root { self.root } else { at }).priority;
            at = self.add(at, &tokens[done..], priority, ContextKind::Unknown);
            self.judge_arrival(at);
            let cell = self.cell_mut(at);
            cell.digests = Some(names[done / page_tokens..].to_vec());
            cell.host = Some(slots[done..].to_vec());
            self.refresh(at);
            let parent = self.parent(at);
            self.refresh(parent);
            result.last = Some(self.handle(at));
            self.tell_stored(at, false, None);
        }
        Ok(result)
    }

    /// A node that is on the device gets a host copy that came from a store.
    fn refill(&mut self, at: u32, slots: &[i64], names: &[Digest]) {
        let cell = self.cell_mut(at);
        cell.host = Some(slots.to_vec());
        cell.digests.get_or_insert_with(|| names.to_vec());
        self.tell_stored(at, false, None);
        self.refresh(at);
        let parent = self.parent(at);
        self.refresh(parent);
        self.track_twin(at);
    }

    /// Whether every copy has a copy above it.
    #[must_use]
    pub fn copies_are_prefixes(&self) -> bool {
        self.all_nodes().all(|at| {
            let parent = self.parent(at);
            let is_under = self.is_root_at(parent) || self.cell(parent).host.is_some();
            self.cell(at).host.is_none() || is_under
        })
    }
}
