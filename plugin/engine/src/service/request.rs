//! One request as its caller sees it: submission, ticket, events, refusals.

use std::sync::Arc;
use std::time::Duration;

use rootstock::memory::ReplicaId;
use rootstock::radix::{CacheError, FlushRefused, Hints, TenantId, Token};
use rootstock::scheduler::{
    CachedTokens, Class, FinishReason, Logprobs, Reason, SamplingParams, Usage,
};

use crate::constrained::Grammar;

use super::Shared;
use super::core_thread::Message;
use super::wish::{Control, Wish};

/// One generation asked for.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The prompt.
    pub tokens: Vec<Token>,
    /// Output tokens at most, 1 or more.
    pub max_tokens: u32,
    /// Output tokens before which no stop token ends the request.
    pub min_tokens: u32,
    /// Tokens that end the request.
    pub stop_tokens: Vec<Token>,
    /// Generate on through stop tokens.
    pub ignore_eos: bool,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What the output has to be.
    pub grammar: Option<Grammar>,
    /// What the caller knows about the request.
    pub hints: Hints,
    /// Keeps the KV of this request apart from other salts.
    pub salt: Option<String>,
    /// Who pays.
    pub tenant: TenantId,
    /// Client or speculative.
    pub class: Class,
    /// Time after which the request ends as expired, from now on.
    pub patience: Option<Duration>,
}

impl Submission {
    /// A greedy request without hints.
    #[must_use]
    pub fn new(tokens: Vec<Token>, max_tokens: u32) -> Self {
        Self {
            tokens,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            sampling: SamplingParams::greedy(),
            grammar: None,
            hints: Hints::default(),
            salt: None,
            tenant: TenantId(0),
            class: Class::Client,
            patience: None,
        }
    }
}

/// What happens to a request, in order; nothing follows `Final`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Its first step is about to run.
    Started {
        /// Prompt tokens found in the cache.
        cached: CachedTokens,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Where it runs.
        replica: ReplicaId,
    },
    /// Output, each token once.
    Tokens {
        /// One or more tokens; the stop token that ends the request is included.
        tokens: Vec<Token>,
        /// One entry a token, when asked for.
        logprobs: Option<Box<Logprobs>>,
    },
    /// The end.
    Final {
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
}

/// Why a request was not queued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The queue is full; worth another try.
    #[error("{queue_len} of {queue_cap} places in the queue are taken, retry in {retry_after_s} s")]
    Deferred {
        /// Requests waiting.
        queue_len: u32,
        /// Places.
        queue_cap: u32,
        /// Seconds after which a place is likely.
        retry_after_s: u32,
    },
    /// It can never run.
    #[error(transparent)]
    Rejected(#[from] Reason),
    /// The cache takes no further namespace.
    #[error(transparent)]
    Namespace(#[from] CacheError),
    /// A token outside the vocabulary.
    #[error("{what} has token {token}, the vocabulary ends at {vocab}")]
    Token {
        /// Which part of the submission.
        what: &'static str,
        /// The token.
        token: Token,
        /// Number of token ids.
        vocab: u32,
    },
    /// A sampling parameter outside its range.
    #[error("{name} is {value}, it must be {wanted}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f32,
        /// The range.
        wanted: &'static str,
    },
    /// A grammar on a backend that applies none.
    #[error("this backend cannot constrain what it generates")]
    NoGrammars,
    /// The service is shutting down.
    #[error("the service is draining and takes no new requests")]
    Draining,
    /// The engine is lost.
    #[error("the engine is dead and serves no requests, restart the process")]
    EngineDead,
}

/// Why the cache was not emptied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// Something is in use.
    #[error(transparent)]
    Refused(#[from] FlushRefused),
    /// The engine is lost.
    #[error("the engine is dead")]
    EngineDead,
}

/// A request that was queued. Dropping it aborts the request.
#[derive(Debug)]
pub struct Ticket {
    /// The request's events. Closed after `Final`; closed without one if the service is gone.
    pub events: flume::Receiver<Event>,
    pub(super) control: Arc<Control>,
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: flume::Sender<Message>,
}

impl Ticket {
    /// Ends the request as finished by a stop string: its KV stays, the last event says
    /// `StopString`. Tokens already on their way may come before it.
    pub fn finish(&self) {
        self.want(Wish::Finish);
    }

    /// Ends the request; the last event says `Aborted`.
    pub fn abort(&self) {
        self.want(Wish::Abort);
    }

    /// A wish needs no place in the inbox; the message only wakes a core thread that has nothing to
    /// do, and a full inbox wakes it too.
    fn want(&self, wish: Wish) {
        if self.control.want(wish, &self.shared.wishes) {
            let _full_or_gone = self.inbox.try_send(Message::Wake);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.want(Wish::Abort);
    }
}

/// A submission on its way to the core thread.
#[derive(Debug)]
pub(super) struct SubmitMessage {
    pub(super) submission: Submission,
    pub(super) events: flume::Sender<Event>,
    pub(super) control: Arc<Control>,
    pub(super) reply: flume::Sender<Result<(), SubmitError>>,
}

/// What submissions are checked against before they are sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLimits {
    pub(super) vocab: u32,
    pub(super) max_model_len: u32,
    pub(super) max_queue: u32,
}

/// Refuses what the sampler would refuse in the middle of a step.
pub(super) fn check(submission: &Submission, limits: &RequestLimits) -> Result<(), SubmitError> {
    let sampling = &submission.sampling;
    within(
        "the prompt",
        submission.tokens.iter().copied(),
        limits.vocab,
    )?;
    within(
        "logit_bias",
        sampling.logit_bias.iter().map(|&(token, _)| token),
        limits.vocab,
    )?;
    let finite = -1e6..=1e6;
    let bias = sampling
        .logit_bias
        .iter()
        .map(|&(_, bias)| ("logit_bias", bias));
    let penalties = [
        ("frequency_penalty", sampling.frequency_penalty),
        ("presence_penalty", sampling.presence_penalty),
    ];
    for (name, value) in bias.chain(penalties) {
        if !finite.contains(&value) {
            return Err(SubmitError::Parameter {
                name,
                value,
                wanted: "between -1e6 and 1e6",
            });
        }
    }
    let parameter = |name, value: f32, good: bool, wanted| {
        if good {
            Ok(())
        } else {
            Err(SubmitError::Parameter {
                name,
                value,
                wanted,
            })
        }
    };
    let unit = 0.0..=1.0;
    let repetition = sampling.repetition_penalty;
    let (temperature, top_p, min_p) = (sampling.temperature, sampling.top_p, sampling.min_p);
    parameter(
        "temperature",
        temperature,
        (0.0..=100.0).contains(&temperature),
        "0 to 100",
    )?;
    parameter(
        "top_p",
        top_p,
        unit.contains(&top_p) && top_p > 0.0,
        "above 0, at most 1",
    )?;
    parameter("min_p", min_p, unit.contains(&min_p), "0 to 1")?;
    let good = repetition > 0.0 && repetition <= 1e6;
    parameter(
        "repetition_penalty",
        repetition,
        good,
        "above 0, at most 1e6",
    )
}

/// Refuses tokens the model does not know.
fn within(
    what: &'static str,
    mut tokens: impl Iterator<Item = Token>,
    vocab: u32,
) -> Result<(), SubmitError> {
    match tokens.find(|&token| token >= vocab) {
        Some(token) => Err(SubmitError::Token { what, token, vocab }),
        None => Ok(()),
    }
}
