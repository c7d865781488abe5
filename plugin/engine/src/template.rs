//! The chat template of a model file: messages in, the text that the model was trained on out.
//!
//! Templates are Jinja as Hugging Face runs it (trimmed blocks, `tojson` without HTML escapes,
//! `raise_exception`, `strftime_now`, Python's string methods). They come with the model file and
//! may do anything, so each render has a budget of fuel, which bounds time and memory, and a limit
//! on the text.
//!
//! A render also tells which bytes of the text came from which message (see [`Span`]), so that
//! the cache can know system prompt, tools, history and tool output apart without hints.
//!
//! Text of control tokens inside messages, tools and variables is told apart from the template's
//! own (see [`Rendered::literal`]), so that a message cannot end itself and begin another.
//!
//! Nothing here guesses: a model without a template is refused, and the caller names the
//! alternative (raw completions).

mod date;
mod error;
mod functions;
mod shield;
mod spans;
mod values;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value};
use serde_json::{Map, Value as Json};

pub use error::TemplateError;
pub use spans::{Part, Span};

use crate::gguf::Gguf;
use crate::tokenizer::Tokenizer;
use shield::Shield;

/// Work of one render: about one unit an instruction or 64 bytes made, so at most 256 MiB.
const FUEL: u64 = 4 << 20;
/// Bytes of one rendered text.
const TEXT_BYTES_MAX: usize = 32 << 20;
const TEMPLATE_BYTES_MAX: usize = 1 << 20;

const MAIN: &str = "chat";
const WITH_TOOLS: &str = "tool_use";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    /// Texts that close a turn, for the borders of spans.
    closings: Vec<String>,
    /// Tells control tokens of the conversation from those of the template.
    shield: Option<Shield>,
    has_tool_variant: bool,
    /// All templates, one after the other.
    source: String,
}

/// What to render.
#[derive(Debug, Clone, Copy)]
pub struct RenderArgs<'a> {
    /// The messages: an array of objects with `role` and `content` (text, or an array of parts).
    pub messages: &'a Json,
    /// Tool definitions as the template wants them, usually an array of
    /// `{"type": "function", "function": {..}}`; null and an empty array count as none.
    pub tools: Option<&'a Json>,
    /// Whether to end with the head of an answer, so that the model writes it.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), such as `enable_thinking`. They cannot replace
    /// the variables above.
    pub extra: Option<&'a Map<String, Json>>,
    /// Seconds since 1970 (UTC), for templates that write the date.
    pub unix_s: u64,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text for the model, control tokens as their text.
    pub text: String,
    /// Which bytes came from what: in order, without gaps or overlaps, covering the whole text.
    pub spans: Vec<Span>,
    /// Where texts of control tokens begin that came with the conversation: bytes of the text,
    /// ascending. They are to be encoded as plain text.
    pub literal: Vec<usize>,
}

