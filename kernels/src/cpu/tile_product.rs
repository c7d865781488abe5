//! The inner loops of a product: a few rows of `x` against one tile of weights at a time.
//!
//! A tile of 8 or 16 weight rows is read once for up to 4 or 8 rows of `x`, whose sums stay in
//! registers. How many rows go together changes nothing in any sum.

use std::ops::Range;

use super::act::Act;
use super::forms::Form;
use super::ggml::IQ4_NL;
use super::lanes::{Kernel, Lanes};
use super::shared::SharedOut;
use super::tiles::Tiles;

/// Rows of `x` between two passes over a task's tiles: with a tile they fit the first cache, or
/// come from the second.
const PANEL_ROWS: usize = 32;

/// How far ahead of the units in use the next ones are asked for, in bytes.
const PREFETCH_AHEAD: usize = 4096;

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
    pub(crate) target: &'a Target<'a>,
}

/// Where a product goes.
pub(crate) struct Target<'a> {
    /// `[n][rows]`; a task alone uses the columns of its tiles.
    pub(crate) out: SharedOut<'a, f32>,
    /// `[rows]`, added to each row.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whether the product is added to what is there.
    pub(crate) adds: bool,
}

impl Kernel for TileProduct<'_> {
    type Output = ();

    fn scalar(self) {
        unreachable!("the scalar path has no tiles");
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        let Inputs { x, acts, .. } = self.inputs;
        match self.tiles.shape().form {
            Form::F32 => self.floats::<L, F32>(l, x),
            Form::F16 => self.floats::<L, F16>(l, x),
            Form::Bf16 => self.floats::<L, Bf16>(l, x),
            Form::Q4_0 => self.quantized::<L, Q4_0>(l, acts),
            Form::Q4_1 => self.quantized::<L, Q4_1>(l, acts),
            Form::Q5 => self.quantized::<L, Q5>(l, acts),
            Form::Q6 => self.quantized::<L, Q6>(l, acts),
            Form::Q8_0 => self.quantized::<L, Q8_0>(l, acts),
            Form::Iq4Nl => self.quantized::<L, Iq4Nl>(l, acts),
        }
    }
}

/// How tiles of one type add to the sums of rows of `x`.
trait Format {
    /// What a row of `x` consists of.
    type X;

    /// Adds `NT` tiles' products with `MB` rows of `x` to their sums, in ascending columns.
    fn accumulate<L: Lanes, const NT: usize, const MB: usize>(
        l: L,
        weights: [&[u8]; NT],
        x: [&[Self::X]; MB],
        sums: &mut [[L::R; MB]; NT],
    );
}

/// Walks the units of one tile, each beside one element of every row of `x`.
macro_rules! walk_blocks {
    ($ty:expr) => {
        type X = Act;

        #[inline(always)]
        fn accumulate<L: Lanes, const NT: usize, const MB: usize>(
            l: L,
            weights: [&[u8]; NT],
            x: [&[Act]; MB],
            sums: &mut [[L::R; MB]; NT],
        ) {
            let unit_bytes = $ty.block_bytes() * L::ROWS;
            for (sums, weights) in sums.iter_mut().zip(weights) {
                for (index, unit) in weights.chunks_exact(unit_bytes).enumerate() {
                    let mut line = 0;
                    while line < unit_bytes {
                        l.prefetch(unit, PREFETCH_AHEAD + line);
                        line += 64;
                    }
                    Self::step::<L, MB>(l, unit, Column { x, index }, sums);
                }
            }
        }
    };
}

/// The same block of several rows of `x`.
///
/// The rows stay slices: an array of references to their blocks would go through memory.
#[derive(Clone, Copy)]
struct Column<'a, const MB: usize> {
    x: [&'a [Act]; MB],
    index: usize,
}

impl<const MB: usize> Column<'_, MB> {
    #[inline(always)]
    fn row(&self, i: usize) -> &Act {
        &self.x[i][self.index]
    }
}

struct Q4_0;

