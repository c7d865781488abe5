//! How long a step takes, learned from the steps that were: what a step budget and the worth of
//! a cached token follow.
//!
//! Model: `ns = base + token * tokens + draw * draws + one * kv_one + chunk * kv_chunk`, see
//! [`StepLoad`]. Least squares of the relative errors over the steps seen, older ones counting
//! less by a factor each step. Plain IEEE additions, multiplications and divisions in a fixed
//! order, so that equal inputs give equal models on every machine.

use std::ops::Add;

use rootstock_memory::Nanos;
use serde::Serialize;

/// Weight of the past at each new step: half after some 70 steps.
const FADE: f64 = 0.99;
/// Steps before the model is believed.
const STEPS_MIN: u32 = 16;
/// Longest step that is believed; a longer one is a machine that slept.
const STEP_NS_MAX: Nanos = 60_000_000_000;
/// Positions are counted in thousands, to keep the unknowns of like size.
const KV_UNIT: f64 = 1e-3;
/// Pull of each coefficient towards 0, which keeps the system solvable when all steps are alike.
/// Least for the base: what cannot be told apart is the step's own.
const RIDGE: [f64; N] = [1e-6, 1e-2, 1e-2, 1e-2, 1e-2];

/// Nanoseconds of a step that counts as one of weight 1; a shorter one weighs more.
const USUAL_NS: f64 = 1e7;
/// Unknowns of the model.
const N: usize = 5;

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct StepLoad {
    /// Positions computed.
    pub tokens: u32,
    /// Rows that draw a token, for which the output matrix is read.
    pub draws: u32,
    /// KV positions read by rows of one token.
    pub kv_one: u64,
    /// KV positions read by rows of more, which share what they read.
    pub kv_chunk: u64,
}

impl StepLoad {
    /// Load of rows of (first position, positions, whether it draws).
    pub fn of(rows: impl Iterator<Item = (u32, u32, bool)>) -> StepLoad {
        rows.map(|(first_pos, len, draws)| {
            let (first, len64) = (u64::from(first_pos), u64::from(len));
            let kv = len64 * first + len64 * (len64 + 1) / 2;
            let (kv_one, kv_chunk) = if len > 1 { (0, kv) } else { (kv, 0) };
            StepLoad {
                tokens: len,
                draws: draws.into(),
                kv_one,
                kv_chunk,
            }
        })
        .fold(StepLoad::default(), StepLoad::add)
    }
}

impl Add for StepLoad {
    type Output = StepLoad;

    fn add(self, other: StepLoad) -> StepLoad {
        StepLoad {
            tokens: self.tokens + other.tokens,
            draws: self.draws + other.draws,
            kv_one: self.kv_one + other.kv_one,
            kv_chunk: self.kv_chunk + other.kv_chunk,
        }
    }
}

/// The learned model.
#[derive(Clone, Debug, Default)]
pub struct StepTime {
    steps: u32,
    /// Sums of products of the features over the time.
    xx: [[f64; N]; N],
    /// Sums of the same and 1.
    xy: [f64; N],
    /// Nanoseconds of each feature.
    fit: [f64; N],
}

impl StepTime {
    /// A step of this load took this long.
    pub fn learn(&mut self, load: StepLoad, took: Nanos) {
        if took == 0 || took > STEP_NS_MAX {
            return;
        }
        let weight = USUAL_NS / as_f64(took);
        let x = features(load).map(|x| x * weight);
        let y = USUAL_NS;
        for (row, &a) in self.xx.iter_mut().zip(&x) {
            for (cell, &b) in row.iter_mut().zip(&x) {
                *cell = *cell * FADE + a * b;
            }
        }
        for (cell, &a) in self.xy.iter_mut().zip(&x) {
            *cell = *cell * FADE + a * y;
        }
        self.steps = self.steps.saturating_add(1);
        self.fit = solve(self.xx, self.xy);
    }

    /// Nanoseconds of a step; None before enough was seen.
    pub fn predict(&self, load: StepLoad) -> Option<Nanos> {
        let known = self.steps >= STEPS_MIN;
        known.then(|| {
            to_ns(
                features(load)
                    .iter()
                    .zip(&self.fit)
                    .map(|(x, c)| x * c)
                    .sum(),
            )
        })
    }

    /// Nanoseconds of a step with nothing in it, of a token computed, of a draw, and of a KV
    /// position read by a row of one token and by one of more.
    pub fn coefficients(&self) -> [f64; 5] {
        let [base, token, draw, one, chunk] = self.fit;
        [base, token, draw, one * KV_UNIT, chunk * KV_UNIT]
    }

    /// Nanoseconds of one more prompt token; None before enough was seen.
    pub(crate) fn token_ns(&self) -> Option<Nanos> {
        (self.steps >= STEPS_MIN).then(|| to_ns(self.fit[1]).max(1))
    }

    /// Tokens of prompts that fit a step of `target` beside `decodes`, each reading about
    /// `kv_per_token` positions; None before enough was seen.
    pub(crate) fn tokens_within(
        &self,
        target: Nanos,
        decodes: StepLoad,
        kv_per_token: u64,
    ) -> Option<u32> {
        let fixed = self.predict(decodes)?;
        let each = self.fit[1] + self.fit[4] * as_f64(kv_per_token) * KV_UNIT;
        let left = as_f64(target.saturating_sub(fixed));
        let tokens = if each > 0.0 {
            left / each
        } else {
            f64::from(u32::MAX)
        };
        Some(u32::try_from(to_ns(tokens)).unwrap_or(u32::MAX))
    }
}

