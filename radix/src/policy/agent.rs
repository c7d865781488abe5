//! The `agent` policy: what goes first is what brings the fewest uses per second of memory, as
//! learned from this very load.
//!
//! A request marks the pages that it used with a class: what it says about itself (its program
//! is done, when it comes back, how long its answer is), what is known of its program (it went on
//! from another prefix), and how often the pages were used. Reuse is learned per class and age
//! from watched pages, a fixed share of all, which are followed on after they are evicted. Where
//! the working set does not fit, ages at which return is near keep what is there and let fresh
//! arrivals go, so that some programs stay whole.
//!
//! The parts know nothing of each other: [`ages`] bins of time, [`class`] what is told apart,
//! [`worth`] what is learned, [`shelf`] the lists of what can go, [`samples`] the watched pages,
//! [`rivals`] the duel with least recently used.

mod ages;
mod class;
mod rivals;
mod samples;
mod shelf;
mod worth;

pub use rivals::Duel;

pub(crate) use class::{Group, Mark, Said};
pub(crate) use shelf::Shelf;

use crate::node::Node;
use crate::tree::Tree;
use rivals::Rivals;
use rootstock_memory::Nanos;
use samples::{Samples, Seen};
use worth::Worth;

/// Pages of the cache that are watched, at most.
const WATCHED: u32 = 4096;

/// Ghosts for each watched page.
const GHOSTS: usize = 4;

/// Ended requests between two times that the order is learned anew: twice as many each time.
const LEARN_FIRST: u32 = 64;
const LEARN_LAST: u32 = 2048;

/// Used by several programs.
const MANY: u64 = u64::MAX;

/// What is remembered of a node.
#[derive(Clone, Copy, Debug, Default)]
struct Memo {
    /// The program that uses it; 0 for none that is known.
    owner: u64,
    /// Uses of its pages before they were evicted the last time.
    before: u32,
    /// Hash of the prefix up to page `chained`.
    chain: u64,
    chained: u32,
}

/// What the policy knows beyond the order of each tier.
#[derive(Debug)]
pub(crate) struct Agent {
    pages: u32,
    samples: Samples,
    /// The watched pages that no request uses now.
    aging: Shelf,
    worth: Worth,
    rivals: Rivals,
    memos: Vec<Memo>,
    ended: u32,
    learn_after: u32,
    /// The rule of the duel has changed.
    changed: bool,
}

impl Agent {
    /// For a cache of `pages` on all tiers.
    pub(crate) fn new(pages: u32) -> Self {
        let shift = pages.div_ceil(WATCHED).next_power_of_two().ilog2();
        let watched = (pages >> shift).max(1);
        let worth = Worth::new();
        Self {
            pages,
            samples: Samples::new(shift, watched.max(64) as usize * GHOSTS),
            aging: Shelf::new(&worth.order()),
            worth,
            rivals: Rivals::new(watched),
            memos: Vec::new(),
            ended: 0,
            learn_after: LEARN_FIRST,
            changed: false,
        }
    }

    /// The order of the cells before anything is learned.
    pub(crate) fn first_order() -> Vec<u16> {
        Worth::new().order()
    }

    /// Time passes.
    pub(crate) fn advance(&mut self, now: Nanos) {
        let Self { aging, worth, .. } = self;
        aging.advance(now, |cell| worth.enter(cell));
    }

    /// A request found `node`.
    pub(crate) fn found(&mut self, node: u32) {
        for at in self.samples.of(node) {
            if self.aging.holds(at) {
                self.worth.hit(self.aging.remove(at));
                self.changed |= self.rivals.score(at, true);
            }
        }
    }

    /// A request computed the last `count` pages of the edge of `at`.
    pub(crate) fn computed(&mut self, tree: &Tree, at: u32, count: u32) {
        let node = tree.node(at);
        let (first, end) = (node.end() - count, node.end());
        let mut chain = self.chain(tree, at, first);
        let page_tokens = tree.page_tokens();
        let edge = &tree.edge(node)[(first - node.depth) as usize * page_tokens..];
        for (depth, page) in (first..).zip(edge.chunks_exact(page_tokens)) {
            chain = tree.chain(chain, page);
            match self.samples.put(at, depth, chain) {
                Seen::Not => {}
                Seen::New(sample) => self.rivals.forget(sample),
                Seen::Again(sample, uses) => {
                    let memo = self.memo(at);
                    memo.before = memo.before.max(uses);
                    if self.aging.holds(sample) {
                        self.worth.hit(self.aging.remove(sample));
                        self.changed |= self.rivals.score(sample, false);
                    }
                }
            }
        }
        let memo = self.memo(at);
        (memo.chain, memo.chained) = (chain, end);
    }

