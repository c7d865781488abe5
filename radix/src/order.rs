//! The eviction order of one tier: which unleased node goes first. It changes only when a node's
//! key changes, so that evicting k pages never scans the tree.
//!
//! *Recency* is one intrusive list, oldest first. A path is put in leaf first, and a parent is
//! never used less recently than its child, so children lie ahead of their parents and the head
//! is always a leaf. *Ranked* is an ordered set of the leaves by (rank, node).

use crate::PolicyKind;
use crate::node::{NIL, Node};
use crate::policy::agent::{Agent, Shelf};
use crate::tier::{Seat, Span};
use std::collections::BTreeSet;

/// Sorts before another: evicted first.
pub(crate) type Rank = (i64, u64);

/// Neighbours of a node in a list; with `UNLISTED` as the one before it, it is in none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    pub(crate) prev: u32,
    pub(crate) next: u32,
}

const UNLISTED: u32 = NIL - 1;

impl Links {
    pub(crate) const NONE: Self = Self {
        prev: UNLISTED,
        next: NIL,
    };

    pub(crate) const fn is_listed(self) -> bool {
        self.prev != UNLISTED
    }
}

/// Where the links of a list are.
pub(crate) trait Linked {
    fn links(&self, at: u32) -> Links;
    fn links_mut(&mut self, at: u32) -> &mut Links;
}

impl Linked for [Links] {
    fn links(&self, at: u32) -> Links {
        self[at as usize]
    }

    fn links_mut(&mut self, at: u32) -> &mut Links {
        &mut self[at as usize]
    }
}

impl Linked for [Seat] {
    fn links(&self, at: u32) -> Links {
        self[at as usize].span.links
    }

    fn links_mut(&mut self, at: u32) -> &mut Links {
        &mut self[at as usize].span.links
    }
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

    /// Whether it is by how often nodes were matched.
    pub(crate) const fn counts_hits(self) -> bool {
        matches!(self, Self::Frequency | Self::Segmented)
    }

    /// Whether pages that were used together rank alike, however often and since when they were.
    pub(crate) const fn is_alike_along_a_node(self) -> bool {
        match self {
            Self::Recency | Self::Priority | Self::MostRecent | Self::Worth => true,
            Self::Frequency | Self::FirstIn | Self::LastIn | Self::Segmented => false,
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
            Self::FirstIn => (0, node.created.get()),
            Self::LastIn => (0, u64::MAX - node.created.get()),
            Self::MostRecent => (0, u64::MAX - span.stamp),
            Self::Segmented => ((node.hits > 0).into(), span.stamp),
        }
    }
}

/// The ends of an intrusive list: its oldest and its youngest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends(pub(crate) Option<(u32, u32)>);

impl Ends {
    /// From the oldest on.
    fn iter<L: Linked + ?Sized>(self, all: &L) -> impl Iterator<Item = u32> {
        let first = self.0.map(|(head, _)| head);
        std::iter::successors(first, |&at| {
            Some(all.links(at).next).filter(|at| *at != NIL)
        })
    }

    /// From the youngest on.
    fn iter_back<L: Linked + ?Sized>(self, all: &L) -> impl Iterator<Item = u32> {
        let last = self.0.map(|(_, tail)| tail);
        std::iter::successors(last, |&at| Some(all.links(at).prev).filter(|at| *at != NIL))
    }

    /// Puts `at` behind `before`; at the front when that is `None`.
    fn insert<L: Linked + ?Sized>(&mut self, all: &mut L, at: u32, before: Option<u32>) {
        assert!(!all.links(at).is_listed(), "node {at} is listed already");
        let prev = before.unwrap_or(NIL);
        let next = match (before, self.0) {
            (Some(before), _) => all.links(before).next,
            (None, Some((head, _))) => head,
            (None, None) => NIL,
        };
        *all.links_mut(at) = Links { prev, next };
        let (mut head, mut tail) = self.0.unwrap_or((at, at));
        if prev == NIL {
            head = at;
        } else {
            all.links_mut(prev).next = at;
        }
        if next == NIL {
            tail = at;
        } else {
            all.links_mut(next).prev = at;
        }
        self.0 = Some((head, tail));
    }

