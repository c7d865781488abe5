//! A vertex of the tree: an edge of whole pages, and where it hangs. One cache line, and a buffer
//! of its tokens: who has found the node has what leads to them. A split copies the lower part of
//! the edge, once.

use crate::ContextKind;
use crate::edge::Edge;
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

/// A count of calls in six bytes, which are enough for 90 years of a hundred thousand a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Moment([u16; 3]);

impl Moment {
    #[expect(clippy::cast_possible_truncation, reason = "cut into parts")]
    pub(crate) const fn new(count: u64) -> Self {
        Self([count as u16, (count >> 16) as u16, (count >> 32) as u16])
    }

    pub(crate) fn get(self) -> u64 {
        let [low, middle, high] = self.0.map(u64::from);
        low | middle << 16 | high << 32
    }
}

/// A node.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Node {
    /// The tokens of the edge, and behind them room for more.
    pub(crate) edge: Edge,
    /// Hash of (parent, first page): its key in the child table.
    pub(crate) hash: u32,
    pub(crate) parent: u32,
    /// Differs between nodes that used the same index one after the other.
    pub(crate) generation: NonZeroU32,
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
    /// When it came in, as a count of calls.
    pub(crate) created: Moment,
    pub(crate) kind: ContextKind,
    pub(crate) ends: Ends,
}

const _: () = assert!(size_of::<Node>() == 64);
// What is never null leaves a niche, so that the arena adds nothing.
const _: () = assert!(size_of::<Option<Node>>() == 64);

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
