//! What changed in the cache, as data: pages stored in and removed from a tier, tiers cleared.
//!
//! Events follow residency and nothing else: splits and reads make none. A page is announced by a
//! chained hash, as Dynamo computes it, from what the event carries:
//!
//! ```text
//! S        = 1337 + xxh3_64(lora, seed 0) + xxh3_64(salt, seed 1)      (absent or empty: nothing)
//! local[i] = xxh3_64(tokens of page i as little-endian u32, seed S)
//! seq[0]   = local[0];   seq[i] = xxh3_64(seq[i-1] || local[i] as little-endian u64, seed 1337)
//! ```
//! The log is bounded. When nobody fetches it, the oldest events go and a gap says how many: a
//! consumer then starts over from [`crate::PrefixCache::dump_events`].

use crate::cache::{PrefixCache, row_of};
use crate::node::NIL;
use crate::tree::Tree;
use crate::{NamespaceId, NamespaceKey, Token};
use rootstock_memory::{ReplicaId, TierId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Base seed of all hashes.
const SEED: u64 = 1337;

/// The tier an event is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum EventTier {
    /// Device memory of a replica.
    Device(ReplicaId),
    /// Host memory.
    Host,
}

/// A page that became matchable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredPage {
    /// Chained hash of all tokens up to and with this page.
    pub sequence_hash: u64,
    /// Hash of the tokens of this page alone.
    pub local_hash: u64,
    /// The tokens of this page.
    pub tokens: Box<[Token]>,
}

/// One change. Splits and reads are none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KvEvent {
    /// Pages became matchable in a tier, in prefix order.
    Stored {
        /// Where.
        tier: EventTier,
        /// Whose.
        ns: NamespaceId,
        /// Sequence hash of the page before the first one; `None` at the root.
        parent: Option<u64>,
        /// The pages.
        pages: Vec<StoredPage>,
    },
    /// Pages went from a tier, deepest first.
    Removed {
        /// Where.
        tier: EventTier,
        /// Their sequence hashes.
        hashes: Vec<u64>,
    },
    /// A tier was emptied.
    Cleared {
        /// Which.
        tier: EventTier,
    },
    /// Events were lost before this point, because the log was full.
    Gap {
        /// How many.
        events: u64,
    },
}

/// Seed of the local hashes of a namespace.
pub(crate) fn namespace_seed(key: &NamespaceKey) -> u64 {
    let part = |text: &Option<String>, seed| match text.as_deref() {
        None | Some("") => 0,
        Some(text) => xxh3_64_with_seed(text.as_bytes(), seed),
    };
    SEED.wrapping_add(part(&key.lora, 0))
        .wrapping_add(part(&key.salt, 1))
}

/// Hash of the tokens of a page alone.
pub(crate) fn local_hash(seed: u64, tokens: &[Token]) -> u64 {
    let mut hasher = Xxh3::with_seed(seed);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest()
}

/// Hash of a page with all before it.
pub(crate) fn sequence_hash(parent: Option<u64>, local: u64) -> u64 {
    match parent {
        None => local,
        Some(parent) => {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&parent.to_le_bytes());
            bytes[8..].copy_from_slice(&local.to_le_bytes());
            xxh3_64_with_seed(&bytes, SEED)
        }
    }
}

/// Chained hashes of all pages of a prompt, a last partial one too, as events would tell them.
pub fn sequence_hashes(key: &NamespaceKey, tokens: &[Token], page_tokens: usize) -> Vec<u64> {
    let seed = namespace_seed(key);
    let chain = |parent: &mut Option<u64>, page: &[Token]| {
        *parent = Some(sequence_hash(*parent, local_hash(seed, page)));
        *parent
    };
    let pages = tokens.chunks(page_tokens.max(1));
    pages.scan(None, chain).collect()
}

