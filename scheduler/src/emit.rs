//! What callers hear: admission answers and the events of a request.
//!
//! An admitted request gets at most one `Started`, any number of `Tokens`, and exactly one
//! `Final`, in this order. No event follows `Final`.

use rootstock_memory::Nanos;
use rootstock_radix::Token;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::request::RequestId;
use crate::step::Logprobs;

/// Answer to `Scheduler::add`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Admission {
    /// Queued. Its events carry this id.
    Admitted(RequestId),
    /// The queue is full; try again later.
    Deferred {
        /// Requests waiting, preempted ones included.
        queue_len: u32,
        /// Most that may wait.
        queue_cap: u32,
        /// Seconds after which a place is likely, 1 or more.
        retry_after_s: u32,
    },
    /// It can never run; nothing was kept of it.
    Rejected(Reason),
}

/// Why a request can never run.
#[derive(Clone, PartialEq, Eq, Debug, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// No prompt.
    #[error("the prompt has no tokens; at least 1 is needed")]
    Empty,
    /// Prompt beyond the model.
    #[error(
        "the prompt has {tokens} tokens; at most {limit} fit the model length with one left to \
         generate"
    )]
    TooLong {
        /// Tokens of the prompt.
        tokens: u32,
        /// Longest prompt accepted.
        limit: u32,
    },
    /// Prompt beyond the whole pool.
    #[error(
        "the prompt needs {needed_pages} KV pages and {usable_pages} are usable; shorten it or \
         give the server more KV memory"
    )]
    NeverFits {
        /// Pages of the prompt.
        needed_pages: u32,
        /// Pages of the replica that requests can use.
        usable_pages: u32,
    },
    /// Nothing asked for.
    #[error("max_tokens is 0; at least 1 is needed")]
    MaxTokensZero,
}

/// One event of one request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Emit {
    /// First admission to the batch; with a prefix on host, when it has come up.
    Started {
        /// Ours.
        request: RequestId,
        /// The caller's.
        label: u64,
        /// Prompt tokens found in the cache.
        cached: CachedTokens,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// Output, in order, each token once. A stop token that ends the request is included.
    Tokens {
        /// Ours.
        request: RequestId,
        /// The caller's.
        label: u64,
        /// One or more tokens.
        tokens: Vec<Token>,
        /// One entry a token, when asked for.
        logprobs: Option<Box<Logprobs>>,
    },
    /// The end; the last event.
    Final {
        /// Ours.
        request: RequestId,
        /// The caller's.
        label: u64,
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
}

impl Emit {
    /// Whose event this is.
    pub fn request(&self) -> RequestId {
        match self {
            Emit::Started { request, .. }
            | Emit::Tokens { request, .. }
            | Emit::Final { request, .. } => *request,
        }
    }

    /// The caller's handle of the request.
    pub fn label(&self) -> u64 {
        match self {
            Emit::Started { label, .. }
            | Emit::Tokens { label, .. }
            | Emit::Final { label, .. } => *label,
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FinishReason {
    /// End of sequence or another stop token.
    Stop,
    /// The caller found a stop string.
    StopString,
    /// `max_tokens` or the model length reached.
    Length,
    /// The caller gave up.
    Aborted,
    /// The computation went wrong.
    Failed(FailKind),
    /// Deadline or queue timeout passed.
    Expired,
    /// Ran out of KV pages with nothing left to take them from; carries what was generated.
    OutOfPages,
    /// Gave way as often as is allowed, and would have had to again.
    TooManyPreemptions,
    /// Gave its place in the full queue to a better request.
    Displaced,
}

/// What went wrong in a computation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FailKind {
    /// The backend reported a failed or panicked step.
    Step,
    /// The backend's output does not fit the plan.
    BadOutput,
}

/// What a request used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens found in the cache at the first admission and used; never the request's own
    /// pages, and nothing that was computed because a copy failed or was not worth it.
    pub cached: CachedTokens,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Times the request gave way.
    pub preemptions: u32,
    /// Arrival to first admission, or to the end if never admitted.
    pub queue_ns: Nanos,
    /// Arrival to first token.
    pub ttft_ns: Option<Nanos>,
    /// What came of the pins asked for.
    pub pins: PinReport,
}

/// What came of the pins that a request asked for, over all of them. All zero when it asked for
/// none, or ended before its prompt was cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PinReport {
    /// Pins asked for.
    pub asked: u32,
    /// Pinned as asked.
    pub accepted: u32,
    /// Pinned in part: the budget was used up.
    pub clipped: u32,
    /// Not pinned: no budget, a lifetime of 0, or less than a page.
    pub rejected: u32,
    /// Pages of the longest pinned prefix.
    pub pages: u32,
    /// Pages of the longest prefix asked for.
    pub asked_pages: u32,
}

/// Tokens found in the cache, by tier; disjoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CachedTokens {
    /// On the device.
    pub device: u32,
    /// On the host.
    pub host: u32,
    /// In storage, from where they came by way of the host.
    pub storage: u32,
}

impl CachedTokens {
    /// Below the device.
    pub(crate) fn below(&self) -> u32 {
        self.host + self.storage
    }

    /// Over all tiers.
    pub fn total(&self) -> u32 {
        self.device + self.host + self.storage
    }
}
