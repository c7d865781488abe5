//! Kernels that know no head width: norms, products, embedding, weight formats, copies of pages and
//! sampling, one checked function each.

use std::path::Path;

use super::args;
use super::attention::{at_least, blocks, within};
use super::batch::{Batch, Numerics};
use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::launch::{Grid, launch};
use super::module::{CodeOrigin, Kernel, Module, ModuleSpec};
use super::pages::DevicePages;
use super::stream::Stream;
use crate::cpu::{GgmlType, KernelError, check_len, checked_area};

/// Tokens from which on a product by tensor cores is quicker than rows one by one.
const TILES_LEAST: u32 = 17;

/// Dynamic shared memory of the tiled products: two tiles of 64 rows, 32 elements and padding.
const TILES_BYTES: u32 = 2 * 64 * 40 * 2;

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
    /// The type that keeps a file's weights: floats as they are, quantized ones as F16.
    pub fn keeping(file: GgmlType) -> Self {
        match file {
            GgmlType::F32 => Self::F32,
            GgmlType::Bf16 => Self::Bf16,
            GgmlType::F16
            | GgmlType::Q4_0
            | GgmlType::Q4_1
            | GgmlType::Q5_0
            | GgmlType::Q5_1
            | GgmlType::Q8_0
            | GgmlType::Q4K
            | GgmlType::Q5K
            | GgmlType::Q6K
            | GgmlType::Iq4Nl => Self::F16,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// A weight matrix on a device.
#[derive(Debug)]
pub struct DeviceMatrix {
    bytes: DeviceBuffer<u8>,
    weight_type: WeightType,
    rows: u32,
    cols: u32,
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

/// Parameters of one draw on the device; what it leaves out, only the CPU's sampler knows.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SampleRow {
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Keeps the most likely tokens until their probabilities sum to this.
    pub top_p: f32,
    /// Keeps tokens at least this share as likely as the most likely one.
    pub min_p: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Index of the token among the request's outputs.
    pub output_index: u32,
    /// Zero.
    pub unused: u32,
    /// Seed of the request.
    pub seed: u64,
}

impl SampleRow {
    /// What a draw answers when there is nothing to draw.
    pub const NOTHING: u32 = u32::MAX;
}

/// The kernels that every model uses.
#[derive(Debug)]
pub struct GeneralKernels {
    rms_norm: Kernel,
    silu_mul: Kernel,
    embed: Kernel,
    product_rows: [Kernel; 3],
    product_tiles: [Kernel; 2],
    gather: Kernel,
    scatter: Kernel,
    feed: Kernel,
    dequantize: Kernel,
    sample: Kernel,
}

impl GeneralKernels {
    /// Loads them; `cache` is the folder of compiled code.
    ///
    /// # Errors
    /// No code for them, or the driver refuses.
    pub fn load(device: &Device, cache: Option<&Path>) -> Result<Self, CudaError> {
        let module = Module::load(device, &ModuleSpec::general(), cache)?;
        Ok(Self {
            rms_norm: module.kernel(c"rms_norm", 0)?,
            silu_mul: module.kernel(c"silu_mul", 0)?,
            embed: module.kernel(c"embed", 0)?,
            product_rows: [
                module.kernel(c"product_rows_f32", 0)?,
                module.kernel(c"product_rows_f16", 0)?,
                module.kernel(c"product_rows_bf16", 0)?,
            ],
            product_tiles: [
                module.kernel(c"product_tiles_f16", TILES_BYTES)?,
                module.kernel(c"product_tiles_bf16", TILES_BYTES)?,
            ],
            gather: module.kernel(c"pages_gather", 0)?,
            scatter: module.kernel(c"pages_scatter", 0)?,
            feed: module.kernel(c"feed", 0)?,
            dequantize: module.kernel(c"dequantize", 0)?,
            sample: module.kernel(c"sample", 0)?,
        })
    }

    /// Where the code came from.
    pub fn origin(&self) -> CodeOrigin {
        self.rms_norm.origin()
    }

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
        let weight_type = WeightType::keeping(ggml_type);
        let raw = stream.upload_now(bytes, "weights")?;
        let plain = ggml_type.block_len() == 1;
        let bytes = if plain {
            raw
        } else {
            let count = checked_area("matrix", r, c)?;
            let len = checked_area("matrix", count, weight_type.bytes())?;
            let mut out = DeviceBuffer::new(stream.device(), len, "weights")?;
            self.dequantize(stream, ggml_type, &raw, weight_type, &mut out)?;
            stream.synchronize()?;
            out
        };
        Ok(DeviceMatrix {
            bytes,
            weight_type,
            rows,
            cols,
        })
    }

    /// Values of the blocks of a file, as elements of `out_type` that fill `out`.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn dequantize(
        &self,
        stream: &Stream,
        ggml_type: GgmlType,
        blocks_in: &DeviceBuffer<u8>,
        out_type: WeightType,
        out: &mut DeviceBuffer<u8>,
    ) -> Result<(), CudaError> {
        let count = out.len() / out_type.bytes();
        check_len(
            "bytes to dequantize",
            blocks_in.len(),
            ggml_type.row_bytes(count)?,
        )?;
        let args = args::Dequantize {
            blocks: blocks_in.address(),
            out: out.address(),
            count: count as u64,
            ggml_type: ggml_type.id(),
            out_type: out_type.number(),
        };
        let grid = Grid::line(blocks("dequantize", count as u64, 256)?, 256);
        launch(stream, "dequantize", &self.dequantize, grid, &args)
    }

    /// `out[i] = x[i] / rms(x[i]) * weight` for all rows of the batch, or for its picks.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn rms_norm(
        &self,
        stream: &Stream,
        batch: &Batch,
        norm: &NormCall<'_>,
        x: &DeviceBuffer<f32>,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), CudaError> {
        let width = norm.weight.len();
        let n = if norm.picks {
            batch.picks()
        } else {
            batch.tokens()
        };
        at_least("rms_norm input", x.len(), batch.tokens() as usize * width)?;
        at_least("rms_norm output", out.len(), n as usize * width)?;
        let args = args::Norm {
            x: x.address(),
            weight: norm.weight.address(),
            out: out.address(),
            rows: if norm.picks { batch.picks_at() } else { 0 },
            n,
            width: width as u32,
            eps: norm.eps,
        };
        launch(
            stream,
            "rms_norm",
            &self.rms_norm,
            Grid::line(n, 256),
            &args,
        )
    }

    /// `gate = silu(gate) * up`, the first `count` elements.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn silu_mul(
        &self,
        stream: &Stream,
        gate: &mut DeviceBuffer<f32>,
        up: &DeviceBuffer<f32>,
        count: usize,
    ) -> Result<(), CudaError> {
        at_least("silu_mul gate", gate.len(), count)?;
        at_least("silu_mul up", up.len(), count)?;
        let args = args::Silu {
            gate: gate.address(),
            up: up.address(),
            count: count as u64,
        };
        let grid = Grid::line(blocks("silu_mul", count as u64, 256)?, 256);
        launch(stream, "silu_mul", &self.silu_mul, grid, &args)
    }

    /// Rows of the table for the tokens of the batch.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn embed(
        &self,
        stream: &Stream,
        batch: &Batch,
        table: &DeviceMatrix,
        out: &mut DeviceBuffer<f32>,
    ) -> Result<(), CudaError> {
        let n = batch.tokens();
        at_least("embedding", out.len(), n as usize * table.cols as usize)?;
        let args = args::Embed {
            table: table.bytes.address(),
            tokens: batch.tokens_at(),
            out: out.address(),
            width: table.cols,
            weight_type: table.weight_type.number(),
            vocab: table.rows,
        };
        launch(stream, "embed", &self.embed, Grid::line(n, 256), &args)
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
        let [rows_f32, rows_f16, rows_bf16] = &self.product_rows;
        let [tiles_f16, tiles_bf16] = &self.product_tiles;
        let (kernel, a_block, tokens) = match (matrix.weight_type, tiled) {
            (WeightType::F32, _) => (rows_f32, 8, 8),
            (WeightType::F16, false) => (rows_f16, 8, 8),
            (WeightType::Bf16, false) => (rows_bf16, 8, 8),
            (WeightType::F16, true) => (tiles_f16, 64, 64),
            (WeightType::Bf16, true) => (tiles_bf16, 64, 64),
        };
        let grid = Grid {
            x: matrix.rows.div_ceil(a_block),
            y: within("tokens of a product", n.div_ceil(tokens), 65_535)?,
            z: 1,
            threads: 128,
        };
        launch(stream, "product", kernel, grid, &args)
    }

    /// Puts tokens that an earlier step drew to where this one reads them.
    ///
    /// # Errors
    /// Fewer drawn tokens than the batch names, or the driver refuses.
    pub fn feed(
        &self,
        stream: &Stream,
        batch: &Batch,
        drawn: &DeviceBuffer<u32>,
    ) -> Result<(), CudaError> {
        let count = batch.feed();
        at_least("drawn tokens", drawn.len(), batch.drawn_end() as usize)?;
        let args = args::Feed {
            tokens: batch.tokens_at(),
            drawn: drawn.address(),
            pairs: batch.pairs_at(),
            count,
        };
        launch(
            stream,
            "feed",
            &self.feed,
            Grid::line(count.div_ceil(256), 256),
            &args,
        )
    }

    /// Draws one token for each row of `logits`: `[rows.len()][vocab]`.
    ///
    /// # Errors
    /// Lengths that do not fit, or the driver refuses.
    pub fn sample(
        &self,
        stream: &Stream,
        logits: &DeviceBuffer<f32>,
        vocab: u32,
        rows: (&DeviceBuffer<SampleRow>, u32),
        tokens: &mut DeviceBuffer<u32>,
    ) -> Result<(), CudaError> {
        let (rows, n) = rows;
        at_least("logits", logits.len(), n as usize * vocab as usize)?;
        at_least("rows to sample", rows.len(), n as usize)?;
        at_least("sampled tokens", tokens.len(), n as usize)?;
        let args = args::Sample {
            logits: logits.address(),
            rows: rows.address(),
            tokens: tokens.address(),
            vocab,
        };
        launch(stream, "sample", &self.sample, Grid::line(n, 512), &args)
    }

    /// Copies layers of pages that lie apart into `packed`, `[pages][layers][layer bytes]`.
    ///
    /// # Errors
    /// Pages or layers outside the pool, lengths that do not fit, or the driver refuses.
    pub fn gather(
        &self,
        stream: &Stream,
        pool: &DevicePages,
        part: &PagePart<'_>,
        packed: &mut DeviceBuffer<u8>,
    ) -> Result<(), CudaError> {
        let (args, grid) = part.checked(pool, packed)?;
        launch(stream, "pages_gather", &self.gather, grid, &args)
    }

    /// The way back of [`GeneralKernels::gather`].
    ///
    /// # Errors
    /// As there.
    pub fn scatter(
        &self,
        stream: &Stream,
        pool: &mut DevicePages,
        part: &PagePart<'_>,
        packed: &DeviceBuffer<u8>,
    ) -> Result<(), CudaError> {
        let (args, grid) = part.checked(pool, packed)?;
        launch(stream, "pages_scatter", &self.scatter, grid, &args)
    }
}

