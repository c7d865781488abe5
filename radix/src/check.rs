//! Recounts everything from scratch: the tree's links and hashes, each tier's residency, leases,
//! order and pool, and the conservation law.

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::order::Order;
use crate::tier::{Span, Tier};
use crate::tree::Tree;
use rootstock_memory::{Corruption, PageId};

macro_rules! ensure {
    ($part:literal, $holds:expr, $($detail:tt)+) => {
        if !$holds {
            return Err(Corruption::new($part, format!($($detail)+)));
        }
    };
}

impl PrefixCache {
    /// Recounts everything.
    ///
    /// # Errors
    /// The first contradiction found.
    /// # Cost
    /// Linear in nodes, tokens and pages.
    pub fn check(&self) -> Result<(), Corruption> {
        let mut seen = 0;
        for root in self.namespaces.roots() {
            seen += 1 + check_below(&self.tree, root)?;
        }
        let nodes = self.tree.nodes.len();
        ensure!(
            "tree",
            seen == nodes,
            "{seen} nodes can be reached, {nodes} exist"
        );
        let roots = self.tree.roots();
        let listed = self.tree.table.len();
        ensure!(
            "table",
            listed == nodes - roots,
            "{listed} entries for {nodes} nodes"
        );
        let tokens: usize = self.tree.runs.iter().map(|(_, run)| run.len()).sum();
        let edges: usize = self
            .tree
            .nodes
            .iter()
            .map(|(_, node)| node.pages as usize)
            .sum();
        let edges = edges * self.tree.page_tokens();
        ensure!(
            "tree",
            tokens == edges,
            "runs hold {tokens} tokens, edges {edges}"
        );
        for (at, node) in &self.tree.nodes {
            let resident = self.tiers.iter().any(|tier| tier.is_resident(index(at)));
            ensure!(
                "tree",
                resident || node.is_root(),
                "node {at} is in no tier"
            );
        }
        let mut leases = 0;
        for tier in &self.tiers {
            check_spans(&self.tree, tier)?;
            check_order(&self.tree, tier)?;
            check_pages(&self.tree, tier)?;
            let roots = self.namespaces.roots();
            leases += roots.map(|root| tier.span(root).leases).sum::<u32>();
        }
        ensure!(
            "leases",
            leases == self.leases,
            "roots count {leases}, cache {}",
            self.leases
        );
        Ok(())
    }
}

/// Checks the links, hashes and depths below `at`; returns how many nodes there are.
fn check_below(tree: &Tree, at: u32) -> Result<usize, Corruption> {
    let mut count = 0;
    let mut stack = vec![at];
    while let Some(at) = stack.pop() {
        let (mut child, mut prev) = (tree.node(at).first_child, NIL);
        while child != NIL {
            let node = tree.node(child);
            ensure!(
                "tree",
                node.parent == at,
                "node {child} has parent {}, not {at}",
                node.parent
            );
            ensure!(
                "tree",
                node.prev_sibling == prev,
                "siblings of node {child} are unlinked"
            );
            ensure!(
                "tree",
                node.depth == tree.node(at).end(),
                "node {child} hangs at a gap"
            );
            ensure!("tree", node.pages > 0, "node {child} has an empty edge");
            let above = tree.node(at).priority;
            ensure!(
                "tree",
                node.priority <= above,
                "node {child} is above its parent"
            );
            let edge = tree.edge(node);
            let hash = tree.hash(at, &edge[..tree.page_tokens()]);
            ensure!("table", node.hash == hash, "node {child} has another hash");
            ensure!(
                "table",
                tree.child(at, edge) == Some(child),
                "node {child} is not found"
            );
            stack.push(child);
            count += 1;
            (prev, child) = (child, node.next_sibling);
        }
    }
    Ok(count)
}

