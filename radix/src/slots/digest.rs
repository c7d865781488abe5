//! Names of pages, chained over all tokens before them, and the events that carry them.
//!
//! A node has the names of its pages from the start when events are wanted or stores are below;
//! otherwise [`SlotTree::name_all`] gives them to those that have none.

use super::{Handle, SlotError, SlotTree, SpaceName};
use crate::Token;

/// Name of a page.
pub type Digest = [u8; 32];

/// Names a page that follows one of the given name.
pub type Hasher = fn(Option<&Digest>, &[Token]) -> Digest;

/// Something that a router needs to know. Hashes are the first eight bytes of names, big endian.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotEvent {
    /// Pages came into a tier.
    Stored {
        /// Their namespace.
        space: SpaceName,
        /// Their names.
        hashes: Vec<i64>,
        /// Name of the page before the first one.
        parent: Option<i64>,
        /// Their tokens.
        tokens: Vec<Token>,
        /// Whether the tier is the device.
        device: bool,
        /// The session that brought them.
        session: Option<String>,
    },
    /// Pages left a tier.
    Removed {
        /// Their namespace.
        space: SpaceName,
        /// Their names.
        hashes: Vec<i64>,
        /// Whether the tier is the device.
        device: bool,
    },
}

fn short(digest: &Digest) -> i64 {
    let mut head = [0; 8];
    head.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(head)
}

impl SlotTree {
    /// Names the pages of a new node, where names are needed.
    pub(super) fn name(&mut self, at: u32) {
        if self.config.events || self.host.storage {
            self.name_for_stores(at);
        }
    }

    fn chain(&self, at: u32, before: Option<Digest>) -> Vec<Digest> {
        let edge = self.tree.tokens_from(self.tree.node(at), 0);
        let pages = edge.chunks_exact(self.tree.page_tokens());
        let chained = pages.scan(before, |before, page| {
            let digest = (self.config.hasher)(before.as_ref(), page);
            *before = Some(digest);
            Some(digest)
        });
        chained.collect()
    }

    fn name_for_stores(&mut self, at: u32) {
        if self.cell(at).digests.is_some() {
            return;
        }
        let parent = self.parent(at);
        let before = match self.spaces.get(&parent) {
            Some(space) => space.seeds[0],
            None => self.last_name(parent),
        };
        self.cell_mut(at).digests = Some(self.chain(at, before));
    }

    fn last_name(&self, at: u32) -> Option<Digest> {
        self.cell(at).digests.as_ref()?.last().copied()
    }

    /// Names of the pages of a path for events, given to whatever has none.
    fn name_for_events(&mut self, at: u32) {
        self.name_for_stores(at);
        let root = self.tree.root_of(at);
        if self.spaces[&root].name.is_common() {
            return;
        }
        let mut open = Vec::new();
        let mut above = at;
        while above != root && self.cell(above).event_digests.is_none() {
            open.push(above);
            above = self.parent(above);
        }
        while let Some(next) = open.pop() {
            let parent = self.parent(next);
            let before = match &self.cell(parent).event_digests {
                Some(digests) => digests.last().copied(),
                None => self.spaces.get(&parent).and_then(|space| space.seeds[1]),
            };
            self.cell_mut(next).event_digests = Some(self.chain(next, before));
        }
    }

    fn event_names(&self, at: u32) -> Option<&Vec<Digest>> {
        let cell = self.cell(at);
        cell.event_digests.as_ref().or(cell.digests.as_ref())
    }

    fn space_of(&self, at: u32) -> SpaceName {
        self.spaces[&self.tree.root_of(at)].name.clone()
    }

    pub(super) fn tell_stored(&mut self, at: u32, device: bool, session: Option<&str>) {
        if !self.config.events {
            return;
        }
        self.name_for_events(at);
        let parent = self.parent(at);
        let before = self.event_names(parent).and_then(|names| names.last());
        let names = self.event_names(at).into_iter().flatten();
        let event = SlotEvent::Stored {
            space: self.space_of(at),
            hashes: names.map(short).collect(),
            parent: before.filter(|_| !self.is_root_at(parent)).map(short),
            tokens: self.tree.tokens_from(self.tree.node(at), 0),
            device,
            session: session.map(str::to_owned),
        };
        self.events.push(event);
    }

    pub(super) fn tell_removed(&mut self, at: u32, device: bool) {
        if !self.config.events {
            return;
        }
        self.name_for_events(at);
        let names = self.event_names(at).into_iter().flatten();
        let event = SlotEvent::Removed {
            space: self.space_of(at),
            hashes: names.map(short).collect(),
            device,
        };
        self.events.push(event);
    }

    /// What happened since the last call, one event a node and change.
    pub fn take_events(&mut self) -> Vec<SlotEvent> {
        std::mem::take(&mut self.events)
    }

    /// Names all pages that have no name yet, parents first; returns how many nodes that were.
    pub fn name_all(&mut self) -> usize {
        let mut open: Vec<_> = self.spaces.keys().copied().collect();
        let mut named = 0;
        while let Some(at) = open.pop() {
            if !self.is_root_at(at) && self.cell(at).digests.is_none() {
                self.name_for_stores(at);
                named += 1;
            }
            open.extend(self.children(at));
        }
        named
    }

    /// Names of the pages of a node's own edge; none when it was never named.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn names(&self, handle: Handle) -> Result<Option<&[Digest]>, SlotError> {
        Ok(self.cell(self.find(handle)?).digests.as_deref())
    }

    /// Names of all pages before a node's edge, as far up as there are names.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn names_before(&self, handle: Handle) -> Result<Vec<Digest>, SlotError> {
        let at = self.find(handle)?;
        if self.is_root_at(at) {
            return Ok(Vec::new());
        }
        let mut parts = Vec::new();
        let mut above = self.parent(at);
        while let Some(digests) = &self.cell(above).digests {
            parts.push(digests);
            above = self.parent(above);
        }
        Ok(parts.into_iter().rev().flatten().copied().collect())
    }

    /// The namespace of a node; none for the root of all.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn namespace_of(&self, handle: Handle) -> Result<SpaceName, SlotError> {
        Ok(self.space_of(self.find(handle)?))
    }
}
