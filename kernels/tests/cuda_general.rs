//! Norms, embedding, copies of pages and sampling, emulated, through the Rust host
//! path: random shapes against the CPU's reference, and planted faults.
#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "cuda/case.rs"]
#[expect(dead_code, reason = "only the random numbers are used here")]
mod case;
#[path = "cuda/mock.rs"]
mod mock;
#[path = "cuda/weights.rs"]
mod weights;

use case::{Rng, cases, largest};
use mock::{Fault, Outcome, Variant, catch_all, on_mock, outcome_with};
use rootstock_kernels::cuda::{
    Batch, BatchRows, Device, DeviceBuffer, DevicePages, GeneralKernels, KvFormat, NormCall,
    Numerics, PagePart, PageShape, SampleRow, Stream,
};
use rootstock_kernels::{
    GgmlType, Isa, KvRow, SampleArgs, SampleScratch, rms_norm, sample, silu_mul,
};
use rootstock_memory::{KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};
use weights::rounded;

const GENERAL: Variant = Variant {
    head_dims: &[],
    kv_types: &[],
    sanitized: false,
    fault: None,
};

struct Rig {
    device: Device,
    stream: Stream,
    kernels: GeneralKernels,
    pages: DevicePages,
}

impl Rig {
    fn new() -> Self {
        let device = Device::open(0).unwrap();
        let layout = KvLayout::new(LayoutSpec {
            order: LayoutOrder::PageFirst,
            page_tokens: 4,
            layers: 3,
            kv_heads: 2,
            head_dim: 16,
            dtype: KvDtype::F16,
        });
        let shape = PageShape::new(layout.unwrap(), KvFormat::F16).unwrap();
        Self {
            stream: Stream::new(&device).unwrap(),
            kernels: GeneralKernels::load(&device, None).unwrap(),
            pages: DevicePages::new(&device, shape, 40).unwrap(),
            device,
        }
    }

    /// A batch of one row.
    fn batch(&self, tokens: &[u32], picks: &[u32], feed: &[(u32, u32)]) -> Batch {
        let pages: Vec<PageId> = (1..=40).map(PageId::new).collect();
        let row = KvRow {
            first_pos: 0,
            len: tokens.len() as u32,
            pages: &pages,
        };
        let given = BatchRows {
            tokens,
            rows: &[row],
            picks,
            feed,
        };
        let mut batch = Batch::new(&self.device, Numerics::Invariant).unwrap();
        batch.set(&self.stream, &self.pages, &given).unwrap();
        batch
    }

    fn up(&self, values: &[f32]) -> DeviceBuffer<f32> {
        self.stream.upload_now(values, "test").unwrap()
    }

    fn room(&self, len: usize) -> DeviceBuffer<f32> {
        DeviceBuffer::new(&self.device, len, "test").unwrap()
    }

    fn down(&self, buffer: &DeviceBuffer<f32>) -> Vec<f32> {
        self.stream.download_now(buffer).unwrap()
    }
}

#[test]
fn norms_and_the_rest_over_random_shapes_are_the_reference() {
    if !on_mock(
        "norms_and_the_rest_over_random_shapes_are_the_reference",
        &GENERAL,
    ) {
        return;
    }
    let rig = Rig::new();
    let mut most = 0.0_f32;
    for seed in 0..cases() {
        let rng = &mut Rng(seed);
        let (n, width) = (1 + rng.below(5), 1 + rng.below(700));
        let x = rng.normals((n * width) as usize);
        let weight = rng.normals(width as usize);
        let picks: Vec<u32> = (0..rng.below(3)).map(|_| rng.below(n)).collect();
        let batch = rig.batch(&vec![0; n as usize], &picks, &[]);
        let (there, norm) = (rig.up(&x), rig.up(&weight));
        let by_picks = rng.below(2) == 0;
        let m = if by_picks { picks.len() } else { n as usize };
        let mut out = rig.room(m * width as usize);
        let call = NormCall {
            weight: &norm,
            eps: 1e-5,
            picks: by_picks,
        };
        rig.kernels
            .rms_norm(&rig.stream, &batch, &call, &there, &mut out)
            .unwrap();
        let mut expected = vec![0.0; x.len()];
        rms_norm(Isa::Scalar, &x, &weight, 1e-5, &mut expected).unwrap();
        let row = |at: u32| expected[(at * width) as usize..((at + 1) * width) as usize].to_vec();
        let expected: Vec<f32> = if by_picks {
            picks.iter().flat_map(|at| row(*at)).collect()
        } else {
            expected
        };
        let off = largest(&expected, &rig.down(&out));
        // A comparison that a NaN fails.
        assert!(off <= 1e-5, "seed {seed}: norm {off}");
        most = most.max(off);

        let (mut gate, up) = (x.clone(), rng.normals(x.len()));
        let mut gate_there = rig.up(&gate);
        rig.kernels
            .silu_mul(&rig.stream, &mut gate_there, &rig.up(&up), x.len())
            .unwrap();
        silu_mul(Isa::Scalar, &mut gate, &up).unwrap();
        let off = largest(&gate, &rig.down(&gate_there));
        assert!(off <= 1e-5, "seed {seed}: silu {off}");
        most = most.max(off);
    }
    println!(
        "\n    | rms_norm, silu_mul | f32 | {} | {most:.1e} |",
        cases()
    );
}

