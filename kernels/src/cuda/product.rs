//! Products with weight matrices: which kernel, or whether the library.
//!
//! Quantized weights stay in the file's blocks. Few tokens: a warp has two rows of weights and
//! reads them once. Many: tensor cores, in an order of summation of their own, so only where
//! [`Numerics::Fast`] allows it; from some number on by [`ProductLibrary`], where there is one.

use super::args;
use super::attention::{at_least, blocks, within};
use super::batch::Numerics;
use super::blocks::BlockFormat;
use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::general::GeneralKernels;
use super::launch::{Grid, launch};
use super::library::{self, LIBRARY_LEAST, Operands, ProductLibrary, Shape};
use super::stream::Stream;
use crate::cpu::{GgmlType, KernelError, check_len, checked_area};

/// Tokens from which on a product by tensor cores is quicker than rows one by one.
const TILES_LEAST: u32 = 17;

/// Dynamic shared memory of the tiled products: two tiles of 64 rows, 32 elements and padding.
pub(super) const TILES_BYTES: u32 = 2 * 64 * 40 * 2;

/// Element type of weights on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
}

impl WeightType {
    /// The floats of a file's type; None: it has blocks.
    pub fn of(file: GgmlType) -> Option<Self> {
        match file {
            GgmlType::F32 => Some(Self::F32),
            GgmlType::F16 => Some(Self::F16),
            GgmlType::Bf16 => Some(Self::Bf16),
            GgmlType::Q4_0
            | GgmlType::Q4_1
            | GgmlType::Q5_0
            | GgmlType::Q5_1
            | GgmlType::Q8_0
            | GgmlType::Q4K
            | GgmlType::Q5K
            | GgmlType::Q6K
            | GgmlType::Iq4Nl => None,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// How a matrix keeps its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Plain(WeightType),
    Blocks(BlockFormat),
}

/// A weight matrix on a device.
#[derive(Debug)]
pub struct DeviceMatrix {
    pub(super) bytes: DeviceBuffer<u8>,
    pub(super) held: Held,
    pub(super) rows: u32,
    pub(super) cols: u32,
}

impl DeviceMatrix {
    /// Rows: the width of the output.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Columns: the width of the input.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// Inputs of a product.
#[derive(Clone, Copy, Debug)]
pub struct ProductCall<'a> {
    /// The weights.
    pub matrix: &'a DeviceMatrix,
    /// `[n][cols]`.
    pub x: &'a DeviceBuffer<f32>,
    /// Rows of `x`.
    pub n: u32,
    /// `[rows]`.
    pub bias: Option<&'a DeviceBuffer<f32>>,
    /// The result is added to what is there.
    pub add: bool,
    /// Whether a large `n` may take another order of summation.
    pub numerics: Numerics,
    /// What computes large products, where it may; None: our own kernels.
    pub library: Option<&'a ProductLibrary>,
}

impl GeneralKernels {
    /// Uploads a weight matrix and brings it into the type the products read.
    ///
    /// # Errors
    /// Bytes that do not match the shape, columns that are no multiple of 8; no memory.
    pub fn matrix(
        &self,
        stream: &Stream,
        ggml_type: GgmlType,
        rows: u32,
        cols: u32,
        bytes: &[u8],
    ) -> Result<DeviceMatrix, CudaError> {
        let (r, c) = (rows as usize, cols as usize);
        if rows == 0 || cols == 0 {
            return Err(KernelError::EmptyMatrix { rows: r, cols: c }.into());
        }
        if !cols.is_multiple_of(8) {
            return Err(KernelError::RowNotBlocks {
                ggml_type: ggml_type.name(),
                cols: c,
                block_len: 8,
            }
            .into());
        }
        let wanted = checked_area("matrix", r, ggml_type.row_bytes(c)?)?;
        check_len("bytes of a matrix", bytes.len(), wanted)?;
        let raw = stream.upload_now(bytes, "weights")?;
        let held = match (WeightType::of(ggml_type), BlockFormat::of(ggml_type)) {
            (Some(plain), _) => Held::Plain(plain),
            (None, Some(format)) => Held::Blocks(format),
            (None, None) => {
                let id = ggml_type.id();
                return Err(KernelError::UnsupportedType { id }.into());
            }
        };
        let bytes = match held {
            Held::Plain(_) => raw,
            Held::Blocks(format) => {
                let device = stream.device();
                self.blocks.take_apart(stream, device, format, &raw)?
            }
        };
        Ok(DeviceMatrix {
            bytes,
            held,
            rows,
            cols,
        })
    }

    /// `out[i] = matrix x[i] + bias` for `n` rows, added to what `out` holds if `add`.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn product(
        &self,
        stream: &Stream,
        call: &ProductCall<'_>,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), CudaError> {
        let (matrix, n) = (call.matrix, call.n);
        let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
        at_least("product input", call.x.len(), n as usize * cols)?;
        at_least("product output", out.len(), n as usize * rows)?;
        if let Some(bias) = call.bias {
            check_len("bias", bias.len(), rows)?;
        }
        let args = args::Product {
            weights: matrix.bytes.address(),
            x: call.x.address(),
            out: out.address(),
            bias: call.bias.map_or(0, DeviceBuffer::address),
            n,
            rows: matrix.rows,
            cols: matrix.cols,
            add: u32::from(call.add),
        };
        let tiled = call.numerics == Numerics::Fast && n >= TILES_LEAST;
        if tiled && self.by_library(stream, call, &args)? {
            return Ok(());
        }
        let [rows_f32, rows_f16, rows_bf16] = &self.product_rows;
        let [tiles_f16, tiles_bf16] = &self.product_tiles;
        let side = if tiled && matrix.held != Held::Plain(WeightType::F32) {
            64
        } else {
            8
        };
        let kernel = match (matrix.held, tiled) {
            (Held::Plain(WeightType::F32), _) => rows_f32,
            (Held::Plain(WeightType::F16), false) => rows_f16,
            (Held::Plain(WeightType::Bf16), false) => rows_bf16,
            (Held::Plain(WeightType::F16), true) => tiles_f16,
            (Held::Plain(WeightType::Bf16), true) => tiles_bf16,
            (Held::Blocks(format), false) => &self.blocks.rows[format.index],
            (Held::Blocks(format), true) => &self.blocks.tiles[format.index],
        };
        let grid = Grid {
            x: matrix.rows.div_ceil(side),
            y: within("tokens of a product", n.div_ceil(side), 65_535)?,
            z: 1,
            threads: 128,
        };
        launch(stream, "product", kernel, grid, &args)
    }

    /// A product by the library; false: it does not take this one.
    fn by_library(
        &self,
        stream: &Stream,
        call: &ProductCall<'_>,
        args: &args::Product,
    ) -> Result<bool, CudaError> {
        let (Some(library), Held::Plain(weight_type)) = (call.library, call.matrix.held) else {
            return Ok(false);
        };
        let Some(brain) = library::brain(weight_type) else {
            return Ok(false);
        };
        let shape = Shape {
            rows: args.rows,
            cols: args.cols,
            n: args.n,
            brain,
            bias: args.bias != 0,
        };
        if args.n < LIBRARY_LEAST || !library.knows(shape, args.bias) {
            return Ok(false);
        }
        let count = args.n as usize * args.cols as usize;
        let Ok(x) = library.room(count) else {
            return Ok(false);
        };
        let narrow = args::Narrow {
            x: args.x,
            out: x,
            count: count as u64,
            weight_type: weight_type.number(),
        };
        let grid = Grid::line(blocks("narrow", count as u64, 8 * 256)?, 256);
        launch(stream, "narrow", &self.narrow, grid, &narrow)?;
        let operands = Operands {
            weights: args.weights,
            x,
            out: args.out,
            bias: args.bias,
            add: args.add != 0,
        };
        Ok(library.product(stream, shape, &operands))
    }
}
