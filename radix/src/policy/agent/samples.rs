//! Pages that are watched, cached or not: a fixed share, chosen by the hash of their prefix.
//!
//! A watched page that is evicted stays known as a ghost. Of too many, those that nothing else
//! asks for are forgotten, the oldest first. So reuse is learned at ages that the cache itself
//! does not reach, in bounded memory. Where a page is in the tree its node lists it; only pages
//! that are computed are ever hashed.
//!
//! A share of the watched pages is followed: through caches of other sizes, which costs many times
//! what watching does.

use crate::Token;
use crate::node::NIL;
use crate::order::List;
use crate::table::ChildTable;
use crate::tree::narrow;
use std::slice::ChunksExact;

/// A watched page.
#[derive(Clone, Copy, Debug)]
struct Sample {
    hash: u64,
    /// In the prefix, from 0.
    depth: u32,
    /// The node that holds it, `NIL` for a ghost.
    node: u32,
    /// The next one of that node, which is less deep.
    next: u32,
    uses: u32,
}

/// Hash of a prefix that continues one of hash `chain` by a page. It tells prefixes apart for
/// counting and for nothing else: where two share it, one is not watched.
#[inline]
pub(crate) fn chain(mut chain: u64, page: &[Token]) -> u64 {
    // Pages of the usual size take no loop.
    if let Ok(block) = page.try_into() {
        return chain_block(chain, block);
    }
    let (blocks, rest) = page.as_chunks();
    for block in blocks {
        chain = chain_block(chain, block);
    }
    for &token in rest {
        chain = fold(chain.rotate_left(31) ^ u64::from(token));
    }
    chain
}

/// A sum of products has no order, so that it is computed side by side.
#[inline]
fn chain_block(chain: u64, block: &[Token; 2 * HALF]) -> u64 {
    let mut sum = 0_u64;
    for at in 0..HALF {
        let [one, other] = [at, HALF + at].map(|at| block[at].wrapping_add(KEYS[at]));
        sum = sum.wrapping_add(u64::from(one) * u64::from(other));
    }
    fold(chain.rotate_left(31) ^ sum)
}

/// Half of the tokens that are hashed at a time.
const HALF: usize = 8;

/// What tells the places of tokens apart.
const KEYS: [u32; 2 * HALF] = [
    0x29c4_e5a1,
    0x8f3d_61b7,
    0xa36c_58f3,
    0xd1b9_4e07,
    0xf17b_2d8d,
    0x6a09_c3e5,
    0x51d2_9b43,
    0xb865_3f1d,
    0x7e90_a4c9,
    0x3b17_d06b,
    0xc48a_72e5,
    0x964f_1b83,
    0x0d5e_c72f,
    0xe3a1_8659,
    0x47bc_03d1,
    0x9812_ef77,
];

/// Both halves of a product with a number that has no pattern, as one.
fn fold(sum: u64) -> u64 {
    let (low, high) = sum.carrying_mul(0x6a09_c3e5_f17b_2d8d, 0);
    low ^ high
}

/// All watched pages.
#[derive(Debug)]
pub(crate) struct Samples {
    all: Vec<Sample>,
    free: Vec<u32>,
    table: ChildTable,
    /// The deepest of each node.
    firsts: Vec<u32>,
    /// Those that are not in the tree and that nothing else asks for, oldest first.
    spares: List,
    known_max: usize,
    /// Hashes of watched pages have these bits 0.
    mask: u64,
    /// And those of followed pages these.
    follow_mask: u64,
}

/// What became of a page that was computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// It is not watched.
    Not,
    /// It is watched from now on.
    New(u32),
    /// It was a ghost, used so many times.
    Again(u32, u32),
}

impl Samples {
    /// Watches one of `2^shift` pages and follows one of `2^follow_shift`; above `known_max` the
    /// spare ones are forgotten.
    pub(crate) fn new(shift: u32, follow_shift: u32, known_max: usize) -> Self {
        Self {
            all: Vec::new(),
            free: Vec::new(),
            table: ChildTable::new(),
            firsts: Vec::new(),
            spares: List::default(),
            known_max,
            mask: (1 << shift) - 1,
            follow_mask: (1 << follow_shift) - 1,
        }
    }

    /// Goes on with `chain` over pages up to the next one that is watched; how many those are.
    #[inline(never)]
    pub(crate) fn next(&self, chain: &mut u64, pages: &mut ChunksExact<'_, Token>) -> Option<u32> {
        let (before, mask, mut hash) = (pages.len(), self.mask, *chain);
        let found = pages.by_ref().any(|page| {
            hash = self::chain(hash, page);
            hash & mask == 0
        });
        *chain = hash;
        found.then(|| narrow(before - pages.len()))
    }

