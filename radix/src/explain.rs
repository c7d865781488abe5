//! Why a prompt was not in the cache: where it leaves what is cached, and what went.
//!
//! The tree knows the nearest path: [`PrefixCache::nearest`] follows a prompt as far as any tier
//! has it, then token by token into the most similar continuation. [`Ghosts`] knows what is no
//! longer there: it hears the events and remembers removed pages by hash, within a bound, the
//! oldest forgotten first. Neither changes anything in the cache.

use crate::cache::PrefixCache;
use crate::event::{EventTier, KvEvent, local_hash, sequence_hash};
use crate::node::NIL;
use crate::tree::narrow;
use crate::{ContextKind, Key, NamespaceId, Token};
use rootstock_memory::Nanos;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Continuations that are compared with a prompt, at most.
const SIBLINGS_MAX: usize = 4096;

/// Where a prompt leaves the nearest path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Nearest {
    /// Whole pages of the prompt that some tier has, in tokens.
    pub cached_tokens: u32,
    /// Tokens that the prompt has in common with the nearest path; at least `cached_tokens`.
    pub common_tokens: u32,
    /// What the path has where the prompt has something else. `None`: the path ends there, or the
    /// prompt does.
    pub other: Option<Token>,
    /// What the path holds there.
    pub kind: ContextKind,
}

/// A node of the tree, as an outline shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Outline {
    /// Pages from the root to its first page.
    pub depth_pages: u32,
    /// Its pages.
    pub pages: u32,
    /// Nodes below it.
    pub children: u32,
    /// Matches that ended in it or went through it.
    pub hits: u32,
    /// Its importance.
    pub priority: i32,
    /// What it holds.
    pub kind: ContextKind,
    /// A pin keeps it.
    pub pinned: bool,
    /// Replicas whose device has it.
    pub devices: Vec<u16>,
    /// Host memory has it.
    pub host: bool,
    /// Chained hash up to its last page, as events tell it.
    pub hash: u64,
}

impl PrefixCache {
    /// Where a prompt leaves the nearest path. Changes nothing.
    ///
    /// # Cost
    /// One table lookup a node, one comparison a token, and at most 4096 continuations compared.
    pub fn nearest(&self, key: Key<'_>) -> Nearest {
        self.leaves(key).0
    }

    /// What is cached after a prompt has left it: at most `limit` tokens of one way to go on.
    ///
    /// # Cost
    /// That of [`PrefixCache::nearest`], and a copy.
    pub fn continuation(&self, key: Key<'_>, limit: usize) -> Vec<Token> {
        let mut tokens = Vec::new();
        let (_, place) = self.leaves(key);
        let Some((mut at, from)) = place else {
            return tokens;
        };
        tokens.extend(&self.tree.tokens_from(self.tree.node(at), 0)[from..]);
        while tokens.len() < limit {
            at = self.tree.node(at).first_child;
            if at == NIL {
                break;
            }
            tokens.extend(self.tree.tokens_from(self.tree.node(at), 0));
        }
        tokens.truncate(limit);
        tokens
    }

    /// Where a prompt leaves the nearest path, and the node and token of its edge where that is,
    /// when the path goes on.
    fn leaves(&self, key: Key<'_>) -> (Nearest, Option<(u32, usize)>) {
        let mut nearest = Nearest {
            cached_tokens: 0,
            common_tokens: 0,
            other: None,
            kind: ContextKind::Unknown,
        };
        let Some(mut at) = self.namespaces.root(key.ns) else {
            return (nearest, None);
        };
        let mut rest = key.tokens;
        let step = |nearest: &mut Nearest, child: u32, common: usize| {
            let node = self.tree.node(child);
            nearest.kind = node.kind;
            let goes_on = common < self.tree.edge_len(node);
            nearest.other = goes_on.then(|| node.edge.token(common));
            nearest.common_tokens += narrow(common);
        };
        while let Some(child) = self.tree.child(at, rest) {
            let node = self.tree.node(child);
            let len = self.tree.edge_len(node);
            let common = self.tree.common_tokens(node, rest);
            let whole = common - common % self.tree.page_tokens();
            nearest.cached_tokens += narrow(whole);
            step(&mut nearest, child, common);
            if common < len {
                if common == rest.len() {
                    nearest.other = None;
                }
                return (nearest, Some((child, common)));
            }
            nearest.common_tokens = nearest.cached_tokens;
            rest = &rest[len..];
            at = child;
        }
        // No continuation has the next page as a whole: the one that shares most of it.
        nearest.other = None;
        let shared = |child: u32| self.tree.common_tokens(self.tree.node(child), rest);
        let most = self
            .children_of(at)
            .take(SIBLINGS_MAX)
            .map(|child| (shared(child), child))
            .max_by_key(|&(common, child)| (common, std::cmp::Reverse(child)));
        let place = most.map(|(common, child)| {
            step(&mut nearest, child, common);
            if common == rest.len() {
                nearest.other = None;
            }
            (child, common)
        });
        (nearest, place)
    }

