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
//! [`worth`] what is learned, [`ranks`] the order that follows, [`shelf`] the lists of what can go,
//! [`samples`] the watched pages, [`rivals`] the duel with least recently used, [`curve`] the hits
//! at other capacities.

mod ages;
pub(crate) mod branch;
mod class;
mod curve;
mod ranks;
mod rivals;
mod samples;
mod shelf;
mod worth;

pub use curve::{CurvePoint, HitCurve};
pub use rivals::Duel;

pub(crate) use class::{Group, Mark, Said};
pub(crate) use shelf::Shelf;

use crate::node::Node;
use crate::tree::Tree;
use class::Stay;
use curve::Curve;
use ranks::Ranks;
use rivals::{EIGHTHS, Held, Rivals};
use rootstock_memory::Nanos;
use samples::{Samples, Seen};
use std::sync::Arc;
use worth::Worth;

/// Pages of the cache that are watched, at most: enough to learn from.
const WATCHED: u32 = 1024;

/// Of these, those that are followed through caches of other sizes and in the duel, at most. Each
/// use of one costs as much as ten of those that are watched and no more.
const FOLLOWED: u32 = 256;

/// Watched pages that are known, cached or not. For a small cache too, so that it learns of ages
/// that it never reaches.
const KNOWN: usize = 6 * WATCHED as usize;

/// Ended requests between two times that the order is learned anew: twice as many each time, up
/// to the last, or twice that where only a part of the pages is watched.
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
    /// Pages of the prompt of the request that computed its first page; 0 where unknown.
    asked: u32,
}

/// A watched page that nobody uses.
#[derive(Clone, Copy, Debug)]
struct Idle {
    mark: Mark,
    /// The cell in which it became idle.
    first: u16,
}

/// What the policy knows beyond the order of each tier.
#[derive(Debug)]
pub(crate) struct Agent {
    pages: u32,
    /// One watched page stands for `2^shift`, and one that is followed for `2^follow_shift`.
    shift: u32,
    follow_shift: u32,
    now: Nanos,
    samples: Samples,
    /// By watched page; `None` for those that a request uses.
    idle: Vec<Option<Idle>>,
    worth: Worth,
    /// The order that follows from it.
    learned: Arc<Ranks>,
    rivals: Rivals,
    curve: Curve,
    memos: Vec<Memo>,
    ended: u32,
    learn_after: u32,
    /// The rule of the duel has changed.
    changed: bool,
}

impl Agent {
    /// For a cache of `pages` on all tiers.
    pub(crate) fn new(pages: u32) -> Self {
        let shift_to = |most: u32| pages.div_ceil(most).next_power_of_two().ilog2();
        let (shift, follow_shift) = (shift_to(WATCHED), shift_to(FOLLOWED));
        let followed = (pages >> follow_shift).max(1);
        let worth = Worth::new();
        Self {
            pages,
            shift,
            follow_shift,
            now: 0,
            samples: Samples::new(shift, follow_shift, KNOWN),
            idle: Vec::new(),
            curve: Curve::new(followed, worth.first_ranks()),
            learned: worth.first_ranks(),
            worth,
            rivals: Rivals::new(followed),
            memos: Vec::new(),
            ended: 0,
            learn_after: LEARN_FIRST,
            changed: false,
        }
    }

    /// The order of the cells before anything is learned.
    pub(crate) fn first_ranks() -> Arc<Ranks> {
        Worth::new().first_ranks()
    }

    /// Time passes.
    pub(crate) fn set_now(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        self.curve.set_now(now);
    }

    /// A request found `node`.
    pub(crate) fn found(&mut self, node: u32) {
        let mut next = self.samples.of(node).next();
        while let Some(sample) = next {
            self.use_sample(sample, true);
            next = self.samples.after(sample);
        }
    }

