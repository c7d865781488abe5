//! Server-sent events as bytes.

use axum::body::Bytes;
use serde_json::Value;

/// The end of a stream, as OpenAI's clients expect it.
pub const DONE: &str = "data: [DONE]\n\n";

/// A comment: keeps connections and proxies alive, no client shows it.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// One event with a JSON payload. JSON has no raw line breaks, so one `data:` line is enough.
pub fn event(payload: &Value) -> Bytes {
    Bytes::from(format!("data: {payload}\n\n"))
}

/// One event with a name and a JSON payload.
pub fn named(name: &str, payload: &Value) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {payload}\n\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_breaks_in_a_text_stay_inside_one_data_line() {
        let bytes = event(&serde_json::json!({"t": "a\nb\r\n\u{2028}"}));
        let text = std::str::from_utf8(&bytes).unwrap();
        assert_eq!(text.matches('\n').count(), 2);
        assert!(text.starts_with("data: {") && text.ends_with("}\n\n"));
    }
}
