//! The tokens of a step as the kernels read them, checked on the host and uploaded in one copy.
//!
//! ```text
//! tokens [n] | positions [n] | table starts [n] | chosen | picks | tiles | page tables | pairs
//! ```
//!
//! A padded batch has idle tokens behind the given ones: token 0 at position 0 of the scratch page.
//! What they compute is nobody's; the arrays of all batches of one size lie alike.
//!
//! Chosen tokens go through the decode kernel one by one; tiles are runs of at most 64 tokens of
//! one row for the prefill kernel. Pages are checked here, so kernels need not.

use super::buffer::{DeviceBuffer, PinnedBuffer};
use super::device::Device;
use super::error::CudaError;
use super::pages::{DevicePages, KvFormat};
use super::stream::Stream;
use crate::cpu::{KernelError, KvRow};

/// Queries of a tile.
const TILE_TOKENS: u32 = 64;

/// Rows of fewer tokens are decoded one by one: a tile would be mostly empty.
const TILE_LEAST: u32 = 8;

/// The page that belongs to nobody.
const SCRATCH: u32 = 0;

/// A longest context of a padded batch at least.
const LONGEST_LEAST: u32 = 512;

/// How results may depend on what else is in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// Not at all: every token is reduced in one order, whatever the chunk and the batch.
    Invariant,
    /// Tensor cores for prompts, and splits that fill the device.
    Fast,
}

/// What a step computes.
#[derive(Clone, Copy, Debug)]
pub struct BatchRows<'a> {
    /// Input tokens of all rows, one row after another.
    pub tokens: &'a [u32],
    /// The rows.
    pub rows: &'a [KvRow<'a>],
    /// Tokens of the step whose logits are wanted.
    pub picks: &'a [u32],
    /// `(to, from)`: token `to` of the step is number `from` of those drawn by an earlier one.
    pub feed: &'a [(u32, u32)],
}

/// What is fixed in the arguments of kernels over a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BatchShape {
    /// Tokens, idle ones included.
    pub n: u32,
    /// Positions of the longest context.
    pub longest: u32,
    /// Of the arrays on the device.
    pub place: u64,
}

/// Where the parts begin, in words.
#[derive(Clone, Copy, Debug, Default)]
struct Places {
    positions: usize,
    tables: usize,
    chosen: usize,
    picks: usize,
    tiles: usize,
    pages: usize,
    pairs: usize,
    end: usize,
}

/// The arrays of a step on the device.
#[derive(Debug)]
pub struct Batch {
    words: PinnedBuffer<u32>,
    device: DeviceBuffer<u32>,
    at: Places,
    numerics: Numerics,
    n: u32,
    chosen: u32,
    picks: u32,
    tiles: u32,
    feed: u32,
    /// Positions of the longest chosen token's context.
    longest: u32,
    /// Past the largest position.
    positions_end: u32,
    /// Past the largest token drawn earlier.
    drawn_end: u32,
}

impl Batch {
    /// An empty batch; it grows to the largest step seen.
    ///
    /// # Errors
    /// No memory.
    pub fn new(device: &Device, numerics: Numerics) -> Result<Self, CudaError> {
        const WORDS: usize = 4096;
        Ok(Self {
            words: PinnedBuffer::new(device, WORDS)?,
            device: DeviceBuffer::new(device, WORDS, "arrays of a step")?,
            at: Places::default(),
            numerics,
            n: 0,
            chosen: 0,
            picks: 0,
            tiles: 0,
            feed: 0,
            longest: 0,
            positions_end: 0,
            drawn_end: 0,
        })
    }

    /// Fills the arrays and queues their upload. The step before that used this batch must be over.
    ///
    /// # Errors
    /// A page table that does not cover its row or names a page outside the pool, tokens that do
    /// not match the rows; no memory.
    pub fn set(
        &mut self,
        stream: &Stream,
        pool: &DevicePages,
        given: &BatchRows<'_>,
    ) -> Result<(), CudaError> {
        self.set_padded(stream, pool, given, 0)
    }