    /// A request for `asked` pages computed the last `count` pages of the edge of `at`.
    pub(crate) fn computed(&mut self, tree: &Tree, at: u32, count: u32, asked: u32) {
        let node = tree.node(at);
        let (first, end) = (node.end() - count, node.end());
        let mut chain = self.chain(tree, at, first);
        let page_tokens = tree.page_tokens();
        let edge = tree.tokens_from(node, first - node.depth);
        let (mut pages, mut depth) = (edge.chunks_exact(page_tokens), first);
        while let Some(count) = self.samples.next(&mut chain, &mut pages) {
            depth += count;
            match self.samples.put(at, depth - 1, chain) {
                Seen::Not => {}
                Seen::New(sample) => self.use_sample(sample, false),
                Seen::Again(sample, uses) => {
                    let memo = self.memo(at);
                    memo.before = memo.before.max(uses);
                    self.use_sample(sample, false);
                }
            }
        }
        self.forget_spare();
        let memo = self.memo(at);
        (memo.chain, memo.chained) = (chain, end);
        if first == node.depth {
            memo.asked = asked;
        }
    }

    /// Whether no program but `owner` (0 for none) uses a node, and it is part of an answer to a
    /// prompt shorter than `asked` pages.
    pub(crate) fn is_answer(&self, at: u32, node: &Node, asked: u32, owner: u64) -> bool {
        self.memos.get(at as usize).is_some_and(|memo| {
            let is_after_prompt = memo.asked > 0 && memo.asked <= node.depth;
            let is_own = memo.owner == 0 || memo.owner == owner;
            is_own && is_after_prompt && memo.asked < asked
        })
    }

