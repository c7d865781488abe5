//! What callers say about a request and its spans. Plain data; a hint can only help.

use crate::Token;
use rootstock_memory::StepId;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a span of the prompt is.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub enum ContextKind {
    /// System prompt.
    System,
    /// Tool definitions.
    Tools,
    /// Earlier turns.
    History,
    /// What a tool returned.
    ToolOutput,
    /// The model's reasoning; most templates drop it on the next turn.
    Thinking,
    /// Notes that the program rewrites.
    Scratchpad,
    /// Not said.
    #[default]
    Unknown,
}

/// What to do with computed pages that turn out to be cached already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Dedup {
    /// The caller's page table takes the cached pages; the duplicates are released.
    #[default]
    Swap,
    /// The page table cannot change: the lease holds the duplicates until it ends.
    Keep,
}

/// What is known about pages that go into the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SpanMeta {
    /// What the span is.
    pub kind: ContextKind,
    /// Importance; higher stays longer. A shared prefix takes the maximum.
    pub priority: i32,
    /// Seconds of idleness after which `priority` holds no longer; `None` is never.
    #[serde(default)]
    pub retention_s: Option<u32>,
    /// What to do with duplicates.
    pub dedup: Dedup,
    /// Last step that may still touch these pages, if one is in flight.
    pub busy_until: Option<StepId>,
}

/// How important a span is, and for how long. Of two, the one of higher priority is stronger, of
/// equal ones the longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Retention {
    /// Higher stays longer.
    pub priority: i32,
    /// Seconds of idleness after which it holds no longer; `None` is never.
    pub seconds: Option<u32>,
}

impl Retention {
    /// TensorRT-LLM's priority: 0 to 100, of which 35 is the default.
    ///
    /// Larger numbers count as 100.
    pub fn of_tensorrt_priority(priority: u32, seconds: Option<u32>) -> Self {
        let priority = i32::try_from(priority.min(100)).unwrap_or(100) - 35;
        Self { priority, seconds }
    }

    /// The stronger of two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        let key = |one: &Self| (one.priority, one.seconds.is_none(), one.seconds);
        if key(&other) > key(&self) {
            other
        } else {
            self
        }
    }
}

/// What becomes of the KV of a request that ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Fate {
    /// Cached in normal order.
    Keep,
    /// Another prefix replaces it: what only this request used goes first.
    Superseded,
    /// Never to be used again: what only this request used is dropped at once.
    Ephemeral,
    /// The request was preempted and will come back.
    Preempted,
    /// The request could not begin and goes on waiting: nothing is copied down for it.
    Unused,
}

/// How long a pin lasts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ttl {
    /// Seconds; 0 is no pin.
    pub seconds: u64,
    /// Whether more was asked for.
    pub clamped: bool,
}

/// What came with a request about how it will behave. Absent means unknown.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Hints {
    /// Seconds by which the request may overtake others.
    pub jump_s: f64,
    /// Importance for preemption and eviction; higher is more important.
    pub priority: i32,
    /// Seconds of idleness after which `priority` holds no longer for eviction; `None` is never.
    pub retention_s: Option<u32>,
    /// Importance for eviction of parts of the prompt, in tokens, where it is not `priority`.
    pub retain: Vec<(Range<u32>, Retention)>,
    /// Importance for eviction of what is generated, where it is not `priority`.
    pub retain_output: Option<Retention>,
    /// Queue tier; higher goes first.
    pub strict: u32,
    /// Expected output tokens.
    pub osl: Option<u32>,
    /// Whether the next turn's stable prefix should be computed ahead.
    pub speculate: bool,
    /// Program that the request belongs to.
    pub program: Option<String>,
    /// Program that started this one.
    pub parent: Option<String>,
    /// Whether this is the program's last request.
    pub session_final: bool,
    /// Expected milliseconds until the program's next request.
    pub iat_ms: Option<u32>,
    /// Expected number of further requests on this prefix.
    pub reuses: Option<u32>,
    /// What the prompt is as a whole.
    pub context: Option<ContextKind>,
    /// What its parts are, in tokens.
    pub spans: Vec<(Range<u32>, ContextKind)>,
    /// Prefixes to pin, in tokens; `u32::MAX` is the whole prompt.
    pub pins: Vec<(u32, Ttl)>,
    /// Fields that were not understood, by name.
    pub ignored: Vec<String>,
}

impl Hints {
    /// What the span that holds token `at` is: the narrowest statement there is.
    pub fn kind_at(&self, at: Token) -> ContextKind {
        let span = self.spans.iter().find(|(range, _)| range.contains(&at));
        span.map_or(self.context.unwrap_or_default(), |&(_, kind)| kind)
    }

    /// How important the tokens `part` are for eviction: the strongest statement about any of
    /// them. The first `prompt_tokens` are the prompt, what follows is output.
    pub fn retention_of(&self, part: Range<u32>, prompt_tokens: u32) -> Retention {
        let own = Retention {
            priority: self.priority,
            seconds: self.retention_s,
        };
        let asked = part.start..part.end.min(prompt_tokens);
        let touching = self
            .retain
            .iter()
            .filter(|(range, _)| range.start < asked.end && asked.start < range.end);
        let prompt = touching.map(|&(_, said)| said).reduce(Retention::max);
        let output = self.retain_output.filter(|_| part.end > prompt_tokens);
        let said = [prompt, output].into_iter().flatten();
        said.reduce(Retention::max).unwrap_or(own)
    }

    /// What is said about the pages from `pages.start` on, and where (at most at `pages.end`) the
    /// run ends for which that is the same. A page is of the kind of its first token.
    pub fn span(&self, pages: Range<u32>, page_tokens: u32, prompt_tokens: u32) -> (u32, SpanMeta) {
        let said = |page: u32| {
            let tokens = page * page_tokens..(page + 1) * page_tokens;
            let kind = self.kind_at(tokens.start);
            (kind, self.retention_of(tokens, prompt_tokens))
        };
        let first = said(pages.start);
        let (kind, Retention { priority, seconds }) = first;
        let mut end = pages.start + 1;
        while end < pages.end && said(end) == first {
            end += 1;
        }
        let meta = SpanMeta {
            kind,
            priority,
            retention_s: seconds,
            ..SpanMeta::default()
        };
        (end, meta)
    }
}
