//! Drawing one token from logits: bias, penalties, temperature, min-p, top-k, top-p, in this order.
//!
//! The draw is a function of (seed, output index), so a request samples the same tokens in any
//! batch, after a preemption and on a retry. Ties are broken by the lower token id everywhere.
//! Temperature 0 takes the largest logit. Log probabilities are those of the raw logits.

use super::error::KernelError;
use super::norm::argmax;

/// How many candidates are ordered before top-p asks for all of them.
const FIRST_SORTED: usize = 512;

/// Parameters of one draw. Off: temperature 0 (greedy), `top_k` 0, `top_p` 1, `min_p` 0,
/// repetition penalty 1, the other penalties 0.
#[derive(Clone, Copy, Debug)]
pub struct SampleArgs<'a> {
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens until their probabilities sum to this.
    pub top_p: f32,
    /// Keeps tokens at least this share as likely as the most likely one.
    pub min_p: f32,
    /// Seed of the request.
    pub seed: u64,
    /// Index of the token among the request's outputs.
    pub output_index: u32,
    /// Divides positive and multiplies negative logits of tokens already in prompt or output.
    pub repetition_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once for tokens in the output.
    pub presence_penalty: f32,
    /// Prompt tokens, for the repetition penalty.
    pub prompt: &'a [u32],
    /// Output tokens so far, for all penalties.
    pub output: &'a [u32],
    /// Added to logits; `-inf` forbids. Tokens outside the vocabulary are passed over.
    pub logit_bias: &'a [(u32, f32)],
    /// One bit per token, lowest first; tokens without a set bit are forbidden.
    pub mask: Option<&'a [u32]>,
    /// Log probabilities wanted: of the drawn token and of this many most likely ones.
    pub logprobs: Option<u8>,
}

impl SampleArgs<'_> {
    /// The largest logit, nothing else.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        output_index: 0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        prompt: &[],
        output: &[],
        logit_bias: &[],
        mask: None,
        logprobs: None,
    };

    fn check(&self) -> Result<(), KernelError> {
        let refuse = |parameter, value, wanted| {
            Err(KernelError::SampleParameter {
                parameter,
                value,
                wanted,
            })
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "a finite number from 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "more than 0, at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", self.min_p, "0 to 1");
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return refuse(
                "repetition_penalty",
                self.repetition_penalty,
                "a finite number above 0",
            );
        }
        if !self.frequency_penalty.is_finite() {
            return refuse(
                "frequency_penalty",
                self.frequency_penalty,
                "a finite number",
            );
        }
        if !self.presence_penalty.is_finite() {
            return refuse("presence_penalty", self.presence_penalty, "a finite number");
        }
        Ok(())
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log probability under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens with theirs, the best first.
    pub top: Vec<(u32, f32)>,
}

/// Buffers of [`sample`]; one per thread that samples.
#[derive(Debug, Default)]
pub struct SampleScratch {
    candidates: Vec<Candidate>,
    seen: Vec<u32>,
    raw: Vec<f32>,
}

/// A token with its logit and its probability relative to the best one.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    weight: f64,
}

/// Draws one token. The logits are changed in place by bias, penalties and mask.
///
/// # Errors
/// A parameter outside its range, or no token left to draw.
///
/// # Cost
/// O(vocabulary); sorts only the most likely part.
pub fn sample(
    logits: &mut [f32],
    args: &SampleArgs<'_>,
    scratch: &mut SampleScratch,
) -> Result<Sampled, KernelError> {
    args.check()?;
    if args.logprobs.is_some() {
        scratch.raw.clear();
        scratch.raw.extend_from_slice(logits);
    }
    adjust(logits, args, &mut scratch.seen);
    let token = if args.temperature == 0.0 {
        argmax(logits).filter(|&token| logits[token as usize] != f32::NEG_INFINITY)
    } else {
        draw(logits, args, &mut scratch.candidates)
    };
    let token = token.ok_or(KernelError::NothingToSample {
        vocab: logits.len(),
    })?;
    let Some(count) = args.logprobs else {
        return Ok(Sampled {
            token,
            logprob: None,
            top: Vec::new(),
        });
    };
    let log_sum = log_sum_exp(&scratch.raw);
    let logprob = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let top = most_likely(&scratch.raw, count, &mut scratch.candidates);
    Ok(Sampled {
        token,
        logprob: Some(logprob(scratch.raw[token as usize])),
        top: top
            .iter()
            .map(|best| (best.token, logprob(best.logit)))
            .collect(),
    })
}

