//! From what a conversation asks of its answer to a grammar.

use rootstock_engine::constrained::{
    AnswerGrammar, CallGrammar, Grammar, GrammarError, GrammarMaker, Mark, Marks, Wanted,
};
use serde_json::json;

use crate::chat::conversation::{Conversation, Format, ToolChoice};
use crate::engine_port::Engine;
use crate::http::api_error::ApiError;
use crate::tools::style::{CallForm, MARKERS};

impl Engine {
    /// The grammar of the answer to a conversation; none when it may say anything.
    ///
    /// # Errors
    /// A schema or pattern that means nothing or cannot be had; names the field.
    pub fn grammar(
        &self,
        talk: &Conversation,
        is_thinking: bool,
    ) -> Result<Option<Grammar>, ApiError> {
        let Some((wanted, field)) = self.wanted(talk, is_thinking) else {
            return Ok(None);
        };
        let refuse = |error: &GrammarError| {
            ApiError::param(field, format!("{field} cannot be used: {error}"))
        };
        let maker = self.grammar_maker.get_or_init(|| {
            let vocab = self.service.model_info().vocab;
            GrammarMaker::new(&self.tokenizer, vocab)
        });
        let maker = maker.as_ref().map_err(refuse)?;
        maker
            .compile(&wanted)
            .map(Some)
            .map_err(|error| refuse(&error))
    }

    fn wanted(&self, talk: &Conversation, is_thinking: bool) -> Option<(Wanted, &'static str)> {
        let thoughts = match (self.style.thinks, is_thinking) {
            (false, _) => None,
            (true, false) => Some("<think>".to_owned()),
            (true, true) => Some(String::new()),
        };
        let forced = matches!(talk.choice, ToolChoice::Required | ToolChoice::Named(_));
        let calls = |field| {
            let calls = (!talk.callable().is_empty()).then(|| self.calls(talk));
            let json = match &talk.format {
                Format::Schema(schema) if !forced => Some(schema.clone()),
                Format::JsonObject if !forced => Some(json!({"type": "object"})),
                Format::Schema(_) | Format::JsonObject | Format::Text | Format::Regex(_) => None,
            };
            let answer = AnswerGrammar {
                thoughts: thoughts.clone(),
                calls,
                json,
            };
            Some((Wanted::Answer(answer), field))
        };
        match &talk.format {
            _ if forced => calls("tools"),
            Format::Text => None,
            Format::Schema(_) | Format::JsonObject => calls("response_format"),
            Format::Regex(pattern) => Some((Wanted::Regex(pattern.clone()), "response_format")),
        }
    }

    fn calls(&self, talk: &Conversation) -> CallGrammar {
        let named = match &talk.choice {
            ToolChoice::Named(name) => Some(name),
            ToolChoice::Auto | ToolChoice::None | ToolChoice::Required => None,
        };
        let (head, between, tail) = match self.style.form {
            CallForm::Tags => (
                "<tool_call>\n",
                "\n</tool_call>\n<tool_call>\n",
                "\n</tool_call>",
            ),
            CallForm::Mistral => ("[TOOL_CALLS][", ", ", "]"),
            CallForm::Llama => ("", "; ", ""),
        };
        let tools = talk.callable().iter();
        CallGrammar {
            tools: tools
                .filter(|tool| named.is_none_or(|name| tool.name == *name))
                .map(|tool| (tool.name.clone(), tool.parameters.clone()))
                .collect(),
            head: self.marks(head),
            between: self.marks(between),
            tail: self.marks(tail),
            arguments_key: match self.style.form {
                CallForm::Llama => "parameters",
                CallForm::Tags | CallForm::Mistral => "arguments",
            },
            single: talk.single_call || named.is_some() || self.style.form == CallForm::Llama,
        }
    }

    /// Cuts a text at what are control tokens in this vocabulary.
    fn marks(&self, text: &str) -> Marks {
        let mut marks = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let token = self.style.shown.iter().find_map(|token| {
                let bytes = self.tokenizer.token_bytes(*token);
                let found = str::from_utf8(bytes).ok()?;
                rest.starts_with(found).then_some((*token, found.len()))
            });
            if let Some((token, length)) = token {
                marks.push(Mark::Token(token));
                rest = rest.get(length..).unwrap_or_default();
                continue;
            }
            let starts = MARKERS
                .iter()
                .filter_map(|marker| rest.get(1..)?.find(marker));
            let end = starts.min().map_or(rest.len(), |at| at + 1);
            let (text, after) = rest.split_at(end);
            marks.push(Mark::Text(text.to_owned()));
            rest = after;
        }
        Marks(marks)
    }
}
