//! A request's claim on a span of pages.

use crate::NamespaceId;
use crate::node::NIL;
use crate::policy::agent::Said;
use rootstock_memory::{CopyId, Nanos, PageId, Pages, ReplicaId, StepId};
use std::num::NonZeroU32;

/// Pages that the lease owns itself, because the tree has others for the same tokens or no room
/// for a node.
#[derive(Debug)]
pub(crate) struct Kept {
    /// Page index in the request, for each of `pages`; ascending.
    pub(crate) at: Vec<u32>,
    pub(crate) pages: Pages,
    /// Pages at the end of the lease that are not in the tree.
    pub(crate) tail: u32,
    /// Last step that may touch them.
    pub(crate) busy_until: Option<StepId>,
}

/// Keeps the first `len_tokens` of a request on the device. It covers a span, not a node: splits
/// change neither what it covers nor what it returns. Ended by [`crate::PrefixCache::end`]; a
/// lease that is dropped instead is a bug that debug builds report.
#[derive(Debug)]
#[must_use = "a lease must be ended"]
pub struct Lease {
    pub(crate) ns: NamespaceId,
    pub(crate) replica: ReplicaId,
    /// A node at or below the last one that is covered; the lease holds it in the tree.
    pub(crate) node: u32,
    /// Pages covered in the tree.
    pub(crate) pages: u32,
    pub(crate) page_tokens: u32,
    /// First page that this lease put into the tree itself.
    pub(crate) own_from: u32,
    /// Up to where those pages lie in a leaf that it had found and grew, and how often that had
    /// been matched by then.
    pub(crate) grown: (u32, u32),
    pub(crate) kept: Option<Box<Kept>>,
    /// What was matched below the device: last node, its generation, pages up to its end.
    pub(crate) ahead: Option<(u32, NonZeroU32, u32)>,
    /// The copy that brings it up.
    pub(crate) copy: Option<CopyId>,
    pub(crate) arrived: Nanos,
    /// Whole pages of the prompt that was looked up.
    pub(crate) asked_pages: u32,
    /// What the request says about itself.
    pub(crate) said: Said,
}

impl Lease {
    /// Tokens covered.
    pub const fn len_tokens(&self) -> u32 {
        self.len_pages() * self.page_tokens
    }

    /// Pages covered.
    pub const fn len_pages(&self) -> u32 {
        self.pages + self.tail()
    }

    /// The namespace.
    pub const fn namespace(&self) -> NamespaceId {
        self.ns
    }

    /// The replica whose device pages it keeps.
    pub const fn replica(&self) -> ReplicaId {
        self.replica
    }

    /// How often a node that begins at page `depth` was matched, where nobody has matched it since
    /// this lease put it in.
    pub(crate) const fn own_hits(&self, depth: u32) -> u32 {
        if depth < self.grown.0 {
            self.grown.1
        } else {
            0
        }
    }

    pub(crate) const fn tail(&self) -> u32 {
        match &self.kept {
            Some(kept) => kept.tail,
            None => 0,
        }
    }

    /// The page that the request itself uses at `page_index`, where it is not the tree's.
    pub(crate) fn kept_pages(&self) -> impl Iterator<Item = (u32, PageId)> {
        let kept = self.kept.iter();
        kept.flat_map(|kept| {
            kept.at
                .iter()
                .copied()
                .zip(kept.pages.ids().iter().copied())
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        debug_assert!(
            self.node == NIL || std::thread::panicking(),
            "a lease of {} pages was dropped, not ended",
            self.pages
        );
    }
}
