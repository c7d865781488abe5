//! The tokenizer on a tiny vocabulary: round trips, special tokens, refusals by name.

#[path = "text_support/tiny.rs"]
mod tiny;

use proptest::prelude::*;
use rootstock_engine::gguf::{Gguf, GgufWriter, Value};
use rootstock_engine::tokenizer::{Specials, TokenKind, Tokenizer};
use tiny::{END, FIRST_MERGED, START, THINK, file, tokenizer};

fn refused(writer: &GgufWriter) -> String {
    let file = Gguf::from_bytes(writer.to_bytes()).expect("the file itself is good");
    Tokenizer::from_gguf(&file)
        .expect_err("the vocabulary must be refused")
        .to_string()
}

/// The id of the token that a merge makes.
fn merged(rank: u32) -> u32 {
    FIRST_MERGED + rank
}

#[test]
fn merges_apply_in_order_of_rank() {
    let tokenizer = tokenizer(&file("smollm"));
    let encode = |text| tokenizer.encode(text, Specials::Parse).unwrap();
    assert_eq!(encode("hello world"), [merged(3), merged(8)]);
    assert_eq!(encode("hell"), [merged(2)]);
    assert_eq!(encode("abab"), [merged(9), merged(9)]);
    assert_eq!(encode("aba"), [merged(10)]);
    assert_eq!(encode(""), [0; 0]);
}

#[test]
fn smollm_parts_digits_where_gpt2_does_not() {
    let encode = |pre: &str| tokenizer(&file(pre)).encode("12", Specials::Parse).unwrap();
    assert_eq!(encode("smollm"), [u32::from(b'1'), u32::from(b'2')]);
    assert_eq!(encode("gpt-2"), [merged(11)]);
    assert_eq!(encode("qwen2"), [u32::from(b'1'), u32::from(b'2')]);
    assert_eq!(encode("llama-bpe"), [merged(11)]);
}

#[test]
fn control_tokens_are_parsed_only_on_request_and_user_defined_ones_always() {
    let tokenizer = tokenizer(&file("smollm"));
    let text = "a<|im_start|><think><|im_end|>b";
    let parsed = tokenizer.encode(text, Specials::Parse).unwrap();
    assert_eq!(
        parsed,
        [u32::from(b'a'), START, THINK, END, u32::from(b'b')]
    );
    let plain = tokenizer.encode(text, Specials::Plain).unwrap();
    assert!(plain.contains(&THINK));
    assert!(
        !plain
            .iter()
            .any(|&id| tokenizer.kind(id) == TokenKind::Control),
        "{plain:?}"
    );
    assert_eq!(tokenizer.decode_bytes(&plain), text.as_bytes());
}

#[test]
fn answers_show_user_defined_tokens_and_hide_control_tokens() {
    let tokenizer = tokenizer(&file("smollm"));
    assert_eq!(tokenizer.decode(&[THINK, u32::from(b'x'), END]), "<think>x");
    assert_eq!(tokenizer.decode_bytes(&[END]), b"<|im_end|>");
    assert_eq!(tokenizer.decode(&[0xe2, 0x82]), "\u{fffd}");
    assert_eq!(
        tokenizer.decode(&[u32::MAX, 9999]),
        "",
        "ids outside the vocabulary"
    );
}

#[test]
fn special_ids_and_texts_are_those_of_the_file() {
    let plain = tokenizer(&file("smollm"));
    assert_eq!(
        (plain.eos(), plain.end_tokens()),
        (Some(END), [END].as_slice())
    );
    assert_eq!(
        (plain.bos_text(), plain.eos_text()),
        (Some("<|im_start|>"), Some("<|im_end|>"))
    );
    assert_eq!(plain.leading_bos("text"), None, "smollm adds none");
    assert_eq!(plain.pretokenizer(), "smollm");

    let with_bos = file("smollm").value("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let with_bos = tokenizer(&with_bos.int("tokenizer.ggml.eot_token_id", THINK));
    assert_eq!(with_bos.leading_bos("text"), Some(START));
    assert_eq!(
        with_bos.leading_bos("<|im_start|>text"),
        None,
        "it is there already"
    );
    assert_eq!(with_bos.end_tokens(), [END, THINK]);
    assert_eq!(
        tokenizer(&file("llama-bpe")).leading_bos("text"),
        Some(START)
    );
}

#[test]
fn unknown_tokenizers_are_refused_by_name() {
    let message = refused(&file("deepseek-llm"));
    assert!(
        message.contains("`deepseek-llm`") && message.contains("smollm"),
        "{message}"
    );
    let spm = GgufWriter::new().text("tokenizer.ggml.model", "llama");
    assert!(refused(&spm).contains("tokenizer.ggml.model `llama`"));
    assert!(refused(&GgufWriter::new()).contains("incomplete"));
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused() {
    let base = |tokens: &[&str], merges: &[&str]| {
        GgufWriter::new()
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .texts("tokenizer.ggml.tokens", tokens)
            .texts("tokenizer.ggml.merges", merges)
    };
    assert!(refused(&base(&[], &[])).contains("has 0 tokens"));
    assert!(refused(&base(&["a", "b"], &["a b"])).contains("merge 0 `a b` needs the token `ab`"));
    assert!(refused(&base(&["a", "ac"], &["a c"])).contains("needs the token `c`"));
    assert!(refused(&base(&["a"], &["aa"])).contains("merge 0 `aa`"));
    assert!(refused(&base(&["a"], &[""])).contains("merge 0 ``"));
    let kinds = base(&["a", "b"], &[]).value("tokenizer.ggml.token_type", Value::Ints(vec![1]));
    assert!(refused(&kinds).contains("has 1 entries for 2 tokens"));
    let kinds = base(&["a"], &[]).value("tokenizer.ggml.token_type", Value::Ints(vec![7]));
    assert!(refused(&kinds).contains("token 0 has the unknown type 7"));
    let eos = base(&["a"], &[]).int("tokenizer.ggml.eos_token_id", 1);
    assert!(refused(&eos).contains("`tokenizer.ggml.eos_token_id` is 1"));
}

#[test]
fn bytes_without_a_token_are_dropped_and_told() {
    let writer = GgufWriter::new()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .texts("tokenizer.ggml.tokens", ["a", "b"]);
    let tokenizer = tokenizer(&writer);
    assert_eq!(tokenizer.encode("axb", Specials::Parse).unwrap(), [0, 1]);
    assert!(tokenizer.covers("ab") && !tokenizer.covers("axb"));
}

proptest! {
    /// For each pre-tokenizer: the bytes of the ids are the text, with or without specials.
    #[test]
    fn ids_spell_the_text(
        pre in prop::sample::select(
            vec!["default", "gpt-2", "llama-bpe", "qwen2", "smollm", "tekken"]
        ),
        text in prop_oneof![
            ".{0,40}",
            "(hello| world|[ \\n\\t]{1,4}|12|\u{e9}|\u{4f60}|'s|'LL|<\\|im_end\\|>|[A-Z]+){0,12}",
        ],
    ) {
        let tokenizer = tokenizer(&file(pre));
        for specials in [Specials::Parse, Specials::Plain] {
            let ids = tokenizer.encode(&text, specials).unwrap();
            prop_assert_eq!(tokenizer.decode_bytes(&ids), text.as_bytes());
        }
        prop_assert!(tokenizer.covers(&text));
    }
}
