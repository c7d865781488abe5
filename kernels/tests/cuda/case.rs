//! A random step over random pages: what the device stores and answers against the CPU's reference.
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "shared by test binaries, with small numbers"
)]

use half::{bf16, f16};
use rootstock_kernels::cuda::{
    AttentionCall, AttentionKernels, Batch, BatchRows, Device, DeviceBuffer, DevicePages, KvFormat,
    Numerics, PageShape, PinnedBuffer, RopeAngles, StoreCall, Stream,
};
use rootstock_kernels::{
    AttentionArgs, Isa, KvRow, KvView, RopeStyle, Scratch, ThreadPool, attention, qk_norm, rope,
    store_kv,
};
use rootstock_memory::{KvArena, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};

/// Whether there is time to compile and run each planted fault: many minutes (`PLANTED_FAULTS=1`).
pub fn plants_faults() -> bool {
    std::env::var_os("PLANTED_FAULTS").is_some()
}

/// Random cases of each class of a kernel: 4, or `EMULATED_CASES`.
pub fn cases() -> u64 {
    let asked = std::env::var("EMULATED_CASES").ok();
    asked.map_or(4, |cases| cases.parse().unwrap())
}

/// Steele, Lea, Flood: splitmix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u32) -> u32 {
        (self.next() % u64::from(end)) as u32
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }

    /// About normal, by three uniform numbers.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..3)
            .map(|_| (self.next() >> 11) as f64 / (1_u64 << 53) as f64)
            .sum();
        (2.0 * sum - 3.0) as f32
    }

    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}

#[derive(Clone, Debug)]
pub struct Case {
    pub format: KvFormat,
    pub head_dim: u32,
    pub layers: u32,
    pub page_tokens: u32,
    pub kv_heads: u32,
    pub heads: u32,
    pub numerics: Numerics,
    pub norms: bool,
    pub style: RopeStyle,
    /// Cached positions, and tokens of the step.
    pub rows: Vec<(u32, u32)>,
    /// Pages lie far apart.
    pub far: bool,
}

/// Largest differences; of attention relative to nothing, as values are about 1.
#[derive(Clone, Copy, Debug)]
pub struct Errors {
    pub attention: f32,
    pub queries: f32,
    /// Of stored elements, relative to the largest of their head.
    pub stored: f32,
}

/// Half a step of the type, relative; what was rotated in another order may round the other way.
pub fn store_bound(format: KvFormat) -> f32 {
    match format {
        KvFormat::F32 => 1e-5,
        KvFormat::F16 => 1.0 / 1024.0,
        KvFormat::Bf16 => 1.0 / 128.0,
        KvFormat::E4m3 => 1.0 / 15.0,
        KvFormat::Int8 => 1.0 / 250.0,
    }
}

/// The largest difference; NaN, if there is one.
pub fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |most, d| if d <= most { most } else { d })
}

fn e4m3(byte: u8) -> f32 {
    let (e, m) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match e {
        0 => m / 512.0,
        15 if byte & 7 == 7 => f32::NAN,
        _ => (1.0 + m / 8.0) * 2.0_f32.powi(e - 7),
    };
    if byte > 127 { -size } else { size }
}

/// One step on the device and its inputs.
struct Step {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Case {
    pub fn random(rng: &mut Rng, head_dim: u32, format: KvFormat, numerics: Numerics) -> Self {
        let kv_heads = rng.pick(&[1, 1, 2]);
        let fresh: &[u32] = match numerics {
            Numerics::Invariant => &[1, 1, 1, 2, 3, 9],
            Numerics::Fast => &[1, 7, 8, 15, 16, 17, 33],
        };
        let mut rows: Vec<(u32, u32)> = (0..1 + rng.below(2))
            .map(|_| {
                let cached = rng.pick(&[0, 0, 1, 15, 16, 17, 63, 64, 65, 100]) + rng.below(2);
                (cached, rng.pick(fresh))
            })
            .collect();
        let mut queries = rng.pick(&[1, 2, 3, 4, 5, 7, 8, 9]);
        match rng.below(16) {
            // More than one split, or many tiles of keys.
            0 => {
                rows = vec![(500 + rng.below(600), rng.pick(&[1, 2]))];
                queries = queries.min(3);
            }
            // More than one tile of queries.
            1 => {
                rows = vec![(rng.below(30), 64 + rng.below(10))];
                queries = queries.min(2);
            }
            _ => {}
        }
        Self {
            format,
            head_dim,
            layers: 2,
            page_tokens: rng.pick(&[4, 16, 16, 32, 64]),
            kv_heads,
            heads: kv_heads * queries,
            numerics,
            norms: rng.below(2) == 0,
            style: rng.pick(&[RopeStyle::Norm, RopeStyle::Neox]),
            rows,
            far: false,
        }
    }

