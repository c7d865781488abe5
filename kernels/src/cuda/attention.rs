//! Attention on the device: the store of K and V, and attention over pages, one checked function
//! each. Which tokens take which kernel is the batch's; how long splits are is decided here.

use std::path::Path;

use super::args;
use super::batch::{Batch, Numerics};
use super::buffer::DeviceBuffer;
use super::device::Device;
use super::error::CudaError;
use super::launch::{Grid, launch};
use super::module::{CodeOrigin, Kernel, Module, ModuleSpec};
use super::pages::{DevicePages, KvFormat, PageShape};
use super::stream::Stream;
use crate::cpu::{KernelError, check_len};

/// Positions of a split where results must not depend on the batch.
const SPLIT_TOKENS: u32 = 512;

/// Positions of a split at least: shorter ones cost more to merge than they gain.
const SPLIT_LEAST: u32 = 128;

/// Blocks a multiprocessor should have to hide the latency of memory.
const BLOCKS_WANTED: u32 = 8;

/// Floats of partial results at most: 64 MiB. Longer steps are launched in parts.
const PARTIAL_MAX: usize = 16 << 20;

/// The largest z of a grid.
const GRID_Z_MAX: u32 = 65_535;

/// The largest y of a grid.
const GRID_Y_MAX: u32 = 65_535;

/// The attention kernels of one head width and element type.
#[derive(Debug)]
pub struct AttentionKernels {
    store: Kernel,
    /// By query heads that share a read of K and V: 1, 4 and, not for 8-bit types, 8.
    decode: [Option<Kernel>; 3],
    merge: Kernel,
    prefill: Option<Kernel>,
    head_dim: u32,
    format: KvFormat,
}

/// Query heads of the decode kernels.
const GROUPS: [u32; 3] = [1, 4, 8];

/// Rotary angles of all positions.
#[derive(Debug)]
pub struct RopeAngles {
    cos: DeviceBuffer<f32>,
    sin: DeviceBuffer<f32>,
    positions: u32,
    pairs: u32,
}

impl RopeAngles {
    /// Computes and uploads the angles of `positions` positions; as on the CPU, in 64-bit floats.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        stream: &Stream,
        freqs: &[f32],
        positions: u32,
        magnitude: f32,
    ) -> Result<Self, CudaError> {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..positions {
            for &freq in freqs {
                let (s, c) = (f64::from(position) * f64::from(freq)).sin_cos();
                cos.push(c as f32 * magnitude);
                sin.push(s as f32 * magnitude);
            }
        }
        Ok(Self {
            cos: stream.upload_now(&cos, "rotary angles")?,
            sin: stream.upload_now(&sin, "rotary angles")?,
            positions,
            pairs: freqs.len() as u32,
        })
    }
}

/// Inputs of the store of one layer.
#[derive(Debug)]
pub struct StoreCall<'a> {
    /// The pages to write.
    pub pages: &'a mut DevicePages,
    /// Layer, from 0.
    pub layer: u32,
    /// The tokens.
    pub batch: &'a Batch,
    /// Query heads.
    pub heads: u32,
    /// `[tokens][heads][head_dim]`; normed and turned in place.
    pub q: &'a mut DeviceBuffer<f32>,
    /// `[tokens][kv_heads][head_dim]`.
    pub k: &'a DeviceBuffer<f32>,
    /// `[tokens][kv_heads][head_dim]`.
    pub v: &'a DeviceBuffer<f32>,
    /// `[head_dim]`: norm of each query head.
    pub q_norm: Option<&'a DeviceBuffer<f32>>,
    /// `[head_dim]`: norm of each key head.
    pub k_norm: Option<&'a DeviceBuffer<f32>>,
    /// Epsilon of these norms.
    pub eps: f32,
    /// Rotary angles.
    pub angles: &'a RopeAngles,
    /// Rotary pairs are halves of a head, not neighbors.
    pub halves: bool,
}