/// Checks residency and leases against the shape of the tree.
fn check_spans(tree: &Tree, tier: &Tier) -> Result<(), Corruption> {
    let mut kids = vec![0_u32; tier.spans.len()];
    let (mut cached, mut leased) = (0, 0);
    for (at, node) in tree.nodes.iter().filter(|(_, node)| !node.is_root()) {
        let span = tier.span(index(at));
        if !span.resident {
            let empty = span.leases == 0 && span.kids == 0;
            ensure!(
                "tier",
                empty,
                "node {at} is leased or has children where it is not"
            );
            continue;
        }
        let parent = tier.span(node.parent);
        ensure!(
            "tier",
            parent.resident,
            "node {at} is resident, its parent is not"
        );
        let covered = span.leases <= parent.leases;
        ensure!(
            "leases",
            covered,
            "node {at} has more leases than its parent"
        );
        kids[node.parent as usize] += 1;
        cached += node.pages;
        leased += if span.leases > 0 { node.pages } else { 0 };
    }
    for (at, _) in &tree.nodes {
        let span = tier.span(index(at));
        let counted = kids.get(at).copied().unwrap_or_default();
        ensure!(
            "tier",
            span.kids == counted,
            "node {at} counts {} of {counted} kids",
            span.kids
        );
    }
    let stale = |at: usize| !tree.nodes.contains(at) && tier.spans[at].resident;
    ensure!(
        "tier",
        !(0..tier.spans.len()).any(stale),
        "a node that is gone is resident"
    );
    ensure!(
        "tier",
        cached == tier.cached,
        "{cached} pages cached, counted {}",
        tier.cached
    );
    ensure!(
        "tier",
        leased == tier.leased,
        "{leased} pages leased, counted {}",
        tier.leased
    );
    Ok(())
}

/// Checks that the order has exactly the candidates, children before parents.
fn check_order(tree: &Tree, tier: &Tier) -> Result<(), Corruption> {
    let nodes = || tree.nodes.iter().filter(|(_, node)| !node.is_root());
    let unleased = |span: Span| span.resident && span.leases == 0;
    match &tier.order {
        Order::Ranked(ranking, set) => {
            let expected = nodes()
                .filter(|&(at, _)| tier.span(index(at)).is_free_leaf())
                .count();
            ensure!(
                "order",
                set.len() == expected,
                "{} of {expected} ranked",
                set.len()
            );
            for (at, node) in nodes().filter(|&(at, _)| tier.span(index(at)).is_free_leaf()) {
                let key = (ranking.rank(node, &tier.span(index(at))), index(at));
                ensure!("order", set.contains(&key), "node {at} is not ranked");
            }
        }
        Order::Recency(list) => {
            let mut place = vec![None; tree.nodes.capacity()];
            let (mut at, mut prev, mut count) = (list.ends.map_or(NIL, |ends| ends.0), NIL, 0);
            while at != NIL {
                let links = list.links[at as usize];
                ensure!(
                    "order",
                    links.listed && links.prev == prev,
                    "node {at} is unlinked"
                );
                ensure!(
                    "order",
                    unleased(tier.span(at)),
                    "node {at} is listed and leased"
                );
                place[at as usize] = Some(count);
                count += 1;
                (prev, at) = (at, links.next);
            }
            ensure!(
                "order",
                list.ends.is_none_or(|ends| ends.1 == prev),
                "the tail is lost"
            );
            let expected = nodes()
                .filter(|&(at, _)| unleased(tier.span(index(at))))
                .count();
            ensure!("order", count == expected, "{count} of {expected} listed");
            for (at, node) in nodes().filter(|&(at, _)| unleased(tier.span(index(at)))) {
                let parent = place[node.parent as usize].unwrap_or(usize::MAX);
                ensure!(
                    "order",
                    place[at] < Some(parent),
                    "node {at} is behind its parent"
                );
            }
        }
    }
    Ok(())
}

/// Checks that each cached page is out of the pool once, and the conservation law.
fn check_pages(tree: &Tree, tier: &Tier) -> Result<(), Corruption> {
    tier.pool.check()?;
    let mut seen = vec![false; tier.pool.total() as usize + 1];
    for (at, node) in &tree.nodes {
        if !tier.is_resident(index(at)) {
            continue;
        }
        for &id in tier.pages_of(node) {
            let fresh = id != PageId::SCRATCH && tier.pool.is_out(id) && !seen[id.index()];
            ensure!(
                "pages",
                fresh,
                "page {} of node {at} is free or used twice",
                id.get()
            );
            seen[id.index()] = true;
        }
    }
    let (free, evictable, leased) = (tier.pool.free(), tier.evictable(), tier.leased);
    let (held, total) = (tier.held(), tier.pool.total());
    let sum = free + evictable + leased + held;
    ensure!(
        "conservation",
        sum == total,
        "{free} free + {evictable} evictable + {leased} leased + {held} held = {sum}, not {total}"
    );
    Ok(())
}

fn index(at: usize) -> u32 {
    crate::tree::narrow(at)
}
