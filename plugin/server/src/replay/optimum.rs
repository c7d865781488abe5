//! The offline optimum: what a cache that knows the future would hit, block by block.
//!
//! Belady's rule under the prefix constraint: a request finds the leading blocks that are all
//! there; when room is short, the block that is used again last goes first, of those the deepest.
//! A block is never used again later than its children, so the cache stays closed under prefixes
//! without any further care. Blocks that are never used again are not even kept: they would be the
//! first to go, and no request asks for them. Own, after Belady 1966.

use std::collections::BinaryHeap;

use super::ticker::Ticker;
use super::trace::Trace;

/// The request that uses a block next; of blocks that are never used again.
const NEVER: u32 = u32::MAX;

/// When each block of each request is used again.
#[derive(Debug)]
pub(crate) struct Future {
    /// In the order of the trace's blocks, request by request.
    next_uses: Vec<u32>,
}

impl Future {
    /// Looks through the trace from its end. Linear in its blocks.
    pub(crate) fn of(trace: &Trace) -> Self {
        let mut coming = vec![NEVER; trace.distinct_blocks() as usize];
        let mut next_uses = Vec::with_capacity(usize::try_from(trace.total_blocks()).unwrap_or(0));
        for request in (0..trace.len()).rev() {
            // Fits: a trace has no more requests than bytes, and far fewer than 2^32 are read.
            let number = u32::try_from(request).unwrap_or(NEVER);
            for block in trace.path(request).iter().rev() {
                if let Some(next) = coming.get_mut(*block as usize) {
                    next_uses.push(std::mem::replace(next, number));
                }
            }
        }
        next_uses.reverse();
        Self { next_uses }
    }
}

/// Tells `found` the blocks that each request hits where the optimum has room for `capacity`
/// blocks.
///
/// # Cost
/// O(b log b) in the blocks of the trace, 12 bytes a block that is kept.
pub(crate) fn run(
    trace: &Trace,
    future: &Future,
    capacity: u32,
    ticker: &mut Ticker,
    mut found: impl FnMut(usize, u32),
) {
    let mut kept = Kept::new(trace.distinct_blocks() as usize);
    let mut next_uses = future.next_uses.as_slice();
    for request in 0..trace.len() {
        let path = trace.path(request);
        let hits = path.iter().take_while(|block| kept.has(**block)).count();
        // Fits: a trace has fewer blocks.
        found(request, u32::try_from(hits).unwrap_or(u32::MAX));
        let (now, later) = next_uses
            .split_at_checked(path.len())
            .unwrap_or((next_uses, &[]));
        next_uses = later;
        for (depth, (&block, &next)) in (0..).zip(path.iter().zip(now)) {
            kept.put(block, next, depth);
        }
        kept.shrink_to(capacity);
        ticker.tick();
    }
}

/// The blocks in the cache, the first to go on top.
struct Kept {
    /// Next use of each block, `NEVER` for those not in the cache.
    next_of: Vec<u32>,
    len: u32,
    /// (next use, depth, block); stale where `next_of` says otherwise.
    order: BinaryHeap<(u32, u32, u32)>,
}

impl Kept {
    fn new(distinct: usize) -> Self {
        Self {
            next_of: vec![NEVER; distinct],
            len: 0,
            order: BinaryHeap::new(),
        }
    }

    fn has(&self, block: u32) -> bool {
        self.next_of
            .get(block as usize)
            .is_some_and(|next| *next != NEVER)
    }

    fn put(&mut self, block: u32, next: u32, depth: u32) {
        let Some(slot) = self.next_of.get_mut(block as usize) else {
            return;
        };
        let before = std::mem::replace(slot, next);
        self.len += u32::from(before == NEVER && next != NEVER);
        self.len -= u32::from(before != NEVER && next == NEVER);
        if next != NEVER {
            self.order.push((next, depth, block));
        }
    }

    fn shrink_to(&mut self, capacity: u32) {
        while self.len > capacity {
            let Some((next, _, block)) = self.order.pop() else {
                return;
            };
            if let Some(slot) = self.next_of.get_mut(block as usize)
                && *slot == next
            {
                *slot = NEVER;
                self.len -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::trace::TraceBuilder;
    use super::*;

    fn trace(requests: &[Vec<u64>]) -> Trace {
        let mut builder = TraceBuilder::default();
        for ids in requests {
            builder.push(1, 0, ids).unwrap();
        }
        builder.in_file_order().unwrap()
    }

    fn hits(trace: &Trace, future: &Future, capacity: u32) -> u64 {
        let mut hits = 0;
        let mut ticker = Ticker::hidden();
        run(trace, future, capacity, &mut ticker, |_, found| {
            hits += u64::from(found)
        });
        hits
    }

    /// The most hits of any way to choose what to keep, by trying all of them.
    fn best(requests: &[&[u32]], cache: &[u32], capacity: usize) -> usize {
        let Some((path, later)) = requests.split_first() else {
            return 0;
        };
        let hits = path
            .iter()
            .take_while(|block| cache.contains(block))
            .count();
        let mut all: Vec<u32> = cache.iter().chain(*path).copied().collect();
        all.sort_unstable();
        all.dedup();
        let choices = (0..1_u32 << all.len()).filter(|set| set.count_ones() as usize <= capacity);
        let kept = |set: u32| -> Vec<u32> {
            (0..)
                .zip(&all)
                .filter(|(bit, _)| set >> bit & 1 == 1)
                .map(|(_, block)| *block)
                .collect()
        };
        hits + choices
            .map(|set| best(later, &kept(set), capacity))
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn no_choice_of_what_to_keep_hits_more() {
        let paths: [&[u64]; 5] = [&[1, 2, 3], &[1, 4], &[5, 6], &[1, 2], &[5]];
        let mut seed = 1_u64;
        for _ in 0..12 {
            let requests: Vec<Vec<u64>> = (0..5)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    paths[(seed >> 33) as usize % paths.len()].to_vec()
                })
                .collect();
            let trace = trace(&requests);
            let future = Future::of(&trace);
            let numbered: Vec<&[u32]> = (0..trace.len()).map(|index| trace.path(index)).collect();
            for capacity in 1..4 {
                let found = hits(&trace, &future, capacity);
                let expected = best(&numbered, &[], capacity as usize) as u64;
                assert_eq!(found, expected, "{requests:?} at {capacity}");
            }
        }
    }

    #[test]
    fn room_for_everything_hits_like_the_infinite_cache() {
        let trace = trace(&[vec![1, 2], vec![1, 3], vec![1, 2, 4], vec![1, 3]]);
        let found = hits(&trace, &Future::of(&trace), 4);
        assert_eq!((found, trace.infinite_hits()), (5, 5));
    }
}
