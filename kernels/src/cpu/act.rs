//! Activations in 8 bits, for products with quantized weights: 32 columns share a scale.
//!
//! Rounding to 1/127 of the largest of 32 is what llama.cpp's CPU path does too (its `q8_1`).

use super::lanes::{Kernel, LANES, Lanes, Line};

/// Columns of a block.
pub(crate) const ACT_LEN: usize = 32;

/// 32 activations `d * q`.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub(crate) struct Act {
    pub(crate) q: [i8; ACT_LEN],
    pub(crate) d: f32,
    /// `d` times the sum of `q`: what a weight block's minimum is multiplied by.
    pub(crate) d_sum: f32,
    /// The sums of the halves of `q`.
    pub(crate) halves: [i16; 2],
}

impl Act {
    /// The sum of `q`.
    #[inline(always)]
    pub(crate) fn sum(&self) -> i32 {
        i32::from(self.halves[0]) + i32::from(self.halves[1])
    }

    /// Four activations, as a vector instruction takes them.
    #[inline(always)]
    pub(crate) fn word(&self, index: usize) -> i32 {
        // No closure: the innermost loops must not depend on whether it is inlined.
        i32::from_le(bytemuck::cast(self.q.as_chunks::<4>().0[index]))
    }
}

/// Quantizes rows of whole blocks. A block with an infinity or NaN gets a NaN scale.
pub(crate) struct Quantize<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [Act],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    fn scalar(self) {
        for (x, out) in self.x.as_chunks::<ACT_LEN>().0.iter().zip(self.out) {
            let max = x.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let poison: f32 = x.iter().map(|x| x * 0.0).sum();
            let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
            let q = x.map(|x| (x * inverse).round_ties_even() as i8);
            *out = scaled(q, max / 127.0 + poison);
        }
    }

    /// A vector of blocks at a time, so that one division serves 16 of them.
    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        let zero = l.splat(0.0);
        let groups = self.x.chunks(LANES * ACT_LEN);
        for (x, out) in groups.zip(self.out.chunks_mut(LANES)) {
            let x = x.as_chunks::<ACT_LEN>().0;
            let mut maxes = [0.0; LANES];
            for (x, max) in x.iter().zip(&mut maxes) {
                let (a, b) = load_block(l, x);
                let largest = l.max(l.max(a, l.sub(zero, a)), l.max(b, l.sub(zero, b)));
                *max = l.max_lane(largest);
            }
            let (mut inverses, mut steps) = (maxes, maxes);
            l.store(l.div(l.splat(127.0), l.load(&maxes)), &mut inverses);
            l.store(l.div(l.load(&maxes), l.splat(127.0)), &mut steps);
            for (index, (x, out)) in x.iter().zip(out).enumerate() {
                let inverse = if maxes[index] > 0.0 {
                    inverses[index]
                } else {
                    0.0
                };
                round_block(l, load_block(l, x), (inverse, steps[index]), out);
            }
        }
    }
}

/// The two vectors of a block.
#[inline(always)]
fn load_block<L: Lanes>(l: L, x: &[f32; ACT_LEN]) -> (L::F, L::F) {
    let lines: &[Line] = x.as_chunks().0;
    (l.load(&lines[0]), l.load(&lines[1]))
}

/// Rounds the two vectors of a block to a step, given its inverse.
#[inline(always)]
fn round_block<L: Lanes>(l: L, (a, b): (L::F, L::F), (inverse, step): (f32, f32), out: &mut Act) {
    let inverse = l.splat(inverse);
    // Rounded here, so that the sums are of whole numbers: exact in any order.
    let (a, b) = (l.round(l.mul(a, inverse)), l.round(l.mul(b, inverse)));
    let (low, high) = out.q.split_at_mut(16);
    l.store_i8(a, low.first_chunk_mut().expect("16 of 32"));
    l.store_i8(b, high.first_chunk_mut().expect("16 of 32"));
    let (low, high) = (l.sum(a), l.sum(b));
    // An infinity or NaN makes its sum NaN.
    out.d = step + (low + high) * 0.0;
    out.d_sum = out.d * (low + high);
    out.halves = [low as i16, high as i16];
}

fn scaled(q: [i8; ACT_LEN], d: f32) -> Act {
    let mut halves = [0; 2];
    for (half, q) in halves.iter_mut().zip(q.as_chunks::<16>().0) {
        for q in q {
            *half += i16::from(*q);
        }
    }
    let sum = i32::from(halves[0]) + i32::from(halves[1]);
    Act {
        q,
        d,
        d_sum: d * sum as f32,
        halves,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use bytemuck::Zeroable;
    use proptest::prelude::*;

    fn quantize(isa: Isa, x: &[f32]) -> Vec<Act> {
        let mut out = vec![Act::zeroed(); x.len() / ACT_LEN];
        isa.run(Quantize { x, out: &mut out });
        out
    }

    proptest! {
        #[test]
        fn every_path_rounds_to_the_nearest_step(
            x in prop::collection::vec(-9.0_f32..9.0, 96), exponent in -30..30,
        ) {
            let x: Vec<f32> = x.iter().map(|x| x * 2.0_f32.powi(exponent)).collect();
            let scalar = quantize(Isa::Scalar, &x);
            for isa in Isa::available() {
                prop_assert_eq!(&quantize(isa, &x), &scalar);
            }
            for (act, x) in scalar.iter().zip(x.chunks(ACT_LEN)) {
                for (q, x) in act.q.iter().zip(x) {
                    prop_assert!((f32::from(*q) * act.d - x).abs() <= act.d * 0.5001);
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_what_is_no_number_poisons_its_block_only() {
        for isa in Isa::available() {
            let mut x = [0.0; 96];
            assert_eq!(quantize(isa, &x), [Act::zeroed(); 3]);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                x[40] = bad;
                let acts = quantize(isa, &x);
                assert!(acts[1].d.is_nan(), "{isa:?} {bad}");
                assert_eq!((acts[0], acts[2]), (Act::zeroed(), Act::zeroed()));
            }
        }
    }
}