impl Format for Q4_0 {
    walk_blocks!(Form::Q4_0);
}

impl Q4_0 {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(2 * L::ROWS);
        let dots = dots4::<L, MB>(l, words, x);
        let d = l.rows_f16(scales);
        for i in 0..MB {
            let dot = l.dot4_rows(dots[i], 8 * x.row(i).sum());
            sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
        }
    }
}

struct Q4_1;

impl Format for Q4_1 {
    walk_blocks!(Form::Q4_1);
}

impl Q4_1 {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(4 * L::ROWS);
        let dots = dots4::<L, MB>(l, words, x);
        let (d, m) = scales.split_at(2 * L::ROWS);
        let (d, m) = (l.rows_f16(d), l.rows_f16(m));
        for i in 0..MB {
            let dot = l.dot4_rows(dots[i], 0);
            sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
            sums[i] = l.rows_mul_add_splat(m, x.row(i).d_sum, sums[i]);
        }
    }
}

/// The integer sums of a unit of 4-bit weights.
#[inline(always)]
fn dots4<L: Lanes, const MB: usize>(l: L, words: &[u8], x: Column<'_, MB>) -> [L::D4; MB] {
    let mut dots = [l.dot4_zero(); MB];
    for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
        let nibbles = l.bytes(word);
        let (low, high) = (l.low(nibbles), l.high(nibbles));
        for (i, dot) in dots.iter_mut().enumerate() {
            *dot = l.dot4(*dot, low, x.row(i).word(group));
            *dot = l.dot4(*dot, high, x.row(i).word(4 + group));
        }
    }
    dots
}

struct Q8_0;

impl Format for Q8_0 {
    walk_blocks!(Form::Q8_0);
}

impl Q8_0 {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(2 * L::ROWS);
        let mut dots = [l.dot8_zero(); MB];
        for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
            let word = l.signed(word);
            for (i, dot) in dots.iter_mut().enumerate() {
                *dot = l.dot8(*dot, word, x.row(i).word(group));
            }
        }
        let d = l.rows_f16(scales);
        for i in 0..MB {
            let dot = l.dot8_rows(dots[i], x.row(i).sum());
            sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
        }
    }
}

struct Q5;

impl Format for Q5 {
    walk_blocks!(Form::Q5);
}

impl Q5 {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(4 * L::ROWS);
        let (fifths, words) = words.split_at(4 * L::ROWS);
        let fifths = l.bytes(fifths);
        let mut dots = [l.dot8_zero(); MB];
        for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
            let nibbles = l.bytes(word);
            let low = l.unsigned(l.with_fifth(l.low(nibbles), fifths, group));
            let high = l.unsigned(l.with_fifth(l.high(nibbles), fifths, 4 + group));
            for (i, dot) in dots.iter_mut().enumerate() {
                *dot = l.dot8(*dot, low, x.row(i).word(group));
                *dot = l.dot8(*dot, high, x.row(i).word(4 + group));
            }
        }
        let (d, m) = scales.split_at(2 * L::ROWS);
        let (d, m) = (l.rows_f16(d), l.rows_f16(m));
        for i in 0..MB {
            let dot = l.dot8_less(dots[i], 0);
            sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
            sums[i] = l.rows_mul_add_splat(m, x.row(i).d_sum, sums[i]);
        }
    }
}

struct Q6;

impl Format for Q6 {
    walk_blocks!(Form::Q6);
}

impl Q6 {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(4 * L::ROWS);
        let halves = words.chunks_exact(16 * L::ROWS);
        for (half, (words, scales)) in halves.zip(scales.chunks_exact(2 * L::ROWS)).enumerate() {
            let mut dots = [l.dot8_zero(); MB];
            for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
                let word = l.unsigned(l.bytes(word));
                for (i, dot) in dots.iter_mut().enumerate() {
                    *dot = l.dot8(*dot, word, x.row(i).word(4 * half + group));
                }
            }
            let d = l.rows_f16(scales);
            for i in 0..MB {
                let offset = 32 * i32::from(x.row(i).halves[half]);
                let dot = l.dot8_less(dots[i], offset);
                sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
            }
        }
    }
}

