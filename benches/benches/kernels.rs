//! Which rates do the CPU kernels reach, and how far are they from the machine's limits?
//!
//! Serves tile heights, prefetch distances and the split into tasks. The shapes are those of
//! SmolLM2-135M. Each figure is the best of many short windows, because machines are shared: the
//! median would measure the neighbours.
//! `cargo bench -p rootstock-benches --bench kernels -- FILTER` prints the lines whose name
//! contains FILTER; as a test it runs every kernel once.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bench prints and measures time"
)]

use std::time::Duration;

use rootstock_kernels::{
    AttentionArgs, GgmlType, Isa, KvRow, KvView, PackedMatrix, Scratch, ThreadPool, attention,
    matmul, rms_norm, silu_mul, store_kv,
};
use rootstock_memory::{KvArena, KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};
use rustix::time::{ClockId, clock_gettime};

/// How long a figure is measured for.
const WINDOW: Duration = Duration::from_millis(400);

/// What a figure is measured with.
#[derive(Clone, Copy)]
enum Clock {
    /// Time this thread ran: another process on the core does not count, what it does to caches
    /// and bandwidth does.
    Thread,
    /// Time that passed.
    Wall,
}

impl Clock {
    /// The clock of a run on a pool.
    fn of(pool: &ThreadPool) -> Self {
        if pool.threads() == 1 {
            Self::Thread
        } else {
            Self::Wall
        }
    }

    fn now(self) -> Duration {
        let id = match self {
            Self::Thread => ClockId::ThreadCPUTime,
            Self::Wall => ClockId::Monotonic,
        };
        let now = clock_gettime(id);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }
}

struct Bench {
    filter: String,
    once: bool,
    isa: Isa,
}

impl Bench {
    /// Prints the best rate of `work` units per run, on the caller's thread alone.
    fn rate(&self, name: &str, unit: &str, work: f64, run: impl FnMut()) {
        self.rate_by(Clock::Thread, name, unit, work, run);
    }

    fn rate_by(&self, clock: Clock, name: &str, unit: &str, work: f64, mut run: impl FnMut()) {
        let name = format!("{} {name}", self.isa.name());
        if !name.contains(&self.filter) {
            return;
        }
        let mut measure = |count: u32| {
            let start = clock.now();
            (0..count).for_each(|_| run());
            (clock.now() - start) / count
        };
        let mut best = measure(1);
        if !self.once {
            // Windows of 100 us, so that reading the clock does not count.
            let count = (100_000 / best.as_nanos().max(1)).clamp(1, 1000) as u32;
            let begin = Clock::Wall.now();
            while Clock::Wall.now() - begin < WINDOW {
                best = best.min(measure(count));
            }
        }
        let micros = best.as_secs_f64() * 1e6;
        println!(
            "{name:<44} {:>9.1} {unit:<7} {micros:>10.1} us",
            work / micros / 1e3
        );
    }

    fn matmul(&self, ty: GgmlType, rows: usize, cols: usize, pool: &ThreadPool) {
        let bytes = weights(ty, rows * cols);
        let matrix = PackedMatrix::pack(ty, rows, cols, &bytes, self.isa).unwrap();
        let mut scratch = Scratch::default();
        for n in [1, 4, 8, 64, 512] {
            if n * rows > 1 << 23 {
                continue;
            }
            let x = floats(n * cols);
            let mut out = vec![0.0; n * rows];
            let name = format!(
                "matmul {} {cols}x{rows} m{n} t{}",
                ty.name(),
                pool.threads()
            );
            self.rate_by(
                Clock::of(pool),
                &name,
                "GMAC/s",
                (n * rows * cols) as f64,
                || {
                    matmul(pool, &matrix, &x, n, &mut out, &mut scratch).unwrap();
                },
            );
        }
    }

    /// Products over as many different weights as a whole model has: nothing stays in cache.
    fn stream(&self, pool: &ThreadPool) {
        let (rows, cols) = (1536, 576);
        let bytes = weights(GgmlType::Q4_1, rows * cols);
        let pack = |_| PackedMatrix::pack(GgmlType::Q4_1, rows, cols, &bytes, self.isa).unwrap();
        let model: Vec<PackedMatrix> = (0..120).map(pack).collect();
        let size: usize = model.iter().map(PackedMatrix::bytes).sum();
        let (x, mut out, mut scratch) = (floats(cols), vec![0.0; rows], Scratch::default());
        let name = format!("stream Q4_1 {} MB m1 t{}", size / 1_000_000, pool.threads());
        self.rate_by(Clock::of(pool), &name, "GB/s", size as f64, || {
            for matrix in &model {
                matmul(pool, matrix, &x, 1, &mut out, &mut scratch).unwrap();
            }
        });
    }

