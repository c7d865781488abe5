//! Kernels that know no head width: norms, embedding, copies of pages and sampling, one checked
//! function each. Products are in `product`.

use std::path::Path;

use super::args;
use super::attention::{at_least, blocks};
use super::batch::Batch;
use super::blocks::BlockKernels;
use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::launch::{Grid, launch};
use super::module::{CodeOrigin, Kernel, Module, ModuleSpec};
use super::pages::DevicePages;
use super::product::{DeviceMatrix, Held, TILES_BYTES};
use super::stream::Stream;
use crate::cpu::{KernelError, check_len};

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
    pub(super) product_rows: [Kernel; 3],
    pub(super) product_tiles: [Kernel; 2],
    pub(super) narrow: Kernel,
    pub(super) blocks: BlockKernels,
    gather: Kernel,
    scatter: Kernel,
    feed: Kernel,
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
            narrow: module.kernel(c"narrow", 0)?,
            blocks: BlockKernels::load(&module, TILES_BYTES)?,
            gather: module.kernel(c"pages_gather", 0)?,
            scatter: module.kernel(c"pages_scatter", 0)?,
            feed: module.kernel(c"feed", 0)?,
            sample: module.kernel(c"sample", 0)?,
        })
    }

    /// Where the code came from.
    pub fn origin(&self) -> CodeOrigin {
        self.rms_norm.origin()
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
        let (kernel, weight_type) = match table.held {
            Held::Plain(plain) => (&self.embed, plain.number()),
            Held::Blocks(format) => (&self.blocks.embed, format.number),
        };
        let args = args::Embed {
            table: table.bytes.address(),
            tokens: batch.tokens_at(),
            out: out.address(),
            width: table.cols,
            weight_type,
            vocab: table.rows,
        };
        launch(stream, "embed", kernel, Grid::line(n, 256), &args)
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