/// Bias, penalties and mask, in place.
fn adjust(logits: &mut [f32], args: &SampleArgs<'_>, seen: &mut Vec<u32>) {
    if args.repetition_penalty != 1.0 {
        distinct(args.prompt.iter().chain(args.output), seen);
        for &token in seen.iter() {
            if let Some(logit) = logits.get_mut(token as usize) {
                let penalty = args.repetition_penalty;
                *logit = if *logit > 0.0 {
                    *logit / penalty
                } else {
                    *logit * penalty
                };
            }
        }
    }
    if args.presence_penalty != 0.0 {
        distinct(args.output.iter(), seen);
        for &token in seen.iter() {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= args.presence_penalty;
            }
        }
    }
    if args.frequency_penalty != 0.0 {
        for &token in args.output {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= args.frequency_penalty;
            }
        }
    }
    for &(token, bias) in args.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    if let Some(mask) = args.mask {
        for (chunk, word) in logits
            .chunks_mut(32)
            .zip(mask.iter().chain(std::iter::repeat(&0)))
        {
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

fn distinct<'a>(tokens: impl Iterator<Item = &'a u32>, seen: &mut Vec<u32>) {
    seen.clear();
    seen.extend(tokens);
    seen.sort_unstable();
    seen.dedup();
}

/// Filters the candidates and draws one; `None` when no logit is a number above `-inf`.
fn draw(logits: &[f32], args: &SampleArgs<'_>, candidates: &mut Vec<Candidate>) -> Option<u32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::INFINITY {
        return argmax(logits);
    }
    let temperature = f64::from(args.temperature);
    let floor = f64::from(args.min_p);
    candidates.clear();
    candidates.extend((0..).zip(logits).filter_map(|(token, &logit)| {
        let weight = ((f64::from(logit) - f64::from(max)) / temperature).exp();
        // A NaN weight fails both comparisons.
        (weight > 0.0 && weight >= floor).then_some(Candidate {
            token,
            logit,
            weight,
        })
    }));
    let top_k = args.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, likelier);
        candidates.truncate(top_k);
        candidates.sort_unstable_by(likelier);
    }
    let total: f64 = candidates.iter().map(|c| c.weight).sum();
    if args.top_p < 1.0 {
        keep_nucleus(candidates, f64::from(args.top_p) * total);
    }
    let total: f64 = candidates.iter().map(|c| c.weight).sum();
    let mut left = unit_draw(args.seed, args.output_index) * total;
    for candidate in candidates.iter() {
        left -= candidate.weight;
        if left < 0.0 {
            return Some(candidate.token);
        }
    }
    // Rounding may leave a sliver after the last one.
    candidates.last().map(|candidate| candidate.token)
}

/// Keeps the likeliest candidates whose weights first reach `mass`, in order.
fn keep_nucleus(candidates: &mut Vec<Candidate>, mass: f64) {
    let mut sorted = FIRST_SORTED.min(candidates.len());
    loop {
        if sorted < candidates.len() {
            candidates.select_nth_unstable_by(sorted, likelier);
        }
        candidates[..sorted].sort_unstable_by(likelier);
        let mut sum = 0.0;
        let reached = candidates[..sorted].iter().position(|candidate| {
            sum += candidate.weight;
            sum >= mass
        });
        if let Some(last) = reached {
            candidates.truncate(last + 1);
            return;
        }
        if sorted == candidates.len() {
            return;
        }
        sorted = (sorted * 8).min(candidates.len());
    }
}

/// The order of candidates: larger logits first, then lower tokens.
fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

fn most_likely<'a>(raw: &[f32], count: u8, found: &'a mut Vec<Candidate>) -> &'a [Candidate] {
    let count = usize::from(count);
    found.clear();
    if count == 0 {
        return found;
    }
    let numbers = (0..).zip(raw).filter(|(_, logit)| !logit.is_nan());
    found.extend(numbers.map(|(token, &logit)| Candidate {
        token,
        logit,
        weight: 0.0,
    }));
    if count < found.len() {
        found.select_nth_unstable_by(count - 1, likelier);
        found.truncate(count);
    }
    found.sort_unstable_by(likelier);
    found
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits
        .iter()
        .filter(|logit| !logit.is_nan())
        .map(|&logit| (f64::from(logit) - max).exp())
        .sum();
    max + sum.ln()
}

/// A number in [0, 1) from the seed and the output index alone.
fn unit_draw(seed: u64, output_index: u32) -> f64 {
    let word = mix(mix(seed ^ 0x5243_4b44_5241_5753).wrapping_add(u64::from(output_index) + 1));
    (word >> 11) as f64 / (1_u64 << 53) as f64
}

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
