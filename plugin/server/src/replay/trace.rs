//! A trace in memory: each request as the path of blocks that its prompt is made of.
//!
//! A hash id stands for a block *after all blocks before it*, so a block is numbered by its parent
//! block and its hash id: equal numbers mean an equal prefix up to and with this block. Where a
//! trace already hashes whole prefixes (Mooncake, Dynamo), each id gets exactly one number. Own.

use rootstock::radix::Hints;

use super::error::ReplayError;
use super::signals::Signals;

/// Blocks of all requests together, at most: about 8 million requests, and 1 GiB of memory here.
const BLOCKS_MAX: u32 = 1 << 28;

/// The parent of a first block.
const ROOT: u32 = u32::MAX;

/// Requests in the order of their arrival.
#[derive(Debug)]
pub(crate) struct Trace {
    blocks: Vec<u32>,
    ends: Vec<u32>,
    arrivals_ns: Vec<u64>,
    /// Tokens of the prompts; 0 where a row does not say.
    prompts: Vec<u32>,
    /// In the order of requests; empty where no row says anything.
    hints: Vec<Option<Box<Hints>>>,
    distinct: u32,
    split_ids: u32,
}

impl Trace {
    /// Number of requests.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Blocks of all requests together.
    pub(crate) fn total_blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Different blocks; they are numbered from 0.
    pub(crate) fn distinct_blocks(&self) -> u32 {
        self.distinct
    }

    /// Blocks whose hash id was first seen after another prefix: zero where the trace hashes whole
    /// prefixes.
    pub(crate) fn split_ids(&self) -> u32 {
        self.split_ids
    }

    /// The path of request `index`, from the first block of its prompt.
    pub(crate) fn path(&self, index: usize) -> &[u32] {
        let end = self.ends.get(index).map_or(0, |end| *end as usize);
        let start = index
            .checked_sub(1)
            .and_then(|before| self.ends.get(before));
        self.blocks
            .get(start.map_or(0, |end| *end as usize)..end)
            .unwrap_or_default()
    }

    /// When request `index` arrived; never before the one ahead of it.
    pub(crate) fn arrival_ns(&self, index: usize) -> u64 {
        self.arrivals_ns.get(index).copied().unwrap_or_default()
    }

    /// Tokens of the prompt of request `index`: those that its row says, or whole blocks.
    pub(crate) fn prompt_tokens(&self, index: usize, page_tokens: u32) -> u64 {
        match self.prompts.get(index) {
            Some(&tokens) if tokens > 0 => tokens.into(),
            _ => self.path(index).len() as u64 * u64::from(page_tokens),
        }
    }

    /// What request `index` says about itself, if anything.
    pub(crate) fn hints(&self, index: usize) -> Option<&Hints> {
        self.hints.get(index)?.as_deref()
    }

    /// The share of blocks that a cache without limit finds.
    pub(crate) fn infinite_hits(&self) -> u64 {
        self.total_blocks() - u64::from(self.distinct)
    }
}

/// Collects requests and numbers their blocks.
#[derive(Debug, Default)]
pub(crate) struct TraceBuilder {
    requests: Vec<(u64, u32)>,
    blocks: Vec<u32>,
    prompts: Vec<u32>,
    hints: Vec<Option<Box<Hints>>>,
    numbers: Interner,
}

impl TraceBuilder {
    /// Adds the request of `line` with its hash ids.
    ///
    /// # Errors
    /// More blocks than the limit.
    pub(crate) fn push(
        &mut self,
        line: u64,
        arrival_ns: u64,
        hash_ids: &[u64],
    ) -> Result<(), ReplayError> {
        let mut parent = ROOT;
        for &hash_id in hash_ids {
            if self.blocks.len() as u64 >= u64::from(BLOCKS_MAX) {
                return Err(ReplayError::TooManyBlocks {
                    line,
                    limit: BLOCKS_MAX,
                });
            }
            parent = self.numbers.number(parent, hash_id);
            self.blocks.push(parent);
        }
        // Fits: `blocks.len() <= BLOCKS_MAX`.
        let end = u32::try_from(self.blocks.len()).unwrap_or(BLOCKS_MAX);
        self.requests.push((arrival_ns, end));
        self.prompts.push(0);
        Ok(())
    }

    /// How many tokens the prompt of the request pushed last has, where its row says so.
    pub(crate) fn measure(&mut self, input_tokens: Option<u64>) {
        if let (Some(prompt), Some(tokens)) = (self.prompts.last_mut(), input_tokens) {
            *prompt = u32::try_from(tokens).unwrap_or(u32::MAX);
        }
    }

    /// What the request pushed last says about itself.
    pub(crate) fn say(&mut self, signals: Signals) {
        if !signals.are_none() {
            self.hints
                .resize(self.requests.len().saturating_sub(1), None);
            self.hints.push(Some(Box::new(signals.hints())));
        }
    }

