//! What lies in a store and how much it takes: the quota and the order in which pages go, least
//! recently used first. Knows addresses and sizes only.

use crate::PageAddress;
use std::collections::BTreeMap;

/// The pages of one store.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    pages: BTreeMap<PageAddress, (u64, u64)>,
    /// By use: the count of uses at the last one.
    order: BTreeMap<u64, PageAddress>,
    uses: u64,
    bytes: u64,
}

impl Shelf {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn has(&self, address: PageAddress) -> bool {
        self.pages.contains_key(&address)
    }

    /// Adds a page, or says that it was used.
    pub(super) fn put(&mut self, address: PageAddress, bytes: u64) {
        self.remove(address);
        self.uses += 1;
        self.pages.insert(address, (self.uses, bytes));
        self.order.insert(self.uses, address);
        self.bytes += bytes;
    }

    /// A page was used.
    pub(super) fn touch(&mut self, address: PageAddress) {
        if let Some(&(_, bytes)) = self.pages.get(&address) {
            self.put(address, bytes);
        }
    }

    pub(super) fn remove(&mut self, address: PageAddress) -> bool {
        let Some((use_, bytes)) = self.pages.remove(&address) else {
            return false;
        };
        self.order.remove(&use_);
        self.bytes -= bytes;
        true
    }

    /// The page that goes next when more than `quota` bytes are taken.
    pub(super) fn excess(&self, quota: u64) -> Option<PageAddress> {
        let first = self.order.values().next().copied();
        first.filter(|_| self.bytes > quota)
    }

    /// All pages, the first to go first.
    pub(super) fn addresses(&self) -> impl Iterator<Item = PageAddress> {
        self.order.values().copied()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_page_goes_and_bytes_add_up() {
        let address = |n: u8| PageAddress([n; 16]);
        let mut shelf = Shelf::default();
        (1..=3).for_each(|n| shelf.put(address(n), 10));
        shelf.touch(address(1));
        shelf.touch(address(9));
        shelf.put(address(3), 20);
        assert_eq!((shelf.len(), shelf.bytes()), (3, 40));
        assert_eq!(shelf.excess(40), None);
        assert_eq!(shelf.excess(39), Some(address(2)));
        assert!(shelf.remove(address(2)) && !shelf.remove(address(2)));
        assert_eq!(shelf.excess(1), Some(address(1)));
        assert!(shelf.addresses().eq([address(1), address(3)]));
        shelf.clear();
        assert_eq!((shelf.len(), shelf.bytes(), shelf.excess(0)), (0, 0, None));
    }
}
