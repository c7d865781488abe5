//! The attention kernels, emulated, through the Rust host path: random shapes against the CPU's
//! reference, independence of the batch, offsets beyond 32 bits, and planted faults.
//!
//! The kernels read what the CPU wrote and the other way round, so the page layout is compared too.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, with small numbers"
)]

#[path = "cuda/case.rs"]
mod case;
#[path = "cuda/mock.rs"]
mod mock;

use case::{Case, Rng, cases};
use mock::{Fault, Variant, catch_all, on_mock};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};

/// Every type and width, without sanitizers, which cost ten times as much.
const ALL: Variant = Variant {
    head_dims: &[16, 64, 80, 96, 128, 256],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: false,
    fault: None,
};

/// Widths by what they have in common: a stream of 4 or 8 lanes that all hold a part, lanes that
/// hold none, and several parts or smaller tiles.
const WIDTHS: [&[u32]; 3] = [&[16, 64], &[80, 96], &[128, 256]];

/// Every type, at a width that fills its lanes and one that does not.
const CHECKED: Variant = Variant {
    head_dims: &[64, 80],
    sanitized: true,
    ..ALL
};

/// Small, for planted faults.
const SMALL: Variant = Variant {
    head_dims: &[64],
    kv_types: &[1, 4],
    sanitized: true,
    fault: None,
};

/// Largest error of decode, which reads what is stored and computes in 32-bit floats.
const DECODE_BOUND: f32 = 2e-5;

/// Bounds of the prefill kernel, whose queries and weights are rounded to 16 bits.
fn prefill_bound(format: KvFormat) -> f32 {
    if format == KvFormat::Bf16 { 4e-2 } else { 6e-3 }
}

/// The largest errors of one class.
#[derive(Clone, Copy, Default)]
struct Largest {
    attention: f32,
    queries: f32,
    stored: f32,
}

/// Runs `count` cases of every class, a type and some widths, and prints the largest errors;
/// panics beyond the bounds.
fn run_cases(numerics: Numerics, count: u64, widths: &[&[u32]], formats: &[KvFormat]) {
    let device = Device::open(0).unwrap();
    println!();
    for format in formats {
        for dims in widths {
            let largest = run_class(&device, numerics, (*format, dims), count);
            let Largest {
                attention,
                queries,
                stored,
            } = largest;
            println!(
                "    | {numerics:?} | {format:?} | {dims:?} | {count} | {attention:.1e} | \
                 {queries:.1e} | {stored:.1e} |"
            );
        }
    }
}

fn run_class(
    device: &Device,
    numerics: Numerics,
    (format, dims): (KvFormat, &[u32]),
    count: u64,
) -> Largest {
    let tiled = numerics == Numerics::Fast && format != KvFormat::F32;
    let bound = if tiled {
        prefill_bound(format)
    } else {
        DECODE_BOUND
    };
    let mut largest = Largest::default();
    for seed in 0..count {
        let dim = dims[seed as usize % dims.len()];
        let mut rng = Rng(seed ^ u64::from(dim) << 32 ^ (format as u64) << 48);
        let case = Case::random(&mut rng, dim, format, numerics);
        let errors = case.run(device, &mut rng);
        // Comparisons that a NaN fails.
        let within = errors.attention <= bound
            && errors.queries <= 1e-5
            && errors.stored <= case::store_bound(format);
        assert!(within, "seed {seed}: {errors:?} {case:?}");
        largest.attention = largest.attention.max(errors.attention);
        largest.queries = largest.queries.max(errors.queries);
        largest.stored = largest.stored.max(errors.stored);
    }
    largest
}

#[test]
fn decode_over_random_shapes_is_the_reference() {
    if on_mock("decode_over_random_shapes_is_the_reference", &ALL) {
        run_cases(Numerics::Invariant, cases(), &WIDTHS, &KvFormat::ALL);
    }
}

#[test]
fn prefill_over_random_shapes_is_the_reference() {
    if on_mock("prefill_over_random_shapes_is_the_reference", &ALL) {
        run_cases(Numerics::Fast, cases(), &WIDTHS, &KvFormat::ALL);
    }
}

