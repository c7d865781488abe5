//! Causal attention over pages, for prefill chunks and decode alike.
//!
//! Row tokens at position `p` attend to positions `0..=p` through their page table. K and V,
//! those of the step included, are read back from the arena in the KV dtype, so the result of a
//! token depends on the cached bytes and its position only: not on the chunk, the batch, the page
//! table or the number of threads.

use half::{bf16, f16};
use rootstock_memory::KvSide;

use super::error::{KernelError, check_len, checked_area};
use super::isa::Isa;
use super::kv::{Elements, HEAD_DIM_MAX, KvPlace, KvRow, KvView};
use super::pool::ThreadPool;
use super::scratch::Scratch;
use super::shared::SharedOut;

/// Inputs of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Instruction set to use.
    pub isa: Isa,
    /// The arena, with K and V of this step's rows stored.
    pub kv: &'a KvView<'a>,
    /// Layer, from 0.
    pub layer: u32,
    /// Query heads: a multiple of the layout's KV heads.
    pub heads: u32,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The requests of the step.
    pub rows: &'a [KvRow<'a>],
    /// `[tokens of all rows][heads][head_dim]`, the rows one after another.
    pub q: &'a [f32],
}

/// Attention of all rows; `out` has the shape of `q`.
///
/// # Errors
/// Heads that are no multiple of the KV heads, page tables that do not cover their rows, a layer
/// outside the layout, lengths that do not match; a panicked task.
pub fn attention(
    pool: &ThreadPool,
    args: &AttentionArgs<'_>,
    out: &mut [f32],
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    let layout = args.kv.layout();
    let (heads, kv_heads) = (args.heads, layout.kv_heads());
    if heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(KernelError::HeadsNotDivisible { heads, kv_heads });
    }
    let tokens = args.kv.check(args.layer, args.rows)?;
    let width = heads as usize * layout.head_dim() as usize;
    let wanted = checked_area("attention rows", tokens, width)?;
    check_len("attention queries", args.q.len(), wanted)?;
    check_len("attention output", out.len(), wanted)?;
    let _ = scratch;
    scalar(pool, args, out)
}

/// The reference: one query head at a time, in 64-bit floats.
fn scalar(pool: &ThreadPool, args: &AttentionArgs<'_>, out: &mut [f32]) -> Result<(), KernelError> {
    let head_dim = args.kv.layout().head_dim() as usize;
    let group = args.heads / args.kv.layout().kv_heads();
    let width = args.heads as usize * head_dim;
    let out = SharedOut::new(out);
    let mut first_token = 0;
    for row in args.rows {
        pool.run(row.len as usize, &|token| {
            let at = (first_token + token) * width;
            let position = row.first_pos + token as u32;
            // SAFETY: each token of the step belongs to one task.
            let out = unsafe { out.part(at..at + width) };
            let heads = out
                .chunks_exact_mut(head_dim)
                .zip(args.q[at..].chunks_exact(head_dim));
            for (head, (out, q)) in (0..).zip(heads) {
                scalar_head(args, row, (position, head / group), q, out);
            }
        })?;
        first_token += row.len as usize;
    }
    Ok(())
}

fn scalar_head(
    args: &AttentionArgs<'_>,
    row: &KvRow<'_>,
    (last, head): (u32, u32),
    q: &[f32],
    out: &mut [f32],
) {
    let elements = args.kv.elements();
    let place = |position, side| {
        args.kv.offset(
            row,
            KvPlace {
                position,
                layer: args.layer,
                side,
                head,
            },
        )
    };
    let mut acc = [0.0_f64; HEAD_DIM_MAX];
    let (mut max, mut sum) = (f64::NEG_INFINITY, 0.0);
    for position in 0..=last {
        let key = place(position, KvSide::K);
        let score: f64 = (key..)
            .zip(q)
            .map(|(at, q)| elements.at(at) * f64::from(*q))
            .sum();
        let score = score * f64::from(args.scale);
        let new_max = max.max(score);
        let (keep, weight) = ((max - new_max).exp(), (score - new_max).exp());
        max = new_max;
        sum = sum * keep + weight;
        let value = place(position, KvSide::V);
        for (at, acc) in (value..).zip(&mut acc[..q.len()]) {
            *acc = *acc * keep + weight * elements.at(at);
        }
    }
    for (out, acc) in out.iter_mut().zip(acc) {
        *out = (acc / sum) as f32;
    }
}

impl Elements<'_> {
    fn at(self, index: usize) -> f64 {
        f64::from(match self {
            Self::F32(values) => values[index],
            Self::F16(values) => f16::from_bits(values[index]).to_f32(),
            Self::Bf16(values) => bf16::from_bits(values[index]).to_f32(),
        })
    }
}
