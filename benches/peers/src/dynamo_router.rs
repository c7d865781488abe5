//! The radix tree of Dynamo's KV router: which worker holds which blocks. It holds no pages and has
//! no capacity; it is told what was stored, as events say it.

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, WorkerWithDpRank,
    compute_block_hash_for_seq, compute_seq_hash_for_block,
};

use crate::peer::{Kind, Peer};

const WORKER: u64 = 1;

pub(crate) struct DynamoRouter {
    tree: RadixTree,
    page_tokens: u32,
    events: u64,
}

pub(crate) struct Held {
    found: u32,
}

impl DynamoRouter {
    fn hashes(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        compute_block_hash_for_seq(tokens, self.page_tokens, BlockHashOptions::default())
    }

    fn look(&self, tokens: &[u32]) -> u32 {
        let found = self.tree.find_matches(self.hashes(tokens), false);
        let worker = WorkerWithDpRank::new(WORKER, 0);
        found.scores.get(&worker).copied().unwrap_or(0) * self.page_tokens
    }
}

impl Peer for DynamoRouter {
    const NAME: &'static str = "dynamo-router";
    const KIND: Kind = Kind::Index;
    type Held = Held;

    fn new(page_tokens: u32, _pages: u32) -> Self {
        Self {
            tree: RadixTree::new(),
            page_tokens,
            events: 0,
        }
    }

    fn begin(&mut self, tokens: &[u32], _pages: &mut Vec<u32>) -> Held {
        Held {
            found: self.look(tokens),
        }
    }

    fn found(held: &Held) -> u32 {
        held.found
    }

    fn take(&mut self, _held: &mut Held, _pages: u32) -> bool {
        true
    }

    fn insert(&mut self, held: &mut Held, tokens: &[u32]) {
        let local = self.hashes(tokens);
        let chained = compute_seq_hash_for_block(&local);
        let first = (held.found / self.page_tokens) as usize;
        let parent = first
            .checked_sub(1)
            .map(|last| ExternalSequenceBlockHash(chained[last]));
        let blocks = local.iter().zip(&chained).skip(first);
        let blocks = blocks.map(|(local, chained)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(*chained),
            tokens_hash: *local,
            mm_extra_info: None,
        });
        let store = KvCacheStoreData {
            parent_hash: parent,
            start_position: None,
            blocks: blocks.collect(),
        };
        if store.blocks.is_empty() {
            return;
        }
        self.events += 1;
        let event = KvCacheEvent {
            event_id: self.events,
            data: KvCacheEventData::Stored(store),
            dp_rank: 0,
        };
        let stored = self.tree.apply_event(RouterEvent::new(WORKER, event));
        stored.expect("what follows a match can be stored");
    }

    fn end(&mut self, _held: Held) {}

    fn probe(&self, tokens: &[u32]) -> u32 {
        self.look(tokens)
    }

    fn evict(&mut self, _free: u32, _pages: u32) -> bool {
        false
    }

    fn free(&self) -> u32 {
        u32::MAX
    }
}
