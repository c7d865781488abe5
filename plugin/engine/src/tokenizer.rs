//! The tokenizer of a model file: text to token ids, and token ids to the exact bytes they stand
//! for.
//!
//! Byte-level BPE (`tokenizer.ggml.model = "gpt2"`) with the merges of the `tokenizers` crate.
//! Text is cut in two passes: first the special tokens (control tokens only where the caller asks
//! for them, user-defined ones always; leftmost, then longest), then the pieces that the model's
//! pre-tokenizer names. A pre-tokenizer that is not known is refused by name: a silent fallback
//! gives other ids than the model was trained on, and only some texts show it.
//!
//! Invariant that the history and the streams rest on: the bytes of the ids of a text, joined, are
//! the text. The one exception are bytes for which a vocabulary has no token (some control
//! characters in SmolLM2's): they are dropped, as llama.cpp does, and [`Tokenizer::covers`] tells.
//!
//! Source: own; the pre-tokenizers' patterns are those of the models' own `tokenizer.json` files
//! and of llama.cpp.

mod byte_level;
mod error;
mod memo;
mod pretokenizer;
mod vocabulary;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use aho_corasick::{AhoCorasick, Input, Match, MatchKind};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    Model, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

pub use error::TokenizerError;
pub use vocabulary::{TokenKind, byte_alphabet};

use crate::gguf::Gguf;
use memo::Memo;
use vocabulary::Vocabulary;

/// What the text of a control token, such as `<|im_start|>`, means in a text to encode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// It is the token: for rendered chat templates and raw completions.
    Parse,
    /// It is plain text, and no control token can come out: for text that must not steer.
    Plain,
}

/// Bytes of remembered encodings.
const MEMO_BYTES_MAX: usize = 32 << 20;

/// A tokenizer. Shared by reference; the lock inside is held for look-ups only, never while text is
/// encoded.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    bpe: BPE,
    pre: Vec<PreTokenizerWrapper>,
    /// Finds control and user-defined tokens.
    all: Finder,
    /// Finds user-defined tokens only.
    plain: Finder,
    memo: Mutex<Memo>,
    add_bos: bool,
    name: String,
}

#[derive(Debug)]
struct Finder {
    search: AhoCorasick,
    ids: Vec<u32>,
}

impl Finder {
    fn new(vocabulary: &Vocabulary, wanted: &[TokenKind]) -> Result<Self, TokenizerError> {
        let ids: Vec<u32> = (0..vocabulary.len())
            .filter(|&id| wanted.contains(&vocabulary.kind(id)))
            .filter(|&id| !vocabulary.bytes(id).is_empty())
            .collect();
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(ids.iter().map(|&id| vocabulary.bytes(id)))
            .map_err(|source| TokenizerError::Specials {
                count: ids.len(),
                source,
            })?;
        Ok(Self { search, ids })
    }

    fn id(&self, found: Match) -> Option<u32> {
        self.ids.get(found.pattern().as_usize()).copied()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that a model file describes.
    ///
    /// # Errors
    /// The kind of tokenizer or its pre-tokenizer is not supported (named), or the vocabulary or
    /// the merges contradict themselves.
    ///
    /// # Cost
    /// Some 0.1 s for a vocabulary of 50,000; memory about 200 bytes an entry.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TokenizerError> {
        let model = file.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(TokenizerError::Model {
                name: model.to_owned(),
            });
        }
        let name = file.text_opt("tokenizer.ggml.pre")?.unwrap_or("default");
        let rules = pretokenizer::rules(name)?;
        let vocabulary = Vocabulary::from_gguf(file)?;
        let bpe = vocabulary.bpe(file, rules.ignore_merges)?;
        let add_bos = file
            .bool_opt("tokenizer.ggml.add_bos_token")?
            .unwrap_or(rules.add_bos);

