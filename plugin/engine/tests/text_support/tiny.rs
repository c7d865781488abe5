//! A tiny byte-level vocabulary: the 256 bytes, a few merges, a few special tokens.
#![allow(dead_code, reason = "each test binary uses its own part")]

use rootstock_engine::gguf::{Gguf, GgufWriter, Value};
use rootstock_engine::tokenizer::{Tokenizer, byte_alphabet};

/// `<|im_start|>`, control.
pub(crate) const START: u32 = 256;
/// `<|im_end|>`, control, end of text.
pub(crate) const END: u32 = 257;
/// `<think>`, user-defined.
pub(crate) const THINK: u32 = 258;
/// The first token that a merge makes.
pub(crate) const FIRST_MERGED: u32 = 259;

/// Merges in order of rank; `\u{120}` is a space.
pub(crate) const MERGES: [&str; 14] = [
    "l l",
    "h e",
    "he ll",
    "hell o",
    "\u{120} w",
    "o r",
    "\u{120}w or",
    "l d",
    "\u{120}wor ld",
    "a b",
    "ab a",
    "1 2",
    "\u{10a} \u{10a}",
    "\u{120} \u{120}",
];

/// A file with this vocabulary; the caller adds what else it needs.
pub(crate) fn file(pre: &str) -> GgufWriter {
    let mut tokens = byte_alphabet();
    tokens.extend(["<|im_start|>", "<|im_end|>", "<think>"].map(str::to_owned));
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    let mut kinds = vec![1; tokens.len()];
    kinds[START as usize] = 3;
    kinds[END as usize] = 3;
    kinds[THINK as usize] = 4;
    GgufWriter::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", tokens)
        .value("tokenizer.ggml.token_type", Value::Ints(kinds))
        .texts("tokenizer.ggml.merges", MERGES)
        .int("tokenizer.ggml.bos_token_id", START)
        .int("tokenizer.ggml.eos_token_id", END)
}

pub(crate) fn tokenizer(writer: &GgufWriter) -> Tokenizer {
    let file = Gguf::from_bytes(writer.to_bytes()).expect("the writer writes good files");
    Tokenizer::from_gguf(&file).expect("the tiny vocabulary is complete")
}
