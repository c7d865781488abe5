//! What both trace forms come down to, and how a wrong field is told.

use serde_json::Value;

use super::error::ReplayError;
use super::signals::Signals;

/// One request of a trace file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// When it arrived, on the trace's own clock.
    pub(crate) arrival_ns: u64,
    /// Tokens of its prompt, where the row says so.
    pub(crate) input_tokens: Option<u64>,
    /// One id a block of the prompt, a partial last one included.
    pub(crate) hash_ids: Vec<u64>,
    /// What it says about itself.
    pub(crate) signals: Signals,
}

/// A field, what it should be, and whether a value is that.
pub(crate) type Expected = (&'static str, &'static str, fn(&Value) -> bool);

/// An error about the first field of `row` that is not as expected. Called after typed parsing has
/// failed, so it may be slow.
pub(crate) fn complain(
    line: u64,
    text: &[u8],
    expected: &[Expected],
    source: serde_json::Error,
) -> ReplayError {
    let Ok(row) = serde_json::from_slice::<Value>(text) else {
        return ReplayError::NotJson { line, source };
    };
    for &(field, wanted, fits) in expected {
        let value = field
            .split('.')
            .try_fold(&row, |value, name| value.get(name));
        if !fits(value.unwrap_or(&Value::Null)) {
            return ReplayError::Field {
                line,
                field,
                found: describe(value),
                wanted,
            };
        }
    }
    ReplayError::NotJson { line, source }
}

/// True for an integer from 0 to 2^64 - 1.
pub(crate) fn is_count(value: &Value) -> bool {
    value.is_u64()
}

/// True for a list of such integers.
pub(crate) fn is_counts(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|items| items.iter().all(is_count))
}

/// A value in an error message: short, and for a list the first item that is no integer.
fn describe(value: Option<&Value>) -> String {
    const CHARS_MAX: usize = 40;
    match value {
        None | Some(Value::Null) => "absent".to_owned(),
        Some(Value::Array(items)) => {
            match items.iter().enumerate().find(|(_, item)| !is_count(item)) {
                Some((at, item)) => format!("a list with {} at {at}", describe(Some(item))),
                None => "a list".to_owned(),
            }
        }
        Some(Value::Object(_)) => "an object".to_owned(),
        Some(value) => {
            let text = value.to_string();
            match text.char_indices().nth(CHARS_MAX) {
                Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
                None => text,
            }
        }
    }
}
