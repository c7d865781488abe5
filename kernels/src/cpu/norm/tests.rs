//! Norms and element-wise kernels of every instruction set against 64-bit floats.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn rms_norm_agrees_with_64_bit_floats(
        width in 1_usize..200, rows in 1_usize..4, scale in -8..8, seed in any::<u32>(),
    ) {
        let x: Vec<f32> = noise(seed, width * rows, 2.0_f32.powi(scale));
        let weight = noise(seed ^ 1, width, 1.0);
        for isa in Isa::available() {
            let mut out = vec![0.0; x.len()];
            rms_norm(isa, &x, &weight, 1e-5, &mut out).unwrap();
            for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                let sum: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
                let rms = (sum / width as f64 + 1e-5).sqrt();
                for ((x, w), out) in x.iter().zip(&weight).zip(out) {
                    let expected = f64::from(*x) / rms * f64::from(*w);
                    let bound = 2e-6 * expected.abs() + 1e-9;
                    prop_assert!((f64::from(*out) - expected).abs() <= bound);
                }
            }
            let mut in_place = x.clone();
            qk_norm(isa, &mut in_place, &weight, 1e-5).unwrap();
            prop_assert_eq!(&in_place, &out);
            let mut alone = vec![0.0; width];
            rms_norm(isa, &x[x.len() - width..], &weight, 1e-5, &mut alone).unwrap();
            prop_assert_eq!(&alone[..], &out[out.len() - width..]);
        }
    }

    #[test]
    fn argmax_is_that_of_a_plain_search(
        values in prop::collection::vec((-3_i8..4, 0_u8..4), 0..100), low in any::<bool>(),
    ) {
        let number = |(value, kind): &(i8, u8)| match kind {
            0 => f32::NAN,
            1 if low => f32::NEG_INFINITY,
            _ => f32::from(*value) * if *kind == 2 { -0.5 } else { 0.5 },
        };
        let x: Vec<f32> = values.iter().map(number).collect();
        let mut expected: Option<usize> = None;
        for (index, value) in x.iter().enumerate() {
            if !value.is_nan() && expected.is_none_or(|best| *value > x[best]) {
                expected = Some(index);
            }
        }
        prop_assert_eq!(argmax(&x).map(|index| index as usize), expected);
    }

    #[test]
    fn silu_and_add_agree_with_64_bit_floats(len in 0_usize..100, seed in any::<u32>()) {
        let (gate, up) = (noise(seed, len, 40.0), noise(seed ^ 1, len, 2.0));
        for isa in Isa::available() {
            let (mut silu, mut sum) = (gate.clone(), gate.clone());
            silu_mul(isa, &mut silu, &up).unwrap();
            add(isa, &mut sum, &up).unwrap();
            for i in 0..len {
                let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
                let expected = g / (1.0 + (-g).exp()) * u;
                let error = (f64::from(silu[i]) - expected).abs();
                prop_assert!(error <= 1e-6 * expected.abs() + 1e-12);
                prop_assert_eq!(sum[i], gate[i] + up[i]);
            }
        }
    }
}

fn noise(seed: u32, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn large_negative_gates_give_zero_and_nan_stays_nan() {
    for isa in Isa::available() {
        let mut gate = [-1e4, 1e4, f32::NAN, 0.0];
        silu_mul(isa, &mut gate, &[1.0; 4]).unwrap();
        assert!(gate[0].abs() < 1e-30 && gate[1] == 1e4 && gate[2].is_nan() && gate[3] == 0.0);
    }
}

#[test]
fn argmax_takes_the_first_of_equals_and_never_nan() {
    assert_eq!(argmax(&[f32::NAN, 1.0, 3.0, 3.0, f32::NAN]), Some(2));
    assert_eq!(argmax(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), Some(0));
    assert_eq!(argmax(&[f32::NAN]), None);
    assert_eq!(argmax(&[]), None);
}

#[test]
fn softmax_sums_to_one_and_survives_large_and_masked_logits() {
    let mut x = [1000.0, f32::NEG_INFINITY, 999.0];
    softmax(&mut x);
    assert!((x.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    assert_eq!(x[1], 0.0);
    let mut masked = [f32::NEG_INFINITY; 3];
    softmax(&mut masked);
    assert_eq!(masked, [0.0; 3]);
}

#[test]
fn a_row_that_does_not_fit_the_weight_is_refused() {
    for isa in Isa::available() {
        assert!(rms_norm(isa, &[1.0; 5], &[1.0; 2], 1e-5, &mut [0.0; 5]).is_err());
        assert!(rms_norm(isa, &[1.0; 4], &[], 1e-5, &mut [0.0; 4]).is_err());
        assert!(rms_norm(isa, &[1.0; 4], &[1.0; 2], 1e-5, &mut [0.0; 3]).is_err());
        assert!(silu_mul(isa, &mut [1.0; 4], &[1.0; 3]).is_err());
        assert!(add(isa, &mut [1.0; 4], &[1.0; 3]).is_err());
    }
}
