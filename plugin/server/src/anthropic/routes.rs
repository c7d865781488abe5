//! `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use rootstock::radix::Ttl;
use serde_json::{Value, json};

use crate::anthropic::reply::{Blocks, Message, error_response, stop};
use crate::anthropic::request::{read_ask, read_talk};
use crate::anthropic::stream::Events;
use crate::app::App;
use crate::chat::stream::{self, StreamParts};
use crate::chat::work::{Work, read_hints};
use crate::http::answer::{answer, read_apart};
use crate::http::api_error::{ApiError, json_response};
use crate::http::body::read_json;
use crate::http::listener::HangUp;
use crate::openai::fields::Fields;
use crate::openai::generation::{Finish, Generation, Part};
use crate::openai::reply_nvext::NvextWish;
use crate::openai::turn::Turn;

static REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// `POST /v1/messages`.
pub async fn messages(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = try_messages(&app, request);
    let response = answer(&app, "messages", work, error_response).await;
    with_id(&app, response)
}

/// `POST /v1/messages/count_tokens`: the tokens of the prompt that the same body would make. It
/// leaves the cache as it is.
pub async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = try_count(&app, request);
    let response = answer(&app, "count_tokens", work, error_response).await;
    with_id(&app, response)
}

fn with_id(app: &App, mut response: Response<Body>) -> Response<Body> {
    if let Ok(id) = HeaderValue::from_str(&app.new_id("req")) {
        response.headers_mut().insert(&REQUEST_ID, id);
    }
    response
}

async fn try_messages(app: &Arc<App>, request: Request) -> Result<Response<Body>, ApiError> {
    let received_ms = crate::clock::unix_millis();
    let live = app.life.enter()?;
    let (head, body) = request.into_parts();
    let body = read_json(&head.headers, body, &app.limits).await?;
    let hang_up = head.extensions.get::<HangUp>().cloned();
    let read = {
        let app = Arc::clone(app);
        move || read_work(&app, &body, &head.headers)
    };
    let (mut work, breakpoints) = read_apart(read).await?;
    let generation = work.start(app, live).await?;
    let turn = work.turn(&app.engine);
    let id = app.new_id("msg").replacen('-', "_", 1);
    let prompt = work
        .prompts
        .first()
        .map_or(&[][..], |prompt| &prompt.tokens);
    let mut wish = NvextWish::new(&work.parsed, received_ms, prompt);
    wish.applied(&work.parsed.hints, &work.derived);
    if let Some(finding) = work.keep_why(app, &generation, &id) {
        wish.explain(&finding);
    }
    let message = Message {
        id,
        model: work
            .ask
            .model
            .unwrap_or_else(|| app.engine.card().name.clone()),
        breakpoints,
        wish,
    };
    if work.ask.stream {
        let parts = StreamParts {
            turn,
            hang_up,
            signs: app.signs,
        };
        return Ok(stream::response(generation, Events::new(message), parts));
    }
    whole(generation, &message, &turn).await
}

fn read_work(
    app: &App,
    body: &Value,
    headers: &HeaderMap,
) -> Result<(Work, Vec<(u32, Ttl)>), ApiError> {
    let fields = Fields::root(body)?;
    let ask = read_ask(&fields)?;
    let mut talk = read_talk(&fields, app.strip_preamble)?;
    talk.thoughts_come_back = true;
    let parsed = read_hints(app, body, headers);
    let work = Work::of_talk(&app.engine, ask, parsed, &talk, "messages")?;
    let tokens = work.prompts.first().map_or(&[][..], |prompt| &prompt.marks);
    let breakpoints = tokens.iter().zip(&talk.marks);
    let breakpoints = breakpoints
        .map(|(tokens, mark)| (*tokens, mark.ttl))
        .collect();
    Ok((work, breakpoints))
}

/// Runs a generation to its end and answers at once.
async fn whole(
    mut generation: Generation,
    message: &Message,
    turn: &Turn,
) -> Result<Response<Body>, ApiError> {
    let mut blocks = Blocks::default();
    let mut end = (Finish::Length, 0);
    while let Some(part) = generation.next().await {
        match part? {
            Part::Started { .. } => {}
            Part::Said { said, .. } => blocks.push(said, &generation),
            Part::End {
                choice,
                finish,
                calls,
                ..
            } => {
                end = (finish, calls);
                turn.remember(choice, generation.ids(choice));
            }
        }
    }
    let stop = stop(&end.0, end.1);
    let mut body = message.json(blocks.into_json(), stop, message.usage(&generation));
    if let Some(nvext) = message.wish.of_whole(&end.0, &generation) {
        body["nvext"] = nvext;
    }
    Ok(json_response(StatusCode::OK, &body))
}

async fn try_count(app: &Arc<App>, request: Request) -> Result<Response<Body>, ApiError> {
    let _live = app.life.enter()?;
    let (head, body) = request.into_parts();
    let body = read_json(&head.headers, body, &app.limits).await?;
    let read = {
        let app = Arc::clone(app);
        move || {
            let fields = Fields::root(&body)?;
            let talk = read_talk(&fields, app.strip_preamble)?;
            let parsed = read_hints(&app, &body, &head.headers);
            let prompt = app
                .engine
                .chat_prompt(&talk, parsed.salt.as_deref())
                .map_err(|error| error.of("messages"))?;
            Ok(prompt.len())
        }
    };
    let tokens = read_apart(read).await?;
    Ok(json_response(
        StatusCode::OK,
        &json!({"input_tokens": tokens}),
    ))
}
