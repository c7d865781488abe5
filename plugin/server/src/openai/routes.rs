//! `POST /v1/chat/completions` and `POST /v1/completions`.
//!
//! Everything a caller can get wrong is decided before anything is queued and before a stream is
//! started.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::hints::{self, Compat, ParsedHints};
use rootstock::radix::Token;
use serde_json::Value;

use crate::app::App;
use crate::engine_port::{Job, Prompt};
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::http::body::read_json;
use crate::http::lifecycle::{LiveRequest, draining};
use crate::http::listener::HangUp;
use crate::openai::ask::{Ask, CHOICES_MAX, TOP_LOGPROBS_MAX, read_token};
use crate::openai::fields::{Fields, wrong_type};
use crate::openai::generation::{Finish, Generation, Part, PromptJobs};
use crate::openai::messages;
use crate::openai::reply::{Answer, Reply, Route};
use crate::openai::reply_nvext::NvextWish;
use crate::openai::stream::{self, StreamParts};
use crate::openai::turn::Turn;

/// `POST /v1/chat/completions`.
pub async fn chat(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    answer(app, request, Route::Chat).await
}

/// `POST /v1/completions`.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    answer(app, request, Route::Completion).await
}

async fn answer(app: Arc<App>, request: Request, route: Route) -> Response<Body> {
    let answered = tokio::select! {
        biased;
        answered = try_answer(&app, request, route) => answered,
        // Whatever it waits for: a body, a seat, the answer.
        () = app.life.expired() => Err(draining()),
    };
    let response = answered.unwrap_or_else(|error| error.response());
    app.metrics
        .responded(route.as_str(), response.status().as_u16());
    response
}

async fn try_answer(
    app: &Arc<App>,
    request: Request,
    route: Route,
) -> Result<Response<Body>, ApiError> {
    let received_ms = crate::clock::unix_millis();
    let live = app.life.enter()?;
    let (head, body) = request.into_parts();
    let body = read_json(&head.headers, body, &app.limits).await?;
    let hang_up = head.extensions.get::<HangUp>().cloned();
    // Templates and tokenizers take their time on long prompts.
    let read = {
        let app = Arc::clone(app);
        move || Order::read(&app, route, &body, &head.headers, received_ms)
    };
    let order = tokio::task::spawn_blocking(read).await.map_err(|_| {
        ApiError::new(
            ErrorKind::Failed,
            "reading the request failed; the server's log says why",
        )
    })??;
    order.run(app, live, hang_up).await
}

/// A request, read and checked in full.
struct Order {
    route: Route,
    ask: Ask,
    parsed: ParsedHints,
    prompts: Vec<Prompt>,
    wish: NvextWish,
    /// Each prompt's text, to stand before its answers.
    echo: Vec<String>,
}

