//! Which nodes a request leaves behind: branches that its program went on without. Both trees, of
//! pages and of slots, ask here and mark what they are told.

use super::Agent;
use crate::node::NIL;
use crate::tree::Tree;

/// Branches that are looked at where a prompt leaves a path, and nodes of one, at most.
const SIBLINGS_MAX: usize = 16;
const BRANCH_MAX: usize = 256;

/// A node and what hangs below it, as far as that is little.
pub(crate) fn below(tree: &Tree, at: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut left = vec![at];
    for _ in 0..BRANCH_MAX {
        let Some(at) = left.pop() else { break };
        found.push(at);
        let mut child = tree.node(at).first_child;
        while child != NIL && left.len() < BRANCH_MAX {
            left.push(child);
            child = tree.node(child).next_sibling;
        }
    }
    found
}

impl Agent {
    /// What `owner` alone uses of the path of `at`, as far as it is not that of `other`, deepest
    /// first.
    pub(crate) fn own_branch(
        &self,
        tree: &Tree,
        mut at: u32,
        other: Option<u32>,
        owner: u64,
    ) -> Vec<u32> {
        let mut found = Vec::new();
        let mut other = other.unwrap_or_else(|| tree.root_of(at));
        while at != other && !tree.node(at).is_root() {
            if tree.node(at).end() < tree.node(other).end() {
                other = tree.node(other).parent;
                continue;
            }
            if self.is_owned(at, owner) {
                found.push(at);
            }
            at = tree.node(at).parent;
        }
        found
    }

    /// A conversation is known by its prefix: where a longer prompt, of `asked` pages, leaves the
    /// path right where an answer began, it went on without that answer, as templates do that
    /// strip thinking. Those answers beside `own`, which is where it went on; an answer that
    /// another program used is that program's too.
    pub(crate) fn answers_beside(&self, tree: &Tree, own: u32, asked: u32, owner: u64) -> Vec<u32> {
        let mut found = Vec::new();
        let parent = tree.node(own).parent;
        if parent == NIL {
            return found;
        }
        let mut sibling = tree.node(parent).first_child;
        for _ in 0..SIBLINGS_MAX {
            if sibling == NIL {
                break;
            }
            let node = tree.node(sibling);
            if sibling != own && self.is_answer(sibling, node, asked, owner) {
                found.push(sibling);
            }
            sibling = node.next_sibling;
        }
        found
    }
}
