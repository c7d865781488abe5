//! How long a step takes, learned from the steps that were: what a step budget and the worth of
//! a cached token follow.
//!
//! Model: `ns = base + token * tokens + context * kv`, where `tokens` is what the step computes
//! and `kv` the KV positions its rows read. Least squares over the steps seen, older ones
//! counting less by a factor each step. Plain IEEE additions, multiplications and divisions in a
//! fixed order, so that equal inputs give equal models on every machine.

use rootstock_memory::Nanos;

/// Weight of the past at each new step: half after some 70 steps.
const FADE: f64 = 0.99;
/// Steps before the model is believed.
const STEPS_MIN: u32 = 16;
/// Longest step that is believed; a longer one is a machine that slept.
const STEP_NS_MAX: Nanos = 60_000_000_000;
/// Positions are counted in thousands, to keep the three unknowns of like size.
const KV_UNIT: f64 = 1e-3;
/// Pull towards 0 that keeps the system solvable when all steps are alike.
const RIDGE: f64 = 1e-3;

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepLoad {
    /// Positions computed.
    pub tokens: u32,
    /// KV positions read by all rows.
    pub kv: u64,
}

impl StepLoad {
    /// StepLoad of rows of (first position, positions).
    pub fn of(rows: impl Iterator<Item = (u32, u32)>) -> StepLoad {
        rows.fold(StepLoad::default(), |load, (first_pos, len)| {
            let (first, len64) = (u64::from(first_pos), u64::from(len));
            StepLoad {
                tokens: load.tokens + len,
                kv: load.kv + len64 * first + len64 * (len64 + 1) / 2,
            }
        })
    }
}

/// The learned model.
#[derive(Clone, Debug, Default)]
pub struct StepTime {
    steps: u32,
    /// Sums of products of (1, tokens, kv).
    xx: [[f64; 3]; 3],
    /// Sums of their products with the time.
    xy: [f64; 3],
    /// Nanoseconds: base, per token, per kv unit.
    fit: [f64; 3],
}

impl StepTime {
    /// A step of this load took this long.
    pub fn learn(&mut self, load: StepLoad, took: Nanos) {
        if took == 0 || took > STEP_NS_MAX {
            return;
        }
        let x = features(load);
        let y = as_f64(took);
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

    /// Nanoseconds of a step with nothing in it, of a token computed, and of a KV position read.
    pub fn coefficients(&self) -> [f64; 3] {
        let [base, token, kv] = self.fit;
        [base, token, kv * KV_UNIT]
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
        let each = self.fit[1] + self.fit[2] * as_f64(kv_per_token) * KV_UNIT;
        let left = as_f64(target.saturating_sub(fixed));
        let tokens = if each > 0.0 {
            left / each
        } else {
            f64::from(u32::MAX)
        };
        Some(u32::try_from(to_ns(tokens)).unwrap_or(u32::MAX))
    }
}

fn features(load: StepLoad) -> [f64; 3] {
    [1.0, f64::from(load.tokens), as_f64(load.kv) * KV_UNIT]
}

/// Solves the normal equations for coefficients that are not negative: one that would be is left
/// out and the rest solved again.
fn solve(xx: [[f64; 3]; 3], xy: [f64; 3]) -> [f64; 3] {
    let mut used = [true; 3];
    loop {
        let fit = solve_used(xx, xy, used);
        let worst = (0..3)
            .filter(|&at| used[at])
            .min_by(|&a, &b| fit[a].total_cmp(&fit[b]));
        match worst {
            Some(at) if fit[at] < 0.0 => used[at] = false,
            Some(_) | None => return fit,
        }
    }
}

/// Gaussian elimination of the symmetric positive definite system of the used unknowns.
fn solve_used(mut m: [[f64; 3]; 3], mut y: [f64; 3], used: [bool; 3]) -> [f64; 3] {
    for at in 0..3 {
        m[at][at] += RIDGE;
        for other in 0..3 {
            if !used[at] || !used[other] {
                m[at][other] = if at == other { 1.0 } else { 0.0 };
            }
        }
        y[at] = if used[at] { y[at] } else { 0.0 };
    }
    for at in 0..3 {
        for below in at + 1..3 {
            let (above, rest) = m.split_at_mut(below);
            let (pivot, row) = (&above[at], &mut rest[0]);
            let factor = row[at] / pivot[at];
            for (cell, &p) in row.iter_mut().zip(pivot).skip(at) {
                *cell -= factor * p;
            }
            y[below] -= factor * y[at];
        }
    }
    let mut fit = [0.0; 3];
    for at in (0..3).rev() {
        let known: f64 = (at + 1..3).map(|col| m[at][col] * fit[col]).sum();
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
                kv: u64::from(n * 91 % 4000),
            };
            model.learn(load, f(load));
        }
        model
    }

    #[test]
    fn a_linear_machine_is_learned_to_a_percent() {
        let model = taught(|l| 2_000_000 + 50_000 * u64::from(l.tokens) + 700 * l.kv);
        for (tokens, kv) in [(1, 0), (64, 3000), (512, 100)] {
            let truth = 2_000_000 + 50_000 * u64::from(tokens) + 700 * kv;
            let guess = model
                .predict(StepLoad { tokens, kv })
                .expect("200 steps were seen");
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
                kv: 0,
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
            model.learn(StepLoad { tokens: 8, kv: 800 }, 1_000_000);
        }
        let guess = model
            .predict(StepLoad { tokens: 8, kv: 800 })
            .expect("100 steps were seen");
        assert!(guess.abs_diff(1_000_000) < 10_000, "{guess}");
        let double = model
            .predict(StepLoad {
                tokens: 16,
                kv: 1600,
            })
            .expect("it is known");
        assert!((900_000..=2_200_000).contains(&double), "{double}");
    }

    #[test]
    fn nothing_is_said_before_enough_was_seen_and_sleeps_are_not_learned() {
        let mut model = StepTime::default();
        for _ in 0..15 {
            model.learn(StepLoad { tokens: 1, kv: 1 }, 1000);
        }
        model.learn(StepLoad { tokens: 1, kv: 1 }, u64::MAX);
        model.learn(StepLoad { tokens: 1, kv: 1 }, 0);
        assert_eq!(model.predict(StepLoad::default()), None);
        assert_eq!(model.token_ns(), None);
    }
}