    fn dtype(&self) -> KvDtype {
        match self.format {
            KvFormat::F16 => KvDtype::F16,
            KvFormat::Bf16 => KvDtype::Bf16,
            KvFormat::F32 | KvFormat::E4m3 | KvFormat::Int8 => KvDtype::F32,
        }
    }

    fn layout(&self) -> KvLayout {
        KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: self.page_tokens,
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            dtype: self.dtype(),
        })
        .unwrap()
    }

    /// Page tables, no page twice, in a random order; and the pages of the pool.
    fn tables(&self, rng: &mut Rng) -> (Vec<Vec<PageId>>, u32) {
        let wanted = |row: &(u32, u32)| (row.0 + row.1).div_ceil(self.page_tokens);
        let count: u32 = self.rows.iter().map(wanted).sum::<u32>() + 2;
        let spread = if self.far { 3000 / count } else { 1 };
        let mut pages: Vec<PageId> = (1..=count).map(|page| PageId::new(page * spread)).collect();
        for at in (1..pages.len()).rev() {
            pages.swap(at, rng.below(at as u32 + 1) as usize);
        }
        let tables = self
            .rows
            .iter()
            .map(|row| pages.split_off(pages.len() - wanted(row) as usize));
        (tables.collect(), count * spread)
    }

    /// Runs the case on the device and on the CPU.
    pub fn run(&self, device: &Device, rng: &mut Rng) -> Errors {
        let (tables, total) = self.tables(rng);
        let mut host = KvArena::new(self.layout(), total).unwrap();
        if !self.far {
            host.bytes_mut().fill(0xff);
        }
        let mut gpu = OnDevice::new(self, device, total);
        let cached: Vec<KvRow<'_>> = self.kv_rows(&tables, |row| (0, row.0));
        let step_rows: Vec<KvRow<'_>> = self.kv_rows(&tables, |row| *row);
        let history = self.inputs(rng, &cached);
        let step = self.inputs(rng, &step_rows);
        let norms = (
            rng.normals(self.head_dim as usize),
            rng.normals(self.head_dim as usize),
        );
        if !history.k.is_empty() {
            gpu.step(self, &cached, &history, &norms, false);
        }
        let (q, out) = gpu.step(self, &step_rows, &step, &norms, true);
        // The CPU's own way to what is stored.
        let mut expected_q = Vec::new();
        for (rows, input) in [(&cached, &history), (&step_rows, &step)] {
            expected_q = self.store_on_cpu(&mut host, rows, input, &norms);
        }
        let mut stored = self.read_back(&gpu, total, &tables);
        let errors_stored = self.difference(&host, &stored, &tables);
        // Attention of what the device stored and rotated, so that its own error shows.
        let mut reference = vec![0.0; q.len()];
        let view = KvView::of(&mut stored).unwrap();
        let args = AttentionArgs {
            isa: Isa::Scalar,
            kv: &view,
            layer: self.layers - 1,
            heads: self.heads,
            scale: self.scale(),
            rows: &step_rows,
            q: &q,
        };
        let pool = ThreadPool::new(1);
        attention(&pool, &args, &mut reference, &mut Scratch::default()).unwrap();
        Errors {
            attention: largest(&reference, &out),
            queries: largest(&expected_q, &q),
            stored: errors_stored,
        }
    }

    /// What attention answers when the rows come in `parts[0]` steps.
    pub fn outputs(&self, device: &Device, seed: u64, parts: &[u32]) -> Vec<f32> {
        let rng = &mut Rng(seed);
        let (tables, total) = self.tables(rng);
        let mut gpu = OnDevice::new(self, device, total);
        let cached = self.kv_rows(&tables, |row| (0, row.0));
        let whole = self.kv_rows(&tables, |row| *row);
        let history = self.inputs(rng, &cached);
        let step = self.inputs(rng, &whole);
        let norms = (
            rng.normals(self.head_dim as usize),
            rng.normals(self.head_dim as usize),
        );
        if !history.k.is_empty() {
            gpu.step(self, &cached, &history, &norms, false);
        }
        if parts == [1] {
            return gpu.step(self, &whole, &step, &norms, true).1;
        }
        let (mut out, mut first) = (Vec::new(), 0);
        for (row, table) in self.rows.iter().zip(&tables) {
            let chunk = row.1.div_ceil(parts[0]);
            for at in (0..row.1).step_by(chunk as usize) {
                let len = chunk.min(row.1 - at);
                let rows = [KvRow {
                    first_pos: row.0 + at,
                    len,
                    pages: table,
                }];
                let part = step.part(self, first, len as usize);
                out.extend(gpu.step(self, &rows, &part, &norms, true).1);
                first += len as usize;
            }
        }
        out
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn kv_rows<'a>(
        &self,
        tables: &'a [Vec<PageId>],
        span: impl Fn(&(u32, u32)) -> (u32, u32),
    ) -> Vec<KvRow<'a>> {
        let rows = self.rows.iter().zip(tables).map(|(row, pages)| {
            let (first_pos, len) = span(row);
            KvRow {
                first_pos,
                len,
                pages,
            }
        });
        rows.filter(|row| row.len > 0).collect()
    }

    fn inputs(&self, rng: &mut Rng, rows: &[KvRow<'_>]) -> Step {
        let tokens: u32 = rows.iter().map(|row| row.len).sum();
        let vectors = |heads: u32| (tokens * heads * self.head_dim) as usize;
        Step {
            q: rng.normals(vectors(self.heads)),
            k: rng.normals(vectors(self.kv_heads)),
            v: rng.normals(vectors(self.kv_heads)),
        }
    }

    fn freqs(&self) -> Vec<f32> {
        let pairs = self.head_dim / 2;
        (0..pairs)
            .map(|i| 1e4_f32.powf(-(i as f32) / pairs as f32))
            .collect()
    }

    fn store_on_cpu(
        &self,
        arena: &mut KvArena,
        rows: &[KvRow<'_>],
        input: &Step,
        norms: &(Vec<f32>, Vec<f32>),
    ) -> Vec<f32> {
        let (mut q, mut k) = (input.q.clone(), input.k.clone());
        if self.norms {
            qk_norm(Isa::Scalar, &mut q, &norms.0, 1e-5).unwrap();
            qk_norm(Isa::Scalar, &mut k, &norms.1, 1e-5).unwrap();
        }
        let positions: Vec<u32> = rows
            .iter()
            .flat_map(|row| row.first_pos..row.first_pos + row.len)
            .collect();
        let mut angles = rootstock_kernels::RopeAngles::default();
        angles.set(&self.freqs(), &positions, 1.0);
        let dim = self.head_dim as usize;
        rope(self.style, &angles, &mut q, dim).unwrap();
        rope(self.style, &angles, &mut k, dim).unwrap();
        let mut view = KvView::of(arena).unwrap();
        store_kv(Isa::Scalar, &mut view, self.layers - 1, rows, &k, &input.v).unwrap();
        q
    }

    /// The device's pages as an arena of the CPU, 8-bit elements widened.
    fn read_back(&self, gpu: &OnDevice, total: u32, tables: &[Vec<PageId>]) -> KvArena {
        let mut arena = KvArena::new(self.layout(), total).unwrap();
        for page in tables.iter().flatten() {
            let bytes = gpu.page(*page);
            if self.format.element_bytes() > 1 {
                arena.page_mut(*page).copy_from_slice(&bytes);
                continue;
            }
            let slots = self.page_tokens as usize;
            let dim = self.head_dim as usize;
            let out: &mut [f32] = bytemuck::cast_slice_mut(arena.page_mut(*page));
            let heads = bytes
                .chunks(slots * (dim + 4))
                .zip(out.chunks_mut(slots * dim));
            for (head, out) in heads {
                let (elements, scales) = head.split_at(slots * dim);
                for (at, (byte, out)) in elements.iter().zip(out).enumerate() {
                    let scale = &scales[at / dim * 4..][..4];
                    let scale = f32::from_le_bytes(scale.try_into().unwrap());
                    let value = match self.format {
                        KvFormat::E4m3 => e4m3(*byte),
                        KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 | KvFormat::Int8 => {
                            f32::from(byte.cast_signed())
                        }
                    };
                    *out = value * scale;
                }
            }
        }
        arena
    }

    /// The largest difference of what is stored, relative to the largest element of its head.
    fn difference(&self, cpu: &KvArena, gpu: &KvArena, tables: &[Vec<PageId>]) -> f32 {
        let mut most = 0.0;
        let layer = cpu.layout().layer_bytes() * (self.layers as usize - 1);
        let dim = self.head_dim as usize;
        for (row, table) in self.rows.iter().zip(tables) {
            for position in 0..(row.0 + row.1) as usize {
                let page = table[position / self.page_tokens as usize];
                let (a, b) = (&cpu.page(page)[layer..], &gpu.page(page)[layer..]);
                let (a, b) = (self.floats(a), self.floats(b));
                for head in 0..2 * self.kv_heads as usize {
                    let slots = self.page_tokens as usize;
                    let at = (head * slots + position % slots) * dim;
                    let (a, b) = (&a[at..at + dim], &b[at..at + dim]);
                    let size = a.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
                    let off = largest(a, b) / size;
                    most = if off <= most { most } else { off };
                }
            }
        }
        most
    }

    fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        match self.dtype() {
            KvDtype::F32 => bytemuck::cast_slice(bytes).to_vec(),
            KvDtype::F16 => bytemuck::cast_slice::<u8, f16>(bytes)
                .iter()
                .map(|x| x.to_f32())
                .collect(),
            KvDtype::Bf16 => bytemuck::cast_slice::<u8, bf16>(bytes)
                .iter()
                .map(|x| x.to_f32())
                .collect(),
        }
    }
}

