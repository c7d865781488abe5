//! The tree as a picture of bounded size, for people: the largest parts one by one, the rest of
//! each place as one.
//!
//! ```text
//!   all nodes of a namespace, in one pass:  what lies in and below each
//!   largest first, until the limit:         shown one by one, parents before children
//!   what is left below a shown node:        one entry, with its sums
//! ```
//! The pass stops at a bound, so that a huge tree costs no more than a large one; then the picture
//! says that it is partial. Nothing is changed by looking.

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::tree::narrow;
use crate::{ContextKind, NamespaceId, ProgramId, TenantId, Token};
use rootstock_memory::Nanos;
use serde::Serialize;
use std::collections::{BTreeMap, BinaryHeap};
use std::num::NonZeroU32;

/// Nodes that one picture looks at, at most: some 10 ms of one core.
const NODES_MAX: usize = 1 << 18;

/// Names a node until it goes: its index is used again, but not with the same generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeRef {
    index: u32,
    generation: NonZeroU32,
}

impl std::fmt::Display for NodeRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

impl std::str::FromStr for NodeRef {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (index, generation) = text.split_once('.').ok_or(())?;
        Ok(Self {
            index: index.parse().map_err(drop)?,
            generation: generation.parse().map_err(drop)?,
        })
    }
}

impl Serialize for NodeRef {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

/// Pages by the fastest tier that has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct PagesByTier {
    /// On a device.
    pub device: u32,
    /// On host, and on no device.
    pub host: u32,
}

impl PagesByTier {
    fn add(&mut self, other: Self) {
        self.device += other.device;
        self.host += other.host;
    }
}

/// A part of the picture: a node, or all that is left below one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Part {
    /// The part above it, by its place in the list; `None` at the root.
    pub parent: Option<u32>,
    /// The node; `None` where it is several.
    pub id: Option<NodeRef>,
    /// Nodes in it: 1, or as many as are left.
    pub nodes: u32,
    /// Pages from the root to its first page.
    pub depth: u32,
    /// Pages in it.
    pub pages: u32,
    /// Pages in it and below it.
    pub below: u32,
    /// Those in it by tier.
    pub tiers: PagesByTier,
    /// What most of it is.
    pub kind: ContextKind,
    /// Matches that ended in it or went through it; of several nodes the most.
    pub hits: u32,
    /// Its importance; of several nodes the highest.
    pub priority: i32,
    /// Pages of it that pins keep.
    pub pinned: u32,
    /// Seconds until the last of those pins ends.
    pub pin_left_s: Option<u64>,
    /// Requests use it now.
    pub used: bool,
}

/// A program in the picture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramPlace {
    /// Which.
    pub program: ProgramId,
    /// The part in or below which its newest prefix ends; `None` when nothing of it is cached.
    pub part: Option<u32>,
    /// Pages of that prefix.
    pub pages: u32,
}

/// The tree of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Picture {
    /// Parents before children.
    pub parts: Vec<Part>,
    /// Programs, the one that asked last first.
    pub programs: Vec<ProgramPlace>,
    /// Nodes that were looked at, and their pages.
    pub nodes: u32,
    /// Pages of those.
    pub pages: u32,
    /// There are more nodes than are looked at.
    pub is_partial: bool,
}

/// How much is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PictureLimits {
    /// Nodes one by one.
    pub nodes: usize,
    /// Programs.
    pub programs: usize,
}

/// A node in the pass.
struct Seen {
    at: u32,
    parent: usize,
    first_child: usize,
    next_sibling: usize,
    below: u32,
}

const NONE: usize = usize::MAX;

impl PrefixCache {
    /// A picture of the caller's tree, or of what lies in and below one node of it.
    ///
    /// # Cost
    /// Linear in the nodes below, up to a bound, and in the programs of all callers.
    pub fn picture(
        &self,
        (tenant, ns): (TenantId, NamespaceId),
        under: Option<NodeRef>,
        limits: PictureLimits,
        now: Nanos,
    ) -> Picture {
        let Some(root) = self.namespaces.root(ns) else {
            return Picture::default();
        };
        let start = match under {
            None => root,
            Some(node) => match self.own_node(root, node) {
                Some(at) => at,
                None => return Picture::default(),
            },
        };
        let (seen, is_partial) = self.look(start);
        let mut picture = Picture {
            nodes: narrow(seen.len()) - u32::from(start == root),
            pages: seen.first().map_or(0, |all| all.below),
            is_partial,
            ..Picture::default()
        };
        let mut shown = BTreeMap::new();
        self.show(&seen, limits.nodes, now, &mut picture.parts, &mut shown);
        let programs = self.programs_of(tenant, ns).take(limits.programs);
        picture.programs = programs.map(|id| self.place(id, &shown)).collect();
        picture
    }

    /// The tokens of the prefix that ends with a node of the caller's.
    pub fn tokens_of_node(&self, ns: NamespaceId, node: NodeRef) -> Option<Vec<Token>> {
        let root = self.namespaces.root(ns)?;
        Some(self.path_tokens(self.own_node(root, node)?))
    }

    fn own_node(&self, root: u32, node: NodeRef) -> Option<u32> {
        let is_own = self.is_node(node.index, node.generation)
            && !self.tree.node(node.index).is_root()
            && self.tree.root_of(node.index) == root;
        is_own.then_some(node.index)
    }