    fn remove<L: Linked + ?Sized>(&mut self, all: &mut L, at: u32) {
        let links = std::mem::replace(all.links_mut(at), Links::NONE);
        assert!(links.is_listed(), "node {at} is listed");
        let Links { prev, next } = links;
        let (mut head, mut tail) = self.0.expect("a listed node has a list");
        if prev == NIL {
            head = next;
        } else {
            all.links_mut(prev).next = next;
        }
        if next == NIL {
            tail = prev;
        } else {
            all.links_mut(next).prev = prev;
        }
        self.0 = (head != NIL).then_some((head, tail));
    }
}

/// Intrusive list with its links in a vector of its own.
#[derive(Debug, Default)]
pub(crate) struct List {
    links: Vec<Links>,
    ends: Ends,
}

impl List {
    /// From the oldest on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.ends.iter(self.links.as_slice())
    }

    /// The oldest.
    pub(crate) fn first(&self) -> Option<u32> {
        self.ends.0.map(|(head, _)| head)
    }

    /// The youngest.
    pub(crate) fn last(&self) -> Option<u32> {
        self.ends.0.map(|(_, tail)| tail)
    }

    /// Puts `at` behind `before`; at the front when that is `None`.
    pub(crate) fn insert(&mut self, at: u32, before: Option<u32>) {
        if self.links.len() <= at as usize {
            self.links.resize(at as usize + 1, Links::NONE);
        }
        self.ends.insert(self.links.as_mut_slice(), at, before);
    }

    pub(crate) fn holds(&self, at: u32) -> bool {
        let links = self.links.get(at as usize);
        links.is_some_and(|links| links.is_listed())
    }

    pub(crate) fn remove(&mut self, at: u32) {
        self.ends.remove(self.links.as_mut_slice(), at);
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
    /// All nodes without lease or pin, oldest first; the links are in the seats. Copies do not
    /// change it: what they keep is passed over.
    Recency(Ends),
    /// The candidates.
    Ranked(Ranking, BTreeSet<(Rank, u32)>),
    /// The candidates, by priority and learned worth.
    Worth(Box<Shelf>),
}

impl Order {
    pub(crate) fn new(ranking: Ranking) -> Self {
        match ranking {
            Ranking::Recency => Self::Recency(Ends::default()),
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
    pub(crate) fn enter(&mut self, at: u32, place: Place, seats: &mut [Seat]) {
        let Self::Recency(ends) = self else { return };
        let behind = match place {
            Place::Tail => ends.0.map(|(_, tail)| tail),
            Place::Front(below) => below,
            Place::ByStamp => {
                let stamp = seats[at as usize].span.stamp;
                // From the youngest on, so that it comes behind its children in any case: what
                // was spent lies in front whatever its stamp.
                ends.iter_back(seats)
                    .find(|&one| seats[one as usize].span.stamp <= stamp)
            }
        };
        ends.insert(seats, at, behind);
    }

    /// `at` gets its first lease or a pin, or goes.
    pub(crate) fn leave(&mut self, at: u32, seats: &mut [Seat]) {
        if let Self::Recency(ends) = self {
            ends.remove(seats, at);
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
    pub(crate) fn split(&mut self, lower: u32, upper: u32, seats: &mut [Seat]) {
        if let Self::Recency(ends) = self {
            ends.insert(seats, upper, Some(lower));
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
    pub(crate) fn first(&mut self, seats: &[Seat]) -> Option<u32> {
        match self {
            Self::Recency(ends) => ends
                .iter(seats)
                .find(|&at| seats[at as usize].span.is_candidate()),
            Self::Ranked(_, set) => set.first().map(|&(_, at)| at),
            Self::Worth(shelf) => shelf.first(),
        }
    }
}