    /// The same for rows of one token each, with idle tokens and picks up to `size` of each, and a
    /// longest context that is rounded up: a step that a graph of this size computes.
    ///
    /// # Errors
    /// As there.
    pub fn set_padded(
        &mut self,
        stream: &Stream,
        pool: &DevicePages,
        given: &BatchRows<'_>,
        size: u32,
    ) -> Result<(), CudaError> {
        let real = check_rows(pool, given)?;
        let tiled = self.numerics == Numerics::Fast && pool.shape().format() != KvFormat::F32;
        let is_tiled = |row: &&KvRow<'_>| tiled && row.len >= TILE_LEAST;
        let in_tiles = given.rows.iter().filter(is_tiled);
        let tiles: u32 = in_tiles
            .clone()
            .map(|row| row.len.div_ceil(TILE_TOKENS))
            .sum();
        let in_tiles: u32 = in_tiles.map(|row| row.len).sum();
        let n = real.max(size);
        (self.n, self.chosen, self.tiles) = (n, n - in_tiles, tiles);
        self.picks = (given.picks.len() as u32).max(size);
        self.feed = given.feed.len() as u32;
        self.drawn_end = given.feed.iter().map(|pair| pair.1 + 1).max().unwrap_or(0);
        (self.longest, self.positions_end) = (0, 0);
        let pages: usize = given.rows.iter().map(|row| row.pages.len()).sum();
        // The scratch page, for idle tokens.
        let at = Places::new(
            n,
            self.chosen,
            self.picks,
            tiles,
            pages + 1,
            given.feed.len(),
        );
        self.grow(at.end)?;
        self.at = at;
        self.fill_rows(given.rows, &is_tiled);
        let words = self.words.as_mut_slice();
        words[..real as usize].copy_from_slice(given.tokens);
        words[real as usize..n as usize].fill(0);
        words[at.positions + real as usize..][..(n - real) as usize].fill(0);
        words[at.tables + real as usize..][..(n - real) as usize].fill(pages as u32);
        words[at.pages + pages] = SCRATCH;
        for (index, token) in (real..n).enumerate() {
            words[at.chosen + (real - in_tiles) as usize + index] = token;
        }
        let picks = &mut words[at.picks..][..self.picks as usize];
        picks.fill(n.saturating_sub(1));
        picks[..given.picks.len()].copy_from_slice(given.picks);
        for (index, (to, from)) in given.feed.iter().enumerate() {
            words[at.pairs + 2 * index..][..2].copy_from_slice(&[*to, *from]);
        }
        if size > 0 {
            self.longest = self.longest.next_power_of_two().max(LONGEST_LEAST);
        }
        stream.upload(&self.words, 0..at.end, &self.device, 0)
    }

    /// Positions, tables, chosen tokens and tiles of the given rows.
    fn fill_rows(&mut self, rows: &[KvRow<'_>], is_tiled: &impl Fn(&&KvRow<'_>) -> bool) {
        let at = self.at;
        let words = self.words.as_mut_slice();
        let (mut token, mut table) = (0_u32, 0_u32);
        let (mut next_chosen, mut next_tile) = (at.chosen, at.tiles);
        for row in rows {
            let len = row.len as usize;
            let positions = row.first_pos..row.first_pos + row.len;
            self.positions_end = self.positions_end.max(positions.end);
            for (slot, position) in words[at.positions + token as usize..][..len]
                .iter_mut()
                .zip(positions)
            {
                *slot = position;
            }
            words[at.tables + token as usize..][..len].fill(table);
            for (slot, page) in words[at.pages + table as usize..].iter_mut().zip(row.pages) {
                *slot = page.get();
            }
            if is_tiled(&row) {
                for first in (0..row.len).step_by(TILE_TOKENS as usize) {
                    let count = TILE_TOKENS.min(row.len - first);
                    words[next_tile..][..2].copy_from_slice(&[token + first, count]);
                    next_tile += 2;
                }
            } else {
                self.longest = self.longest.max(row.first_pos + row.len);
                for index in 0..row.len {
                    words[next_chosen] = token + index;
                    next_chosen += 1;
                }
            }
            token += row.len;
            table += row.pages.len() as u32;
        }
    }

