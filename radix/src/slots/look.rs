//! Lookups, and what the host reads of the tree.

use super::{Handle, SlotAction, SlotError, SlotTree, SpaceName};
use crate::Token;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The host slots of a node, and their tokens.
pub type SlotCopy<'a> = (&'a [i64], Vec<Token>);

/// What a lookup found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotMatch {
    /// Tokens at the head that are on the device.
    pub device_tokens: usize,
    /// The node at their end.
    pub device: Handle,
    /// The node at the end of what any tier has.
    pub best: Handle,
    /// Tokens between the two.
    pub host_tokens: usize,
    /// All tokens found.
    pub tokens: usize,
    /// The last node that was visited, when it is not the root.
    pub visited: Option<Handle>,
    /// A node was cut.
    pub action: Option<SlotAction>,
}

/// A node on the path of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathPart {
    /// The node.
    pub node: Handle,
    /// What it hangs below.
    pub parent: Handle,
    /// Tokens before its edge.
    pub start: usize,
    /// Tokens up to its end.
    pub end: usize,
    /// Its slots on the device, if it is there.
    pub device_tokens: Option<usize>,
    /// How many hang below it.
    pub children: usize,
}

/// One device slot: where its token stands, and the slot before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotRow {
    /// The slot.
    pub slot: i64,
    /// Position of its token.
    pub position: i64,
    /// Slot of the token before; -1 at the head.
    pub before: i64,
}

impl SlotTree {
    /// The longest prefix that is cached. Cuts the node where the key ends or differs, and touches
    /// the path. What is left of the last page is not looked at.
    pub fn find_prefix(&mut self, space: &SpaceName, tokens: &[Token]) -> SlotMatch {
        let mut at = self.roots.get(space).copied().unwrap_or(self.root);
        let (mut best, mut device) = (at, at);
        let (mut found, mut device_tokens, mut action) = (0, 0, None);
        let is_known = self.roots.contains_key(space);
        while let Some(child) = self.tree.child(at, &tokens[found..]).filter(|_| is_known) {
            let cell = self.cell(child);
            if cell.device.is_none() && cell.host.is_none() {
                break;
            }
            let pages = self.tree.common_pages(child, &tokens[found..]);
            let is_part = pages < self.tree.node(child).pages;
            at = child;
            if is_part {
                (at, action) = self.split(child, pages);
            }
            found += self.len_of(at);
            let cell = self.cell(at);
            if cell.device.is_some() {
                (device, device_tokens) = (at, found);
            }
            if cell.device.is_some() || self.host.enabled {
                best = at;
            }
            if is_part {
                break;
            }
        }
        self.touch_path(best);
        let root = is_known && !self.is_root_at(at);
        SlotMatch {
            device_tokens,
            device: self.handle(device),
            best: self.handle(best),
            host_tokens: self.host_tokens_between(best, device),
            tokens: found,
            visited: root.then(|| self.handle(at)),
            action,
        }
    }

    /// One reading of the clock for a path, a bit less for each parent.
    fn touch_path(&mut self, last: u32) {
        let mut now = self.tick();
        let mut at = last;
        while !self.is_root_at(at) {
            let cell = self.cell_mut(at);
            cell.used = now;
            cell.spent = false;
            self.retention.touch(at, self.now);
            self.refresh(at);
            now -= 1;
            at = self.parent(at);
        }
    }

    fn host_tokens_between(&self, mut at: u32, device: u32) -> usize {
        let mut tokens = 0;
        while at != device && !self.is_root_at(at) {
            tokens += self.cell(at).host.as_ref().map_or(0, Vec::len);
            at = self.parent(at);
        }
        tokens
    }

    /// The longest prefix on the device, without touching or cutting anything: its tokens, its
    /// last node, and the tokens up to that node's end.
    #[must_use]
    pub fn peek_device(&self, space: &SpaceName, tokens: &[Token]) -> (usize, Handle, usize) {
        let Some(&root) = self.roots.get(space) else {
            return (0, self.root(), 0);
        };
        let (mut at, mut found, mut held) = (root, 0, 0);
        while let Some(child) = self.tree.child(at, &tokens[found..]) {
            if self.cell(child).device.is_none() {
                break;
            }
            let pages = self.tree.common_pages(child, &tokens[found..]);
            at = child;
            found += pages as usize * self.tree.page_tokens();
            held += self.len_of(child);
            if pages < self.tree.node(child).pages {
                break;
            }
        }
        (found, self.handle(at), held)
    }

    /// Device slots from below `until` down to `from`.
    ///
    /// # Errors
    /// When a node is gone, not on the path, or not on the device.
    pub fn device_slots(&self, from: Handle, until: Handle) -> Result<Vec<i64>, SlotError> {
        let (mut at, top) = (self.find(from)?, self.find(until)?);
        let mut parts = Vec::new();
        while at != top && !(top == self.root && self.is_root_at(at)) {
            let state = SlotError::State {
                node: from.0,
                what: "is not on the device, or not below the other",
            };
            if self.is_root_at(at) {
                return Err(state);
            }
            parts.push(self.cell(at).device.as_deref().ok_or(state)?);
            at = self.parent(at);
        }
        Ok(parts.into_iter().rev().flatten().copied().collect())
    }

