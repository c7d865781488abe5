//! Anthropic's messages, in the form that chat templates expect.
//!
//! One message may become several: each `tool_result` is a message of its own, and what stands
//! behind it another. Order is kept, nothing is hoisted. Block types that are not known are left
//! out; images and files are refused by name, since leaving them out would change the question.

use serde_json::{Map, Value, json};

use crate::anthropic::cache::read_ttl;
use crate::chat::conversation::{Mark, Place};
use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

const BILLING: &str = "x-anthropic-billing-header:";

/// Messages and breakpoints in the making.
#[derive(Debug, Default)]
pub struct Talk {
    /// The messages.
    pub messages: Vec<Value>,
    /// The breakpoints in them, in order.
    pub marks: Vec<Mark>,
}

impl Talk {
    /// Reads `system`: a text, or text blocks. With `strip`, a billing line at its head is left
    /// out.
    ///
    /// # Errors
    /// A value of another type, or a wrong `cache_control`.
    pub fn read_system(&mut self, fields: &Fields<'_>, strip: bool) -> Result<(), ApiError> {
        let Some(system) = fields.get("system") else {
            return Ok(());
        };
        let blocks = blocks_of(system, "system")?;
        let mut content = String::new();
        let mut ttls = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let block = Fields::at(block, &format!("system[{index}]"))?;
            let text = block.text("text")?.unwrap_or_default();
            let text = if strip && index == 0 {
                without_billing(text)
            } else {
                text
            };
            append(&mut content, text);
            ttls.extend(read_ttl(&block)?.map(|ttl| (content.len(), ttl)));
        }
        if !content.is_empty() {
            let index = self.messages.len();
            self.messages
                .push(json!({"role": "system", "content": content}));
            for (bytes, ttl) in ttls {
                let place = Place::Message { index, bytes };
                self.marks.push(Mark { place, ttl });
            }
        }
        Ok(())
    }

    /// Reads one message.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn read_message(&mut self, message: &Value, path: &str) -> Result<(), ApiError> {
        let fields = Fields::at(message, path)?;
        let role = match fields.text("role")? {
            Some(role @ ("user" | "assistant" | "system")) => role,
            Some("developer") => "system",
            other => {
                let name = fields.name("role");
                let found: String = other.unwrap_or("none").chars().take(40).collect();
                let message = format!("{name} must be user, assistant or system, found {found:?}");
                return Err(ApiError::param(name, message));
            }
        };
        let name = fields.name("content");
        let content = fields.get("content").unwrap_or(&Value::Null);
        let blocks = blocks_of(content, &name)?;
        let mut open = Open::new(role);
        for (index, block) in blocks.iter().enumerate() {
            let block = Fields::at(block, &format!("{name}[{index}]"))?;
            self.read_block(&block, &mut open)?;
        }
        open.close(&mut self.messages, blocks.is_empty());
        Ok(())
    }

    fn read_block(&mut self, block: &Fields<'_>, open: &mut Open) -> Result<(), ApiError> {
        let mut bytes = usize::MAX;
        match block.text("type")?.unwrap_or("text") {
            "text" => {
                append(&mut open.content, block.text("text")?.unwrap_or_default());
                open.is_used = true;
                bytes = open.content.len();
            }
            "thinking" => {
                append(
                    &mut open.thoughts,
                    block.text("thinking")?.unwrap_or_default(),
                );
                open.is_used = true;
            }
            "tool_use" => {
                let name = block.text("name")?.unwrap_or_default();
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                open.calls.push(json!({
                    "id": block.text("id")?.unwrap_or_default(), "type": "function",
                    "function": {"name": name, "arguments": input},
                }));
                open.is_used = true;
            }
            "tool_result" => {
                let content = result_text(block)?;
                bytes = content.len();
                open.close(&mut self.messages, false);
                let id = block.text("tool_use_id")?.unwrap_or_default();
                self.messages.push(json!({
                    "role": "tool", "content": content, "tool_call_id": id,
                }));
                let index = self.messages.len() - 1;
                let place = Place::Message { index, bytes };
                self.marks
                    .extend(read_ttl(block)?.map(|ttl| Mark { place, ttl }));
                return Ok(());
            }
            "document" if text_of_document(block).is_some() => {
                append(
                    &mut open.content,
                    text_of_document(block).unwrap_or_default(),
                );
                open.is_used = true;
                bytes = open.content.len();
            }
            kind @ ("image" | "document" | "file" | "audio" | "video") => {
                return Err(refused(block, kind));
            }
            _ => {}
        }
        let index = self.messages.len();
        let place = Place::Message { index, bytes };
        self.marks
            .extend(read_ttl(block)?.map(|ttl| Mark { place, ttl }));
        Ok(())
    }
}

