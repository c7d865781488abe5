//! The page pool against a plain model: a stack of free pages and a list of owners.

#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test of tiny pools"
)]

use proptest::prelude::*;
use rootstock_memory::{PageId, PagePool, Pages, ReplicaId, Reservation, StepId, TierId};
use std::collections::BTreeSet;

const TIER: TierId = TierId::Device(ReplicaId(0));

#[derive(Clone, Copy, Debug)]
enum Op {
    Reserve(u32),
    Acquire(usize, u32),
    Cancel(usize),
    Release(usize),
    ReleaseAfter(usize, u64),
    StepDone(u64),
    Split(usize, usize),
    Merge(usize),
    SplitPromise(usize, u32),
    MergePromise(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0..6_u32).prop_map(Op::Reserve),
        (any::<usize>(), 0..5_u32).prop_map(|(at, n)| Op::Acquire(at, n)),
        any::<usize>().prop_map(Op::Cancel),
        any::<usize>().prop_map(Op::Release),
        (any::<usize>(), 0..8_u64).prop_map(|(at, step)| Op::ReleaseAfter(at, step)),
        (0..8_u64).prop_map(Op::StepDone),
        (any::<usize>(), any::<usize>()).prop_map(|(at, n)| Op::Split(at, n)),
        any::<usize>().prop_map(Op::Merge),
        (any::<usize>(), any::<u32>()).prop_map(|(at, n)| Op::SplitPromise(at, n)),
        any::<usize>().prop_map(Op::MergePromise),
    ]
}

struct World {
    pool: PagePool,
    total: u32,
    reservations: Vec<Reservation>,
    owners: Vec<Pages>,
    waiting: Vec<(u64, PageId)>,
    /// The last step that has ended.
    ended: Option<u64>,
    /// Pages that are neither out nor waiting; the last goes out first.
    stack: Vec<PageId>,
}

impl World {
    fn new(total: u32) -> Self {
        let pool = PagePool::new(TIER, total);
        Self {
            pool,
            total,
            reservations: vec![],
            owners: vec![],
            waiting: vec![],
            ended: None,
            stack: (1..=total).rev().map(PageId::new).collect(),
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Reserve(n) => {
                let free = self.free();
                let got = self.pool.reserve(n);
                assert_eq!(got.is_some(), n <= free);
                self.reservations.extend(got);
            }
            Op::Acquire(at, n) => {
                if let Some(at) = pick(at, self.reservations.len()) {
                    let n = n.min(self.reservations[at].left());
                    let pages = self.pool.acquire(&mut self.reservations[at], n);
                    assert_eq!(pages.len(), n as usize);
                    let left = self.stack.len() - n as usize;
                    let ids: Vec<PageId> = self.stack.drain(left..).rev().collect();
                    assert_eq!(pages.ids(), ids);
                    self.owners.push(pages);
                }
            }
            Op::Cancel(at) => {
                if let Some(at) = pick(at, self.reservations.len()) {
                    self.pool.cancel(self.reservations.swap_remove(at));
                }
            }
            Op::Release(at) => {
                if let Some(at) = pick(at, self.owners.len()) {
                    let pages = self.owners.swap_remove(at);
                    self.stack.extend(pages.ids());
                    self.pool.release(pages);
                }
            }
            Op::ReleaseAfter(at, step) => {
                if let Some(at) = pick(at, self.owners.len()) {
                    let pages = self.owners.swap_remove(at);
                    if self.ended.is_none_or(|ended| step > ended) {
                        self.waiting
                            .extend(pages.ids().iter().map(|&id| (step, id)));
                    } else {
                        self.stack.extend(pages.ids());
                    }
                    self.pool.release_after(pages, StepId(step));
                }
            }
            Op::StepDone(step) => {
                self.pool.step_done(StepId(step));
                self.ended = self.ended.max(Some(step));
                self.waiting.sort_by_key(|&(waits_for, _)| waits_for);
                let done = self.waiting.partition_point(|one| one.0 <= step);
                let freed = self.waiting.drain(..done).map(|(_, id)| id);
                self.stack.extend(freed);
            }
            Op::Split(at, n) => {
                if let Some(at) = pick(at, self.owners.len()) {
                    let n = n % (self.owners[at].len() + 1);
                    let rest = self.owners[at].split_off(n);
                    self.owners.push(rest);
                }
            }
            Op::Merge(at) => {
                if let Some(at) = pick(at, self.owners.len())
                    && self.owners.len() > 1
                {
                    let pages = self.owners.swap_remove(at);
                    self.owners[0].merge(pages);
                }
            }
            Op::SplitPromise(at, n) => self.split_promise(at, n),
            Op::MergePromise(at) => self.merge_promise(at),
        }
        self.compare();
    }

