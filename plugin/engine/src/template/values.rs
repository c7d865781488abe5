//! JSON as the values that templates see.

use minijinja::Value;
use serde_json::Value as Json;

/// The same value; objects keep the order of their keys.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => number
            .as_i64()
            .map(Value::from)
            .or_else(|| number.as_u64().map(Value::from))
            .or_else(|| number.as_f64().map(Value::from))
            .unwrap_or_default(),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(entries) => Value::from_pairs(
            entries
                .iter()
                .map(|(key, value)| (key.as_str(), from_json(value))),
        ),
    }
}
