//! The inputs of products: normed, gated or taken as they are, and rounded to 8 bits, in one pass.
//!
//! A row goes from the hidden state to the blocks that products read without leaving the first
//! cache: what a norm or a gate makes of it stands in a small buffer, or in the dense rows where
//! some matrix of the group wants floats. Rows are independent, so how they are shared out changes
//! nothing.

use super::act::{ACT_LEN, Act, Quantize};
use super::error::{KernelError, check_len, checked_area};
use super::isa::Isa;
use super::lanes::{Inner, Kernel, LANES, Lanes, Line, Reference, Within};
use super::norm::{RmsNorm, SiluMul, rms_scale, silu};
use super::pool::ThreadPool;
use super::scratch::Scratch;
use super::shared::SharedOut;

/// Most rows that one task prepares.
const TASK_ROWS: usize = 16;

/// Tasks per thread that a call is split into when it can be.
const TASKS_PER_THREAD: usize = 4;

/// Calls of fewer elements are not worth waking a thread for.
const SERIAL_ELEMENTS: usize = 1 << 13;

/// Columns that are computed before they are rounded: they stay in the first cache.
const PART: usize = 16 * ACT_LEN;

/// What a group of products is multiplied with: `[n][cols]`.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Rows as they are.
    Rows(&'a [f32]),
    /// `rms_norm` of each row.
    Normed {
        /// `[n][cols]`.
        x: &'a [f32],
        /// `[cols]`.
        weight: &'a [f32],
        /// Epsilon of the norm.
        eps: f32,
    },
    /// `silu(gate) * up`.
    Gated {
        /// `[n][cols]`.
        gate: &'a [f32],
        /// `[n][cols]`.
        up: &'a [f32],
    },
}

impl<'a> Input<'a> {
    /// The rows that are read first.
    pub(crate) fn rows(self) -> &'a [f32] {
        match self {
            Self::Rows(x) | Self::Normed { x, .. } | Self::Gated { gate: x, .. } => x,
        }
    }

    /// One row.
    fn row(self, row: usize, cols: usize) -> Self {
        let of = |x: &'a [f32]| &x[row * cols..][..cols];
        match self {
            Self::Rows(x) => Self::Rows(of(x)),
            Self::Normed { x, weight, eps } => Self::Normed {
                x: of(x),
                weight,
                eps,
            },
            Self::Gated { gate, up } => Self::Gated {
                gate: of(gate),
                up: of(up),
            },
        }
    }

    pub(crate) fn check(self, n: usize, cols: usize) -> Result<(), KernelError> {
        let wanted = checked_area("matmul input", n, cols)?;
        check_len("matmul input", self.rows().len(), wanted)?;
        match self {
            Self::Rows(_) => Ok(()),
            Self::Normed { weight, .. } => check_len("norm weights", weight.len(), cols),
            Self::Gated { up, .. } => check_len("gated input", up.len(), wanted),
        }
    }

    /// Whether the rows have to be computed first.
    fn transforms(self) -> bool {
        !matches!(self, Self::Rows(_))
    }
}

/// The forms in which a group of products wants its input.
#[derive(Clone, Copy)]
pub(crate) struct Forms {
    /// Blocks of 8 bits.
    pub(crate) acts: bool,
    /// Floats.
    pub(crate) dense: bool,
}

/// Fills `scratch` with the forms of `n` rows; the floats of rows taken as they are stay there.
pub(crate) fn prepare(
    pool: &ThreadPool,
    isa: Isa,
    (input, n): (Input<'_>, usize),
    forms: Forms,
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    let cols = input.rows().len() / n;
    let dense_wanted = forms.dense && input.transforms();
    if !forms.acts && !dense_wanted {
        return Ok(());
    }
    let blocks = if forms.acts { cols / ACT_LEN } else { 0 };
    let dense_cols = if dense_wanted { cols } else { 0 };
    let zero = bytemuck::Zeroable::zeroed();
    scratch.acts.resize(n * blocks, zero);
    scratch.dense.resize(n * dense_cols, 0.0);
    let fair = n.div_ceil(pool.threads() * TASKS_PER_THREAD);
    let task_rows = if n * cols < SERIAL_ELEMENTS {
        n
    } else {
        fair.min(TASK_ROWS)
    };
    let acts = SharedOut::new(&mut scratch.acts);
    let dense = SharedOut::new(&mut scratch.dense);
    pool.run(n.div_ceil(task_rows), &|task| {
        for row in task * task_rows..((task + 1) * task_rows).min(n) {
            // SAFETY: each row belongs to one task.
            let acts = unsafe { acts.part(row * blocks..(row + 1) * blocks) };
            // SAFETY: each row belongs to one task.
            let dense = unsafe { dense.part(row * dense_cols..(row + 1) * dense_cols) };
            isa.run(PrepareRow {
                input: input.row(row, cols),
                dense,
                acts,
            });
        }
    })
}

/// One row.
struct PrepareRow<'a> {
    input: Input<'a>,
    /// `[cols]`, or empty.
    dense: &'a mut [f32],
    /// `[cols / 32]`, or empty.
    acts: &'a mut [Act],
}

impl Kernel for PrepareRow<'_> {
    type Output = ();

    fn scalar(self) {
        assert!(self.acts.is_empty(), "the scalar path has no tiles");
        self.fill(Reference);
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        if !self.dense.is_empty() {
            return self.fill(Within(l));
        }
        match self.input {
            Input::Rows(x) => Quantize { x, out: self.acts }.simd(l),
            Input::Normed { x, weight, eps } => {
                let scale = l.splat(rms_scale(l, x, eps));
                let rows = x.chunks(PART).zip(weight.chunks(PART));
                for ((x, weight), out) in rows.zip(self.acts.chunks_mut(PART / ACT_LEN)) {
                    let mut part: [Line; PART / LANES] = [[0.0; LANES]; PART / LANES];
                    let rows = x.as_chunks().0.iter().zip(weight.as_chunks().0);
                    for ((x, weight), to) in rows.zip(&mut part) {
                        l.store(l.mul(l.mul(l.load(x), scale), l.load(weight)), to);
                    }
                    let x = &part.as_flattened()[..x.len()];
                    Quantize { x, out }.simd(l);
                }
            }
            Input::Gated { gate, up } => {
                let rows = gate.chunks(PART).zip(up.chunks(PART));
                for ((gate, up), out) in rows.zip(self.acts.chunks_mut(PART / ACT_LEN)) {
                    let mut part: [Line; PART / LANES] = [[0.0; LANES]; PART / LANES];
                    let rows = gate.as_chunks().0.iter().zip(up.as_chunks().0);
                    for ((gate, up), to) in rows.zip(&mut part) {
                        l.store(l.mul(silu(l, l.load(gate)), l.load(up)), to);
                    }
                    let x = &part.as_flattened()[..gate.len()];
                    Quantize { x, out }.simd(l);
                }
            }
        }
    }
}

impl PrepareRow<'_> {
    /// The dense row, and its blocks if they are wanted too.
    #[inline(always)]
    fn fill<I: Inner>(self, inner: I) {
        let x = self.dense;
        x.copy_from_slice(self.input.rows());
        match self.input {
            Input::Rows(_) => {}
            Input::Normed { weight, eps, .. } => inner.inner(RmsNorm {
                x: &mut *x,
                weight,
                eps,
            }),
            Input::Gated { up, .. } => inner.inner(SiluMul { gate: &mut *x, up }),
        }
        inner.inner(Quantize { x, out: self.acts });
    }
}
