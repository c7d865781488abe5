//! The JSON of answers: whole answers and stream chunks of `/v1/chat/completions` and
//! `/v1/completions`. Pure functions of what was asked and what came out.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::engine_port::Engine;
use crate::openai::generation::{Finish, TokenOut, Totals};
use crate::openai::logprobs;
use crate::tools::call::Call;

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
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// The model's reasoning.
    pub thoughts: String,
    /// Tool calls with their ids.
    pub calls: Vec<(String, Call)>,
    /// All tokens.
    pub tokens: Vec<TokenOut>,
    /// Why it ended.
    pub finish: Finish,
}

/// A piece of a chat answer that is not text.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Reasoning.
    Thought(&'a str),
    /// A call: its index, its id, itself.
    Call(usize, &'a str, &'a Call),
}

/// The end of an answer.
#[derive(Clone, Copy, Debug)]
pub struct Ending<'a> {
    /// Why.
    pub finish: &'a Finish,
    /// Calls in it.
    pub calls: usize,
    /// Tokens not reported yet.
    pub tokens: &'a [TokenOut],
}

impl Answer {
    /// The message of a chat answer. Calls alone have no content.
    fn message(&self) -> Value {
        let content = if self.text.is_empty() && !self.calls.is_empty() {
            Value::Null
        } else {
            self.text.as_str().into()
        };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !self.thoughts.is_empty() {
            message["reasoning_content"] = self.thoughts.as_str().into();
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|(id, call)| call_json(id, call));
            message["tool_calls"] = calls.collect();
        }
        message
    }
}

fn call_json(id: &str, call: &Call) -> Value {
    json!({"id": id, "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_text()}})
}

impl Reply {
    /// The whole answer at once.
    pub fn whole(&self, answers: &[Answer], totals: Totals, nvext: Option<Value>) -> Value {
        let choices: Vec<Value> = answers
            .iter()
            .enumerate()
            .map(|(index, answer)| {
                let logprobs = self.logprobs(&answer.tokens, 0);
                let reason = answer.finish.reason(answer.calls.len());
                match self.route {
                    Route::Chat => json!({
                        "index": index,
                        "message": answer.message(),
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

    /// A chunk with reasoning or a call; completions have neither.
    pub fn piece(&self, choice: usize, piece: Piece<'_>, tokens: &[TokenOut]) -> Value {
        let delta = match piece {
            Piece::Thought(text) => json!({"reasoning_content": text}),
            Piece::Call(index, id, call) => {
                let mut call = call_json(id, call);
                call["index"] = index.into();
                json!({"tool_calls": [call]})
            }
        };
        let logprobs = self.logprobs(tokens, 0);
        self.chunk(
            json!({"index": choice, "delta": delta, "logprobs": logprobs,
            "finish_reason": null}),
        )
    }

    /// The last chunk of an answer.
    pub fn ending(&self, choice: usize, ending: &Ending<'_>, offset: usize) -> Value {
        let tokens = ending.tokens;
        // A chunk without text repeats no log probabilities, unless tokens are left to report.
        let logprobs = if tokens.is_empty() {
            Value::Null
        } else {
            self.logprobs(tokens, offset)
        };
        let reason = ending.finish.reason(ending.calls);
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

    /// Characters that begin in these tokens, where log probabilities need them.
    pub fn characters(&self, tokens: &[TokenOut]) -> usize {
        logprobs::characters(tokens, |token| self.engine.token_bytes(token))
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
