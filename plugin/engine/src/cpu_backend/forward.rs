//! One pass of all rows of a step through all layers.
//!
//! Shapes: `n` tokens of the step, row after row. The arena is locked only while K and V are
//! stored and read, so copies get their turn between layers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use rootstock::StepError;
use rootstock::scheduler::{RowInput, StepPlan};
use rootstock_kernels::{
    AttentionArgs, HeadArgs, Heads, Input, KernelError, KvRow, KvView, Product, attention,
    place_heads, products,
};

use super::buffers::sized;
use super::{CpuBackend, failed};
use crate::model::{Layer, Linear};

/// Rows of logits computed together: bounds their memory, and reads the output matrix once for
/// all rows of a usual decode step.
const LOGIT_ROWS: usize = 32;

impl CpuBackend {
    /// Lists and embeds the tokens of a step.
    pub(super) fn start(&mut self, plan: &StepPlan) -> Result<(), StepError> {
        self.gather(plan);
        self.embed().map_err(failed(plan.id))
    }

    /// Computes the hidden states of all rows into `buffers.x`, and their K and V into the arena,
    /// from layer `next` on. The layer to go on with: all are done, or `pause` was set.
    pub(super) fn run_layers(
        &mut self,
        plan: &StepPlan,
        next: usize,
        pause: &AtomicBool,
    ) -> Result<usize, StepError> {
        let mut rows: Vec<KvRow<'_>> = self.buffers.take_rows();
        let starts = self.buffers.starts.iter().zip(&plan.rows);
        rows.extend(
            starts
                .filter(|(start, _)| start.is_some())
                .map(|(_, row)| KvRow {
                    first_pos: row.first_pos,
                    len: row.len + row.guess_count(),
                    pages: plan.row_pages(row),
                }),
        );
        let result = if rows.is_empty() {
            Ok(self.model.layers.len())
        } else {
            self.layers(&rows, next, pause)
        };
        self.buffers.put_rows(rows);
        result.map_err(failed(plan.id))
    }

    /// Lists tokens and positions; leaves out rows whose first token never came.
    fn gather(&mut self, plan: &StepPlan) {
        self.buffers.tokens.clear();
        self.buffers.positions.clear();
        self.buffers.starts.clear();
        for row in &plan.rows {
            let first = match row.input {
                RowInput::Known => None,
                RowInput::FromStep { step, row } => self.drawn_by(step, row),
            };
            let b = &mut self.buffers;
            if first.is_none() && row.input != RowInput::Known {
                b.starts.push(None);
                continue;
            }
            let start = b.tokens.len();
            b.starts.push(Some(start));
            b.tokens.extend_from_slice(plan.row_tokens(row));
            if let (Some(token), Some(slot)) = (first, b.tokens.get_mut(start)) {
                *slot = token;
            }
            b.tokens.extend_from_slice(plan.row_guesses(row));
            let end = row.first_pos + row.len + row.guess_count();
            b.positions.extend(row.first_pos..end);
        }
    }

    /// Embeds the tokens of the step.
    pub(super) fn embed(&mut self) -> Result<(), KernelError> {
        let dim = self.model.config().dim as usize;
        let b = &mut self.buffers;
        b.angles.set(
            &self.model.rope.freqs,
            &b.positions,
            self.model.rope.magnitude,
        );
        let x = sized(&mut b.x, b.tokens.len() * dim);
        for (token, row) in b.tokens.iter().zip(x.chunks_exact_mut(dim)) {
            self.model.embedding.embed_row(*token as usize, row)?;
        }
        Ok(())
    }

