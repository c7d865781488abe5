//! AVX2 with FMA and F16C: a vector is two registers, a tile has 8 rows.
//!
//! The functions of `ops` are safe wherever the features are on; the methods of [`Lanes`] reach
//! them through the token, which proves that this CPU has the features.

use super::super::isa::Avx2;
use super::{Kernel, LANES, Lanes, Line};
use std::arch::x86_64::{__m256, __m256i};

/// Passes methods on to the functions of `ops`.
macro_rules! delegate {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY: `self` proves that this CPU has AVX2, FMA and F16C.
            unsafe { ops::$name($($arg),*) }
        }
    )*};
}

type Pair = [__m256; 2];

impl Lanes for Avx2 {
    type F = Pair;
    type R = __m256;
    type B = __m256i;
    /// The bytes and their absolute values.
    type S = [__m256i; 2];
    /// 16-bit sums of two neighbours each: 8 * 2 * 15 * 127 fits.
    type D4 = __m256i;
    type D8 = __m256i;

    const ROWS: usize = 8;
    const ROOMY: bool = false;
    const PLUS_128: bool = false;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with_features<K: Kernel>(lanes: Avx2, kernel: K) -> K::Output {
            kernel.simd(lanes)
        }
        // SAFETY: `self` proves that this CPU has AVX2, FMA and F16C.
        unsafe { with_features(self, kernel) }
    }

    delegate! {
        fn splat(x: f32) -> Pair;
        fn load(x: &Line) -> Pair;
        fn load_f16(x: &[u16; LANES]) -> Pair;
        fn load_bf16(x: &[u16; LANES]) -> Pair;
        fn store(x: Pair, out: &mut Line);
        fn store_f16(x: Pair, out: &mut [u16; LANES]);
        fn add(a: Pair, b: Pair) -> Pair;
        fn sub(a: Pair, b: Pair) -> Pair;
        fn mul(a: Pair, b: Pair) -> Pair;
        fn div(a: Pair, b: Pair) -> Pair;
        fn mul_add(a: Pair, b: Pair, c: Pair) -> Pair;
        fn max(a: Pair, b: Pair) -> Pair;
        fn min(a: Pair, b: Pair) -> Pair;
        fn round(x: Pair) -> Pair;
        fn exp2_integral(x: Pair) -> Pair;
        fn keep_first(count: usize, x: Pair, rest: Pair) -> Pair;
        fn sum(x: Pair) -> f32;
        fn max_lane(x: Pair) -> f32;
        fn transpose(rows: &[Line; LANES], out: &mut [Line; LANES]);
        fn store_i8(x: Pair, out: &mut [i8; LANES]);
        fn prefetch(bytes: &[u8], ahead: usize);
        fn rows_zero() -> __m256;
        fn rows_f32(bytes: &[u8]) -> __m256;
        fn rows_f16(bytes: &[u8]) -> __m256;
        fn rows_bf16(bytes: &[u8]) -> __m256;
        fn rows_scale(a: __m256, b: f32) -> __m256;
        fn rows_mul_add(a: __m256, b: __m256, c: __m256) -> __m256;
        fn rows_mul_add_splat(a: __m256, b: f32, c: __m256) -> __m256;
        fn rows_store(x: __m256, out: &mut [f32]);
        fn bytes(bytes: &[u8]) -> __m256i;
        fn low(x: __m256i) -> __m256i;
        fn high(x: __m256i) -> __m256i;
        fn dot4_zero() -> __m256i;
        fn dot4(sum: __m256i, weights: __m256i, x: i32) -> __m256i;
        fn dot4_rows(sum: __m256i, offset: i32) -> __m256;
        fn signed(bytes: &[u8]) -> [__m256i; 2];
        fn dot8_zero() -> __m256i;
        fn dot8(sum: __m256i, weights: [__m256i; 2], x: i32) -> __m256i;
        fn dot8_rows(sum: __m256i, x_sum: i32) -> __m256;
        fn dot8_less(sum: __m256i, offset: i32) -> __m256;
        fn unsigned(x: __m256i) -> [__m256i; 2];
        fn lookup(table: &[i8; 16], x: __m256i) -> [__m256i; 2];
        fn with_fifth(nibbles: __m256i, bits: __m256i, group: usize) -> __m256i;
    }
}

/// Applies an intrinsic to both registers of its arguments.
macro_rules! pairwise {
    ($(fn $name:ident($($arg:ident),*) = $intrinsic:ident;)*) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $name($($arg: Pair),*) -> Pair {
            [$intrinsic($($arg[0]),*), $intrinsic($($arg[1]),*)]
        }
    )*};
}

/// Declares functions with the features on.
macro_rules! featured {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? $body
    )*};
}

mod ops {
    use super::{LANES, Line, Pair};
    use std::arch::x86_64::*;

