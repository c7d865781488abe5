//! The fields that `/v1/chat/completions` and `/v1/completions` share: how many answers, how
//! long, where to stop, how to draw. Every limit stands here once.

use std::hash::{BuildHasher, RandomState};

use rootstock::radix::Token;
use rootstock::scheduler::SamplingParams;
use serde_json::Value;

use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

/// Stop strings of a request, at most.
pub const STOPS_MAX: usize = 16;
/// Bytes of one stop string, at most.
pub const STOP_BYTES_MAX: usize = 512;
/// Answers of a request over all its prompts, at most.
pub const CHOICES_MAX: u32 = 64;
/// Alternatives per token that `top_logprobs` (chat) and `logprobs` (completions) may ask for.
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// Entries of `logit_bias`, at most.
pub const LOGIT_BIAS_MAX: usize = 1024;

/// What is asked for, apart from the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// The model's name as the caller wrote it; every name is served and echoed.
    pub model: Option<String>,
    /// Answers for each prompt.
    pub n: u32,
    /// Answer as server-sent events.
    pub stream: bool,
    /// One last event with the usage (`stream_options.include_usage`).
    pub include_usage: bool,
    /// Output tokens at most, when given.
    pub max_tokens: Option<u32>,
    /// Output tokens before which no stop token ends the answer; stop strings still do.
    pub min_tokens: u32,
    /// Generate on through the end of sequence.
    pub ignore_eos: bool,
    /// Strings that end the answer and are cut from it.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_tokens: Vec<Token>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
}

impl Ask {
    /// Reads the shared fields. `vocab` is the number of tokens the model knows.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn read(fields: &Fields<'_>, vocab: u32) -> Result<Ask, ApiError> {
        let (stop, mut stop_tokens) = read_stop(fields, vocab)?;
        for (index, value) in fields
            .list("stop_token_ids")?
            .unwrap_or_default()
            .iter()
            .enumerate()
        {
            stop_tokens.push(read_token(
                value,
                &format!("stop_token_ids[{index}]"),
                vocab,
            )?);
        }
        let max_tokens = fields.count("max_tokens", 1..=u32::MAX)?;
        let max_tokens = fields
            .count("max_completion_tokens", 1..=u32::MAX)?
            .or(max_tokens);
        let min_tokens = fields.count("min_tokens", 0..=u32::MAX)?.unwrap_or(0);
        if let Some(max) = max_tokens.filter(|max| *max < min_tokens) {
            let message =
                format!("min_tokens must be at most max_tokens ({max}), found {min_tokens}");
            return Err(ApiError::param("min_tokens", message));
        }
        let stream = fields.flag("stream")?.unwrap_or(false);
        Ok(Ask {
            model: fields
                .text("model")?
                .filter(|name| !name.is_empty())
                .map(str::to_owned),
            n: fields.count("n", 1..=CHOICES_MAX)?.unwrap_or(1),
            stream,
            include_usage: read_include_usage(fields, stream)?,
            max_tokens,
            min_tokens,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            stop,
            stop_tokens,
            sampling: read_sampling(fields, vocab)?,
        })
    }
}

fn read_include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.get("stream_options") else {
        return Ok(false);
    };
    let asked = Fields::at(options, "stream_options")?
        .flag("include_usage")?
        .unwrap_or(false);
    Ok(asked && stream)
}

fn read_sampling(fields: &Fields<'_>, vocab: u32) -> Result<SamplingParams, ApiError> {
    let off = SamplingParams::default();
    // vLLM's clients switch top_k off by -1, others by 0.
    let top_k = fields.integer("top_k", -1..=i64::MAX)?.unwrap_or(0).max(0);
    #[expect(clippy::cast_sign_loss, reason = "any 64 bits are a seed")]
    let seed = fields
        .integer("seed", i64::MIN..=i64::MAX)?
        .map(|seed| seed as u64);
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(off.temperature),
        top_k: u32::try_from(top_k).unwrap_or(u32::MAX),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(off.top_p),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(off.min_p),
        seed: seed.unwrap_or_else(random_seed),
        repetition_penalty: fields
            .number("repetition_penalty", 0.01..=10.0)?
            .unwrap_or(off.repetition_penalty),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(off.frequency_penalty),
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(off.presence_penalty),
        logit_bias: read_logit_bias(fields, vocab)?,
        logprobs: None,
    })
}

