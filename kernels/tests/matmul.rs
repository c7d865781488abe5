//! Products against 64-bit floats over dequantized weights, and their promises: one result per
//! element for any number of rows and threads, alone or in a group.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::wildcard_enum_match_arm,
    reason = "test code with small numbers"
)]

use proptest::prelude::*;
use rootstock_kernels::{
    GgmlType, Input, Isa, KernelError, PackedMatrix, Product, Scratch, ThreadPool, dequantize,
    matmul, products, rms_norm, silu_mul,
};

/// A seeded stream of 64-bit words.
struct Words(u64);

impl Words {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ (self.0 >> 29)
    }

    /// A float in -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Random blocks whose 16-bit scales are ordinary numbers.
fn weights(ty: GgmlType, elements: usize, words: &mut Words) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..elements / ty.block_len() {
        let scales: &[usize] = match ty {
            GgmlType::F32 => {
                bytes.extend(words.float().to_le_bytes());
                continue;
            }
            GgmlType::Bf16 => {
                bytes.extend(half::bf16::from_f32(words.float()).to_le_bytes());
                continue;
            }
            GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
            GgmlType::Q6K => &[208],
            _ => &[0],
        };
        let start = bytes.len();
        bytes.extend((0..ty.block_bytes()).map(|_| words.next() as u8));
        for scale in scales {
            let value = half::f16::from_f32(words.float() * 0.1).to_le_bytes();
            bytes[start + scale..][..2].copy_from_slice(&value);
        }
    }
    bytes
}

/// Types whose scales the vector paths round to 16 bits.
fn rescaled(ty: GgmlType) -> bool {
    matches!(ty, GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K)
}

fn run(matrix: &PackedMatrix, x: &[f32], n: usize, threads: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n * matrix.rows()];
    let pool = ThreadPool::new(threads);
    matmul(&pool, matrix, x, n, &mut out, &mut Scratch::default()).unwrap();
    out
}

/// `x` as the vector paths see it beside quantized weights: 8 bits per 32 columns.
fn rounded(x: &[f32]) -> Vec<f32> {
    x.chunks(32)
        .flat_map(|x| {
            let step = x.iter().fold(0.0_f32, |max, x| max.max(x.abs())) / 127.0;
            let round = move |x: &f32| {
                if step > 0.0 {
                    (x / step).round() * step
                } else {
                    0.0
                }
            };
            x.iter().map(round).collect::<Vec<_>>()
        })
        .collect()
}

fn reference(dense: &[f32], x: &[f32], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let dots = |weigh: &dyn Fn(f64) -> f64| {
        x.chunks(cols)
            .flat_map(|x| dense.chunks(cols).map(move |row| (x, row)))
            .map(|(x, row)| {
                x.iter()
                    .zip(row)
                    .map(|(x, w)| weigh(f64::from(*x) * f64::from(*w)))
                    .sum()
            })
            .collect::<Vec<f64>>()
    };
    (dots(&|x| x), dots(&f64::abs))
}

