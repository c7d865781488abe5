//! Every instance of `Lanes` against plain arrays, bit for bit, and `exp` against 64-bit floats.

use half::{bf16, f16};
use proptest::prelude::*;

use super::{Kernel, LANES, Lanes, Line, Portable, exp};
use crate::cpu::isa::Isa;

/// Runs a vector body on every instruction set of this CPU and on plain arrays.
fn on_all<K: Kernel + Copy>(kernel: K) -> Vec<K::Output> {
    let simd = Isa::available()
        .into_iter()
        .filter(|isa| *isa != Isa::Scalar);
    simd.map(|isa| isa.run(kernel))
        .chain([Portable.run(kernel)])
        .collect()
}

#[derive(Clone, Copy)]
struct Floats {
    a: Line,
    b: Line,
    c: Line,
    count: usize,
}

impl Kernel for Floats {
    type Output = Vec<u32>;

    fn scalar(self) -> Vec<u32> {
        unreachable!("on_all leaves the scalar path out")
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) -> Vec<u32> {
        let (a, b, c) = (l.load(&self.a), l.load(&self.b), l.load(&self.c));
        let results = [
            l.splat(self.a[3]),
            l.add(a, b),
            l.sub(a, b),
            l.mul(a, b),
            l.div(a, b),
            l.mul_add(a, b, c),
            l.max(a, b),
            l.min(a, b),
            l.round(a),
            l.exp2_integral(l.round(l.min(l.max(a, l.splat(-126.0)), l.splat(127.0)))),
            l.keep_first(self.count, a, b),
            exp(l, a),
        ];
        let mut bits = vec![l.sum(a).to_bits(), l.max_lane(a).to_bits()];
        let mut line = [0.0; LANES];
        for result in results {
            l.store(result, &mut line);
            bits.extend(line.map(f32::to_bits));
        }
        let mut rows = vec![0.0; L::ROWS];
        let bytes = bytemuck::cast_slice(&self.a);
        let scaled = l.rows_scale(l.rows_f32(bytes), self.b[0]);
        let folded = l.rows_mul_add_splat(scaled, self.b[1], l.rows_f32(bytes));
        l.rows_store(l.rows_mul_add(scaled, folded, l.rows_zero()), &mut rows);
        bits.extend(rows[..8].iter().map(|x| x.to_bits()));
        bits
    }
}

#[derive(Clone, Copy)]
struct Narrow {
    words: [u16; LANES],
    wide: Line,
}

impl Kernel for Narrow {
    type Output = (Vec<u32>, [u16; LANES], [i8; LANES]);

    fn scalar(self) -> Self::Output {
        unreachable!("on_all leaves the scalar path out")
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) -> Self::Output {
        let mut bits = Vec::new();
        let mut line = [0.0; LANES];
        for wide in [l.load_f16(&self.words), l.load_bf16(&self.words)] {
            l.store(wide, &mut line);
            bits.extend(line.map(f32::to_bits));
        }
        let mut rows = vec![0.0; L::ROWS];
        let bytes = bytemuck::cast_slice(&self.words);
        for wide in [l.rows_f16(bytes), l.rows_bf16(bytes)] {
            l.rows_store(wide, &mut rows);
            bits.extend(rows[..8].iter().map(|x| x.to_bits()));
        }
        let (mut halves, mut small) = ([0; LANES], [0; LANES]);
        l.store_f16(l.load(&self.wide), &mut halves);
        let range = l.min(l.max(l.load(&self.wide), l.splat(-127.0)), l.splat(127.0));
        l.store_i8(range, &mut small);
        (bits, halves, small)
    }
}

#[derive(Clone, Copy)]
struct Transpose<'a>(&'a [Line; LANES]);

impl Kernel for Transpose<'_> {
    type Output = [Line; LANES];

    fn scalar(self) -> Self::Output {
        unreachable!("on_all leaves the scalar path out")
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) -> Self::Output {
        let mut out = [[0.0; LANES]; LANES];
        l.transpose(self.0, &mut out);
        out
    }
}

#[derive(Clone, Copy)]
struct Dots<'a> {
    weights: &'a [u8; 512],
    x: &'a [i8; 32],
    offset: i32,
}

impl Kernel for Dots<'_> {
    type Output = Vec<f32>;

    fn scalar(self) -> Self::Output {
        unreachable!("on_all leaves the scalar path out")
    }

    /// Row r's bytes are the same for each number of rows a tile has.
    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) -> Vec<f32> {
        let words: &[[i8; 4]] = self.x.as_chunks().0;
        let x_sum = self.x.iter().map(|x| i32::from(*x)).sum();
        let (mut dot4, mut dot8) = (l.dot4_zero(), l.dot8_zero());
        let mut tile = vec![0; 4 * L::ROWS];
        for (group, x) in words.iter().enumerate() {
            let x = i32::from_le_bytes(x.map(i8::cast_unsigned));
            for (row, bytes) in tile.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                bytes.copy_from_slice(&self.weights[row * 32 + group * 4..][..4]);
            }
            let nibbles = l.bytes(&tile);
            let half = if group < 4 {
                l.low(nibbles)
            } else {
                l.high(nibbles)
            };
            dot4 = l.dot4(dot4, half, x);
            if L::PLUS_128 {
                tile.iter_mut().for_each(|byte| *byte ^= 0x80);
            }
            dot8 = l.dot8(dot8, l.signed(&tile), x);
        }
        let mut out = vec![0.0; 2 * L::ROWS];
        l.rows_store(l.dot4_rows(dot4, self.offset), &mut out[..L::ROWS]);
        l.rows_store(l.dot8_rows(dot8, x_sum), &mut out[L::ROWS..]);
        [&out[..8], &out[L::ROWS..][..8]].concat()
    }
}