    /// The trace, in the order the requests were pushed; an arrival before its predecessor's is
    /// moved up to it.
    ///
    /// # Errors
    /// No request was pushed.
    pub(crate) fn in_file_order(self) -> Result<Trace, ReplayError> {
        if self.requests.is_empty() {
            return Err(ReplayError::Empty);
        }
        let mut clock = 0;
        let arrivals_ns = self.requests.iter().map(|&(arrival_ns, _)| {
            clock = arrival_ns.max(clock);
            clock
        });
        Ok(Trace {
            arrivals_ns: arrivals_ns.collect(),
            ends: self.requests.iter().map(|&(_, end)| end).collect(),
            blocks: self.blocks,
            prompts: self.prompts,
            hints: self.hints,
            distinct: self.numbers.len(),
            split_ids: self.numbers.repeated_ids(),
        })
    }
}

/// Numbers (parent, hash id) pairs in the order of their first appearance. Open addressing with
/// linear probing, at most half full: a few nanoseconds a block, where an ordered map costs
/// hundreds on long traces.
#[derive(Debug, Default)]
struct Interner {
    keys: Vec<(u32, u64)>,
    /// Number + 1 of the key in this slot, 0 for none; a power of two in length.
    slots: Vec<u32>,
}

impl Interner {
    fn len(&self) -> u32 {
        // Fits: the caller adds at most `BLOCKS_MAX` keys.
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX)
    }

    /// Keys whose hash id is that of an earlier key.
    fn repeated_ids(&self) -> u32 {
        let mut ids: Vec<u64> = self.keys.iter().map(|&(_, hash_id)| hash_id).collect();
        ids.sort_unstable();
        ids.dedup();
        // Fits: there are no more than keys.
        self.len() - u32::try_from(ids.len()).unwrap_or(u32::MAX)
    }

    fn number(&mut self, parent: u32, hash_id: u64) -> u32 {
        if self.keys.len() * 2 >= self.slots.len() {
            self.grow();
        }
        let key = (parent, hash_id);
        let mut at = self.home(key);
        while let Some(&slot) = self.slots.get(at) {
            let Some(number) = slot.checked_sub(1) else {
                break;
            };
            if self.keys.get(number as usize) == Some(&key) {
                return number;
            }
            at = self.after(at);
        }
        let number = self.len();
        self.keys.push(key);
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = number + 1;
        }
        number
    }

    fn grow(&mut self) {
        self.slots = vec![0; (self.slots.len() * 2).max(1024)];
        for number in 0..self.len() {
            let Some(&key) = self.keys.get(number as usize) else {
                continue;
            };
            let mut at = self.home(key);
            while self.slots.get(at).is_some_and(|slot| *slot != 0) {
                at = self.after(at);
            }
            if let Some(slot) = self.slots.get_mut(at) {
                *slot = number + 1;
            }
        }
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }

    /// The slot where the search for `key` begins; splitmix64's finalizer.
    fn home(&self, (parent, hash_id): (u32, u64)) -> usize {
        let mut x = hash_id ^ u64::from(parent).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        // The mask keeps it below the length, which is a usize.
        usize::try_from(x & (self.slots.len() as u64 - 1)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(requests: &[&[u64]]) -> Trace {
        let mut builder = TraceBuilder::default();
        for (at, ids) in requests.iter().enumerate() {
            builder.push(at as u64 + 1, at as u64, ids).unwrap();
        }
        builder.in_file_order().unwrap()
    }

    #[test]
    fn equal_prefixes_get_equal_numbers_and_others_do_not() {
        let trace = trace(&[&[5, 6, 7], &[5, 6, 9], &[6, 7]]);
        assert_eq!(trace.path(0), [0, 1, 2]);
        assert_eq!(trace.path(1), [0, 1, 3]);
        assert_eq!(
            trace.path(2),
            [4, 5],
            "6 and 7 stand after another prefix here"
        );
        assert!(trace.path(3).is_empty());
        assert_eq!((trace.total_blocks(), trace.distinct_blocks()), (8, 6));
        assert_eq!((trace.split_ids(), trace.infinite_hits()), (2, 2));
    }

    #[test]
    fn numbers_stay_unique_while_the_table_grows() {
        let ids: Vec<u64> = (0..100_000).map(|id| id << 40).collect();
        let trace = trace(&[&ids, &ids]);
        assert_eq!(trace.distinct_blocks(), 100_000);
        assert!(trace.path(0).iter().copied().eq(0..100_000));
        assert_eq!(trace.path(0), trace.path(1));
    }

    #[test]
    fn arrivals_never_go_back() {
        let mut builder = TraceBuilder::default();
        for (line, arrival_ns) in [(1, 7), (2, 3), (3, 9)] {
            builder.push(line, arrival_ns, &[1]).unwrap();
        }
        let trace = builder.in_file_order().unwrap();
        assert_eq!([0, 1, 2].map(|index| trace.arrival_ns(index)), [7, 7, 9]);
    }

    #[test]
    fn a_trace_without_requests_is_refused() {
        assert!(matches!(
            TraceBuilder::default().in_file_order(),
            Err(ReplayError::Empty)
        ));
    }
}
