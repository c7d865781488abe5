//! The tree itself: nodes with their tokens, and the child table. Finds, splits, grows, removes.
//! It knows neither pages nor leases nor time.

use crate::edge::Edge;
use crate::node::{Ends, Moment, NIL, Node};
use crate::table::{ChildTable, tag};
use crate::{SpanMeta, Token};
use ahash::RandomState;
use slab::Slab;
use std::num::NonZeroU32;

/// How first pages are hashed.
#[derive(Debug)]
pub(crate) enum Hashing {
    Seeded(RandomState),
    /// Every page collides, to show that equality never rests on a hash.
    #[cfg(test)]
    Constant,
}

/// Secret multipliers of the hash of first pages, one for each lane: the products of a block of 16
/// tokens wait for nothing but the block before.
#[derive(Debug)]
struct Keys([u64; 10]);

impl Keys {
    fn new(hashing: &Hashing) -> Self {
        Self(std::array::from_fn(|lane| match hashing {
            Hashing::Seeded(state) => state.hash_one(lane),
            #[cfg(test)]
            Hashing::Constant => 0,
        }))
    }

    /// Hash of (parent, first page). Nothing is taken for equal by it.
    #[inline]
    fn hash(&self, parent: u32, page: &[Token]) -> u64 {
        const LANES: usize = 16;
        let Self(keys) = self;
        let word = |block: &[Token; LANES], at: usize| {
            u64::from(block[2 * at]) | u64::from(block[2 * at + 1]) << 32
        };
        let fold = |hash: u64, block: &[Token; LANES]| {
            let lane = |at| {
                fold(
                    word(block, at) ^ keys[at],
                    word(block, at + 1) ^ keys[at + 1],
                )
            };
            let [a, b, c, d] = [lane(0), lane(2), lane(4), lane(6)];
            let left = hash ^ a ^ c.rotate_left(23);
            let right = keys[8] ^ b ^ d.rotate_left(41);
            crate::tree::fold(left, right)
        };
        let (blocks, rest) = page.as_chunks();
        let seed = crate::tree::fold(u64::from(parent) ^ keys[9], keys[8]);
        let hash = blocks.iter().fold(seed, fold);
        if rest.is_empty() {
            return hash;
        }
        let mut last = [0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        fold(hash, &last)
    }
}

/// Both halves of a product as one.
#[expect(clippy::cast_possible_truncation, reason = "both halves are in")]
const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) nodes: Slab<Node>,
    table: ChildTable,
    /// Nodes that were removed and that the table still names, each with its hash: the places of
    /// several are fetched at once. A vacant node is nobody's child.
    gone: Vec<(u32, u32)>,
    page_tokens: usize,
    max_nodes: usize,
    roots: usize,
    /// Nodes that leases may still need: one for each that grew a leaf which it had found.
    pub(crate) promised: u32,
    hashing: Hashing,
    keys: Keys,
    generation: NonZeroU32,
}

impl Tree {
    pub(crate) fn new(page_tokens: u32, max_nodes: u32, hashing: Hashing) -> Self {
        Self {
            nodes: Slab::new(),
            table: ChildTable::new(),
            gone: Vec::with_capacity(GONE),
            page_tokens: page_tokens as usize,
            max_nodes: max_nodes as usize,
            roots: 0,
            promised: 0,
            keys: Keys::new(&hashing),
            hashing,
            generation: NonZeroU32::MIN,
        }
    }

