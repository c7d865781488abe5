//! Log probabilities in the two shapes of OpenAI's API.

use rootstock::radix::Token;
use rootstock::scheduler::TokenLogprob;
use serde_json::{Map, Value, json};

use crate::openai::generation::TokenOut;

/// The shape of `/v1/chat/completions`: one object a token, with its bytes.
pub fn chat(tokens: &[TokenOut], bytes_of: impl Fn(Token) -> Vec<u8>) -> Value {
    let entry = |token: Token, logprob: f32| {
        let bytes = bytes_of(token);
        json!({"token": shown(&bytes), "logprob": finite(logprob), "bytes": bytes})
    };
    let content: Vec<Value> = tokens
        .iter()
        .filter_map(|token| token.logprob.as_ref())
        .map(|found| {
            let mut object = entry(found.token, found.logprob);
            let top: Vec<Value> = found
                .top
                .iter()
                .map(|(id, value)| entry(*id, *value))
                .collect();
            object["top_logprobs"] = top.into();
            object
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// The shape of `/v1/completions`: parallel lists, with the offset of each token in the text,
/// counted in characters from the start of the answer: those that have begun before the token.
pub fn completion(
    tokens: &[TokenOut],
    bytes_of: impl Fn(Token) -> Vec<u8>,
    offset: usize,
) -> Value {
    let (mut texts, mut values, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut at = offset;
    for found in tokens.iter().filter_map(|token| token.logprob.as_ref()) {
        let bytes = bytes_of(found.token);
        let text = shown(&bytes);
        offsets.push(json!(at));
        at += begun(&bytes);
        values.push(finite(found.logprob));
        tops.push(top_of(found, &bytes_of));
        texts.push(json!(text));
    }
    json!({"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets})
}

/// Characters that begin in the tokens of a piece; the offset of the next piece is so much further.
pub fn characters(tokens: &[TokenOut], bytes_of: impl Fn(Token) -> Vec<u8>) -> usize {
    let found = tokens.iter().filter_map(|token| token.logprob.as_ref());
    found.map(|found| begun(&bytes_of(found.token))).sum()
}

/// Characters that begin in these bytes; a character may go on in the next token.
fn begun(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count()
}

/// Alternatives by text; the drawn token is among them, as OpenAI does.
fn top_of(found: &TokenLogprob, bytes_of: impl Fn(Token) -> Vec<u8>) -> Value {
    let mut top = Map::new();
    for (token, logprob) in found
        .top
        .iter()
        .copied()
        .chain([(found.token, found.logprob)])
    {
        // Different tokens can have one text: the first is the more probable one.
        top.entry(shown(&bytes_of(token)))
            .or_insert_with(|| finite(logprob));
    }
    Value::Object(top)
}

/// JSON has no infinities: what the sampler ruled out is shown as -9999, as OpenAI does.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    })
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: Token, logprob: f32, top: &[(Token, f32)]) -> TokenOut {
        let logprob = TokenLogprob {
            token: id,
            logprob,
            top: top.to_vec(),
        };
        TokenOut {
            id,
            logprob: Some(logprob),
        }
    }

    fn bytes_of(token: Token) -> Vec<u8> {
        [b"a".to_vec(), b"bc".to_vec(), vec![0xF0, 0x9F]][token as usize].clone()
    }

    #[test]
    fn chat_lists_bytes_that_are_no_text_alone() {
        let value = chat(
            &[token(2, -0.5, &[(2, -0.5), (0, f32::NEG_INFINITY)])],
            bytes_of,
        );
        let entry = &value["content"][0];
        assert_eq!(entry["bytes"], json!([0xF0, 0x9F]));
        assert_eq!(entry["logprob"], json!(-0.5));
        assert_eq!(entry["top_logprobs"][1]["logprob"], json!(-9999.0));
    }

    #[test]
    fn a_character_of_several_tokens_counts_once() {
        let half = |byte: u8| move |_: Token| vec![byte];
        assert_eq!(characters(&[token(0, -1.0, &[])], half(0xC3)), 1);
        assert_eq!(characters(&[token(0, -1.0, &[])], half(0xA9)), 0);
    }

    #[test]
    fn completions_count_offsets_in_characters_from_the_start() {
        let tokens = [token(1, -1.0, &[(0, -0.25)]), token(0, -2.0, &[])];
        let value = completion(&tokens, bytes_of, 7);
        assert_eq!(value["text_offset"], json!([7, 9]));
        assert_eq!(value["tokens"], json!(["bc", "a"]));
        assert_eq!(value["top_logprobs"][0], json!({"a": -0.25, "bc": -1.0}));
    }
}