impl Order {
    fn read(
        app: &App,
        route: Route,
        body: &Value,
        headers: &HeaderMap,
        received_ms: u64,
    ) -> Result<Order, ApiError> {
        let fields = Fields::root(body)?;
        let vocab = app.engine.card().vocab;
        let mut ask = Ask::read(&fields, vocab)?;
        let parsed = read_hints(app.compat, body, headers);
        app.metrics.ignored(parsed.hints.ignored.len());
        if parsed.generation.greedy {
            ask.sampling.temperature = 0.0;
        }
        let (mut prompts, mut echo) = (Vec::new(), Vec::new());
        match route {
            Route::Chat => {
                ask.sampling.logprobs = read_chat_logprobs(&fields)?;
                prompts.push(read_chat_prompt(app, &fields, &parsed)?);
            }
            Route::Completion => {
                ask.sampling.logprobs = read_logprobs(&fields)?;
                ask.max_tokens = ask.max_tokens.or(Some(16.max(ask.min_tokens)));
                prompts = read_prompts(app, &fields, parsed.salt.as_deref())?;
                if read_echo(&fields, &ask)? {
                    echo = prompts
                        .iter()
                        .map(|prompt| app.engine.text_of(&prompt.tokens))
                        .collect();
                }
            }
        }
        if let Some(tokens) = usable_token_data(&parsed, vocab) {
            prompts = vec![Prompt::of_tokens(tokens)];
        }
        let choices = u32::try_from(prompts.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(ask.n);
        if choices > CHOICES_MAX {
            let message = format!("prompts x n must be at most {CHOICES_MAX}, found {choices}");
            return Err(ApiError::param("n", message));
        }
        let first = prompts.first().map_or(&[][..], |prompt| &prompt.tokens);
        let wish = NvextWish::new(&parsed, received_ms, first);
        Ok(Order {
            route,
            ask,
            parsed,
            prompts,
            wish,
            echo,
        })
    }

    async fn run(
        self,
        app: &Arc<App>,
        live: LiveRequest,
        hang_up: Option<HangUp>,
    ) -> Result<Response<Body>, ApiError> {
        let limit = app.engine.card().max_len;
        let jobs = self.prompts.iter().map(|prompt| self.jobs(prompt, limit));
        let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
        let turn = self.turn(app);
        let generation = Generation::start(&app.engine, jobs, &app.metrics, live).await?;
        let reply = self.reply(app);
        let echo = self.echo_by_choice();
        if self.ask.stream {
            let parts = StreamParts {
                reply,
                wish: self.wish,
                turn,
                echo,
                hang_up,
            };
            return Ok(stream::response(generation, parts));
        }
        whole(generation, &reply, &self.wish, &turn, echo).await
    }

    /// `n` jobs for one prompt. The first has the caller's seed, the others follow it.
    fn jobs(&self, prompt: &Prompt, limit: u32) -> Result<PromptJobs, ApiError> {
        let tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        // What does not fit is cut, not refused: many clients ask for more than any model has.
        let room = limit
            .checked_sub(tokens)
            .filter(|room| *room > 0)
            .ok_or_else(|| {
                let kind = ErrorKind::ContextLength;
                let message = format!(
                    "the prompt has {tokens} tokens; this model's context of {limit} tokens leaves \
                 room for at most {}",
                    limit.saturating_sub(1)
                );
                let param = if self.route == Route::Chat {
                    "messages"
                } else {
                    "prompt"
                };
                ApiError {
                    kind,
                    ..ApiError::param(param, message)
                }
            })?;
        let max_tokens = self.ask.max_tokens.unwrap_or(room).min(room);
        let mut hints = self.parsed.hints.clone();
        hints.spans.clone_from(&prompt.spans);
        let job = Job {
            tokens: prompt.tokens.clone(),
            max_tokens,
            min_tokens: self.ask.min_tokens.min(max_tokens),
            ignore_eos: self.ask.ignore_eos,
            stop: self.ask.stop.clone(),
            stop_tokens: self.ask.stop_tokens.clone(),
            sampling: self.ask.sampling.clone(),
            hints,
            salt: self.parsed.salt.clone(),
        };
        let jobs = (0..self.ask.n).map(|index| {
            let mut job = job.clone();
            job.sampling.seed = job.sampling.seed.wrapping_add(index.into());
            job
        });
        Ok(PromptJobs {
            jobs: jobs.collect(),
        })
    }

    fn reply(&self, app: &Arc<App>) -> Reply {
        let prefix = match self.route {
            Route::Chat => "chatcmpl",
            Route::Completion => "cmpl",
        };
        Reply {
            route: self.route,
            id: app.new_id(prefix),
            created: crate::clock::unix_seconds(),
            model: self
                .ask
                .model
                .clone()
                .unwrap_or_else(|| app.engine.card().name.clone()),
            include_usage: self.ask.include_usage,
            logprobs: self.ask.sampling.logprobs.is_some(),
            engine: Arc::clone(&app.engine),
        }
    }

    fn turn(&self, app: &Arc<App>) -> Turn {
        let n = usize::try_from(self.ask.n).unwrap_or(1);
        let places = self
            .prompts
            .iter()
            .flat_map(|prompt| std::iter::repeat_n(prompt.end, n));
        Turn::new(&app.engine, places.collect())
    }

    fn echo_by_choice(&self) -> Vec<String> {
        let n = usize::try_from(self.ask.n).unwrap_or(1);
        self.echo
            .iter()
            .flat_map(|text| std::iter::repeat_n(text.clone(), n))
            .collect()
    }
}

/// Runs a generation to its end and answers at once.
async fn whole(
    mut generation: Generation,
    reply: &Reply,
    wish: &NvextWish,
    turn: &Turn,
    echo: Vec<String>,
) -> Result<Response<Body>, ApiError> {
    let blank = Answer {
        text: String::new(),
        tokens: Vec::new(),
        finish: Finish::Length,
    };
    let mut answers = vec![blank; generation.len()];
    while let Some(part) = generation.next().await {
        let (choice, text, tokens, finish) = match part? {
            Part::Started { .. } => continue,
            Part::Text {
                choice,
                text,
                tokens,
            } => (choice, text, tokens, None),
            Part::End {
                choice,
                finish,
                tokens,
            } => (choice, String::new(), tokens, Some(finish)),
        };
        let Some(answer) = answers.get_mut(choice) else {
            continue;
        };
        answer.text.push_str(&text);
        answer.tokens.extend(tokens);
        if let Some(finish) = finish {
            answer.finish = finish;
            turn.remember(choice, generation.ids(choice));
        }
    }
    for (answer, echo) in answers.iter_mut().zip(echo) {
        answer.text.insert_str(0, &echo);
    }
    let nvext = answers
        .first()
        .and_then(|first| wish.of_whole(&first.finish, &generation));
    Ok(json_response(
        StatusCode::OK,
        &reply.whole(&answers, generation.totals(), nvext),
    ))
}

fn read_hints(compat: Compat, body: &Value, headers: &HeaderMap) -> ParsedHints {
    let pairs: Vec<(&str, &str)> = headers
        .iter()
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
        .collect();
    let nvext = body.get("nvext").unwrap_or(&Value::Null);
    hints::parse_as(compat, nvext, body, &pairs)
}

fn read_chat_prompt(
    app: &App,
    fields: &Fields<'_>,
    parsed: &ParsedHints,
) -> Result<Prompt, ApiError> {
    messages::check_supported(fields)?;
    let messages = messages::read_messages(fields)?;
    let tools = messages::read_tools(fields)?;
    if parsed.generation.raw_prompt {
        let texts = messages.as_array().into_iter().flatten();
        let text: String = texts
            .filter_map(|message| message["content"].as_str())
            .collect();
        let prompt = app.engine.text_prompt(&text, parsed.salt.as_deref());
        return prompt.map_err(|error| error.of("messages"));
    }
    let mut extra = None;
    for key in ["chat_template_kwargs", "chat_template_args"] {
        match fields.get(key) {
            Some(value @ Value::Object(_)) => extra = Some(value),
            Some(other) => return Err(wrong_type(key, "an object", other)),
            None => {}
        }
    }
    app.engine
        .chat_prompt(&messages, tools.as_ref(), extra, parsed.salt.as_deref())
        .map_err(|error| error.of("messages"))
}

/// `logprobs: true`, with `top_logprobs` alternatives.
fn read_chat_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let top = fields.count("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    if fields.flag("logprobs")?.unwrap_or(false) {
        return Ok(Some(u8::try_from(top.unwrap_or(0)).unwrap_or(u8::MAX)));
    }
    if top.is_some_and(|top| top > 0) {
        return Err(ApiError::param(
            "top_logprobs",
            "top_logprobs needs logprobs: true",
        ));
    }
    Ok(None)
}

