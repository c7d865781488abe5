//! The eviction order of one tier: which unleased node goes first. It changes only when a node's
//! key changes, so that evicting k pages never scans the tree.
//!
//! *Recency* is one intrusive list, oldest first. A path is put in leaf first, and a parent is
//! never used less recently than its child, so children lie ahead of their parents and the head
//! is always a leaf. *Ranked* is an ordered set of the leaves by (rank, node).

use crate::PolicyKind;
use crate::node::{NIL, Node};
use crate::policy::agent::{Agent, Shelf};
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
    /// Fewest matches first.
    Frequency,
    FirstIn,
    LastIn,
    MostRecent,
    /// What was never matched goes before what was.
    Segmented,
    /// By learned worth.
    Worth,
}

impl Ranking {
    pub(crate) const fn of(policy: PolicyKind) -> Self {
        match policy {
            PolicyKind::Lru => Self::Recency,
            PolicyKind::Priority => Self::Priority,
            PolicyKind::Lfu => Self::Frequency,
            PolicyKind::Fifo => Self::FirstIn,
            PolicyKind::Filo => Self::LastIn,
            PolicyKind::Mru => Self::MostRecent,
            PolicyKind::Slru => Self::Segmented,
            PolicyKind::Agent => Self::Worth,
        }
    }

    /// Lower goes first. What is spent goes before all else.
    pub(crate) fn rank(self, node: &Node, span: &Span) -> Rank {
        if span.spent {
            return (i64::MIN, span.stamp);
        }
        match self {
            Self::Recency => (0, span.stamp),
            Self::Priority | Self::Worth => (node.priority.into(), span.stamp),
            Self::Frequency => (node.hits.into(), span.stamp),
            Self::FirstIn => (0, node.created),
            Self::LastIn => (0, u64::MAX - node.created),
            Self::MostRecent => (0, u64::MAX - span.stamp),
            Self::Segmented => ((node.hits > 0).into(), span.stamp),
        }
    }
}

/// Intrusive list; the links are in a vector indexed by node.
#[derive(Debug, Default)]
pub(crate) struct List {
    pub(crate) links: Vec<Links>,
    pub(crate) ends: Option<(u32, u32)>,
}

impl List {
    /// From the oldest on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        let first = self.ends.map(|(head, _)| head);
        std::iter::successors(first, |&at| {
            let next = self.links[at as usize].next;
            (next != NIL).then_some(next)
        })
    }

    /// From the youngest on.
    fn iter_back(&self) -> impl Iterator<Item = u32> {
        let last = self.ends.map(|(_, tail)| tail);
        std::iter::successors(last, |&at| {
            let prev = self.links[at as usize].prev;
            (prev != NIL).then_some(prev)
        })
    }

    fn grow(&mut self, at: u32) {
        if self.links.len() <= at as usize {
            self.links.resize(at as usize + 1, Links::NONE);
        }
    }

    /// Puts `at` behind `before`; at the front when that is `None`.
    pub(crate) fn insert(&mut self, at: u32, before: Option<u32>) {
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

    pub(crate) fn holds(&self, at: u32) -> bool {
        self.links
            .get(at as usize)
            .is_some_and(|links| links.listed)
    }

    pub(crate) fn remove(&mut self, at: u32) {
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

/// Where a node enters the order of recency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// As the one used last. Paths come leaf first.
    Tail,
    /// As the first to go, but behind the node named, which hangs below it.
    Front(Option<u32>),
    /// Where its stamp says. Costs a search from the youngest.
    ByStamp,
}

/// The order of one tier.
#[derive(Debug)]
pub(crate) enum Order {
    /// All nodes without lease or pin, oldest first. Copies do not change it: what they keep is
    /// passed over.
    Recency(List),
    /// The candidates.
    Ranked(Ranking, BTreeSet<(Rank, u32)>),
    /// The candidates, by priority and learned worth.
    Worth(Box<Shelf>),
}

impl Order {
    pub(crate) fn new(ranking: Ranking) -> Self {
        match ranking {
            Ranking::Recency => Self::Recency(List::default()),
            Ranking::Worth => Self::Worth(Box::new(Shelf::new(Agent::first_ranks()))),
            Ranking::Priority
            | Ranking::Frequency
            | Ranking::FirstIn
            | Ranking::LastIn
            | Ranking::MostRecent
            | Ranking::Segmented => Self::ranked(ranking),
        }
    }

    pub(crate) const fn ranked(ranking: Ranking) -> Self {
        Self::Ranked(ranking, BTreeSet::new())
    }

    /// `at` lost its last lease or its pin, or came in.
    pub(crate) fn enter(&mut self, at: u32, place: Place, spans: &[Span]) {
        let Self::Recency(list) = self else { return };
        let behind = match place {
            Place::Tail => list.ends.map(|(_, tail)| tail),
            Place::Front(below) => below,
            Place::ByStamp => {
                let stamp = spans[at as usize].stamp;
                // From the youngest on, so that it comes behind its children in any case: what
                // was spent lies in front whatever its stamp.
                list.iter_back()
                    .find(|&one| spans[one as usize].stamp <= stamp)
            }
        };
        list.insert(at, behind);
    }

    /// `at` gets its first lease or a pin, or goes.
    pub(crate) fn leave(&mut self, at: u32) {
        if let Self::Recency(list) = self {
            list.remove(at);
        }
    }

    /// `at` became a candidate, or its key has changed.
    pub(crate) fn rank(&mut self, at: u32, node: &Node, span: &Span) {
        match self {
            Self::Recency(_) => {}
            Self::Ranked(ranking, set) => {
                let new = set.insert((ranking.rank(node, span), at));
                assert!(new, "node {at} is ranked once");
            }
            Self::Worth(shelf) => {
                let priority = if span.spent { i32::MIN } else { node.priority };
                shelf.insert(at, priority, span.stamp);
            }
        }
    }

    /// `at` stops being a candidate, or its key is about to change.
    pub(crate) fn unrank(&mut self, at: u32, node: &Node, span: &Span) {
        match self {
            Self::Recency(_) => {}
            Self::Ranked(ranking, set) => {
                let was = set.remove(&(ranking.rank(node, span), at));
                assert!(was, "node {at} is ranked");
            }
            Self::Worth(shelf) => {
                shelf.remove(at);
            }
        }
    }

    /// The listed `lower` was split; `upper` is its new parent.
    pub(crate) fn split(&mut self, lower: u32, upper: u32) {
        if let Self::Recency(list) = self {
            list.insert(upper, Some(lower));
        }
    }

    /// The cells of learned worth, where the order is by them.
    pub(crate) fn shelf(&mut self) -> Option<&mut Shelf> {
        match self {
            Self::Worth(shelf) => Some(shelf),
            Self::Recency(_) | Self::Ranked(..) => None,
        }
    }

    /// Who goes first. Passes over what copies keep, which is bounded by the copies under way.
    pub(crate) fn first(&mut self, spans: &[Span]) -> Option<u32> {
        match self {
            Self::Recency(list) => list.iter().find(|&at| spans[at as usize].is_candidate()),
            Self::Ranked(_, set) => set.first().map(|&(_, at)| at),
            Self::Worth(shelf) => shelf.first(),
        }
    }
}
