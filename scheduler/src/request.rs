//! What a caller asks for: one generation, its sampling, its hints.
//!
//! These are plain values. The scheduler's own record of a live request is in `live.rs`.

use rootstock_memory::{Nanos, ReplicaId};
use rootstock_radix::{Hints, NamespaceId, TenantId, Token};
use serde::{Deserialize, Serialize};

/// One live or past request. Assigned by the scheduler, in the order of arrival, never reused:
/// the replica in the top 16 bits, a counter from 1 below.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RequestId(pub u64);

impl RequestId {
    /// The replica whose scheduler assigned the id.
    pub fn replica(self) -> ReplicaId {
        let [high, low, ..] = self.0.to_be_bytes();
        ReplicaId(u16::from_be_bytes([high, low]))
    }

    pub(crate) fn new(replica: ReplicaId, count: u64) -> Self {
        debug_assert!(
            count < 1 << 48,
            "a counter of 48 bits never wraps in practice"
        );
        Self(u64::from(replica.0) << 48 | count)
    }
}

/// How the next token is drawn from the logits. The draw is a function of the logits, of `seed`
/// and of the index of the output token, so a resumed request draws what it would have drawn.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 (or less) is greedy.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set of tokens with at least this probability; 1 is off.
    pub top_p: f32,
    /// Drop tokens less probable than this share of the most probable; 0 is off.
    pub min_p: f32,
    /// Seed of the draws.
    pub seed: u64,
    /// Divides logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once if the token occurs in the output; 0 is off.
    pub presence_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// Number of alternatives whose log probability is reported; `Some(0)` is the token alone.
    pub logprobs: Option<u8>,
}

impl SamplingParams {
    /// Always the most probable token.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }

    /// Whether a draw depends on the tokens before it other than through the logits. Such a
    /// request never runs ahead of its own output.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            ..Self::greedy()
        }
    }
}

/// Who waits for the answer.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub enum Class {
    /// Nobody: warms the cache for a turn that may come. Below every client request, whatever
    /// its priority.
    Speculative,
    /// A client.
    #[default]
    Client,
}

/// One generation asked for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct NewRequest {
    /// Who pays.
    pub tenant: TenantId,
    /// What else identifies the KV: model, numerics, adapter, salt.
    pub ns: NamespaceId,
    /// The prompt.
    pub tokens: Vec<Token>,
    /// Output tokens at most, 1 or more.
    pub max_tokens: u32,
    /// Output tokens before which no stop token ends the request.
    pub min_tokens: u32,
    /// Tokens that end the request (end of sequence, end of turn).
    pub stop_tokens: Vec<Token>,
    /// Generate on through stop tokens.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What the caller knows about the request. A hint can only help.
    pub hints: Hints,
    /// Client or speculative.
    pub class: Class,
    /// Instant at which the request ends as `Expired`, whatever its phase.
    pub deadline: Option<Nanos>,
    /// The caller's own handle; opaque, need not be unique, echoed in every event.
    pub label: u64,
}

impl NewRequest {
    /// A greedy request of a client, with no hints and no stop tokens.
    pub fn new(ns: NamespaceId, tokens: Vec<Token>, max_tokens: u32) -> Self {
        Self {
            tenant: TenantId(0),
            ns,
            tokens,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            sampling: SamplingParams::greedy(),
            hints: Hints::default(),
            class: Class::Client,
            deadline: None,
            label: 0,
        }
    }
}