    /// Tokens of a page.
    pub const fn tokens_a_page(&self) -> u32 {
        self.page_tokens()
    }

    /// Chained hashes of the whole pages of a prompt, as events tell them; empty in a namespace
    /// that is unknown.
    pub fn page_hashes(&self, key: Key<'_>) -> Vec<u64> {
        let Some(root) = self.namespaces.root(key.ns) else {
            return Vec::new();
        };
        let seed = self.namespaces.seed_of(root);
        let mut parent = None;
        let pages = key.tokens.chunks_exact(self.tree.page_tokens());
        pages
            .map(|page| {
                let hash = sequence_hash(parent, local_hash(seed, page));
                parent = Some(hash);
                hash
            })
            .collect()
    }

    /// The tokens of the longest cached prefix whose pages have these chained hashes, from the root
    /// on.
    ///
    /// # Cost
    /// One hash a page compared; at most 4096 continuations are looked at in all.
    pub fn tokens_of_hashes(&self, ns: NamespaceId, hashes: &[u64]) -> Vec<Token> {
        let mut tokens = Vec::new();
        let Some(mut at) = self.namespaces.root(ns) else {
            return tokens;
        };
        let seed = self.namespaces.seed_of(at);
        let p = self.tree.page_tokens();
        let (mut parent, mut looked) = (None, 0);
        let mut left = hashes.iter().copied().peekable();
        let first = |child: u32, parent| {
            let page = self.tree.node(child).edge.tokens(0..p);
            sequence_hash(parent, local_hash(seed, &page))
        };
        while let Some(&wanted) = left.peek() {
            let found = self.children_of(at).find(|&child| {
                looked += 1;
                looked <= SIBLINGS_MAX && first(child, parent) == wanted
            });
            let Some(child) = found else {
                return tokens;
            };
            for page in self
                .tree
                .tokens_from(self.tree.node(child), 0)
                .chunks_exact(p)
            {
                let hash = sequence_hash(parent, local_hash(seed, page));
                if left.next_if_eq(&hash).is_none() {
                    return tokens;
                }
                tokens.extend_from_slice(page);
                parent = Some(hash);
            }
            at = child;
        }
        tokens
    }

    /// The nodes of a namespace, each after its parent, at most `limit`; with a prefix, those that
    /// it goes through and all below the last of them.
    ///
    /// # Cost
    /// One hash a page of what is shown.
    pub fn outline(&self, key: Key<'_>, limit: usize) -> Vec<Outline> {
        let mut out = Vec::new();
        let Some(root) = self.namespaces.root(key.ns) else {
            return out;
        };
        let seed = self.namespaces.seed_of(root);
        let (mut at, mut parent, mut rest) = (root, None, key.tokens);
        while let Some(child) = self.tree.child(at, rest) {
            if out.len() == limit {
                return out;
            }
            parent = self.last_hash(child, parent, seed);
            out.push(self.outline_of(child, parent));
            at = child;
            let node = self.tree.node(child);
            let len = self.tree.edge_len(node);
            if self.tree.common_tokens(node, rest) < len {
                break;
            }
            rest = &rest[len..];
        }
        if at == root && rest.len() >= self.tree.page_tokens() {
            return out;
        }
        let mut stack: Vec<_> = self.children_of(at).map(|child| (child, parent)).collect();
        while let Some((at, parent)) = stack.pop() {
            if out.len() == limit {
                break;
            }
            let hash = self.last_hash(at, parent, seed);
            stack.extend(self.children_of(at).map(|child| (child, hash)));
            out.push(self.outline_of(at, hash));
        }
        out
    }

