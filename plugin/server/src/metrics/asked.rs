//! What metrics tell requests apart by: how urgent they are, and what their prompts are made of.

use std::ops::Range;

use rootstock::radix::{ContextKind, Hints};
use rootstock::scheduler::CachedTokens;

/// How urgent a request is, by what it or its headers said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestClass {
    /// It asked for a first token before others (`latency_sensitivity`).
    Urgent,
    /// Above the usual priority, or in a stricter tier.
    High,
    /// It said nothing.
    Normal,
    /// Below the usual priority.
    Low,
}

impl RequestClass {
    /// Of a request.
    pub fn of(hints: &Hints) -> RequestClass {
        // Priority alone is a jump of as many seconds.
        if hints.jump_s > f64::from(hints.priority.max(0)) {
            return RequestClass::Urgent;
        }
        if hints.priority > 0 || hints.strict > 0 {
            return RequestClass::High;
        }
        if hints.priority < 0 {
            RequestClass::Low
        } else {
            RequestClass::Normal
        }
    }

    /// As the label says it.
    pub const fn name(self) -> &'static str {
        match self {
            RequestClass::Urgent => "urgent",
            RequestClass::High => "high",
            RequestClass::Normal => "normal",
            RequestClass::Low => "low",
        }
    }
}

/// Where tokens of a prompt came from, as the label says it.
pub const SOURCES: [&str; 4] = ["device", "host", "storage", "computed"];

/// The name of a kind of context.
pub const fn kind_name(kind: ContextKind) -> &'static str {
    match kind {
        ContextKind::System => "system",
        ContextKind::Tools => "tools",
        ContextKind::History => "history",
        ContextKind::ToolOutput => "tool_output",
        ContextKind::Thinking => "thinking",
        ContextKind::Scratchpad => "scratchpad",
        ContextKind::Unknown => "unknown",
    }
}

/// The tokens of a prompt by kind and source. A prompt is found from its beginning on: first what
/// the device has, then host, then storage; the rest is computed.
pub fn by_kind(
    spans: &[(Range<u32>, ContextKind)],
    prompt_tokens: u32,
    cached: CachedTokens,
) -> Vec<(ContextKind, &'static str, u32)> {
    let mut from = 0_u32;
    let mut parts = Vec::new();
    let lengths = [cached.device, cached.host, cached.storage, u32::MAX];
    for (source, length) in SOURCES.into_iter().zip(lengths) {
        let to = from.max(prompt_tokens.min(from.saturating_add(length)));
        let mut named = 0;
        for (span, kind) in spans {
            let tokens = span.end.min(to).saturating_sub(span.start.max(from));
            if tokens > 0 {
                parts.push((*kind, source, tokens));
                named += tokens;
            }
        }
        let rest = (to - from).saturating_sub(named);
        if rest > 0 {
            parts.push((ContextKind::Unknown, source, rest));
        }
        from = to;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_prompt_add_up_to_it_and_lie_where_they_were_found() {
        let spans = [
            (0..100, ContextKind::System),
            (100..130, ContextKind::Tools),
            (140..200, ContextKind::History),
        ];
        let cached = CachedTokens {
            device: 96,
            host: 16,
            storage: 0,
        };
        let parts = by_kind(&spans, 200, cached);
        assert_eq!(
            parts,
            [
                (ContextKind::System, "device", 96),
                (ContextKind::System, "host", 4),
                (ContextKind::Tools, "host", 12),
                (ContextKind::Tools, "computed", 18),
                (ContextKind::History, "computed", 60),
                (ContextKind::Unknown, "computed", 10),
            ]
        );
        assert_eq!(parts.iter().map(|part| part.2).sum::<u32>(), 200);
        assert!(by_kind(&[], 0, CachedTokens::default()).is_empty());
    }

    #[test]
    fn a_request_that_hurries_is_urgent_and_one_that_is_important_is_high() {
        let class = |jump_s, priority, strict| {
            RequestClass::of(&Hints {
                jump_s,
                priority,
                strict,
                ..Hints::default()
            })
        };
        assert_eq!(class(0.0, 0, 0), RequestClass::Normal);
        assert_eq!(class(2.0, 0, 0), RequestClass::Urgent);
        assert_eq!(class(5.0, 5, 0), RequestClass::High);
        assert_eq!(class(0.0, 0, 1), RequestClass::High);
        assert_eq!(class(0.0, -3, 0), RequestClass::Low);
    }
}
