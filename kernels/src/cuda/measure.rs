//! How fast the kernels are on the device at hand: times by the device's own clock, bytes and
//! operations by arithmetic from the shapes.
//!
//! Each figure is the median of some rounds after one that is not counted. The yardstick is the
//! device's own copy from memory to memory, which is measured first.

use std::path::Path;
use std::sync::{Arc, Mutex};

use rootstock_memory::{KvArena, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};

use super::attention::{AttentionCall, AttentionKernels};
use super::batch::{Batch, BatchRows, Numerics};
use super::buffer::DeviceBuffer;
use super::copies::{CudaCopies, PinnedArena};
use super::device::Device;
use super::error::CudaError;
use super::general::{GeneralKernels, NormCall, PagePart, SampleRow};
use super::graph::Graph;
use super::library::ProductLibrary;
use super::pages::{DevicePages, KvFormat, PageShape};
use super::product::ProductCall;
use super::stream::{Event, Stream};
use crate::cpu::{GgmlType, KvRow};

/// Shapes to measure.
#[derive(Clone, Copy, Debug)]
pub struct MeasureSizes {
    /// Requests that decode together.
    pub requests: u32,
    /// Positions of each of them, and of a prompt.
    pub context: u32,
    /// Width of the hidden state.
    pub width: u32,
    /// Width of the feed-forward part.
    pub ffn: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers of a page where whole pages are copied.
    pub layers: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Bytes of the copy that is the yardstick.
    pub copied_bytes: usize,
    /// Rounds of each figure.
    pub rounds: usize,
}

impl MeasureSizes {
    /// A layer of an 8B Llama, with 64 requests of 4096 positions.
    pub const CARD: Self = Self {
        requests: 64,
        context: 4096,
        width: 4096,
        ffn: 14_336,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        layers: 32,
        vocab: 128_256,
        copied_bytes: 1 << 30,
        rounds: 20,
    };

    /// The same figures, of nothing: for a driver that is emulated.
    pub const SMALL: Self = Self {
        requests: 2,
        context: 40,
        width: 64,
        ffn: 128,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        page_tokens: 16,
        layers: 2,
        vocab: 300,
        copied_bytes: 1 << 16,
        rounds: 3,
    };
}

/// One measured time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Which kernel, and its shape.
    pub name: String,
    /// Nanoseconds of one run.
    pub ns: u64,
    /// Bytes that it must read and write at least.
    pub bytes: u64,
    /// Operations, two for a product and a sum.
    pub operations: u64,
}

impl Figure {
    /// Bytes a nanosecond, which are GB/s.
    #[expect(clippy::cast_precision_loss, reason = "a rate to show")]
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.ns.max(1) as f64
    }

    /// TFLOP/s.
    #[expect(clippy::cast_precision_loss, reason = "a rate to show")]
    pub fn teraflops(&self) -> f64 {
        self.operations as f64 / self.ns.max(1) as f64 / 1e3
    }
}

/// What was measured on a device.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The driver's name of the device.
    pub device: Box<str>,
    /// From memory to memory, bytes read and written: the yardstick.
    pub copy: Figure,
    /// The kernels, and copies of pages to and from the host.
    pub figures: Vec<Figure>,
    /// Hundredths of the shorter of two that are hidden when decode attention and copies to the
    /// host run together.
    pub overlap_percent: u64,
}

/// Measures all of it; `cache` is the folder of compiled code.
///
/// # Errors
/// No memory for these sizes, or the driver refuses.
pub fn measure(
    device: &Device,
    sizes: &MeasureSizes,
    cache: Option<&Path>,
) -> Result<Measured, CudaError> {
    let rig = Rig {
        device,
        sizes,
        stream: Stream::new(device)?,
        kernels: GeneralKernels::load(device, cache)?,
        cache,
    };
    let copy = rig.copy()?;
    let mut figures = Vec::new();
    rig.launches(&mut figures)?;
    rig.general(&mut figures)?;
    rig.products(&mut figures)?;
    rig.sampling(&mut figures)?;
    for format in [KvFormat::F16, KvFormat::Int8] {
        figures.push(rig.attention(format, false)?);
    }
    figures.push(rig.attention(KvFormat::F16, true)?);
    let overlap_percent = rig.host(&mut figures)?;
    Ok(Measured {
        device: device.name().into(),
        copy,
        figures,
        overlap_percent,
    })
}

struct Rig<'a> {
    device: &'a Device,
    sizes: &'a MeasureSizes,
    stream: Stream,
    kernels: GeneralKernels,
    cache: Option<&'a Path>,
}