    fn split_promise(&mut self, at: usize, n: u32) {
        if let Some(at) = pick(at, self.reservations.len()) {
            let left = self.reservations[at].left();
            let n = n % (left + 1);
            let part = self.reservations[at].split_off(n);
            assert_eq!((self.reservations[at].left(), part.left()), (left - n, n));
            self.reservations.push(part);
        }
    }

    fn merge_promise(&mut self, at: usize) {
        if let Some(at) = pick(at, self.reservations.len())
            && self.reservations.len() > 1
        {
            let part = self.reservations.swap_remove(at);
            let sum = self.reservations[0].left() + part.left();
            self.reservations[0].merge(part);
            assert_eq!(self.reservations[0].left(), sum);
        }
    }

    fn free(&self) -> u32 {
        let reserved: u32 = self.reservations.iter().map(Reservation::left).sum();
        let out: usize = self.owners.iter().map(Pages::len).sum();
        self.total - reserved - (out + self.waiting.len()) as u32
    }

    fn compare(&self) {
        self.pool.check().unwrap();
        let out: Vec<PageId> = self.owners.iter().flat_map(Pages::ids).copied().collect();
        let waiting = self.waiting.iter().map(|&(_, id)| id);
        let distinct: BTreeSet<PageId> = out.iter().copied().chain(waiting).collect();
        assert_eq!(
            distinct.len(),
            out.len() + self.waiting.len(),
            "a page has two owners"
        );
        assert!(
            distinct
                .iter()
                .all(|id| (1..=self.total).contains(&id.get()))
        );
        assert!(out.iter().all(|&id| self.pool.is_out(id)));
        assert_eq!(self.pool.free(), self.free());
        assert_eq!(self.pool.out() as usize, out.len());
        assert_eq!(self.pool.waiting() as usize, self.waiting.len());
        assert_eq!(self.pool.stray_releases(), 0);
    }

    fn finish(mut self) {
        self.reservations
            .drain(..)
            .for_each(|one| self.pool.cancel(one));
        self.owners.drain(..).for_each(|one| self.pool.release(one));
        self.pool.step_done(StepId(u64::MAX));
        assert_eq!(self.pool.free(), self.total);
        self.pool.check().unwrap();
    }
}

fn pick(at: usize, len: usize) -> Option<usize> {
    (len > 0).then(|| at % len)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_pool_agrees_with_the_plain_model(
        total in 0..9_u32,
        ops in prop::collection::vec(op(), 0..60),
    ) {
        let mut world = World::new(total);
        for op in ops {
            world.apply(op);
        }
        world.finish();
    }
}

#[test]
fn the_same_calls_give_the_same_pages() {
    let run = || {
        let mut pool = PagePool::new(TIER, 5);
        let mut reservation = pool.reserve(5).unwrap();
        let first = pool.acquire(&mut reservation, 3);
        let kept = pool.acquire(&mut reservation, 2);
        pool.release(first);
        let mut reservation = pool.reserve(2).unwrap();
        let again = pool.acquire(&mut reservation, 2);
        let ids = (kept.ids().to_vec(), again.ids().to_vec());
        pool.release(kept);
        pool.release(again);
        ids
    };
    assert_eq!(run(), run());
}

/// Nobody would tell of that step a second time.
#[test]
fn pages_that_wait_for_a_step_that_has_ended_are_free_at_once() {
    let mut pool = PagePool::new(TIER, 2);
    let mut reservation = pool.reserve(2).unwrap();
    let (first, second) = (
        pool.acquire(&mut reservation, 1),
        pool.acquire(&mut reservation, 1),
    );
    pool.step_done(StepId(4));
    pool.release_after(first, StepId(4));
    assert_eq!((pool.free(), pool.waiting()), (1, 0));
    pool.release_after(second, StepId(5));
    assert_eq!((pool.free(), pool.waiting()), (1, 1));
    pool.step_done(StepId(5));
    assert_eq!((pool.free(), pool.waiting()), (2, 0));
    pool.check().unwrap();
}

/// D2: the free count never exceeds the total, whatever is named.
#[test]
#[cfg(not(debug_assertions))]
fn a_second_release_is_ignored_and_counted() {
    let mut pool = PagePool::new(TIER, 5);
    let mut reservation = pool.reserve(2).unwrap();
    let ids = pool.acquire(&mut reservation, 2).disband();
    pool.release_ids(&[ids[0], ids[0], PageId::SCRATCH, PageId::new(99)]);
    assert_eq!((pool.free(), pool.stray_releases()), (4, 3));
    pool.check().unwrap();
    pool.release_ids(&ids);
    assert_eq!((pool.free(), pool.stray_releases()), (5, 4));
}
