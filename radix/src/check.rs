//! Recounts everything from scratch: the tree's links and hashes, each tier's residency, leases,
//! order and pool, and the conservation law.

use crate::cache::PrefixCache;
use crate::node::NIL;
use crate::order::Order;
use crate::retain::Retention;
use crate::tier::Tier;
use crate::tree::Tree;
use rootstock_memory::{Corruption, PageId, TierId};
use std::collections::BTreeMap;

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
            seen += 1 + check_below(&self.tree, &self.retention, root)?;
        }
        let nodes = self.tree.nodes.len();
        ensure!(
            "tree",
            seen == nodes,
            "{seen} nodes can be reached, {nodes} exist"
        );
        let roots = self.tree.roots();
        let listed = self.tree.listed();
        ensure!(
            "table",
            listed == nodes - roots,
            "{listed} entries for {nodes} nodes"
        );
        for (at, node) in &self.tree.nodes {
            let (room, edge) = (node.edge.room(), self.tree.edge_len(node));
            ensure!(
                "tree",
                (edge..=4 * edge + 64).contains(&room),
                "node {at} has room for {room} tokens, {edge} used"
            );
        }
        for (at, node) in &self.tree.nodes {
            let resident = self.tiers.iter().any(|tier| tier.is_resident(index(at)));
            ensure!(
                "tree",
                resident || node.is_root(),
                "node {at} is in no tier"
            );
        }
        self.check_copies()?;
        self.check_pins()?;
        let priority_of = |at: u32| self.tree.nodes.get(at as usize).map(|node| node.priority);
        let pages_of = |at: u32| {
            let node = self.tree.nodes.get(at as usize)?;
            Some((node.depth, node.end()))
        };
        if let Some(fault) = self.agent.as_ref().and_then(|agent| agent.fault(pages_of)) {
            return Err(Corruption::new("agent", fault));
        }
        if let Some(fault) = self.programs.fault() {
            return Err(Corruption::new("programs", fault));
        }
        if let Some(fault) = self.retention.fault(priority_of) {
            return Err(Corruption::new("retention", fault));
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
            self.tree.promised <= leases,
            "{} nodes promised to {leases} leases",
            self.tree.promised
        );
        ensure!(
            "leases",
            leases == self.leases,
            "roots count {leases}, cache {}",
            self.leases
        );
        Ok(())
    }
}

impl PrefixCache {
    /// Recounts what copies keep and fill.
    fn check_copies(&self) -> Result<(), Corruption> {
        let mut busy = vec![BTreeMap::new(); self.tiers.len()];
        let (mut transit, mut leaving) = (vec![0; self.tiers.len()], vec![0; self.tiers.len()]);
        for flight in self.flights.all.values() {
            let pages = flight.end - flight.start;
            for (tier, (last, start, end)) in self.kept_by(flight) {
                for at in self.nodes_between(last, start, end) {
                    *busy[tier].entry(at).or_insert(0_u16) += 1;
                }
            }
            if flight.is_under_way() {
                transit[flight.to] += pages;
                leaving[flight.from] += if flight.leaving { pages } else { 0 };
            }
        }
        if let (Some(host), Some(store)) = (self.host, &self.store) {
            transit[host] += store.arriving();
            for (last, end) in store.kept() {
                for at in self.nodes_between(last, 0, end) {
                    *busy[host].entry(at).or_insert(0_u16) += 1;
                }
            }
        }
        for (n, tier) in self.tiers.iter().enumerate() {
            let counted = (tier.in_transit, tier.leaving);
            let found = (transit[n], leaving[n]);
            ensure!(
                "copies",
                counted == found,
                "tier {n} counts {counted:?}, not {found:?}"
            );
            for (at, node) in self.tree.nodes.iter().filter(|(_, node)| !node.is_root()) {
                let (span, at) = (tier.span(index(at)), index(at));
                let found = busy[n].get(&at).copied().unwrap_or_default();
                ensure!(
                    "copies",
                    span.busy == found,
                    "node {at} counts {} of {found}",
                    span.busy
                );
                let on_way = self.flights.all.values().any(|flight| {
                    flight.is_under_way()
                        && flight.to == n
                        && node.depth >= flight.start
                        && self
                            .nodes_between(flight.node, flight.start, flight.end)
                            .contains(&at)
                });
                ensure!(
                    "copies",
                    span.incoming == on_way,
                    "node {at} is on its way: {on_way}"
                );
            }
        }
        Ok(())
    }