    /// All nodes in and below one, each after its parent, with their sums.
    fn look(&self, start: u32) -> (Vec<Seen>, bool) {
        let first = |at: u32| self.tree.node(at).first_child;
        let new = |at, parent| Seen {
            at,
            parent,
            first_child: NONE,
            next_sibling: NONE,
            below: self.tree.node(at).pages,
        };
        let mut seen = vec![new(start, NONE)];
        let mut done = 0;
        while done < seen.len() {
            let mut at = first(seen[done].at);
            while at != NIL {
                if seen.len() == NODES_MAX {
                    sum_up(&mut seen);
                    return (seen, true);
                }
                let mut child = new(at, done);
                child.next_sibling = seen[done].first_child;
                seen[done].first_child = seen.len();
                seen.push(child);
                at = self.tree.node(at).next_sibling;
            }
            done += 1;
        }
        sum_up(&mut seen);
        (seen, false)
    }

    /// Shows the largest nodes one by one, and the rest by where it hangs.
    fn show(
        &self,
        seen: &[Seen],
        limit: usize,
        now: Nanos,
        parts: &mut Vec<Part>,
        shown: &mut BTreeMap<u32, u32>,
    ) {
        // Of equals the one that was seen first.
        let entry = |index: usize| (seen[index].below, usize::MAX - index);
        let mut open = BinaryHeap::new();
        if seen
            .first()
            .is_some_and(|all| !self.tree.node(all.at).is_root())
        {
            open.push(entry(0));
        } else {
            open.extend(children(seen, 0).map(entry));
        }
        while parts.len() < limit
            && let Some((_, place)) = open.pop()
        {
            let index = usize::MAX - place;
            let one = &seen[index];
            let parent = seen.get(one.parent).and_then(|up| shown.get(&up.at));
            let mut part = self.part(one.at, now);
            (part.parent, part.below) = (parent.copied(), one.below);
            shown.insert(one.at, narrow(parts.len()));
            parts.push(part);
            open.extend(children(seen, index).map(entry));
        }
        let mut rests: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (_, place) in open {
            let index = usize::MAX - place;
            rests.entry(seen[index].parent).or_default().push(index);
        }
        for (parent, rest) in rests {
            let mut part = self.rest(seen, rest, now);
            let up = seen.get(parent);
            part.parent = up.and_then(|up| shown.get(&up.at)).copied();
            part.depth = up.map_or(0, |up| self.tree.node(up.at).end());
            parts.push(part);
        }
    }

    fn part(&self, at: u32, now: Nanos) -> Part {
        let node = self.tree.node(at);
        let devices = &self.tiers[..self.devices()];
        let on_device = devices.iter().any(|tier| tier.is_resident(at));
        let on_host = self
            .host
            .is_some_and(|host| self.tiers[host].is_resident(at));
        let pin = self.pins.by_node.get(&at);
        Part {
            parent: None,
            id: Some(NodeRef {
                index: at,
                generation: node.generation,
            }),
            nodes: 1,
            depth: node.depth,
            pages: node.pages,
            below: node.pages,
            tiers: PagesByTier {
                device: if on_device { node.pages } else { 0 },
                host: if on_host && !on_device { node.pages } else { 0 },
            },
            kind: node.kind,
            hits: node.hits,
            priority: node.priority,
            pinned: if pin.is_some() { node.pages } else { 0 },
            pin_left_s: pin.map(|pin| pin.until.saturating_sub(now) / 1_000_000_000),
            used: devices.iter().any(|tier| tier.span(at).leases > 0),
        }
    }

    /// Several nodes with all below them, as one.
    fn rest(&self, seen: &[Seen], roots: Vec<usize>, now: Nanos) -> Part {
        let mut open = roots;
        let mut kinds: BTreeMap<ContextKind, u32> = BTreeMap::new();
        let mut sum: Option<Part> = None;
        while let Some(index) = open.pop() {
            open.extend(children(seen, index));
            let part = self.part(seen[index].at, now);
            *kinds.entry(part.kind).or_default() += part.pages;
            sum = Some(match sum {
                None => part,
                Some(mut sum) => {
                    sum.nodes += 1;
                    sum.pages += part.pages;
                    sum.tiers.add(part.tiers);
                    sum.hits = sum.hits.max(part.hits);
                    sum.priority = sum.priority.max(part.priority);
                    sum.pinned += part.pinned;
                    sum.pin_left_s = sum.pin_left_s.max(part.pin_left_s);
                    sum.used |= part.used;
                    sum
                }
            });
        }
        let mut sum = sum.unwrap_or_else(|| self.part(seen[0].at, now));
        sum.id = None;
        sum.below = sum.pages;
        let most = kinds.into_iter().max_by_key(|&(_, pages)| pages);
        sum.kind = most.map_or(sum.kind, |(kind, _)| kind);
        sum
    }

    fn place(&self, program: ProgramId, shown: &BTreeMap<u32, u32>) -> ProgramPlace {
        let ends = self.programs.ends(program).iter().rev();
        let mut live = ends.filter(|&&(at, generation)| self.is_node(at, generation));
        let Some(&(mut at, _)) = live.next() else {
            return ProgramPlace {
                program,
                part: None,
                pages: 0,
            };
        };
        let pages = self.tree.node(at).end();
        while !self.tree.node(at).is_root() && !shown.contains_key(&at) {
            at = self.tree.node(at).parent;
        }
        ProgramPlace {
            program,
            part: shown.get(&at).copied(),
            pages,
        }
    }
}

/// Children stand behind their parents.
fn sum_up(seen: &mut [Seen]) {
    for index in (1..seen.len()).rev() {
        let (parent, below) = (seen[index].parent, seen[index].below);
        seen[parent].below += below;
    }
}

fn children(seen: &[Seen], index: usize) -> impl Iterator<Item = usize> {
    let some = |index: usize| (index != NONE).then_some(index);
    let first = seen.get(index).and_then(|one| some(one.first_child));
    std::iter::successors(first, move |&index| some(seen[index].next_sibling))
}
