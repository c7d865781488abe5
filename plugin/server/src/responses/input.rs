//! The items of a `/v1/responses` request, as the messages that chat templates expect.
//!
//! Reasoning, text and calls that follow each other are one message of the assistant, as they
//! were when the model wrote them. Ids of items never reach the prompt: clients make new ones for
//! the same texts. Item types that are not known are left out.

use serde_json::{Value, json};

use crate::chat::message::{Draft, Others, append, read_arguments, read_role, read_text, result};
use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};
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
        turn: Draft::new("assistant"),
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
    turn: Draft,
}

impl Input<'_> {
    fn item(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        match item.text("type")?.unwrap_or("message") {
            "message" => self.message(item),
            "reasoning" => {
                self.turn.think(&reasoning(item)?);
                Ok(())
            }
            "function_call" | "custom_tool_call" => {
                let name = item.text("name")?.unwrap_or_default();
                let name = self.names.shown(name, item.text("namespace")?);
                let id = item.text("call_id")?.unwrap_or_default();
                let arguments = item.get("arguments").or_else(|| item.get("input"));
                self.turn.call(id, name, read_arguments(arguments));
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                self.close();
                let output = match item.get("output") {
                    Some(output) => read_text(output, &item.name("output"), Others::Refused)?,
                    None => String::new(),
                };
                let id = item.text("call_id")?.unwrap_or_default();
                self.messages.push(result(id, &output));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn message(&mut self, item: &Fields<'_>) -> Result<(), ApiError> {
        let roles = ["user", "assistant", "system", "developer"];
        let role = read_role(item, &roles, "user, assistant, system or developer")?;
        let content = item.get("content").unwrap_or(&Value::Null);
        let text = if content.is_null() && role == "assistant" {
            String::new()
        } else {
            read_text(content, &item.name("content"), Others::Refused)?
        };
        if role == "assistant" {
            self.turn.say(&text);
            return Ok(());
        }
        self.close();
        let mut message = Draft::new(role);
        message.say(&text);
        self.messages.push(message.take());
        Ok(())
    }

    fn close(&mut self) {
        if self.turn.is_used() {
            self.messages.push(self.turn.take());
        }
    }
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