impl ChatTemplate {
    /// The template of a model file.
    ///
    /// # Errors
    /// The file has none, or it does not compile.
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let source = file
            .text_opt("tokenizer.chat_template")?
            .ok_or(TemplateError::Absent)?;
        let mut template = Self::of_model(source, tokenizer)?;
        if let Some(source) = file.text_opt("tokenizer.chat_template.tool_use")? {
            template.add(WITH_TOOLS, source)?;
            template.has_tool_variant = true;
        }
        Ok(template)
    }

    /// A template from its source, for a model with this tokenizer.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn of_model(source: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let mut template = Self::new(source)?;
        template.bos = tokenizer.bos_text().unwrap_or_default().to_owned();
        template.eos = tokenizer.eos_text().unwrap_or_default().to_owned();
        let closing = |&id: &u32| {
            str::from_utf8(tokenizer.token_bytes(id))
                .ok()
                .map(str::to_owned)
        };
        template.closings = tokenizer.end_tokens().iter().filter_map(closing).collect();
        template.shield = Shield::new(tokenizer);
        Ok(template)
    }

    /// A template from its source, without BOS and EOS texts; it knows no control tokens.
    ///
    /// # Errors
    /// It is too long or does not compile; the message has the line.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| TemplateError::syntax(&error))?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(functions::format_as_python);
        environment.add_filter("tojson", functions::to_json);
        environment.add_test("iterable", functions::is_iterable);
        environment.add_function("raise_exception", functions::raise_exception);
        let mut template = Self {
            environment,
            bos: String::new(),
            eos: String::new(),
            closings: Vec::new(),
            shield: None,
            has_tool_variant: false,
            source: String::new(),
        };
        template.add(MAIN, source)?;
        Ok(template)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::SourceTooLong {
                bytes: source.len(),
                limit: TEMPLATE_BYTES_MAX,
            });
        }
        self.environment
            .add_template_owned(name, functions::without_generation_tags(source))
            .map_err(|error| TemplateError::syntax(&error))?;
        self.source.push_str(source);
        Ok(())
    }

    /// The source, to tell from its words how the model writes tool calls and thoughts.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// What the template raised (a fault of the request, such as roles that do not alternate),
    /// what went wrong inside it, or a limit.
    ///
    /// # Cost
    /// Two renders: the second, with marks in place of the contents, finds the spans. A third when
    /// the conversation holds text of control tokens.
    pub fn render(&self, args: &RenderArgs<'_>) -> Result<Rendered, TemplateError> {
        let messages = args.messages.as_array().ok_or(TemplateError::Messages)?;
        let text = self.render_messages(args, messages)?;
        let (marked, marks) = spans::with_marks(messages);
        // A template may refuse the marked messages; spans are then found by searching.
        let skeleton = self.render_messages(args, &marked).ok();
        let tools = tools(args).and_then(|tools| spans::find_tools(&text, tools));
        let frame = spans::Frame {
            closings: &self.closings,
            has_answer_head: args.add_generation_prompt,
        };
        let spans = spans::find(&text, skeleton.as_deref(), &marks, tools, frame);
        let literal = self.literal(args, &text)?;
        Ok(Rendered {
            text,
            spans,
            literal,
        })
    }

    /// Where the text has control tokens that are the conversation's own.
    fn literal(&self, args: &RenderArgs<'_>, text: &str) -> Result<Vec<usize>, TemplateError> {
        let Some(shield) = &self.shield else {
            return Ok(Vec::new());
        };
        let mut messages = args.messages.clone();
        let mut tools = args.tools.cloned();
        let mut extra = args.extra.cloned();
        let any = [
            shield.mark_all(&mut messages),
            tools.as_mut().is_some_and(|tools| shield.mark_all(tools)),
            extra
                .as_mut()
                .is_some_and(|extra| shield.mark_fields(extra)),
        ];
        if !any.contains(&true) {
            return Ok(Vec::new());
        }
        let marked = RenderArgs {
            messages: &messages,
            tools: tools.as_ref(),
            extra: extra.as_ref(),
            ..*args
        };
        let messages = messages.as_array().ok_or(TemplateError::Messages)?;
        self.render_messages(&marked, messages)
            .ok()
            .and_then(|marked| shield::places(text, &marked))
            .ok_or(TemplateError::ControlTokens)
    }

    fn render_messages(
        &self,
        args: &RenderArgs<'_>,
        messages: &[Json],
    ) -> Result<String, TemplateError> {
        let tools = tools(args);
        let name = if tools.is_some() && self.has_tool_variant {
            WITH_TOOLS
        } else {
            MAIN
        };
        let template = self
            .environment
            .get_template(name)
            .map_err(|error| TemplateError::syntax(&error))?;

        let mut variables: Vec<(String, Value)> = Vec::new();
        for (key, value) in args.extra.into_iter().flatten() {
            variables.push((key.clone(), values::from_json(value)));
        }
        let unix_s = args.unix_s;
        let strftime_now = Value::from_function(move |format: &str| date::format(format, unix_s));
        variables.extend([
            (
                "messages".to_owned(),
                messages.iter().map(values::from_json).collect(),
            ),
            (
                "tools".to_owned(),
                tools.map_or_else(|| Value::from(()), values::from_json),
            ),
            (
                "add_generation_prompt".to_owned(),
                Value::from(args.add_generation_prompt),
            ),
            ("bos_token".to_owned(), Value::from(self.bos.as_str())),
            ("eos_token".to_owned(), Value::from(self.eos.as_str())),
            ("strftime_now".to_owned(), strftime_now),
        ]);
        let text = template
            .render(Value::from_pairs(variables))
            .map_err(|error| TemplateError::render(&error))?;
        if text.len() > TEXT_BYTES_MAX {
            return Err(TemplateError::TextTooLong {
                bytes: text.len(),
                limit: TEXT_BYTES_MAX,
            });
        }
        Ok(text)
    }
}

/// The tools, if there is any.
fn tools<'a>(args: &RenderArgs<'a>) -> Option<&'a Json> {
    args.tools
        .filter(|tools| !tools.is_null() && tools.as_array().is_none_or(|t| !t.is_empty()))
}