    /// Whether a watched page is one of those that are followed.
    pub(crate) fn is_followed(&self, at: u32) -> bool {
        self.all[at as usize].hash & self.follow_mask == 0
    }

    /// The page of `hash` at `depth` was put into `node`, in whose edge it is the last so far.
    pub(crate) fn put(&mut self, node: u32, depth: u32, hash: u64) -> Seen {
        if hash & self.mask != 0 {
            return Seen::Not;
        }
        let all = &self.all;
        let found = self.table.find(hash, |at| all[at as usize].hash == hash);
        let seen = match found {
            // Another page of the same hash.
            Some(at) if self.all[at as usize].node != NIL => return Seen::Not,
            Some(at) => {
                if self.spares.holds(at) {
                    self.spares.remove(at);
                }
                Seen::Again(at, self.all[at as usize].uses)
            }
            None => Seen::New(self.add(hash)),
        };
        let (Seen::New(at) | Seen::Again(at, _)) = seen else {
            return seen;
        };
        let next = std::mem::replace(self.first_mut(node), at);
        let sample = &mut self.all[at as usize];
        (sample.node, sample.depth, sample.next) = (node, depth, next);
        seen
    }

    /// The watched pages of a node.
    pub(crate) fn of(&self, node: u32) -> impl Iterator<Item = u32> {
        let some = |at: u32| (at != NIL).then_some(at);
        let first = self.firsts.get(node as usize).copied();
        std::iter::successors(first.and_then(some), move |&at| {
            some(self.all[at as usize].next)
        })
    }

    /// The next watched page of the same node.
    pub(crate) fn after(&self, at: u32) -> Option<u32> {
        Some(self.all[at as usize].next).filter(|&next| next != NIL)
    }

    /// The deepest watched page of a node before page `end` of the prefix: its hash, and the page
    /// after it.
    pub(crate) fn last_before(&self, node: u32, end: u32) -> Option<(u64, u32)> {
        let mut all = self.of(node).map(|at| &self.all[at as usize]);
        let found = all.find(|sample| sample.depth < end)?;
        Some((found.hash, found.depth + 1))
    }

    /// A page counts `uses` now.
    pub(crate) fn set_uses(&mut self, at: u32, uses: u32) {
        self.all[at as usize].uses = uses;
    }

    /// `upper` was cut from `lower`, which begins at page `cut` now.
    pub(crate) fn split(&mut self, lower: u32, upper: u32, cut: u32) {
        let mut last_below = None;
        let mut at = *self.first_mut(lower);
        while at != NIL && self.all[at as usize].depth >= cut {
            last_below = Some(at);
            at = self.all[at as usize].next;
        }
        match last_below {
            Some(below) => self.all[below as usize].next = NIL,
            None => *self.first_mut(lower) = NIL,
        }
        *self.first_mut(upper) = at;
        while at != NIL {
            self.all[at as usize].node = upper;
            at = self.all[at as usize].next;
        }
    }

    /// The pages of `node` from `keep` on are gone; `is_spare` says of those that are followed what
    /// nothing else asks for.
    pub(crate) fn evict(&mut self, node: u32, keep: u32, is_spare: impl Fn(u32) -> bool) {
        if self.firsts.len() <= node as usize {
            return;
        }
        let mut at = *self.first_mut(node);
        while at != NIL && self.all[at as usize].depth >= keep {
            let sample = &mut self.all[at as usize];
            sample.node = NIL;
            let next = std::mem::replace(&mut sample.next, NIL);
            if !self.is_followed(at) || is_spare(at) {
                self.spare(at);
            }
            at = next;
        }
        *self.first_mut(node) = at;
    }

    /// Nothing else asks for `at`: it may be forgotten once it is not in the tree.
    pub(crate) fn spare(&mut self, at: u32) {
        if self.all[at as usize].node == NIL && !self.spares.holds(at) {
            let youngest = self.spares.last();
            self.spares.insert(at, youngest);
        }
    }

    /// Forgets the oldest spare page where too many are known.
    pub(crate) fn forget(&mut self) -> Option<u32> {
        if self.all.len() - self.free.len() <= self.known_max {
            return None;
        }
        let oldest = self.spares.first()?;
        self.spares.remove(oldest);
        self.table.remove(self.all[oldest as usize].hash, oldest);
        self.free.push(oldest);
        Some(oldest)
    }