impl Step {
    fn part(&self, case: &Case, first: usize, len: usize) -> Self {
        let cut = |values: &[f32], heads: u32| {
            let width = (heads * case.head_dim) as usize;
            values[first * width..(first + len) * width].to_vec()
        };
        Self {
            q: cut(&self.q, case.heads),
            k: cut(&self.k, case.kv_heads),
            v: cut(&self.v, case.kv_heads),
        }
    }
}

/// The device's side of a case.
struct OnDevice {
    stream: Stream,
    kernels: AttentionKernels,
    pages: DevicePages,
    angles: RopeAngles,
    batch: Batch,
    partial: DeviceBuffer<f32>,
}

impl OnDevice {
    fn new(case: &Case, device: &Device, total: u32) -> Self {
        let shape = PageShape::new(case.layout(), case.format).unwrap();
        let stream = Stream::new(device).unwrap();
        let ends = case.rows.iter().map(|row| row.0 + row.1);
        let positions = ends.max().unwrap();
        Self {
            kernels: AttentionKernels::load(device, &shape, None).unwrap(),
            pages: DevicePages::new(device, shape, total).unwrap(),
            angles: RopeAngles::new(&stream, &case.freqs(), positions, 1.0).unwrap(),
            batch: Batch::new(device, case.numerics).unwrap(),
            partial: DeviceBuffer::new(device, 1, "test").unwrap(),
            stream,
        }
    }

