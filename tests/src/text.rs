//! The model of the double: what follows a history, and what a request says when it is alone.
//!
//! KV of position p is a fingerprint of (namespace, tokens 0..=p), a chain of hashes. The next
//! token is a function of the last fingerprint, and of (seed, output index) when the request
//! samples. So any wrong page, lost or doubled token changes what follows.

use std::hash::{Hash, Hasher};

use rootstock_radix::{NamespaceId, Token};
use rootstock_scheduler::{FinishReason, NewRequest, SamplingParams};

use crate::rng::mix;

/// Tokens the double draws are below this, so that stop tokens come up.
pub const VOCAB: u32 = 97;

/// Fingerprint of the empty history.
pub fn empty(ns: NamespaceId) -> u64 {
    let mut hasher = Mixer(0x5eed);
    ns.hash(&mut hasher);
    hasher.0
}

/// Hashes ids, whose numbers are private, into fingerprints.
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.0 = mix(self.0 ^ u64::from(byte)));
    }
}

/// Fingerprint of a history extended by one token.
pub fn extend(before: u64, token: Token) -> u64 {
    mix(before ^ mix(u64::from(token) + 1))
}

/// The token that follows a history.
pub fn draw(kv: u64, params: &SamplingParams, output_index: u32, suppress: &[Token]) -> Token {
    let salt = if params.temperature > 0.0 {
        mix(params.seed ^ mix(u64::from(output_index)))
    } else {
        0
    };
    let mut x = kv ^ salt;
    loop {
        x = mix(x);
        let token = u32::try_from(x % u64::from(VOCAB)).unwrap_or(0);
        if !suppress.contains(&token) {
            return token;
        }
    }
}

/// What a request says when nothing disturbs it, and why it ends.
pub fn alone(new: &NewRequest, max_model_len: u32) -> (Vec<Token>, FinishReason) {
    let mut kv = new
        .tokens
        .iter()
        .fold(empty(new.ns), |kv, &token| extend(kv, token));
    let prompt = u32::try_from(new.tokens.len()).unwrap_or(u32::MAX);
    let most = new.max_tokens.min(max_model_len - prompt);
    let mut output = Vec::new();
    for index in 0..most {
        let early = index < new.min_tokens && !new.ignore_eos;
        let suppress: &[Token] = if early { &new.stop_tokens } else { &[] };
        let token = draw(kv, &new.sampling, index, suppress);
        output.push(token);
        kv = extend(kv, token);
        if !new.ignore_eos && new.stop_tokens.contains(&token) {
            return (output, FinishReason::Stop);
        }
    }
    (output, FinishReason::Length)
}