    fn add(&mut self, hash: u64) -> u32 {
        let sample = Sample {
            hash,
            depth: 0,
            node: NIL,
            next: NIL,
            uses: 0,
        };
        let at = if let Some(at) = self.free.pop() {
            self.all[at as usize] = sample;
            at
        } else {
            self.all.push(sample);
            narrow(self.all.len() - 1)
        };
        self.table.insert(hash, at);
        at
    }

    fn first_mut(&mut self, node: u32) -> &mut u32 {
        let node = node as usize;
        if self.firsts.len() <= node {
            self.firsts.resize(node + 1, NIL);
        }
        &mut self.firsts[node]
    }

    /// What contradicts itself, given the pages that each node covers.
    pub(crate) fn fault(&self, pages_of: impl Fn(u32) -> Option<(u32, u32)>) -> Option<String> {
        let mut attached = 0;
        for node in (0..).take(self.firsts.len()) {
            let mut above = u32::MAX;
            for at in self.of(node) {
                let sample = self.all[at as usize];
                let covered = pages_of(node).is_some_and(|(start, end)| {
                    (start..end).contains(&sample.depth) && sample.depth < above
                });
                if !covered || sample.node != node {
                    return Some(format!("page {} is not in node {node}", sample.depth));
                }
                above = sample.depth;
                attached += 1;
            }
        }
        let known = self.all.len() - self.free.len();
        let spares = self.spares.iter().count();
        let ghosts = self
            .spares
            .iter()
            .all(|at| self.all[at as usize].node == NIL);
        (known < attached + spares || known != self.table.len() || !ghosts)
            .then(|| format!("{known} pages are watched, {attached} and {spares} counted"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_of_a_page_and_its_place_count() {
        for page_tokens in [1, 4, 16, 40] {
            let page: Vec<Token> = (100..).take(page_tokens).collect();
            let mut seen = std::collections::BTreeSet::from([chain(1, &page), chain(2, &page)]);
            for at in 0..page_tokens {
                let mut other = page.clone();
                other[at] += 1;
                seen.insert(chain(1, &other));
                other[at] -= 1;
                other.swap(at, 0);
                seen.insert(chain(1, &other));
            }
            assert_eq!(seen.len(), 2 * page_tokens + 1, "pages of {page_tokens}");
        }
    }

    #[test]
    fn one_of_so_many_is_watched_and_of_these_one_of_so_many_is_followed() {
        let mut samples = Samples::new(3, 5, 1 << 20);
        let tokens: Vec<Token> = (0..16 << 14).collect();
        let (mut pages, mut hash, mut depth) = (tokens.chunks_exact(16), 1, 0);
        while let Some(count) = samples.next(&mut hash, &mut pages) {
            depth += count;
            assert!(matches!(samples.put(0, depth - 1, hash), Seen::New(_)));
            assert_eq!(samples.last_before(0, depth), Some((hash, depth)));
        }
        let watched = samples.of(0).count();
        assert!((1950..2150).contains(&watched), "{watched} of 16,384");
        let followed = samples.of(0).filter(|&at| samples.is_followed(at));
        let followed = followed.count();
        assert!((450..575).contains(&followed), "{followed} of 16,384");
    }

    #[test]
    fn of_too_many_pages_the_one_that_is_spare_for_longest_is_forgotten_first() {
        const LEFT: [u32; 10] = [3, 7, 1, 9, 0, 5, 2, 8, 6, 4];
        let mut samples = Samples::new(0, 0, 4);
        for node in 0..10 {
            assert_eq!(samples.put(node, 0, node.into()), Seen::New(node));
        }
        assert_eq!(samples.forget(), None, "all are in the tree");
        for node in LEFT {
            samples.evict(node, 0, |at| at != 7);
        }
        samples.spare(7);
        assert_eq!(
            samples.put(10, 0, 1),
            Seen::Again(1, 0),
            "one is computed again"
        );
        let gone: Vec<u32> = std::iter::from_fn(|| samples.forget()).collect();
        assert_eq!(gone, [3, 9, 0, 5, 2, 8], "until four are known");
        assert_eq!(samples.fault(|node| (node == 10).then_some((0, 1))), None);
        let fault = samples.fault(|node| (node == 10).then_some((1, 2)));
        assert_eq!(fault.unwrap(), "page 0 is not in node 10");
        // What was forgotten is new, in a place that is used again.
        assert_eq!(samples.put(11, 0, 3), Seen::New(8));
        assert_eq!(samples.put(12, 0, 7), Seen::Again(7, 0));
    }
}
