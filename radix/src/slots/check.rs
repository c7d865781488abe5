//! Recounts everything from scratch.

use super::SlotTree;
use rootstock_memory::Corruption;
use std::collections::{BTreeMap, BTreeSet};

macro_rules! ensure {
    ($part:literal, $holds:expr, $($detail:tt)+) => {
        if !$holds {
            return Err(Corruption::new($part, format!($($detail)+)));
        }
    };
}

impl SlotTree {
    /// Recounts everything.
    ///
    /// # Errors
    /// The first contradiction found.
    /// # Cost
    /// Linear in nodes and slots.
    pub fn check(&self) -> Result<(), Corruption> {
        let mut sizes = [0, 0];
        let mut leaves = [BTreeSet::new(), BTreeSet::new()];
        let mut slots: [BTreeSet<&i64>; 2] = [BTreeSet::new(), BTreeSet::new()];
        let (mut counts, mut pinned) = ([0, 0], 0);
        for at in self.all_nodes() {
            self.check_node(at)?;
            let cell = self.cell(at);
            sizes[usize::from(cell.leases > 0)] += cell.device_tokens();
            for (leaves, rank) in leaves.iter_mut().zip(self.ranks_of(at)) {
                leaves.extend(rank.map(|rank| (rank, at)));
            }
            for (tier, held) in [&cell.device, &cell.host].into_iter().enumerate() {
                slots[tier].extend(held.iter().flatten());
                counts[tier] += held.as_ref().map_or(0, Vec::len);
            }
            if cell.pins > 0 {
                pinned += self.len_of(at) as u64;
            }
            let is_listed = cell.twin.and_then(|serial| self.twins.get(&serial)) == Some(&at);
            ensure!(
                "twins",
                is_listed == cell.twin.is_some(),
                "node {at} is lost"
            );
            ensure!(
                "twins",
                is_listed || !self.host.write_back || !self.is_twin(at),
                "node {at} is missed"
            );
        }
        ensure!(
            "sizes",
            sizes == [self.evictable, self.protected],
            "{sizes:?} tokens are counted, {} evictable and {} protected are noted",
            self.evictable,
            self.protected
        );
        for (order, expected) in self.orders.iter().zip(&leaves) {
            let fault = order.fault(expected);
            ensure!("leaves", fault.is_none(), "{}", fault.unwrap_or_default());
        }
        self.check_said()?;
        for (slots, count) in slots.iter().zip(counts) {
            ensure!("slots", slots.len() == count, "a slot is in two nodes");
        }
        ensure!(
            "pins",
            pinned == self.pinned_tokens,
            "{pinned} tokens are pinned, {} are noted",
            self.pinned_tokens
        );
        Ok(())
    }

    fn check_node(&self, at: u32) -> Result<(), Corruption> {
        let (cell, tokens) = (self.cell(at), self.len_of(at));
        for held in [&cell.device, &cell.host].into_iter().flatten() {
            ensure!("node", held.len() == tokens, "node {at} has other slots");
        }
        let is_somewhere = cell.device.is_some() || cell.host.is_some();
        ensure!("node", is_somewhere, "node {at} is on no tier");
        let kids = self
            .children(at)
            .filter(|&kid| self.cell(kid).device.is_some())
            .count();
        ensure!(
            "node",
            kids == cell.kids as usize,
            "node {at} has {kids} kids"
        );
        let parent = self.parent(at);
        if !self.is_root_at(parent) {
            let above = self.cell(parent);
            let is_prefix = cell.device.is_none() || above.device.is_some();
            ensure!("node", is_prefix, "node {at} is on the device alone");
            let is_prefix = cell.host.is_none() || above.host.is_some() || self.host.write_back;
            ensure!("node", is_prefix, "node {at} is copied alone");
            ensure!(
                "node",
                above.leases >= cell.leases,
                "node {at} is leased alone"
            );
        }
        Ok(())
    }

    /// Pins, retention and what is learned.
    fn check_said(&self) -> Result<(), Corruption> {
        let mut pins = BTreeMap::<u32, u32>::new();
        for pin in self.pins.values() {
            let found = self.find(pin.node);
            ensure!("pins", found.is_ok(), "the end of a pin is gone");
            let mut at = found.unwrap_or(self.root);
            while !self.is_root_at(at) {
                *pins.entry(at).or_default() += 1;
                let is_kept = !pin.is_lease || self.cell(at).leases > 0;
                ensure!("pins", is_kept, "node {at} lacks the lease of its pin");
                at = self.parent(at);
            }
        }
        for at in self.all_nodes() {
            let (noted, counted) = (self.cell(at).pins, pins.get(&at).copied());
            let counted = counted.unwrap_or(0);
            let what = "pins";
            ensure!(
                "pins",
                noted == counted,
                "node {at} has {counted} {what}, not {noted}"
            );
        }
        let retained = |at: u32| self.cells.get(at as usize).map(|cell| cell.retained);
        let fault = self.retention.fault(retained).or_else(|| {
            let pages = |at: u32| {
                let node = self.tree.nodes.get(at as usize)?;
                Some((node.depth, node.end()))
            };
            self.agent.as_ref().and_then(|agent| agent.fault(pages))
        });
        ensure!("said", fault.is_none(), "{}", fault.unwrap_or_default());
        Ok(())
    }

    /// The tree, a line a node, for a person.
    #[must_use]
    pub fn outline(&self) -> String {
        let mut text = String::new();
        let mut open: Vec<_> = self.spaces.keys().map(|&at| (at, 0)).collect();
        while let Some((at, depth)) = open.pop() {
            let (cell, indent) = (self.cell(at), 2 * depth);
            text += &format!(
                "{:indent$}[{}] {} tokens, leases {}, device {}, host {}\n",
                "",
                self.handle(at).0,
                self.len_of(at),
                cell.leases,
                cell.device.is_some(),
                cell.host.is_some(),
            );
            open.extend(self.children(at).map(|child| (child, depth + 1)));
        }
        text
    }
}
