//! Vectors as arrays: what the intrinsics of the other instances are compared with.

use half::{bf16, f16};

use super::{Kernel, LANES, Lanes, Line};

/// 16 lanes in plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

type Rows<T> = [T; LANES];

fn each(f: impl Fn(usize) -> f32) -> Line {
    std::array::from_fn(f)
}

fn signed_bytes(x: i32) -> [i32; 4] {
    x.to_le_bytes().map(|byte| i32::from(byte.cast_signed()))
}

impl Lanes for Portable {
    type F = Line;
    type R = Line;
    type B = Rows<[u8; 4]>;
    type S = Rows<[u8; 4]>;
    type D4 = Rows<i32>;
    type D8 = Rows<i32>;

    const ROWS: usize = LANES;
    const ROOMY: bool = true;
    const PLUS_128: bool = true;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.simd(self)
    }

    fn splat(self, x: f32) -> Line {
        [x; LANES]
    }
    fn load(self, x: &Line) -> Line {
        *x
    }
    fn load_f16(self, x: &[u16; LANES]) -> Line {
        x.map(|x| f16::from_bits(x).to_f32())
    }
    fn load_bf16(self, x: &[u16; LANES]) -> Line {
        x.map(|x| bf16::from_bits(x).to_f32())
    }
    fn store(self, x: Line, out: &mut Line) {
        *out = x;
    }
    fn store_f16(self, x: Line, out: &mut [u16; LANES]) {
        *out = x.map(|x| f16::from_f32(x).to_bits());
    }
    fn add(self, a: Line, b: Line) -> Line {
        each(|i| a[i] + b[i])
    }
    fn sub(self, a: Line, b: Line) -> Line {
        each(|i| a[i] - b[i])
    }
    fn mul(self, a: Line, b: Line) -> Line {
        each(|i| a[i] * b[i])
    }
    fn div(self, a: Line, b: Line) -> Line {
        each(|i| a[i] / b[i])
    }
    fn mul_add(self, a: Line, b: Line, c: Line) -> Line {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    fn max(self, a: Line, b: Line) -> Line {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    fn min(self, a: Line, b: Line) -> Line {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    fn round(self, x: Line) -> Line {
        x.map(f32::round_ties_even)
    }
    fn exp2_integral(self, x: Line) -> Line {
        x.map(|x| f32::from_bits(((x as i32 + 127) << 23).cast_unsigned()))
    }
    fn keep_first(self, count: usize, x: Line, rest: Line) -> Line {
        each(|i| if i < count { x[i] } else { rest[i] })
    }
    fn sum(self, x: Line) -> f32 {
        let mut x = x;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }
    fn max_lane(self, x: Line) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    fn transpose(self, rows: &[Line; LANES], out: &mut [Line; LANES]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = each(|j| rows[j][i]);
        }
    }
    fn store_i8(self, x: Line, out: &mut [i8; LANES]) {
        *out = x.map(|x| x.round_ties_even() as i8);
    }
    fn prefetch(self, _bytes: &[u8], _ahead: usize) {}

    fn rows_zero(self) -> Line {
        [0.0; LANES]
    }
    fn rows_f32(self, bytes: &[u8]) -> Line {
        let words = bytes.as_chunks::<4>().0;
        each(|i| f32::from_le_bytes(words[i]))
    }
    fn rows_f16(self, bytes: &[u8]) -> Line {
        let words = bytes.as_chunks::<2>().0;
        each(|i| f16::from_le_bytes(words[i]).to_f32())
    }
    fn rows_bf16(self, bytes: &[u8]) -> Line {
        let words = bytes.as_chunks::<2>().0;
        each(|i| bf16::from_le_bytes(words[i]).to_f32())
    }
    fn rows_scale(self, a: Line, b: f32) -> Line {
        a.map(|a| a * b)
    }
    fn rows_mul_add(self, a: Line, b: Line, c: Line) -> Line {
        self.mul_add(a, b, c)
    }
    fn rows_mul_add_splat(self, a: Line, b: f32, c: Line) -> Line {
        each(|i| a[i].mul_add(b, c[i]))
    }
    fn rows_store(self, x: Line, out: &mut [f32]) {
        out.copy_from_slice(&x);
    }

    fn bytes(self, bytes: &[u8]) -> Self::B {
        let words = bytes.as_chunks::<4>().0;
        std::array::from_fn(|i| words[i])
    }
    fn low(self, x: Self::B) -> Self::B {
        x.map(|x| x.map(|x| x & 15))
    }
    fn high(self, x: Self::B) -> Self::B {
        x.map(|x| x.map(|x| x >> 4))
    }
    fn dot4_zero(self) -> Self::D4 {
        [0; LANES]
    }
    fn dot4(self, sum: Self::D4, weights: Self::B, x: i32) -> Self::D4 {
        let x = signed_bytes(x);
        std::array::from_fn(|i| {
            sum[i]
                + weights[i]
                    .iter()
                    .zip(x)
                    .map(|(w, x)| i32::from(*w) * x)
                    .sum::<i32>()
        })
    }
    fn dot4_rows(self, sum: Self::D4, offset: i32) -> Line {
        each(|i| (sum[i] - offset) as f32)
    }
    fn signed(self, bytes: &[u8]) -> Self::S {
        self.bytes(bytes)
    }
    fn dot8_zero(self) -> Self::D8 {
        [0; LANES]
    }
    fn dot8(self, sum: Self::D8, weights: Self::S, x: i32) -> Self::D8 {
        self.dot4(sum, weights, x)
    }
    fn dot8_rows(self, sum: Self::D8, x_sum: i32) -> Line {
        each(|i| (sum[i] - 128 * x_sum) as f32)
    }
    fn dot8_less(self, sum: Self::D8, offset: i32) -> Line {
        each(|i| (sum[i] - offset) as f32)
    }
    fn unsigned(self, x: Self::B) -> Self::S {
        x
    }
    fn lookup(self, table: &[i8; 16], x: Self::B) -> Self::S {
        x.map(|x| x.map(|x| table[usize::from(x)].cast_unsigned() ^ 128))
    }
    fn with_fifth(self, nibbles: Self::B, bits: Self::B, group: usize) -> Self::B {
        std::array::from_fn(|row| {
            std::array::from_fn(|i| nibbles[row][i] | (bits[row][i] >> group & 1) << 4)
        })
    }
}