/// Inputs of the attention of one layer.
#[derive(Debug)]
pub struct AttentionCall<'a> {
    /// The pages, with K and V of the step stored.
    pub pages: &'a DevicePages,
    /// Layer, from 0.
    pub layer: u32,
    /// The tokens.
    pub batch: &'a Batch,
    /// Query heads: a multiple of the KV heads.
    pub heads: u32,
    /// Factor on the scores.
    pub scale: f32,
    /// `[tokens][heads][head_dim]`.
    pub q: &'a DeviceBuffer<f32>,
    /// `[tokens][heads][head_dim]`.
    pub out: &'a mut DeviceBuffer<f32>,
    /// Room for partial results; grows.
    pub partial: &'a mut DeviceBuffer<f32>,
}

/// How decode is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Splits {
    count: u32,
    tokens: u32,
}

impl AttentionKernels {
    /// Loads the kernels for pages of this shape; `cache` is the folder of compiled code.
    ///
    /// # Errors
    /// No code for them, or the driver refuses.
    pub fn load(
        device: &Device,
        shape: &PageShape,
        cache: Option<&Path>,
    ) -> Result<Self, CudaError> {
        let (head_dim, format) = (shape.layout().head_dim(), shape.format());
        let spec = ModuleSpec::attention(head_dim, format.number());
        let module = Module::load(device, &spec, cache)?;
        let decode_bytes = |group: u32| 4 * streams(head_dim, format) * group * (head_dim + 2);
        let wide = if format.element_bytes() == 1 {
            None
        } else {
            Some(module.kernel(c"attention_decode_8", decode_bytes(8))?)
        };
        let prefill = if format == KvFormat::F32 {
            None
        } else {
            Some(module.kernel(c"attention_prefill", prefill_bytes(head_dim))?)
        };
        Ok(Self {
            store: module.kernel(c"store_kv", 0)?,
            decode: [
                Some(module.kernel(c"attention_decode_1", decode_bytes(1))?),
                Some(module.kernel(c"attention_decode_4", decode_bytes(4))?),
                wide,
            ],
            merge: module.kernel(c"attention_merge", 0)?,
            prefill,
            head_dim,
            format,
        })
    }

    /// Where the code came from.
    pub fn origin(&self) -> CodeOrigin {
        self.store.origin()
    }

    /// Norms and turns queries and keys, and writes K and V into their slots.
    ///
    /// # Errors
    /// Shapes that do not fit, or the driver refuses.
    pub fn store(&self, stream: &Stream, call: &mut StoreCall<'_>) -> Result<(), CudaError> {
        let layout = *call.pages.shape().layout();
        self.check_pages(call.pages)?;
        let (n, kv_heads) = (call.batch.tokens(), layout.kv_heads());
        check_heads(call.heads, kv_heads)?;
        let vectors = |heads: u32| n as usize * heads as usize * self.head_dim as usize;
        at_least("queries", call.q.len(), vectors(call.heads))?;
        at_least("keys", call.k.len(), vectors(kv_heads))?;
        at_least("values", call.v.len(), vectors(kv_heads))?;
        for norm in [call.q_norm, call.k_norm].into_iter().flatten() {
            check_len("norm of heads", norm.len(), self.head_dim as usize)?;
        }
        let angles = call.angles;
        check_len(
            "rotary pairs",
            angles.pairs as usize,
            self.head_dim as usize / 2,
        )?;
        let (found, wanted) = (angles.positions, call.batch.positions_end());
        at_least("rotary positions", found as usize, wanted as usize)?;
        let norm = |norm: Option<&DeviceBuffer<f32>>| norm.map_or(0, DeviceBuffer::address);
        let args = args::Store {
            kv: call.pages.layer(call.layer)?,
            q: call.q.address(),
            k: call.k.address(),
            v: call.v.address(),
            q_norm: norm(call.q_norm),
            k_norm: norm(call.k_norm),
            cos: angles.cos.address(),
            sin: angles.sin.address(),
            positions: call.batch.positions_at(),
            tables: call.batch.tables_at(),
            pages: call.batch.pages_at(),
            n,
            heads: call.heads,
            kv_heads,
            halves: u32::from(call.halves),
            eps: call.eps,
        };
        let items = u64::from(n) * u64::from(call.heads + 2 * kv_heads);
        let grid = Grid::line(blocks("store_kv", items, 4)?, 128);
        launch(stream, "store_kv", &self.store, grid, &args)
    }

