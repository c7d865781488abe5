//! Token-faithful history: what comes back as text has the ids it had, and always the same bytes.

#[path = "text_support/tiny.rs"]
mod tiny;

use proptest::prelude::*;
use rootstock_engine::history::{Encoded, History};
use rootstock_engine::tokenizer::{Specials, TokenKind, Tokenizer};
use tiny::{END, FIRST_MERGED, file, tokenizer};

const NAMESPACE: u64 = 1;

fn chatml() -> Tokenizer {
    tokenizer(&file("smollm"))
}

fn encode(history: &History, tokenizer: &Tokenizer, text: &str) -> Encoded {
    let encoded = history
        .encode(NAMESPACE, tokenizer, text)
        .expect("any text can be encoded");
    assert_eq!(
        tokenizer.decode_bytes(&encoded.ids),
        text.as_bytes(),
        "the bytes are the text"
    );
    encoded
}

/// The ids of a text, one a byte: never what the tokenizer would choose.
fn by_bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn shared_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn an_answer_that_comes_back_has_its_own_ids() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
    let first = encode(&history, &tokenizer, prompt);
    assert_eq!(
        first.ids,
        tokenizer.encode(prompt, Specials::Parse).unwrap()
    );
    let answer = [by_bytes("hello world"), vec![END]].concat();
    assert_ne!(
        tokenizer.encode("hello world", Specials::Parse).unwrap(),
        by_bytes("hello world")
    );
    history.record(first.end, &answer);

    let next = format!("{prompt}hello world<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n");
    let second = encode(&history, &tokenizer, &next);
    let expected = [first.ids.clone(), answer.clone()].concat();
    assert_eq!(second.ids[..expected.len()], expected);
    assert_eq!(second.spliced, vec![first.ids.len()..expected.len()]);
    assert_eq!(history.stats().spliced_tokens, answer.len() as u64);
}

#[test]
fn other_namespaces_and_other_prompts_do_not_see_the_answer() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let first = encode(&history, &tokenizer, "ask:");
    history.record(first.end, &by_bytes("hello"));
    assert_eq!(encode(&history, &tokenizer, "ask:hello").spliced.len(), 1);
    assert!(encode(&history, &tokenizer, "asK:hello").spliced.is_empty());
    assert!(
        history
            .encode(2, &tokenizer, "ask:hello")
            .unwrap()
            .spliced
            .is_empty()
    );
}

#[test]
fn a_trimmed_answer_keeps_the_ids_before_the_trim() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let first = encode(&history, &tokenizer, "ask:");
    history.record(
        first.end,
        &[by_bytes("hello world\n\n"), vec![END]].concat(),
    );
    let second = encode(&history, &tokenizer, "ask:hello world<|im_end|>\nmore");
    let kept = [first.ids, by_bytes("hello world"), vec![END]].concat();
    assert_eq!(second.ids[..kept.len()], kept);
}

#[test]
fn an_edited_answer_is_spliced_up_to_the_last_whole_word() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let first = encode(&history, &tokenizer, "ask:");
    history.record(first.end, &by_bytes("aba hello world"));
    let second = encode(&history, &tokenizer, "ask:aba helloworld");
    // "hello" and "world" are one word now: it is encoded anew, with the blank that belongs to it.
    assert_eq!(second.spliced, vec![first.ids.len()..first.ids.len() + 3]);
    let third = encode(&history, &tokenizer, "ask:none of it");
    assert!(third.spliced.is_empty());
}

#[test]
fn an_answer_that_ends_inside_a_character_is_spliced_before_it() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let first = encode(&history, &tokenizer, "ask:");
    history.record(first.end, &[by_bytes("hi-"), vec![0xe2, 0x82]].concat());
    // The client got U+FFFD for the unfinished character.
    let second = encode(&history, &tokenizer, "ask:hi-\u{fffd}<|im_end|>");
    assert_eq!(second.spliced, vec![first.ids.len()..first.ids.len() + 2]);
    // Here the text goes on with the same two bytes, but a splice must not cut the character.
    let third = encode(&history, &tokenizer, "ask:hi-\u{20ac}");
    assert_eq!(third.spliced, vec![first.ids.len()..first.ids.len() + 2]);
}

#[test]
fn of_several_answers_to_one_prompt_the_one_that_was_sent_back_is_spliced() {
    let (tokenizer, history) = (chatml(), History::new(1 << 20));
    let first = encode(&history, &tokenizer, "ask:");
    let merged_hello = FIRST_MERGED + 3;
    history.record(first.end, &by_bytes("hello"));
    history.record(first.end, &by_bytes("help"));
    history.record(first.end, &by_bytes("hello world"));
    let spliced = |text: &str| {
        let encoded = encode(&history, &tokenizer, text);
        encoded
            .spliced
            .first()
            .map(|range| encoded.ids[range.clone()].to_vec())
    };
    assert_eq!(spliced("ask:help<|im_end|>"), Some(by_bytes("help")));
    assert_eq!(spliced("ask:hello<|im_end|>"), Some(by_bytes("hello")));
    assert_eq!(
        spliced("ask:hello world<|im_end|>"),
        Some(by_bytes("hello world"))
    );
    // The same text again in other ids does not displace the ids that were spliced already.
    history.record(first.end, &[merged_hello]);
    assert_eq!(spliced("ask:hello<|im_end|>"), Some(by_bytes("hello")));
}