/// `logprobs: N`. Some clients send `false` for none.
fn read_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    if fields
        .get("logprobs")
        .is_some_and(|value| value == &Value::Bool(false))
    {
        return Ok(None);
    }
    let top = fields.count("logprobs", 0..=TOP_LOGPROBS_MAX)?;
    Ok(top.map(|top| u8::try_from(top).unwrap_or(u8::MAX)))
}

fn read_echo(fields: &Fields<'_>, ask: &Ask) -> Result<bool, ApiError> {
    if fields
        .text("suffix")?
        .is_some_and(|suffix| !suffix.is_empty())
    {
        return Err(ApiError::unsupported(
            "suffix",
            "suffix (fill in the middle) is not supported",
        ));
    }
    if fields
        .count("best_of", 1..=CHOICES_MAX)?
        .is_some_and(|best_of| best_of != ask.n)
    {
        return Err(ApiError::unsupported(
            "best_of",
            "best_of is not supported; use n",
        ));
    }
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && ask.sampling.logprobs.is_some() {
        let message = "echo with logprobs is not supported: prompt tokens have no logprobs here";
        return Err(ApiError::unsupported("echo", message));
    }
    Ok(echo)
}

/// `prompt`: a text, a list of texts, a list of token ids, or a list of such lists.
fn read_prompts(
    app: &App,
    fields: &Fields<'_>,
    salt: Option<&str>,
) -> Result<Vec<Prompt>, ApiError> {
    let vocab = app.engine.card().vocab;
    let value = fields.get("prompt").ok_or_else(|| {
        ApiError::param(
            "prompt",
            "prompt is missing; it is a string or a list of token ids",
        )
    })?;
    let one = |value: &Value, name: &str| match value {
        Value::String(text) => app
            .engine
            .text_prompt(text, salt)
            .map_err(|error| error.of(name)),
        Value::Array(ids) => read_ids(ids, name, vocab),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            Err(wrong_type(name, "a string or a list of token ids", value))
        }
    };
    match value {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => {
            if list.len() > CHOICES_MAX as usize {
                let found = list.len();
                let message =
                    format!("prompt must have at most {CHOICES_MAX} entries, found {found}");
                return Err(ApiError::param("prompt", message));
            }
            let named = list.iter().enumerate();
            named
                .map(|(index, value)| one(value, &format!("prompt[{index}]")))
                .collect()
        }
        Value::Array(_)
        | Value::String(_)
        | Value::Null
        | Value::Bool(_)
        | Value::Number(_)
        | Value::Object(_) => Ok(vec![one(value, "prompt")?]),
    }
}