fn floats(range: std::ops::Range<f32>) -> impl Strategy<Value = Line> {
    prop::array::uniform16(range)
}

proptest! {
    #[test]
    fn float_operations_agree_with_plain_arrays(
        a in floats(-130.0..130.0), b in floats(-3.0..3.0),
        c in floats(-1e6..1e6), count in 0_usize..20,
    ) {
        let results = on_all(Floats { a, b, c, count });
        for result in &results {
            prop_assert_eq!(result, &results[results.len() - 1]);
        }
    }

    #[test]
    fn conversions_agree_with_plain_arrays(
        words in prop::array::uniform16(0_u16..0x7c00), sign in any::<u16>(),
        wide in floats(-1e5..1e5),
    ) {
        let words = words.map(|word| word | (sign & 0x8000));
        let results = on_all(Narrow { words, wide });
        for result in &results {
            prop_assert_eq!(result, &results[results.len() - 1]);
        }
    }

    #[test]
    fn dots_agree_with_plain_integers(
        weights in prop::collection::vec(any::<u8>(), 512),
        x in prop::collection::vec(-127_i8..=127, 32), offset in -9999_i32..9999,
    ) {
        let (weights, x) = (weights.try_into().unwrap(), x.try_into().unwrap());
        let expected: Vec<f32> = expected_dots(&weights, &x, offset);
        for result in on_all(Dots { weights: &weights, x: &x, offset }) {
            prop_assert_eq!(&result, &expected);
        }
    }
}

/// Independent of `Lanes`: 8 rows of nibble dots, then 8 rows of signed dots.
fn expected_dots(weights: &[u8; 512], x: &[i8; 32], offset: i32) -> Vec<f32> {
    let rows = weights.as_chunks::<32>().0;
    let dot = |row: &[u8; 32], weight: &dyn Fn(usize, u8) -> i32| -> i32 {
        row.iter()
            .zip(x)
            .enumerate()
            .map(|(k, (w, x))| weight(k, *w) * i32::from(*x))
            .sum()
    };
    let nibble = |k: usize, w: u8| i32::from(if k < 16 { w & 15 } else { w >> 4 });
    let signed = |_: usize, w: u8| i32::from(w.cast_signed());
    let four = rows[..8]
        .iter()
        .map(|row| (dot(row, &nibble) - offset) as f32);
    four.chain(rows[..8].iter().map(|row| dot(row, &signed) as f32))
        .collect()
}

#[test]
fn the_largest_dots_do_not_saturate() {
    for (weight, x) in [
        (0xff, 127),
        (0xff, -127),
        (0x80, 127),
        (0x80, -127),
        (0x7f, -127),
    ] {
        let (weights, x) = ([weight; 512], [x; 32]);
        let expected = expected_dots(&weights, &x, 0);
        for result in on_all(Dots {
            weights: &weights,
            x: &x,
            offset: 0,
        }) {
            assert_eq!(result, expected, "weight {weight:#x} x {}", x[0]);
        }
    }
}

#[test]
fn transpose_moves_every_element() {
    let rows: [Line; LANES] =
        std::array::from_fn(|i| std::array::from_fn(|j| (i * LANES + j) as f32));
    for out in on_all(Transpose(&rows)) {
        for i in 0..LANES {
            for j in 0..LANES {
                assert_eq!(out[i][j], rows[j][i]);
            }
        }
    }
}

#[test]
fn exp_is_within_two_units_of_the_last_place() {
    #[derive(Clone, Copy)]
    struct Exp(Line);
    impl Kernel for Exp {
        type Output = Line;
        fn scalar(self) -> Line {
            self.0.map(f32::exp)
        }
        #[inline(always)]
        fn simd<L: Lanes>(self, l: L) -> Line {
            let mut out = [0.0; LANES];
            l.store(exp(l, l.load(&self.0)), &mut out);
            out
        }
    }
    for start in 0..11_000 {
        let x: Line = std::array::from_fn(|i| -87.0 + (start * LANES + i) as f32 * 1e-3);
        for out in on_all(Exp(x)) {
            for (x, out) in x.iter().zip(out) {
                let expected = f64::from(x.min(88.0)).exp();
                let unit = f64::from(f32::EPSILON) * expected;
                assert!(
                    (f64::from(out) - expected).abs() <= 2.0 * unit,
                    "exp({x}) = {out}"
                );
            }
        }
    }
    for out in on_all(Exp([f32::NAN; LANES])) {
        assert!(out.iter().all(|x| x.is_nan()));
    }
    for out in on_all(Exp([f32::NEG_INFINITY; LANES])) {
        assert!(out.iter().all(|x| *x >= 0.0 && *x < 2e-38));
    }
}

#[test]
fn rounding_to_f16_ties_to_even_and_overflows_to_infinity() {
    let mut wide = [0.0; LANES];
    wide[..6].copy_from_slice(&[2049.0, 2051.0, 65519.9, 65520.0, -1e9, 6e-8]);
    for (_, halves, _) in on_all(Narrow {
        words: [0; LANES],
        wide,
    }) {
        assert_eq!(halves, wide.map(|x| f16::from_f32(x).to_bits()));
        assert_eq!(f16::from_bits(halves[0]).to_f32(), 2048.0);
        assert_eq!(f16::from_bits(halves[3]), f16::INFINITY);
    }
    assert_eq!(bf16::from_f32(1.0).to_bits(), 0x3f80);
}