    /// What a graph over this batch has fixed: where its arrays are, their size, and the longest
    /// context that it computes.
    pub fn shape(&self) -> BatchShape {
        BatchShape {
            n: self.n,
            longest: self.longest,
            place: self.device.place(),
        }
    }

    /// Tokens of the step, idle ones included.
    pub fn tokens(&self) -> u32 {
        self.n
    }

    /// Tokens whose logits are wanted, idle ones included.
    pub fn picks(&self) -> u32 {
        self.picks
    }

    pub(super) fn numerics(&self) -> Numerics {
        self.numerics
    }

    pub(super) fn chosen(&self) -> u32 {
        self.chosen
    }

    pub(super) fn tiles(&self) -> u32 {
        self.tiles
    }

    pub(super) fn feed(&self) -> u32 {
        self.feed
    }

    pub(super) fn longest(&self) -> u32 {
        self.longest
    }

    pub(super) fn positions_end(&self) -> u32 {
        self.positions_end
    }

    pub(super) fn drawn_end(&self) -> u32 {
        self.drawn_end
    }

    pub(super) fn tokens_at(&self) -> u64 {
        self.device.address()
    }

    pub(super) fn positions_at(&self) -> u64 {
        self.device.address_at(self.at.positions)
    }

    pub(super) fn tables_at(&self) -> u64 {
        self.device.address_at(self.at.tables)
    }

    pub(super) fn pages_at(&self) -> u64 {
        self.device.address_at(self.at.pages)
    }

    /// Address of the chosen tokens from `first` on.
    pub(super) fn chosen_at(&self, first: u32) -> u64 {
        self.device.address_at(self.at.chosen + first as usize)
    }

    pub(super) fn picks_at(&self) -> u64 {
        self.device.address_at(self.at.picks)
    }

    pub(super) fn tiles_at(&self) -> u64 {
        self.device.address_at(self.at.tiles)
    }

    pub(super) fn pairs_at(&self) -> u64 {
        self.device.address_at(self.at.pairs)
    }

    fn grow(&mut self, words: usize) -> Result<(), CudaError> {
        if words <= self.words.len() {
            return Ok(());
        }
        let len = words.next_power_of_two();
        let device = self.device.device().clone();
        self.words = PinnedBuffer::new(&device, len)?;
        self.device = DeviceBuffer::new(&device, len, "arrays of a step")?;
        Ok(())
    }
}

impl Places {
    fn new(n: u32, chosen: u32, picks: u32, tiles: u32, pages: usize, feed: usize) -> Self {
        let n = n as usize;
        let picks_at = 3 * n + chosen as usize;
        // Pairs of words are read as one.
        let tiles_at = (picks_at + picks as usize).next_multiple_of(2);
        let pages_at = tiles_at + 2 * tiles as usize;
        let pairs = (pages_at + pages).next_multiple_of(2);
        Self {
            positions: n,
            tables: 2 * n,
            chosen: 3 * n,
            picks: picks_at,
            tiles: tiles_at,
            pages: pages_at,
            pairs,
            end: pairs + 2 * feed,
        }
    }
}

/// Refuses what the kernels would read or write outside of its place; returns the tokens.
fn check_rows(pool: &DevicePages, given: &BatchRows<'_>) -> Result<u32, KernelError> {
    let page_tokens = pool.shape().layout().page_tokens();
    let pages = u64::from(pool.total()) + 1;
    let n = crate::cpu::check_tables(given.rows, page_tokens, pages)?;
    crate::cpu::check_len("tokens of a step", given.tokens.len(), n)?;
    let n = u32::try_from(n).unwrap_or(u32::MAX);
    let fed = given.feed.iter().map(|pair| pair.0);
    if let Some(row) = given.picks.iter().copied().chain(fed).find(|&at| at >= n) {
        return Err(KernelError::RowOutOfRange {
            row: row as usize,
            rows: n as usize,
        });
    }
    Ok(n)
}