    /// Attention of all tokens of the batch.
    ///
    /// # Errors
    /// Shapes that do not fit, no memory for partial results, or the driver refuses.
    pub fn attend(&self, stream: &Stream, call: &mut AttentionCall<'_>) -> Result<(), CudaError> {
        self.check_pages(call.pages)?;
        check_heads(call.heads, call.pages.shape().layout().kv_heads())?;
        let wanted = call.batch.tokens() as usize * call.heads as usize * self.head_dim as usize;
        at_least("queries", call.q.len(), wanted)?;
        at_least("attention output", call.out.len(), wanted)?;
        self.prefill(stream, call)?;
        self.decode(stream, call)
    }

    fn prefill(&self, stream: &Stream, call: &AttentionCall<'_>) -> Result<(), CudaError> {
        let (tiles, Some(kernel)) = (call.batch.tiles(), &self.prefill) else {
            return Ok(());
        };
        let args = args::Prefill {
            kv: call.pages.layer(call.layer)?,
            q: call.q.address(),
            out: call.out.address(),
            positions: call.batch.positions_at(),
            tables: call.batch.tables_at(),
            pages: call.batch.pages_at(),
            tiles: call.batch.tiles_at(),
            heads: call.heads,
            kv_heads: call.pages.shape().layout().kv_heads(),
            scale: call.scale,
        };
        let grid = Grid {
            x: tiles,
            y: within("query heads", call.heads, GRID_Y_MAX)?,
            z: 1,
            threads: 128,
        };
        launch(stream, "attention_prefill", kernel, grid, &args)
    }

    fn decode(&self, stream: &Stream, call: &mut AttentionCall<'_>) -> Result<(), CudaError> {
        let chosen = call.batch.chosen();
        if chosen == 0 {
            return Ok(());
        }
        let kv_heads = call.pages.shape().layout().kv_heads();
        let queries = call.heads / kv_heads;
        let (group, kernel) = self.decode_kernel(queries);
        let groups = queries.div_ceil(group);
        let blocks = u64::from(chosen) * u64::from(kv_heads * groups);
        let wanted = stream.device().multiprocessors() * BLOCKS_WANTED;
        let splits = split(call.batch.numerics(), call.batch.longest(), blocks, wanted);
        let token = (call.heads * splits.count) as usize * (self.head_dim as usize + 2);
        let part = if splits.count == 1 {
            chosen
        } else {
            ((PARTIAL_MAX / token) as u32).clamp(1, chosen)
        };
        if splits.count > 1 && call.partial.len() < part as usize * token {
            let device = stream.device();
            *call.partial = DeviceBuffer::new(device, part as usize * token, "attention")?;
        }
        let y = within("heads", kv_heads * groups, GRID_Y_MAX)?;
        for first in (0..chosen).step_by(part as usize) {
            let n = part.min(chosen - first);
            let args = args::Decode {
                kv: call.pages.layer(call.layer)?,
                q: call.q.address(),
                out: call.out.address(),
                partial: call.partial.address(),
                chosen: call.batch.chosen_at(first),
                positions: call.batch.positions_at(),
                tables: call.batch.tables_at(),
                pages: call.batch.pages_at(),
                n,
                heads: call.heads,
                kv_heads,
                splits: splits.count,
                split_tokens: splits.tokens,
                scale: call.scale,
            };
            let grid = Grid {
                x: n,
                y,
                z: within("splits", splits.count, GRID_Z_MAX)?,
                threads: 128,
            };
            launch(stream, "attention_decode", kernel, grid, &args)?;
            if splits.count > 1 {
                let y = within("query heads", call.heads, GRID_Y_MAX)?;
                let grid = Grid { y, z: 1, ..grid };
                launch(stream, "attention_merge", &self.merge, grid, &args)?;
            }
        }
        Ok(())
    }

    /// The kernel that reads K and V fewest times for this many query heads, the smallest of such.
    fn decode_kernel(&self, queries: u32) -> (u32, &Kernel) {
        let there = GROUPS.into_iter().zip(&self.decode);
        let there = there.filter_map(|(group, kernel)| Some((group, kernel.as_ref()?)));
        there
            .min_by_key(|(group, _)| (queries.div_ceil(*group), *group))
            .expect("the kernels for 1 and 4 heads are always loaded")
    }

