//! Brings a conversation into the form that one model's template can print.
//!
//! A template without a place for tools gets them in its system message, behind the instructions:
//! calls become text in the form of [`CallForm::Tags`](super::style::CallForm::Tags), results
//! become messages of the user. Templates that refuse system messages in the middle, or two
//! messages of one role in a row, get a second arrangement in which neighbors are joined. Both are
//! functions of the messages before a place, so a longer conversation keeps its head.

use serde_json::{Map, Value, json};

use crate::chat::conversation::{Conversation, Tool};
use crate::tools::style::Style;

/// How strict the template is about roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Every message where it is.
    AsIs,
    /// System messages lead; later ones speak as the user; neighbors of one role are one message.
    Joined,
}

/// Messages and tools for a template.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The messages.
    pub messages: Vec<Value>,
    /// The tools, where the template takes them.
    pub tools: Option<Value>,
    /// Where each message of the conversation went: the message, and the byte of its content.
    pub at: Vec<(usize, usize)>,
    /// Where the tools end, when they stand in a message.
    pub tools_end: Option<(usize, usize)>,
}

/// Prepares a conversation for the template of a model.
pub fn prepare(style: &Style, talk: &Conversation, arrangement: Arrangement) -> Prepared {
    let tools = talk.callable();
    let mut prepared = Prepared {
        messages: talk.messages.clone(),
        tools: None,
        at: (0..talk.messages.len()).map(|index| (index, 0)).collect(),
        tools_end: None,
    };
    if style.takes_tools {
        prepared.tools =
            (!tools.is_empty()).then(|| Value::Array(tools.iter().map(Tool::shown).collect()));
    } else {
        prepared.messages.iter_mut().for_each(as_text);
        if !tools.is_empty() {
            prepared.put_tools(tools);
        }
    }
    if arrangement == Arrangement::Joined {
        prepared.join();
    }
    prepared
}

/// JSON with the spacing that templates use, and that models write.
pub fn spaced_json(value: &Value) -> String {
    let mut out = String::new();
    write_spaced(value, &mut out);
    out
}

fn write_spaced(value: &Value, out: &mut String) {
    match value {
        Value::Array(list) => {
            out.push('[');
            for (index, item) in list.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_spaced(item, out);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            out.push('{');
            for (index, (key, item)) in fields.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push_str(": ");
                write_spaced(item, out);
            }
            out.push('}');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string());
        }
    }
}

/// Calls and results of a message as text, for templates that know neither.
fn as_text(message: &mut Value) {
    let Some(fields) = message.as_object_mut() else {
        return;
    };
    let content = content_of(fields).to_owned();
    if let Some(Value::Array(calls)) = fields.remove("tool_calls") {
        let mut text = content;
        for call in &calls {
            let function = &call["function"];
            let body = json!({"name": function["name"], "arguments": function["arguments"]});
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str("<tool_call>\n");
            text.push_str(&spaced_json(&body));
            text.push_str("\n</tool_call>");
        }
        fields.insert("content".into(), text.into());
    } else if fields.get("role").is_some_and(|role| role == "tool") {
        let text = format!("<tool_response>\n{content}\n</tool_response>");
        fields.insert("content".into(), text.into());
        fields.insert("role".into(), "user".into());
    }
}

