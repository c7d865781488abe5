//! Norms and element-wise parts of a layer, per row, with one order of summation.

use super::error::{KernelError, check_len};
use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, Line, exp};

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
    out.copy_from_slice(x);
    isa.run(RmsNorm {
        x: out,
        weight,
        eps,
    });
    Ok(())
}

/// [`rms_norm`] in place over each head of queries or keys.
///
/// # Errors
/// A length of `x` that is not whole heads.
pub fn qk_norm(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) -> Result<(), KernelError> {
    check_rows("qk_norm heads", x.len(), weight.len())?;
    isa.run(RmsNorm { x, weight, eps });
    Ok(())
}

/// `gate = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`.
///
/// # Errors
/// Lengths that differ.
pub fn silu_mul(isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    check_len("silu_mul up", up.len(), gate.len())?;
    isa.run(SiluMul { gate, up });
    Ok(())
}

/// `x += y`.
///
/// # Errors
/// Lengths that differ.
pub fn add(isa: Isa, x: &mut [f32], y: &[f32]) -> Result<(), KernelError> {
    check_len("add right side", y.len(), x.len())?;
    isa.run(Add { x, y });
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
    // In lanes, so that the compiler uses what vectors there are; no comparison lets NaN in.
    let larger = |max: f32, value: f32| if value > max { value } else { max };
    let (lines, tail) = x.as_chunks::<LANES>();
    let mut largest = [f32::NEG_INFINITY; LANES];
    for line in lines {
        for (max, value) in largest.iter_mut().zip(line) {
            *max = larger(*max, *value);
        }
    }
    let max = largest
        .iter()
        .chain(tail)
        .copied()
        .fold(f32::NEG_INFINITY, larger);
    // Equal as numbers: either zero will do. All NaN finds nothing.
    x.iter()
        .position(|value| *value == max)
        .map(|index| index as u32)
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

pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    fn scalar(self) {
        for row in self.x.chunks_exact_mut(self.weight.len()) {
            let sum: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let scale = 1.0 / (sum / row.len() as f64 + f64::from(self.eps)).sqrt();
            for (x, w) in row.iter_mut().zip(self.weight) {
                *x = *x * scale as f32 * w;
            }
        }
    }

    /// Squares are summed in lanes, ascending, then across the lanes.
    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        let width = self.weight.len();
        let (weights, weight_tail) = self.weight.as_chunks::<LANES>();
        let weight_tail = padded(weight_tail);
        for row in self.x.chunks_exact_mut(width) {
            let scale = l.splat(rms_scale(l, row, self.eps));
            let (lines, tail) = row.as_chunks_mut::<LANES>();
            for (line, weight) in lines.iter_mut().zip(weights) {
                l.store(l.mul(l.mul(l.load(line), scale), l.load(weight)), line);
            }
            let mut last = padded(tail);
            let x = l.load(&last);
            l.store(l.mul(l.mul(x, scale), l.load(&weight_tail)), &mut last);
            tail.copy_from_slice(&last[..tail.len()]);
        }
    }
}

/// What a norm multiplies a row by, before the weights.
#[inline(always)]
pub(crate) fn rms_scale<L: Lanes>(l: L, row: &[f32], eps: f32) -> f32 {
    let (lines, tail) = row.as_chunks::<LANES>();
    let mut squares = l.splat(0.0);
    for line in lines {
        let x = l.load(line);
        squares = l.mul_add(x, x, squares);
    }
    let x = l.load(&padded(tail));
    let mean = l.sum(l.mul_add(x, x, squares)) / row.len() as f32;
    1.0 / (mean + eps).sqrt()
}

pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    fn scalar(self) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + (-*gate).exp()) * up;
        }
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, l: L) {
        let (lines, tail) = self.gate.as_chunks_mut::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        for (line, up) in lines.iter_mut().zip(ups) {
            let x = silu(l, l.load(line));
            l.store(l.mul(x, l.load(up)), line);
        }
        let mut last = padded(tail);
        let x = silu(l, l.load(&last));
        l.store(l.mul(x, l.load(&padded(up_tail))), &mut last);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

#[inline(always)]
pub(crate) fn silu<L: Lanes>(l: L, x: L::F) -> L::F {
    let zero = l.splat(0.0);
    l.div(x, l.add(l.splat(1.0), exp(l, l.sub(zero, x))))
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, _: L) {
        // Element by element: the compiler uses the instruction set's vectors by itself.
        self.scalar();
    }
}

/// The last elements of a row, filled up with zeros.
#[inline(always)]
fn padded(tail: &[f32]) -> Line {
    let mut line = [0.0; LANES];
    line[..tail.len()].copy_from_slice(tail);
    line
}

#[cfg(test)]
mod tests;