#[test]
fn embedding_takes_the_rows_of_known_and_of_fed_tokens() {
    if !on_mock(
        "embedding_takes_the_rows_of_known_and_of_fed_tokens",
        &GENERAL,
    ) {
        return;
    }
    let rig = Rig::new();
    for seed in 0..3 * cases() {
        let rng = &mut Rng(seed);
        let ty = [GgmlType::F32, GgmlType::F16, GgmlType::Bf16][seed as usize % 3];
        let (vocab, width) = (30, 8 * (1 + rng.below(50)));
        let (bytes, rows) = rounded(&rng.normals((vocab * width) as usize), ty);
        let table = rig
            .kernels
            .matrix(&rig.stream, ty, vocab, width, &bytes)
            .unwrap();
        let mut tokens: Vec<u32> = (0..6).map(|_| rng.below(vocab)).collect();
        let drawn: Vec<u32> = (0..4).map(|_| rng.below(vocab)).collect();
        let batch = rig.batch(&tokens, &[], &[(5, 1), (2, 3)]);
        let drawn_there = rig.stream.upload_now(&drawn, "test").unwrap();
        rig.kernels.feed(&rig.stream, &batch, &drawn_there).unwrap();
        (tokens[5], tokens[2]) = (drawn[1], drawn[3]);
        let mut out = rig.room(6 * width as usize);
        rig.kernels
            .embed(&rig.stream, &batch, &table, &mut out)
            .unwrap();
        let row = |at: u32| rows[(at * width) as usize..((at + 1) * width) as usize].to_vec();
        let expected: Vec<f32> = tokens.iter().flat_map(|token| row(*token)).collect();
        assert!(rig.down(&out) == expected, "seed {seed}");
    }
    println!(
        "\n    | embed, feed | f32, f16, bf16 | {} each | equal |",
        cases()
    );
}

#[test]
fn pages_gathered_and_scattered_are_where_the_layout_says() {
    if !on_mock(
        "pages_gathered_and_scattered_are_where_the_layout_says",
        &GENERAL,
    ) {
        return;
    }
    let mut rig = Rig::new();
    let len = rig.pages.bytes().len();
    let (page, layer) = (
        rig.pages.shape().page_bytes(),
        rig.pages.shape().layer_bytes(),
    );
    for seed in 0..cases() {
        let rng = &mut Rng(seed);
        let before: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
        *rig.pages.bytes_mut() = rig.stream.upload_now(&before, "test").unwrap();
        let mut ids: Vec<u32> = (1..=40).collect();
        for at in (1..40).rev() {
            ids.swap(at, rng.below(at as u32 + 1) as usize);
        }
        ids.truncate(1 + rng.below(6) as usize);
        let pages: Vec<PageId> = ids.iter().map(|id| PageId::new(*id)).collect();
        let first = rng.below(3);
        let layers = first..first + 1 + rng.below(3 - first);
        let there = rig.stream.upload_now(&ids, "test").unwrap();
        let part = PagePart {
            pages: &there,
            ids: &pages,
            layers: layers.clone(),
        };
        let bytes = layers.len() * layer;
        let mut packed = DeviceBuffer::new(&rig.device, ids.len() * bytes, "test").unwrap();
        rig.kernels
            .gather(&rig.stream, &rig.pages, &part, &mut packed)
            .unwrap();
        let found = rig.stream.download_now(&packed).unwrap();
        let place = |id: u32| id as usize * page + layers.start as usize * layer;
        let expected: Vec<u8> = ids
            .iter()
            .flat_map(|id| before[place(*id)..][..bytes].to_vec())
            .collect();
        assert!(found == expected, "seed {seed}: gathered");
        let fresh: Vec<u8> = found.iter().map(|byte| !byte).collect();
        let packed = rig.stream.upload_now(&fresh, "test").unwrap();
        rig.kernels
            .scatter(&rig.stream, &mut rig.pages, &part, &packed)
            .unwrap();
        let mut expected = before;
        for (id, part) in ids.iter().zip(fresh.chunks(bytes)) {
            expected[place(*id)..][..bytes].copy_from_slice(part);
        }
        let found = rig.stream.download_now(rig.pages.bytes()).unwrap();
        assert!(found == expected, "seed {seed}: scattered");
    }
    println!(
        "\n    | pages_gather, pages_scatter | bytes | {} | equal |",
        cases()
    );
}

