//! Waiting requests grouped by the prefixes they share, for the order `DfsWeight`: depth first,
//! the heaviest group first, and the group served last before all, so that a prefix is computed
//! or leased once and used by all who wait for it before it can be evicted.
//!
//! The tree has a level per doubling: prefixes of 1, 2, 4, 8 ... pages. A request is on at most
//! some twenty nodes whatever its length, and two requests part at the level above the page
//! where their prompts part. Nodes are found by hashes; a collision would only misplace a
//! request in the order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rootstock_memory::Nanos;
use rootstock_radix::{NamespaceId, Token};

use crate::request::RequestId;
use crate::word_hash::WordHash;

type Place = (Nanos, RequestId);

#[derive(Debug, Default)]
struct Node {
    /// Requests at or below.
    weight: u32,
    /// Heaviest first.
    children: BTreeSet<(Reverse<u32>, u64)>,
    /// Requests whose path ends here, oldest first.
    here: BTreeSet<Place>,
}

/// The tree of waiting requests.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    nodes: BTreeMap<u64, Node>,
    paths: BTreeMap<RequestId, (Nanos, Arc<[u64]>)>,
    /// Path of the request that started last: its groups are finished first.
    served: Arc<[u64]>,
}

const ROOT: u64 = 0;

impl Groups {
    /// Adds a request, unless it is in.
    pub(crate) fn insert(&mut self, id: RequestId, arrival: Nanos, path: &Arc<[u64]>) {
        if self.paths.contains_key(&id) {
            return;
        }
        let path = Arc::clone(path);
        self.change_weights(&path, |weight| weight + 1);
        let last = path.last().copied().unwrap_or(ROOT);
        self.nodes
            .entry(last)
            .or_default()
            .here
            .insert((arrival, id));
        self.paths.insert(id, (arrival, path));
    }

    /// Takes a request out, if it is in.
    pub(crate) fn remove(&mut self, id: RequestId) {
        let Some((arrival, path)) = self.paths.remove(&id) else {
            return;
        };
        let last = path.last().copied().unwrap_or(ROOT);
        if let Some(node) = self.nodes.get_mut(&last) {
            node.here.remove(&(arrival, id));
        }
        self.change_weights(&path, |weight| weight - 1);
    }

    /// A request starts: its groups go on.
    pub(crate) fn serve(&mut self, id: RequestId) {
        if let Some((_, path)) = self.paths.get(&id) {
            self.served = Arc::clone(path);
        }
    }

    /// The first `limit` requests in the order.
    ///
    /// # Cost
    /// O(limit) nodes: every node visited leads to a request.
    pub(crate) fn first(&self, limit: usize) -> Vec<RequestId> {
        self.under(ROOT, limit)
    }

    /// The first `limit` of those whose path goes through a node.
    pub(crate) fn under(&self, hash: u64, limit: usize) -> Vec<RequestId> {
        let mut found = Vec::new();
        let mut stack = vec![hash];
        while let Some(node) = stack.pop().and_then(|hash| self.nodes.get(&hash)) {
            found.extend(
                node.here
                    .iter()
                    .take(limit - found.len())
                    .map(|&(_, id)| id),
            );
            if found.len() >= limit {
                break;
            }
            let heaviest = node.children.iter().take(limit).map(|&(_, hash)| hash);
            let begun = self.served.iter().copied().filter(|hash| {
                let weight = self.nodes.get(hash).map_or(0, |child| child.weight);
                node.children.contains(&(Reverse(weight), *hash))
            });
            let begun: Vec<u64> = begun.collect();
            // What goes first is pushed last.
            let rest: Vec<u64> = heaviest.filter(|hash| !begun.contains(hash)).collect();
            stack.extend(rest.into_iter().rev().chain(begun));
        }
        found
    }

    fn change_weights(&mut self, path: &[u64], change: impl Fn(u32) -> u32) {
        let mut parent = ROOT;
        let root = self.nodes.entry(ROOT).or_default();
        root.weight = change(root.weight);
        for &hash in path {
            let node = self.nodes.entry(hash).or_default();
            let before = node.weight;
            node.weight = change(before);
            let after = node.weight;
            if after == 0 {
                self.nodes.remove(&hash);
            }
            if let Some(above) = self.nodes.get_mut(&parent) {
                above.children.remove(&(Reverse(before), hash));
                if after > 0 {
                    above.children.insert((Reverse(after), hash));
                }
            }
            parent = hash;
        }
        if self.nodes.get(&ROOT).is_some_and(|root| root.weight == 0) {
            self.nodes.remove(&ROOT);
        }
    }

    /// Whether weights, children and paths agree.
    pub(crate) fn is_consistent(&self) -> bool {
        let mut weights: BTreeMap<u64, u32> = BTreeMap::new();
        for (_, path) in self.paths.values() {
            for &hash in [ROOT].iter().chain(path.iter()) {
                *weights.entry(hash).or_default() += 1;
            }
        }
        weights.len() == self.nodes.len()
            && self.nodes.iter().all(|(hash, node)| {
                let below: u32 = node
                    .children
                    .iter()
                    .map(|(Reverse(weight), _)| weight)
                    .sum();
                let here = u32::try_from(node.here.len()).unwrap_or(u32::MAX);
                weights.get(hash) == Some(&node.weight) && below + here == node.weight
            })
    }
}

/// Hashes of a prompt's prefixes of 1, 2, 4 ... pages.
pub(crate) fn path_of(ns: NamespaceId, tokens: &[Token], page_tokens: u32) -> Vec<u64> {
    let mut path = Vec::new();
    let mut hash = WordHash::new();
    ns.get()
        .to_le_bytes()
        .iter()
        .for_each(|&byte| hash.word(u64::from(byte)));
    let mut hashed = 0;
    let mut end = page_tokens as usize;
    while end <= tokens.len() {
        tokens[hashed..end]
            .iter()
            .for_each(|token| hash.word(u64::from(*token)));
        hashed = end;
        // 0 is the root.
        path.push(hash.get().max(1));
        end = end.saturating_mul(2);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_group_goes_first_and_weights_follow_every_change() {
        let mut groups = Groups::default();
        let paths: [&[u64]; 6] = [&[], &[1, 2], &[3, 4], &[3, 5], &[3, 5], &[1]];
        for (n, path) in (0..).zip(paths) {
            groups.insert(RequestId(n), n, &path.into());
            assert!(groups.is_consistent());
        }
        let order = |groups: &Groups, n| {
            groups
                .first(n)
                .into_iter()
                .map(|id| id.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(order(&groups, 10), vec![0, 3, 4, 2, 5, 1]);
        assert_eq!(order(&groups, 2), vec![0, 3]);
        groups.serve(RequestId(1));
        assert_eq!(
            order(&groups, 10),
            vec![0, 5, 1, 3, 4, 2],
            "a group once begun is finished"
        );
        groups.serve(RequestId(2));
        assert_eq!(order(&groups, 10), vec![0, 2, 3, 4, 5, 1]);
        for id in [3, 4, 3] {
            groups.remove(RequestId(id));
            assert!(groups.is_consistent());
        }
        assert_eq!(order(&groups, 10), vec![0, 2, 5, 1]);
        (0..6).for_each(|id| groups.remove(RequestId(id)));
        assert!(groups.is_consistent() && groups.nodes.is_empty());
    }
}
