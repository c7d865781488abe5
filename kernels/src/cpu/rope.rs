//! Rotary position embedding: pairs of a head's elements turned by position times frequency.
//!
//! The angles of a step are the same for every layer and head, so their sines are computed once
//! a step, in 64-bit floats, and applied per layer. Frequencies (base, scaling, factors of a
//! model) are the caller's.

use super::error::{KernelError, check_len};
use super::lanes::{Kernel, Lanes};

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Neighbours: `(2i, 2i + 1)`. GGUF files of the Llama family.
    Norm,
    /// Halves: `(i, i + pairs)`. Qwen, Gemma, Phi.
    Neox,
}

/// Sines and cosines of one step's positions.
#[derive(Debug, Default)]
pub struct RopeAngles {
    pairs: usize,
    rows: usize,
    /// `[row][pair]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeAngles {
    /// Computes the angles of `positions`; `freqs` holds radians per position, one per pair.
    ///
    /// `magnitude` scales the result (1 but for YaRN).
    ///
    /// # Cost
    /// A sine and a cosine per position and pair; allocates only for a larger step.
    pub fn set(&mut self, freqs: &[f32], positions: &[u32], magnitude: f32) {
        self.pairs = freqs.len();
        self.rows = positions.len();
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &freq in freqs {
                let (sin, cos) = (f64::from(position) * f64::from(freq)).sin_cos();
                self.cos.push(cos as f32 * magnitude);
                self.sin.push(sin as f32 * magnitude);
            }
        }
    }
}

impl RopeAngles {
    /// Refuses a step of another number of tokens, and heads of fewer pairs.
    pub(crate) fn check(&self, tokens: usize, head_dim: usize) -> Result<(), KernelError> {
        check_len("rope positions", self.rows, tokens)?;
        check_pairs(self.pairs, head_dim)
    }

    /// Tokens of the step.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Cosines and sines of a token.
    pub(crate) fn row(&self, token: usize) -> (&[f32], &[f32]) {
        let range = token * self.pairs..(token + 1) * self.pairs;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

fn check_pairs(pairs: usize, head_dim: usize) -> Result<(), KernelError> {
    check_len("rope pairs of a head", pairs.min(head_dim / 2), pairs)
}

/// Turns every head of every row; elements of a head past the pairs stay as they are.
///
/// # Shapes
/// `x`: `[rows of the angles][heads][head_dim]`.
///
/// # Errors
/// A length of `x` that is not whole heads for each position, or more pairs than a head holds.
pub fn rope(
    style: RopeStyle,
    angles: &RopeAngles,
    x: &mut [f32],
    head_dim: usize,
) -> Result<(), KernelError> {
    check_pairs(angles.pairs, head_dim)?;
    if angles.rows == 0 || head_dim == 0 {
        return check_len("rope input", x.len(), 0);
    }
    let head_count = x.len() / (angles.rows * head_dim);
    check_len("rope input", x.len(), head_count * angles.rows * head_dim)?;
    if head_count == 0 || angles.pairs == 0 {
        return Ok(());
    }
    let rows = x.chunks_exact_mut(head_count * head_dim);
    let cos = angles.cos.chunks_exact(angles.pairs);
    let sin = angles.sin.chunks_exact(angles.pairs);
    for ((row, cos), sin) in rows.zip(cos).zip(sin) {
        for head in row.chunks_exact_mut(head_dim) {
            Turn {
                style,
                head,
                cos,
                sin,
            }
            .scalar();
        }
    }
    Ok(())
}

/// Turns one head.
pub(crate) struct Turn<'a> {
    pub(crate) style: RopeStyle,
    pub(crate) head: &'a mut [f32],
    /// One a pair.
    pub(crate) cos: &'a [f32],
    /// One a pair.
    pub(crate) sin: &'a [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        match self.style {
            RopeStyle::Norm => turn_neighbours(self.head, self.cos, self.sin),
            RopeStyle::Neox => turn_halves(self.head, self.cos, self.sin),
        }
    }

    #[inline(always)]
    fn simd<L: Lanes>(self, _: L) {
        // Pair by pair: the compiler uses the instruction set's vectors by itself.
        self.scalar();
    }
}

#[inline(always)]
fn turn_neighbours(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, a * sin + b * cos];
    }
}

#[inline(always)]
fn turn_halves(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn angles(freqs: &[f32], positions: &[u32]) -> RopeAngles {
        let mut angles = RopeAngles::default();
        angles.set(freqs, positions, 1.0);
        angles
    }

    #[test]
    fn a_quarter_turn_moves_the_pair_of_each_style() {
        let quarter = angles(&[std::f32::consts::FRAC_PI_2, 0.0], &[1]);
        let mut norm = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(RopeStyle::Norm, &quarter, &mut norm, 5).unwrap();
        let mut neox = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope(RopeStyle::Neox, &quarter, &mut neox, 5).unwrap();
        let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close(&norm, &[-2.0, 1.0, 3.0, 4.0, 9.0]), "{norm:?}");
        assert!(close(&neox, &[-3.0, 2.0, 1.0, 4.0, 9.0]), "{neox:?}");
    }

    #[test]
    fn a_row_is_turned_the_same_alone_and_in_a_batch() {
        let freqs = [1.0, 0.1, 0.01];
        let x: Vec<f32> = (0..36).map(|i| (i as f32).sin()).collect();
        let mut batch = x.clone();
        rope(
            RopeStyle::Norm,
            &angles(&freqs, &[5, 1_000_000, 7]),
            &mut batch,
            6,
        )
        .unwrap();
        let mut alone = x[12..24].to_vec();
        rope(
            RopeStyle::Norm,
            &angles(&freqs, &[1_000_000]),
            &mut alone,
            6,
        )
        .unwrap();
        assert_eq!(batch[12..24], alone);
    }

    #[test]
    fn the_product_of_two_heads_depends_on_their_distance_only() {
        let freqs = [0.9, 0.3];
        let score = |p: u32, q: u32| {
            let (mut a, mut b) = ([0.3, -1.0, 0.7, 0.2], [1.1, 0.4, -0.6, 0.5]);
            rope(RopeStyle::Neox, &angles(&freqs, &[p]), &mut a, 4).unwrap();
            rope(RopeStyle::Neox, &angles(&freqs, &[q]), &mut b, 4).unwrap();
            a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>()
        };
        assert!((score(10, 3) - score(107, 100)).abs() < 1e-5);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let two = angles(&[1.0; 2], &[0, 1]);
        assert!(rope(RopeStyle::Norm, &two, &mut [0.0; 6], 3).is_err());
        assert!(rope(RopeStyle::Norm, &two, &mut [0.0; 9], 4).is_err());
        assert!(rope(RopeStyle::Norm, &two, &mut [0.0; 8], 4).is_ok());
    }
}