    pairwise! {
        fn add(a, b) = _mm256_add_ps;
        fn sub(a, b) = _mm256_sub_ps;
        fn mul(a, b) = _mm256_mul_ps;
        fn div(a, b) = _mm256_div_ps;
        fn mul_add(a, b, c) = _mm256_fmadd_ps;
        fn max(a, b) = _mm256_max_ps;
        fn min(a, b) = _mm256_min_ps;
        fn round(x) = round_8;
        fn exp2_integral(x) = exp2_integral_8;
    }

    featured! {
        fn round_8(x: __m256) -> __m256 {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
        }

        fn exp2_integral_8(x: __m256) -> __m256 {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }

        fn splat(x: f32) -> Pair {
            [_mm256_set1_ps(x); 2]
        }

        fn load_8(x: &[f32; 8]) -> __m256 {
            // SAFETY: the array holds the 32 bytes that are read.
            unsafe { _mm256_loadu_ps(x.as_ptr()) }
        }

        fn load_8_words(x: &[u16; 8]) -> __m128i {
            // SAFETY: the array holds the 16 bytes that are read.
            unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
        }

        fn store_8(x: __m256, out: &mut [f32; 8]) {
            // SAFETY: the array holds the 32 bytes that are written.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
        }

        fn load(x: &Line) -> Pair {
            let [a, b] = halves(x);
            [load_8(a), load_8(b)]
        }

        fn load_f16(x: &[u16; LANES]) -> Pair {
            let [a, b] = halves(x);
            [_mm256_cvtph_ps(load_8_words(a)), _mm256_cvtph_ps(load_8_words(b))]
        }

        fn load_bf16(x: &[u16; LANES]) -> Pair {
            let [a, b] = halves(x);
            [widen_bf16(load_8_words(a)), widen_bf16(load_8_words(b))]
        }

        fn widen_bf16(x: __m128i) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
        }

        fn store(x: Pair, out: &mut Line) {
            let [a, b] = halves_mut(out);
            store_8(x[0], a);
            store_8(x[1], b);
        }