    /// Recounts the pins.
    fn check_pins(&self) -> Result<(), Corruption> {
        let pins = &self.pins;
        let mut pages = 0;
        for (&at, pin) in &pins.by_node {
            let Some(node) = self.tree.nodes.get(at as usize) else {
                return Err(Corruption::new(
                    "pins",
                    format!("node {at} is pinned and gone"),
                ));
            };
            pages += node.pages;
            let due = pins.due.contains(&(pin.until, u32::MAX - node.depth, at));
            ensure!("pins", due, "the pin of node {at} is not due");
            let above = pins.by_node.get(&node.parent);
            let longer = above.is_some_and(|above| above.until >= pin.until) || node.depth == 0;
            ensure!(
                "pins",
                longer,
                "the pin of node {at} is longer than its parent's"
            );
        }
        ensure!(
            "pins",
            pins.due.len() == pins.by_node.len(),
            "a deadline has no pin"
        );
        ensure!(
            "pins",
            pages == pins.pages,
            "{pages} pages pinned, counted {}",
            pins.pages
        );
        ensure!(
            "pins",
            pages <= pins.budget,
            "{pages} pages pinned of {}",
            pins.budget
        );
        for (n, tier) in self.tiers.iter().enumerate() {
            let binds = self.host.is_none_or(|host| host == n);
            for (at, _) in self.tree.nodes.iter().filter(|(_, node)| !node.is_root()) {
                let pinned = binds && pins.by_node.contains_key(&index(at));
                let marked = tier.span(index(at)).pinned;
                ensure!(
                    "pins",
                    marked == pinned,
                    "node {at} is marked {marked} in tier {n}"
                );
            }
        }
        Ok(())
    }
}

/// Checks the links, hashes and depths below `at`; returns how many nodes there are.
fn check_below(tree: &Tree, retention: &Retention, at: u32) -> Result<usize, Corruption> {
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
                node.priority <= above || retention.has(child),
                "node {child} is above its parent"
            );
            let edge = tree.tokens_from(node, 0);
            let hash = tree.hash(at, &edge[..tree.page_tokens()]);
            ensure!("table", node.hash == hash, "node {child} has another hash");
            ensure!(
                "table",
                tree.child(at, &edge) == Some(child),
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
    let mut kids = vec![0_u32; tier.seats.len()];
    let (mut cached, mut leased) = (0, 0);
    for (at, node) in tree.nodes.iter().filter(|(_, node)| !node.is_root()) {
        let span = tier.span(index(at));
        let parent = tier.span(node.parent);
        if !span.resident {
            ensure!("tier", !span.is_kept(), "node {at} is kept where it is not");
            continue;
        }
        let device = matches!(tier.pool.tier(), TierId::Device(_));
        ensure!(
            "tier",
            parent.resident || !device,
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
        leased += if span.is_kept() { node.pages } else { 0 };
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
    let stale = |at: usize| !tree.nodes.contains(at) && tier.seats[at].span.resident;
    ensure!(
        "tier",
        !(0..tier.seats.len()).any(stale),
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
    match &tier.order {
        Order::Ranked(ranking, set) => {
            let expected = nodes()
                .filter(|&(at, _)| tier.span(index(at)).is_candidate())
                .count();
            ensure!(
                "order",
                set.len() == expected,
                "{} of {expected} ranked",
                set.len()
            );
            for (at, node) in nodes().filter(|&(at, _)| tier.span(index(at)).is_candidate()) {
                let key = (ranking.rank(node, &tier.span(index(at))), index(at));
                ensure!("order", set.contains(&key), "node {at} is not ranked");
            }
        }
        Order::Worth(shelf) => {
            let listed = shelf.check();
            let listed = listed.map_err(|fault| Corruption::new("order", fault))?;
            let candidates = || nodes().filter(|&(at, _)| tier.span(index(at)).is_candidate());
            let (expected, mut all) = (candidates().count(), candidates());
            let right = listed == expected && all.all(|(at, _)| shelf.holds(index(at)));
            ensure!("order", right, "{listed} of {expected} in cells");
        }
        Order::Recency(ends) => {
            let mut place = vec![None; tree.nodes.capacity()];
            let (mut at, mut prev, mut count) = (ends.0.map_or(NIL, |ends| ends.0), NIL, 0);
            while at != NIL {
                let links = tier.span(at).links;
                ensure!(
                    "order",
                    links.is_listed() && links.prev == prev,
                    "node {at} is unlinked"
                );
                ensure!(
                    "order",
                    tier.span(at).is_listed(),
                    "node {at} is listed and leased"
                );
                place[at as usize] = Some(count);
                count += 1;
                (prev, at) = (at, links.next);
            }
            ensure!(
                "order",
                ends.0.is_none_or(|ends| ends.1 == prev),
                "the tail is lost"
            );
            let expected = nodes()
                .filter(|&(at, _)| tier.span(index(at)).is_listed())
                .count();
            ensure!("order", count == expected, "{count} of {expected} listed");
            for (at, node) in nodes().filter(|&(at, _)| tier.span(index(at)).is_listed()) {
                if tier.span(node.parent).pinned {
                    continue;
                }
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
        let pages = tier.pages_of(index(at));
        let expected = if tier.is_resident(index(at)) {
            node.pages as usize
        } else {
            0
        };
        ensure!(
            "pages",
            pages.len() == expected,
            "node {at} has {} pages of {expected}",
            pages.len()
        );
        for &id in pages {
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
    let (held, total) = (tier.held() + tier.in_transit, tier.pool.total());
    let sum = free + evictable + leased + held;
    ensure!(
        "conservation",
        sum == total,
        "{free} free + {evictable} evictable + {leased} leased + {held} held or in transit \
         = {sum}, not {total}"
    );
    Ok(())
}

fn index(at: usize) -> u32 {
    crate::tree::narrow(at)
}