        use TokenKind::{Control, Unknown, UserDefined};
        Ok(Self {
            all: Finder::new(&vocabulary, &[Control, Unknown, UserDefined])?,
            plain: Finder::new(&vocabulary, &[UserDefined])?,
            pre: rules.steps()?,
            memo: Mutex::new(Memo::new(MEMO_BYTES_MAX)),
            add_bos: add_bos && vocabulary.bos.is_some(),
            name: name.to_owned(),
            vocabulary,
            bpe,
        })
    }

    /// Encodes a text, without adding a BOS token (see [`Tokenizer::leading_bos`]).
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] should the pattern engine give up; the text is then not encoded
    /// at all rather than wrongly.
    ///
    /// # Cost
    /// Near linear in the text; a copy for stretches between special tokens that were encoded
    /// lately (up to 32 MiB of them are remembered).
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_into(text, specials, &mut ids)?;
        Ok(ids)
    }

    /// As [`Tokenizer::encode`], behind what `ids` already holds.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; `ids` may then have grown.
    pub fn encode_into(
        &self,
        text: &str,
        specials: Specials,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let finder = match specials {
            Specials::Parse => &self.all,
            Specials::Plain => &self.plain,
        };
        let mut at = 0;
        for found in finder.search.find_iter(text) {
            self.encode_plain(text.get(at..found.start()).unwrap_or_default(), ids)?;
            ids.extend(finder.ids.get(found.pattern().as_usize()));
            at = found.end();
        }
        self.encode_plain(text.get(at..).unwrap_or_default(), ids)
    }

    /// Encodes a part of a text as [`Specials::Parse`] does, except that no control token begins
    /// at the bytes of `literal` (ascending, counted in the whole text): what stands there is text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_into`].
    pub(crate) fn encode_guarded(
        &self,
        text: &str,
        part: Range<usize>,
        literal: &[usize],
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let text = text.get(..part.end).unwrap_or_default();
        let (mut at, mut from) = (part.start, part.start);
        while from <= text.len()
            && let Some(found) = self.all.search.find(Input::new(text).range(from..))
        {
            let Some((id, end)) = self.allowed(text, found, literal) else {
                from = found.start() + 1;
                continue;
            };
            self.encode_plain(text.get(at..found.start()).unwrap_or_default(), ids)?;
            ids.push(id);
            (at, from) = (end, end);
        }
        self.encode_plain(text.get(at..).unwrap_or_default(), ids)
    }

    /// The longest special token that may begin where this one was found, and where it ends.
    fn allowed(&self, text: &str, found: Match, literal: &[usize]) -> Option<(u32, usize)> {
        let start = found.start();
        if literal.binary_search(&start).is_err() {
            return Some((self.all.id(found)?, found.end()));
        }
        let plain = Input::new(text).range(start..found.end());
        let shorter = self.plain.search.find(plain)?;
        (shorter.start() == start).then_some((self.plain.id(shorter)?, shorter.end()))
    }

    /// Whether ids that spell the text from `at` on have a control token where text is meant.
    pub(crate) fn has_control_at(&self, ids: &[u32], mut at: usize, literal: &[usize]) -> bool {
        !literal.is_empty()
            && ids.iter().any(|&id| {
                let here = at;
                at += self.token_bytes(id).len();
                matches!(self.kind(id), TokenKind::Control | TokenKind::Unknown)
                    && literal.binary_search(&here).is_ok()
            })
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.len() < memo::TEXT_BYTES_MIN {
            return self.encode_anew(text, ids);
        }
        if let Some(known) = self.memo().find(text) {
            ids.extend_from_slice(&known);
            return Ok(());
        }
        let start = ids.len();
        self.encode_anew(text, ids)?;
        self.memo()
            .insert(text, ids.get(start..).unwrap_or_default());
        Ok(())
    }

    /// The memo is consistent after each of its calls, so a panic elsewhere does not spoil it.
    fn memo(&self) -> std::sync::MutexGuard<'_, Memo> {
        self.memo.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn encode_anew(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let mut pieces = PreTokenizedString::from(text);
        for step in &self.pre {
            step.pre_tokenize(&mut pieces)
                .map_err(TokenizerError::Encode)?;
        }
        for (piece, _, _) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            let tokens = self.bpe.tokenize(piece).map_err(TokenizerError::Encode)?;
            ids.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }

    /// The bytes that a token stands for; empty for an id outside the vocabulary. They need not be
    /// whole characters.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// What kind of token this is; [`TokenKind::Unused`] for an id outside the vocabulary.
    #[must_use]
    pub fn kind(&self, id: u32) -> TokenKind {
        self.vocabulary.kind(id)
    }

    /// The bytes of a token as an answer shows them: none for control tokens.
    #[must_use]
    pub fn visible_bytes(&self, id: u32) -> &[u8] {
        match self.kind(id) {
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => &[],
            TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte => self.token_bytes(id),
        }
    }

    /// The text of an answer: visible bytes, with U+FFFD for what is not UTF-8.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| self.visible_bytes(id))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of all tokens, control tokens included as their text.
    #[must_use]
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter()
            .flat_map(|&id| self.token_bytes(id))
            .copied()
            .collect()
    }

    /// Whether the vocabulary has a token for each byte of the text. Where it has not, the byte is
    /// missing from what [`Tokenizer::encode`] gives.
    #[must_use]
    pub fn covers(&self, text: &str) -> bool {
        text.bytes().all(|byte| self.vocabulary.has_byte(byte))
    }

    /// Whether a text begins with the text of a control or user-defined token.
    ///
    /// # Cost
    /// A comparison with each of them, some hundreds at most.
    #[must_use]
    pub fn begins_with_special(&self, text: &str) -> bool {
        self.all
            .ids
            .iter()
            .any(|&id| text.as_bytes().starts_with(self.token_bytes(id)))
    }

    /// Number of tokens in the vocabulary.
    #[must_use]
    pub fn vocabulary_len(&self) -> u32 {
        self.vocabulary.len()
    }

    /// The token to put before a text, if the model wants one and the text does not begin with it.
    #[must_use]
    pub fn leading_bos(&self, text: &str) -> Option<u32> {
        let bos = self.vocabulary.bos.filter(|_| self.add_bos)?;
        (!text.as_bytes().starts_with(self.token_bytes(bos))).then_some(bos)
    }

    /// The text of the BOS token, for chat templates.
    #[must_use]
    pub fn bos_text(&self) -> Option<&str> {
        self.vocabulary
            .bos
            .and_then(|id| str::from_utf8(self.token_bytes(id)).ok())
    }

    /// The text of the EOS token, for chat templates.
    #[must_use]
    pub fn eos_text(&self) -> Option<&str> {
        self.vocabulary
            .eos
            .and_then(|id| str::from_utf8(self.token_bytes(id)).ok())
    }

    /// The end-of-text token of the file.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.vocabulary.eos
    }

    /// All tokens that end an answer, in ascending order: end of text, of turn, of message.
    #[must_use]
    pub fn end_tokens(&self) -> &[u32] {
        &self.vocabulary.ends
    }

    /// Name of the pre-tokenizer, such as `smollm`.
    #[must_use]
    pub fn pretokenizer(&self) -> &str {
        &self.name
    }
}
