//! The items of a `/v1/responses` request, as the messages that chat templates expect.
//!
//! Reasoning, text and calls that follow each other are one message of the assistant, as they
//! were when the model wrote them. Ids of items never reach the prompt: clients make new ones for
//! the same texts. Item types that are not known are left out.

use serde_json::{Map, Value, json};

use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};
use crate::openai::messages::read_content;
use crate::responses::request::Names;

/// What an `encrypted_content` of ours begins with; the reasoning itself follows. It is a handle
/// to the tokens in the cache, not a secret: the client was shown the same text.
pub const HANDLE: &str = "rootstock.1.";

/// Reads `input`: a text of the user, or a list of items.
///
/// # Errors
/// The first item that is wrong.
pub fn read(fields: &Fields<'_>, names: &Names) -> Result<Vec<Value>, ApiError> {
    let items = match fields.get("input") {
        None => &[][..],
        Some(Value::String(text)) => return Ok(vec![json!({"role": "user", "content": text})]),
        Some(Value::Array(items)) => items.as_slice(),
        Some(other) => return Err(wrong_type("input", "a string or a list of items", other)),
    };
    let mut input = Input {
        names,
        messages: Vec::new(),
        turn: None,
    };
    for (index, item) in items.iter().enumerate() {
        let item = Fields::at(item, &format!("input[{index}]"))?;
        input.item(&item)?;
    }
    input.close();
    Ok(input.messages)
}

struct Input<'a> {
    names: &'a Names,
    messages: Vec<Value>,
    /// The assistant's message that still grows.
    turn: Option<Turn>,
}

#[derive(Default)]
struct Turn {
    content: String,
    thoughts: String,
    calls: Vec<Value>,
}

impl Input<'_> {
    fn item(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        match item.text("type")?.unwrap_or("message") {
            "message" => self.message(item),
            "reasoning" => {
                let text = reasoning(item)?;
                append(&mut self.turn().thoughts, &text);
                Ok(())
            }
            "function_call" | "custom_tool_call" => {
                let name = item.text("name")?.unwrap_or_default();
                let name = self.names.shown(name, item.text("namespace")?);
                let id = item.text("call_id")?.unwrap_or_default();
                let arguments = item.get("arguments").or_else(|| item.get("input"));
                let call = json!({"id": id, "type": "function", "function": {
                    "name": name, "arguments": object_of(arguments)}});
                self.turn().calls.push(call);
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                self.close();
                let output = item.get("output").unwrap_or(&Value::Null);
                let content = if output.is_null() {
                    String::new()
                } else {
                    read_content(output, &item.name("output"))?
                };
                let id = item.text("call_id")?.unwrap_or_default();
                self.messages
                    .push(json!({"role": "tool", "content": content, "tool_call_id": id}));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        let role = match item.text("role")? {
            Some("developer" | "system") => "system",
            Some("assistant") => "assistant",
            Some("user") => "user",
            other => {
                let name = item.name("role");
                let found: String = other.unwrap_or("none").chars().take(40).collect();
                let message =
                    format!("{name} must be user, assistant, system or developer, found {found:?}");
                return Err(ApiError::param(name, message));
            }
        };
        let content = item.get("content").unwrap_or(&Value::Null);
        let text = if content.is_null() && role == "assistant" {
            String::new()
        } else {
            read_content(content, &item.name("content"))?
        };
        if role == "assistant" {
            append(&mut self.turn().content, &text);
        } else {
            self.close();
            self.messages.push(json!({"role": role, "content": text}));
        }
        Ok(())
    }

    fn turn(&mut self) -> &mut Turn {
        self.turn.get_or_insert_default()
    }

    fn close(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.messages
                .push(assistant(&turn.content, &turn.thoughts, turn.calls));
        }
    }
}

/// A message of the assistant.
pub fn assistant(content: &str, thoughts: &str, calls: Vec<Value>) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    message.insert("content".into(), content.into());
    if !thoughts.is_empty() {
        message.insert("reasoning_content".into(), thoughts.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    Value::Object(message)
}

/// Reasoning in the clear, or by our handle.
fn reasoning(item: &Fields<'_>) -> Result<String, ApiError> {
    let mut text = String::new();
    for part in item.list("content")?.unwrap_or_default() {
        append(&mut text, part["text"].as_str().unwrap_or_default());
    }
    if text.is_empty() {
        let handle = item.text("encrypted_content")?.unwrap_or_default();
        text.push_str(handle.strip_prefix(HANDLE).unwrap_or_default());
    }
    Ok(text)
}

/// Arguments come as JSON text; what is no object stays as it came.
fn object_of(arguments: Option<&Value>) -> Value {
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

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_of_several_items_is_one_message_and_ids_are_gone() {
        let body = json!({"input": [
            {"type": "message", "role": "developer", "id": "msg_1",
             "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content":
             [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\":1}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "never_heard_of"},
        ]});
        let read = read(&Fields::root(&body).unwrap(), &Names::default()).unwrap();
        let call = json!({"id": "c", "type": "function",
            "function": {"name": "f", "arguments": {"a": 1}}});
        let wanted = json!([
            {"role": "system", "content": "d"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "so", "reasoning_content": "hm",
             "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ]);
        assert_eq!(Value::Array(read), wanted);
    }

    #[test]
    fn reasoning_comes_back_in_the_clear_or_by_its_handle() {
        let text = |item: Value| reasoning(&Fields::root(&item).unwrap()).unwrap();
        let clear = json!({"encrypted_content": null,
            "content": [{"type": "reasoning_text", "text": "why"}]});
        let handle = json!({"encrypted_content": format!("{HANDLE}why"), "content": []});
        assert_eq!(text(clear), "why");
        assert_eq!(text(handle), "why");
        assert_eq!(text(json!({"encrypted_content": "another server's"})), "");
    }
}