        fn store_f16(x: Pair, out: &mut [u16; LANES]) {
            for (x, out) in x.into_iter().zip(halves_mut(out)) {
                let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
                // SAFETY: the array holds the 16 bytes that are written.
                unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), narrow) };
            }
        }

        fn keep_first(count: usize, x: Pair, rest: Pair) -> Pair {
            let count = _mm256_set1_epi32(count as i32);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
            let below = [_mm256_cmpgt_epi32(count, low), _mm256_cmpgt_epi32(count, high)];
            [
                _mm256_blendv_ps(rest[0], x[0], _mm256_castsi256_ps(below[0])),
                _mm256_blendv_ps(rest[1], x[1], _mm256_castsi256_ps(below[1])),
            ]
        }

        fn sum(x: Pair) -> f32 {
            let eight = _mm256_add_ps(x[0], x[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }

        fn max_lane(x: Pair) -> f32 {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }

        fn transpose(rows: &[Line; LANES], out: &mut [Line; LANES]) {
            for top in [0, 8] {
                for left in [0, 8] {
                    let mut square = [_mm256_setzero_ps(); 8];
                    for (row, square) in rows[top..top + 8].iter().zip(&mut square) {
                        *square = load_8(halves(row)[left / 8]);
                    }
                    let square = transpose_8(square);
                    for (square, out) in square.into_iter().zip(&mut out[left..left + 8]) {
                        store_8(square, halves_mut(out)[top / 8]);
                    }
                }
            }
        }

        fn transpose_8(x: [__m256; 8]) -> [__m256; 8] {
            let [a, b, c, d, e, f, g, h] = x;
            let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (cd, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let (ef, ef_high) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
            let (gh, gh_high) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
            let top = [
                _mm256_shuffle_ps::<0x44>(ab, cd),
                _mm256_shuffle_ps::<0xee>(ab, cd),
                _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
            ];
            let bottom = [
                _mm256_shuffle_ps::<0x44>(ef, gh),
                _mm256_shuffle_ps::<0xee>(ef, gh),
                _mm256_shuffle_ps::<0x44>(ef_high, gh_high),
                _mm256_shuffle_ps::<0xee>(ef_high, gh_high),
            ];
            [
                _mm256_permute2f128_ps::<0x20>(top[0], bottom[0]),
                _mm256_permute2f128_ps::<0x20>(top[1], bottom[1]),
                _mm256_permute2f128_ps::<0x20>(top[2], bottom[2]),
                _mm256_permute2f128_ps::<0x20>(top[3], bottom[3]),
                _mm256_permute2f128_ps::<0x31>(top[0], bottom[0]),
                _mm256_permute2f128_ps::<0x31>(top[1], bottom[1]),
                _mm256_permute2f128_ps::<0x31>(top[2], bottom[2]),
                _mm256_permute2f128_ps::<0x31>(top[3], bottom[3]),
            ]
        }

        fn store_i8(x: Pair, out: &mut [i8; LANES]) {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            let bytes = _mm_packs_epi16(low, high);
            // SAFETY: the array holds the 16 bytes that are written.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), bytes) };
        }

        fn prefetch(bytes: &[u8], ahead: usize) {
            _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(ahead).cast());
        }

        fn rows_zero() -> __m256 {
            _mm256_setzero_ps()
        }

        fn rows_f32(bytes: &[u8]) -> __m256 {
            let bytes: &[u8; 32] = bytes.first_chunk().expect("8 floats");
            // SAFETY: the array holds the 32 bytes that are read.
            unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
        }

        fn load_16_bytes(bytes: &[u8]) -> __m128i {
            let bytes: &[u8; 16] = bytes.first_chunk().expect("8 words");
            // SAFETY: the array holds the 16 bytes that are read.
            unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
        }

        fn rows_f16(bytes: &[u8]) -> __m256 {
            _mm256_cvtph_ps(load_16_bytes(bytes))
        }

        fn rows_bf16(bytes: &[u8]) -> __m256 {
            widen_bf16(load_16_bytes(bytes))
        }

        fn rows_scale(a: __m256, b: f32) -> __m256 {
            _mm256_mul_ps(a, _mm256_set1_ps(b))
        }

        fn rows_mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
            _mm256_fmadd_ps(a, b, c)
        }

        fn rows_mul_add_splat(a: __m256, b: f32, c: __m256) -> __m256 {
            _mm256_fmadd_ps(a, _mm256_set1_ps(b), c)
        }

        fn rows_store(x: __m256, out: &mut [f32]) {
            store_8(x, out.first_chunk_mut().expect("8 floats"));
        }

        fn bytes(bytes: &[u8]) -> __m256i {
            let bytes: &[u8; 32] = bytes.first_chunk().expect("4 bytes of 8 rows");
            // SAFETY: the array holds the 32 bytes that are read.
            unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
        }

        fn low(x: __m256i) -> __m256i {
            _mm256_and_si256(x, _mm256_set1_epi8(15))
        }

        fn high(x: __m256i) -> __m256i {
            _mm256_and_si256(_mm256_srli_epi16::<4>(x), _mm256_set1_epi8(15))
        }

        fn dot4_zero() -> __m256i {
            _mm256_setzero_si256()
        }

        fn dot4(sum: __m256i, weights: __m256i, x: i32) -> __m256i {
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, _mm256_set1_epi32(x)))
        }

        fn dot4_rows(sum: __m256i, offset: i32) -> __m256 {
            let rows = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
            _mm256_cvtepi32_ps(_mm256_sub_epi32(rows, _mm256_set1_epi32(offset)))
        }

        fn signed(x: &[u8]) -> [__m256i; 2] {
            let x = bytes(x);
            [x, _mm256_abs_epi8(x)]
        }

        fn dot8_zero() -> __m256i {
            _mm256_setzero_si256()
        }

        fn dot8(sum: __m256i, weights: [__m256i; 2], x: i32) -> __m256i {
            // The sign moves to `x`; pairs of products of 128 and 127 fit 16 bits.
            let x = _mm256_sign_epi8(_mm256_set1_epi32(x), weights[0]);
            let pairs = _mm256_maddubs_epi16(weights[1], x);
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }

        fn dot8_rows(sum: __m256i, _x_sum: i32) -> __m256 {
            _mm256_cvtepi32_ps(sum)
        }

        fn dot8_less(sum: __m256i, offset: i32) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(offset)))
        }

        fn unsigned(x: __m256i) -> [__m256i; 2] {
            [x, x]
        }

        fn lookup(table: &[i8; 16], x: __m256i) -> [__m256i; 2] {
            // SAFETY: the array holds the 16 bytes that are read.
            let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
            let x = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x);
            [x, _mm256_abs_epi8(x)]
        }

        fn with_fifth(nibbles: __m256i, bits: __m256i, group: usize) -> __m256i {
            let by = |count: usize| _mm256_set1_epi32(count as i32);
            let bits = if group < 4 {
                _mm256_sllv_epi32(bits, by(4 - group))
            } else {
                _mm256_srlv_epi32(bits, by(group - 4))
            };
            _mm256_or_si256(nibbles, _mm256_and_si256(bits, _mm256_set1_epi8(16)))
        }
    }

    fn halves<T>(x: &[T; LANES]) -> [&[T; 8]; 2] {
        let (halves, _) = x.as_chunks();
        [&halves[0], &halves[1]]
    }

    fn halves_mut<T>(x: &mut [T; LANES]) -> [&mut [T; 8]; 2] {
        let (a, b) = x.split_at_mut(8);
        [
            a.first_chunk_mut().expect("half of 16"),
            b.first_chunk_mut().expect("half of 16"),
        ]
    }
}