    /// The mark of a node that a request used until now.
    pub(crate) fn used(&mut self, at: u32, node: &Node, said: &Said) -> Mark {
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
            _ => self.now,
        };
        Mark::new(group, uses, origin)
    }

    /// No request uses a node any more.
    pub(crate) fn settle(&mut self, at: u32, node: &Node, mark: Mark) {
        let mut next = self.samples.of(at).next();
        if next.is_none() {
            return;
        }
        let before = self.memo(at).before;
        let uses = node.hits.saturating_add(before).saturating_add(1);
        while let Some(sample) = next {
            if self.idle_of(sample).is_none() {
                self.samples.set_uses(sample, uses);
                self.watch(sample, mark);
                if self.samples.is_followed(sample) {
                    self.rivals.touch(sample);
                    self.curve.settle(sample, mark, node.priority);
                }
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
    pub(crate) fn marked(&mut self, at: u32, node: &Node, mark: Mark) {
        let mut next = self.samples.of(at).next();
        while let Some(sample) = next {
            if let Some(stay) = self.wake(sample) {
                self.worth.leave(stay, false);
                self.curve.remark(sample, mark, node.priority);
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
        let curve = &self.curve;
        self.samples
            .evict(at, keep, |sample| curve.is_outside(sample));
        self.forget_spare();
    }

    /// The node is gone.
    pub(crate) fn forget(&mut self, at: u32) {
        self.evicted(at, 0);
        *self.memo(at) = Memo::default();
    }

    /// A request has ended; another order of the cells where it is time for one.
    pub(crate) fn learn(&mut self) -> Option<Arc<Ranks>> {
        self.ended += 1;
        let due = self.ended >= self.learn_after;
        if due {
            self.ended = 0;
            let last = LEARN_LAST << self.shift.min(1);
            self.learn_after = (self.learn_after * 2).min(last);
            self.worth.fade();
        }
        let changed = std::mem::take(&mut self.changed);
        if due {
            let idle = self.idle.iter().flatten();
            let stays = idle.map(|idle| idle.mark.stay(idle.first, self.now));
            self.learned = self.worth.ranks(stays);
            // It follows the policy whoever rules.
            self.curve.reorder(&self.learned);
        }
        match self.rivals.lru_rules() {
            true => changed.then(Worth::by_age),
            false => (due || changed).then(|| Arc::clone(&self.learned)),
        }
    }

    pub(crate) fn duel(&self) -> Duel {
        self.rivals.report(u64::from(self.pages))
    }

    /// The curve, given the tokens that were asked for and found, and those of a page.
    pub(crate) fn curve(&self, lookup_tokens: u64, hit_tokens: u64, page_tokens: u32) -> HitCurve {
        let tokens = u64::from(page_tokens) << self.follow_shift;
        let policy = self.curve.hits();
        let real = curve::at_real(&policy);
        let (lru, found) = self.rivals.hits();
        let estimate =
            |here, there| curve::estimate(hit_tokens, here, there, tokens, lookup_tokens);
        let points = EIGHTHS.iter().zip(policy).zip(lru);
        let points = points.map(|((&eighths, policy), lru)| CurvePoint {
            pages: (u64::from(self.pages) * u64::from(eighths) / 8).max(1),
            hit_tokens: estimate(real, policy),
            lru_hit_tokens: estimate(found, lru),
        });
        HitCurve {
            lookup_tokens,
            hit_tokens,
            points: points.collect(),
        }
    }

    /// A request uses a watched page, which it found or has computed.
    fn use_sample(&mut self, sample: u32, found: bool) {
        let stay = self.wake(sample);
        if let Some(stay) = stay {
            self.worth.leave(stay, true);
        }
        let Self { curve, samples, .. } = self;
        if !samples.is_followed(sample) {
            return;
        }
        if stay.is_some() {
            let by_policy = curve.score(sample);
            self.changed |= self.rivals.score(sample, Held { found, by_policy });
        }
        curve.hold(sample, |gone| samples.spare(gone));
    }

    /// The watched page is idle no longer; where it was meanwhile.
    fn wake(&mut self, sample: u32) -> Option<Stay> {
        let idle = self.idle.get_mut(sample as usize)?.take()?;
        Some(idle.mark.stay(idle.first, self.now))
    }

    fn idle_of(&self, sample: u32) -> Option<Idle> {
        self.idle.get(sample as usize).copied().flatten()
    }

    fn watch(&mut self, sample: u32, mark: Mark) {
        let at = sample as usize;
        if self.idle.len() <= at {
            self.idle.resize(at + 1, None);
        }
        let first = u16::try_from(mark.cell(self.now)).expect("cells fit 16 bits");
        self.idle[at] = Some(Idle { mark, first });
    }

    /// Forgets watched pages that nothing asks for, when too many are known.
    fn forget_spare(&mut self) {
        while let Some(sample) = self.samples.forget() {
            if let Some(stay) = self.wake(sample) {
                self.worth.leave(stay, false);
            }
            self.rivals.forget(sample);
            self.curve.forget(sample);
        }
    }

    fn memo(&mut self, at: u32) -> &mut Memo {
        let at = at as usize;
        if self.memos.len() <= at {
            self.memos.resize(at + 1, Memo::default());
        }
        &mut self.memos[at]
    }

    /// The hash of the prefix of `at` up to `page`, from the nearest page where it is known: that
    /// of a memo, or of a watched page.
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
            if let Some((hash, watched)) = self.samples.last_before(from, end) {
                path.push((from, watched, end));
                break hash;
            }
            path.push((from, node.depth, end));
            (from, end) = (node.parent, node.depth);
        };
        let page_tokens = tree.page_tokens();
        for (at, start, end) in path.into_iter().rev() {
            let node = tree.node(at);
            let pages = |depth: u32| (depth - node.depth) as usize * page_tokens;
            let tokens = node.edge.tokens(pages(start)..pages(end));
            for page in tokens.chunks_exact(page_tokens) {
                chain = samples::chain(chain, page);
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
        let idle = |sample| self.idle_of(sample).is_some();
        let curve = self.curve.fault(idle);
        curve.or_else(|| self.samples.fault(pages_of))
    }
}
