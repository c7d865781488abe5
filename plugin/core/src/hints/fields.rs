//! Lenient reading of JSON objects: a wrong type is a note with its path, never an error.
//!
//! `Notes` is bounded in number and in bytes whatever the client sends. Null counts as absent.

use serde_json::{Map, Value};

/// Notes kept for one request; what is beyond is counted in one last line.
pub const NOTES_MAX: usize = 32;

/// Bytes of one note at most.
pub const NOTE_BYTES_MAX: usize = 192;

/// Bytes of a client's value that a note repeats.
const SHOWN_BYTES_MAX: usize = 48;

/// What was ignored or changed, by path and with the reason.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    lines: Vec<String>,
    more: u64,
}

impl Notes {
    /// Adds `path: reason`, or only counts it when the list is full.
    pub(crate) fn add(&mut self, path: &str, reason: &str) {
        if self.lines.len() == NOTES_MAX {
            self.more += 1;
            return;
        }
        let path = printable(path, SHOWN_BYTES_MAX * 2);
        self.lines
            .push(printable(&format!("{path}: {reason}"), NOTE_BYTES_MAX));
    }

    /// Adds `path: expected WHAT, got VALUE`.
    pub(crate) fn expected(&mut self, path: &str, what: &str, got: &Value) {
        if self.lines.len() == NOTES_MAX {
            self.more += 1; // Do not print what would not be kept.
            return;
        }
        self.add(path, &format!("expected {what}, got {}", shown(got)));
    }

    /// The notes, with one line more when some were only counted.
    pub(crate) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.lines.push(format!("and {} more", self.more));
        }
        self.lines
    }
}

/// One JSON object and the path under which its fields are reported.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: Option<&'a Map<String, Value>>,
    path: &'static str,
}

impl<'a> Fields<'a> {
    /// The object under `value`; absent, null or (noted) of another type reads as empty.
    pub(crate) fn of(value: Option<&'a Value>, path: &'static str, notes: &mut Notes) -> Self {
        let map = match value {
            None | Some(Value::Null) => None,
            Some(Value::Object(map)) => Some(map),
            Some(other) => {
                notes.expected(
                    if path.is_empty() { "nvext" } else { path },
                    "an object",
                    other,
                );
                None
            }
        };
        Self { map, path }
    }

    /// True when there is an object, even an empty one.
    pub(crate) fn is_present(&self) -> bool {
        self.map.is_some()
    }

    /// The field's value; null is absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map?.get(key).filter(|value| !value.is_null())
    }

    /// The path of a field as notes name it.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// Notes a field whose value cannot be used.
    pub(crate) fn expected(&self, key: &str, what: &str, got: &Value, notes: &mut Notes) {
        notes.expected(&self.path(key), what, got);
    }

    /// An integer within the range of `T`; a boolean, a fraction or a text is noted.
    pub(crate) fn int<T: HintInt>(&self, key: &str, notes: &mut Notes) -> Option<T> {
        let value = self.get(key)?;
        let wide = value
            .as_i64()
            .map(i128::from)
            .or_else(|| value.as_u64().map(i128::from));
        let read = wide.and_then(|wide| T::try_from(wide).ok());
        if read.is_none() {
            self.expected(key, T::EXPECTED, value, notes);
        }
        read
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str, notes: &mut Notes) -> Option<f64> {
        let value = self.get(key)?;
        let read = value.as_f64().filter(|number| number.is_finite());
        if read.is_none() {
            self.expected(key, "a finite number", value, notes);
        }
        read
    }

    /// A boolean; 0, 1 and texts are noted.
    pub(crate) fn boolean(&self, key: &str, notes: &mut Notes) -> Option<bool> {
        let value = self.get(key)?;
        let read = value.as_bool();
        if read.is_none() {
            self.expected(key, "true or false", value, notes);
        }
        read
    }

    /// A text that is not blank, trimmed, of at most `bytes_max` bytes. Blank is absent.
    pub(crate) fn text(&self, key: &str, bytes_max: usize, notes: &mut Notes) -> Option<String> {
        let value = self.get(key)?;
        let Some(text) = value.as_str() else {
            self.expected(key, "a string", value, notes);
            return None;
        };
        let text = text.trim();
        if text.len() > bytes_max {
            let reason = format!("longer than {bytes_max} bytes ({} bytes)", text.len());
            notes.add(&self.path(key), &reason);
            return None;
        }
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// A list of texts, at most `max` of them; another type is noted, item by item.
    pub(crate) fn texts(&self, key: &str, max: usize, notes: &mut Notes) -> Vec<String> {
        let Some(value) = self.get(key) else {
            return Vec::new();
        };
        let Some(items) = value.as_array() else {
            self.expected(key, "a list of strings", value, notes);
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, item) in items.iter().enumerate() {
            match item.as_str() {
                Some(_) if texts.len() == max => {
                    notes.add(&self.path(key), &format!("more than {max} items"));
                    break;
                }
                Some(text) => texts.push(printable(text, 256)),
                None => self.expected(&format!("{key}[{index}]"), "a string", item, notes),
            }
        }
        texts
    }

    /// Notes every field that is not in `known`.
    pub(crate) fn note_unknown(&self, known: &[&str], notes: &mut Notes) {
        for key in self.map.into_iter().flat_map(Map::keys) {
            if !known.contains(&key.as_str()) {
                notes.add(&self.path(key), "unknown field");
            }
        }
    }
}

