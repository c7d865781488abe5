//! Why a model's tokenizer was refused.

use crate::gguf::GgufError;

/// Why a tokenizer could not be built, or a text not encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named by the messages")]
pub enum TokenizerError {
    /// A key is missing or of the wrong kind.
    #[error("the tokenizer of the model file is incomplete")]
    File(#[from] GgufError),
    /// Not a byte-level BPE tokenizer.
    #[error("tokenizer.ggml.model `{name}` is not supported; supported is `gpt2` (byte-level BPE)")]
    Model { name: String },
    /// An unknown pre-tokenizer.
    #[error(
        "tokenizer.ggml.pre `{name}` is not supported; supported are {supported}. Another one \
         would give other token ids than the model was trained on"
    )]
    Pretokenizer { name: String, supported: String },
    /// A pattern of ours that does not compile.
    #[error("the pattern of the pre-tokenizer does not compile")]
    Pattern(#[source] tokenizers::Error),
    /// More tokens than the limit, or none.
    #[error("the vocabulary has {found} tokens; allowed are 1 to {limit}")]
    Size { found: usize, limit: usize },
    /// An array that should have one entry a token.
    #[error("metadata `{key}` has {found} entries for {tokens} tokens")]
    Length {
        key: &'static str,
        found: usize,
        tokens: usize,
    },
    /// A token type that the format does not have.
    #[error("token {id} has the unknown type {found}; known are 1 to 6")]
    Kind { id: usize, found: i64 },
    /// A special id beyond the vocabulary.
    #[error("metadata `{key}` is {id}, but the vocabulary has {tokens} tokens")]
    OutOfVocabulary {
        key: &'static str,
        id: u32,
        tokens: u32,
    },
    /// A merge that is not two tokens, or whose tokens or result do not exist.
    #[error("merge {index} `{merge}` needs the token `{needed}`, which the vocabulary has not")]
    Merge {
        index: usize,
        merge: String,
        needed: String,
    },
    /// The merges do not make a BPE model.
    #[error("the merges do not make a BPE model")]
    Bpe(#[source] tokenizers::Error),
    /// The special tokens do not fit one automaton.
    #[error("the {count} special tokens do not fit one automaton")]
    Specials {
        count: usize,
        source: aho_corasick::BuildError,
    },
    /// A text that could not be cut into pieces.
    #[error("the text cannot be cut into pieces")]
    Encode(#[source] tokenizers::Error),
}
