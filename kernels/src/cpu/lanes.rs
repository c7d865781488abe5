//! Vectors of 16 floats, so that a kernel is written once for all instruction sets.
//!
//! A [`Kernel`] has two bodies: a reference in plain Rust, and one over [`Lanes`], which is
//! instantiated for AVX2 (two registers a vector), AVX-512 (one register) and, in tests, plain
//! arrays. All instances compute the same operations in the same order, so they agree bit for
//! bit; the tests compare the instances with each other and with the reference.
//!
//! Bodies over `Lanes` are `#[inline(always)]` and use no closures: they must be inlined into
//! the one function of each instruction set that has its target features.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod portable;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use portable::Portable;

use super::isa::Isa;

/// Floats of a vector.
pub(crate) const LANES: usize = 16;

/// The memory of a vector.
pub(crate) type Line = [f32; LANES];

/// Arithmetic on vectors of 16 floats and on the rows of a weight tile.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// 16 floats.
    type F: Copy;
    /// One float per row of a tile.
    type R: Copy;
    /// 4 bytes per row of a tile.
    type B: Copy;
    /// 4 signed bytes per row of a tile, prepared for [`Lanes::dot8`].
    type S: Copy;
    /// Sum of up to 32 products of a 4-bit and an 8-bit number per row.
    type D4: Copy;
    /// Sum of products of two 8-bit numbers per row.
    type D8: Copy;

    /// Rows of a weight tile.
    const ROWS: usize;
    /// Whether there are registers for some 16 vectors under way.
    const ROOMY: bool;

    /// Runs a kernel where this instruction set's features are on.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &Line) -> Self::F;
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F;
    fn store(self, x: Self::F, out: &mut Line);
    /// Rounds to nearest, ties to even.
    fn store_f16(self, x: Self::F, out: &mut [u16; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` when either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` when either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// `2^x` for integral `x` in -126..=127.
    fn exp2_integral(self, x: Self::F) -> Self::F;
    /// The lanes below `count` of `x`, the others of `rest`.
    fn keep_first(self, count: usize, x: Self::F, rest: Self::F) -> Self::F;
    /// Sum of the lanes, halves first: `i + (i + 8)`, then 4, 2, 1.
    fn sum(self, x: Self::F) -> f32;
    /// Largest of the lanes; not defined with NaN.
    fn max_lane(self, x: Self::F) -> f32;
    /// `out[i][j] = rows[j][i]`.
    fn transpose(self, rows: &[Line; LANES], out: &mut [Line; LANES]);
    /// Rounds to nearest and narrows; lanes are within -127..=127.
    fn store_i8(self, x: Self::F, out: &mut [i8; LANES]);
    /// Asks for the cache line `ahead` bytes past the start of `bytes`; no access, any distance.
    fn prefetch(self, bytes: &[u8], ahead: usize);

    fn rows_zero(self) -> Self::R;
    /// Little-endian floats: `4 * ROWS` bytes.
    fn rows_f32(self, bytes: &[u8]) -> Self::R;
    /// Little-endian 16-bit floats: `2 * ROWS` bytes.
    fn rows_f16(self, bytes: &[u8]) -> Self::R;
    /// Little-endian brain floats: `2 * ROWS` bytes.
    fn rows_bf16(self, bytes: &[u8]) -> Self::R;
    fn rows_scale(self, a: Self::R, b: f32) -> Self::R;
    /// `a * b + c`, rounded once.
    fn rows_mul_add(self, a: Self::R, b: Self::R, c: Self::R) -> Self::R;
    /// `a * b + c`, rounded once.
    fn rows_mul_add_splat(self, a: Self::R, b: f32, c: Self::R) -> Self::R;
    /// Writes the rows; `out` holds `ROWS` floats.
    fn rows_store(self, x: Self::R, out: &mut [f32]);

    /// `4 * ROWS` bytes.
    fn bytes(self, bytes: &[u8]) -> Self::B;
    /// The low 4 bits of each byte.
    fn low(self, x: Self::B) -> Self::B;
    /// The high 4 bits of each byte.
    fn high(self, x: Self::B) -> Self::B;
    fn dot4_zero(self) -> Self::D4;
    /// Adds, per row, the products of 4 bytes below 16 and the 4 signed bytes of `x`; at most 8
    /// such sums of `|x| <= 127` fit.
    fn dot4(self, sum: Self::D4, weights: Self::B, x: i32) -> Self::D4;
    /// The sums less `offset`, as floats.
    fn dot4_rows(self, sum: Self::D4, offset: i32) -> Self::R;
    /// Signed bytes from a tile in this instruction set's own form: see [`Lanes::PLUS_128`].
    fn signed(self, bytes: &[u8]) -> Self::S;
    /// Bytes below 128, prepared for [`Lanes::dot8`]; their sums go through
    /// [`Lanes::dot8_less`].
    fn unsigned(self, x: Self::B) -> Self::S;
    /// Signed bytes of a table, by indices below 16.
    fn lookup(self, table: &[i8; 16], x: Self::B) -> Self::S;
    /// Sets bit 4 of byte `i` where bit `8 * i + group` is set in the word of the row.
    fn with_fifth(self, nibbles: Self::B, bits: Self::B, group: usize) -> Self::B;
    fn dot8_zero(self) -> Self::D8;
    /// Adds, per row, the products of 4 signed bytes and the 4 signed bytes of `x`.
    fn dot8(self, sum: Self::D8, weights: Self::S, x: i32) -> Self::D8;
    /// The sums of signed bytes as floats, given the sum of all `x` that went in.
    fn dot8_rows(self, sum: Self::D8, x_sum: i32) -> Self::R;
    /// The sums of unsigned bytes less `offset`, as floats.
    fn dot8_less(self, sum: Self::D8, offset: i32) -> Self::R;

    /// Whether signed tile bytes are stored with 128 added, as unsigned ones.
    const PLUS_128: bool;
}

/// A piece of work with a reference body and a vector body.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;
    /// The reference, in plain Rust.
    fn scalar(self) -> Self::Output;
    /// The same work on vectors; `#[inline(always)]`.
    fn simd<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs kernels inside the body of another one, with the same instructions.
pub(crate) trait Inner: Copy {
    fn inner<K: Kernel>(self, kernel: K) -> K::Output;
}

/// Inside a reference body.
#[derive(Clone, Copy)]
pub(crate) struct Reference;

/// Inside a vector body.
#[derive(Clone, Copy)]
pub(crate) struct Within<L>(pub(crate) L);

impl Inner for Reference {
    fn inner<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.scalar()
    }
}