    fn attention(&self, dtype: KvDtype, first_pos: u32, len: u32, pool: &ThreadPool) {
        let (heads, kv_heads, head_dim, page_tokens) = (9, 3, 64, 16);
        let order = LayoutOrder::PageFirst;
        let spec = LayoutSpec {
            order,
            page_tokens,
            layers: 1,
            kv_heads,
            head_dim,
            dtype,
        };
        let end = first_pos + len;
        let mut arena = KvArena::new(KvLayout::new(spec).unwrap(), end.div_ceil(16)).unwrap();
        let pages: Vec<PageId> = (1..=end.div_ceil(16)).rev().map(PageId::new).collect();
        let width = (kv_heads * head_dim) as usize;
        let mut kv = KvView::of(&mut arena).unwrap();
        let all = [KvRow {
            first_pos: 0,
            len: end,
            pages: &pages,
        }];
        let cached = floats(end as usize * width);
        let name = format!("store_kv {dtype:?} {end}");
        self.rate(&name, "Gelem/s", 2.0 * cached.len() as f64, || {
            store_kv(self.isa, &mut kv, 0, &all, &cached, &cached).unwrap();
        });
        let q = floats((len * heads * head_dim) as usize);
        let mut out = vec![0.0; q.len()];
        let rows = [KvRow {
            first_pos,
            len,
            pages: &pages,
        }];
        let args = AttentionArgs {
            isa: self.isa,
            kv: &kv,
            layer: 0,
            heads,
            scale: 0.125,
            rows: &rows,
            q: &q,
        };
        let pairs: u64 = (first_pos..end)
            .map(|position| u64::from(position) + 1)
            .sum();
        let macs = (pairs * u64::from(heads * head_dim) * 2) as f64;
        let mut scratch = Scratch::default();
        let name = format!("attention {dtype:?} {first_pos}+{len} t{}", pool.threads());
        self.rate_by(Clock::of(pool), &name, "GMAC/s", macs, || {
            attention(pool, &args, &mut out, &mut scratch).unwrap();
        });
    }

    fn rows(&self) {
        let (n, dim, ffn) = (64, 576, 1536);
        let (x, weight, mut out) = (floats(n * dim), floats(dim), vec![0.0; n * dim]);
        self.rate("rms_norm 64 x 576", "Gelem/s", (n * dim) as f64, || {
            rms_norm(self.isa, &x, &weight, 1e-5, &mut out).unwrap();
        });
        let up = floats(n * ffn);
        let mut gate = up.clone();
        self.rate("silu_mul 64 x 1536", "Gelem/s", (n * ffn) as f64, || {
            gate.copy_from_slice(&up);
            silu_mul(self.isa, &mut gate, &up).unwrap();
        });
    }
}

fn floats(len: usize) -> Vec<f32> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
        .collect()
}

/// Blocks with a scale of 0.01 (and a minimum of 0.01) and arbitrary numbers.
fn weights(ty: GgmlType, elements: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..(elements / ty.block_len() * ty.block_bytes()) as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let scale = [0x1f, 0x21];
        match block.len() {
            2 => block.copy_from_slice(&scale),
            4 => block.copy_from_slice(&0.01_f32.to_le_bytes()),
            _ => block[..4].copy_from_slice(&[scale[0], scale[1], scale[0], scale[1]]),
        }
    }
    bytes
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let once = !args.iter().any(|arg| arg == "--bench");
    let filter = args
        .into_iter()
        .find(|arg| !arg.starts_with("--"))
        .unwrap_or_default();
    let pools = [ThreadPool::new(1), ThreadPool::new(2)];
    for isa in Isa::available() {
        if isa == Isa::Scalar && !filter.contains("scalar") {
            continue;
        }
        let bench = Bench {
            filter: filter.clone(),
            once,
            isa,
        };
        for pool in &pools {
            for ty in [
                GgmlType::Q4_1,
                GgmlType::Q4_0,
                GgmlType::Q8_0,
                GgmlType::F16,
            ] {
                bench.matmul(ty, 1536, 576, pool);
                bench.matmul(ty, 576, 1536, pool);
            }
            bench.matmul(GgmlType::Q4_1, 576, 576, pool);
            bench.matmul(GgmlType::Q4_1, 192, 576, pool);
            bench.matmul(GgmlType::Q8_0, 49152, 576, pool);
            bench.stream(pool);
            for dtype in [KvDtype::F16, KvDtype::F32] {
                bench.attention(dtype, 0, 2048, pool);
                bench.attention(dtype, 1536, 512, pool);
                bench.attention(dtype, 0, 64, pool);
                bench.attention(dtype, 240, 16, pool);
                bench.attention(dtype, 2047, 1, pool);
            }
        }
        bench.rows();
    }
}