#[test]
fn the_device_draws_what_the_cpu_draws() {
    if !on_mock("the_device_draws_what_the_cpu_draws", &GENERAL) {
        return;
    }
    let rig = Rig::new();
    // The largest; all; the k most likely; by their sum; by the most likely one; everything.
    for seed in 0..6 * cases() {
        let kind = seed % 6;
        let rng = &mut Rng(seed);
        let vocab = rng.pick(&[1, 2, 31, 300, 600, 1500]);
        let mut logits: Vec<f32> = rng
            .normals(vocab as usize)
            .iter()
            .map(|x| 3.0 * x)
            .collect();
        // Ties, and what is not a number.
        for _ in 0..rng.below(4) {
            let (to, from) = (rng.below(vocab) as usize, rng.below(vocab) as usize);
            logits[to] = rng.pick(&[logits[from], f32::NAN, f32::NEG_INFINITY, 2.0]);
        }
        if kind == 0 {
            // Several are the largest: the first of them wins.
            let most = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            for _ in 0..2 {
                logits[rng.below(vocab) as usize] = most;
            }
        }
        let some = |kinds: [u64; 2]| kinds.contains(&kind);
        let row = SampleRow {
            temperature: if kind == 0 {
                0.0
            } else {
                rng.pick(&[0.3, 1.0, 2.0])
            },
            top_p: if some([3, 5]) {
                rng.pick(&[0.9, 0.3])
            } else {
                1.0
            },
            min_p: if some([4, 5]) {
                rng.pick(&[0.1, 0.02])
            } else {
                0.0
            },
            top_k: if some([2, 5]) {
                rng.pick(&[1, 5, 40])
            } else {
                0
            },
            output_index: rng.below(100),
            unused: 0,
            seed: rng.next(),
        };
        let args = SampleArgs {
            temperature: row.temperature,
            top_p: row.top_p,
            min_p: row.min_p,
            top_k: row.top_k,
            output_index: row.output_index,
            seed: row.seed,
            ..SampleArgs::GREEDY
        };
        let drawn = sample(&mut logits.clone(), &args, &mut SampleScratch::default());
        let wanted = drawn.map_or(SampleRow::NOTHING, |drawn| drawn.token);
        let there = rig.up(&logits);
        let rows = rig.stream.upload_now(&[row], "test").unwrap();
        let mut tokens = rig.stream.upload_now(&[7_u32], "test").unwrap();
        rig.kernels
            .sample(&rig.stream, &there, vocab, (&rows, 1), &mut tokens)
            .unwrap();
        let found = rig.stream.download_now(&tokens).unwrap()[0];
        assert_eq!(found, wanted, "seed {seed}: {row:?} over {vocab}");
    }
    println!("\n    | sample | six ways | {} each | equal |", cases());
}

/// The tests above under the sanitizers, with fewer cases: they cost ten times as much there.
#[test]
fn no_kernel_reads_or_writes_beyond_its_memory() {
    let checked = Variant {
        sanitized: true,
        ..GENERAL
    };
    for test in [
        "norms_and_the_rest_over_random_shapes_are_the_reference",
        "embedding_takes_the_rows_of_known_and_of_fed_tokens",
        "pages_gathered_and_scattered_are_where_the_layout_says",
        "the_device_draws_what_the_cpu_draws",
    ] {
        match outcome_with(test, &checked, &[("EMULATED_CASES", "2")]) {
            Outcome::NotRun => return,
            outcome => assert_eq!(outcome, Outcome::Passed, "{test}"),
        }
    }
}

const FAULTS: &[(&str, Fault)] = &[
    (
        "norms_and_the_rest_over_random_shapes_are_the_reference",
        Fault {
            name: "the sum of a norm is read before all warps have added",
            file: "general.cu",
            from: "    if (lane == 0) parts[warp] = squares;\n    __syncthreads();",
            to: "    if (lane == 0) parts[warp] = squares;",
        },
    ),
    (
        "pages_gathered_and_scattered_are_where_the_layout_says",
        Fault {
            name: "a page is copied without its last 16 bytes",
            file: "general.cu",
            from: "const i64 vectors = a.bytes / 16;",
            to: "const i64 vectors = a.bytes / 16 - 1;",
        },
    ),
    (
        "the_device_draws_what_the_cpu_draws",
        Fault {
            name: "ties go to the higher token",
            file: "sample.cu",
            from: "its < tokens[threadIdx.x]",
            to: "its != NOTHING && its > tokens[threadIdx.x]",
        },
    ),
];

#[test]
fn every_planted_fault_in_the_rest_is_caught() {
    if case::plants_faults() {
        catch_all(FAULTS, &GENERAL);
    }
}