    /// The mark of a node that a request used which arrived at `arrived`.
    pub(crate) fn used(&mut self, at: u32, node: &Node, said: &Said, arrived: Nanos) -> Mark {
        let memo = self.memo(at);
        if let Some(program) = said.program {
            memo.owner = match memo.owner {
                0 => program.0,
                owner if owner == program.0 => owner,
                _ => MANY,
            };
        }
        let uses = node.hits.saturating_add(memo.before).saturating_add(1);
        let group = said.group(node.kind, memo.owner == MANY);
        let origin = match (group, said.due) {
            (Group::Due, Some(due)) => due,
            _ => arrived,
        };
        Mark::new(group, uses, origin)
    }

    /// No request uses a node any more.
    pub(crate) fn settle(&mut self, at: u32, node: &Node, mark: Mark) {
        let uses = node
            .hits
            .saturating_add(self.memo(at).before)
            .saturating_add(1);
        let mut next = self.samples.of(at).next();
        while let Some(sample) = next {
            if !self.aging.holds(sample) {
                self.samples.set_uses(sample, uses);
                self.rivals.touch(sample);
                self.watch(sample, mark);
            }
            next = self.samples.after(sample);
        }
    }

    /// The program of a node, where it has one alone, is `owner`.
    pub(crate) fn is_owned(&self, at: u32, owner: u64) -> bool {
        self.memos
            .get(at as usize)
            .is_some_and(|memo| memo.owner == owner)
    }

    /// A node that nobody uses got another mark.
    pub(crate) fn marked(&mut self, at: u32, mark: Mark) {
        let mut next = self.samples.of(at).next();
        while let Some(sample) = next {
            if self.aging.holds(sample) {
                self.aging.remove(sample);
                self.watch(sample, mark);
            }
            next = self.samples.after(sample);
        }
    }

    /// `upper` was cut from `lower`, which begins at page `cut` now.
    pub(crate) fn split(&mut self, lower: u32, upper: u32, cut: u32) {
        let memo = *self.memo(lower);
        *self.memo(upper) = Memo { chained: 0, ..memo };
        self.samples.split(lower, upper, cut);
    }

    /// The pages of a node from page `keep` of the prefix on are gone from all tiers.
    pub(crate) fn evicted(&mut self, at: u32, keep: u32) {
        let Self {
            samples,
            aging,
            rivals,
            ..
        } = self;
        samples.evict(at, keep, |sample| {
            if aging.holds(sample) {
                aging.remove(sample);
            }
            rivals.forget(sample);
        });
    }

    /// The node is gone.
    pub(crate) fn forget(&mut self, at: u32) {
        self.evicted(at, 0);
        *self.memo(at) = Memo::default();
    }

    /// A request has ended; another order of the cells where it is time for one.
    pub(crate) fn learn(&mut self) -> Option<Vec<u16>> {
        self.ended += 1;
        let due = self.ended >= self.learn_after;
        if due {
            self.ended = 0;
            self.learn_after = (self.learn_after * 2).min(LEARN_LAST);
            self.worth.fade();
        }
        let changed = std::mem::take(&mut self.changed);
        match self.rivals.lru_rules() {
            true if changed => Some(Worth::by_age()),
            true => None,
            false => (due || changed).then(|| self.worth.order()),
        }
    }

    pub(crate) fn duel(&self) -> Duel {
        self.rivals.report(u64::from(self.pages))
    }

    fn watch(&mut self, sample: u32, mark: Mark) {
        self.aging.mark(sample, mark);
        let cell = self.aging.insert(sample, 0, 0);
        self.worth.enter(cell);
    }

    fn memo(&mut self, at: u32) -> &mut Memo {
        let at = at as usize;
        if self.memos.len() <= at {
            self.memos.resize(at + 1, Memo::default());
        }
        &mut self.memos[at]
    }

    /// The hash of the prefix of `at` up to `page`, from the nearest page where it is known.
    fn chain(&mut self, tree: &Tree, at: u32, page: u32) -> u64 {
        let mut path = vec![];
        let (mut from, mut end) = (at, page);
        let mut chain = loop {
            let node = tree.node(from);
            if node.is_root() {
                break u64::from(from) + 1;
            }
            let memo = *self.memo(from);
            if memo.chained == end && end > node.depth {
                break memo.chain;
            }
            path.push((from, end));
            (from, end) = (node.parent, node.depth);
        };
        let page_tokens = tree.page_tokens();
        for (at, end) in path.into_iter().rev() {
            let node = tree.node(at);
            let pages = (end - node.depth) as usize;
            for page in tree.edge(node).chunks_exact(page_tokens).take(pages) {
                chain = tree.chain(chain, page);
            }
            if end == node.end() {
                let memo = self.memo(at);
                (memo.chain, memo.chained) = (chain, end);
            }
        }
        chain
    }

    /// What contradicts itself, given the pages that each node covers.
    pub(crate) fn fault(&self, pages_of: impl Fn(u32) -> Option<(u32, u32)>) -> Option<String> {
        let listed = self.aging.check();
        listed.err().or_else(|| self.samples.fault(pages_of))
    }
}
