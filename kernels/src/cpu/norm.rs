//! Norms and element-wise parts of a layer, per row, with one order of summation.

use super::error::{KernelError, check_len};
use super::isa::Isa;

/// `out = x / rms(x) * weight` for each row of `weight.len()` elements.
///
/// # Errors
/// Lengths that do not match.
pub fn rms_norm(
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check_rows("rms_norm input", x.len(), weight.len())?;
    check_len("rms_norm output", out.len(), x.len())?;
    let _ = isa;
    for (x, out) in x
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
        let scale = inverse_rms(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    }
    Ok(())
}

/// [`rms_norm`] in place over each head of queries or keys.
///
/// # Errors
/// A length of `x` that is not whole heads.
pub fn qk_norm(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) -> Result<(), KernelError> {
    check_rows("qk_norm heads", x.len(), weight.len())?;
    let _ = isa;
    for head in x.chunks_exact_mut(weight.len()) {
        let scale = inverse_rms(head, eps);
        for (x, w) in head.iter_mut().zip(weight) {
            *x = *x * scale * w;
        }
    }
    Ok(())
}

/// `gate = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`.
///
/// # Errors
/// Lengths that differ.
pub fn silu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    check_len("silu_mul up", up.len(), gate.len())?;
    let _ = isa;
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
    Ok(())
}

/// `x += y`.
///
/// # Errors
/// Lengths that differ.
pub fn add(isa: Isa, x: &mut [f32], y: &[f32]) -> Result<(), KernelError> {
    check_len("add right side", y.len(), x.len())?;
    let _ = isa;
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
    Ok(())
}

/// Turns logits into probabilities, in 64-bit floats. All `-inf` gives all zero.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        x.fill(0.0);
        return;
    }
    let weight = |x: f32| f64::from(x - max).exp();
    let sum: f64 = x.iter().map(|x| weight(*x)).sum();
    for x in x {
        *x = (weight(*x) / sum) as f32;
    }
}

/// The index of the largest number: the first one on a tie. NaN never wins; all NaN is `None`.
pub fn argmax(x: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (index, &value) in (0..).zip(x) {
        if !value.is_nan() && best.is_none_or(|(_, max)| value > max) {
            best = Some((index, value));
        }
    }
    best.map(|(index, _)| index)
}

/// Rows of `width` elements, at least one element wide.
fn check_rows(buffer: &'static str, found: usize, width: usize) -> Result<(), KernelError> {
    if width == 0 || !found.is_multiple_of(width) {
        let wanted = found.next_multiple_of(width.max(1)).max(width);
        return Err(KernelError::BufferLength {
            buffer,
            wanted,
            found,
        });
    }
    Ok(())
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    (1.0 / (sum / x.len() as f64 + f64::from(eps)).sqrt()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
