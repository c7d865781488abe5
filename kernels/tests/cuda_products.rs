//! Products with weight matrices, emulated, through the Rust host path: rows, tiles and the
//! library, with floats and with weights in blocks, over random shapes against sums in 64 bits,
//! equal bits whatever the number of rows, and planted faults.
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
use mock::{Fault, Mock, Outcome, Variant, catch_all, on_mock, outcome_with};
use rootstock_kernels::cuda::{
    Batch, BatchRows, Device, DeviceBuffer, DevicePages, GeneralKernels, KvFormat, Numerics,
    PageShape, ProductCall, ProductLibrary, Stream,
};
use rootstock_kernels::{GgmlType, KvRow};
use rootstock_memory::{KvDtype, KvLayout, LayoutOrder, LayoutSpec, PageId};
use weights::{random_blocks, rounded};

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
    library: ProductLibrary,
}

impl Rig {
    fn new() -> Self {
        let device = Device::open(0).unwrap();
        Self {
            stream: Stream::new(&device).unwrap(),
            kernels: GeneralKernels::load(&device, None).unwrap(),
            library: ProductLibrary::open(&device).unwrap(),
            device,
        }
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

/// What computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Rows,
    Tiles,
    Library,
}

#[test]
fn products_over_random_shapes_are_the_reference() {
    if !on_mock("products_over_random_shapes_are_the_reference", &GENERAL) {
        return;
    }
    let rig = Rig::new();
    println!();
    for (ty, by, bound) in [
        (GgmlType::F32, By::Rows, 5e-6),
        (GgmlType::F16, By::Rows, 5e-6),
        (GgmlType::Bf16, By::Rows, 5e-6),
        (GgmlType::Q4_0, By::Rows, 5e-6),
        (GgmlType::Q4_1, By::Rows, 5e-6),
        (GgmlType::Q5_0, By::Rows, 5e-6),
        (GgmlType::Q5_1, By::Rows, 5e-6),
        (GgmlType::Q8_0, By::Rows, 5e-6),
        (GgmlType::Q4K, By::Rows, 5e-6),
        (GgmlType::Q5K, By::Rows, 5e-6),
        (GgmlType::Q6K, By::Rows, 5e-6),
        (GgmlType::Iq4Nl, By::Rows, 5e-6),
        // Here x is rounded to the weights' type.
        (GgmlType::F16, By::Tiles, 2e-3),
        (GgmlType::Bf16, By::Tiles, 2e-2),
        // And weights to F16.
        (GgmlType::Q4_0, By::Tiles, 4e-3),
        (GgmlType::Q4_1, By::Tiles, 4e-3),
        (GgmlType::Q5_0, By::Tiles, 4e-3),
        (GgmlType::Q5_1, By::Tiles, 4e-3),
        (GgmlType::Q8_0, By::Tiles, 4e-3),
        (GgmlType::Q4K, By::Tiles, 4e-3),
        (GgmlType::Q5K, By::Tiles, 4e-3),
        (GgmlType::Q6K, By::Tiles, 4e-3),
        (GgmlType::Iq4Nl, By::Tiles, 4e-3),
        (GgmlType::F16, By::Library, 2e-3),
        (GgmlType::Bf16, By::Library, 2e-2),
    ] {
        let before = Mock::new().report().products;
        let mut most = 0.0_f32;
        for seed in 0..cases() {
            let off = product_error(&rig, &mut Rng(seed), ty, by);
            // A comparison that a NaN fails.
            assert!(off <= bound, "seed {seed}: {off} for {ty:?}, {by:?}");
            most = most.max(off);
        }
        let given = Mock::new().report().products - before;
        assert_eq!(given, if by == By::Library { cases() } else { 0 });
        println!("    | {by:?} | {ty:?} | {} | {most:.1e} |", cases());
    }
}

/// The largest error of one random product, in units of the root of its columns.
fn product_error(rig: &Rig, rng: &mut Rng, ty: GgmlType, by: By) -> f32 {
    let (n, numerics) = match by {
        By::Tiles => (rng.pick(&[17, 33, 64, 65]), Numerics::Fast),
        By::Library => (rng.pick(&[32, 33, 64, 65]), Numerics::Fast),
        By::Rows => (rng.pick(&[1, 2, 7, 8, 9, 16, 17]), Numerics::Invariant),
    };
    let block = ty.block_len() as u32;
    let cols = match block {
        1 => 8 * (1 + rng.below(20)),
        32 => 32 * (1 + rng.below(40)),
        _ => block * (1 + rng.below(6)),
    };
    let rows = 1 + rng.below(90);
    let (bytes, weights) = if block == 1 {
        rounded(&rng.normals((rows * cols) as usize), ty)
    } else {
        random_blocks(rng, (rows * cols) as usize, ty)
    };
    let x = rng.normals((n * cols) as usize);
    let bias = rng.normals(rows as usize);
    let before = rng.normals((n * rows) as usize);
    let (with_bias, add) = (rng.below(2) == 0, rng.below(2) == 0);
    let matrix = rig.kernels.matrix(&rig.stream, ty, rows, cols, &bytes);
    let matrix = matrix.unwrap();
    let (x_there, bias_there) = (rig.up(&x), rig.up(&bias));
    let mut out = rig.up(&before);
    let call = ProductCall {
        matrix: &matrix,
        x: &x_there,
        n,
        bias: with_bias.then_some(&bias_there),
        add,
        numerics,
        library: (by != By::Tiles).then_some(&rig.library),
    };
    rig.kernels.product(&rig.stream, &call, &mut out).unwrap();
    let mut expected = Vec::new();
    for (token, x) in x.chunks(cols as usize).enumerate() {
        for (row, weights) in weights.chunks(cols as usize).enumerate() {
            let pairs = weights.iter().zip(x);
            let mut sum: f64 = pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            sum += if with_bias { f64::from(bias[row]) } else { 0.0 };
            sum += if add {
                f64::from(before[token * rows as usize + row])
            } else {
                0.0
            };
            expected.push(sum as f32);
        }
    }
    largest(&expected, &rig.down(&out)) / (cols as f32).sqrt()
}

#[test]
fn a_product_has_the_same_bits_whatever_the_number_of_rows() {
    if !on_mock(
        "a_product_has_the_same_bits_whatever_the_number_of_rows",
        &GENERAL,
    ) {
        return;
    }
    let rig = Rig::new();
    let rng = &mut Rng(7);
    let (rows, cols) = (40, 72);
    let (bytes, _) = rounded(&rng.normals(rows * cols), GgmlType::F16);
    let matrix = rig
        .kernels
        .matrix(&rig.stream, GgmlType::F16, rows as u32, cols as u32, &bytes)
        .unwrap();
    let x = rng.normals(37 * cols);
    let product = |x: &[f32]| {
        let there = rig.up(x);
        let n = x.len() / cols;
        let mut out = rig.room(n * rows);
        let call = ProductCall {
            matrix: &matrix,
            x: &there,
            n: n as u32,
            bias: None,
            add: false,
            numerics: Numerics::Invariant,
            library: Some(&rig.library),
        };
        rig.kernels.product(&rig.stream, &call, &mut out).unwrap();
        rig.down(&out)
    };
    let whole = product(&x);
    for (row, x) in x.chunks(cols).enumerate() {
        assert!(
            whole[row * rows..(row + 1) * rows] == product(x),
            "row {row}"
        );
    }
}

#[test]
fn blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit() {
    if !on_mock(
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
        &GENERAL,
    ) {
        return;
    }
    let rig = Rig::new();
    let layout = KvLayout::new(LayoutSpec {
        order: LayoutOrder::PageFirst,
        page_tokens: 16,
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        dtype: KvDtype::F16,
    });
    let shape = PageShape::new(layout.unwrap(), KvFormat::F16).unwrap();
    let pages = DevicePages::new(&rig.device, shape, 2).unwrap();
    for seed in 0..BLOCKS.len() as u64 * cases() {
        let rng = &mut Rng(seed);
        let ty = BLOCKS[seed as usize % BLOCKS.len()];
        let (vocab, width) = (20, ty.block_len() as u32 * (1 + rng.below(9)));
        let (bytes, values) = random_blocks(rng, (vocab * width) as usize, ty);
        let table = rig.kernels.matrix(&rig.stream, ty, vocab, width, &bytes);
        let table = table.unwrap();
        assert_eq!(table.bytes(), bytes.len(), "{ty:?}");
        let tokens: Vec<u32> = (0..5).map(|_| rng.below(vocab)).collect();
        let row = KvRow {
            first_pos: 0,
            len: 5,
            pages: &[PageId::new(1)],
        };
        let given = BatchRows {
            tokens: &tokens,
            rows: &[row],
            picks: &[],
            feed: &[],
        };
        let mut batch = Batch::new(&rig.device, Numerics::Fast).unwrap();
        batch.set(&rig.stream, &pages, &given).unwrap();
        let mut out = rig.room(5 * width as usize);
        rig.kernels
            .embed(&rig.stream, &batch, &table, &mut out)
            .unwrap();
        let row = |at: u32| values[(at * width) as usize..((at + 1) * width) as usize].to_vec();
        let expected: Vec<f32> = tokens.iter().flat_map(|token| row(*token)).collect();
        assert!(rig.down(&out) == expected, "seed {seed} {ty:?}");
    }
    println!(
        "\n    | take_apart, embed_blocks | nine formats | {} each | equal |",
        cases()
    );
}

/// Formats whose blocks stay as they are.
const BLOCKS: [GgmlType; 9] = [
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q4K,
    GgmlType::Q5K,
    GgmlType::Q6K,
    GgmlType::Iq4Nl,
];

/// The tests above under the sanitizers, with fewer cases: they cost ten times as much there.
#[test]
fn no_product_reads_or_writes_beyond_its_memory() {
    let checked = Variant {
        sanitized: true,
        ..GENERAL
    };
    for test in [
        "products_over_random_shapes_are_the_reference",
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
    ] {
        match outcome_with(test, &checked, &[("EMULATED_CASES", "2")]) {
            Outcome::NotRun => return,
            outcome => assert_eq!(outcome, Outcome::Passed, "{test}"),
        }
    }
}

#[test]
fn a_library_that_lacks_a_function_is_not_used() {
    const MISSING: Fault = Fault {
        name: "a library without one of its functions",
        file: "blas.cc",
        from: "CALL(cublasLtMatmulPreferenceCreate,",
        to: "CALL(cublasLtMatmulPreferenceCreate_not_there,",
    };
    let test = "a_library_that_lacks_a_function_is_not_used";
    if std::env::var_os("WITHOUT_FUNCTION").is_none() {
        let variant = Variant {
            fault: Some(MISSING),
            ..GENERAL
        };
        let outcome = outcome_with(test, &variant, &[("WITHOUT_FUNCTION", "1")]);
        assert!(!matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        return;
    }
    let error = ProductLibrary::open(&Device::open(0).unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no cuBLASLt: it has no cublasLtMatmulPreferenceCreate"
    );
}

const FAULTS: &[(&str, Fault)] = &[
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "a tile is overwritten while others still read it",
            file: "general.cu",
            from: "        __syncthreads();\n        for (u32 item = threadIdx.x; item < SIDE * ",
            to: "        for (u32 item = threadIdx.x; item < SIDE * ",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "the last rows of weights are read past their end",
            file: "general.cu",
            from: "const u64 which = min(row + r, a.rows - 1);",
            to: "const u64 which = row + r;",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "rows and columns of the result are exchanged",
            file: "general.cu",
            from: "row + i * 8 + 2 * t + j % 2;",
            to: "row + i * 8 + 2 * t + j / 2;",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "inputs of the library are rounded to the other type",
            file: "general.cu",
            from: "words[i] = a.type == 1 ? pack",
            to: "words[i] = a.type == 2 ? pack",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "the second run of a unit is multiplied by its neighbors",
            file: "general.cu",
            from: "column + run * F::GAP, x);",
            to: "column + run * 8, x);",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "a block has the head of the next one",
            file: "general.cu",
            from: "run_of<TYPE>(it, heads + which * F::HEAD, unit, 1, weights[r] + 8);",
            to: "run_of<TYPE>(it, heads + (which + 1) * F::HEAD, unit, 1, weights[r] + 8);",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "the units of a row end one early",
            file: "general.cu",
            from: "units = a.cols / 16;",
            to: "units = a.cols / 16 - 1;",
        },
    ),
    (
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
        Fault {
            name: "the high bits of Q6_K are those of the other half",
            file: "blocks.cu",
            from: "unit / 8 * 32 + unit % 4 * 8);",
            to: "unit % 4 * 8);",
        },
    ),
    (
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
        Fault {
            name: "the fifth bits of Q5_0 and Q5_1 are those of the other run",
            file: "blocks.cu",
            from: "(TYPE == 6 ? 2 : 4) + run * 2 + unit]",
            to: "(TYPE == 6 ? 2 : 4) + (1 - run) * 2 + unit]",
        },
    ),
    (
        "products_over_random_shapes_are_the_reference",
        Fault {
            name: "the fifth bits of Q5_K are those of the neighboring part",
            file: "blocks.cu",
            from: "(byte_of(it.high, j) >> part & 1) << 4",
            to: "(byte_of(it.high, j) >> (part ^ 1) & 1) << 4",
        },
    ),
    (
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
        Fault {
            name: "the values of IQ4_NL are counted without their sign",
            file: "blocks.cu",
            from: "return small_signed((u32)(values >>",
            to: "return small((u32)(values >>",
        },
    ),
    (
        "blocks_are_kept_in_their_bytes_and_embedded_to_the_last_bit",
        Fault {
            name: "heads are taken from behind the body where they are before it",
            file: "blocks.cu",
            from: "a.head_first ? at < head : at >= a.body",
            to: "at >= a.body",
        },
    ),
];

#[test]
fn every_planted_fault_in_products_is_caught() {
    if case::plants_faults() {
        catch_all(FAULTS, &GENERAL);
    }
}