fn check(ty: GgmlType, rows: usize, cols: usize, n: usize, seed: u64) {
    let mut words = Words(seed);
    let bytes = weights(ty, rows * cols, &mut words);
    let mut dense = vec![0.0; rows * cols];
    dequantize(ty, &bytes, &mut dense).unwrap();
    let x = words.floats(n * cols);
    for isa in Isa::available() {
        let matrix = PackedMatrix::pack(ty, rows, cols, &bytes, isa).unwrap();
        let rounds = isa != Isa::Scalar;
        let eight_bit = rounds && ty.block_len() > 1;
        let rescaled = rounds && rescaled(ty);
        let seen = if eight_bit { rounded(&x) } else { x.clone() };
        let (expected, sizes) = reference(&dense, &seen, cols);
        let out = run(&matrix, &x, n, 1);
        for (at, ((out, expected), size)) in out.iter().zip(&expected).zip(&sizes).enumerate() {
            // Rounding of the sums; and the rare half step that rounds the other way.
            let share = if eight_bit { 3e-3 } else { 2e-6 };
            // A part's scale and minimum, some 10 each, times what its columns sum to.
            let scales = if rescaled { 5e-3 * cols as f64 } else { 0.0 };
            let bound = share * size + scales + 1e-6;
            let error = (f64::from(*out) - expected).abs();
            assert!(
                error <= bound,
                "{} {ty:?} element {at}: {out} {expected}",
                isa.name()
            );
        }
        assert_eq!(
            run(&matrix, &x, n, 2),
            out,
            "{} {ty:?}: two threads",
            isa.name()
        );
        for (i, x) in x.chunks(cols).enumerate() {
            let alone = run(&matrix, x, 1, 1);
            assert_eq!(
                alone,
                out[i * rows..][..rows],
                "{} {ty:?}: row {i} alone",
                isa.name()
            );
        }
        let mut row = vec![0.0; cols];
        matrix.embed_row(rows - 1, &mut row).unwrap();
        for (found, expected) in row.iter().zip(&dense[(rows - 1) * cols..]) {
            // Two scales rounded to 11 bits; minima are up to 6.4.
            let rounding = (expected.abs() + 14.0) / 2048.0;
            let bound = if rescaled { rounding } else { 0.0 };
            assert!(
                (found - expected).abs() <= bound,
                "{ty:?} {found} {expected}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_shape_agrees_with_64_bit_floats_and_with_itself(
        type_index in 0..GgmlType::ALL.len(), rows in 1_usize..70, blocks in 1_usize..7,
        n in 1_usize..20, seed: u64,
    ) {
        let ty = GgmlType::ALL[type_index];
        check(ty, rows, blocks * ty.block_len().max(5), n, seed);
    }
}

#[test]
fn shapes_of_the_default_model_agree_across_panels_and_threads() {
    check(GgmlType::Q4_1, 192, 576, 67, 1);
    check(GgmlType::Q8_0, 130, 576, 9, 2);
}

#[test]
fn vector_paths_equal_each_other_bit_for_bit() {
    let (rows, cols, n) = (40, 256, 7);
    for ty in GgmlType::ALL {
        let mut words = Words(3);
        let bytes = weights(ty, rows * cols, &mut words);
        let x = words.floats(n * cols);
        let simd = Isa::available()
            .into_iter()
            .filter(|isa| *isa != Isa::Scalar);
        let outs: Vec<Vec<f32>> = simd
            .map(|isa| {
                run(
                    &PackedMatrix::pack(ty, rows, cols, &bytes, isa).unwrap(),
                    &x,
                    n,
                    1,
                )
            })
            .collect();
        assert!(outs.windows(2).all(|pair| pair[0] == pair[1]), "{ty:?}");
    }
}

/// Matrices of several types, whose groups want their input in 8 bits, as floats, or both.
fn several(types: &[GgmlType], cols: usize, isa: Isa) -> Vec<PackedMatrix> {
    let mut words = Words(4);
    (0..)
        .zip(types)
        .map(|(i, &ty)| {
            let rows = 24 + 9 * i;
            let bytes = weights(ty, rows * cols, &mut words);
            PackedMatrix::pack(ty, rows, cols, &bytes, isa).unwrap()
        })
        .collect()
}

#[test]
fn a_group_equals_its_products_one_by_one_on_the_prepared_input() {
    let cols = 64;
    let mut words = Words(6);
    let quantized = [GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q4_0];
    let mixed = [
        GgmlType::Q4_1,
        GgmlType::F16,
        GgmlType::Q8_0,
        GgmlType::Q4_0,
        GgmlType::F32,
    ];
    for isa in Isa::available() {
        for (types, n) in [
            (&quantized[..], 5),
            (&mixed, 5),
            (&quantized, 150),
            (&mixed, 150),
        ] {
            let matrices = several(types, cols, isa);
            let (x, up) = (words.floats(n * cols), words.floats(n * cols));
            let weight = words.floats(cols);
            let (mut normed, mut gated) = (vec![0.0; n * cols], x.clone());
            rms_norm(isa, &x, &weight, 1e-5, &mut normed).unwrap();
            silu_mul(isa, &mut gated, &up).unwrap();
            let inputs = [
                (Input::Rows(&x), &x),
                (
                    Input::Normed {
                        x: &x,
                        weight: &weight,
                        eps: 1e-5,
                    },
                    &normed,
                ),
                (Input::Gated { gate: &x, up: &up }, &gated),
            ];
            for (input, plain) in inputs {
                check_group(&matrices, input, (plain, n));
            }
        }
    }
}

/// The group's products with bias, some added to what is there, against one `matmul` each.
fn check_group(matrices: &[PackedMatrix], input: Input<'_>, (plain, n): (&[f32], usize)) {
    let mut words = Words(7);
    let biases: Vec<Option<Vec<f32>>> = matrices
        .iter()
        .enumerate()
        .map(|(i, matrix)| (i % 2 == 1).then(|| words.floats(matrix.rows())))
        .collect();
    let before: Vec<Vec<f32>> = matrices
        .iter()
        .map(|matrix| words.floats(n * matrix.rows()))
        .collect();
    let mut outs = before.clone();
    let mut group: Vec<Product<'_>> = matrices
        .iter()
        .zip(&biases)
        .zip(&mut outs)
        .enumerate()
        .map(|(i, ((matrix, bias), out))| Product {
            matrix,
            bias: bias.as_deref(),
            out,
            adds: i % 3 == 0,
        })
        .collect();
    let pool = ThreadPool::new(2);
    products(&pool, &mut group, input, n, &mut Scratch::default()).unwrap();
    for (i, matrix) in matrices.iter().enumerate() {
        let mut expected = run(matrix, plain, n, 1);
        for (row, before) in expected
            .chunks_mut(matrix.rows())
            .zip(before[i].chunks(matrix.rows()))
        {
            for (at, (value, before)) in row.iter_mut().zip(before).enumerate() {
                let sum = *value + biases[i].as_ref().map_or(0.0, |bias| bias[at]);
                *value = if i % 3 == 0 { before + sum } else { sum };
            }
        }
        assert_eq!(outs[i], expected, "{:?} {i}", matrix.isa());
    }
}

#[test]
fn norms_gates_and_biases_of_another_length_are_refused() {
    let matrix = PackedMatrix::pack(GgmlType::F32, 2, 3, &[0; 24], Isa::detect()).unwrap();
    let call = |input: Input<'_>, bias: usize| {
        let (bias, mut out) = (vec![0.0; bias], vec![0.0; 4]);
        let product = Product {
            matrix: &matrix,
            bias: Some(&bias),
            out: &mut out,
            adds: false,
        };
        let pool = ThreadPool::new(1);
        products(&pool, &mut [product], input, 2, &mut Scratch::default())
    };
    let x = [0.5; 6];
    let normed = |weight| Input::Normed {
        x: &x,
        weight,
        eps: 1e-5,
    };
    assert!(call(normed(&x[..3]), 2).is_ok());
    assert!(call(normed(&x[..2]), 2).is_err());
    assert!(call(normed(&x[..3]), 3).is_err());
    let gated = |up| Input::Gated { gate: &x, up };
    assert!(call(gated(&x), 2).is_ok());
    assert!(call(gated(&x[..5]), 2).is_err());
}

#[test]
fn matrices_that_do_not_fit_their_bytes_are_refused_with_the_numbers() {
    let pack = |ty, rows, cols, len: usize| {
        PackedMatrix::pack(ty, rows, cols, &vec![0; len], Isa::detect())
            .unwrap_err()
            .to_string()
    };
    let ragged = pack(GgmlType::Q4_1, 4, 577, 100);
    assert!(ragged.contains("577") && ragged.contains("32"), "{ragged}");
    let short = pack(GgmlType::Q8_0, 4, 64, 4 * 68 - 1);
    assert!(short.contains("272") && short.contains("271"), "{short}");
    let huge = pack(GgmlType::F32, usize::MAX / 2, 64, 0);
    assert!(huge.contains("overflows"), "{huge}");
    assert!(pack(GgmlType::F32, 0, 64, 0).contains("0 x 64"));
    assert!(pack(GgmlType::F32, 64, 0, 0).contains("64 x 0"));
}

#[test]
fn inputs_of_another_length_are_refused() {
    let matrix = PackedMatrix::pack(GgmlType::F32, 2, 3, &[0; 24], Isa::detect()).unwrap();
    let (pool, mut scratch) = (ThreadPool::new(1), Scratch::default());
    let mut call = |x: usize, n, out: usize| {
        matmul(
            &pool,
            &matrix,
            &vec![0.0; x],
            n,
            &mut vec![0.0; out],
            &mut scratch,
        )
    };
    assert!(call(6, 2, 4).is_ok());
    assert!(call(0, 0, 0).is_ok());
    assert!(matches!(
        call(5, 2, 4),
        Err(KernelError::BufferLength {
            wanted: 6,
            found: 5,
            ..
        })
    ));
    assert!(matches!(
        call(6, 2, 5),
        Err(KernelError::BufferLength {
            wanted: 4,
            found: 5,
            ..
        })
    ));
    assert!(matrix.embed_row(2, &mut [0.0; 3]).is_err());
    assert!(matrix.embed_row(1, &mut [0.0; 2]).is_err());
}

#[test]
fn an_input_that_is_no_number_does_not_look_like_one() {
    for isa in Isa::available() {
        for ty in GgmlType::ALL {
            let bytes = weights(ty, 32 * 256, &mut Words(5));
            let matrix = PackedMatrix::pack(ty, 32, 256, &bytes, isa).unwrap();
            let mut x = vec![1.0; 512];
            x[3] = f32::NAN;
            let out = run(&matrix, &x, 2, 1);
            assert!(
                out[..32].iter().all(|x| x.is_nan()),
                "{} {ty:?}",
                isa.name()
            );
            assert!(
                out[32..].iter().all(|x| x.is_finite()),
                "{} {ty:?}",
                isa.name()
            );
        }
    }
}
