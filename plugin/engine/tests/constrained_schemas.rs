//! Answers of 200 varied JSON schemas, over the default model's vocabulary: whoever chooses among
//! the allowed tokens, with whatever intent, what has ended is valid, and what is bounded ends.
//!
//! The validator is another implementation (the `jsonschema` crate), formats included.

#[path = "support/schemas.rs"]
mod schemas;

use jsonschema::Validator;
use rootstock::Masks as _;
use rootstock::scheduler::RequestId;
use rootstock_engine::constrained::{AnswerGrammar, GrammarMaker, GrammarMasks, Wanted};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::model_source::{ModelSpec, resolve};
use rootstock_engine::tokenizer::Tokenizer;
use schemas::{Dice, Made, schema};
use serde_json::{Value, json};

const SCHEMAS: u64 = 200;
/// An answer that is longer ends for its length.
const TOKENS_MAX: u32 = 400;

#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn tokenizer() -> Option<Tokenizer> {
    match resolve(&ModelSpec::Auto, &mut |_| {}) {
        Ok(model) => {
            let file = Gguf::open(&model.path).expect("the default model is a good file");
            Some(Tokenizer::from_gguf(&file).expect("its tokenizer is supported"))
        }
        Err(error) => {
            println!("skipped: no model ({error})");
            None
        }
    }
}

/// How a model chooses that knows nothing, or wants the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Will {
    /// Any allowed token.
    Random,
    /// The one with the most bytes, of some: it runs over the ends of what is being said.
    Longest,
    /// Any that does not end the answer, as long as there is one.
    Endless,
}

const WILLS: [Will; 3] = [Will::Random, Will::Longest, Will::Endless];

fn choose(will: Will, mask: &[u32], dice: &mut Dice, tokenizer: &Tokenizer) -> u32 {
    let bits = |(word, bits): (u32, &u32)| {
        let bits = *bits;
        (0..32)
            .filter(move |bit| bits >> bit & 1 == 1)
            .map(move |bit| word * 32 + bit)
    };
    let allowed: Vec<u32> = (0_u32..).zip(mask).flat_map(bits).collect();
    let mut some = |all: &[u32]| all[dice.roll(all.len())];
    match will {
        Will::Random => some(&allowed),
        Will::Longest => {
            let few: Vec<u32> = (0..16).map(|_| some(&allowed)).collect();
            let longest = few
                .into_iter()
                .max_by_key(|id| tokenizer.token_bytes(*id).len());
            longest.expect("16 tokens")
        }
        Will::Endless => {
            let ends = tokenizer.end_tokens();
            let open: Vec<u32> = allowed
                .iter()
                .copied()
                .filter(|id| !ends.contains(id))
                .collect();
            some(if open.is_empty() { &allowed } else { &open })
        }
    }
}

/// The answer, when it has ended.
fn answer(
    maker: &GrammarMaker,
    tokenizer: &Tokenizer,
    made: &Made,
    case: (u64, Will),
) -> Option<String> {
    let (number, will) = case;
    let wanted = Wanted::Answer(AnswerGrammar {
        json: Some(made.schema.clone()),
        ..AnswerGrammar::default()
    });
    let grammar = maker.compile(&wanted);
    assert!(grammar.is_ok(), "{number}: {grammar:?}: {}", made.schema);
    let grammar = grammar.expect("a grammar");
    let masks = GrammarMasks::start().expect("a thread");
    let request = RequestId(number);
    masks.begin(request, &grammar);
    let mut dice = Dice(number ^ 0x5555);
    let mut said = Vec::new();
    for index in 0..TOKENS_MAX {
        let mask = masks.allowed(request, index).expect("it is live");
        let token = choose(will, &mask, &mut dice, tokenizer);
        if tokenizer.end_tokens().contains(&token) {
            return Some(String::from_utf8(said).expect("an answer is text"));
        }
        said.extend_from_slice(tokenizer.token_bytes(token));
        masks.drawn(request, index, token);
    }
    None
}

/// The same JSON with exponents of two digits at most: `1e999` is JSON, but nothing that the parser
/// here can hold.
fn tamed(said: &str) -> String {
    let mut out = String::new();
    let (mut before, mut exponent) = (' ', None);
    for letter in said.chars() {
        exponent = match (exponent, letter) {
            (None, 'e' | 'E') if before.is_ascii_digit() => Some(0),
            (Some(0), '+' | '-') => Some(0),
            (Some(digits), '0'..='9') => Some(digits + 1),
            _ => None,
        };
        if exponent.is_none_or(|digits| digits <= 2) {
            out.push(letter);
        }
        before = letter;
    }
    out
}

fn validator(schema: &Value) -> Validator {
    let options = jsonschema::options().should_validate_formats(true);
    options.build(schema).expect("a good schema")
}

#[test]
fn whatever_is_chosen_an_answer_of_a_schema_is_valid_and_bounded_ones_end() {
    let Some(tokenizer) = tokenizer() else { return };
    let maker = GrammarMaker::new(&tokenizer, tokenizer.vocabulary_len()).expect("a vocabulary");
    let (mut bounded, mut bounded_ended, mut open, mut open_ended) = (0, 0, 0, 0);
    for number in 0..SCHEMAS {
        let made = schema(number);
        let validator = validator(&made.schema);
        for will in WILLS {
            let said = answer(&maker, &tokenizer, &made, (number, will));
            let (all, ended) = match made.bounded {
                true => (&mut bounded, &mut bounded_ended),
                false => (&mut open, &mut open_ended),
            };
            *all += 1;
            let Some(said) = said else { continue };
            *ended += 1;
            let value: Value = serde_json::from_str(&tamed(&said))
                .unwrap_or_else(|error| panic!("{number} {will:?}: {error}: {said}"));
            if let Some(error) = validator.iter_errors(&value).next() {
                panic!("{number} {will:?}: {error}: {said} of {}", made.schema);
            }
        }
    }
    println!("{bounded_ended} of {bounded} bounded and {open_ended} of {open} open answers ended");
    assert!(bounded >= 300 && open >= 60, "{bounded} and {open}");
    assert!(
        bounded_ended * 100 >= bounded * 95,
        "{bounded_ended} of {bounded}"
    );
    assert!(open_ended * 2 > open, "{open_ended} of {open}");
}

#[test]
fn the_validator_finds_what_is_wrong() {
    let made = json!({"type": "object", "properties": {"a": {"type": "string", "format": "date"}},
        "required": ["a"], "additionalProperties": false});
    let validator = validator(&made);
    assert!(validator.is_valid(&json!({"a": "2026-11-30"})));
    for wrong in [
        json!({}),
        json!({"a": "today"}),
        json!({"a": "2026-11-30", "b": 1}),
    ] {
        assert!(!validator.is_valid(&wrong), "{wrong}");
    }
}
