//! Content addresses of the pages in the tree, while a store is attached. They lie by node, as
//! event hashes do, and cost nothing otherwise.

use crate::Token;
use crate::cache::{PrefixCache, row_of};
use rootstock_memory::{PageAddress, PageId, StorePage};

impl PrefixCache {
    /// The last `count` pages of a node are new in the tree: their addresses are computed.
    pub(crate) fn address_pages(&mut self, at: u32, count: u32) {
        let node = self.tree.node(at);
        let first = node.pages - count;
        let Some(mut address) = self.address_before(at, first) else {
            return;
        };
        let Some(store) = &mut self.store else { return };
        let row = row_of(&mut store.addresses, at as usize);
        row.truncate(first as usize);
        let tokens = self.tree.tokens_from(node, first);
        for page in tokens.chunks_exact(self.tree.page_tokens()) {
            address = address.next(page);
            row.push(address);
        }
    }

    /// The address of the page before page `first` of the edge of `at`, or the seed.
    pub(crate) fn address_before(&self, at: u32, first: u32) -> Option<PageAddress> {
        let store = self.store.as_ref()?;
        let (mut holder, mut pages) = (at, first);
        if first == 0 && !self.tree.node(at).is_root() {
            holder = self.tree.node(at).parent;
            pages = self.tree.node(holder).pages;
        }
        let node = self.tree.node(holder);
        if node.is_root() {
            return self.namespaces.store_seed_of(holder);
        }
        let last = pages.checked_sub(1)?;
        let row = store.addresses.get(holder as usize)?;
        row.get(last as usize).copied()
    }

    /// The address of the page before page `pages` of the path that ends in `at`, or the seed.
    pub(crate) fn address_at(&self, at: u32, pages: u32) -> Option<PageAddress> {
        let node = self.tree.node(at);
        let first = pages.checked_sub(node.depth)?;
        (first <= node.pages).then(|| self.address_before(at, first))?
    }

    /// The addresses of the pages of a node.
    pub(crate) fn addresses_of(&self, at: u32) -> &[PageAddress] {
        let pages = self.tree.node(at).pages as usize;
        let rows = self.store.as_ref().map(|store| &store.addresses);
        let row = rows.and_then(|rows| rows.get(at as usize));
        row.and_then(|row| row.get(..pages)).unwrap_or_default()
    }

    /// The pages of a node as a plan names them.
    pub(crate) fn store_pages(&self, host: usize, at: u32) -> Vec<StorePage> {
        let node = self.tree.node(at);
        let mut parent = self.address_before(at, 0);
        let tokens = self.tree.tokens_from(node, 0);
        let pages = tokens.chunks_exact(self.tree.page_tokens());
        let ids = self.tiers[host].pages_of(at);
        let page = |(tokens, &host): (&[Token], &PageId)| {
            let before = parent?;
            let address = before.next(tokens);
            parent = Some(address);
            Some(StorePage {
                host,
                address,
                parent: before,
                tokens: tokens.into(),
            })
        };
        pages.zip(ids).map_while(page).collect()
    }

    pub(crate) fn tokens_of(&self, pages: u32) -> usize {
        pages as usize * self.tree.page_tokens()
    }
}