    /// Chained hash of the last page of a node.
    fn last_hash(&self, at: u32, mut parent: Option<u64>, seed: u64) -> Option<u64> {
        let edge = self.tree.tokens_from(self.tree.node(at), 0);
        for page in edge.chunks_exact(self.tree.page_tokens()) {
            parent = Some(sequence_hash(parent, local_hash(seed, page)));
        }
        parent
    }

    fn outline_of(&self, at: u32, hash: Option<u64>) -> Outline {
        let node = self.tree.node(at);
        let devices = (0..self.devices()).filter(|&tier| self.tiers[tier].is_resident(at));
        Outline {
            depth_pages: node.depth,
            pages: node.pages,
            children: narrow(self.children_of(at).count()),
            hits: node.hits,
            priority: node.priority,
            kind: node.kind,
            pinned: self.is_pinned(at),
            devices: devices
                .filter_map(|tier| u16::try_from(tier).ok())
                .collect(),
            host: self
                .host
                .is_some_and(|host| self.tiers[host].is_resident(at)),
            hash: hash.unwrap_or_default(),
        }
    }

    fn children_of(&self, at: u32) -> impl Iterator<Item = u32> {
        let some = |at: u32| (at != NIL).then_some(at);
        let first = some(self.tree.node(at).first_child);
        std::iter::successors(first, move |&at| some(self.tree.node(at).next_sibling))
    }
}

/// A page that was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ghost {
    /// The tier it was removed from last.
    pub tier: EventTier,
    /// When.
    pub at: Nanos,
    /// Its request had ended as ephemeral: it did not go for want of room.
    pub ephemeral: bool,
    /// Pages removed from that tier before it.
    before: u64,
}

/// Removed pages, by hash.
#[derive(Debug)]
pub struct Ghosts {
    by_hash: BTreeMap<u64, (Ghost, u64)>,
    /// Hashes with the number under which they were added, oldest first.
    order: VecDeque<(u64, u64)>,
    limit: usize,
    next: u64,
    /// Pages removed so far, by tier.
    removed: BTreeMap<EventTier, u64>,
    flushed: Option<Nanos>,
}

impl Ghosts {
    /// None yet; the newest `limit` are kept, at some 100 bytes each.
    pub const fn new(limit: usize) -> Self {
        Self {
            by_hash: BTreeMap::new(),
            order: VecDeque::new(),
            limit,
            next: 0,
            removed: BTreeMap::new(),
            flushed: None,
        }
    }

    /// Hears an event. `ephemeral`: what is removed was dropped with its request.
    pub fn hear(&mut self, event: &KvEvent, ephemeral: bool, now: Nanos) {
        match event {
            KvEvent::Stored { pages, .. } => {
                for page in pages {
                    self.by_hash.remove(&page.sequence_hash);
                }
            }
            KvEvent::Removed { tier, hashes } => {
                for &hash in hashes {
                    let before = self.removed.entry(*tier).or_default();
                    let ghost = Ghost {
                        tier: *tier,
                        at: now,
                        ephemeral,
                        before: *before,
                    };
                    *before += 1;
                    self.add(hash, ghost);
                }
            }
            KvEvent::Cleared { .. } => {
                self.flushed = Some(now);
                self.by_hash.clear();
                self.order.clear();
            }
            KvEvent::Gap { .. } => {}
        }
    }

    fn add(&mut self, hash: u64, ghost: Ghost) {
        self.by_hash.insert(hash, (ghost, self.next));
        self.order.push_back((hash, self.next));
        self.next += 1;
        while self.order.len() > self.limit {
            let Some((hash, number)) = self.order.pop_front() else {
                return;
            };
            if self.by_hash.get(&hash).is_some_and(|kept| kept.1 == number) {
                self.by_hash.remove(&hash);
            }
        }
    }

    /// What became of a page that is no longer cached.
    pub fn of(&self, hash: u64) -> Option<Ghost> {
        self.by_hash.get(&hash).map(|kept| kept.0)
    }

    /// Pages that its tier would have needed more to still have it, in the order in which pages
    /// went.
    pub fn pages_short(&self, ghost: &Ghost) -> u64 {
        self.removed.get(&ghost.tier).copied().unwrap_or_default() - ghost.before
    }

    /// When the cache was flushed last.
    pub const fn flushed(&self) -> Option<Nanos> {
        self.flushed
    }

    /// How many are known.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }
}
