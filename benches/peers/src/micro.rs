//! Single operations on a tree of `n` leaves of 64 tokens, 32 to a parent of 64. All peers hold the
//! same tree at the same time and take turns, batch by batch, with the same keys.

use std::hint::black_box;

use rootstock_benches::drive::{now, since};
use rootstock_benches::micro::{KEY_TOKENS, LEAF_TOKENS, LEAVES_A_PARENT, key, key_under, nodes};
use rootstock_benches::python_random::PythonRandom;

use crate::peer::{Kind, Peer};
use crate::record::Record;

const ROUNDS: usize = 9;
/// Operations between two looks at the clock. All rounds together evict less than half of 10,000
/// leaves.
const BATCH: u32 = 128;
/// Leaves of the calls that free many.
const MANY: u32 = 64;

/// One peer with its tree.
pub(crate) struct Micro<P: Peer> {
    peer: P,
    page_tokens: u32,
    leaves: u32,
    next: u32,
    rng: PythonRandom,
    times: Vec<(&'static str, Vec<f64>)>,
}

/// A peer with its tree, whichever it is.
pub(crate) trait Turn {
    /// A batch of each operation.
    fn round(&mut self);
    /// What was measured, without the first round.
    fn records(&mut self) -> Vec<Record>;
}

impl<P: Peer> Micro<P> {
    pub(crate) fn boxed(page_tokens: u32, leaves: u32) -> Box<dyn Turn>
    where
        P: 'static,
    {
        let mut micro = Self::empty(page_tokens, leaves);
        micro.fill();
        Box::new(micro)
    }

    /// A cache with room for `leaves` leaves and what a round puts in.
    pub(crate) fn empty(page_tokens: u32, leaves: u32) -> Self {
        let nodes = nodes(leaves) + 4 * BATCH;
        Self {
            peer: P::new(page_tokens, nodes * (LEAF_TOKENS / page_tokens)),
            page_tokens,
            leaves,
            next: leaves,
            rng: PythonRandom::new(1),
            times: Vec::new(),
        }
    }

    /// Puts the leaves in.
    pub(crate) fn fill(&mut self) {
        (0..self.leaves).for_each(|leaf| self.put(&key(leaf)));
    }

    /// Caches a key.
    fn put(&mut self, key: &[u32]) {
        let mut held = self.start(key);
        self.peer.insert(&mut held, key);
        self.peer.end(held);
    }

    /// Matches a key and takes the pages that are missing.
    fn start(&mut self, key: &[u32]) -> P::Held {
        let mut held = self.peer.begin(key, &mut Vec::new());
        let missing = KEY_TOKENS - P::found(&held);
        if missing > 0 {
            let taken = self.peer.take(&mut held, missing / self.page_tokens);
            assert!(taken, "{} has room", P::NAME);
        }
        held
    }

    fn time(&mut self, op: &'static str, count: u32, spent: std::time::Duration) {
        let value = spent.as_nanos() as f64 / f64::from(count);
        match self.times.iter_mut().find(|(name, _)| *name == op) {
            Some((_, values)) => values.push(value),
            None => self.times.push((op, vec![value])),
        }
    }

    /// Finds random leaves of the older half of the tree that is never evicted.
    fn find(&mut self) {
        let leaf = |_| key(self.rng.randint(self.leaves / 2, self.leaves - 1));
        let keys: Vec<Vec<u32>> = (0..BATCH).map(leaf).collect();
        let mut held = Vec::with_capacity(keys.len());
        let mut pages = Vec::with_capacity(keys.len() * KEY_TOKENS as usize);
        let begin = now();
        for key in &keys {
            held.push(self.peer.begin(key, &mut pages));
        }
        self.time("match+lock", BATCH, since(begin));
        // Least recently used evicts none of them, a policy that learns a few.
        let whole = held.iter().filter(|held| P::found(held) == KEY_TOKENS);
        assert!(whole.count() > keys.len() / 2, "{} finds them", P::NAME);
        let begin = now();
        for held in held {
            self.peer.end(held);
        }
        let spent = since(begin);
        if P::KIND != Kind::Index {
            self.time("unlock", BATCH, spent);
        }
        let unknown = key_under(u32::MAX, u32::MAX);
        let begin = now();
        for _ in 0..BATCH {
            black_box(self.peer.probe(black_box(&unknown)));
        }
        self.time("miss", BATCH, since(begin));
    }

    /// Puts new leaves under parents of the younger half.
    fn grow(&mut self, timed: bool) {
        let first = self.leaves / 2 / LEAVES_A_PARENT + 1;
        let last = (self.leaves - 1) / LEAVES_A_PARENT - 1;
        let mut keys = Vec::with_capacity(BATCH as usize);
        for leaf in self.next..self.next + BATCH {
            keys.push(key_under(self.rng.randint(first, last), leaf));
        }
        self.next += BATCH;
        let mut held: Vec<P::Held> = keys.iter().map(|key| self.start(key)).collect();
        let begin = now();
        for (held, key) in held.iter_mut().zip(&keys) {
            self.peer.insert(held, key);
        }
        let spent = since(begin);
        if timed {
            self.time("insert", BATCH, spent);
        }
        held.into_iter().for_each(|held| self.peer.end(held));
    }

    fn evict(&mut self) {
        let pages = LEAF_TOKENS / self.page_tokens;
        let free = self.peer.free();
        let begin = now();
        for call in 0..BATCH {
            assert!(self.peer.evict(free + call * pages, pages));
        }
        self.time("evict 1 leaf", BATCH, since(begin));
        self.grow(false);
        let (free, many) = (self.peer.free(), pages * MANY);
        let begin = now();
        for call in 0..BATCH / MANY {
            assert!(self.peer.evict(free + call * many, many));
        }
        self.time("evict 64 leaves", BATCH / MANY, since(begin));
    }
}

impl<P: Peer> Turn for Micro<P> {
    fn round(&mut self) {
        self.find();
        self.grow(true);
        if P::KIND != Kind::Index {
            self.evict();
        }
    }

    fn records(&mut self) -> Vec<Record> {
        let (page_tokens, leaves) = (self.page_tokens, self.leaves);
        let times = self.times.iter_mut();
        let record = times.filter_map(|(op, values)| {
            let warm = values.get_mut(1..)?;
            Some(Record::of::<P>(op, "ns", warm)?.at(page_tokens, leaves))
        });
        record.collect()
    }
}

/// Runs all peers in turn.
pub(crate) fn run(mut peers: Vec<Box<dyn Turn>>) -> std::io::Result<()> {
    for _ in 0..=ROUNDS {
        peers.iter_mut().for_each(|peer| peer.round());
    }
    let mut records = peers.iter_mut().flat_map(|peer| peer.records());
    records.try_for_each(|record| record.print())
}
