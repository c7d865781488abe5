//! What can go wrong with a chat template.

use std::error::Error as _;

use super::functions::Raised;
use crate::gguf::GgufError;

/// Why a template was refused, or a conversation not rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named by the messages")]
pub enum TemplateError {
    /// The model file has no template.
    #[error("the model file has no chat template (tokenizer.chat_template); use raw completions")]
    Absent,
    /// The template is not a text.
    #[error("the chat template of the model file cannot be read")]
    File(#[from] GgufError),
    /// A template beyond the limit.
    #[error("the chat template has {bytes} bytes, the limit is {limit}")]
    SourceTooLong { bytes: usize, limit: usize },
    /// It does not compile.
    #[error("the chat template does not compile: {detail} (line {line})")]
    Syntax { line: usize, detail: String },
    /// The messages are not an array.
    #[error("messages must be an array")]
    Messages,
    /// The template refused the conversation by `raise_exception`.
    #[error("the chat template refuses the conversation: {message}")]
    Raised { message: String },
    /// An operation in the template failed.
    #[error("the chat template failed: {detail} (line {line})")]
    Render { line: usize, detail: String },
    /// The budget of one render is spent.
    #[error("the chat template took more than its budget; shorten the conversation")]
    OutOfFuel,
    /// A text beyond the limit.
    #[error("the rendered conversation has {bytes} bytes, the limit is {limit}")]
    TextTooLong { bytes: usize, limit: usize },
    /// Text of a control token in a message that the template looks at.
    #[error(
        "the conversation holds the text of a control token (such as <|im_end|>) where the chat \
         template of this model reads it, so it cannot be kept apart; remove it"
    )]
    ControlTokens,
}

impl TemplateError {
    pub(super) fn syntax(error: &minijinja::Error) -> Self {
        Self::Syntax {
            line: error.line().unwrap_or(0),
            detail: detail(error),
        }
    }

    pub(super) fn render(error: &minijinja::Error) -> Self {
        if let Some(Raised(message)) = raised(error) {
            return Self::Raised {
                message: message.clone(),
            };
        }
        if error.kind() == minijinja::ErrorKind::OutOfFuel {
            return Self::OutOfFuel;
        }
        Self::Render {
            line: error.line().unwrap_or(0),
            detail: detail(error),
        }
    }

    /// Whether the conversation is at fault, and not the model file.
    #[must_use]
    pub fn is_callers(&self) -> bool {
        match self {
            Self::Messages
            | Self::Raised { .. }
            | Self::OutOfFuel
            | Self::TextTooLong { .. }
            | Self::ControlTokens => true,
            Self::Absent
            | Self::File(_)
            | Self::SourceTooLong { .. }
            | Self::Syntax { .. }
            | Self::Render { .. } => false,
        }
    }
}

fn detail(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

fn raised(error: &minijinja::Error) -> Option<&Raised> {
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(raised) = inner.downcast_ref() {
            return Some(raised);
        }
        source = inner.source();
    }
    None
}