struct Iq4Nl;

impl Format for Iq4Nl {
    walk_blocks!(Form::Iq4Nl);
}

impl Iq4Nl {
    #[inline(always)]
    fn step<L: Lanes, const MB: usize>(
        l: L,
        unit: &[u8],
        x: Column<'_, MB>,
        sums: &mut [L::R; MB],
    ) {
        let (scales, words) = unit.split_at(2 * L::ROWS);
        let mut dots = [l.dot8_zero(); MB];
        for (group, word) in words.chunks_exact(4 * L::ROWS).enumerate() {
            let nibbles = l.bytes(word);
            let low = l.lookup(&IQ4_NL, l.low(nibbles));
            let high = l.lookup(&IQ4_NL, l.high(nibbles));
            for (i, dot) in dots.iter_mut().enumerate() {
                *dot = l.dot8(*dot, low, x.row(i).word(group));
                *dot = l.dot8(*dot, high, x.row(i).word(4 + group));
            }
        }
        let d = l.rows_f16(scales);
        for i in 0..MB {
            let dot = l.dot8_rows(dots[i], x.row(i).sum());
            sums[i] = l.rows_mul_add(l.rows_scale(d, x.row(i).d), dot, sums[i]);
        }
    }
}

/// Float weights.
struct F32;
/// 16-bit float weights.
struct F16;
/// Brain float weights.
struct Bf16;

/// Columns of float weights between two checks of the inputs' ends.
const FLOAT_COLUMNS: usize = 8;

/// Float formats differ only in how a column of a tile is widened.
macro_rules! float_format {
    ($name:ident, $widen:ident) => {
        impl Format for $name {
            type X = f32;

            #[inline(always)]
            fn accumulate<L: Lanes, const NT: usize, const MB: usize>(
                l: L,
                weights: [&[u8]; NT],
                x: [&[f32]; MB],
                sums: &mut [[L::R; MB]; NT],
            ) {
                let unit_bytes = Form::$name.block_bytes() * L::ROWS;
                let blocks = x[0].len() / FLOAT_COLUMNS;
                for block in 0..blocks {
                    let mut now = [&[0.0; FLOAT_COLUMNS]; MB];
                    for (now, x) in now.iter_mut().zip(&x) {
                        *now = &x.as_chunks().0[block];
                    }
                    let block_bytes = FLOAT_COLUMNS * unit_bytes;
                    for (sums, weights) in sums.iter_mut().zip(&weights) {
                        let units = &weights[block * block_bytes..][..block_bytes];
                        for (column, unit) in units.chunks_exact(unit_bytes).enumerate() {
                            let w = l.$widen(unit);
                            for (sum, x) in sums.iter_mut().zip(&now) {
                                *sum = l.rows_mul_add_splat(w, x[column], *sum);
                            }
                        }
                    }
                }
                for column in blocks * FLOAT_COLUMNS..x[0].len() {
                    for (sums, weights) in sums.iter_mut().zip(&weights) {
                        let w = l.$widen(&weights[column * unit_bytes..][..unit_bytes]);
                        for (sum, x) in sums.iter_mut().zip(&x) {
                            *sum = l.rows_mul_add_splat(w, x[column], *sum);
                        }
                    }
                }
            }
        }
    };
}

float_format!(F32, rows_f32);
float_format!(F16, rows_f16);
float_format!(Bf16, rows_bf16);

