//! Constrained decoding: answers that must be JSON of a schema, match a pattern, or be tool calls.
//!
//! A [`GrammarMaker`] knows the bytes of all tokens as a trie and compiles what a request wants
//! into a [`Grammar`]. While the request runs, a [`Masks`](rootstock::Masks) keeps its state: as
//! soon as a token is drawn, a thread beside the engine takes it in and works out which tokens may
//! follow, so that the mask is there when the next step draws.
//!
//! JSON has one spacing, `", "` and `": "`, the one in which chat templates print earlier calls:
//! so a call that comes back in a conversation has the bytes that were generated, and its KV.
//!
//! Source: the grammars are llguidance's; the trie is built from the model file's own bytes.

mod calls;
mod formats;
mod masks;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};

pub use calls::{AnswerGrammar, CALLS_MAX, CallGrammar, Mark, Marks};
pub use masks::GrammarMasks;

use crate::tokenizer::{TokenKind, Tokenizer};

/// Bytes of one schema or pattern.
const SOURCE_BYTES_MAX: usize = 1 << 20;
const MESSAGE_CHARS_MAX: usize = 300;

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// A text that this pattern matches as a whole.
    Regex(String),
    /// JSON or tool calls.
    Answer(AnswerGrammar),
}

/// A grammar that cannot be had; the caller's mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The schema or pattern is too long.
    #[error("it has {bytes} bytes, at most {limit} are read")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// It means nothing, or asks for what is not supported.
    #[error("{0}")]
    Refused(String),
    /// The vocabulary cannot be made into a trie.
    #[error("this model's vocabulary cannot be constrained: {0}")]
    Vocabulary(String),
}

/// A compiled grammar at its beginning. Cheap to clone.
#[derive(Clone)]
pub struct Grammar {
    matcher: Arc<Mutex<Matcher>>,
    /// The mask of the end token alone.
    end: Arc<[u32]>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

impl Grammar {
    /// A state of its own, at the beginning.
    fn begin(&self) -> Matcher {
        self.matcher
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .deep_clone()
    }
}

/// Compiles grammars for one vocabulary.
pub struct GrammarMaker {
    factory: ParserFactory,
    end: Arc<[u32]>,
}

impl fmt::Debug for GrammarMaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrammarMaker")
    }
}

impl GrammarMaker {
    /// A maker for a model with `vocab` logits.
    ///
    /// # Errors
    /// When the vocabulary has no end token, or is not one.
    ///
    /// # Cost
    /// Some 50 ms for a vocabulary of 50,000.
    pub fn new(tokenizer: &Tokenizer, vocab: u32) -> Result<GrammarMaker, GrammarError> {
        let end = tokenizer
            .eos()
            .filter(|eos| tokenizer.end_tokens().contains(eos))
            .or_else(|| tokenizer.end_tokens().first().copied())
            .filter(|end| *end < vocab)
            .ok_or_else(|| GrammarError::Vocabulary("it has no end token".into()))?;
        let words: Vec<Vec<u8>> = (0..vocab).map(|id| word(tokenizer, id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab, end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let caps = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&env, caps, &slices)
            .map_err(|error| GrammarError::Vocabulary(message(&error.to_string())))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let mut only = vec![0_u32; vocab.div_ceil(32) as usize];
        if let Some(word) = only.get_mut(end as usize / 32) {
            *word = 1 << (end % 32);
        }
        let end = only.into();
        Ok(GrammarMaker { factory, end })
    }

    /// Compiles what a request wants.
    ///
    /// # Errors
    /// What is wrong with it.
    ///
    /// # Cost
    /// Milliseconds for a schema of some kilobytes; bounded by the limits of the parser.
    pub fn compile(&self, wanted: &Wanted) -> Result<Grammar, GrammarError> {
        let grammar = match wanted {
            Wanted::Regex(pattern) => {
                check_length(pattern.len())?;
                TopLevelGrammar::from_regex(pattern)
            }
            Wanted::Answer(answer) => {
                let source = answer.lark();
                check_length(source.len())?;
                TopLevelGrammar::from_lark(source)
            }
        };
        let mut matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(error) = matcher.get_error() {
            return Err(GrammarError::Refused(message(&error)));
        }
        // What can be said at all shows with the first mask.
        matcher
            .compute_mask_or_eos()
            .map_err(|error| GrammarError::Refused(message(&error.to_string())))?;
        Ok(Grammar {
            matcher: Arc::new(Mutex::new(matcher)),
            end: Arc::clone(&self.end),
        })
    }
}

/// The bytes by which the trie knows a token. Control tokens carry a mark, so that no text is
/// taken for them.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    match tokenizer.kind(id) {
        TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte => bytes.to_vec(),
        TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        TokenKind::Unknown | TokenKind::Unused => Vec::new(),
    }
}

/// A schema with our spacing. `lenient` leaves out what is not supported instead of refusing it.
fn spaced(schema: &Value, lenient: bool) -> Value {
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(false) => Map::from_iter([("not".to_owned(), json!({}))]),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Map::new()
        }
    };
    let options = json!({
        "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false,
        "lenient": lenient,
    });
    schema.insert("x-guidance".into(), options);
    let mut schema = Value::Object(schema);
    formats::settle(&mut schema);
    schema
}

fn check_length(bytes: usize) -> Result<(), GrammarError> {
    if bytes > SOURCE_BYTES_MAX {
        let limit = SOURCE_BYTES_MAX;
        return Err(GrammarError::TooLong { bytes, limit });
    }
    Ok(())
}

/// The first line of a message, and the one that names the cause, within bounds.
fn message(text: &str) -> String {
    if text.contains("NoExtensionBias") {
        let cause =
            "no text can satisfy it: it refers to itself without an end, or contradicts itself";
        return cause.to_owned();
    }
    let bounded = |line: &str| line.chars().take(MESSAGE_CHARS_MAX).collect::<String>();
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let mut told = bounded(lines.next().unwrap_or("it is not a grammar"));
    // A parser of patterns shows the place first and says last what is wrong there.
    if let Some(cause) = lines.find_map(|line| line.trim().strip_prefix("error: ")) {
        told.push(' ');
        told.push_str(&bounded(cause));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_its_cause_in_few_words() {
        let place = "at 1(8): invalid regex \"(a)\\\\1\" (in regex): regex parse error:";
        let regex =
            format!("{place}\n    (a)\\1\n       ^^\nerror: backreferences are not supported");
        let told = message(&regex);
        assert!(told.starts_with("at 1(8): invalid regex"), "{told}");
        assert!(told.ends_with("backreferences are not supported"), "{told}");
        assert!(!message("NoExtensionBias").contains("Bias"));
        assert_eq!(message(" \n"), "it is not a grammar");
        let long = format!("{}\nerror: {}", "(".repeat(40_000), "x".repeat(40_000));
        assert!(message(&long).len() <= 2 * MESSAGE_CHARS_MAX + 1);
    }
}
