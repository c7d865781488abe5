//! `kv_hints` inside an ordinary request: the same verbs without a second call.
//!
//! What names a target is carried out before the request is queued. What names none is about the
//! request's own prompt, and takes effect when that is cached: a pin as `cache_control` sets it, an
//! importance as `retention_seconds` does. Hints can only help: what is not understood is answered
//! as rejected, and the request runs.

use rootstock::hints::{ParsedHints, WHOLE_PROMPT};
use rootstock::radix::Retention;
use serde_json::{Value, json};

use crate::app::App;
use crate::control::access::Caller;
use crate::control::actions;
use crate::control::envelope::{self, Target, Verb, Wanted};

/// Puts what is about the request's own prompt into its hints; notes an envelope without its form.
pub fn apply_own(parsed: &mut ParsedHints) {
    let Some(body) = &parsed.kv_hints else { return };
    let envelope = match envelope::read(body, true) {
        Ok(envelope) => envelope,
        Err(error) => {
            parsed
                .hints
                .ignored
                .push(format!("kv_hints: {}", error.message));
            parsed.kv_hints = None;
            return;
        }
    };
    let own = envelope
        .actions
        .into_iter()
        .filter_map(|action| action.what.ok());
    for Wanted { verb, .. } in own.filter(|wanted| wanted.target == Target::Own) {
        match verb {
            Verb::Pin(ttl) if ttl.seconds > 0 => parsed.hints.pins.push((WHOLE_PROMPT, ttl)),
            Verb::Retain { priority, seconds } => {
                let seconds = seconds.map(|seconds| u32::try_from(seconds).unwrap_or(u32::MAX));
                let said = Retention { priority, seconds };
                parsed.hints.retain.push((0..u32::MAX, said));
            }
            Verb::Pin(_) | Verb::Prefetch { .. } | Verb::Demote | Verb::Release { .. } => {}
        }
    }
}

/// Carries out the rest; the outcomes of all actions, `None` without an envelope.
pub async fn carry_out(app: &App, parsed: &ParsedHints) -> Option<Value> {
    let envelope = envelope::read(parsed.kv_hints.as_ref()?, true).ok()?;
    let caller = Caller::of_request(parsed);
    // A lost engine is told by the request itself.
    actions::outcomes(app, envelope, &caller).await.ok()
}

/// The outcome of an action about the request's own prompt.
pub(super) fn own_outcome(verb: Verb) -> (&'static str, Value) {
    if matches!(verb, Verb::Pin(ttl) if ttl.seconds == 0) {
        let reason = "a ttl of 0 seconds pins nothing";
        return ("rejected", json!({"reason": reason}));
    }
    let reason = "it takes effect when the prompt is cached; cache_report.pins has the rest";
    ("deferred", json!({"reason": reason}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rootstock::hints::{self, Ceiling, ttl_of_seconds};

    fn read(envelope: &Value) -> ParsedHints {
        let mut parsed = hints::parse(&Value::Null, &json!({"kv_hints": envelope}), &[]);
        apply_own(&mut parsed);
        parsed
    }

    #[test]
    fn what_names_no_target_becomes_hints_of_the_request() {
        let parsed = read(&json!({"actions": [
            {"action_type": "pin", "payload": {"ttl": 60}},
            {"action_type": "retain", "payload": {"priority": 90, "retention_seconds": 5}},
            {"action_type": "pin", "payload": {"ttl": 0}},
            {"action_type": "pin", "payload": {"tokens": [1]}},
        ]}));
        assert_eq!(parsed.hints.pins, [(WHOLE_PROMPT, ttl_of_seconds(60))]);
        let said = Retention {
            priority: 90,
            seconds: Some(5),
        };
        assert_eq!(parsed.hints.retain, [(0..u32::MAX, said)]);
        let mut parsed = parsed;
        parsed.restrict(&Ceiling {
            priority: 10,
            ..Ceiling::default()
        });
        assert_eq!(parsed.hints.retain[0].1.priority, 10);
        assert_eq!(Caller::of_request(&parsed).priority_max, 10);
    }

    #[test]
    fn an_envelope_without_its_form_is_noted_and_no_error() {
        for (wrong, told) in [
            (json!(5), "kv_hints: an object"),
            (json!({"actions": 5}), "kv_hints: actions"),
            (
                json!({"protocol_version": "9", "actions": []}),
                "kv_hints: protocol_version",
            ),
        ] {
            let parsed = read(&wrong);
            assert!(parsed.kv_hints.is_none());
            let notes = &parsed.hints.ignored;
            assert!(notes.iter().any(|note| note.starts_with(told)), "{notes:?}");
        }
        assert!(read(&Value::Null).hints.ignored.is_empty());
    }
}