impl TileProduct<'_> {
    /// Quantized weights, a tile at a time.
    #[inline(always)]
    fn quantized<L: Lanes, F: Format>(&self, l: L, x: &[F::X]) {
        let width = x.len() / self.inputs.n;
        for (panel, x) in x.chunks(PANEL_ROWS * width).enumerate() {
            for tile in self.range.clone() {
                self.walk::<L, F, 1>(l, (panel * PANEL_ROWS, tile), x, width);
            }
        }
    }

    /// Float weights: several tiles at a time, so that enough sums are under way.
    #[inline(always)]
    fn floats<L: Lanes, F: Format<X = f32>>(&self, l: L, x: &[f32]) {
        let width = x.len() / self.inputs.n;
        for (panel, x) in x.chunks(PANEL_ROWS * width).enumerate() {
            let row = panel * PANEL_ROWS;
            let mut tile = self.range.start;
            while tile < self.range.end {
                let left = self.range.end - tile;
                if left >= 4 && x.len() <= 2 * width {
                    self.walk::<L, F, 4>(l, (row, tile), x, width);
                    tile += 4;
                } else if left >= 2 {
                    self.walk::<L, F, 2>(l, (row, tile), x, width);
                    tile += 2;
                } else {
                    self.walk::<L, F, 1>(l, (row, tile), x, width);
                    tile += 1;
                }
            }
        }
    }

    /// `NT` tiles times the rows of a panel, which starts at `row`.
    #[inline(always)]
    fn walk<L: Lanes, F: Format, const NT: usize>(
        &self,
        l: L,
        (mut row, tile): (usize, usize),
        mut x: &[F::X],
        width: usize,
    ) {
        while !x.is_empty() {
            let left = x.len() / width;
            let step = match NT {
                4 => left.min(2),
                1 if L::ROWS == 16 && left >= 8 => 8,
                _ => left.min(4),
            };
            let (now, later) = x.split_at(step * width);
            match step {
                8 => self.rows::<L, F, NT, 8>(l, (row, tile), now),
                4 => self.rows::<L, F, NT, 4>(l, (row, tile), now),
                3 => self.rows::<L, F, NT, 3>(l, (row, tile), now),
                2 => self.rows::<L, F, NT, 2>(l, (row, tile), now),
                _ => self.rows::<L, F, NT, 1>(l, (row, tile), now),
            }
            row += step;
            x = later;
        }
    }

    /// `NT` tiles times `MB` rows of `x`, the first of which is `row`.
    #[inline(always)]
    fn rows<L: Lanes, F: Format, const NT: usize, const MB: usize>(
        &self,
        l: L,
        (row, tile): (usize, usize),
        x: &[F::X],
    ) {
        let width = x.len() / MB;
        let mut rows: [&[F::X]; MB] = [&[]; MB];
        for (i, rows) in rows.iter_mut().enumerate() {
            *rows = &x[i * width..][..width];
        }
        let mut weights: [&[u8]; NT] = [&[]; NT];
        for (i, weights) in weights.iter_mut().enumerate() {
            *weights = self.tiles.tile(tile + i);
        }
        let mut sums = [[l.rows_zero(); MB]; NT];
        F::accumulate::<L, NT, MB>(l, weights, rows, &mut sums);
        for (tile, sums) in (tile..).zip(sums) {
            for (row, sums) in (row..).zip(sums) {
                self.store(l, (row, tile), sums);
            }
        }
    }

    /// Writes one row's sums with a tile; the last tile may be cut short.
    #[inline(always)]
    fn store<L: Lanes>(&self, l: L, (row, tile): (usize, usize), sums: L::R) {
        let height = self.tiles.rows();
        let columns = tile * L::ROWS..((tile + 1) * L::ROWS).min(height);
        let start = row * height;
        // SAFETY: the columns of a tile belong to the task of its range.
        let out = unsafe {
            self.target
                .out
                .part(start + columns.start..start + columns.end)
        };
        if out.len() == L::ROWS && self.target.bias.is_none() && !self.target.adds {
            return l.rows_store(sums, out);
        }
        let mut line = [0.0; 16];
        l.rows_store(sums, &mut line[..L::ROWS]);
        if let Some(bias) = self.target.bias {
            for (sum, bias) in line.iter_mut().zip(&bias[columns]) {
                *sum += bias;
            }
        }
        if self.target.adds {
            for (out, sum) in out.iter_mut().zip(line) {
                *out += sum;
            }
        } else {
            out.copy_from_slice(&line[..out.len()]);
        }
    }
}