/// `stop` is a string, or a list of strings and token ids. An empty string or list is absent.
fn read_stop(fields: &Fields<'_>, vocab: u32) -> Result<(Vec<String>, Vec<Token>), ApiError> {
    let (mut texts, mut tokens) = (Vec::new(), Vec::new());
    let entries = match fields.get("stop") {
        None => return Ok((texts, tokens)),
        Some(Value::String(text)) if text.is_empty() => return Ok((texts, tokens)),
        Some(Value::Array(entries)) => entries.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if entries.len() > STOPS_MAX {
        let message = format!(
            "stop must have at most {STOPS_MAX} entries, found {}",
            entries.len()
        );
        return Err(ApiError::param("stop", message));
    }
    for (index, entry) in entries.iter().enumerate() {
        let name = format!("stop[{index}]");
        match entry.as_str() {
            Some(text) if (1..=STOP_BYTES_MAX).contains(&text.len()) => texts.push(text.to_owned()),
            Some(text) => {
                let bytes = text.len();
                let message =
                    format!("{name} must have 1 to {STOP_BYTES_MAX} bytes, found {bytes}");
                return Err(ApiError::param(name, message));
            }
            None if entry.is_number() => tokens.push(read_token(entry, &name, vocab)?),
            None => return Err(wrong_type(&name, "a string", entry)),
        }
    }
    Ok((texts, tokens))
}

fn read_logit_bias(fields: &Fields<'_>, vocab: u32) -> Result<Vec<(Token, f32)>, ApiError> {
    let Some(value) = fields.get("logit_bias") else {
        return Ok(Vec::new());
    };
    let entries = value
        .as_object()
        .ok_or_else(|| wrong_type("logit_bias", "an object", value))?;
    if entries.len() > LOGIT_BIAS_MAX {
        let found = entries.len();
        let message =
            format!("logit_bias must have at most {LOGIT_BIAS_MAX} entries, found {found}");
        return Err(ApiError::param("logit_bias", message));
    }
    let bias_of = Fields::at(value, "logit_bias")?;
    let mut bias = Vec::with_capacity(entries.len());
    for key in entries.keys() {
        let token = key
            .parse::<Token>()
            .ok()
            .filter(|token| *token < vocab)
            .ok_or_else(|| {
                let message =
                    format!("logit_bias keys must be token ids below {vocab}, found {key:?}");
                ApiError::param("logit_bias", message)
            })?;
        if let Some(value) = bias_of.number(key, -100.0..=100.0)? {
            bias.push((token, value));
        }
    }
    Ok(bias)
}

/// A token id below `vocab`.
///
/// # Errors
/// When `value` is no such id.
pub fn read_token(value: &Value, name: &str, vocab: u32) -> Result<Token, ApiError> {
    let token = value.as_u64().and_then(|id| Token::try_from(id).ok());
    token.filter(|token| *token < vocab).ok_or_else(|| {
        wrong_type(
            name,
            &format!("a token id from 0 to {}", vocab.saturating_sub(1)),
            value,
        )
    })
}

/// A seed nobody can guess: the hasher's keys come from the system.
pub fn random_seed() -> u64 {
    RandomState::new().hash_one(crate::clock::unix_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Ask, ApiError> {
        Ask::read(&Fields::root(&body).unwrap(), 1000)
    }

    fn param(body: Value) -> String {
        read(body).unwrap_err().param.unwrap()
    }

    #[test]
    fn nulls_act_as_absent() {
        let absent = read(json!({"seed": 1})).unwrap();
        let nulls = json!({
            "seed": 1, "stop": null, "max_tokens": null, "temperature": null, "n": null,
            "stream": null, "stream_options": null, "logit_bias": null, "top_k": null,
            "model": null, "min_tokens": null, "max_completion_tokens": null, "top_p": null,
        });
        assert_eq!(read(nulls).unwrap(), absent);
        assert_eq!(read(json!({"seed": 1, "stop": ""})).unwrap(), absent);
        assert_eq!(read(json!({"seed": 1, "stop": []})).unwrap(), absent);
    }

    #[test]
    fn the_one_limit_of_stop_strings_is_in_the_message() {
        assert!(read(json!({"stop": ["a", "b", "c", "d", "e"]})).is_ok());
        let error = read(json!({"stop": vec!["x"; STOPS_MAX + 1]})).unwrap_err();
        assert_eq!(error.message, "stop must have at most 16 entries, found 17");
        assert_eq!(param(json!({"stop": ["a", ""]})), "stop[1]");
        assert_eq!(param(json!({"stop": [true]})), "stop[0]");
        assert_eq!(param(json!({"stop": {"a": 1}})), "stop[0]");
    }

    #[test]
    fn stop_takes_token_ids_of_the_vocabulary() {
        let ask = read(json!({"stop": ["a", 7], "stop_token_ids": [9]})).unwrap();
        assert_eq!(
            (ask.stop, ask.stop_tokens),
            (vec!["a".to_owned()], vec![7, 9])
        );
        assert_eq!(param(json!({"stop": [1000]})), "stop[0]");
        assert_eq!(param(json!({"stop_token_ids": [-1]})), "stop_token_ids[0]");
    }

    #[test]
    fn lengths_below_one_are_mistakes() {
        for bad in [json!(0), json!(-1), json!("5"), json!(1.5)] {
            assert_eq!(param(json!({"max_tokens": bad})), "max_tokens");
            assert_eq!(
                param(json!({"max_completion_tokens": bad})),
                "max_completion_tokens"
            );
        }
        let both = read(json!({"max_tokens": 5, "max_completion_tokens": 6})).unwrap();
        assert_eq!(both.max_tokens, Some(6), "the newer name wins");
        assert_eq!(
            param(json!({"max_tokens": 5, "min_tokens": 6})),
            "min_tokens"
        );
    }

    #[test]
    fn ranges_of_the_sampling_fields_are_checked() {
        for (field, bad) in [
            ("temperature", json!(-0.1)),
            ("temperature", json!(2.1)),
            ("top_p", json!(1.1)),
            ("min_p", json!(-1)),
            ("top_k", json!(-2)),
            ("frequency_penalty", json!(3)),
            ("presence_penalty", json!("x")),
            ("repetition_penalty", json!(0)),
            ("n", json!(0)),
            ("n", json!(65)),
            ("stream", json!("yes")),
            ("seed", json!(0.5)),
        ] {
            assert_eq!(param(json!({field: bad})), field);
        }
        assert_eq!(read(json!({"top_k": -1})).unwrap().sampling.top_k, 0);
        assert_eq!(read(json!({"seed": -1})).unwrap().sampling.seed, u64::MAX);
    }

    #[test]
    fn logit_bias_wants_known_tokens_and_bounded_weights() {
        let ask = read(json!({"logit_bias": {"5": -100, "6": null}})).unwrap();
        assert_eq!(ask.sampling.logit_bias, [(5, -100.0)]);
        assert_eq!(param(json!({"logit_bias": {"1000": 1}})), "logit_bias");
        assert_eq!(param(json!({"logit_bias": {"5": 101}})), "logit_bias.5");
    }

    #[test]
    fn usage_in_a_stream_is_given_only_when_asked_for() {
        let ask = read(json!({"stream": true, "stream_options": {"include_usage": true}})).unwrap();
        assert!(ask.include_usage);
        assert!(
            !read(json!({"stream": true, "stream_options": {}}))
                .unwrap()
                .include_usage
        );
        assert_eq!(
            param(json!({"stream": true, "stream_options": {"include_usage": 1}})),
            "stream_options.include_usage"
        );
    }

    #[test]
    fn requests_without_a_seed_differ() {
        let seed = || read(json!({})).unwrap().sampling.seed;
        assert_ne!(seed(), seed());
    }
}
