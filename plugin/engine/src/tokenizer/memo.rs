//! Remembered encodings of long pieces of text.
//!
//! A conversation comes back whole with each turn, so most of its text was encoded a moment ago.
//! Special tokens part it into messages, and a message's ids do not depend on what stands around
//! it: so each long stretch between special tokens is looked up first, by hash, then compared byte
//! by byte. What is found is exactly what encoding would give.
//!
//! Bounded in bytes; the least recently used goes first.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Shorter texts are encoded faster than they are kept.
pub(super) const TEXT_BYTES_MIN: usize = 128;
/// One text may take this part of the memory.
const SHARE: usize = 4;
/// Keys, links and allocations of one entry.
const ENTRY_BYTES: usize = 150;

#[derive(Debug)]
pub(super) struct Memo {
    bytes_max: usize,
    bytes: usize,
    entries: BTreeMap<u64, Entry>,
    /// When each entry was last used: a counter, so that each is unique.
    order: BTreeMap<u64, u64>,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    text: Box<str>,
    ids: Arc<[u32]>,
    used: u64,
}

impl Memo {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            bytes: 0,
            entries: BTreeMap::new(),
            order: BTreeMap::new(),
            clock: 0,
        }
    }

    /// The ids of a text, if they are remembered.
    pub(super) fn find(&mut self, text: &str) -> Option<Arc<[u32]>> {
        let key = hash(text);
        let entry = self
            .entries
            .get_mut(&key)
            .filter(|entry| &*entry.text == text)?;
        self.order.remove(&entry.used);
        self.clock += 1;
        entry.used = self.clock;
        self.order.insert(self.clock, key);
        Some(Arc::clone(&entry.ids))
    }

    /// Remembers the ids of a text; of two texts with one hash, the later stays.
    pub(super) fn insert(&mut self, text: &str, ids: &[u32]) {
        let cost = cost(text, ids);
        if cost > self.bytes_max / SHARE {
            return;
        }
        let key = hash(text);
        self.remove(key);
        self.clock += 1;
        let entry = Entry {
            text: text.into(),
            ids: ids.into(),
            used: self.clock,
        };
        self.entries.insert(key, entry);
        self.order.insert(self.clock, key);
        self.bytes += cost;
        while self.bytes > self.bytes_max
            && let Some((_, &oldest)) = self.order.first_key_value()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, key: u64) {
        if let Some(entry) = self.entries.remove(&key) {
            self.order.remove(&entry.used);
            self.bytes -= cost(&entry.text, &entry.ids);
        }
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + ENTRY_BYTES
}

/// 64-bit FNV-1a: it finds candidates only.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_inserted_is_found_until_room_is_needed() {
        let mut memo = Memo::new(2000);
        for id in 0..10_u32 {
            memo.insert(&format!("text {id}"), &[id]);
            assert!(memo.bytes <= 2000);
        }
        assert_eq!(memo.find("text 0").as_deref(), Some([0].as_slice()));
        assert_eq!(memo.find("text x"), None);
        // 2000 bytes have room for 12 entries of 160 or 161: four more drop 1 and 2, not 0.
        for id in 10..14_u32 {
            memo.insert(&format!("text {id}"), &[id]);
        }
        assert_eq!((memo.find("text 1"), memo.find("text 2")), (None, None));
        assert!(memo.find("text 0").is_some() && memo.find("text 3").is_some());
        memo.insert("text 3", &[7]);
        assert_eq!(memo.find("text 3").as_deref(), Some([7].as_slice()));
        memo.insert(&"long".repeat(200), &[1]);
        assert_eq!(memo.find(&"long".repeat(200)), None, "more than its share");
        let recount: usize = memo.entries.values().map(|e| cost(&e.text, &e.ids)).sum();
        assert_eq!(
            (recount, memo.order.len()),
            (memo.bytes, memo.entries.len())
        );
    }
}