#[test]
fn memory_is_bounded_and_the_least_recently_used_answer_goes_first() {
    let tokenizer = chatml();
    let history = History::new(4 * (150 + 4 * 5));
    for turn in 0..100 {
        let end = encode(&history, &tokenizer, &format!("ask {turn}:")).end;
        history.record(end, &by_bytes("hello"));
        assert!(history.stats().bytes <= 4 * 170);
    }
    let stats = history.stats();
    assert_eq!(
        (stats.answers, stats.bytes, stats.dropped_answers),
        (4, 680, 96)
    );
    assert_eq!(
        encode(&history, &tokenizer, "ask 96:hello").spliced.len(),
        1
    );
    history.record(
        encode(&history, &tokenizer, "ask 100:").end,
        &by_bytes("hello"),
    );
    assert_eq!(
        encode(&history, &tokenizer, "ask 96:hello").spliced.len(),
        1,
        "it was used"
    );
    assert!(
        encode(&history, &tokenizer, "ask 97:hello")
            .spliced
            .is_empty()
    );
    // What can never fit is not kept, and nothing is dropped for it.
    history.record(
        encode(&history, &tokenizer, "long:").end,
        &by_bytes(&"a".repeat(1000)),
    );
    assert_eq!(history.stats().answers, 4);
    // Nor do the samples of one prompt crowd out everything else.
    let history = History::new(1 << 20);
    let end = encode(&history, &tokenizer, "ask:").end;
    for sample in 0..1000 {
        history.record(end, &by_bytes(&format!("answer {sample}")));
    }
    assert_eq!(history.stats().answers, 8);
}

#[test]
fn of_one_conversation_the_last_turn_is_dropped_first() {
    let (tokenizer, history) = (chatml(), History::new(3 * 170));
    let mut text = String::new();
    for turn in 0..3 {
        text.push_str(&format!("{turn}:"));
        history.record(encode(&history, &tokenizer, &text).end, &by_bytes("hello"));
        text.push_str("hello");
    }
    assert_eq!(encode(&history, &tokenizer, &text).spliced.len(), 3);
    history.record(
        encode(&history, &tokenizer, "other:").end,
        &by_bytes("hello"),
    );
    assert_eq!(
        encode(&history, &tokenizer, &text).spliced,
        vec![2..7, 9..14]
    );
}

/// Tokens as a model at temperature 1 might write them: any tokens whose text merges could join.
fn sampled(tokenizer: &Tokenizer, seed: &mut u64, length: usize) -> Vec<u32> {
    let joined = |id: u32| {
        tokenizer.kind(id) == TokenKind::Normal
            && tokenizer
                .token_bytes(id)
                .iter()
                .all(|byte| b"hello world\n".contains(byte))
    };
    let choices: Vec<u32> = (0..tokenizer.vocabulary_len())
        .filter(|&id| joined(id))
        .collect();
    let mut draw = || {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        choices[usize::try_from(*seed >> 33).expect("31 bits") % choices.len()]
    };
    (0..length).map(|_| draw()).collect()
}

/// A hundred conversations of six turns in random tokens: each turn finds all of the turns before
/// it, but for the last token of the answer, whose KV is never computed.
#[test]
fn a_hundred_drifting_conversations_reuse_all_of_their_history() {
    let (tokenizer, history) = (chatml(), History::new(64 << 20));
    let page = 16;
    let (mut seed, mut drifted) = (7, 0);
    for conversation in 0..100 {
        let mut text = format!("<|im_start|>system\nagent {conversation}<|im_end|>\n");
        let mut computed: Vec<u32> = Vec::new();
        for turn in 0..6 {
            text.push_str(&format!("<|im_start|>user\nhello {turn}<|im_end|>\n"));
            text.push_str("<|im_start|>assistant\n");
            let prompt = encode(&history, &tokenizer, &text);
            let reused = shared_prefix(&prompt.ids, &computed) / page * page;
            assert!(
                reused + page > computed.len(),
                "{reused} of {}",
                computed.len()
            );

            let mut answer = sampled(&tokenizer, &mut seed, 20 + turn);
            let shown = String::from_utf8(tokenizer.decode_bytes(&answer)).expect("ASCII");
            drifted += usize::from(tokenizer.encode(&shown, Specials::Plain).unwrap() != answer);
            answer.push(END);
            history.record(prompt.end, &answer);
            computed = [prompt.ids, answer].concat();
            computed.pop();
            text.push_str(&format!("{shown}<|im_end|>\n"));
        }
    }
    assert!(drifted > 500, "{drifted} of 600 answers drift");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever is kept and whatever is asked: the bytes are the text, and the same calls give the
    /// same ids.
    #[test]
    fn bytes_are_always_those_of_the_text(
        steps in prop::collection::vec(
            ("[a-c \\n\u{e9}]{0,6}", prop::collection::vec(0_u32..tiny::FIRST_MERGED + 14, 0..6)),
            1..8,
        ),
        bytes_max in prop::sample::select(vec![0, 400, 1 << 20]),
    ) {
        let tokenizer = chatml();
        let run = || -> Result<Vec<Vec<u32>>, TestCaseError> {
            let history = History::new(bytes_max);
            let mut text = String::new();
            let mut all = Vec::new();
            for (more, answer) in &steps {
                text.push_str(more);
                let encoded = history.encode(NAMESPACE, &tokenizer, &text).unwrap();
                prop_assert_eq!(tokenizer.decode_bytes(&encoded.ids), text.as_bytes());
                prop_assert!(encoded.spliced.iter().all(|range| range.end <= encoded.ids.len()));
                history.record(encoded.end, answer);
                prop_assert!(history.stats().bytes <= bytes_max);
                text.push_str(&tokenizer.decode(answer));
                all.push(encoded.ids);
            }
            Ok(all)
        };
        prop_assert_eq!(run()?, run()?);
    }
}