    /// Whether the device has a node, and whether the host tier has it.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn places(&self, handle: Handle) -> Result<(bool, bool), SlotError> {
        let at = self.find(handle)?;
        let cell = self.cell(at);
        let is_here = cell.device.is_some() || self.is_root_at(at);
        Ok((is_here, cell.host.is_some()))
    }

    /// The device slots of a node's own edge.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn own_slots(&self, handle: Handle) -> Result<Option<&[i64]>, SlotError> {
        Ok(self.cell(self.find(handle)?).device.as_deref())
    }

    /// The host slots and tokens of a node's own edge.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn own_copy(&self, handle: Handle) -> Result<Option<SlotCopy<'_>>, SlotError> {
        let at = self.find(handle)?;
        let slots = self.cell(at).host.as_deref();
        Ok(slots.map(|slots| (slots, self.tree.tokens_from(self.tree.node(at), 0))))
    }

    /// Whether a node is the root of all.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn is_root(&self, handle: Handle) -> Result<bool, SlotError> {
        Ok(self.is_root_at(self.find(handle)?))
    }

    pub(super) fn all_nodes(&self) -> impl Iterator<Item = u32> {
        let all = self.tree.nodes.iter().filter(|(_, node)| !node.is_root());
        all.map(|(at, _)| crate::tree::narrow(at))
    }

    /// The path of a node, from the top, without the root.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn path(&self, handle: Handle) -> Result<Vec<PathPart>, SlotError> {
        let mut at = self.find(handle)?;
        let page_tokens = self.tree.page_tokens();
        let mut path = Vec::new();
        while !self.is_root_at(at) {
            let node = self.tree.node(at);
            path.push(PathPart {
                node: self.handle(at),
                parent: self.handle(node.parent),
                start: node.depth as usize * page_tokens,
                end: node.end() as usize * page_tokens,
                device_tokens: self.cell(at).device.as_ref().map(Vec::len),
                children: self.children(at).count(),
            });
            at = node.parent;
        }
        path.reverse();
        Ok(path)
    }

    /// Places of the nodes in an order that visits the branch with most of them first, deepest
    /// first within it.
    ///
    /// # Errors
    /// When a node is gone.
    pub fn order_by_weight(&self, nodes: &[Handle]) -> Result<Vec<usize>, SlotError> {
        let mut weights = BTreeMap::<u32, (usize, Vec<usize>)>::new();
        for (place, &node) in nodes.iter().enumerate() {
            let mut at = self.find(node)?;
            if self.is_root_at(at) {
                at = self.root;
            }
            weights.entry(at).or_default().1.push(place);
            while !self.is_root_at(at) {
                weights.entry(at).or_default().0 += 1;
                at = self.parent(at);
            }
        }
        let mut below = BTreeMap::<u32, Vec<_>>::new();
        for (&at, (weight, _)) in &weights {
            if self.is_root_at(at) {
                continue;
            }
            let parent = self.parent(at);
            let parent = if self.is_root_at(parent) {
                self.root
            } else {
                parent
            };
            let place = (Reverse(*weight), self.cell(at).created, at);
            below.entry(parent).or_default().push(place);
        }
        let mut order = Vec::with_capacity(nodes.len());
        let mut open = vec![(self.root, false)];
        while let Some((at, is_left)) = open.pop() {
            if is_left {
                order.extend(weights.get(&at).into_iter().flat_map(|(_, places)| places));
                continue;
            }
            open.push((at, true));
            let mut children = below.remove(&at).unwrap_or_default();
            children.sort_unstable();
            open.extend(children.into_iter().rev().map(|(_, _, at)| (at, false)));
        }
        Ok(order)
    }

    /// Tokens on the device.
    #[must_use]
    pub fn device_tokens(&self) -> u64 {
        self.evictable + self.protected
    }

    /// All device slots with their places; those of leased nodes only where asked for.
    #[must_use]
    pub fn rows(&self, with_leased: bool) -> Vec<SlotRow> {
        let mut rows = Vec::new();
        let mut open: Vec<_> = self.spaces.keys().map(|&at| (at, -1)).collect();
        while let Some((at, mut before)) = open.pop() {
            let cell = self.cell(at);
            let start = self.tree.node(at).depth as usize * self.tree.page_tokens();
            for (offset, &slot) in cell.device.iter().flatten().enumerate() {
                if with_leased || cell.leases == 0 {
                    let position = i64::try_from(start + offset).unwrap_or(i64::MAX);
                    rows.push(SlotRow {
                        slot,
                        position,
                        before,
                    });
                }
                before = slot;
            }
            open.extend(self.children(at).map(|child| (child, before)));
        }
        rows
    }
}