/// Hashes of all pages in the tree, and what is to be told.
#[derive(Debug)]
pub(crate) struct Events {
    /// Sequence hashes by node, for each page of its edge.
    pub(crate) hashes: Vec<Vec<u64>>,
    log: VecDeque<KvEvent>,
    limit: usize,
    lost: u64,
}

impl Events {
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            hashes: Vec::new(),
            log: VecDeque::new(),
            limit: limit as usize,
            lost: 0,
        }
    }

    fn push(&mut self, event: KvEvent) {
        if self.log.len() == self.limit {
            self.log.pop_front();
            self.lost += 1;
        }
        self.log.push_back(event);
    }
}

impl PrefixCache {
    /// Grows whenever pages become matchable in a tier or go from one: while it stays, a probe
    /// gives what it gave before.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Appends the events since the last call.
    pub fn drain_events(&mut self, out: &mut Vec<KvEvent>) {
        if let Some(events) = &mut self.events {
            let lost = std::mem::take(&mut events.lost);
            out.extend((lost > 0).then_some(KvEvent::Gap { events: lost }));
            out.extend(events.log.drain(..));
        }
    }

    /// Appends events that tell a new consumer what is cached now, parents first. Nothing without
    /// `max_events`.
    ///
    /// # Cost
    /// Linear in what is cached.
    pub fn dump_events(&self, out: &mut Vec<KvEvent>) {
        for root in self.namespaces.roots() {
            let mut stack = vec![root];
            while let Some(at) = stack.pop() {
                let node = self.tree.node(at);
                for tier in 0..self.tiers.len() {
                    if !node.is_root() && self.tiers[tier].is_resident(at) {
                        out.extend(self.stored_event(tier, at, node.pages));
                    }
                }
                let mut child = node.first_child;
                while child != NIL {
                    stack.push(child);
                    child = self.tree.node(child).next_sibling;
                }
            }
        }
    }

    /// The last `count` pages of a node are new in the tree: their hashes are computed.
    pub(crate) fn hash_pages(&mut self, at: u32, count: u32) {
        let Some(events) = &mut self.events else {
            return;
        };
        let node = self.tree.node(at);
        let seed = self.namespaces.seed_of(self.tree.root_of(at));
        let first = node.pages - count;
        let mut parent = parent_hash(&self.tree, &events.hashes, at, first);
        let row = row_of(&mut events.hashes, at as usize);
        row.truncate(first as usize);
        let p = self.tree.page_tokens();
        for page in self.tree.tokens_from(node, first).chunks_exact(p) {
            let hash = sequence_hash(parent, local_hash(seed, page));
            row.push(hash);
            parent = Some(hash);
        }
    }

    /// The last `count` pages of a node are in a tier now.
    pub(crate) fn tell_stored(&mut self, tier: usize, at: u32, count: u32) {
        self.revision += 1;
        if self.events.is_some() {
            let event = self.stored_event(tier, at, count);
            if let (Some(events), Some(event)) = (&mut self.events, event) {
                events.push(event);
            }
        }
    }

    /// The pages of a node from `keep` on go from a tier. Called before they do.
    pub(crate) fn tell_removed(&mut self, tier: usize, at: u32, keep: u32) {
        self.revision += 1;
        let tier = self.event_tier(tier);
        let Some(events) = &mut self.events else {
            return;
        };
        let node = self.tree.node(at);
        let row = &events.hashes[at as usize];
        let part = keep as usize..node.pages as usize;
        let hashes: Vec<u64> = row[part].iter().rev().copied().collect();
        events.push(KvEvent::Removed { tier, hashes });
    }

    /// Every tier is empty now, and that is all there is to tell.
    pub(crate) fn tell_cleared(&mut self) {
        self.revision += 1;
        let tiers: Vec<EventTier> = (0..self.tiers.len())
            .map(|at| self.event_tier(at))
            .collect();
        if let Some(events) = &mut self.events {
            tiers
                .into_iter()
                .for_each(|tier| events.push(KvEvent::Cleared { tier }));
        }
    }

