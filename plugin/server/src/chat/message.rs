//! One message in the making, and the pieces of messages that all chat APIs have in common: roles,
//! text parts, arguments. Readers of the APIs differ in where these stand, not in what they mean.

use serde_json::{Map, Value, json};

use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

/// Kinds of content that a model of text cannot see; leaving them out would change the question.
const NO_TEXT: [&str; 8] = [
    "image",
    "image_url",
    "input_image",
    "document",
    "file",
    "input_file",
    "audio",
    "video",
];

/// What becomes of parts whose kind is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// They are refused by name.
    Refused,
    /// They are left out, but for their text if they have one.
    LeftOut,
}

/// A message for chat templates that still grows: pieces of text and of thoughts are joined by
/// line breaks.
#[derive(Debug)]
pub struct Draft {
    role: &'static str,
    content: String,
    thoughts: String,
    calls: Vec<Value>,
    is_used: bool,
}

impl Draft {
    /// An empty message of this role.
    pub fn new(role: &'static str) -> Draft {
        Draft {
            role,
            content: String::new(),
            thoughts: String::new(),
            calls: Vec::new(),
            is_used: false,
        }
    }

    /// Adds text.
    pub fn say(&mut self, text: &str) {
        append(&mut self.content, text);
        self.is_used = true;
    }

    /// Adds thoughts.
    pub fn think(&mut self, text: &str) {
        append(&mut self.thoughts, text);
        self.is_used = true;
    }

    /// Adds a call.
    pub fn call(&mut self, id: &str, name: &str, arguments: Value) {
        self.calls.push(json!({
            "id": id, "type": "function", "function": {"name": name, "arguments": arguments},
        }));
        self.is_used = true;
    }

    /// True when anything was added since the beginning or the last [`Draft::take`].
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    /// Bytes of text so far.
    pub fn content_bytes(&self) -> usize {
        self.content.len()
    }

    /// The message; the draft is empty again, with the same role.
    pub fn take(&mut self) -> Value {
        let empty = Draft::new(self.role);
        let draft = std::mem::replace(self, empty);
        let mut message = Map::new();
        message.insert("role".into(), draft.role.into());
        message.insert("content".into(), draft.content.into());
        if !draft.thoughts.is_empty() {
            message.insert("reasoning_content".into(), draft.thoughts.into());
        }
        if !draft.calls.is_empty() {
            message.insert("tool_calls".into(), draft.calls.into());
        }
        Value::Object(message)
    }
}

/// The message with what a tool returned for a call.
pub fn result(call_id: &str, content: &str) -> Value {
    json!({"role": "tool", "content": content, "tool_call_id": call_id})
}

/// The role of a message as templates name it; `allowed` is what the API takes, for people.
///
/// # Errors
/// A role that is missing or not one of them.
pub fn read_role(
    fields: &Fields<'_>,
    roles: &[&str],
    allowed: &str,
) -> Result<&'static str, ApiError> {
    let name = fields.name("role");
    let Some(found) = fields.text("role")? else {
        let message = format!("{name} is missing; it must be {allowed}");
        return Err(ApiError::param(name, message));
    };
    let known = roles.contains(&found);
    match found {
        "system" | "developer" if known => Ok("system"),
        "user" if known => Ok("user"),
        "assistant" if known => Ok("assistant"),
        "tool" | "function" if known => Ok("tool"),
        _ => {
            let found: String = found.chars().take(40).collect();
            let message = format!("{name} must be {allowed}, found {found:?}");
            Err(ApiError::param(name, message))
        }
    }
}