#[test]
fn every_type_reads_and_writes_its_own_memory_only() {
    if on_mock("every_type_reads_and_writes_its_own_memory_only", &CHECKED) {
        let count = cases().min(20);
        for numerics in [Numerics::Invariant, Numerics::Fast] {
            run_cases(numerics, count, &[CHECKED.head_dims], &KvFormat::ALL);
        }
    }
}

/// What planted faults are looked for with.
#[test]
fn a_few_cases_of_both_kernels_are_the_reference() {
    if on_mock("a_few_cases_of_both_kernels_are_the_reference", &SMALL) {
        let formats = [KvFormat::F16, KvFormat::Int8];
        run_cases(Numerics::Invariant, 8, &[SMALL.head_dims], &formats);
        run_cases(Numerics::Fast, 8, &[SMALL.head_dims], &formats);
        let device = Device::open(0).unwrap();
        for format in formats {
            // Three splits, whatever the random ones had.
            let mut rng = Rng(1);
            let case = Case {
                rows: vec![(1100, 1)],
                ..Case::random(&mut rng, 64, format, Numerics::Invariant)
            };
            let errors = case.run(&device, &mut rng);
            assert!(errors.attention <= DECODE_BOUND, "{errors:?} {case:?}");
        }
    }
}

#[test]
fn a_token_is_the_same_whatever_shares_its_step() {
    if !on_mock("a_token_is_the_same_whatever_shares_its_step", &SMALL) {
        return;
    }
    let device = Device::open(0).unwrap();
    for seed in 0..20 {
        let mut rng = Rng(seed);
        let format = [KvFormat::F16, KvFormat::Int8][rng.below(2) as usize];
        let mut case = Case::random(&mut rng, 64, format, Numerics::Invariant);
        if seed == 0 {
            // Four splits: of two, the sum is the same in either order.
            case.rows = vec![(1600, 2), (3, 5)];
        }
        let whole = case.outputs(&device, seed, &[1]);
        for parts in [2, 3, 7] {
            // Rows in chunks of other sizes, each chunk in a step of its own.
            assert!(
                whole == case.outputs(&device, seed, &[parts]),
                "seed {seed}, {parts} parts"
            );
        }
    }
}

#[test]
fn a_chunked_prompt_is_the_same_bit_for_bit_in_the_prefill_kernel() {
    if !on_mock(
        "a_chunked_prompt_is_the_same_bit_for_bit_in_the_prefill_kernel",
        &SMALL,
    ) {
        return;
    }
    let device = Device::open(0).unwrap();
    let case = Case {
        numerics: Numerics::Fast,
        rows: vec![(0, 96)],
        ..Case::random(&mut Rng(5), 64, KvFormat::F16, Numerics::Fast)
    };
    let whole = case.outputs(&device, 5, &[1]);
    for parts in [2, 3, 8] {
        assert!(whole == case.outputs(&device, 5, &[parts]), "{parts} parts");
    }
}

#[test]
fn pages_beyond_four_gigabytes_are_reached() {
    if on_mock("pages_beyond_four_gigabytes_are_reached", &SMALL) {
        let device = Device::open(0).unwrap();
        for (numerics, seed) in [(Numerics::Invariant, 3), (Numerics::Fast, 4)] {
            let case = Case {
                // A page of 2 MiB, and pages with numbers up to 3000.
                layers: 64,
                page_tokens: 64,
                kv_heads: 2,
                heads: 4,
                far: true,
                rows: vec![(70, 1), (10, 20)],
                ..Case::random(&mut Rng(seed), 64, KvFormat::F16, numerics)
            };
            let errors = case.run(&device, &mut Rng(seed));
            assert!(
                errors.attention <= prefill_bound(KvFormat::F16),
                "{errors:?}"
            );
            assert!(
                errors.stored <= case::store_bound(KvFormat::F16),
                "{errors:?}"
            );
        }
    }
}