    /// Forgets all nodes; new ones differ from them in their generation.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.table = ChildTable::new();
        self.gone.clear();
        self.roots = 0;
        self.promised = 0;
    }

    pub(crate) fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    pub(crate) fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    pub(crate) const fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Whether `n` more nodes may be made. Roots do not count: namespaces have their own bound.
    pub(crate) fn has_slots(&self, n: usize) -> bool {
        self.nodes.len() - self.roots + self.promised as usize + n <= self.max_nodes
    }

    /// Nodes that the child table names.
    pub(crate) fn listed(&self) -> usize {
        self.table.len() - self.gone.len()
    }

    pub(crate) const fn roots(&self) -> usize {
        self.roots
    }

    /// The root above `at`.
    pub(crate) fn root_of(&self, mut at: u32) -> u32 {
        while !self.node(at).is_root() {
            at = self.node(at).parent;
        }
        at
    }

    /// How many tokens the edge of `node` has.
    pub(crate) const fn edge_len(&self, node: &Node) -> usize {
        node.pages as usize * self.page_tokens
    }

    /// The tokens of the edge of `node` from one of its pages on.
    pub(crate) fn tokens_from(&self, node: &Node, page: u32) -> Vec<Token> {
        let first = page as usize * self.page_tokens;
        node.edge.tokens(first..self.edge_len(node))
    }

    /// How many tokens of the edge of `node` are those that `rest` begins with.
    pub(crate) fn common_tokens(&self, node: &Node, rest: &[Token]) -> usize {
        node.edge.common_prefix(self.edge_len(node), rest)
    }

    /// The child of `parent` whose first page begins `rest`, and how many whole pages of its edge
    /// `rest` has in common with it.
    pub(crate) fn step(&self, parent: u32, rest: &[Token]) -> Option<(u32, u32)> {
        let page = rest.get(..self.page_tokens)?;
        let first = self.node(parent).first_child;
        if first == NIL {
            return None;
        }
        // The turns of a conversation are a chain of only children, which needs no table.
        if self.node(first).next_sibling == NIL {
            let common = self.common_pages(first, rest);
            return (common > 0).then_some((first, common));
        }
        let mut common = 0;
        let found = self.table.find(self.hash(parent, page).into(), |at| {
            common = match self.nodes.get(at as usize) {
                Some(node) if node.parent == parent => self.common_pages(at, rest),
                Some(_) | None => 0,
            };
            common > 0
        });
        Some((found?, common))
    }

    /// The child of `parent` whose first page begins `rest`.
    pub(crate) fn child(&self, parent: u32, rest: &[Token]) -> Option<u32> {
        let page = rest.get(..self.page_tokens)?;
        self.table.find(self.hash(parent, page).into(), |at| {
            let node = self.nodes.get(at as usize);
            node.is_some_and(|node| {
                node.parent == parent && self.common_tokens(node, page) == page.len()
            })
        })
    }

    /// Whole pages that the edge of `at` and `rest` have in common.
    pub(crate) fn common_pages(&self, at: u32, rest: &[Token]) -> u32 {
        let node = self.node(at);
        let common = self.common_tokens(node, rest);
        if common == self.edge_len(node) {
            // The usual case needs no division.
            node.pages
        } else {
            narrow(common / self.page_tokens)
        }
    }

    pub(crate) fn hash(&self, parent: u32, page: &[Token]) -> u32 {
        match &self.hashing {
            Hashing::Seeded(_) => tag(self.keys.hash(parent, page)),
            #[cfg(test)]
            Hashing::Constant => 7,
        }
    }

    /// A root without edge.
    pub(crate) fn add_root(&mut self) -> u32 {
        self.roots += 1;
        self.insert_node(Node {
            edge: Edge::default(),
            hash: 0,
            parent: NIL,
            generation: NonZeroU32::MIN,
            pages: 0,
            depth: 0,
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            priority: i32::MAX,
            hits: 0,
            created: Moment::new(0),
            kind: crate::ContextKind::Unknown,
            ends: Ends::None,
        })
    }

    /// A new leaf under `parent`.
    pub(crate) fn add_leaf(
        &mut self,
        parent: u32,
        tokens: &[Token],
        meta: &SpanMeta,
        now: u64,
    ) -> u32 {
        let hash = self.hash(parent, &tokens[..self.page_tokens]);
        let leaf = self.insert_node(Node {
            edge: Edge::new(tokens),
            hash,
            parent,
            generation: NonZeroU32::MIN,
            pages: narrow(tokens.len() / self.page_tokens),
            depth: self.node(parent).end(),
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            priority: meta.priority,
            hits: 0,
            created: Moment::new(now),
            kind: meta.kind,
            ends: Ends::None,
        });
        self.table.insert(hash.into(), leaf);
        self.link(leaf);
        leaf
    }

    /// Whether tokens can be appended to the edge of `at`.
    pub(crate) fn can_grow(&self, at: u32) -> bool {
        let node = self.node(at);
        !node.is_root() && node.is_leaf()
    }

    /// Appends whole pages to a leaf.
    pub(crate) fn grow_leaf(&mut self, at: u32, tokens: &[Token]) {
        let page_tokens = self.page_tokens;
        let node = &mut self.nodes[at as usize];
        assert!(node.is_leaf() && !node.is_root(), "only a leaf grows");
        node.edge.append(node.pages as usize * page_tokens, tokens);
        node.pages += narrow(tokens.len() / page_tokens);
    }

    /// Cuts the edge of `at` after `keep` pages. The upper part becomes a new node, which is
    /// returned; `at` keeps the lower part, its children, and so all that names it.
    pub(crate) fn split(&mut self, at: u32, keep: u32) -> u32 {
        let (page_tokens, lower) = (self.page_tokens, self.node_mut(at));
        assert!(
            keep > 0 && keep < lower.pages,
            "split of {} pages at {keep}",
            lower.pages
        );
        let (len, cut) = (lower.pages as usize, keep as usize);
        let below = lower.edge.split_off(len * page_tokens, cut * page_tokens);
        let upper = Node {
            edge: std::mem::replace(&mut lower.edge, below),
            hash: lower.hash,
            parent: lower.parent,
            generation: NonZeroU32::MIN,
            pages: keep,
            depth: lower.depth,
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            priority: lower.priority,
            hits: lower.hits,
            created: lower.created,
            kind: lower.kind,
            ends: Ends::None,
        };
        let hash = upper.hash;
        self.unlink(at);
        let upper = self.insert_node(upper);
        self.link(upper);
        self.table.replace(hash.into(), at, upper);
        let node = self.node_mut(at);
        node.parent = upper;
        node.depth += keep;
        node.pages -= keep;
        let hash = self.hash(upper, &self.node(at).edge.tokens(0..page_tokens));
        self.node_mut(at).hash = hash;
        self.table.insert(hash.into(), at);
        self.link(at);
        upper
    }

    /// Drops all but the first `keep` pages of a leaf's edge.
    pub(crate) fn truncate(&mut self, at: u32, keep: u32) {
        let len = keep as usize * self.page_tokens;
        let node = self.node_mut(at);
        assert!(
            node.is_leaf() && keep > 0 && keep <= node.pages,
            "only a leaf is cut"
        );
        node.pages = keep;
        // Amortized: memory follows what is alive within a factor of 4.
        if node.edge.room() > 4 * len + 64 {
            node.edge.shrink(2 * len);
        }
    }

    /// Removes a leaf.
    pub(crate) fn remove(&mut self, at: u32) {
        assert!(
            self.node(at).is_leaf() && !self.node(at).is_root(),
            "only a leaf is removed"
        );
        self.unlink(at);
        let node = self.nodes.remove(at as usize);
        self.gone.push((node.hash, at));
        if self.gone.len() == GONE {
            self.bury();
        }
    }

    /// Takes those that are gone out of the table.
    #[cold]
    fn bury(&mut self) {
        self.table.fetch(self.gone.iter().map(|one| one.0));
        for (hash, at) in self.gone.drain(..) {
            self.table.remove(hash.into(), at);
        }
    }

    /// Removes a root without children.
    pub(crate) fn remove_root(&mut self, at: u32) {
        let root = self.nodes.remove(at as usize);
        assert!(
            root.is_root() && root.is_leaf(),
            "only an empty root is removed"
        );
        self.roots -= 1;
    }

    fn insert_node(&mut self, mut node: Node) -> u32 {
        self.generation = self.generation.checked_add(1).unwrap_or(NonZeroU32::MIN);
        node.generation = self.generation;
        // An index is used again only when nothing names the node before.
        if !self.gone.is_empty() {
            self.bury();
        }
        if self.nodes.len() == self.nodes.capacity() {
            self.nodes.reserve_exact(self.nodes.len() / GROWTH + 8);
        }
        narrow(self.nodes.insert(node))
    }

    /// Puts a node that has a parent at the front of its siblings.
    fn link(&mut self, at: u32) {
        let parent = self.node(at).parent;
        let next = std::mem::replace(&mut self.node_mut(parent).first_child, at);
        let node = self.node_mut(at);
        node.prev_sibling = NIL;
        node.next_sibling = next;
        if next != NIL {
            self.node_mut(next).prev_sibling = at;
        }
    }

    fn unlink(&mut self, at: u32) {
        let node = self.node(at);
        let (parent, prev, next) = (node.parent, node.prev_sibling, node.next_sibling);
        if prev == NIL {
            self.node_mut(parent).first_child = next;
        } else {
            self.node_mut(prev).next_sibling = next;
        }
        if next != NIL {
            self.node_mut(next).prev_sibling = prev;
        }
    }
}

/// So many places of the table are on their way from memory at once.
const GONE: usize = 16;

/// The arrays of nodes grow by this part of them, not to the double: they are most of what a tree
/// weighs beside its tokens.
const GROWTH: usize = 8;

/// Makes an array of nodes have room for `len`.
pub(crate) fn reserve_a_little<T>(array: &mut Vec<T>, len: usize) {
    if array.capacity() < len {
        array.reserve_exact(len - array.len() + len / GROWTH + 8);
    }
}

/// Node and page counts are bounded by `u32` pools.
pub(crate) fn narrow(n: usize) -> u32 {
    u32::try_from(n).expect("counts of nodes and pages fit 32 bits")
}
