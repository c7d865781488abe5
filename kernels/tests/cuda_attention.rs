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
use mock::{Fault, Variant, fails_with, on_mock};
use rootstock_kernels::cuda::{Device, KvFormat, Numerics};

const ALL: Variant = Variant {
    head_dims: &[16, 64, 80, 96, 128, 256],
    kv_types: &[0, 1, 2, 3, 4],
    sanitized: true,
    fault: None,
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

/// Runs cases and prints the largest error by type; panics beyond the bounds.
fn run_cases(numerics: Numerics, seeds: std::ops::Range<u64>, dims: &[u32], formats: &[KvFormat]) {
    let device = Device::open(0).unwrap();
    let mut largest = [(0.0_f32, 0.0_f32, 0.0_f32, 0_u32); 5];
    for seed in seeds {
        let mut rng = Rng(seed);
        let format = formats[rng.below(formats.len() as u32) as usize];
        let dim = dims[rng.below(dims.len() as u32) as usize];
        let case = Case::random(&mut rng, dim, format, numerics);
        let errors = case.run(&device, &mut rng);
        let tiled = numerics == Numerics::Fast && format != KvFormat::F32;
        let bound = if tiled {
            prefill_bound(format)
        } else {
            DECODE_BOUND
        };
        // Comparisons that a NaN fails.
        assert!(
            errors.attention <= bound,
            "seed {seed}: {errors:?} {case:?}"
        );
        assert!(errors.queries <= 1e-5, "seed {seed}: {errors:?} {case:?}");
        assert!(
            errors.stored <= case::store_bound(format),
            "seed {seed}: {errors:?} {case:?}"
        );
        let slot = &mut largest[KvFormat::ALL.iter().position(|f| *f == format).unwrap()];
        slot.0 = slot.0.max(errors.attention);
        slot.1 = slot.1.max(errors.queries);
        slot.2 = slot.2.max(errors.stored);
        slot.3 += 1;
    }
    println!();
    for (format, (attention, queries, stored, cases)) in KvFormat::ALL.iter().zip(largest) {
        if cases == 0 {
            continue;
        }
        println!(
            "    {numerics:?} {format:?}: {cases} cases, attention {attention:.1e}, rotated \
             queries {queries:.1e}, stored {stored:.1e}"
        );
    }
}

#[test]
fn decode_over_random_shapes_is_the_reference() {
    if on_mock("decode_over_random_shapes_is_the_reference", &ALL) {
        run_cases(
            Numerics::Invariant,
            0..cases(),
            ALL.head_dims,
            &KvFormat::ALL,
        );
    }
}

#[test]
fn prefill_over_random_shapes_is_the_reference() {
    if on_mock("prefill_over_random_shapes_is_the_reference", &ALL) {
        run_cases(
            Numerics::Fast,
            1000..1000 + cases(),
            ALL.head_dims,
            &KvFormat::ALL,
        );
    }
}

/// What planted faults are looked for with.
#[test]
fn a_few_cases_of_both_kernels_are_the_reference() {
    if on_mock("a_few_cases_of_both_kernels_are_the_reference", &SMALL) {
        let formats = [KvFormat::F16, KvFormat::Int8];
        run_cases(Numerics::Invariant, 0..12, SMALL.head_dims, &formats);
        run_cases(Numerics::Fast, 20..32, SMALL.head_dims, &formats);
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
    if !case::plants_faults() {
        return;
    }
    let only = std::env::var("ONLY_FAULT").unwrap_or_default();
    for (test, fault) in FAULTS
        .iter()
        .filter(|(_, fault)| fault.name.contains(&only))
    {
        let variant = Variant {
            fault: Some(*fault),
            ..SMALL
        };
        // A missing barrier shows in some orders of the warps.
        let mut caught = false;
        for seed in ["0", "3", "5"] {
            match fails_with(test, &variant, &[("EMULATION_SEED", seed)]) {
                Some(failed) => caught |= failed,
                None => return,
            }
            if caught {
                break;
            }
        }
        assert!(caught, "not caught: {}", fault.name);
        println!("    caught: {}", fault.name);
    }
}