/// Pages of a batch with what attention needs of it.
struct Attention {
    kernels: AttentionKernels,
    pages: DevicePages,
    batch: Batch,
    q: DeviceBuffer<f32>,
    out: DeviceBuffer<f32>,
    partial: DeviceBuffer<f32>,
}

impl Rig<'_> {
    /// Nanoseconds of one run: the median over the rounds.
    fn time(&self, mut run: impl FnMut() -> Result<(), CudaError>) -> Result<u64, CudaError> {
        run()?;
        let mut times = Vec::new();
        for _round in 0..self.sizes.rounds.max(1) {
            let (start, end) = (Event::timed(self.device)?, Event::timed(self.device)?);
            start.record(&self.stream)?;
            run()?;
            end.record(&self.stream)?;
            end.synchronize()?;
            times.push(end.nanoseconds_since(&start)?);
        }
        times.sort_unstable();
        Ok(times[times.len() / 2].max(1))
    }

    fn zeros(&self, len: usize) -> Result<DeviceBuffer<f32>, CudaError> {
        let mut buffer = DeviceBuffer::new(self.device, len, "measuring")?;
        self.stream.clear(&mut buffer)?;
        Ok(buffer)
    }

    fn copy(&self) -> Result<Figure, CudaError> {
        let len = self.sizes.copied_bytes;
        let from = DeviceBuffer::<u8>::new(self.device, len, "measuring")?;
        let mut to = DeviceBuffer::<u8>::new(self.device, len, "measuring")?;
        Ok(Figure {
            name: format!("copy of {} MiB", len >> 20),
            ns: self.time(|| self.stream.copy(&from, &mut to))?,
            bytes: 2 * len as u64,
            operations: 0,
        })
    }

    /// A batch of tokens that begin at position 0, without pages of note.
    fn batch(&self, n: u32) -> Result<Batch, CudaError> {
        let layout = self.layout(1)?;
        let shape = PageShape::new(layout, KvFormat::F16)?;
        let count = n.div_ceil(self.sizes.page_tokens);
        let pool = DevicePages::new(self.device, shape, count)?;
        let pages: Vec<PageId> = (1..=count).map(PageId::new).collect();
        let row = KvRow {
            first_pos: 0,
            len: n,
            pages: &pages,
        };
        self.batch_of(&pool, &[row])
    }

    fn batch_of(&self, pool: &DevicePages, rows: &[KvRow<'_>]) -> Result<Batch, CudaError> {
        let tokens: u32 = rows.iter().map(|row| row.len).sum();
        let mut batch = Batch::new(self.device, Numerics::Fast)?;
        let given = BatchRows {
            tokens: &vec![0; tokens as usize],
            rows,
            picks: &[],
            feed: &[],
        };
        batch.set(&self.stream, pool, &given)?;
        Ok(batch)
    }

    fn layout(&self, layers: u32) -> Result<KvLayout, CudaError> {
        let spec = LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: self.sizes.page_tokens,
            layers,
            kv_heads: self.sizes.kv_heads,
            head_dim: self.sizes.head_dim,
            dtype: KvDtype::F16,
        };
        KvLayout::new(spec).map_err(|error| CudaError::Call {
            call: "layout of pages",
            name: error.to_string().into(),
            fatal: false,
        })
    }

    /// What one of many small launches behind one another takes, and one of a graph of them.
    fn launches(&self, figures: &mut Vec<Figure>) -> Result<(), CudaError> {
        const LAUNCHES: u64 = 200;
        let (mut gate, up) = (self.zeros(1)?, self.zeros(1)?);
        let mut run = |stream: &Stream| {
            for _launch in 0..LAUNCHES {
                self.kernels.silu_mul(stream, &mut gate, &up, 1)?;
            }
            Ok(())
        };
        let mut times = vec![("one launch among many", self.time(|| run(&self.stream))?)];
        if Graph::missing_call(self.device).is_none() {
            let graph = Graph::capture(self.device, &mut run)?;
            let ns = self.time(|| graph.launch(&self.stream))?;
            times.push(("one launch in a graph of 200", ns));
        }
        figures.extend(times.into_iter().map(|(name, ns)| Figure {
            name: name.to_owned(),
            ns: (ns / LAUNCHES).max(1),
            bytes: 0,
            operations: 0,
        }));
        Ok(())
    }

    fn general(&self, figures: &mut Vec<Figure>) -> Result<(), CudaError> {
        let n = self.sizes.context.min(512);
        let (width, ffn) = (self.sizes.width, self.sizes.ffn);
        let batch = self.batch(n)?;
        let (weight, x) = (
            self.zeros(width as usize)?,
            self.zeros((n * width) as usize)?,
        );
        let mut out = self.zeros((n * width) as usize)?;
        let norm = NormCall {
            weight: &weight,
            eps: 1e-5,
            picks: false,
        };
        let kernels = &self.kernels;
        figures.push(Figure {
            name: format!("rms_norm, {n} x {width}"),
            ns: self.time(|| kernels.rms_norm(&self.stream, &batch, &norm, &x, &mut out))?,
            bytes: u64::from(n) * u64::from(width) * 8,
            operations: 0,
        });
        let count = (n * ffn) as usize;
        let (mut gate, up) = (self.zeros(count)?, self.zeros(count)?);
        figures.push(Figure {
            name: format!("silu_mul, {n} x {ffn}"),
            ns: self.time(|| kernels.silu_mul(&self.stream, &mut gate, &up, count))?,
            bytes: count as u64 * 12,
            operations: 0,
        });
        Ok(())
    }

    fn products(&self, figures: &mut Vec<Figure>) -> Result<(), CudaError> {
        let (width, ffn) = (self.sizes.width, self.sizes.ffn);
        // What is not installed is not measured.
        let library = ProductLibrary::open(self.device).ok();
        for (rows, n) in [(width, 1), (width, 8), (ffn, 64), (ffn, 512)] {
            let bytes = vec![0; rows as usize * width as usize * 2];
            let (stream, kernels) = (&self.stream, &self.kernels);
            let matrix = kernels.matrix(stream, GgmlType::F16, rows, width, &bytes)?;
            let x = self.zeros((n * width) as usize)?;
            let mut out = self.zeros((n * rows) as usize)?;
            let area = u64::from(rows) * u64::from(width);
            let ways = [("", None), (" by cuBLASLt", library.as_ref())];
            for (by, library) in ways.into_iter().take(if n < 64 { 1 } else { 2 }) {
                if library.is_none() && !by.is_empty() {
                    continue;
                }
                let call = ProductCall {
                    matrix: &matrix,
                    x: &x,
                    n,
                    bias: None,
                    add: false,
                    numerics: Numerics::Fast,
                    library,
                };
                figures.push(Figure {
                    name: format!("product f16{by}, {rows} x {width}, {n} tokens"),
                    ns: self.time(|| kernels.product(stream, &call, &mut out))?,
                    bytes: 2 * area + 4 * u64::from(n) * u64::from(rows + width),
                    operations: 2 * area * u64::from(n),
                });
            }
        }
        Ok(())
    }

    fn sampling(&self, figures: &mut Vec<Figure>) -> Result<(), CudaError> {
        let vocab = self.sizes.vocab;
        let logits = self.zeros(vocab as usize)?;
        let mut tokens = DeviceBuffer::new(self.device, 1, "measuring")?;
        for (name, temperature, top_p) in [("greedy", 0.0, 1.0), ("top-p 0.9", 1.0, 0.9)] {
            let row = SampleRow {
                temperature,
                top_p,
                min_p: 0.0,
                top_k: 0,
                output_index: 0,
                unused: 0,
                seed: 1,
            };
            let rows = self.stream.upload_now(&[row], "measuring")?;
            let (kernels, stream) = (&self.kernels, &self.stream);
            let rows = (&rows, 1);
            figures.push(Figure {
                name: format!("sample, {name}, {vocab} tokens"),
                ns: self.time(|| kernels.sample(stream, &logits, vocab, rows, &mut tokens))?,
                bytes: u64::from(vocab) * 4,
                operations: 0,
            });
        }
        Ok(())
    }

    /// A batch of requests that decode, or one prompt, over pages of one layer.
    fn attention_setup(&self, format: KvFormat, prompt: bool) -> Result<Attention, CudaError> {
        let sizes = self.sizes;
        let shape = PageShape::new(self.layout(1)?, format)?;
        let kernels = AttentionKernels::load(self.device, &shape, self.cache)?;
        let each = sizes.context.div_ceil(sizes.page_tokens);
        let requests = if prompt { 1 } else { sizes.requests };
        let mut pages = DevicePages::new(self.device, shape, each * requests)?;
        self.stream.clear(pages.bytes_mut())?;
        let ids: Vec<PageId> = (1..=each * requests).map(PageId::new).collect();
        let (first_pos, len) = if prompt {
            (0, sizes.context)
        } else {
            (sizes.context - 1, 1)
        };
        let rows: Vec<KvRow<'_>> = ids
            .chunks(each as usize)
            .map(|pages| KvRow {
                first_pos,
                len,
                pages,
            })
            .collect();
        let batch = self.batch_of(&pages, &rows)?;
        let vectors = (requests * len * sizes.heads * sizes.head_dim) as usize;
        Ok(Attention {
            kernels,
            pages,
            batch,
            q: self.zeros(vectors)?,
            out: self.zeros(vectors)?,
            partial: self.zeros(1)?,
        })
    }

    fn attend(&self, setup: &mut Attention) -> Result<(), CudaError> {
        let mut call = AttentionCall {
            pages: &setup.pages,
            layer: 0,
            batch: &setup.batch,
            heads: self.sizes.heads,
            scale: 0.1,
            q: &setup.q,
            out: &mut setup.out,
            partial: &mut setup.partial,
        };
        setup.kernels.attend(&self.stream, &mut call)
    }

    fn attention(&self, format: KvFormat, prompt: bool) -> Result<Figure, CudaError> {
        let mut setup = self.attention_setup(format, prompt)?;
        let ns = self.time(|| self.attend(&mut setup))?;
        let sizes = self.sizes;
        let context = u64::from(sizes.context);
        let wide = u64::from(sizes.heads * sizes.head_dim);
        let slots = setup.pages.bytes().len() as u64;
        let (name, queries, scores) = if prompt {
            // A position sees half of the prompt on average.
            ("prefill", context, context * (context + 1) / 2)
        } else {
            let requests = u64::from(sizes.requests);
            ("decode", requests, requests * context)
        };
        Ok(Figure {
            name: format!(
                "attention {name} {}, {} x {context}",
                format.name(),
                if prompt { 1 } else { sizes.requests }
            ),
            ns,
            bytes: slots + queries * wide * 8,
            operations: 4 * scores * wide,
        })
    }

    /// Pages to and from the host, gathered on the device, and beside decode attention.
    fn host(&self, figures: &mut Vec<Figure>) -> Result<u64, CudaError> {
        const PAGES: u32 = 64;
        let layout = self.layout(self.sizes.layers)?;
        let shape = PageShape::new(layout, KvFormat::F16)?;
        let pool = DevicePages::new(self.device, shape, PAGES)?;
        let bytes = shape.page_bytes() as u64;
        let arena = KvArena::new(layout, PAGES).map_err(|error| CudaError::Call {
            call: "host tier",
            name: error.to_string().into(),
            fatal: false,
        })?;
        let arena = Arc::new(Mutex::new(arena));
        let pinned = Arc::new(PinnedArena::new(self.device, arena)?);
        let copies = CudaCopies::new(self.device, &pool, Some(pinned), 1)?;
        let named = |name: &str, ns, bytes| Figure {
            name: format!("{name}, pages of {} KiB", shape.page_bytes() >> 10),
            ns,
            bytes,
            operations: 0,
        };
        for (name, down) in [("device to host", true), ("host to device", false)] {
            if let Some(ns) = copies.measure_way_ns(down)? {
                figures.push(named(name, ns, bytes));
            }
        }
        let ids: Vec<PageId> = (1..=PAGES).map(PageId::new).collect();
        let there: Vec<u32> = ids.iter().map(|page| page.get()).collect();
        let there = self.stream.upload_now(&there, "measuring")?;
        let total = bytes * u64::from(PAGES);
        let mut packed = DeviceBuffer::new(self.device, total as usize, "measuring")?;
        let part = PagePart {
            pages: &there,
            ids: &ids,
            layers: 0..self.sizes.layers,
        };
        let kernels = &self.kernels;
        let ns = self.time(|| kernels.gather(&self.stream, &pool, &part, &mut packed))?;
        figures.push(named("pages_gather of 64", ns, 2 * total));
        self.overlap(&copies)
    }

    /// Hundredths of the shorter of decode attention and copies that the longer hides.
    fn overlap(&self, copies: &CudaCopies) -> Result<u64, CudaError> {
        let mut setup = self.attention_setup(KvFormat::F16, false)?;
        let alone = self.time(|| self.attend(&mut setup))?;
        // As many copies as take about as long.
        let one = copies.measure_way_ns(true)?.unwrap_or(1);
        let count = (alone / one).clamp(1, 4096);
        let copied = self.time(|| copies.beside(&self.stream, count))?;
        let both = self.time(|| {
            let begun = copies.begin_beside(&self.stream, count)?;
            self.attend(&mut setup)?;
            self.stream.wait_for(&begun)
        })?;
        let hidden = (alone + copied).saturating_sub(both);
        Ok((100 * hidden / alone.min(copied).max(1)).min(100))
    }
}