/// A norm.
#[derive(Clone, Copy, Debug)]
pub struct NormCall<'a> {
    /// `[width]`.
    pub weight: &'a DeviceBuffer<f32>,
    /// Epsilon.
    pub eps: f32,
    /// Rows of the batch's picks only, one after another.
    pub picks: bool,
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
}

/// Pages, uploaded by the caller, and layers of them.
#[derive(Debug)]
pub struct PagePart<'a> {
    /// The pages, on the device.
    pub pages: &'a DeviceBuffer<u32>,
    /// The same pages, for the check.
    pub ids: &'a [rootstock_memory::PageId],
    /// Layers of each.
    pub layers: std::ops::Range<u32>,
}

impl PagePart<'_> {
    fn checked(
        &self,
        pool: &DevicePages,
        packed: &DeviceBuffer<u8>,
    ) -> Result<(args::Pages, Grid), KernelError> {
        let shape = pool.shape();
        let layers = shape.layout().layers();
        if self.layers.end > layers || self.layers.start > self.layers.end {
            return Err(KernelError::LayerOutOfRange {
                layer: self.layers.end,
                layers,
            });
        }
        let pages = u64::from(pool.total()) + 1;
        if let Some(page) = self.ids.iter().find(|page| u64::from(page.get()) >= pages) {
            return Err(KernelError::PageOutOfRange {
                page: page.get(),
                pages,
            });
        }
        check_len("pages to copy", self.pages.len(), self.ids.len())?;
        let bytes = self.layers.len() * shape.layer_bytes();
        at_least("packed pages", packed.len(), self.ids.len() * bytes)?;
        let count = self.ids.len() as u32;
        let args = args::Pages {
            arena: pool.bytes.address(),
            packed: packed.address(),
            pages: self.pages.address(),
            page_bytes: shape.page_bytes() as i64,
            offset: (self.layers.start as usize * shape.layer_bytes()) as i64,
            bytes: bytes as i64,
            count,
        };
        let grid = Grid {
            x: count,
            // 16 KiB a block.
            y: (bytes as u32).div_ceil(16 << 10).clamp(1, 1024),
            z: 1,
            threads: 256,
        };
        Ok((args, grid))
    }
}