impl<L: Lanes> Inner for Within<L> {
    #[inline(always)]
    fn inner<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.simd(self.0)
    }
}

impl Isa {
    /// Runs a kernel's body for this instruction set.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(token) => token.run(kernel),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512(token) => token.absurd(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2(token) => token.absurd(),
            Self::Scalar => kernel.scalar(),
        }
    }
}

/// `exp(x)`, within 2 units in the last place for `x` in -87..=88, clamped outside.
///
/// Range reduction by ln 2 in two parts and a polynomial of degree 6 (the one of Cephes' `expf`).
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::F) -> L::F {
    // In this order of the arguments NaN passes through.
    exp_small(l, l.min(l.splat(88.0), x))
}

/// [`exp`] for `x` of at most 88, as in a softmax, where 0 is the most.
#[inline(always)]
pub(crate) fn exp_small<L: Lanes>(l: L, x: L::F) -> L::F {
    let x = l.max(l.splat(-87.0), x);
    let n = l.round(l.mul(x, l.splat(std::f32::consts::LOG2_E)));
    let r = l.mul_add(n, l.splat(-0.693_359_4), x);
    let r = l.mul_add(n, l.splat(2.121_944_4e-4), r);
    let mut p = l.splat(1.987_569_1e-4);
    p = l.mul_add(p, r, l.splat(1.398_199_9e-3));
    p = l.mul_add(p, r, l.splat(8.333_452e-3));
    p = l.mul_add(p, r, l.splat(4.166_579_6e-2));
    p = l.mul_add(p, r, l.splat(1.666_666_5e-1));
    p = l.mul_add(p, r, l.splat(0.5));
    let tail = l.add(r, l.splat(1.0));
    l.mul(l.mul_add(p, l.mul(r, r), tail), l.exp2_integral(n))
}
