//! The vocabulary: the bytes and the kind of each token, and which tokens are special.

use std::collections::BTreeSet;

use tokenizers::models::bpe::{BPE, Vocab};

use super::TokenizerError;
use super::byte_level::{Alphabet, char_of, decode};
use crate::gguf::{Gguf, TextList};

const TOKENS_MAX: usize = 1 << 22;

/// Texts of control tokens that end an answer, whatever the file's own keys say: chat templates
/// close a turn with them.
const END_TEXTS: [&str; 9] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "</s>",
];

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// Stands for what has no token.
    Unknown,
    /// Structure, such as the end of a turn: never part of an answer's text.
    Control,
    /// Added text that is never cut, such as `<think>`: part of an answer's text.
    UserDefined,
    /// A gap in the vocabulary.
    Unused,
    /// One raw byte.
    Byte,
}

/// Bytes, kinds and special ids.
#[derive(Debug)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    ends_at: Vec<usize>,
    kinds: Vec<TokenKind>,
    byte_known: [bool; 256],
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    /// Tokens that end an answer, ascending.
    pub(super) ends: Vec<u32>,
}

impl Vocabulary {
    /// Reads and checks the vocabulary of a file.
    pub(super) fn from_gguf(file: &Gguf) -> Result<Self, TokenizerError> {
        let texts = token_texts(file)?;
        let kinds = token_kinds(file, texts.len())?;
        let alphabet = Alphabet::new();
        let mut bytes = Vec::new();
        let mut ends_at = Vec::with_capacity(texts.len());
        for (text, kind) in texts.iter().zip(&kinds) {
            match kind {
                TokenKind::Normal | TokenKind::Byte => decode(text, &alphabet, &mut bytes),
                TokenKind::Control
                | TokenKind::Unknown
                | TokenKind::UserDefined
                | TokenKind::Unused => bytes.extend_from_slice(text.as_bytes()),
            }
            ends_at.push(bytes.len());
        }
        let mut vocabulary = Self {
            bytes,
            ends_at,
            kinds,
            byte_known: [false; 256],
            bos: None,
            eos: None,
            ends: Vec::new(),
        };
        vocabulary.note_single_bytes();
        vocabulary.bos = vocabulary.special(file, "tokenizer.ggml.bos_token_id")?;
        vocabulary.eos = vocabulary.special(file, "tokenizer.ggml.eos_token_id")?;
        vocabulary.ends = vocabulary.end_tokens(file)?;
        Ok(vocabulary)
    }

    fn note_single_bytes(&mut self) {
        for id in 0..self.len() {
            if let ([byte], TokenKind::Normal) = (self.bytes(id), self.kind(id)) {
                let byte = usize::from(*byte);
                if let Some(known) = self.byte_known.get_mut(byte) {
                    *known = true;
                }
            }
        }
    }

    fn special(&self, file: &Gguf, key: &'static str) -> Result<Option<u32>, TokenizerError> {
        match file.u32_opt(key)? {
            Some(id) if id >= self.len() => Err(TokenizerError::OutOfVocabulary {
                key,
                id,
                tokens: self.len(),
            }),
            id => Ok(id),
        }
    }

    fn end_tokens(&self, file: &Gguf) -> Result<Vec<u32>, TokenizerError> {
        let mut ends: BTreeSet<u32> = self.eos.into_iter().collect();
        ends.extend(self.special(file, "tokenizer.ggml.eot_token_id")?);
        ends.extend(self.special(file, "tokenizer.ggml.eom_token_id")?);
        ends.extend((0..self.len()).filter(|&id| {
            self.kind(id) == TokenKind::Control
                && END_TEXTS
                    .iter()
                    .any(|text| text.as_bytes() == self.bytes(id))
        }));
        Ok(ends.into_iter().collect())
    }

