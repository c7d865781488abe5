//! `out[i][r] = sum over k of weights[r][k] * x[i][k]`, for all rows of a step at once.
//!
//! One accumulation order per output element, whatever `n` and the number of threads: threads
//! split the weight rows, never a sum. On the vector paths that order is ascending `k`: exact
//! integer sums within a block of 32 columns, then one fused multiply-add per block (and one for
//! the minimum); floats take one fused multiply-add per column.

use super::error::{KernelError, check_len, checked_area};
use super::ggml::dequantize;
use super::matrix::{PackedMatrix, Store};
use super::pool::ThreadPool;
use super::prepare::{Forms, Input, prepare};
use super::scratch::Scratch;
use super::shared::SharedOut;
use super::tile_product::{Inputs, Target, TileProduct};
use super::tiles::Tiles;

/// Weight rows of one task of the scalar path.
const SCALAR_ROWS: usize = 16;

/// Partial sums of the scalar path, so that the compiler can use what vectors there are.
const SCALAR_LANES: usize = 8;

/// Tasks per thread: enough that a thread whose core is busy elsewhere holds nobody up.
const TASKS_PER_THREAD: usize = 4;

/// Most bytes of weights of a task: of a large matrix the last tasks are not long either.
const TASK_BYTES: usize = 256 << 10;

/// Products that share one run.
const GROUP: usize = 4;

/// Products below this many multiplications are not worth waking a thread for.
const SERIAL_MACS: usize = 1 << 17;

/// One product of a group.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[rows][cols]`.
    pub matrix: &'a PackedMatrix,
    /// `[rows]`, added to each row of the product.
    pub bias: Option<&'a [f32]>,
    /// `[n][rows]`.
    pub out: &'a mut [f32],
    /// Whether the product is added to what `out` holds.
    pub adds: bool,
}

/// One product, written to `out`.
///
/// # Shapes
/// `x`: `[n][matrix.cols()]`, `out`: `[n][matrix.rows()]`, row-major.
///
/// # Errors
/// Lengths that do not match; a panicked task.
pub fn matmul(
    pool: &ThreadPool,
    matrix: &PackedMatrix,
    x: &[f32],
    n: usize,
    out: &mut [f32],
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    let product = Product {
        matrix,
        bias: None,
        out,
        adds: false,
    };
    products(pool, &mut [product], Input::Rows(x), n, scratch)
}

/// Several products of the same input: query, key and value, or gate and up.
///
/// Equal, bit for bit, to one call each, with one preparation of the input and one barrier.
///
/// # Errors
/// Lengths that do not match; a panicked task.
pub fn products(
    pool: &ThreadPool,
    group: &mut [Product<'_>],
    input: Input<'_>,
    n: usize,
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    for Product {
        matrix, bias, out, ..
    } in group.iter()
    {
        input.check(n, matrix.cols())?;
        let wanted = checked_area("matmul output", n, matrix.rows())?;
        check_len("matmul output", out.len(), wanted)?;
        if let Some(bias) = bias {
            check_len("matmul bias", bias.len(), matrix.rows())?;
        }
    }
    let Some(first) = group.first().filter(|_| n > 0) else {
        return Ok(());
    };
    let quantized = |product: &Product<'_>| product.matrix.tiles().is_some_and(Tiles::quantized);
    let forms = Forms {
        acts: group.iter().any(quantized),
        dense: !group.iter().all(quantized),
    };
    prepare(pool, first.matrix.isa(), (input, n), forms, scratch)?;
    let x = match input {
        Input::Rows(x) => x,
        Input::Normed { .. } | Input::Gated { .. } => &scratch.dense,
    };
    for product in group.iter_mut() {
        if let Store::Rows(bytes) = product.matrix.store() {
            scalar(pool, bytes, x, product)?;
        }
    }
    let acts = &scratch.acts;
    tiled_products(pool, group, Inputs { x, acts, n })
}

/// The products with tiled matrices: tiles of all of them are shared out in one run.
fn tiled_products(
    pool: &ThreadPool,
    products: &mut [Product<'_>],
    inputs: Inputs<'_>,
) -> Result<(), KernelError> {
    for group in products.chunks_mut(GROUP) {
        let tiled = group.iter().filter_map(|product| product.matrix.tiles());
        let most_bytes = tiled.map(Tiles::bytes).max().unwrap_or(0);
        let area: usize = group
            .iter()
            .filter(|product| product.matrix.tiles().is_some())
            .map(|product| product.matrix.rows() * product.matrix.cols())
            .sum();
        if area == 0 {
            continue;
        }
        let parts = if area * inputs.n < SERIAL_MACS {
            1
        } else {
            (pool.threads() * TASKS_PER_THREAD).max(most_bytes / TASK_BYTES)
        };
        let count = group.len();
        let mut group = group.iter_mut();
        let group: [Option<(&PackedMatrix, Target<'_>)>; GROUP] = std::array::from_fn(|_| {
            group.next().map(|product| {
                let target = Target {
                    out: SharedOut::new(product.out),
                    bias: product.bias,
                    adds: product.adds,
                };
                (product.matrix, target)
            })
        });
        pool.run(count * parts, &|task| {
            let Some((matrix, target)) = &group[task / parts] else {
                return;
            };
            let Some(tiles) = matrix.tiles() else { return };
            let part = task % parts;
            let range = part * tiles.count() / parts..(part + 1) * tiles.count() / parts;
            matrix.isa().run(TileProduct {
                tiles,
                range,
                inputs,
                target,
            });
        })?;
    }
    Ok(())
}

/// The reference: rows dequantized one by one, products summed in 64-bit floats.
fn scalar(
    pool: &ThreadPool,
    bytes: &[u8],
    x: &[f32],
    product: &mut Product<'_>,
) -> Result<(), KernelError> {
    let Product {
        matrix,
        bias,
        ref mut out,
        adds,
    } = *product;
    let row_bytes = matrix.ggml_type().row_bytes(matrix.cols())?;
    let out = SharedOut::new(out);
    let tasks = matrix.rows().div_ceil(SCALAR_ROWS);
    pool.run(tasks, &|task| {
        let first = task * SCALAR_ROWS;
        let mut weights = vec![0.0; matrix.cols()];
        for row in first..(first + SCALAR_ROWS).min(matrix.rows()) {
            let row_data = &bytes[row * row_bytes..][..row_bytes];
            dequantize(matrix.ggml_type(), row_data, &mut weights).expect("checked by pack");
            for (i, x) in x.chunks_exact(matrix.cols()).enumerate() {
                let at = i * matrix.rows() + row;
                // SAFETY: each weight row belongs to one task, so the element has one user.
                let element = unsafe { out.part(at..at + 1) };
                let sum = dot(&weights, x) + bias.map_or(0.0, |bias| bias[row]);
                element[0] = if adds { element[0] + sum } else { sum };
            }
        }
    })
}

/// A dot product in 64-bit floats, in lanes of a fixed number.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f64; SCALAR_LANES];
    let (a, a_tail) = a.as_chunks::<SCALAR_LANES>();
    let (b, b_tail) = b.as_chunks::<SCALAR_LANES>();
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let tail: f64 = a_tail
        .iter()
        .zip(b_tail)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum();
    (lanes.iter().sum::<f64>() + tail) as f32
}
