//! Mooncake's row form, one request a line:
//! `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`.
//!
//! Alibaba's traces (qwen-bailian) have the same form with `chat_id` and a timestamp in seconds.
//! Source of the form: the traces of Mooncake, FAST'25.

use serde::Deserialize;

use super::error::ReplayError;
use super::row::{Expected, Row, complain, is_count, is_counts};
use super::signals::Signals;

#[derive(Deserialize)]
struct MooncakeRow {
    #[serde(default)]
    timestamp: f64,
    input_length: Option<u64>,
    hash_ids: Vec<u64>,
    chat_id: Option<serde::de::IgnoredAny>,
    #[serde(flatten)]
    signals: Signals,
}

const EXPECTED: [Expected; 3] = [
    ("hash_ids", "a list of integers", is_counts),
    ("timestamp", "a number", |value| {
        value.is_null() || value.is_number()
    }),
    ("input_length", "an integer", |value| {
        value.is_null() || is_count(value)
    }),
];

/// Reads one row.
///
/// # Errors
/// Not JSON, or a field that is absent or has another type.
pub(crate) fn parse(line: u64, text: &[u8]) -> Result<Row, ReplayError> {
    let row: MooncakeRow =
        serde_json::from_slice(text).map_err(|source| complain(line, text, &EXPECTED, source))?;
    let unit_ns = if row.chat_id.is_some() {
        1_000_000_000
    } else {
        1_000_000
    };
    Ok(Row {
        arrival_ns: nanos(row.timestamp, unit_ns),
        input_tokens: row.input_length,
        hash_ids: row.hash_ids,
        signals: row.signals,
    })
}

/// A time in units of `unit_ns` nanoseconds: a negative one is 0, one beyond 584 years the last.
/// Whole units stay exact.
pub(crate) fn nanos(time: f64, unit_ns: u32) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and NaN becomes 0: exactly what is wanted"
    )]
    let whole = |time: f64| time as u64;
    let rest_ns = whole(time.fract() * f64::from(unit_ns));
    whole(time)
        .saturating_mul(u64::from(unit_ns))
        .saturating_add(rest_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(text: &str) -> String {
        parse(5, text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_row_of_each_publisher_is_taken_as_it_is() {
        let text = r#"{"timestamp": 27000, "input_length": 6758, "output_length": 500,
            "hash_ids": [0, 18446744073709551615], "session_id": "x"}"#;
        let row = Row {
            arrival_ns: 27_000_000_000,
            input_tokens: Some(6758),
            hash_ids: vec![0, u64::MAX],
            signals: Signals {
                session_id: Some("x".to_owned()),
                ..Signals::default()
            },
        };
        assert_eq!(parse(1, text.as_bytes()).unwrap(), row);
        let text = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 21,
            "output_length": 132, "type": "text", "turn": 1, "hash_ids": [4, 5]}"#;
        let row = Row {
            arrival_ns: 61_500_000_000,
            input_tokens: Some(21),
            hash_ids: vec![4, 5],
            ..Row::default()
        };
        assert_eq!(parse(1, text.as_bytes()).unwrap(), row);
    }

    #[test]
    fn times_outside_the_clock_are_clamped() {
        for (time, expected) in [("-5", 0), ("1e300", u64::MAX), ("0.5", 500_000)] {
            let text = format!("{{\"timestamp\": {time}, \"hash_ids\": []}}");
            assert_eq!(
                parse(1, text.as_bytes()).unwrap().arrival_ns,
                expected,
                "{time}"
            );
        }
    }

    #[test]
    fn a_wrong_field_is_named_with_its_value() {
        assert_eq!(
            failure("{}"),
            "line 5: field hash_ids is absent, expected a list of integers"
        );
        assert_eq!(
            failure(r#"{"hash_ids": [1, -2]}"#),
            "line 5: field hash_ids is a list with -2 at 1, expected a list of integers"
        );
        assert_eq!(
            failure(r#"{"hash_ids": [1, 18446744073709551616]}"#),
            "line 5: field hash_ids is a list with 1.8446744073709552e+19 at 1, expected a list of \
             integers"
        );
        assert_eq!(
            failure(r#"{"hash_ids": [], "timestamp": "noon"}"#),
            "line 5: field timestamp is \"noon\", expected a number"
        );
        assert_eq!(
            failure(r#"{"hash_ids": [], "input_length": 2.5}"#),
            "line 5: field input_length is 2.5, expected an integer"
        );
        let long = format!("{{\"hash_ids\": \"{}\"}}", "\u{e9}".repeat(90));
        assert!(
            failure(&long).contains("\u{e9}..., expected"),
            "{}",
            failure(&long)
        );
    }
}
