//! One open-addressing table for the children of all nodes: hash of (parent, first page) to node.
//! Linear probing, backward-shift deletion, load 1/2 to 5/8: the table grows by a fifth, as homes
//! ascend with the tag and so does what is moved. Eight bytes a slot: half of the hash finds its
//! home and tells most others apart. It never proves equality: the caller compares tokens. Never
//! iterated, so its order cannot leak into a plan.

/// Slot content: a tag, which is the hash folded, and the node; an index of `EMPTY` is a free slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    tag: u32,
    node: u32,
}

const EMPTY: u32 = u32::MAX;
const FREE: Slot = Slot {
    tag: 0,
    node: EMPTY,
};

/// The table.
#[derive(Debug)]
pub(crate) struct ChildTable {
    slots: Vec<Slot>,
    used: usize,
}

impl ChildTable {
    pub(crate) fn new() -> Self {
        Self {
            slots: vec![FREE; 64],
            used: 0,
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.used
    }

    /// The first node under `hash` for which `same` holds.
    pub(crate) fn find(&self, hash: u64, mut same: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = tag(hash);
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot.node == EMPTY {
                return None;
            }
            if slot.tag == tag && same(slot.node) {
                return Some(slot.node);
            }
            at = self.after(at);
        }
    }

    /// Brings the places of some hashes near, all at once: none waits for another.
    pub(crate) fn fetch(&self, tags: impl Iterator<Item = u32>) {
        let tags = tags.map(|hash| self.slots[self.home(tag(hash.into()))].tag);
        std::hint::black_box(tags.fold(0, |all, tag| all ^ tag));
    }

    /// Adds a node that is not there yet.
    pub(crate) fn insert(&mut self, hash: u64, node: u32) {
        if (self.used + 1) * 8 > self.slots.len() * 5 {
            let wider = vec![FREE; self.slots.len() / 5 * 6 + 8];
            let old = std::mem::replace(&mut self.slots, wider);
            for slot in old.into_iter().filter(|slot| slot.node != EMPTY) {
                self.place(slot);
            }
        }
        self.place(Slot {
            tag: tag(hash),
            node,
        });
        self.used += 1;
    }

    /// Puts `to` in the place of `from`.
    pub(crate) fn replace(&mut self, hash: u64, from: u32, to: u32) {
        let at = self.position(hash, from);
        self.slots[at].node = to;
    }

    /// Removes a node.
    pub(crate) fn remove(&mut self, hash: u64, node: u32) {
        let mut hole = self.position(hash, node);
        let mut at = hole;
        loop {
            at = self.after(at);
            let slot = self.slots[at];
            if slot.node == EMPTY {
                break;
            }
            // A later entry may move into the hole when the hole lies between its home and it.
            if self.distance(self.home(slot.tag), at) >= self.distance(hole, at) {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = FREE;
        self.used -= 1;
    }

    fn position(&self, hash: u64, node: u32) -> usize {
        let mut at = self.home(tag(hash));
        while self.slots[at].node != node {
            assert!(
                self.slots[at].node != EMPTY,
                "node {node} is in the child table"
            );
            at = self.after(at);
        }
        at
    }

    fn place(&mut self, slot: Slot) {
        let mut at = self.home(slot.tag);
        while self.slots[at].node != EMPTY {
            at = self.after(at);
        }
        self.slots[at] = slot;
    }

    const fn home(&self, tag: u32) -> usize {
        ((tag as u64 * self.slots.len() as u64) >> 32) as usize
    }

    const fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() {
            0
        } else {
            at + 1
        }
    }

    /// Slots from one to another, around the end.
    const fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.slots.len() - from
        }
    }
}

/// Both halves of a hash as one.
#[expect(clippy::cast_possible_truncation, reason = "the high half is in")]
pub(crate) const fn tag(hash: u64) -> u32 {
    (hash ^ hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Hashes of three homes, one of them the last, so that runs of slots wrap and shift.
    fn hash(n: u32) -> u64 {
        u64::from([0, 1 << 31, u32::MAX][n as usize % 3])
    }

    #[test]
    fn the_table_agrees_with_a_map_under_heavy_collision() {
        let (mut table, mut map) = (ChildTable::new(), BTreeMap::new());
        let mut seed = 1_u32;
        for _ in 0..2_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let node = seed >> 16 & 127;
            if map.remove(&node).is_some() {
                table.remove(hash(node), node);
            } else {
                table.insert(hash(node), node);
                map.insert(node, ());
            }
            for node in 0..128 {
                let found = table.find(hash(node), |found| found == node);
                assert_eq!(found.is_some(), map.contains_key(&node));
            }
            assert_eq!(table.len(), map.len());
        }
    }
}