    /// Stores K and V and attends; returns rotated queries and results.
    fn step(
        &mut self,
        case: &Case,
        rows: &[KvRow<'_>],
        input: &Step,
        norms: &(Vec<f32>, Vec<f32>),
        attend: bool,
    ) -> (Vec<f32>, Vec<f32>) {
        let stream = &self.stream;
        let tokens = vec![0; input.k.len() / (case.kv_heads * case.head_dim) as usize];
        let given = BatchRows {
            tokens: &tokens,
            rows,
            picks: &[],
            feed: &[],
        };
        self.batch.set(stream, &self.pages, &given).unwrap();
        let mut q = stream.upload_now(&input.q, "test").unwrap();
        let k = stream.upload_now(&input.k, "test").unwrap();
        let v = stream.upload_now(&input.v, "test").unwrap();
        let q_norm = stream.upload_now(&norms.0, "test").unwrap();
        let k_norm = stream.upload_now(&norms.1, "test").unwrap();
        let layer = case.layers - 1;
        let mut call = StoreCall {
            pages: &mut self.pages,
            layer,
            batch: &self.batch,
            heads: case.heads,
            q: &mut q,
            k: &k,
            v: &v,
            q_norm: case.norms.then_some(&q_norm),
            k_norm: case.norms.then_some(&k_norm),
            eps: 1e-5,
            angles: &self.angles,
            halves: case.style == RopeStyle::Neox,
        };
        self.kernels.store(stream, &mut call).unwrap();
        let mut out = DeviceBuffer::new(stream.device(), q.len(), "test").unwrap();
        if attend {
            let mut call = AttentionCall {
                pages: &self.pages,
                layer,
                batch: &self.batch,
                heads: case.heads,
                scale: case.scale(),
                q: &q,
                out: &mut out,
                partial: &mut self.partial,
            };
            self.kernels.attend(stream, &mut call).unwrap();
        }
        (
            stream.download_now(&q).unwrap(),
            stream.download_now(&out).unwrap(),
        )
    }

    fn page(&self, page: PageId) -> Vec<u8> {
        let bytes = self.pages.shape().page_bytes();
        let mut pinned = PinnedBuffer::new(self.stream.device(), bytes).unwrap();
        let range = page.index() * bytes..(page.index() + 1) * bytes;
        self.stream
            .download(self.pages.bytes(), range, &mut pinned, 0)
            .unwrap();
        self.stream.synchronize().unwrap();
        pinned.as_slice().to_vec()
    }
}
