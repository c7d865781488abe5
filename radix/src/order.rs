//! The eviction order of one tier: which unleased node goes first. It changes only when a node's
//! key changes, so that evicting k pages never scans the tree.
//!
//! *Recency* is one intrusive list, oldest first. A path is put in leaf first, and a parent is
//! never used less recently than its child, so children lie ahead of their parents and the head
//! is always a leaf. *Ranked* is an ordered set of the leaves by (rank, node).

use crate::node::{NIL, Node};
use crate::tier::Span;
use std::collections::BTreeSet;

/// Sorts before another: evicted first.
pub(crate) type Rank = (i64, u64);

/// Place of a node in the list of one tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    pub(crate) prev: u32,
    pub(crate) next: u32,
    pub(crate) listed: bool,
}

impl Links {
    pub(crate) const NONE: Self = Self {
        prev: NIL,
        next: NIL,
        listed: false,
    };
}

/// How nodes are ranked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ranking {
    Recency,
    Priority,
}

impl Ranking {
    /// Lower goes first. What is spent goes before all else.
    pub(crate) fn rank(self, node: &Node, span: &Span) -> Rank {
        let class = match self {
            Self::Recency => 0,
            Self::Priority => i64::from(node.priority),
        };
        (if span.spent { i64::MIN } else { class }, span.stamp)
    }
}

/// Intrusive list; the links are in a vector indexed by node.
#[derive(Debug, Default)]
pub(crate) struct List {
    pub(crate) links: Vec<Links>,
    pub(crate) ends: Option<(u32, u32)>,
}

impl List {
    fn grow(&mut self, at: u32) {
        if self.links.len() <= at as usize {
            self.links.resize(at as usize + 1, Links::NONE);
        }
    }

    /// Puts `at` behind `before`; at the front when that is `None`.
    fn insert(&mut self, at: u32, before: Option<u32>) {
        self.grow(at);
        assert!(
            !self.links[at as usize].listed,
            "node {at} is listed already"
        );
        let prev = before.unwrap_or(NIL);
        let next = match (before, self.ends) {
            (Some(before), _) => self.links[before as usize].next,
            (None, Some((head, _))) => head,
            (None, None) => NIL,
        };
        self.links[at as usize] = Links {
            prev,
            next,
            listed: true,
        };
        let (mut head, mut tail) = self.ends.unwrap_or((at, at));
        if prev == NIL {
            head = at;
        } else {
            self.links[prev as usize].next = at;
        }
        if next == NIL {
            tail = at;
        } else {
            self.links[next as usize].prev = at;
        }
        self.ends = Some((head, tail));
    }

    fn remove(&mut self, at: u32) {
        let Links { prev, next, listed } = self.links[at as usize];
        assert!(listed, "node {at} is listed");
        self.links[at as usize] = Links::NONE;
        let (mut head, mut tail) = self.ends.expect("a listed node has a list");
        if prev == NIL {
            head = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next == NIL {
            tail = prev;
        } else {
            self.links[next as usize].prev = prev;
        }
        self.ends = (head != NIL).then_some((head, tail));
    }
}

/// The order of one tier.
#[derive(Debug)]
pub(crate) enum Order {
    /// All unleased nodes, oldest first.
    Recency(List),
    /// The unleased nodes without a child in this tier.
    Ranked(Ranking, BTreeSet<(Rank, u32)>),
}

impl Order {
    pub(crate) fn new(ranking: Ranking) -> Self {
        match ranking {
            Ranking::Recency => Self::Recency(List::default()),
            Ranking::Priority => Self::Ranked(ranking, BTreeSet::new()),
        }
    }

    /// `at` lost its last lease. Paths come leaf first; `below` is the node that came before on
    /// this path. `rank` is its rank if it is a leaf in this tier.
    pub(crate) fn enter(&mut self, at: u32, spent: bool, below: Option<u32>) {
        if let Self::Recency(list) = self {
            let behind = if spent {
                below
            } else {
                list.ends.map(|(_, tail)| tail)
            };
            list.insert(at, behind);
        }
    }

    /// `at` gets its first lease, or is removed.
    pub(crate) fn leave(&mut self, at: u32) {
        if let Self::Recency(list) = self {
            list.remove(at);
        }
    }

    /// `at` became an unleased leaf in this tier, or its key has changed.
    pub(crate) fn rank(&mut self, at: u32, node: &Node, span: &Span) {
        if let Self::Ranked(ranking, set) = self {
            let new = set.insert((ranking.rank(node, span), at));
            assert!(new, "node {at} is ranked once");
        }
    }

    /// `at` stops being an unleased leaf, or its key is about to change.
    pub(crate) fn unrank(&mut self, at: u32, node: &Node, span: &Span) {
        if let Self::Ranked(ranking, set) = self {
            let was = set.remove(&(ranking.rank(node, span), at));
            assert!(was, "node {at} is ranked");
        }
    }

    /// The unleased `lower` was split; `upper` is its new parent and not a leaf.
    pub(crate) fn split(&mut self, lower: u32, upper: u32) {
        if let Self::Recency(list) = self {
            list.insert(upper, Some(lower));
        }
    }

    /// Who goes first.
    pub(crate) fn first(&self) -> Option<u32> {
        match self {
            Self::Recency(list) => list.ends.map(|(head, _)| head),
            Self::Ranked(_, set) => set.first().map(|&(_, at)| at),
        }
    }
}
