//! `POST /v1/chat/completions` and `POST /v1/completions`.
//!
//! Everything a caller can get wrong is decided before anything is queued and before a stream is
//! started.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::hints::ParsedHints;
use rootstock::radix::Token;
use serde_json::Value;

use crate::app::App;
use crate::chat::stream::{self, StreamParts};
use crate::chat::work::{Work, read_hints};
use crate::engine_port::Prompt;
use crate::http::answer::{answer, read_apart};
use crate::http::api_error::{ApiError, json_response};
use crate::http::body::read_json;
use crate::http::lifecycle::LiveRequest;
use crate::http::listener::HangUp;
use crate::openai::ask::{Ask, CHOICES_MAX, TOP_LOGPROBS_MAX, read_token};
use crate::openai::fields::{Fields, wrong_type};
use crate::openai::generation::{Generation, Part};
use crate::openai::messages;
use crate::openai::reply::{Answer, Reply, Route};
use crate::openai::reply_nvext::NvextWish;
use crate::openai::stream::Chunks;
use crate::openai::turn::Turn;
use crate::tools::speech::{Rules, Said};

/// `POST /v1/chat/completions`.
pub async fn chat(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = try_answer(&app, request, Route::Chat);
    answer(&app, Route::Chat.as_str(), work, ApiError::response).await
}

/// `POST /v1/completions`.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = try_answer(&app, request, Route::Completion);
    answer(&app, Route::Completion.as_str(), work, ApiError::response).await
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
    let read = {
        let app = Arc::clone(app);
        move || Order::read(&app, route, &body, &head.headers, received_ms)
    };
    let order = read_apart(read).await?;
    order.run(app, live, hang_up).await
}

/// A request, read and checked in full.
struct Order {
    route: Route,
    work: Work,
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
        let parsed = read_hints(app, body, headers);
        if parsed.generation.greedy {
            ask.sampling.temperature = 0.0;
        }
        let mut echo = Vec::new();
        let mut work = match route {
            Route::Chat => {
                ask.sampling.logprobs = read_chat_logprobs(&fields)?;
                read_chat(app, &fields, ask, parsed)?
            }
            Route::Completion => {
                ask.sampling.logprobs = read_logprobs(&fields)?;
                ask.max_tokens = ask.max_tokens.or(Some(16.max(ask.min_tokens)));
                let prompts = read_prompts(app, &fields, parsed.salt.as_deref())?;
                if read_echo(&fields, &ask)? {
                    echo = prompts
                        .iter()
                        .map(|prompt| app.engine.text_of(&prompt.tokens))
                        .collect();
                }
                plain_work(ask, parsed, prompts, "prompt")
            }
        };
        if let Some(tokens) = usable_token_data(&work.parsed, vocab) {
            work.prompts = vec![Prompt::of_tokens(tokens)];
            work.next = None;
        }
        let choices = u32::try_from(work.prompts.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(work.ask.n);
        if choices > CHOICES_MAX {
            let message = format!("prompts x n must be at most {CHOICES_MAX}, found {choices}");
            return Err(ApiError::param("n", message));
        }
        let first = work
            .prompts
            .first()
            .map_or(&[][..], |prompt| &prompt.tokens);
        let wish = NvextWish::new(&work.parsed, received_ms, first);
        Ok(Order {
            route,
            work,
            wish,
            echo,
        })
    }

    async fn run(
        mut self,
        app: &Arc<App>,
        live: LiveRequest,
        hang_up: Option<HangUp>,
    ) -> Result<Response<Body>, ApiError> {
        let generation = self.work.start(app, live).await?;
        let turn = self.work.turn(&app.engine);
        let reply = self.reply(app);
        let echo = self.echo_by_choice();
        let mut wish = self.wish;
        wish.applied(&self.work.parsed.hints, &self.work.derived);
        if let Some(finding) = self.work.keep_why(app, &generation, &reply.id) {
            wish.explain(&finding);
        }
        if self.work.ask.stream {
            let voice = Chunks::new(reply, wish, echo);
            let parts = StreamParts {
                turn,
                hang_up,
                signs: app.signs,
            };
            return Ok(stream::response(generation, voice, parts));
        }
        whole(generation, &reply, &wish, &turn, echo).await
    }

    fn reply(&self, app: &Arc<App>) -> Reply {
        let prefix = match self.route {
            Route::Chat => "chatcmpl",
            Route::Completion => "cmpl",
        };
        let ask = &self.work.ask;
        Reply {
            route: self.route,
            id: app.new_id(prefix),
            created: crate::clock::unix_seconds(),
            model: ask
                .model
                .clone()
                .unwrap_or_else(|| app.engine.card().name.clone()),
            include_usage: ask.include_usage,
            logprobs: ask.sampling.logprobs.is_some(),
            engine: Arc::clone(&app.engine),
        }
    }

    fn echo_by_choice(&self) -> Vec<String> {
        let n = usize::try_from(self.work.ask.n).unwrap_or(1);
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
    let mut answers = vec![Answer::default(); generation.len()];
    while let Some(part) = generation.next().await {
        let (choice, said, tokens, finish) = match part? {
            Part::Started { .. } => continue,
            Part::Said {
                choice,
                said,
                tokens,
            } => (choice, Some(said), tokens, None),
            Part::End {
                choice,
                finish,
                tokens,
                ..
            } => (choice, None, tokens, Some(finish)),
        };
        let Some(answer) = answers.get_mut(choice) else {
            continue;
        };
        match said {
            Some(Said::Text(text)) => answer.text.push_str(&text),
            Some(Said::Thought(text)) => answer.thoughts.push_str(&text),
            Some(Said::Call(call)) => {
                let id = generation.call_id(choice, answer.calls.len());
                answer.calls.push((format!("call_{id}"), call));
            }
            None => {}
        }
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

/// Prompts whose answers are the text as it comes.
fn plain_work(
    ask: Ask,
    parsed: ParsedHints,
    prompts: Vec<Prompt>,
    prompt_field: &'static str,
) -> Work {
    Work {
        ask,
        parsed,
        prompts,
        rules: Rules::default(),
        grammar: None,
        prompt_field,
        next: None,
        shown: None,
        derived: Vec::new(),
    }
}

fn read_chat(
    app: &App,
    fields: &Fields<'_>,
    ask: Ask,
    parsed: ParsedHints,
) -> Result<Work, ApiError> {
    let talk = messages::read(fields)?;
    if parsed.generation.raw_prompt {
        let texts = talk.messages.iter();
        let text: String = texts
            .filter_map(|message| message["content"].as_str())
            .collect();
        let prompt = app.engine.text_prompt(&text, parsed.salt.as_deref());
        let prompt = prompt.map_err(|error| error.of("messages"))?;
        return Ok(plain_work(ask, parsed, vec![prompt], "messages"));
    }
    Work::of_talk(&app.engine, ask, parsed, &talk, "messages")
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
        let message = "echo with logprobs is not supported: prompt tokens may come from the cache, \
            where they have no logprobs; leave out one of the two. To score a text, ask with \
            what stands before each token as the prompt, max_tokens 1 and logprobs 20";
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