    /// Takes the embedded tokens through the layers from `next` on; the layer to go on with.
    pub(super) fn layers(
        &mut self,
        rows: &[KvRow<'_>],
        next: usize,
        pause: &AtomicBool,
    ) -> Result<usize, KernelError> {
        let n = self.buffers.tokens.len();
        let model = Arc::clone(&self.model);
        for (index, layer) in (0_u32..).zip(&model.layers).skip(next) {
            // A layer at least, so that a step always gets on.
            if index as usize > next && pause.load(Ordering::Acquire) {
                return Ok(index as usize);
            }
            self.attend(index, layer, rows, n)?;
            self.feed_forward(layer, n)?;
        }
        Ok(model.layers.len())
    }

    /// The attention half of a layer.
    fn attend(
        &mut self,
        index: u32,
        layer: &Layer,
        rows: &[KvRow<'_>],
        n: usize,
    ) -> Result<(), KernelError> {
        let config = self.model.config();
        let isa = self.model.isa();
        let b = &mut self.buffers;
        let x = sized(&mut b.x, n * config.dim as usize);
        let q = sized(&mut b.q, n * config.q_width());
        let k = sized(&mut b.k, n * config.kv_width());
        let v = sized(&mut b.v, n * config.kv_width());
        let normed = Input::Normed {
            x,
            weight: &layer.attn_norm,
            eps: config.eps,
        };
        let group = &mut [
            layer.q.product(&mut *q),
            layer.k.product(&mut *k),
            layer.v.product(&mut *v),
        ];
        products(&self.pool, group, normed, n, &mut b.scratch)?;
        let att = sized(&mut b.att, n * config.q_width());
        {
            let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
            let mut kv = KvView::of(&mut arena)?;
            let args = HeadArgs {
                isa,
                layer: index,
                rows,
                style: self.model.rope.style,
                angles: &b.angles,
                q_norm: layer.q_norm.as_deref(),
                k_norm: layer.k_norm.as_deref(),
                eps: config.eps,
            };
            let heads = Heads { q: &mut *q, k, v };
            place_heads(&self.pool, &args, &mut kv, heads)?;
            let args = AttentionArgs {
                isa,
                kv: &kv,
                layer: index,
                heads: config.heads,
                scale: 1.0 / (config.head_dim as f32).sqrt(),
                rows,
                q,
            };
            attention(&self.pool, &args, att, &mut b.scratch)?;
        }
        let group = &mut [layer.attn_out.product_onto(x)];
        products(&self.pool, group, Input::Rows(att), n, &mut b.scratch)
    }

    /// The feed-forward half of a layer.
    fn feed_forward(&mut self, layer: &Layer, n: usize) -> Result<(), KernelError> {
        let config = self.model.config();
        let b = &mut self.buffers;
        let x = sized(&mut b.x, n * config.dim as usize);
        let gate = sized(&mut b.gate, n * config.ffn as usize);
        let up = sized(&mut b.up, n * config.ffn as usize);
        let normed = Input::Normed {
            x,
            weight: &layer.ffn_norm,
            eps: config.eps,
        };
        let group = &mut [layer.gate.product(&mut *gate), layer.up.product(&mut *up)];
        products(&self.pool, group, normed, n, &mut b.scratch)?;
        let group = &mut [layer.down.product_onto(x)];
        let gated = Input::Gated { gate, up };
        products(&self.pool, group, gated, n, &mut b.scratch)
    }

    /// Logits of up to `LOGIT_ROWS` tokens of the step, given by index, into `buffers.logits`.
    pub(super) fn logits_of(&mut self, tokens: &[usize]) -> Result<&mut [f32], KernelError> {
        let config = self.model.config();
        let (dim, vocab) = (config.dim as usize, config.vocab as usize);
        let b = &mut self.buffers;
        let m = tokens.len();
        let h = sized(&mut b.h, m * dim);
        for (&token, row) in tokens.iter().zip(h.chunks_exact_mut(dim)) {
            let x = b.x.get(token * dim..(token + 1) * dim).unwrap_or_default();
            row.copy_from_slice(x);
        }
        let normed = Input::Normed {
            x: h,
            weight: &self.model.output_norm,
            eps: config.eps,
        };
        let logits = sized(&mut b.logits, m * vocab);
        let product = Product {
            matrix: self.model.head(),
            bias: None,
            out: &mut *logits,
            adds: false,
        };
        products(&self.pool, &mut [product], normed, m, &mut b.scratch)?;
        Ok(logits)
    }

    /// Appends the logits of all tokens of the step.
    pub(super) fn all_logits(&mut self, out: &mut Vec<f32>) -> Result<(), KernelError> {
        let all: Vec<usize> = (0..self.buffers.tokens.len()).collect();
        for some in all.chunks(LOGIT_ROWS) {
            out.extend_from_slice(self.logits_of(some)?);
        }
        Ok(())
    }

    /// How many rows of logits are computed together.
    pub(super) const fn logit_rows() -> usize {
        LOGIT_ROWS
    }
}

impl Linear {
    /// The product with this matrix, bias included.
    fn product<'a>(&'a self, out: &'a mut [f32]) -> Product<'a> {
        Product {
            matrix: &self.weight,
            bias: self.bias.as_deref(),
            out,
            adds: false,
        }
    }

    /// The same, added to what is in `out`.
    fn product_onto<'a>(&'a self, out: &'a mut [f32]) -> Product<'a> {
        Product {
            adds: true,
            ..self.product(out)
        }
    }
}
