//! Weights that stay in the blocks of their file, taken apart into bodies and heads.
//!
//! ```text
//! file:    head body | head body | ...       (Q6_K: body head)
//! device:  body body ... | head head ...
//! ```
//!
//! Bodies have multiples of 16 bytes, so a lane of a product reads whole words of them, and a
//! matrix takes as many bytes as in the file. The formats are those of `kernels/cuda/blocks.cu`:
//! all quantized ones that the CPU reads.

use super::args;
use super::attention::blocks;
use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::launch::{Grid, launch};
use super::module::{Kernel, Module};
use super::stream::Stream;
use crate::cpu::GgmlType;

/// A format whose blocks the products read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockFormat {
    /// Its number in files, and in the kernels.
    pub(super) number: u32,
    /// Which of the kernels.
    pub(super) index: usize,
    block_bytes: u32,
    body_bytes: u32,
    head_first: bool,
}

impl BlockFormat {
    /// None: a type of floats.
    pub(super) fn of(file: GgmlType) -> Option<Self> {
        let (index, block_bytes, body_bytes) = match file {
            GgmlType::Q4_0 => (0, 18, 16),
            GgmlType::Q4_1 => (1, 20, 16),
            GgmlType::Q5_0 => (2, 22, 16),
            GgmlType::Q5_1 => (3, 24, 16),
            GgmlType::Q8_0 => (4, 34, 32),
            GgmlType::Q4K => (5, 144, 128),
            GgmlType::Q5K => (6, 176, 160),
            GgmlType::Q6K => (7, 210, 192),
            GgmlType::Iq4Nl => (8, 18, 16),
            GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => return None,
        };
        Some(Self {
            number: file.id(),
            index,
            block_bytes,
            body_bytes,
            head_first: file != GgmlType::Q6K,
        })
    }
}

/// The kernels of these formats, in the order of [`BlockFormat::index`].
#[derive(Debug)]
pub(super) struct BlockKernels {
    pub(super) rows: [Kernel; 9],
    pub(super) tiles: [Kernel; 9],
    pub(super) embed: Kernel,
    apart: Kernel,
}

impl BlockKernels {
    pub(super) fn load(
        module: &std::sync::Arc<Module>,
        tiles_bytes: u32,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            rows: [
                module.kernel(c"product_rows_q4_0", 0)?,
                module.kernel(c"product_rows_q4_1", 0)?,
                module.kernel(c"product_rows_q5_0", 0)?,
                module.kernel(c"product_rows_q5_1", 0)?,
                module.kernel(c"product_rows_q8_0", 0)?,
                module.kernel(c"product_rows_q4_k", 0)?,
                module.kernel(c"product_rows_q5_k", 0)?,
                module.kernel(c"product_rows_q6_k", 0)?,
                module.kernel(c"product_rows_iq4_nl", 0)?,
            ],
            tiles: [
                module.kernel(c"product_tiles_q4_0", tiles_bytes)?,
                module.kernel(c"product_tiles_q4_1", tiles_bytes)?,
                module.kernel(c"product_tiles_q5_0", tiles_bytes)?,
                module.kernel(c"product_tiles_q5_1", tiles_bytes)?,
                module.kernel(c"product_tiles_q8_0", tiles_bytes)?,
                module.kernel(c"product_tiles_q4_k", tiles_bytes)?,
                module.kernel(c"product_tiles_q5_k", tiles_bytes)?,
                module.kernel(c"product_tiles_q6_k", tiles_bytes)?,
                module.kernel(c"product_tiles_iq4_nl", tiles_bytes)?,
            ],
            embed: module.kernel(c"embed_blocks", 0)?,
            apart: module.kernel(c"take_apart", 0)?,
        })
    }

    /// The blocks of a file, all of one matrix, as the products read them.
    pub(super) fn take_apart(
        &self,
        stream: &Stream,
        device: &Device,
        format: BlockFormat,
        raw: &DeviceBuffer<u8>,
    ) -> Result<DeviceBuffer<u8>, CudaError> {
        let out = DeviceBuffer::new(device, raw.len(), "weights")?;
        let count = raw.len() / format.block_bytes as usize;
        let words = (raw.len() / 2) as u64;
        let args = args::Apart {
            blocks: raw.address(),
            bodies: out.address(),
            heads: out.address_at(count * format.body_bytes as usize),
            count: words,
            block: format.block_bytes / 2,
            body: format.body_bytes / 2,
            head_first: u32::from(format.head_first),
        };
        let grid = Grid::line(blocks("take_apart", words, 256)?, 256);
        launch(stream, "take_apart", &self.apart, grid, &args)?;
        stream.synchronize()?;
        Ok(out)
    }
}
