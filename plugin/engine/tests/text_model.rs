//! The text layer on the default model: ids, template and history against known answers.
//!
//! The model comes from the user's cache, or is downloaded once; without it each test prints
//! `skipped: no model`.

use rootstock_engine::gguf::Gguf;
use rootstock_engine::history::History;
use rootstock_engine::model_source::{ModelSpec, resolve};
use rootstock_engine::template::{ChatTemplate, RenderArgs};
use rootstock_engine::tokenizer::{Specials, TokenKind, Tokenizer};
use serde_json::{Value, json};

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn model() -> Option<Gguf> {
    match resolve(&ModelSpec::Auto, &mut |_| {}) {
        Ok(model) => Some(Gguf::open(&model.path).expect("the default model is a good file")),
        Err(error) => {
            println!("skipped: no model ({error})");
            None
        }
    }
}

fn tokenizer(file: &Gguf) -> Tokenizer {
    Tokenizer::from_gguf(file).expect("the default model's tokenizer is supported")
}

#[test]
fn ids_are_those_of_llama_cpp() {
    let Some(file) = model() else { return };
    let tokenizer = tokenizer(&file);
    let cases: Value = serde_json::from_str(include_str!("data/text_tokens.json")).unwrap();
    let cases = cases.as_array().unwrap();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let specials = if case["special"].as_bool().unwrap() {
            Specials::Parse
        } else {
            Specials::Plain
        };
        let ids = tokenizer.encode(text, specials).unwrap();
        assert_eq!(json!(ids), case["ids"], "{text:?} {specials:?}");
        assert_eq!(tokenizer.decode_bytes(&ids), text.as_bytes());
    }
    println!("{} texts identical", cases.len());
    assert!(cases.len() >= 60);
}

#[test]
fn the_file_is_what_the_design_says() {
    let Some(file) = model() else { return };
    assert_eq!(file.text("general.architecture").unwrap(), "llama");
    assert_eq!((file.tensors().len(), file.file_bytes()), (272, 98_362_432));
    let embedding = file.tensor("token_embd.weight").unwrap();
    assert_eq!(
        (embedding.info.ty().name(), embedding.info.shape()),
        ("Q8_0", [576, 49152].as_slice())
    );
    let tokenizer = tokenizer(&file);
    assert_eq!(
        (tokenizer.vocabulary_len(), tokenizer.eos()),
        (49152, Some(2))
    );
    assert_eq!(tokenizer.end_tokens(), [0, 2]);
    assert_eq!(tokenizer.leading_bos("Hi"), None);
    assert!(tokenizer.covers("plain text, \u{4f60}\u{597d}") && !tokenizer.covers("\u{4}"));
}

#[test]
fn the_template_renders_its_system_prompt() {
    let Some(file) = model() else { return };
    let template = ChatTemplate::from_gguf(&file, &tokenizer(&file)).unwrap();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let args = RenderArgs {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
        unix_s: 0,
    };
    let rendered = template.render(&args).unwrap();
    assert_eq!(
        rendered.text,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
         Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(rendered.spans.len(), 3, "{:?}", rendered.spans);
}

/// Draws ASCII tokens that stand for text: a worse case than a model, which drifts less.
fn sampled(tokenizer: &Tokenizer, seed: &mut u64, length: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    while ids.len() < length {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let id = u32::try_from(*seed >> 33).expect("31 bits") % tokenizer.vocabulary_len();
        if tokenizer.kind(id) == TokenKind::Normal && tokenizer.token_bytes(id).is_ascii() {
            ids.push(id);
        }
    }
    ids
}

/// A hundred conversations of four turns through the model's own template.
#[test]
fn drifting_conversations_reuse_their_history() {
    let Some(file) = model() else { return };
    let tokenizer = tokenizer(&file);
    let template = ChatTemplate::from_gguf(&file, &tokenizer).unwrap();
    let history = History::new(64 << 20);
    let (page, mut seed) = (16, 1);
    let (mut drifted, mut answers, mut lost, mut plain_lost) = (0, 0, 0, 0);
    for conversation in 0..100 {
        let mut messages = vec![];
        let mut computed: Vec<u32> = vec![];
        for turn in 0..4 {
            messages.push(json!({"role": "user", "content": format!("{conversation} {turn}?")}));
            let all = json!(messages);
            let args = RenderArgs {
                messages: &all,
                tools: None,
                add_generation_prompt: true,
                extra: None,
                unix_s: 0,
            };
            let text = template.render(&args).unwrap().text;
            let prompt = history.encode(0, &tokenizer, &text).unwrap();
            assert_eq!(tokenizer.decode_bytes(&prompt.ids), text.as_bytes());
            let same = |ids: &[u32]| {
                ids.iter()
                    .zip(&computed)
                    .take_while(|(a, b)| a == b)
                    .count()
            };
            let reused = same(&prompt.ids) / page * page;
            assert!(
                reused + page > computed.len(),
                "{reused} of {}",
                computed.len()
            );
            lost += computed.len() - reused;
            let plain = tokenizer.encode(&text, Specials::Parse).unwrap();
            plain_lost += computed.len() - same(&plain) / page * page;

            let mut answer = sampled(&tokenizer, &mut seed, 48);
            let shown = tokenizer.decode(&answer);
            drifted += usize::from(tokenizer.encode(&shown, Specials::Plain).unwrap() != answer);
            answers += 1;
            answer.push(tokenizer.eos().unwrap());
            history.record(prompt.end, &answer);
            messages.push(json!({"role": "assistant", "content": shown}));
            computed = [prompt.ids, answer].concat();
            computed.pop();
        }
    }
    println!(
        "{drifted} of {answers} answers drift; lost tokens per turn: {:.1} spliced, {:.1} plain",
        lost as f64 / 300.0,
        plain_lost as f64 / 300.0
    );
    assert!(drifted * 2 > answers && plain_lost > 4 * lost);
}

/// Not a test of speed: it prints what an encoding costs (`--nocapture`), and checks the ids.
#[test]
fn a_prompt_of_eight_thousand_tokens_is_encoded() {
    let Some(file) = model() else { return };
    let source = include_str!("../src/gguf/parse.rs");
    let text = source.repeat(3).chars().take(26_000).collect::<String>();
    let tokenizer = tokenizer(&file);
    let mut all = vec![];
    for run in ["first", "remembered", "changed"] {
        // A changed beginning makes the whole stretch a new one.
        let text = if run == "changed" {
            format!("x {text}")
        } else {
            text.clone()
        };
        #[expect(clippy::disallowed_methods, reason = "prints a time, asserts none")]
        let start = std::time::Instant::now();
        let ids = tokenizer.encode(&text, Specials::Parse).unwrap();
        println!(
            "{run}: {} tokens, {} bytes in {:?}",
            ids.len(),
            text.len(),
            start.elapsed()
        );
        assert_eq!(tokenizer.decode_bytes(&ids), text.as_bytes());
        all.push(ids);
    }
    assert_eq!(all[0], all[1]);
    assert_ne!(all[0], all[2]);
}
