//! `out[i][r] = sum over k of weights[r][k] * x[i][k]`, for all rows of a step at once.
//!
//! One accumulation order per output element, whatever `n` and the number of threads: threads
//! split the weight rows, never a sum. On the vector paths that order is ascending `k`: exact
//! integer sums within a block of 32 columns, then one fused multiply-add per block (and one for
//! the minimum); floats take one fused multiply-add per column.

use super::act::{ACT_LEN, Act, Quantize};
use super::error::{KernelError, check_len, checked_area};
use super::ggml::dequantize;
use super::isa::Isa;
use super::matrix::{PackedMatrix, Store};
use super::pool::ThreadPool;
use super::scratch::Scratch;
use super::shared::SharedOut;
use super::tile_product::{Inputs, TileProduct};
use super::tiles::Tiles;

/// Weight rows of one task of the scalar path.
const SCALAR_ROWS: usize = 16;

/// Partial sums of the scalar path, so that the compiler can use what vectors there are.
const SCALAR_LANES: usize = 8;

/// Tasks per thread: enough that a thread whose core is busy elsewhere holds nobody up.
const TASKS_PER_THREAD: usize = 4;

/// Products that share one run.
const GROUP: usize = 4;

/// Products below this many multiplications are not worth waking a thread for.
const SERIAL_MACS: usize = 1 << 17;

/// Rows of `x` that one task quantizes.
const QUANTIZE_ROWS: usize = 16;

/// One product.
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
    matmul_group(pool, &mut [(matrix, out)], x, n, scratch)
}

/// Several products of the same `x`: query, key and value, or gate and up.
///
/// Equal, bit for bit, to one [`matmul`] each, with one preparation of `x` and one barrier.
///
/// # Errors
/// As [`matmul`].
pub fn matmul_group(
    pool: &ThreadPool,
    products: &mut [(&PackedMatrix, &mut [f32])],
    x: &[f32],
    n: usize,
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    for (matrix, out) in products.iter() {
        check_len(
            "matmul input",
            x.len(),
            checked_area("matmul input", n, matrix.cols())?,
        )?;
        check_len(
            "matmul output",
            out.len(),
            checked_area("matmul output", n, matrix.rows())?,
        )?;
    }
    if n == 0 {
        return Ok(());
    }
    for (matrix, out) in products.iter_mut() {
        if let Store::Rows(bytes) = matrix.store() {
            scalar(pool, matrix, bytes, x, out)?;
        }
    }
    let tiled = |(matrix, _): &&(&PackedMatrix, &mut [f32])| matrix.tiles().is_some();
    let Some((first, _)) = products.iter().find(tiled) else {
        return Ok(());
    };
    let isa = first.isa();
    if products
        .iter()
        .any(|(matrix, _)| matrix.tiles().is_some_and(Tiles::quantized))
    {
        quantize(pool, isa, x, first.cols(), &mut scratch.acts)?;
    }
    tiled_products(
        pool,
        products,
        Inputs {
            x,
            acts: &scratch.acts,
            n,
        },
    )
}

/// Quantizes the rows of `x`.
fn quantize(
    pool: &ThreadPool,
    isa: Isa,
    x: &[f32],
    cols: usize,
    acts: &mut Vec<Act>,
) -> Result<(), KernelError> {
    let blocks = x.len() / ACT_LEN;
    acts.resize(blocks, bytemuck::Zeroable::zeroed());
    let task_blocks = QUANTIZE_ROWS * cols / ACT_LEN;
    let out = SharedOut::new(acts);
    pool.run(blocks.div_ceil(task_blocks), &|task| {
        let blocks = task * task_blocks..((task + 1) * task_blocks).min(blocks);
        let x = &x[blocks.start * ACT_LEN..blocks.end * ACT_LEN];
        // SAFETY: each block belongs to one task.
        let out = unsafe { out.part(blocks) };
        isa.run(Quantize { x, out });
    })
}

/// The products with tiled matrices: tiles of all of them are shared out in one run.
fn tiled_products(
    pool: &ThreadPool,
    products: &mut [(&PackedMatrix, &mut [f32])],
    inputs: Inputs<'_>,
) -> Result<(), KernelError> {
    for group in products.chunks_mut(GROUP) {
        let area: usize = group
            .iter()
            .map(|(matrix, _)| matrix.rows() * matrix.cols())
            .sum();
        let parts = if area * inputs.n < SERIAL_MACS {
            1
        } else {
            pool.threads() * TASKS_PER_THREAD
        };
        let count = group.len();
        let mut group = group.iter_mut();
        let group: [Option<(&PackedMatrix, SharedOut<'_, f32>)>; GROUP] =
            std::array::from_fn(|_| {
                group
                    .next()
                    .map(|(matrix, out)| (*matrix, SharedOut::new(out)))
            });
        pool.run(count * parts, &|task| {
            let Some((matrix, out)) = &group[task / parts] else {
                return;
            };
            let Some(tiles) = matrix.tiles() else { return };
            let part = task % parts;
            let range = part * tiles.count() / parts..(part + 1) * tiles.count() / parts;
            matrix.isa().run(TileProduct {
                tiles,
                range,
                inputs,
                out,
            });
        })?;
    }
    Ok(())
}

/// The reference: rows dequantized one by one, products summed in 64-bit floats.
fn scalar(
    pool: &ThreadPool,
    matrix: &PackedMatrix,
    bytes: &[u8],
    x: &[f32],
    out: &mut [f32],
) -> Result<(), KernelError> {
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
                element[0] = dot(&weights, x);
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
