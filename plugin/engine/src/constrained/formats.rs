//! `format` in schemas. JSON Schema knows more formats than there are grammars for, and lets
//! everybody make up others: what is not known here says nothing. Some grammars take a little more
//! than the format does (a leap second anywhere, 29 February of any year): a pattern beside them
//! takes that away.

use serde_json::Value;

/// Those with a grammar.
const KNOWN: [&str; 10] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
];

/// Keywords whose values are data, not schemas.
const DATA: [&str; 4] = ["const", "enum", "default", "examples"];

/// Days that there are, among those that look like some.
macro_rules! date {
    () => {
        concat!(
            r"(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])|",
            r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|",
            r"(?:0[48]|[2468][048]|[13579][26])00)-02-29)",
        )
    };
}

/// Leaves out formats that are not known and makes others strict, everywhere in a schema.
pub(super) fn settle(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(settle),
        Value::Object(fields) => {
            let format = fields.get("format").and_then(Value::as_str);
            let strict = format.and_then(strict);
            if format.is_some_and(|format| !KNOWN.contains(&format)) {
                fields.remove("format");
            }
            if let Some(pattern) = strict {
                fields.entry("pattern").or_insert_with(|| pattern.into());
            }
            let schemas = fields.iter_mut();
            schemas
                .filter(|(key, _)| !DATA.contains(&key.as_str()))
                .for_each(|(_, value)| settle(value));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// What has to hold beside the grammar.
fn strict(format: &str) -> Option<&'static str> {
    match format {
        "date" => Some(concat!("^", date!(), "$")),
        "time" => Some("^[0-9]{2}:[0-9]{2}:[0-5][0-9]"),
        "date-time" => Some(concat!("^", date!(), "[tT][0-9]{2}:[0-9]{2}:[0-5][0-9]")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_formats_say_nothing_and_data_stays_as_it_is() {
        let data = json!({"type": "string", "format": "password"});
        let mut schema = json!({
            "properties": {"format": {"type": "string", "format": "password"},
                "id": {"type": "string", "format": "uuid"}},
            "anyOf": [{"const": data}, {"enum": [data]}, {"items": data}],
        });
        settle(&mut schema);
        let wanted = json!({
            "properties": {"format": {"type": "string"},
                "id": {"type": "string", "format": "uuid"}},
            "anyOf": [{"const": data}, {"enum": [data]}, {"items": {"type": "string"}}],
        });
        assert_eq!(schema, wanted);
    }

    #[test]
    fn dates_are_strict_unless_the_caller_has_a_pattern() {
        let settled = |mut schema: Value| {
            settle(&mut schema);
            schema["pattern"].as_str().unwrap_or_default().to_owned()
        };
        assert!(settled(json!({"format": "date"})).contains("-02-29"));
        assert!(settled(json!({"format": "date-time"})).contains("[tT]"));
        assert_eq!(settled(json!({"format": "date", "pattern": "^2"})), "^2");
        assert_eq!(settled(json!({"format": "uuid"})), "");
    }
}
