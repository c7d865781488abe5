//! AVX-512 with VNNI: a vector is one register, a tile has 16 rows.
//!
//! Built like `avx2`. One `vpdpbusd` multiplies 4 unsigned by 4 signed bytes for each of 16
//! rows; signed weights are stored with 128 added, and 128 times the sum of the other side is
//! taken off at the end.

use super::super::isa::Avx512;
use super::{Kernel, LANES, Lanes, Line};
use std::arch::x86_64::{__m512, __m512i};

/// Passes methods on to the functions of `ops`.
macro_rules! delegate {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY: `self` proves that this CPU has AVX-512 F, BW, VL, DQ and VNNI.
            unsafe { ops::$name($($arg),*) }
        }
    )*};
}

impl Lanes for Avx512 {
    type F = __m512;
    type R = __m512;
    type B = __m512i;
    type S = __m512i;
    type D4 = __m512i;
    type D8 = __m512i;

    const ROWS: usize = 16;
    const ROOMY: bool = true;
    const PLUS_128: bool = true;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        fn with_features<K: Kernel>(lanes: Avx512, kernel: K) -> K::Output {
            kernel.simd(lanes)
        }
        // SAFETY: `self` proves that this CPU has these features.
        unsafe { with_features(self, kernel) }
    }

    delegate! {
        fn splat(x: f32) -> __m512;
        fn load(x: &Line) -> __m512;
        fn load_f16(x: &[u16; LANES]) -> __m512;
        fn load_bf16(x: &[u16; LANES]) -> __m512;
        fn store(x: __m512, out: &mut Line);
        fn store_f16(x: __m512, out: &mut [u16; LANES]);
        fn add(a: __m512, b: __m512) -> __m512;
        fn sub(a: __m512, b: __m512) -> __m512;
        fn mul(a: __m512, b: __m512) -> __m512;
        fn div(a: __m512, b: __m512) -> __m512;
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512;
        fn max(a: __m512, b: __m512) -> __m512;
        fn min(a: __m512, b: __m512) -> __m512;
        fn round(x: __m512) -> __m512;
        fn exp2_integral(x: __m512) -> __m512;
        fn keep_first(count: usize, x: __m512, rest: __m512) -> __m512;
        fn sum(x: __m512) -> f32;
        fn max_lane(x: __m512) -> f32;
        fn transpose(rows: &[Line; LANES], out: &mut [Line; LANES]);
        fn store_i8(x: __m512, out: &mut [i8; LANES]);
        fn prefetch(bytes: &[u8], ahead: usize);
        fn rows_zero() -> __m512;
        fn rows_f32(bytes: &[u8]) -> __m512;
        fn rows_f16(bytes: &[u8]) -> __m512;
        fn rows_bf16(bytes: &[u8]) -> __m512;
        fn rows_scale(a: __m512, b: f32) -> __m512;
        fn rows_mul_add(a: __m512, b: __m512, c: __m512) -> __m512;
        fn rows_mul_add_splat(a: __m512, b: f32, c: __m512) -> __m512;
        fn rows_store(x: __m512, out: &mut [f32]);
        fn bytes(bytes: &[u8]) -> __m512i;
        fn low(x: __m512i) -> __m512i;
        fn high(x: __m512i) -> __m512i;
        fn dot4_zero() -> __m512i;
        fn dot4(sum: __m512i, weights: __m512i, x: i32) -> __m512i;
        fn dot4_rows(sum: __m512i, offset: i32) -> __m512;
        fn signed(bytes: &[u8]) -> __m512i;
        fn dot8_zero() -> __m512i;
        fn dot8(sum: __m512i, weights: __m512i, x: i32) -> __m512i;
        fn dot8_rows(sum: __m512i, x_sum: i32) -> __m512;
        fn dot8_less(sum: __m512i, offset: i32) -> __m512;
        fn unsigned(x: __m512i) -> __m512i;
        fn lookup(table: &[i8; 16], x: __m512i) -> __m512i;
        fn with_fifth(nibbles: __m512i, bits: __m512i, group: usize) -> __m512i;
    }
}

