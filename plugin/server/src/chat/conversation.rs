//! A conversation as all chat APIs mean it, in one canonical form: what differs between clients and
//! turns without a meaning (ids, spacing of arguments, where `cache_control` stands) is gone, so
//! that the same conversation is the same prompt.

use rootstock::radix::Ttl;
use serde_json::{Map, Value, json};

/// Messages, tools and what is wanted of the answer.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Messages as chat templates expect them: `content` is a string, arguments are objects,
    /// results are messages of the role `tool`. Nothing is moved from its place.
    pub messages: Vec<Value>,
    /// Tools, in the caller's order.
    pub tools: Vec<Tool>,
    /// Whether tools may, must or must not be called.
    pub choice: ToolChoice,
    /// At most one call in the answer.
    pub single_call: bool,
    /// What the answer's text has to be.
    pub format: Format,
    /// Whether the model should think, where the caller says so.
    pub thinking: Option<bool>,
    /// Further variables of the template.
    pub template_args: Map<String, Value>,
    /// The beginning of the answer, given by the caller.
    pub prefill: Option<String>,
    /// Prefixes that the caller wants to be kept.
    pub marks: Vec<Mark>,
    /// Whether clients of this API send thoughts back with the answers they belong to.
    pub thoughts_come_back: bool,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Value,
    /// The namespace that it was defined in; calls have to repeat it.
    pub namespace: Option<String>,
}

/// Which tools may be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Any or none.
    #[default]
    Auto,
    /// None; they are not shown to the model.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// What the text of an answer has to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON of this schema.
    Schema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
}

/// The end of a prefix that is to be kept, and how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Where it ends.
    pub place: Place,
    /// How long.
    pub ttl: Ttl,
}

/// A place in a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Behind the tools.
    Tools,
    /// In a message, behind so many bytes of its content.
    Message {
        /// Which one.
        index: usize,
        /// Bytes of its content.
        bytes: usize,
    },
    /// Behind everything.
    End,
}

impl Tool {
    /// The form in which templates print tools.
    pub fn shown(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.name.as_str().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.as_str().into());
        }
        function.insert("parameters".into(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }
}

impl Conversation {
    /// The tools that the answer may call.
    pub fn callable(&self) -> &[Tool] {
        if self.choice == ToolChoice::None {
            return &[];
        }
        &self.tools
    }

    /// Gives calls and results ids that follow from their place: those of clients differ from
    /// session to session, and some templates print them. Results learn the name of what was
    /// called, which some templates want.
    pub fn canonical_ids(&mut self) {
        let mut known: Vec<(String, String, String)> = Vec::new();
        for message in &mut self.messages {
            if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
                for call in calls {
                    let number = known.len();
                    // Mistral's templates want exactly nine letters or digits.
                    let canonical = format!("call{number:05}");
                    let name = call["function"]["name"].as_str().unwrap_or_default();
                    let asked = call["id"].as_str().unwrap_or_default();
                    known.push((asked.to_owned(), canonical.clone(), name.to_owned()));
                    call["id"] = canonical.into();
                }
            }
            let Some(asked) = message.get("tool_call_id").and_then(Value::as_str) else {
                continue;
            };
            let found = known.iter().rev().find(|(id, _, _)| id == asked).cloned();
            let Some(fields) = message.as_object_mut() else {
                continue;
            };
            match found {
                Some((_, canonical, name)) => {
                    fields.insert("tool_call_id".into(), canonical.into());
                    if !name.is_empty() && !fields.contains_key("name") {
                        fields.insert("name".into(), name.into());
                    }
                }
                None => {
                    fields.insert("tool_call_id".into(), "call00000".into());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn talk(id: &str) -> Vec<Value> {
        let call = json!({"id": id, "function": {"name": "f", "arguments": {}}});
        let mut talk = Conversation {
            messages: vec![
                json!({"role": "assistant", "content": "", "tool_calls": [call]}),
                json!({"role": "tool", "content": "1", "tool_call_id": id}),
            ],
            ..Conversation::default()
        };
        talk.canonical_ids();
        talk.messages
    }

    #[test]
    fn ids_of_clients_do_not_reach_the_prompt() {
        assert_eq!(talk("toolu_1"), talk("call_9f"));
        let messages = talk("x");
        assert_eq!(
            messages[1]["tool_call_id"],
            messages[0]["tool_calls"][0]["id"]
        );
        assert_eq!(messages[1]["name"], "f");
    }
}