/// The parts of a content: a text stands for one text part.
///
/// # Errors
/// Content that is neither a text nor a list.
pub fn parts_of(content: &Value, name: &str) -> Result<Vec<Value>, ApiError> {
    let part = |text: &str| json!({"type": "text", "text": text});
    match content {
        Value::String(text) => Ok(vec![part(text)]),
        Value::Array(parts) => {
            let whole = |each: &Value| each.as_str().map_or_else(|| each.clone(), part);
            Ok(parts.iter().map(whole).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Err(wrong_type(
            name,
            "a string or a list of text parts",
            content,
        )),
    }
}

/// The text of a content, its parts joined by line breaks.
///
/// # Errors
/// A part that is no text.
pub fn read_text(content: &Value, name: &str, others: Others) -> Result<String, ApiError> {
    if let Value::String(text) = content {
        return Ok(text.clone());
    }
    let mut text = String::new();
    for (index, part) in parts_of(content, name)?.iter().enumerate() {
        let part = Fields::at(part, &format!("{name}[{index}]"))?;
        append(&mut text, read_part(&part, others)?);
    }
    Ok(text)
}

/// The text of one part.
///
/// # Errors
/// A part that is no text.
pub fn read_part<'a>(part: &Fields<'a>, others: Others) -> Result<&'a str, ApiError> {
    let kind = part.text("type")?.unwrap_or("text");
    match kind {
        "refusal" => return Ok(part.text("refusal")?.unwrap_or_default()),
        "document" => {
            if let Some(text) = text_of_document(part) {
                return Ok(text);
            }
        }
        _ => {}
    }
    let is_text = matches!(kind, "text" | "input_text" | "output_text");
    if NO_TEXT.contains(&kind) || (!is_text && others == Others::Refused) {
        return Err(refused(part, kind));
    }
    match part.text("text")? {
        Some(text) => Ok(text),
        None if is_text && others == Others::Refused => {
            let name = part.name("text");
            let message = format!("{name} is missing; a text part needs it");
            Err(ApiError::param(name, message))
        }
        None => Ok(""),
    }
}

fn text_of_document<'a>(part: &Fields<'a>) -> Option<&'a str> {
    let source = part.get("source")?;
    (source["type"] == "text").then(|| source["data"].as_str())?
}

fn refused(part: &Fields<'_>, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    let message = format!("this model reads text only, found a part of type {kind:?}");
    ApiError::unsupported(part.name("type"), message)
}

/// Arguments of a call. Clients send them as JSON text in a spacing of their own; templates print
/// objects in one spacing. What is not the text of an object stays as it came.
pub fn read_arguments(arguments: Option<&Value>) -> Value {
    let Some(arguments) = arguments else {
        return json!({});
    };
    let parsed = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Value>(text).ok());
    parsed
        .filter(Value::is_object)
        .unwrap_or_else(|| arguments.clone())
}

/// Adds to a text, in a line of its own.
pub fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_what_templates_expect_and_starts_again() {
        let mut draft = Draft::new("assistant");
        assert!(!draft.is_used());
        draft.think("hm");
        draft.say("a");
        draft.say("");
        draft.say("b");
        draft.call("c", "f", json!({"x": 1}));
        assert_eq!(draft.content_bytes(), 3);
        let call = json!({"id": "c", "type": "function",
            "function": {"name": "f", "arguments": {"x": 1}}});
        let wanted = json!({"role": "assistant", "content": "a\nb", "reasoning_content": "hm",
            "tool_calls": [call]});
        assert_eq!(draft.take(), wanted);
        assert!(!draft.is_used());
        assert_eq!(draft.take(), json!({"role": "assistant", "content": ""}));
    }

    #[test]
    fn parts_that_are_no_text_are_refused_by_name_and_unknown_ones_as_the_api_wants() {
        let read = |content: &Value, others| read_text(content, "content", others);
        for kind in NO_TEXT {
            let error = read(&json!([{"type": kind}]), Others::LeftOut).unwrap_err();
            assert!(error.message.contains(kind), "{}", error.message);
            assert_eq!(error.param.as_deref(), Some("content[0].type"));
        }
        let odd = json!(["a", {"type": "never_heard_of", "text": "b"}, {"type": "nor_of_it"}]);
        assert_eq!(read(&odd, Others::LeftOut).unwrap(), "a\nb");
        assert!(read(&odd, Others::Refused).is_err());
        let document = json!([{"type": "document", "source": {"type": "text", "data": "d"}}]);
        assert_eq!(read(&document, Others::Refused).unwrap(), "d");
        let refusal = json!([{"type": "refusal", "refusal": "no"}]);
        assert_eq!(read(&refusal, Others::Refused).unwrap(), "no");
        assert!(read(&json!([{"type": "text"}]), Others::Refused).is_err());
        assert_eq!(
            read(&json!([{"type": "text"}]), Others::LeftOut).unwrap(),
            ""
        );
    }

    #[test]
    fn arguments_that_are_no_object_stay_as_they_came() {
        assert_eq!(read_arguments(Some(&json!("not json"))), json!("not json"));
        assert_eq!(read_arguments(Some(&json!("[1]"))), json!("[1]"));
        assert_eq!(
            read_arguments(Some(&json!("{\"b\":1, \"a\" : 2}"))),
            json!({"b": 1, "a": 2})
        );
        assert_eq!(read_arguments(None), json!({}));
    }
}
