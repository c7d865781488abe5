//! The inner loops of a product: a few rows of `x` against one tile of weights at a time.
//!
//! A tile of 8 or 16 weight rows is read once for up to 4 or 8 rows of `x`, whose sums stay in
//! registers. How many rows go together changes nothing in any sum.

use std::ops::Range;

use super::act::Act;
use super::ggml::GgmlType;
use super::lanes::{Kernel, Lanes};
use super::shared::SharedOut;
use super::tiles::Tiles;

/// Rows of `x` between two passes over a task's tiles, so that they stay in the L2 cache.
const PANEL_ROWS: usize = 64;

/// How far ahead of the units in use the next ones are asked for, in bytes.
const PREFETCH_AHEAD: usize = 1536;

/// The right side of a product.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// `[n][cols]`, for float weights.
    pub(crate) x: &'a [f32],
    /// `[n][cols / 32]`, for quantized weights.
    pub(crate) acts: &'a [Act],
    /// Rows.
    pub(crate) n: usize,
}

/// Some tiles of a matrix times all inputs.
pub(crate) struct TileProduct<'a> {
    pub(crate) tiles: &'a Tiles,
    pub(crate) range: Range<usize>,
    pub(crate) inputs: Inputs<'a>,
    /// `[n][rows]`; this task alone uses the columns of its tiles.
    pub(crate) out: &'a SharedOut<'a, f32>,
}

impl Kernel for TileProduct<'_> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar path has no tiles");
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        let Inputs { x, acts, .. } = self.inputs;
        match self.tiles.shape().ggml_type {
            GgmlType::F32 => self.panels::<L, F32>(l, x),
            GgmlType::F16 => self.panels::<L, F16>(l, x),
            GgmlType::Bf16 => self.panels::<L, Bf16>(l, x),
            GgmlType::Q4_0 => self.panels::<L, Q4_0>(l, acts),
            GgmlType::Q4_1 => self.panels::<L, Q4_1>(l, acts),
            GgmlType::Q8_0 => self.panels::<L, Q8_0>(l, acts),
        }
    }
}

/// How a unit of one type adds to the sums of `MB` rows of `x`.
trait Format {
    /// What `x` consists of: one per unit.
    type X: Copy;

    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&Self::X; MB], sums: &mut [L::R; MB]);
}

struct Q4_0;

impl Format for Q4_0 {
    type X = Act;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&Act; MB], sums: &mut [L::R; MB]) {
        let (scales, words) = unit.split_at(2 * L::ROWS);
        let dots = dots4::<L, MB>(l, words, x);
        let d = l.rows_f16(scales);
        for i in 0..MB {
            let dot = l.dot4_rows(dots[i], 8 * x[i].sum);
            sums[i] = l.rows_mul_add(l.rows_scale(d, x[i].d), dot, sums[i]);
        }
    }
}

struct Q4_1;

impl Format for Q4_1 {
    type X = Act;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&Act; MB], sums: &mut [L::R; MB]) {
        let (scales, words) = unit.split_at(4 * L::ROWS);
        let dots = dots4::<L, MB>(l, words, x);
        let (d, m) = scales.split_at(2 * L::ROWS);
        let (d, m) = (l.rows_f16(d), l.rows_f16(m));
        for i in 0..MB {
            let dot = l.dot4_rows(dots[i], 0);
            sums[i] = l.rows_mul_add(l.rows_scale(d, x[i].d), dot, sums[i]);
            sums[i] = l.rows_mul_add_splat(m, x[i].d_sum, sums[i]);
        }
    }
}

/// The integer sums of a unit of 4-bit weights.
#[inline(always)]
fn dots4<L: Lanes, const MB: usize>(l: L, words: &[u8], x: [&Act; MB]) -> [L::D4; MB] {
    let mut dots = [l.dot4_zero(); MB];
    for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
        let nibbles = l.bytes(word);
        let (low, high) = (l.low(nibbles), l.high(nibbles));
        for i in 0..MB {
            dots[i] = l.dot4(dots[i], low, x[i].word(group));
            dots[i] = l.dot4(dots[i], high, x[i].word(4 + group));
        }
    }
    dots
}

struct Q8_0;