/// Faults that the cases above must find.
const FAULTS: &[(&str, Fault)] = &[
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "decode merges its streams without a barrier",
            file: "attention.cu",
            from: "    __syncthreads();\n    for (u32 item = threadIdx.x; item < GROUP * DIM;",
            to: "    for (u32 item = threadIdx.x; item < GROUP * DIM;",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "prefill computes before its tiles are loaded",
            file: "attention.cu",
            from: "        __syncthreads();\n        float scores[TILE_KEYS / 8][4];",
            to: "        float scores[TILE_KEYS / 8][4];",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "prefill loads the next tile over one still in use",
            file: "attention.cu",
            from: "        __syncthreads();\n        load_tile(a, keys,",
            to: "        load_tile(a, keys,",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "the store reads a row before the warp has written it",
            file: "attention.cu",
            from: "row[d] = source[at + d];\n    __syncwarp();",
            to: "row[d] = source[at + d];",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "decode looks one page ahead",
            file: "attention.cu",
            from: "table[position >> a.kv.page_shift], 0, kv_head);\n            const u8* v",
            to: "table[(position >> a.kv.page_shift) + 1], 0, kv_head);\n            const u8* v",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "decode leaves out the last position",
            file: "attention.cu",
            from: "const u32 length = a.positions[token] + 1;",
            to: "const u32 length = a.positions[token] + (a.positions[token] == 0);",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "prefill sees one position of the future",
            file: "attention.cu",
            from: "position <= last[j / 2] ?",
            to: "position <= last[j / 2] + 1 ?",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "splits are merged without their weights",
            file: "attention.cu",
            from: "value += a.partial[index * DIM + d] * weight;",
            to: "value += a.partial[index * DIM + d];",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "streams are merged with the weight of their neighbor",
            file: "attention.cu",
            from: "const float weight = __expf(ends[(s * GROUP + g) * 2] - top);",
            to: "const float weight = __expf(ends[((s ^ 1) * GROUP + g) * 2] - top);",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "the halves of a fragment are swapped",
            file: "attention.cu",
            from: "mma(scores[i], q, *(const u32*)key, *(const u32*)(key + 8));",
            to: "mma(scores[i], q, *(const u32*)(key + 8), *(const u32*)key);",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "values are loaded without being turned",
            file: "attention.cu",
            from: "values + (step * 16 + lane % 16) * PITCH + i * 8);",
            to: "values + (step * 16 + (lane ^ 1) % 16) * PITCH + i * 8);",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "a thread leaves before a barrier",
            file: "attention.cu",
            from: "    float q[GROUP][PART], acc[GROUP][PART], most[GROUP], sum[GROUP];",
            to: "    if (threadIdx.x == 127) return;\n    float q[GROUP][PART], acc[GROUP][PART], \
                 most[GROUP], sum[GROUP];",
        },
    ),
    (
        "a_few_cases_of_both_kernels_are_the_reference",
        Fault {
            name: "the scale of a slot is that of the slot before",
            file: "attention.cu",
            from: "value_scales[u] = ((const float*)(v + scales))[slot];",
            to: "value_scales[u] = ((const float*)(v + scales))[slot ^ 1];",
        },
    ),
    (
        "a_token_is_the_same_whatever_shares_its_step",
        Fault {
            name: "splits are merged in an order that depends on the step",
            file: "attention.cu",
            from: "    for (u32 d = threadIdx.x; d < DIM; d += THREADS) {\n        float total = \
                   0.0f, value = 0.0f;\n        for (u32 s = 0; s < splits; s++) {\n            \
                   const u64 index = head * a.splits + s;",
            to: "    for (u32 d = threadIdx.x; d < DIM; d += THREADS) {\n        float total = \
                 0.0f, value = 0.0f;\n        for (u32 s = 0; s < splits; s++) {\n            \
                 const u64 index = head * a.splits + (s + blockIdx.x) % splits;",
        },
    ),
    (
        "pages_beyond_four_gigabytes_are_reached",
        Fault {
            name: "the offset of a page has 32 bits",
            file: "prelude.cu",
            from: "kv.base + (i64)page * kv.page_bytes",
            to: "kv.base + (i64)(page * (u32)kv.page_bytes)",
        },
    ),
];

#[test]
fn every_planted_fault_in_attention_is_caught() {
    if case::plants_faults() {
        catch_all(FAULTS, &SMALL);
    }
}