/// Declares functions with the features on.
macro_rules! featured {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {$(
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? $body
    )*};
}

mod ops {
    use super::{LANES, Line};
    use std::arch::x86_64::*;

    featured! {
        fn splat(x: f32) -> __m512 {
            _mm512_set1_ps(x)
        }

        fn load(x: &Line) -> __m512 {
            // SAFETY: the array holds the 64 bytes that are read.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }

        fn load_words(x: &[u16; LANES]) -> __m256i {
            // SAFETY: the array holds the 32 bytes that are read.
            unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
        }

        fn load_f16(x: &[u16; LANES]) -> __m512 {
            _mm512_cvtph_ps(load_words(x))
        }

        fn load_bf16(x: &[u16; LANES]) -> __m512 {
            widen_bf16(load_words(x))
        }

        fn widen_bf16(x: __m256i) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
        }

        fn store(x: __m512, out: &mut Line) {
            // SAFETY: the array holds the 64 bytes that are written.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
        }

        fn store_f16(x: __m512, out: &mut [u16; LANES]) {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            // SAFETY: the array holds the 32 bytes that are written.
            unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), narrow) };
        }

        fn add(a: __m512, b: __m512) -> __m512 {
            _mm512_add_ps(a, b)
        }

        fn sub(a: __m512, b: __m512) -> __m512 {
            _mm512_sub_ps(a, b)
        }

        fn mul(a: __m512, b: __m512) -> __m512 {
            _mm512_mul_ps(a, b)
        }

        fn div(a: __m512, b: __m512) -> __m512 {
            _mm512_div_ps(a, b)
        }

        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
            _mm512_fmadd_ps(a, b, c)
        }

        fn max(a: __m512, b: __m512) -> __m512 {
            _mm512_max_ps(a, b)
        }

        fn min(a: __m512, b: __m512) -> __m512 {
            _mm512_min_ps(a, b)
        }

        fn round(x: __m512) -> __m512 {
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
        }

        fn exp2_integral(x: __m512) -> __m512 {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }

        fn keep_first(count: usize, x: __m512, rest: __m512) -> __m512 {
            let below = ((1_u32 << count.min(16)) - 1) as __mmask16;
            _mm512_mask_blend_ps(below, rest, x)
        }

        fn sum(x: __m512) -> f32 {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }

        fn max_lane(x: __m512) -> f32 {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }

        fn transpose(rows: &[Line; LANES], out: &mut [Line; LANES]) {
            // Four rounds over rows that are 8, 4, 2 and 1 apart.
            let mut x = [_mm512_setzero_ps(); LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = load(row);
            }
            for i in 0..8 {
                let (a, b) = (x[i], x[i + 8]);
                x[i] = _mm512_shuffle_f32x4::<0x44>(a, b);
                x[i + 8] = _mm512_shuffle_f32x4::<0xee>(a, b);
            }
            for i in [0, 1, 2, 3, 8, 9, 10, 11] {
                let (a, b) = (x[i], x[i + 4]);
                x[i] = _mm512_shuffle_f32x4::<0x88>(a, b);
                x[i + 4] = _mm512_shuffle_f32x4::<0xdd>(a, b);
            }
            // Now `x[4 * g + r]` holds columns `4 * g ..` of rows `r`, `r + 8`, `r + 4`, `r + 12`.
            let order = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
            for (group, out) in x.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<4>().0) {
                let [a, b, c, d] = *group;
                let (ab, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let columns = [
                    _mm512_shuffle_ps::<0x44>(ab, cd),
                    _mm512_shuffle_ps::<0xee>(ab, cd),
                    _mm512_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm512_shuffle_ps::<0xee>(ab_high, cd_high),
                ];
                for (column, out) in columns.into_iter().zip(out) {
                    store(_mm512_permutexvar_ps(order, column), out);
                }
            }
        }

        fn store_i8(x: __m512, out: &mut [i8; LANES]) {
            let narrow = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
            // SAFETY: the array holds the 16 bytes that are written.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), narrow) };
        }

        fn prefetch(bytes: &[u8], ahead: usize) {
            _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(ahead).cast());
        }

        fn rows_zero() -> __m512 {
            _mm512_setzero_ps()
        }

        fn rows_f32(bytes: &[u8]) -> __m512 {
            let bytes: &[u8; 64] = bytes.first_chunk().expect("16 floats");
            // SAFETY: the array holds the 64 bytes that are read.
            unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) }
        }

        fn load_32_bytes(bytes: &[u8]) -> __m256i {
            let bytes: &[u8; 32] = bytes.first_chunk().expect("16 words");
            // SAFETY: the array holds the 32 bytes that are read.
            unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
        }

        fn rows_f16(bytes: &[u8]) -> __m512 {
            _mm512_cvtph_ps(load_32_bytes(bytes))
        }

        fn rows_bf16(bytes: &[u8]) -> __m512 {
            widen_bf16(load_32_bytes(bytes))
        }

        fn rows_scale(a: __m512, b: f32) -> __m512 {
            _mm512_mul_ps(a, _mm512_set1_ps(b))
        }

        fn rows_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
            _mm512_fmadd_ps(a, b, c)
        }

        fn rows_mul_add_splat(a: __m512, b: f32, c: __m512) -> __m512 {
            _mm512_fmadd_ps(a, _mm512_set1_ps(b), c)
        }

        fn rows_store(x: __m512, out: &mut [f32]) {
            store(x, out.first_chunk_mut().expect("16 floats"));
        }

        fn bytes(bytes: &[u8]) -> __m512i {
            let bytes: &[u8; 64] = bytes.first_chunk().expect("4 bytes of 16 rows");
            // SAFETY: the array holds the 64 bytes that are read.
            unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
        }

        fn low(x: __m512i) -> __m512i {
            _mm512_and_si512(x, _mm512_set1_epi8(15))
        }

        fn high(x: __m512i) -> __m512i {
            _mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15))
        }

        fn dot4_zero() -> __m512i {
            _mm512_setzero_si512()
        }

        fn dot4(sum: __m512i, weights: __m512i, x: i32) -> __m512i {
            _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(x))
        }

        fn dot4_rows(sum: __m512i, offset: i32) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)))
        }

        fn signed(x: &[u8]) -> __m512i {
            bytes(x)
        }

        fn dot8_zero() -> __m512i {
            _mm512_setzero_si512()
        }

        fn dot8(sum: __m512i, weights: __m512i, x: i32) -> __m512i {
            _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(x))
        }

        fn dot8_rows(sum: __m512i, x_sum: i32) -> __m512 {
            dot8_less(sum, 128 * x_sum)
        }

        fn dot8_less(sum: __m512i, offset: i32) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(offset)))
        }

        fn unsigned(x: __m512i) -> __m512i {
            x
        }

        fn lookup(table: &[i8; 16], x: __m512i) -> __m512i {
            // SAFETY: the array holds the 16 bytes that are read.
            let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
            let plus_128 = _mm_xor_si128(table, _mm_set1_epi8(-128));
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(plus_128), x)
        }

        fn with_fifth(nibbles: __m512i, bits: __m512i, group: usize) -> __m512i {
            let by = |count: usize| _mm512_set1_epi32(count as i32);
            let bits = if group < 4 {
                _mm512_sllv_epi32(bits, by(4 - group))
            } else {
                _mm512_srlv_epi32(bits, by(group - 4))
            };
            _mm512_or_si512(nibbles, _mm512_and_si512(bits, _mm512_set1_epi8(16)))
        }
    }
}
