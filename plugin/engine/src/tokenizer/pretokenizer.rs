//! The pre-tokenizers by name: how a text is cut before the merges run.
//!
//! Each is a list of patterns, applied one after the other to the pieces so far; what a pattern
//! matches becomes a piece, and so does what lies between. The patterns are data of the models
//! (their `tokenizer.json`), named by `tokenizer.ggml.pre` as llama.cpp's converter writes it.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use super::TokenizerError;

/// GPT-2's words, numbers, punctuation and white space.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// What a name stands for.
#[derive(Debug)]
pub(super) struct Rules {
    patterns: &'static [&'static str],
    /// A piece that is a token is taken whole, without looking at the merges.
    pub(super) ignore_merges: bool,
    /// Whether a BOS token is added when the file does not say.
    pub(super) add_bos: bool,
}

const fn rules_of(patterns: &'static [&'static str], whole_pieces_and_bos: bool) -> Rules {
    Rules {
        patterns,
        ignore_merges: whole_pieces_and_bos,
        add_bos: whole_pieces_and_bos,
    }
}

static KNOWN: [(&str, Rules); 7] = [
    (
        "default",
        rules_of(
            &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
            false,
        ),
    ),
    ("gpt-2", rules_of(&[GPT2], false)),
    ("gpt2", rules_of(&[GPT2], false)),
    ("llama-bpe", rules_of(&[LLAMA3], true)),
    ("qwen2", rules_of(&[QWEN2], false)),
    ("smollm", rules_of(&[r"\p{N}", GPT2], false)),
    ("tekken", rules_of(&[TEKKEN], true)),
];

/// The rules with this name.
pub(super) fn rules(name: &str) -> Result<&'static Rules, TokenizerError> {
    let found = KNOWN.iter().find(|(known, _)| *known == name);
    found
        .map(|(_, rules)| rules)
        .ok_or_else(|| TokenizerError::Pretokenizer {
            name: name.to_owned(),
            supported: KNOWN.each_ref().map(|(name, _)| *name).join(", "),
        })
}

impl Rules {
    /// The steps as the `tokenizers` crate runs them; the last writes bytes as characters.
    pub(super) fn steps(&self) -> Result<Vec<PreTokenizerWrapper>, TokenizerError> {
        let mut steps = Vec::new();
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(TokenizerError::Pattern)?;
            steps.push(PreTokenizerWrapper::Split(split));
        }
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(
            false, false, false,
        )));
        Ok(steps)
    }
}