/// An integer type a hint may have.
pub(crate) trait HintInt: TryFrom<i128> {
    /// How a note names the range.
    const EXPECTED: &'static str;
}

impl HintInt for i32 {
    const EXPECTED: &'static str = "an integer -2147483648..=2147483647";
}

impl HintInt for u32 {
    const EXPECTED: &'static str = "an integer >= 0";
}

impl HintInt for u64 {
    const EXPECTED: &'static str = "an integer >= 0";
}

/// A short rendering of a client's value for a note.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(map) => format!("an object of {} fields", map.len()),
        Value::String(text) => format!("\"{}\"", printable(text, SHOWN_BYTES_MAX)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            printable(&value.to_string(), SHOWN_BYTES_MAX)
        }
    }
}

/// The text without control characters, cut at a character boundary to `bytes_max` bytes.
pub(crate) fn printable(text: &str, bytes_max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(bytes_max));
    for c in text.chars() {
        let c = if c.is_control() { '?' } else { c };
        if out.len() + c.len_utf8() > bytes_max {
            while out.len() + "..".len() > bytes_max {
                out.pop();
            }
            out.push_str("..");
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn notes_are_bounded_in_number_and_bytes() {
        let mut notes = Notes::default();
        for _ in 0..1000 {
            notes.expected(
                &"p".repeat(5000),
                "an object",
                &json!("\u{e9}".repeat(9000)),
            );
        }
        let lines = notes.into_lines();
        assert_eq!(lines.len(), NOTES_MAX + 1);
        assert!(lines.iter().all(|line| line.len() <= NOTE_BYTES_MAX));
        assert_eq!(lines.last().map(String::as_str), Some("and 968 more"));
    }

    #[test]
    fn control_characters_never_reach_a_note() {
        let mut notes = Notes::default();
        notes.expected("a\r\nb", "an object", &json!("x\u{1b}[31m\n"));
        assert_eq!(
            notes.into_lines(),
            ["a??b: expected an object, got \"x?[31m?\""]
        );
    }

    #[test]
    fn null_is_absent_and_not_worth_a_note() {
        let mut notes = Notes::default();
        let value = json!({"a": null});
        let fields = Fields::of(Some(&value), "", &mut notes);
        assert_eq!(fields.int::<u32>("a", &mut notes), None);
        assert_eq!(fields.text("a", 9, &mut notes), None);
        assert!(notes.into_lines().is_empty());
    }
}