impl Format for Q8_0 {
    type X = Act;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&Act; MB], sums: &mut [L::R; MB]) {
        let (scales, words) = unit.split_at(2 * L::ROWS);
        let mut dots = [l.dot8_zero(); MB];
        for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
            let word = l.signed(word);
            for i in 0..MB {
                dots[i] = l.dot8(dots[i], word, x[i].word(group));
            }
        }
        let d = l.rows_f16(scales);
        for i in 0..MB {
            let dot = l.dot8_rows(dots[i], x[i].sum);
            sums[i] = l.rows_mul_add(l.rows_scale(d, x[i].d), dot, sums[i]);
        }
    }
}

struct F32;
struct F16;
struct Bf16;

impl Format for F32 {
    type X = f32;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&f32; MB], sums: &mut [L::R; MB]) {
        column::<L, MB>(l, l.rows_f32(unit), x, sums);
    }
}

impl Format for F16 {
    type X = f32;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&f32; MB], sums: &mut [L::R; MB]) {
        column::<L, MB>(l, l.rows_f16(unit), x, sums);
    }
}

impl Format for Bf16 {
    type X = f32;

    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(l: L, unit: &[u8], x: [&f32; MB], sums: &mut [L::R; MB]) {
        column::<L, MB>(l, l.rows_bf16(unit), x, sums);
    }
}

/// One column of float weights.
#[inline(always)]
fn column<L: Lanes, const MB: usize>(l: L, w: L::R, x: [&f32; MB], sums: &mut [L::R; MB]) {
    for i in 0..MB {
        sums[i] = l.rows_mul_add_splat(w, *x[i], sums[i]);
    }
}

impl TileProduct<'_> {
    #[inline(always)]
    fn panels<L: Lanes, F: Format>(&self, l: L, x: &[F::X]) {
        let width = x.len() / self.inputs.n;
        for (panel, x) in x.chunks(PANEL_ROWS * width).enumerate() {
            for tile in self.range.clone() {
                let weights = self.tiles.tile(tile);
                let mut row = panel * PANEL_ROWS;
                let mut x = x;
                while !x.is_empty() {
                    let left = x.len() / width;
                    let step = if left >= 8 && L::ROWS == 16 {
                        8
                    } else {
                        left.min(4)
                    };
                    let (now, later) = x.split_at(step * width);
                    match step {
                        8 => self.rows::<L, F, 8>(l, weights, now, (row, tile)),
                        4 => self.rows::<L, F, 4>(l, weights, now, (row, tile)),
                        3 => self.rows::<L, F, 3>(l, weights, now, (row, tile)),
                        2 => self.rows::<L, F, 2>(l, weights, now, (row, tile)),
                        _ => self.rows::<L, F, 1>(l, weights, now, (row, tile)),
                    }
                    row += step;
                    x = later;
                }
            }
        }
    }

    /// One tile times `MB` rows of `x`, the first of which is `row`.
    #[inline(always)]
    fn rows<L: Lanes, F: Format, const MB: usize>(
        &self,
        l: L,
        weights: &[u8],
        x: &[F::X],
        (row, tile): (usize, usize),
    ) {
        let width = x.len() / MB;
        let mut rows: [&[F::X]; MB] = [&[]; MB];
        for (i, rows) in rows.iter_mut().enumerate() {
            *rows = &x[i * width..][..width];
        }
        let unit_bytes = self.tiles.shape().ggml_type.block_bytes() * L::ROWS;
        let mut sums = [l.rows_zero(); MB];
        for (index, unit) in weights.chunks_exact(unit_bytes).enumerate() {
            let mut line = 0;
            while line < unit_bytes {
                l.prefetch(unit, PREFETCH_AHEAD + line);
                line += 64;
            }
            let mut now = [&rows[0][index]; MB];
            for (now, rows) in now.iter_mut().zip(&rows).skip(1) {
                *now = &rows[index];
            }
            F::step::<L, MB>(l, unit, now, &mut sums);
        }
        let columns = tile * L::ROWS..((tile + 1) * L::ROWS).min(self.tiles.rows());
        for (i, sums) in sums.into_iter().enumerate() {
            let start = (row + i) * self.tiles.rows();
            // SAFETY: the columns of a tile belong to the task of its range.
            let out = unsafe { self.out.part(start + columns.start..start + columns.end) };
            if out.len() == L::ROWS {
                l.rows_store(sums, out);
            } else {
                let mut whole = [0.0; 16];
                l.rows_store(sums, &mut whole[..L::ROWS]);
                out.copy_from_slice(&whole[..out.len()]);
            }
        }
    }
}