    fn check_pages(&self, pages: &DevicePages) -> Result<(), KernelError> {
        let shape = pages.shape();
        let head_dim = shape.layout().head_dim();
        check_len(
            "head width of the pages",
            head_dim as usize,
            self.head_dim as usize,
        )?;
        let (found, wanted) = (shape.format().number(), self.format.number());
        check_len("element type of the pages", found as usize, wanted as usize)
    }
}

/// Streams of a decode block: as `STREAMS` in `attention.cu`.
fn streams(head_dim: u32, format: KvFormat) -> u32 {
    let part = if format.element_bytes() == 1 { 16 } else { 8 };
    4 * (32 / (head_dim / part).next_power_of_two().clamp(4, 32))
}

/// Dynamic shared memory of the prefill kernel: tiles of keys, values and queries.
fn prefill_bytes(head_dim: u32) -> u32 {
    let keys = if head_dim <= 128 { 64 } else { 32 };
    (2 * keys + 64) * (head_dim + 8) * 2
}

/// Splits of contexts up to `longest`, where `blocks` run without splits and `wanted` fill the
/// device.
fn split(numerics: Numerics, longest: u32, blocks: u64, wanted: u32) -> Splits {
    let tokens = match numerics {
        Numerics::Invariant => SPLIT_TOKENS,
        Numerics::Fast => {
            let wanted = u64::from(wanted).div_ceil(blocks.max(1));
            let wanted = u32::try_from(wanted).unwrap_or(GRID_Z_MAX).max(1);
            longest
                .div_ceil(wanted)
                .max(SPLIT_LEAST)
                .next_multiple_of(64)
        }
    };
    let tokens = tokens.max(longest.div_ceil(GRID_Z_MAX));
    Splits {
        count: longest.div_ceil(tokens).max(1),
        tokens,
    }
}

fn check_heads(heads: u32, kv_heads: u32) -> Result<(), KernelError> {
    if heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(KernelError::HeadsNotDivisible { heads, kv_heads });
    }
    Ok(())
}

/// Buffers of a step grow and are not cut, so they may be longer than a step needs.
pub(super) fn at_least(
    buffer: &'static str,
    found: usize,
    wanted: usize,
) -> Result<(), KernelError> {
    check_len(buffer, found.min(wanted), wanted)
}

/// Blocks for `items` where each takes `a_block`.
pub(super) fn blocks(what: &'static str, items: u64, a_block: u64) -> Result<u32, KernelError> {
    let count = items.div_ceil(a_block);
    let count = u32::try_from(count).ok().filter(|count| *count < 1 << 31);
    count.ok_or(KernelError::TooLarge {
        what,
        a: items as usize,
        b: 1,
    })
}

pub(super) fn within(what: &'static str, value: u32, limit: u32) -> Result<u32, KernelError> {
    if value > limit {
        return Err(KernelError::TooLarge {
            what,
            a: value as usize,
            b: 1,
        });
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariant_splits_depend_on_nothing_but_the_context() {
        for blocks in [1, 100, 100_000] {
            let found = split(Numerics::Invariant, 4096, blocks, 1056);
            assert_eq!((found.count, found.tokens), (8, 512));
        }
    }

    #[test]
    fn fast_splits_fill_the_device_and_no_more() {
        let few = split(Numerics::Fast, 4096, 8, 1056);
        assert_eq!((few.count, few.tokens), (32, 128));
        let many = split(Numerics::Fast, 4096, 4096, 1056);
        assert_eq!(many.count, 1);
        let short = split(Numerics::Fast, 1, 1, 1056);
        assert_eq!(short.count, 1);
    }

    #[test]
    fn the_dynamic_memory_of_shipped_kernels_fits_every_device() {
        for head_dim in [64, 80, 96, 128, 256] {
            assert!(prefill_bytes(head_dim) <= 99 << 10);
            for format in KvFormat::ALL {
                let most = if format.element_bytes() == 1 { 4 } else { 8 };
                assert!(4 * streams(head_dim, format) * most * (head_dim + 2) <= 99 << 10);
            }
        }
    }
}