    fn stored_event(&self, tier: usize, at: u32, count: u32) -> Option<KvEvent> {
        let events = self.events.as_ref()?;
        let (node, root) = (self.tree.node(at), self.tree.root_of(at));
        let (seed, ns) = (self.namespaces.seed_of(root), self.namespaces.id_of(root)?);
        let first = node.pages - count;
        let row = &events.hashes[at as usize];
        let hashes = &row[first as usize..node.pages as usize];
        let tokens = self.tree.tokens_from(node, first);
        let pages = tokens
            .chunks_exact(self.tree.page_tokens())
            .zip(hashes)
            .map(|(tokens, &hash)| StoredPage {
                sequence_hash: hash,
                local_hash: local_hash(seed, tokens),
                tokens: tokens.into(),
            });
        let parent = parent_hash(&self.tree, &events.hashes, at, first);
        let tier = self.event_tier(tier);
        Some(KvEvent::Stored {
            tier,
            ns,
            parent,
            pages: pages.collect(),
        })
    }

    fn event_tier(&self, tier: usize) -> EventTier {
        match self.tiers[tier].pool.tier() {
            TierId::Device(replica) => EventTier::Device(replica),
            TierId::Host | TierId::Storage => EventTier::Host,
        }
    }
}

/// The sequence hash before page `first` of the edge of `at`.
fn parent_hash(tree: &Tree, hashes: &[Vec<u64>], at: u32, first: u32) -> Option<u64> {
    let (holder, pages) = if first > 0 {
        (at, first)
    } else {
        let parent = tree.node(at).parent;
        (parent, tree.node(parent).pages)
    };
    let last = pages.checked_sub(1)?;
    hashes.get(holder as usize)?.get(last as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dynamo's own constants.
    #[test]
    fn hashes_agree_with_the_golden_vectors() {
        let text = |value: &str| Some(value.to_owned());
        let key = |lora, salt| NamespaceKey {
            lora,
            salt,
            ..NamespaceKey::default()
        };
        let (salt, lora) = (text("tenant-a"), text("my-lora"));
        let cases: [(NamespaceKey, u64, &[u64], &[u64]); 4] = [
            (
                key(None, None),
                1337,
                &[
                    14_643_705_804_678_351_452,
                    16_777_012_769_546_811_212,
                    483_935_686_894_639_516,
                ],
                &[
                    14_643_705_804_678_351_452,
                    4_945_711_292_740_353_085,
                    12_583_592_247_330_656_132,
                ],
            ),
            (
                key(None, salt.clone()),
                1_948_188_790_972_764_086,
                &[5_738_685_477_468_498_325, 11_202_231_085_456_067_787],
                &[5_738_685_477_468_498_325, 1_076_233_986_426_276_607],
            ),
            (
                key(lora.clone(), text("")),
                12_827_409_268_353_072_861,
                &[15_671_544_057_904_749_233, 7_919_241_211_032_067_838],
                &[15_671_544_057_904_749_233, 15_486_599_009_994_050_725],
            ),
            (
                key(lora, salt),
                14_775_598_059_325_835_610,
                &[6_157_910_915_076_630_503, 3_256_431_856_703_716_508],
                &[6_157_910_915_076_630_503, 9_770_935_122_131_878_621],
            ),
        ];
        for (key, seed, locals, sequences) in cases {
            assert_eq!(namespace_seed(&key), seed);
            let mut parent = None;
            for (page, (&local, &sequence)) in (0..).zip(locals.iter().zip(sequences)) {
                let tokens: Vec<Token> = (page * 4 + 1..page * 4 + 5).collect();
                assert_eq!(local_hash(seed, &tokens), local);
                let hash = sequence_hash(parent, local);
                assert_eq!(hash, sequence);
                parent = Some(hash);
            }
        }
    }
}
