//! From text and conversations to the tokens of a prompt.

use std::ops::Range;

use rootstock::radix::{ContextKind, Token};
use rootstock_engine::history::AnswerPlace;
use rootstock_engine::template::{Part, RenderArgs, Rendered, Span, TemplateError};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::chat::conversation::{Conversation, Place};
use crate::engine_port::Engine;
use crate::http::api_error::ApiError;
use crate::tools::prompt::{Arrangement, Prepared, prepare};

/// A prompt as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// The tokens.
    pub tokens: Vec<Token>,
    /// Which tokens are system, tools, history; found from the rendered template.
    pub spans: Vec<(Range<u32>, ContextKind)>,
    /// Where the answer is remembered; none for prompts that came as tokens.
    pub end: Option<AnswerPlace>,
    /// Tokens before each mark of the conversation, in its order.
    pub marks: Vec<u32>,
    /// The prompt ends inside `<think>`.
    pub is_thinking: bool,
}

impl Prompt {
    /// A prompt that came as tokens.
    pub fn of_tokens(tokens: Vec<Token>) -> Prompt {
        Prompt {
            tokens,
            ..Prompt::default()
        }
    }

    /// Number of tokens.
    pub fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// True when there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// A prompt that cannot be made into tokens; the caller's mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PromptError(String);

impl PromptError {
    /// The API error that names the field the prompt came from.
    pub fn of(self, param: &str) -> ApiError {
        let message = format!("{param} cannot be used: {}", self.0);
        ApiError::param(param, message)
    }
}

impl Engine {
    /// A text prompt as tokens; control tokens in it are read as such. Answers that were generated
    /// here, in the namespace of `salt`, come back as the very tokens they were generated as.
    ///
    /// # Errors
    /// When the text has no tokens or cannot be encoded.
    pub fn text_prompt(&self, text: &str, salt: Option<&str>) -> Result<Prompt, PromptError> {
        self.guarded_prompt(text, &[], salt)
    }

    /// As [`Engine::text_prompt`]; at the bytes of `literal` no control token is read.
    fn guarded_prompt(
        &self,
        text: &str,
        literal: &[usize],
        salt: Option<&str>,
    ) -> Result<Prompt, PromptError> {
        let encoded = self
            .history
            .encode_guarded(history_namespace(salt), &self.tokenizer, text, literal)
            .map_err(|error| PromptError(error.to_string()))?;
        if encoded.ids.is_empty() {
            return Err(PromptError(
                "it must have at least 1 token, found none".into(),
            ));
        }
        Ok(Prompt {
            tokens: encoded.ids,
            end: Some(encoded.end),
            ..Prompt::default()
        })
    }