fn features(load: StepLoad) -> [f64; N] {
    [
        1.0,
        f64::from(load.tokens),
        f64::from(load.draws),
        as_f64(load.kv_one) * KV_UNIT,
        as_f64(load.kv_chunk) * KV_UNIT,
    ]
}

/// Solves the normal equations for coefficients that are not negative: one that would be is left
/// out and the rest solved again.
fn solve(xx: [[f64; N]; N], xy: [f64; N]) -> [f64; N] {
    let mut used = [true; N];
    loop {
        let fit = solve_used(xx, xy, used);
        let worst = (0..N)
            .filter(|&at| used[at])
            .min_by(|&a, &b| fit[a].total_cmp(&fit[b]));
        match worst {
            Some(at) if fit[at] < 0.0 => used[at] = false,
            Some(_) | None => return fit,
        }
    }
}

/// Gaussian elimination of the symmetric positive definite system of the used unknowns.
fn solve_used(mut m: [[f64; N]; N], mut y: [f64; N], used: [bool; N]) -> [f64; N] {
    for at in 0..N {
        m[at][at] += RIDGE[at];
        for other in 0..N {
            if !used[at] || !used[other] {
                m[at][other] = if at == other { 1.0 } else { 0.0 };
            }
        }
        y[at] = if used[at] { y[at] } else { 0.0 };
    }
    for at in 0..N {
        for below in at + 1..N {
            let (above, rest) = m.split_at_mut(below);
            let (pivot, row) = (&above[at], &mut rest[0]);
            let factor = row[at] / pivot[at];
            for (cell, &p) in row.iter_mut().zip(pivot).skip(at) {
                *cell -= factor * p;
            }
            y[below] -= factor * y[at];
        }
    }
    let mut fit = [0.0; N];
    for at in (0..N).rev() {
        let known: f64 = (at + 1..N).map(|col| m[at][col] * fit[col]).sum();
        fit[at] = (y[at] - known) / m[at][at];
    }
    fit
}

#[expect(
    clippy::cast_precision_loss,
    reason = "nanoseconds and positions stay far below 2^53"
)]
fn as_f64(n: u64) -> f64 {
    n as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "float to integer casts saturate, and a negative time is none"
)]
fn to_ns(ns: f64) -> u64 {
    ns as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taught(f: impl Fn(StepLoad) -> u64) -> StepTime {
        let mut model = StepTime::default();
        for n in 0..200_u32 {
            let load = StepLoad {
                tokens: 1 + n * 37 % 512,
                draws: n * 7 % 30,
                kv_one: u64::from(n * 91 % 4000),
                kv_chunk: u64::from(n * 57 % 9000),
            };
            model.learn(load, f(load));
        }
        model
    }

    fn truth(load: StepLoad) -> u64 {
        let computed = 50_000 * u64::from(load.tokens) + 300_000 * u64::from(load.draws);
        2_000_000 + computed + 700 * load.kv_one + 90 * load.kv_chunk
    }

    #[test]
    fn a_linear_machine_is_learned_to_a_percent() {
        let model = taught(truth);
        for (tokens, draws, kv_one, kv_chunk) in [(1, 1, 0, 0), (64, 20, 3000, 0), (512, 1, 0, 900)]
        {
            let load = StepLoad {
                tokens,
                draws,
                kv_one,
                kv_chunk,
            };
            let guess = model.predict(load).expect("200 steps were seen");
            let truth = truth(load);
            assert!(guess.abs_diff(truth) < truth / 100, "{guess} for {truth}");
        }
        let tokens = model
            .tokens_within(12_000_000, StepLoad::default(), 0)
            .expect("it is known");
        assert!(
            (195..=205).contains(&tokens),
            "{tokens} tokens in 10 ms of 50 us each"
        );
    }

    #[test]
    fn a_machine_that_becomes_slower_is_relearned() {
        let mut model = taught(|l| 50_000 * u64::from(l.tokens));
        for n in 0..400_u32 {
            let load = StepLoad {
                tokens: 1 + n * 37 % 512,
                ..StepLoad::default()
            };
            model.learn(load, 100_000 * u64::from(load.tokens));
        }
        let ns = model.token_ns().expect("it is known");
        assert!((95_000..=105_000).contains(&ns), "{ns} ns a token");
    }

    #[test]
    fn steps_that_are_all_alike_give_no_wild_model() {
        let mut model = StepTime::default();
        for _ in 0..100 {
            model.learn(
                StepLoad {
                    tokens: 8,
                    kv_one: 800,
                    ..StepLoad::default()
                },
                1_000_000,
            );
        }
        let guess = model
            .predict(StepLoad {
                tokens: 8,
                kv_one: 800,
                ..StepLoad::default()
            })
            .expect("100 steps were seen");
        assert!(guess.abs_diff(1_000_000) < 10_000, "{guess}");
        let double = model
            .predict(StepLoad {
                tokens: 16,
                kv_one: 1600,
                ..StepLoad::default()
            })
            .expect("it is known");
        assert!((900_000..=2_200_000).contains(&double), "{double}");
    }

    #[test]
    fn nothing_is_said_before_enough_was_seen_and_sleeps_are_not_learned() {
        let mut model = StepTime::default();
        for _ in 0..15 {
            model.learn(
                StepLoad {
                    tokens: 1,
                    kv_one: 1,
                    ..StepLoad::default()
                },
                1000,
            );
        }
        model.learn(
            StepLoad {
                tokens: 1,
                kv_one: 1,
                ..StepLoad::default()
            },
            u64::MAX,
        );
        model.learn(
            StepLoad {
                tokens: 1,
                kv_one: 1,
                ..StepLoad::default()
            },
            0,
        );
        assert_eq!(model.predict(StepLoad::default()), None);
        assert_eq!(model.token_ns(), None);
    }
}