fn read_ids(ids: &[Value], name: &str, vocab: u32) -> Result<Prompt, ApiError> {
    if ids.is_empty() {
        return Err(ApiError::param(
            name,
            format!("{name} must have at least 1 token, found none"),
        ));
    }
    let read = |(index, id)| read_token(id, &format!("{name}[{index}]"), vocab);
    let tokens = ids
        .iter()
        .enumerate()
        .map(read)
        .collect::<Result<Vec<Token>, _>>()?;
    Ok(Prompt::of_tokens(tokens))
}

/// `nvext.token_data` stands for the prompt, if all of it is known to the model.
fn usable_token_data(parsed: &ParsedHints, vocab: u32) -> Option<Vec<Token>> {
    let tokens = parsed.generation.token_data.as_ref()?;
    let known = !tokens.is_empty() && tokens.iter().all(|token| *token < vocab);
    known.then(|| tokens.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn top_logprobs_without_logprobs_is_a_mistake() {
        let read = |body: &Value| read_chat_logprobs(&Fields::root(body).unwrap());
        assert_eq!(read(&json!({"logprobs": true})).unwrap(), Some(0));
        assert_eq!(
            read(&json!({"logprobs": true, "top_logprobs": 3})).unwrap(),
            Some(3)
        );
        assert_eq!(
            read(&json!({"logprobs": false, "top_logprobs": 0})).unwrap(),
            None
        );
        assert!(read(&json!({"top_logprobs": 1})).is_err());
        assert!(read(&json!({"logprobs": true, "top_logprobs": 21})).is_err());
        assert!(read(&json!({"logprobs": 5})).is_err());
    }

    #[test]
    fn completions_count_alternatives_in_logprobs_itself() {
        let read = |body: &Value| read_logprobs(&Fields::root(body).unwrap());
        assert_eq!(read(&json!({"logprobs": 0})).unwrap(), Some(0));
        assert_eq!(read(&json!({"logprobs": false})).unwrap(), None);
        assert!(read(&json!({"logprobs": true})).is_err());
    }
}
