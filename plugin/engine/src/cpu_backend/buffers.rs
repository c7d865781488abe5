//! Working memory of the steps, reused from step to step; it grows to the largest step seen.

use rootstock::radix::Token;
use rootstock_kernels::{KvRow, RopeAngles, SampleScratch, Scratch};

use super::sampling::Site;

/// Activations and index lists of one step. `n` is the number of tokens of the step.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Input tokens `[n]`, with those of earlier steps filled in.
    pub(super) tokens: Vec<Token>,
    /// Positions `[n]`.
    pub(super) positions: Vec<u32>,
    /// Per row of the plan: where its tokens start in this step; None: the row is left out.
    pub(super) starts: Vec<Option<usize>>,
    /// Hidden state `[n][dim]`.
    pub(super) x: Vec<f32>,
    /// Hidden states of the rows whose logits are computed, `[m][dim]`.
    pub(super) h: Vec<f32>,
    /// Query heads `[n][heads * head_dim]`.
    pub(super) q: Vec<f32>,
    /// Key heads `[n][kv_heads * head_dim]`.
    pub(super) k: Vec<f32>,
    /// Value heads `[n][kv_heads * head_dim]`.
    pub(super) v: Vec<f32>,
    /// Attention `[n][heads * head_dim]`.
    pub(super) att: Vec<f32>,
    /// Gate `[n][ffn]`.
    pub(super) gate: Vec<f32>,
    /// Up `[n][ffn]`.
    pub(super) up: Vec<f32>,
    /// Logits of a group of rows `[m][vocab]`.
    pub(super) logits: Vec<f32>,
    /// Rotary angles of the step.
    pub(super) angles: RopeAngles,
    /// The kernels' own.
    pub(super) scratch: Scratch,
    /// Where the step draws.
    pub(super) sites: Vec<Site>,
    /// The sampler's own.
    pub(super) sampler: SampleScratch,
    /// Spare memory of the list of KV rows, empty between steps.
    spare_rows: Vec<KvRow<'static>>,
}

impl Buffers {
    /// The spare list, for rows of any lifetime; give it back with [`Buffers::put_rows`].
    pub(super) fn take_rows<'a>(&mut self) -> Vec<KvRow<'a>> {
        reuse(std::mem::take(&mut self.spare_rows))
    }

    pub(super) fn put_rows(&mut self, rows: Vec<KvRow<'_>>) {
        self.spare_rows = reuse(rows);
    }
}

/// An empty list with the memory of `rows`: collecting in place keeps the allocation.
#[expect(
    clippy::unnecessary_filter_map,
    reason = "a filter would keep the lifetime"
)]
fn reuse<'b>(rows: Vec<KvRow<'_>>) -> Vec<KvRow<'b>> {
    rows.into_iter().filter_map(|_| None).collect()
}

/// Exactly `len` elements; old contents may remain and are overwritten by the caller.
pub(super) fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    buffer.split_at_mut(len).0
}
