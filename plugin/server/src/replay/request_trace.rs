//! Dynamo's `dynamo.request.trace.v1`: one event a line, of which `request_end` events with a
//! `replay` part carry a prompt as block hashes. Other events are skipped.
//! Source of the form: Dynamo 1.6, field by field in its request trace documentation.

use serde::Deserialize;
use serde_json::Value;

use super::error::ReplayError;
use super::mooncake::nanos;
use super::row::{Expected, Row, complain, is_count, is_counts};
use super::signals::Signals;

#[derive(Deserialize)]
struct Line {
    event: Event,
}

#[derive(Deserialize)]
struct Event {
    event_type: String,
    event_time_unix_ms: Option<f64>,
    request: Option<Request>,
    #[serde(default)]
    agent_context: Option<AgentContext>,
}

#[derive(Default, Deserialize)]
struct AgentContext {
    session_id: Option<String>,
    session_final: Option<bool>,
}

#[derive(Default, Deserialize)]
struct AgentHints {
    iat: Option<u32>,
    osl: Option<u32>,
}

#[derive(Deserialize)]
struct Request {
    request_received_ms: Option<f64>,
    #[serde(default)]
    agent_hints: Option<AgentHints>,
    replay: Option<Replay>,
}

#[derive(Deserialize)]
struct Replay {
    trace_block_size: u32,
    input_length: Option<u64>,
    input_sequence_hashes: Vec<u64>,
}

/// A request of the trace, and the block size that its event states.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Replayed {
    pub(crate) row: Row,
    pub(crate) page_tokens: u32,
}

const EXPECTED: [Expected; 8] = [
    ("event", "an object", Value::is_object),
    ("event.event_type", "a string", Value::is_string),
    ("event.event_time_unix_ms", "a number", is_number_or_absent),
    ("event.request", "an object", |value| {
        value.is_null() || value.is_object()
    }),
    (
        "event.request.request_received_ms",
        "a number",
        is_number_or_absent,
    ),
    (
        "event.request.replay.trace_block_size",
        "an integer below 2^32",
        |value| {
            value
                .as_u64()
                .is_some_and(|size| u32::try_from(size).is_ok())
        },
    ),
    ("event.request.replay.input_length", "an integer", |value| {
        value.is_null() || is_count(value)
    }),
    (
        "event.request.replay.input_sequence_hashes",
        "a list of integers",
        is_counts,
    ),
];

fn is_number_or_absent(value: &Value) -> bool {
    value.is_null() || value.is_number()
}

/// Reads one event; `None` where it is not the end of a request that can be replayed.
///
/// # Errors
/// Not JSON, or a field that is absent or has another type.
pub(crate) fn parse(line: u64, text: &[u8]) -> Result<Option<Replayed>, ReplayError> {
    let parsed: Line =
        serde_json::from_slice(text).map_err(|source| complain(line, text, &EXPECTED, source))?;
    let Event {
        event_type,
        event_time_unix_ms,
        request,
        agent_context,
    } = parsed.event;
    let Some(Request {
        request_received_ms,
        agent_hints,
        replay: Some(replay),
    }) = request
    else {
        return Ok(None);
    };
    if event_type != "request_end" {
        return Ok(None);
    }
    let received_ms = request_received_ms
        .or(event_time_unix_ms)
        .unwrap_or_default();
    let session = agent_context.unwrap_or_default();
    let hints = agent_hints.unwrap_or_default();
    let row = Row {
        arrival_ns: nanos(received_ms, 1_000_000),
        input_tokens: replay.input_length,
        hash_ids: replay.input_sequence_hashes,
        signals: Signals {
            session_id: session.session_id,
            session_final: session.session_final,
            iat_ms: hints.iat,
            osl: hints.osl,
        },
    };
    Ok(Some(Replayed {
        row,
        page_tokens: replay.trace_block_size,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(replay: &str) -> String {
        format!(
            r#"{{"timestamp": 49492, "event": {{"schema": "dynamo.request.trace.v1",
            "event_type": "request_end", "event_time_unix_ms": 1779163050197,
            "request": {{"request_id": "a", "request_received_ms": 1779163048815,
            "replay": {replay}}}}}}}"#
        )
    }

    #[test]
    fn the_end_of_a_request_is_replayed_at_the_time_it_was_received() {
        let text = end(r#"{"trace_block_size": 16, "input_length": 17,
            "input_sequence_hashes": [1549729496416048079, 18197118803071677815]}"#);
        let row = Row {
            arrival_ns: 1_779_163_048_815_000_000,
            input_tokens: Some(17),
            hash_ids: vec![1_549_729_496_416_048_079, 18_197_118_803_071_677_815],
            ..Row::default()
        };
        let expected = Replayed {
            row,
            page_tokens: 16,
        };
        assert_eq!(parse(1, text.as_bytes()).unwrap(), Some(expected));
    }

    #[test]
    fn events_without_a_prompt_are_skipped() {
        let tool = r#"{"timestamp": 1, "event": {"event_type": "tool_start", "tool": {}}}"#;
        assert_eq!(parse(1, tool.as_bytes()).unwrap(), None);
        assert_eq!(parse(1, end("null").as_bytes()).unwrap(), None);
    }

    #[test]
    fn a_wrong_field_is_named_with_its_path() {
        let text = end(r#"{"trace_block_size": 16, "input_sequence_hashes": [3, "x"]}"#);
        assert_eq!(
            parse(9, text.as_bytes()).unwrap_err().to_string(),
            "line 9: field event.request.replay.input_sequence_hashes is a list with \"x\" at 1, \
             expected a list of integers"
        );
        let text = end(r#"{"trace_block_size": -1, "input_sequence_hashes": []}"#);
        assert_eq!(
            parse(9, text.as_bytes()).unwrap_err().to_string(),
            "line 9: field event.request.replay.trace_block_size is -1, expected an integer below \
             2^32"
        );
    }
}