    /// The merges as a BPE model over the tokens that text may become.
    ///
    /// All that the `tokenizers` crate would panic on is checked here: it copies a merge's halves
    /// into a buffer of the longest token without looking.
    pub(super) fn bpe(&self, file: &Gguf, ignore_merges: bool) -> Result<BPE, TokenizerError> {
        let texts = token_texts(file)?;
        let mut vocab = Vocab::default();
        for (id, text) in (0..self.len()).zip(texts.iter()) {
            if matches!(self.kind(id), TokenKind::Normal | TokenKind::UserDefined) {
                // A text that occurs twice keeps its first id.
                vocab.entry(text.to_owned()).or_insert(id);
            }
        }
        let listed = file.texts_opt("tokenizer.ggml.merges")?;
        let mut merges = Vec::with_capacity(listed.map_or(0, TextList::len));
        for (index, merge) in listed.into_iter().flat_map(TextList::iter).enumerate() {
            let lacks = |needed: &str| TokenizerError::Merge {
                index,
                merge: merge.to_owned(),
                needed: needed.to_owned(),
            };
            let (left, right) = split_merge(merge).ok_or_else(|| lacks("A B"))?;
            for needed in [left, right, &format!("{left}{right}")] {
                if !vocab.contains_key(needed) {
                    return Err(lacks(needed));
                }
            }
            merges.push((left.to_owned(), right.to_owned()));
        }
        BPE::builder()
            .vocab_and_merges(vocab, merges)
            .ignore_merges(ignore_merges)
            .build()
            .map_err(TokenizerError::Bpe)
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.kinds.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = match id.checked_sub(1) {
            None => 0,
            Some(before) => self.ends_at.get(before).copied().unwrap_or(usize::MAX),
        };
        let end = self.ends_at.get(id).copied().unwrap_or(0);
        self.bytes.get(start..end).unwrap_or_default()
    }

    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds
            .get(id as usize)
            .copied()
            .unwrap_or(TokenKind::Unused)
    }

    pub(super) fn has_byte(&self, byte: u8) -> bool {
        self.byte_known
            .get(usize::from(byte))
            .copied()
            .unwrap_or(false)
    }
}

/// The two halves of a merge: they are parted by the first space that is not the first character.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let at = first + merge.get(first..)?.find(' ')?;
    Some((merge.get(..at)?, merge.get(at + 1..)?))
}

fn token_texts(file: &Gguf) -> Result<&TextList, TokenizerError> {
    let key = "tokenizer.ggml.tokens";
    let missing = || crate::gguf::GgufError::Missing {
        key: key.to_owned(),
    };
    let texts = file.texts_opt(key)?.ok_or_else(missing)?;
    if texts.is_empty() || texts.len() > TOKENS_MAX {
        return Err(TokenizerError::Size {
            found: texts.len(),
            limit: TOKENS_MAX,
        });
    }
    Ok(texts)
}

fn token_kinds(file: &Gguf, tokens: usize) -> Result<Vec<TokenKind>, TokenizerError> {
    let key = "tokenizer.ggml.token_type";
    let Some(listed) = file.ints_opt(key)? else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    if listed.len() != tokens {
        return Err(TokenizerError::Length {
            key,
            found: listed.len(),
            tokens,
        });
    }
    let kind = |(id, &found): (usize, &i64)| match found {
        1 => Ok(TokenKind::Normal),
        2 => Ok(TokenKind::Unknown),
        3 => Ok(TokenKind::Control),
        4 => Ok(TokenKind::UserDefined),
        5 => Ok(TokenKind::Unused),
        6 => Ok(TokenKind::Byte),
        found => Err(TokenizerError::Kind { id, found }),
    };
    listed.iter().enumerate().map(kind).collect()
}

/// The 256 characters of the byte-level alphabet in order of the bytes: the first tokens of a tiny
/// vocabulary for tests.
#[must_use]
pub fn byte_alphabet() -> Vec<String> {
    (0..=u8::MAX)
        .map(|byte| char_of(byte).to_string())
        .collect()
}