fn content_of(fields: &Map<String, Value>) -> &str {
    fields
        .get("content")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// What a model is told about tools that its template knows nothing of.
fn tools_text(tools: &[Tool]) -> String {
    let mut text = String::from(
        "# Tools\n\nYou may call these functions. Each line is one function with the JSON schema \
         of its parameters.\n",
    );
    for tool in tools {
        text.push_str(&spaced_json(&tool.shown()["function"]));
        text.push('\n');
    }
    text.push_str(
        "\nTo call a function, write its name and arguments as JSON between tags:\n<tool_call>\n\
         {\"name\": \"...\", \"arguments\": {...}}\n</tool_call>\nEach call has its own tags. \
         Results come back between <tool_response> tags.",
    );
    text
}

impl Prepared {
    /// Into the first system message when it leads, else into one of their own at the head.
    fn put_tools(&mut self, tools: &[Tool]) {
        let text = tools_text(tools);
        let leads = self
            .messages
            .first()
            .is_some_and(|first| first["role"] == "system");
        if !leads {
            let length = text.len();
            self.messages
                .insert(0, json!({"role": "system", "content": text}));
            self.at.iter_mut().for_each(|(index, _)| *index += 1);
            self.tools_end = Some((0, length));
            return;
        }
        if let Some(fields) = self.messages.first_mut().and_then(Value::as_object_mut) {
            let content = content_of(fields);
            let all = if content.is_empty() {
                text
            } else {
                format!("{content}\n\n{text}")
            };
            self.tools_end = Some((0, all.len()));
            fields.insert("content".into(), all.into());
        }
    }

    fn join(&mut self) {
        let mut joined: Vec<Value> = Vec::new();
        let mut moved = Vec::with_capacity(self.messages.len());
        for mut message in std::mem::take(&mut self.messages) {
            let leading = joined.iter().all(|before| before["role"] == "system");
            if message["role"] == "system" && !leading {
                message["role"] = "user".into();
            }
            let role = message["role"].clone();
            let joins = role == "system" || role == "user";
            let content = message["content"].as_str().unwrap_or_default().to_owned();
            let count = joined.len();
            match joined
                .last_mut()
                .filter(|last| joins && last["role"] == role)
            {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    let all = format!("{before}\n\n{content}");
                    moved.push((count - 1, all.len() - content.len()));
                    last["content"] = all.into();
                }
                None => {
                    moved.push((count, 0));
                    joined.push(message);
                }
            }
        }
        self.messages = joined;
        let place = |(index, bytes): (usize, usize)| {
            let (to, shift) = moved.get(index).copied().unwrap_or((index, 0));
            (to, shift + bytes)
        };
        self.at = self.at.iter().copied().map(place).collect();
        self.tools_end = self.tools_end.map(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(messages: Value, with_tool: bool) -> Conversation {
        let tool = Tool {
            name: "f".into(),
            description: None,
            parameters: json!({"type": "object"}),
            namespace: None,
        };
        Conversation {
            messages: messages.as_array().cloned().unwrap_or_default(),
            tools: if with_tool { vec![tool] } else { Vec::new() },
            ..Conversation::default()
        }
    }

    #[test]
    fn a_template_without_tools_gets_them_behind_the_instructions() {
        let style = Style::of("{{ messages }}");
        let messages = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "ok", "tool_calls": [{"id": "1", "function":
                {"name": "f", "arguments": {"a": [1, 2]}}}]},
            {"role": "tool", "content": "done", "tool_call_id": "1"},
        ]);
        let prepared = prepare(&style, &talk(messages, true), Arrangement::AsIs);
        let system = prepared.messages[0]["content"].as_str().unwrap();
        assert!(system.starts_with("Be brief.\n\n# Tools"), "{system}");
        assert_eq!(prepared.tools_end, Some((0, system.len())));
        assert_eq!(
            prepared.messages[2]["content"],
            "ok\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>"
        );
        assert_eq!(prepared.messages[3]["role"], "user");
        assert_eq!(prepared.tools, None);
    }

    #[test]
    fn joined_neighbors_keep_track_of_where_things_went() {
        let style = Style::of("{{ messages }}");
        let messages = json!([
            {"role": "system", "content": "a"}, {"role": "system", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "system", "content": "d"},
        ]);
        let prepared = prepare(&style, &talk(messages, false), Arrangement::Joined);
        let wanted = json!([
            {"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c\n\nd"},
        ]);
        assert_eq!(Value::Array(prepared.messages), wanted);
        assert_eq!(prepared.at, [(0, 0), (0, 3), (1, 0), (1, 3)]);
    }

    #[test]
    fn json_has_the_spacing_of_templates() {
        let value = json!({"a": [1, {"b": "x\n\"y\""}], "c": null});
        assert_eq!(
            spaced_json(&value),
            "{\"a\": [1, {\"b\": \"x\\n\\\"y\\\"\"}], \"c\": null}"
        );
    }
}
