//! A vertex of the tree: an edge of whole pages, and where it hangs. One cache line.
//!
//! Tokens lie in *runs*: one run holds the tokens of a chain of nodes, ancestor first. A split
//! cuts the edge and moves no token; descendants always go before their ancestors, so what is
//! alive in a run is a prefix of it.

use crate::ContextKind;
use std::num::NonZeroU32;

/// No node.
pub(crate) const NIL: u32 = u32::MAX;

/// Whether programs know their prefixes by the end of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ends {
    /// None does.
    None,
    /// A program does.
    One,
    /// Several do.
    Many,
}

/// The hot part of a node.
#[derive(Debug)]
pub(crate) struct Node {
    /// Hash of (parent, first page): its key in the child table.
    pub(crate) hash: u64,
    /// When it came in, as a count of calls.
    pub(crate) created: u64,
    pub(crate) parent: u32,
    /// Differs between nodes that used the same index one after the other.
    pub(crate) generation: NonZeroU32,
    pub(crate) run: u32,
    /// First page of the edge in its run.
    pub(crate) start: u32,
    /// Pages of the edge; 0 for a root.
    pub(crate) pages: u32,
    /// Pages before the edge, from the root.
    pub(crate) depth: u32,
    pub(crate) first_child: u32,
    pub(crate) next_sibling: u32,
    pub(crate) prev_sibling: u32,
    pub(crate) priority: i32,
    /// How often it was matched.
    pub(crate) hits: u32,
    pub(crate) kind: ContextKind,
    pub(crate) ends: Ends,
}

const _: () = assert!(size_of::<Node>() <= 64);
// The generation leaves a niche, so that the arena adds nothing.
const _: () = assert!(size_of::<Option<Node>>() <= 64);

impl Node {
    pub(crate) const fn is_root(&self) -> bool {
        self.parent == NIL
    }

    pub(crate) const fn is_leaf(&self) -> bool {
        self.first_child == NIL
    }

    /// Pages from the root to the end of the edge.
    pub(crate) const fn end(&self) -> u32 {
        self.depth + self.pages
    }
}