    /// A conversation as tokens, with the head of the answer to come; else as
    /// [`Engine::text_prompt`]. Only the template's control tokens are read as such, never those
    /// that stand in messages or tools.
    ///
    /// # Errors
    /// When the model has no chat template, or it refuses the conversation.
    pub fn chat_prompt(
        &self,
        talk: &Conversation,
        salt: Option<&str>,
    ) -> Result<Prompt, PromptError> {
        let (prepared, mut rendered) = self.render(talk)?;
        if let Some(prefill) = &talk.prefill {
            // Text of the caller's: what looks like a control token in it is none.
            let start = rendered.text.len();
            rendered.text.push_str(prefill);
            rendered.literal.extend(start..rendered.text.len());
        }
        let prompt = self.guarded_prompt(&rendered.text, &rendered.literal, salt)?;
        let ends = token_ends(self, &prompt.tokens, rendered.text.len());
        let place = |mark: &crate::chat::conversation::Mark| {
            let byte = byte_of(mark.place, &prepared, &rendered);
            // Whole tokens before the place.
            let count = ends.partition_point(|end| *end <= byte);
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        Ok(Prompt {
            spans: token_spans(&ends, &rendered.spans),
            marks: talk.marks.iter().map(place).collect(),
            is_thinking: rendered.text.trim_end().ends_with("<think>"),
            ..prompt
        })
    }

    /// Renders as the template takes it: first as it is, then with neighbors joined.
    fn render(&self, talk: &Conversation) -> Result<(Prepared, Rendered), PromptError> {
        let template = self.template.as_ref().ok_or_else(|| {
            PromptError("this model has no chat template; use /v1/completions".into())
        })?;
        let mut first_error = None;
        for arrangement in [Arrangement::AsIs, Arrangement::Joined] {
            let prepared = prepare(&self.style, talk, arrangement);
            let messages = Value::Array(prepared.messages.clone());
            let mut extra = talk.template_args.clone();
            if let Some(thinking) = talk.thinking.filter(|_| self.style.thinks) {
                extra.entry("enable_thinking").or_insert(thinking.into());
            }
            let args = RenderArgs {
                messages: &messages,
                tools: prepared.tools.as_ref(),
                add_generation_prompt: true,
                extra: (!extra.is_empty()).then_some(&extra),
                unix_s: crate::clock::unix_seconds(),
            };
            match template.render(&args) {
                Ok(rendered) => return Ok((prepared, rendered)),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        let error = first_error.unwrap_or(TemplateError::Messages);
        Err(PromptError(error.to_string()))
    }
}

/// Tenants do not see each other's answers, not even how their text was cut into tokens.
fn history_namespace(salt: Option<&str>) -> u64 {
    salt.map_or(0, |salt| {
        let digest = Sha256::digest(salt.as_bytes());
        digest
            .iter()
            .take(8)
            .fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    })
}

/// The byte behind each token, counted in the rendered text, which has no BOS that was added.
fn token_ends(engine: &Engine, tokens: &[Token], text_bytes: usize) -> Vec<usize> {
    let mut at = 0;
    let end = |token: &Token| {
        at += engine.tokenizer.token_bytes(*token).len();
        at
    };
    let mut ends: Vec<usize> = tokens.iter().map(end).collect();
    let added = at.saturating_sub(text_bytes);
    ends.iter_mut()
        .for_each(|end| *end = end.saturating_sub(added));
    ends
}

/// Where a place of the conversation is in the rendered text.
fn byte_of(place: Place, prepared: &Prepared, rendered: &Rendered) -> usize {
    let all = rendered.text.len();
    match place {
        Place::End => all,
        Place::Tools => match prepared.tools_end {
            Some((message, bytes)) => in_message(message, bytes, prepared, rendered),
            None => {
                let tools = rendered.spans.iter().rfind(|span| span.part == Part::Tools);
                tools.map_or(0, |span| span.bytes.end)
            }
        },
        Place::Message { index, bytes } => match prepared.at.get(index) {
            Some((message, shift)) => in_message(*message, shift + bytes, prepared, rendered),
            None => all,
        },
    }
}

/// The byte behind so many bytes of a message's content; the end of the message's span when the
/// template changed the content, or when all of it is meant.
fn in_message(message: usize, bytes: usize, prepared: &Prepared, rendered: &Rendered) -> usize {
    let own = |span: &&Span| span.message == Some(message) && span.part != Part::Thinking;
    let mut spans = rendered.spans.iter().filter(own);
    let Some(first) = spans.next() else {
        return rendered.text.len();
    };
    let end = spans.next_back().unwrap_or(first).bytes.end;
    let content = prepared
        .messages
        .get(message)
        .and_then(|message| message["content"].as_str())
        .unwrap_or_default();
    if bytes >= content.len() {
        return end;
    }
    let text = rendered
        .text
        .get(first.bytes.start..end)
        .unwrap_or_default();
    text.find(content)
        .map_or(end, |at| first.bytes.start + at + bytes)
}

/// Which tokens came from what: the byte spans of a rendered conversation, each from the first
/// token that begins in it. Neighbors of one kind are one span.
fn token_spans(ends: &[usize], spans: &[Span]) -> Vec<(Range<u32>, ContextKind)> {
    let mut out: Vec<(Range<u32>, ContextKind)> = Vec::new();
    let mut spans = spans.iter().peekable();
    let mut at = 0;
    for (index, end) in (0_u32..).zip(ends) {
        while spans.peek().is_some_and(|span| span.bytes.end <= at) {
            spans.next();
        }
        let kind = spans
            .peek()
            .map_or(ContextKind::Unknown, |span| kind_of(span.part));
        match out.last_mut() {
            Some((range, last)) if *last == kind => range.end = index + 1,
            Some(_) | None => out.push((index..index + 1, kind)),
        }
        at = *end;
    }
    out.retain(|(_, kind)| *kind != ContextKind::Unknown);
    out
}

fn kind_of(part: Part) -> ContextKind {
    match part {
        Part::System => ContextKind::System,
        Part::Tools => ContextKind::Tools,
        Part::User | Part::Assistant => ContextKind::History,
        Part::Thinking => ContextKind::Thinking,
        Part::Tool => ContextKind::ToolOutput,
        Part::Generation => ContextKind::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_belongs_to_the_span_in_which_it_begins() {
        let span = |bytes, part| Span {
            bytes,
            part,
            message: None,
        };
        let spans = [
            span(0..5, Part::System),
            span(5..9, Part::User),
            span(9..12, Part::Assistant),
            span(12..14, Part::Generation),
        ];
        let found = token_spans(&[3, 6, 8, 12, 14], &spans);
        assert_eq!(
            found,
            [(0..2, ContextKind::System), (2..4, ContextKind::History)]
        );
    }
}
