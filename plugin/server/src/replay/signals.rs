//! What a row says beside its blocks: its program and what that is going to do. Rows of traces
//! that say nothing are replayed without.
//!
//! Mooncake rows may carry `session_id`, `session_final`, `iat_ms` (milliseconds from this arrival
//! to the next of the session) and `osl` (expected output tokens); request traces carry Dynamo's
//! `agent_context` and `agent_hints`.

use rootstock::radix::Hints;
use serde::Deserialize;
use serde_json::Value;

/// A signal that `--signals` lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Signal {
    /// None of them.
    None,
    /// Which session a request belongs to.
    Program,
    /// That a request is its session's last.
    Final,
    /// When the session's next request is expected.
    Iat,
    /// How long the answer is expected to be.
    Osl,
}

/// The signals of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Signals {
    #[serde(deserialize_with = "name")]
    pub(crate) session_id: Option<String>,
    pub(crate) session_final: Option<bool>,
    pub(crate) iat_ms: Option<u32>,
    pub(crate) osl: Option<u32>,
}

impl Signals {
    /// What remains of them when only `wanted` ones count; all do when it is empty.
    pub(crate) fn only(self, wanted: &[Signal]) -> Self {
        let on = |signal| wanted.is_empty() || wanted.contains(&signal);
        Self {
            session_id: self.session_id.filter(|_| on(Signal::Program)),
            session_final: self.session_final.filter(|_| on(Signal::Final)),
            iat_ms: self.iat_ms.filter(|_| on(Signal::Iat)),
            osl: self.osl.filter(|_| on(Signal::Osl)),
        }
    }

    pub(crate) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// The hints that a client would have sent.
    pub(crate) fn hints(self) -> Hints {
        Hints {
            program: self.session_id,
            session_final: self.session_final.unwrap_or_default(),
            iat_ms: self.iat_ms,
            osl: self.osl,
            ..Hints::default()
        }
    }
}

/// A name may be a number; anything else is none.
fn name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::String(name) if !name.is_empty() => Some(name),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_be_numbers_and_unwanted_signals_are_left_out() {
        let text = r#"{"session_id": 7, "session_final": true, "iat_ms": 250, "osl": 9}"#;
        let all: Signals = serde_json::from_str(text).unwrap();
        assert_eq!(all.session_id.as_deref(), Some("7"));
        assert!(all.clone().only(&[Signal::None]).are_none());
        let two = all.clone().only(&[Signal::Program, Signal::Osl]).hints();
        assert_eq!((two.program.as_deref(), two.osl), (Some("7"), Some(9)));
        assert_eq!((two.session_final, two.iat_ms), (false, None));
        assert_eq!(all.clone().only(&[]), all);
        let none: Signals = serde_json::from_str(r#"{"session_id": ["x"]}"#).unwrap();
        assert!(none.are_none());
    }
}
