//! The JSON of answers: whole answers and stream chunks of `/v1/chat/completions` and
//! `/v1/completions`. Pure functions of what was asked and what came out.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::engine_port::Engine;
use crate::openai::generation::{Finish, TokenOut, Totals};
use crate::openai::logprobs;

/// Which of the two answers it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

impl Route {
    /// The route's name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Route::Chat => "chat",
            Route::Completion => "completions",
        }
    }
}

/// What all pieces of one answer repeat, and what the caller asked to see.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Chat or completion.
    pub route: Route,
    /// `chatcmpl-...` or `cmpl-...`.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name as the caller wrote it.
    pub model: String,
    /// Whether stream chunks carry a `usage` field.
    pub include_usage: bool,
    /// Whether log probabilities were asked for.
    pub logprobs: bool,
    /// For the text of tokens.
    pub engine: Arc<Engine>,
}

/// One finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// All tokens.
    pub tokens: Vec<TokenOut>,
    /// Why it ended.
    pub finish: Finish,
}

impl Reply {
    /// The whole answer at once.
    pub fn whole(&self, answers: &[Answer], totals: Totals, nvext: Option<Value>) -> Value {
        let choices: Vec<Value> = answers
            .iter()
            .enumerate()
            .map(|(index, answer)| {
                let logprobs = self.logprobs(&answer.tokens, 0);
                let reason = answer.finish.reason();
                match self.route {
                    Route::Chat => json!({
                        "index": index,
                        "message": {"role": "assistant", "content": answer.text, "refusal": null},
                        "logprobs": logprobs,
                        "finish_reason": reason,
                    }),
                    Route::Completion => json!({
                        "index": index, "text": answer.text, "logprobs": logprobs,
                        "finish_reason": reason,
                    }),
                }
            })
            .collect();
        let object = match self.route {
            Route::Chat => "chat.completion",
            Route::Completion => "text_completion",
        };
        let mut body = self.frame(object);
        body.insert("choices".into(), choices.into());
        body.insert("usage".into(), usage(totals));
        if let Some(nvext) = nvext {
            body.insert("nvext".into(), nvext);
        }
        Value::Object(body)
    }

    /// The first chunk of a chat answer, which names the role. Completions have none.
    pub fn opening(&self, choice: usize) -> Option<Value> {
        let delta = json!({"role": "assistant"});
        (self.route == Route::Chat).then(|| {
            self.chunk(json!({"index": choice, "delta": delta, "logprobs": null,
                "finish_reason": null}))
        })
    }

    /// A chunk with text. `offset` is the number of characters of this answer before it.
    pub fn text(&self, choice: usize, text: &str, tokens: &[TokenOut], offset: usize) -> Value {
        let logprobs = self.logprobs(tokens, offset);
        self.chunk(match self.route {
            Route::Chat => json!({
                "index": choice, "delta": {"content": text}, "logprobs": logprobs,
                "finish_reason": null,
            }),
            Route::Completion => json!({
                "index": choice, "text": text, "logprobs": logprobs, "finish_reason": null,
            }),
        })
    }

    /// The last chunk of an answer.
    pub fn ending(
        &self,
        choice: usize,
        finish: &Finish,
        tokens: &[TokenOut],
        offset: usize,
    ) -> Value {
        // A chunk without text repeats no log probabilities, unless tokens are left to report.
        let logprobs = if tokens.is_empty() {
            Value::Null
        } else {
            self.logprobs(tokens, offset)
        };
        let reason = finish.reason();
        self.chunk(match self.route {
            Route::Chat => json!({
                "index": choice, "delta": {}, "logprobs": logprobs, "finish_reason": reason,
            }),
            Route::Completion => json!({
                "index": choice, "text": "", "logprobs": logprobs, "finish_reason": reason,
            }),
        })
    }

    /// The one chunk with the usage, after all others.
    pub fn usage_chunk(&self, totals: Totals) -> Value {
        let mut chunk = self.chunk_frame();
        chunk.insert("choices".into(), json!([]));
        chunk.insert("usage".into(), usage(totals));
        Value::Object(chunk)
    }

    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.chunk_frame();
        chunk.insert("choices".into(), json!([choice]));
        if self.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        Value::Object(chunk)
    }

    fn chunk_frame(&self) -> Map<String, Value> {
        self.frame(match self.route {
            Route::Chat => "chat.completion.chunk",
            Route::Completion => "text_completion",
        })
    }

    fn frame(&self, object: &str) -> Map<String, Value> {
        let mut frame = Map::new();
        frame.insert("id".into(), self.id.as_str().into());
        frame.insert("object".into(), object.into());
        frame.insert("created".into(), self.created.into());
        frame.insert("model".into(), self.model.as_str().into());
        frame.insert(
            "system_fingerprint".into(),
            self.engine.card().fingerprint.as_str().into(),
        );
        frame
    }

    fn logprobs(&self, tokens: &[TokenOut], offset: usize) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let bytes_of = |token| self.engine.token_bytes(token);
        match self.route {
            Route::Chat => logprobs::chat(tokens, bytes_of),
            Route::Completion => logprobs::completion(tokens, bytes_of, offset),
        }
    }
}

fn usage(totals: Totals) -> Value {
    json!({
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens},
    })
}
