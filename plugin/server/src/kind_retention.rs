//! `--kind-retention`: what parts of prompts are worth by their kind, where a request says nothing
//! of it: `system=5,tool_output=-1:300` keeps system prompts before all else, and tools' results
//! after all else once they have been idle for 300 seconds.

use std::ops::Range;

use rootstock::radix::{ContextKind, Hints, Retention};

/// A kind's rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    kind: ContextKind,
    retention: Retention,
}

/// The rules, one a kind at most.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindRetention(Vec<Rule>);

/// Names of kinds, as `agent_hints.context_type` has them.
const KINDS: [(&str, ContextKind); 6] = [
    ("system", ContextKind::System),
    ("tools", ContextKind::Tools),
    ("history", ContextKind::History),
    ("tool_output", ContextKind::ToolOutput),
    ("thinking", ContextKind::Thinking),
    ("scratchpad", ContextKind::Scratchpad),
];

impl KindRetention {
    /// Reads `KIND=PRIORITY[:SECONDS],..`.
    ///
    /// # Errors
    /// What is wrong, with what is possible.
    pub fn parse(text: &str) -> Result<KindRetention, String> {
        let mut rules: Vec<Rule> = Vec::new();
        for part in text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let rule = rule(part)?;
            if rules.iter().any(|other| other.kind == rule.kind) {
                return Err(format!("{part:?} is the second rule of its kind"));
            }
            rules.push(rule);
        }
        Ok(KindRetention(rules))
    }

    /// Says of each span what its kind is worth, unless the request says what it is worth.
    pub fn apply(&self, hints: &mut Hints) {
        if hints.priority != 0 || hints.retention_s.is_some() || !hints.retain.is_empty() {
            return;
        }
        let said = |kind: ContextKind| self.0.iter().find(|rule| rule.kind == kind);
        let spans = hints.spans.iter();
        let worth = |(range, kind): &(Range<u32>, ContextKind)| {
            said(*kind).map(|rule| (range.clone(), rule.retention))
        };
        hints.retain = spans.filter_map(worth).collect();
    }
}

fn rule(text: &str) -> Result<Rule, String> {
    let wanted = || format!("{text:?} is no rule; KIND=PRIORITY[:SECONDS] is wanted");
    let (name, value) = text.split_once('=').ok_or_else(wanted)?;
    let kind = KINDS.iter().find(|(known, _)| *known == name.trim());
    let (_, kind) = kind.ok_or_else(|| {
        let names = KINDS.map(|(name, _)| name).join(", ");
        format!("{name:?} is no kind of context; there are {names}")
    })?;
    let (priority, seconds) = match value.split_once(':') {
        Some((priority, seconds)) => (priority, Some(seconds)),
        None => (value, None),
    };
    let seconds = seconds.map(|seconds| seconds.trim().parse()).transpose();
    Ok(Rule {
        kind: *kind,
        retention: Retention {
            priority: priority.trim().parse().map_err(|_| wanted())?,
            seconds: seconds.map_err(|_| wanted())?,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_and_what_is_none_is_named() {
        let rules = KindRetention::parse("system=5, tool_output=-1:300").unwrap();
        assert_eq!(rules.0.len(), 2);
        assert_eq!(rules.0[1].retention.seconds, Some(300));
        assert_eq!(KindRetention::parse(""), Ok(KindRetention::default()));
        for (text, said) in [
            ("system", "KIND=PRIORITY"),
            ("sistem=1", "tool_output"),
            ("system=x", "KIND=PRIORITY"),
            ("system=1:soon", "KIND=PRIORITY"),
            ("tools=1,tools=2", "second rule"),
        ] {
            let error = KindRetention::parse(text).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn each_span_gets_the_rule_of_its_kind_unless_the_request_says_more() {
        let rules = KindRetention::parse("system=5:60").unwrap();
        let spans = vec![(0..32, ContextKind::System), (32..64, ContextKind::History)];
        let mut hints = Hints {
            spans,
            ..Hints::default()
        };
        let mut own = Hints {
            priority: 1,
            ..hints.clone()
        };
        rules.apply(&mut hints);
        let retention = Retention {
            priority: 5,
            seconds: Some(60),
        };
        assert_eq!(hints.retain, [(0..32, retention)]);
        rules.apply(&mut own);
        assert!(own.retain.is_empty());
    }
}
