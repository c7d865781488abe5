//! The body of one tool call, from the text forms that models use.

use serde_json::{Map, Value};

/// A complete tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The function.
    pub name: String,
    /// Its arguments, in the order in which the model wrote them.
    pub arguments: Map<String, Value>,
}

impl Call {
    /// The arguments as JSON text.
    pub fn arguments_text(&self) -> String {
        Value::Object(self.arguments.clone()).to_string()
    }
}

/// Bytes of a function's name.
const NAME_BYTES_MAX: usize = 256;

/// Reads what stands between call tags: JSON, or Qwen3-Coder's `<function=..>` form.
pub fn read_tagged(body: &str) -> Option<Call> {
    let body = body.trim();
    if body.starts_with("<function=") {
        return read_xml(body);
    }
    read_value(serde_json::from_str(body).ok()?)
}

/// Reads calls that are one JSON object, several separated by `;`, or a list of them.
pub fn read_bare(body: &str) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    let mut rest = body.trim();
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                for value in list {
                    calls.push(read_value(value)?);
                }
            }
            one @ Value::Object(_) => calls.push(read_value(one)?),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => return None,
        }
        rest = rest.get(values.byte_offset()..)?.trim_start();
        rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// Reads what follows `[TOOL_CALLS]`: a list, or a name with its arguments.
pub fn read_mistral(body: &str) -> Option<Vec<Call>> {
    let body = body.trim();
    if body.starts_with(['[', '{']) {
        return read_bare(body);
    }
    let at = body.find('{')?;
    let (head, arguments) = body.split_at(at);
    let name = head.split(['[', ' ']).next().unwrap_or_default();
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    Some(vec![named(name, arguments)?])
}

fn read_value(value: Value) -> Option<Call> {
    let Value::Object(mut fields) = value else {
        return None;
    };
    let name = fields.get("name")?.as_str()?.to_owned();
    let arguments = fields
        .remove("arguments")
        .or_else(|| fields.remove("parameters"))
        .unwrap_or(Value::Null);
    named(&name, arguments)
}

fn named(name: &str, arguments: Value) -> Option<Call> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return None;
    }
    let arguments = match arguments {
        Value::Object(arguments) => arguments,
        Value::Null => Map::new(),
        // Some models write the object as a string of JSON.
        Value::String(text) => serde_json::from_str(&text).ok()?,
        Value::Bool(_) | Value::Number(_) | Value::Array(_) => return None,
    };
    let name = name.to_owned();
    Some(Call { name, arguments })
}

/// `<function=NAME><parameter=KEY>VALUE</parameter>..</function>`. Values have no types: what is
/// JSON other than a string is that, the rest is text.
fn read_xml(body: &str) -> Option<Call> {
    let (name, mut rest) = body.strip_prefix("<function=")?.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, parameter) = parameter.split_once('>')?;
        let (value, after) = parameter.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let typed = serde_json::from_str::<Value>(value).ok();
        let typed = typed.filter(|value| !value.is_string());
        arguments.insert(key.to_owned(), typed.unwrap_or_else(|| value.into()));
        rest = after;
    }
    rest.contains("</function>")
        .then(|| named(name.trim(), Value::Object(arguments)))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(call: &Call) -> Value {
        json!({"name": call.name, "arguments": call.arguments})
    }

    #[test]
    fn json_calls_are_read_with_their_arguments_in_order() {
        let call = read_tagged("\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": [2]}}\n");
        assert_eq!(call.unwrap().arguments_text(), "{\"b\":1,\"a\":[2]}");
        let call = read_tagged("{\"name\": \"f\", \"parameters\": \"{\\\"x\\\": 1}\"}").unwrap();
        assert_eq!(shown(&call), json!({"name": "f", "arguments": {"x": 1}}));
        assert!(
            read_tagged("{\"name\": \"f\"}")
                .unwrap()
                .arguments
                .is_empty()
        );
    }

    #[test]
    fn what_is_no_whole_call_is_none() {
        for body in [
            "",
            "text",
            "{\"name\": \"f\", \"argum",
            "{\"name\": \"\", \"arguments\": {}}",
            "{\"name\": 1, \"arguments\": {}}",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "{\"name\": \"f\"} and more",
            "<function=f><parameter=a>1",
            "<function=f><parameter=a>1</parameter>",
        ] {
            assert_eq!(read_tagged(body), None, "{body}");
        }
    }

    #[test]
    fn the_xml_form_keeps_text_as_text() {
        let body = "<function=edit>\n<parameter=path>\na.rs\n</parameter>\n\
            <parameter=count>\n3\n</parameter>\n<parameter=id>\n\"7\"\n</parameter>\n</function>";
        let wanted = json!({"name": "edit",
            "arguments": {"path": "a.rs", "count": 3, "id": "\"7\""}});
        assert_eq!(shown(&read_tagged(body).unwrap()), wanted);
    }

    #[test]
    fn mistral_and_llama_forms_hold_several_calls() {
        let list = "[{\"name\": \"a\", \"arguments\": {}}, {\"name\": \"b\", \"arguments\": {}}]";
        assert_eq!(read_mistral(list).unwrap().len(), 2);
        let named = read_mistral("read[CALL_ID]x1[ARGS]{\"p\": 1}").unwrap();
        assert_eq!(
            shown(&named[0]),
            json!({"name": "read", "arguments": {"p": 1}})
        );
        let two = "{\"name\": \"a\", \"parameters\": {}}; {\"name\": \"b\", \"parameters\": {}}";
        assert_eq!(read_bare(two).unwrap().len(), 2);
        assert_eq!(read_bare("{\"answer\": 4}"), None);
    }
}
