//! Anthropic's messages, in the form that chat templates expect.
//!
//! One message may become several: each `tool_result` is a message of its own, and what stands
//! behind it another. Order is kept, nothing is hoisted. Block types that are not known are left
//! out; images and files are refused by name, since leaving them out would change the question.

use serde_json::{Value, json};

use crate::anthropic::cache::read_ttl;
use crate::chat::conversation::{Mark, Place};
use crate::chat::message::{Draft, Others, parts_of, read_part, read_role, read_text, result};
use crate::http::api_error::ApiError;
use crate::openai::fields::Fields;

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
        let blocks = parts_of(system, "system")?;
        let mut head = Draft::new("system");
        let mut ttls = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let block = Fields::at(block, &format!("system[{index}]"))?;
            let text = block.text("text")?.unwrap_or_default();
            let text = if strip && index == 0 {
                without_billing(text)
            } else {
                text
            };
            head.say(text);
            ttls.extend(read_ttl(&block)?.map(|ttl| (head.content_bytes(), ttl)));
        }
        if head.content_bytes() > 0 {
            let index = self.messages.len();
            self.messages.push(head.take());
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
        let roles = ["user", "assistant", "system", "developer"];
        let role = read_role(&fields, &roles, "user, assistant or system")?;
        let name = fields.name("content");
        let blocks = parts_of(fields.get("content").unwrap_or(&Value::Null), &name)?;
        let mut open = Draft::new(role);
        for (index, block) in blocks.iter().enumerate() {
            let block = Fields::at(block, &format!("{name}[{index}]"))?;
            self.read_block(&block, &mut open)?;
        }
        if open.is_used() || blocks.is_empty() {
            self.messages.push(open.take());
        }
        Ok(())
    }

    fn read_block(&mut self, block: &Fields<'_>, open: &mut Draft) -> Result<(), ApiError> {
        let mut bytes = usize::MAX;
        match block.text("type")?.unwrap_or("text") {
            "thinking" => open.think(block.text("thinking")?.unwrap_or_default()),
            "tool_use" => {
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                let name = block.text("name")?.unwrap_or_default();
                open.call(block.text("id")?.unwrap_or_default(), name, input);
            }
            "tool_result" => {
                if open.is_used() {
                    self.messages.push(open.take());
                }
                let content = match block.get("content") {
                    Some(content) => read_text(content, &block.name("content"), Others::LeftOut)?,
                    None => String::new(),
                };
                let id = block.text("tool_use_id")?.unwrap_or_default();
                self.messages.push(result(id, &content));
                self.mark(block, self.messages.len() - 1, content.len())?;
                return Ok(());
            }
            "text" | "image" | "document" | "file" | "audio" | "video" => {
                open.say(read_part(block, Others::LeftOut)?);
                bytes = open.content_bytes();
            }
            _ => {}
        }
        self.mark(block, self.messages.len(), bytes)
    }

    /// A block with `cache_control` ends a prefix that is to be kept.
    fn mark(&mut self, block: &Fields<'_>, index: usize, bytes: usize) -> Result<(), ApiError> {
        let place = Place::Message { index, bytes };
        self.marks
            .extend(read_ttl(block)?.map(|ttl| Mark { place, ttl }));
        Ok(())
    }
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
