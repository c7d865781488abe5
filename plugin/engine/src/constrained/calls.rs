//! The grammar of answers: perhaps thoughts, then tool calls in the text form that the model was
//! trained on, or JSON.

use std::fmt::Write as _;

use serde_json::Value;

use super::spaced;

/// Calls of one forced answer: a small model would begin another one for ever.
pub const CALLS_MAX: usize = 8;

/// What an answer may be; without calls and JSON it could only be thoughts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerGrammar {
    /// Thoughts may or do come first: the text that opens them, empty when the prompt did.
    pub thoughts: Option<String>,
    /// Tool calls.
    pub calls: Option<CallGrammar>,
    /// JSON of this schema.
    pub json: Option<Value>,
}

/// One or more calls.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallGrammar {
    /// Names and argument schemas of the tools.
    pub tools: Vec<(String, Value)>,
    /// Before the first call.
    pub head: Marks,
    /// Between two calls.
    pub between: Marks,
    /// Behind the last.
    pub tail: Marks,
    /// The key of the arguments.
    pub arguments_key: &'static str,
    /// Exactly one call.
    pub single: bool,
}

/// Texts and control tokens around calls, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks(pub Vec<Mark>);

/// A piece of what stands around calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Text, in whatever tokens.
    Text(String),
    /// A control token.
    Token(u32),
}

impl Marks {
    fn lark(&self) -> String {
        let piece = |mark: &Mark| match mark {
            Mark::Text(text) => literal(text),
            Mark::Token(token) => format!("<[{token}]>"),
        };
        let pieces: Vec<String> = self.0.iter().map(piece).collect();
        if pieces.is_empty() {
            return "\"\"".to_owned();
        }
        pieces.join(" ")
    }
}

impl AnswerGrammar {
    /// The grammar as Lark.
    pub(super) fn lark(&self) -> String {
        let mut out = String::from("start: ");
        match self.thoughts.as_deref() {
            None => {}
            Some("") => out.push_str("thought /\\s*/ "),
            Some(opening) => {
                let _always_fits = write!(out, "({} thought /\\s*/)? ", literal(opening));
            }
        }
        out.push_str("answer\n");
        if self.thoughts.is_some() {
            out.push_str("thought[suffix=\"</think>\"]: /(.|\\n)*/\n");
        }
        let kinds = [
            self.calls.is_some().then_some("calls"),
            self.json.is_some().then_some("json"),
        ];
        let kinds: Vec<&str> = kinds.into_iter().flatten().collect();
        let _always_fits = writeln!(out, "answer: {}", kinds.join(" | "));
        if let Some(schema) = &self.json {
            let _always_fits = writeln!(out, "json: %json {}", spaced(schema, false));
        }
        if let Some(calls) = &self.calls {
            calls.write(&mut out);
        }
        out
    }
}

impl CallGrammar {
    fn write(&self, out: &mut String) {
        let (head, tail) = (self.head.lark(), self.tail.lark());
        let more = if self.single {
            String::new()
        } else {
            format!("({} call){{0,{}}}", self.between.lark(), CALLS_MAX - 1)
        };
        let _always_fits = writeln!(out, "calls: {head} call {more} {tail}");
        let names: Vec<String> = (0..self.tools.len()).map(|i| format!("tool_{i}")).collect();
        let _always_fits = writeln!(out, "call: {}", names.join(" | "));
        for ((name, schema), rule) in self.tools.iter().zip(&names) {
            let name = Value::from(name.as_str()).to_string();
            let head = format!("{{\"name\": {name}, \"{}\": ", self.arguments_key);
            let mut schema = schema.clone();
            if let Some(fields) = schema.as_object_mut() {
                // Arguments are an object, whether the schema says so or not.
                fields.entry("type").or_insert_with(|| "object".into());
            }
            let schema = spaced(&schema, true);
            let _always_fits = writeln!(out, "{rule}: {} args_{rule} \"}}\"", literal(&head));
            let _always_fits = writeln!(out, "args_{rule}: %json {schema}");
        }
    }
}

/// A text as a Lark string, whose escapes are those of JSON.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
