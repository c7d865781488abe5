//! The radix cache with which Dynamo's simulator models SGLang's, from the released source of
//! `aisimulate-core`: keyed by hashes of pages. Inserts from the locked node, as its scheduler
//! does.

use crate::engine::cache::radix_cache::{KvPageId, NodeId, RadixCache};
use crate::engine::common::hashing::{LocalBlockHash, compute_block_hash_for_seq};
use crate::peer::{Kind, Peer};

pub(crate) struct DynamoSim {
    cache: RadixCache,
    page_tokens: usize,
}

pub(crate) struct Held {
    hashes: Vec<LocalBlockHash>,
    node: NodeId,
    found: usize,
    pages: Vec<KvPageId>,
}

impl DynamoSim {
    /// The page ids of the path to a node, of `count` pages.
    fn gather(&self, node: NodeId, count: usize) -> Vec<KvPageId> {
        let mut edges = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at {
            let node = self.cache.node(node);
            edges.push(&node.value);
            at = node.parent;
        }
        let mut pages = Vec::with_capacity(count);
        for edge in edges.iter().rev() {
            pages.extend_from_slice(edge);
        }
        pages
    }
}

impl Peer for DynamoSim {
    const NAME: &'static str = "dynamo-sim";
    const KIND: Kind = Kind::Hashed;
    type Held = Held;

    fn new(page_tokens: u32, pages: u32) -> Self {
        let tokens = pages as usize * page_tokens as usize;
        let cache = RadixCache::new(tokens, page_tokens as usize);
        Self {
            cache,
            page_tokens: page_tokens as usize,
        }
    }

    fn begin(&mut self, tokens: &[u32], pages: &mut Vec<u32>) -> Held {
        let hashes = compute_block_hash_for_seq(tokens, self.page_tokens);
        let (found, node) = self.cache.match_prefix_hashes_and_lock(&hashes);
        let ids = self.gather(node, hashes.len());
        pages.extend(
            ids.iter()
                .map(|id| u32::try_from(id.index()).unwrap_or(u32::MAX)),
        );
        Held {
            hashes,
            node,
            found,
            pages: ids,
        }
    }

    fn found(held: &Held) -> u32 {
        u32::try_from(held.found).unwrap_or(u32::MAX)
    }

    fn take(&mut self, held: &mut Held, pages: u32) -> bool {
        let missing = (pages as usize).saturating_sub(self.cache.page_pool.available_pages());
        if missing > 0 {
            self.cache.evict(missing * self.page_tokens);
        }
        match self.cache.page_pool.allocate_pages(pages as usize) {
            Some(ids) => {
                held.pages.extend(ids);
                true
            }
            None => false,
        }
    }

    fn insert(&mut self, held: &mut Held, tokens: &[u32]) {
        // The pages of the prompt are hashed already.
        let known = held.hashes.len() * self.page_tokens;
        let rest = compute_block_hash_for_seq(&tokens[known..], self.page_tokens);
        held.hashes.extend(rest);
        let (hashes, pages) = (&held.hashes, &held.pages);
        let cache = &mut self.cache;
        let last = cache.insert_page_hashes_from_node(held.node, held.found, hashes, pages);
        // As its scheduler does: the lock moves to where the request ends now.
        if last != held.node {
            cache.inc_lock_ref(last);
            cache.dec_lock_ref(held.node);
            held.node = last;
        }
    }

    fn end(&mut self, held: Held) {
        self.cache.dec_lock_ref(held.node);
    }

    fn probe(&self, tokens: &[u32]) -> u32 {
        let hashes = compute_block_hash_for_seq(tokens, self.page_tokens);
        let found = self.cache.prefix_match_hashes_len(&hashes);
        u32::try_from(found).unwrap_or(u32::MAX)
    }

    fn evict(&mut self, _free: u32, pages: u32) -> bool {
        self.cache.evict(pages as usize * self.page_tokens);
        true
    }

    fn free(&self) -> u32 {
        u32::try_from(self.cache.page_pool.available_pages()).unwrap_or(u32::MAX)
    }
}