/// A template message that still grows.
#[derive(Debug)]
struct Open {
    role: &'static str,
    content: String,
    thoughts: String,
    calls: Vec<Value>,
    is_used: bool,
}

impl Open {
    fn new(role: &str) -> Open {
        Open {
            role: match role {
                "assistant" => "assistant",
                "system" => "system",
                _ => "user",
            },
            content: String::new(),
            thoughts: String::new(),
            calls: Vec::new(),
            is_used: false,
        }
    }

    /// Puts it behind the others, if it holds anything or has to stand.
    fn close(&mut self, messages: &mut Vec<Value>, stands: bool) {
        if !std::mem::take(&mut self.is_used) && !stands {
            return;
        }
        let mut message = Map::new();
        message.insert("role".into(), self.role.into());
        message.insert("content".into(), std::mem::take(&mut self.content).into());
        let thoughts = std::mem::take(&mut self.thoughts);
        if !thoughts.is_empty() {
            message.insert("reasoning_content".into(), thoughts.into());
        }
        let calls = std::mem::take(&mut self.calls);
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        messages.push(Value::Object(message));
    }
}

/// A text stands for one text block.
fn blocks_of(content: &Value, name: &str) -> Result<Vec<Value>, ApiError> {
    match content {
        Value::String(text) => Ok(vec![json!({"type": "text", "text": text})]),
        Value::Array(blocks) => Ok(blocks
            .iter()
            .map(|block| match block.as_str() {
                Some(text) => json!({"type": "text", "text": text}),
                None => block.clone(),
            })
            .collect()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => Err(wrong_type(
            name,
            "a string or a list of content blocks",
            content,
        )),
    }
}

/// What a tool returned; the model sees the text of all blocks.
fn result_text(block: &Fields<'_>) -> Result<String, ApiError> {
    let Some(content) = block.get("content") else {
        return Ok(String::new());
    };
    let name = block.name("content");
    let mut text = String::new();
    for (index, part) in blocks_of(content, &name)?.iter().enumerate() {
        let part = Fields::at(part, &format!("{name}[{index}]"))?;
        match part.text("type")?.unwrap_or("text") {
            kind @ ("image" | "document" | "file" | "audio" | "video") => {
                return Err(refused(&part, kind));
            }
            _ => append(&mut text, part.text("text")?.unwrap_or_default()),
        }
    }
    Ok(text)
}

fn text_of_document<'a>(block: &Fields<'a>) -> Option<&'a str> {
    let source = block.get("source")?;
    (source["type"] == "text").then(|| source["data"].as_str())?
}

fn refused(block: &Fields<'_>, kind: &str) -> ApiError {
    let message = format!("this model reads text only, found a block of type {kind:?}");
    ApiError::unsupported(block.name("type"), message)
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push('\n');
    }
    text.push_str(more);
}

/// The text without its first line, when that is a billing line.
fn without_billing(text: &str) -> &str {
    if text.starts_with(BILLING) {
        text.split_once('\n').map_or("", |(_, rest)| rest)
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(messages: Value) -> Talk {
        let mut talk = Talk::default();
        for message in messages.as_array().unwrap() {
            talk.read_message(message, "messages[0]").unwrap();
        }
        talk
    }

    #[test]
    fn results_and_text_keep_their_order_and_lists_become_their_text() {
        let talk = read(json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "any"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1",
                 "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "and"}, {"type": "text", "text": "now?"},
                {"type": "never_heard_of", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "note"},
        ]));
        let call = json!({"id": "toolu_1", "type": "function",
            "function": {"name": "f", "arguments": {"x": 1}}});
        let wanted = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "toolu_1"},
            {"role": "user", "content": "and\nnow?"},
            {"role": "system", "content": "note"},
        ]);
        assert_eq!(Value::Array(talk.messages), wanted);
        let place = Place::Message {
            index: 3,
            bytes: usize::MAX,
        };
        assert_eq!(talk.marks[0].place, place);
    }

    #[test]
    fn images_are_refused_by_name_wherever_they_stand() {
        let image = json!({"type": "image", "source": {}});
        for content in [
            json!([image]),
            json!([{"type": "tool_result", "tool_use_id": "x", "content": [image]}]),
        ] {
            let message = json!({"role": "user", "content": content});
            let error = Talk::default()
                .read_message(&message, "messages[0]")
                .unwrap_err();
            assert!(error.message.contains("\"image\""), "{}", error.message);
        }
    }

    #[test]
    fn only_a_leading_billing_line_is_left_out() {
        let text = "x-anthropic-billing-header: cc_version=2; cch=a1b;\nYou are";
        assert_eq!(without_billing(text), "You are");
        assert_eq!(without_billing("x-anthropic-billing-header: v"), "");
        let mentions = "Say x-anthropic-billing-header: now\nx";
        assert_eq!(without_billing(mentions), mentions);
    }
}
