//! `POST /v1/responses`, and `GET` and `DELETE` of `/v1/responses/{id}`.

use std::sync::{Arc, PoisonError};

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, Response, StatusCode};
use serde_json::{Value, json};

use crate::app::App;
use crate::chat::stream::{self, StreamParts};
use crate::chat::work::{Work, read_hints};
use crate::http::answer::{answer, read_apart};
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::http::body::read_json;
use crate::http::listener::HangUp;
use crate::openai::fields::Fields;
use crate::openai::generation::{Finish, Generation};
use crate::openai::reply_nvext::NvextWish;
use crate::responses::input;
use crate::responses::reply::{Frame, Output, Status};
use crate::responses::request::{read_ask, read_talk, read_tools};
use crate::responses::store::Kept;
use crate::responses::stream::{Events, collect, usage_of};

/// `POST /v1/responses`.
pub async fn create(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = try_create(&app, request);
    answer(&app, "responses", work, ApiError::response).await
}

/// `GET /v1/responses/{id}`.
pub async fn get(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response<Body> {
    let salt = read_hints(&app, &Value::Null, &headers).salt;
    let store = app.responses.lock().unwrap_or_else(PoisonError::into_inner);
    match store.get(&id, salt.as_deref()) {
        Some(kept) => json_response(StatusCode::OK, &kept.response),
        None => missing(&id, "id").response(),
    }
}

/// `DELETE /v1/responses/{id}`.
pub async fn delete(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response<Body> {
    let salt = read_hints(&app, &Value::Null, &headers).salt;
    let mut store = app.responses.lock().unwrap_or_else(PoisonError::into_inner);
    if store.remove(&id, salt.as_deref()) {
        let body = json!({"id": id, "object": "response", "deleted": true});
        return json_response(StatusCode::OK, &body);
    }
    missing(&id, "id").response()
}

fn missing(id: &str, param: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError {
        kind: ErrorKind::NotFound,
        ..ApiError::param(param, format!("there is no response with the id {id:?}"))
    }
}

async fn try_create(app: &Arc<App>, request: Request) -> Result<Response<Body>, ApiError> {
    let received_ms = crate::clock::unix_millis();
    let live = app.life.enter()?;
    let (head, body) = request.into_parts();
    let body = read_json(&head.headers, body, &app.limits).await?;
    let hang_up = head.extensions.get::<HangUp>().cloned();
    let read = {
        let app = Arc::clone(app);
        move || read_work(&app, &body, &head.headers, received_ms)
    };
    let (mut work, mut ending) = read_apart(read).await?;
    let mut generation = work.start(app, live).await?;
    ending.wish.applied(&work.parsed.hints, &work.derived);
    if let Some(finding) = work.keep_why(app, &generation, &ending.frame.id) {
        ending.wish.explain(&finding);
    }
    let turn = work.turn(&app.engine);
    if work.ask.stream {
        let parts = StreamParts {
            turn,
            hang_up,
            signs: app.signs,
        };
        let voice = Events::new(app, ending);
        return Ok(stream::response(generation, voice, parts));
    }
    let ended = |generation: &Generation| turn.remember(0, generation.ids(0));
    let (output, finish) = collect(&mut generation, &ending.frame, ended).await?;
    let body = ending.finish(app, &output, &finish, &generation);
    Ok(json_response(StatusCode::OK, &body))
}

/// What a response needs at its end.
#[derive(Debug)]
pub struct Ending {
    /// What all its states repeat.
    pub frame: Frame,
    wish: NvextWish,
    /// The conversation before the answer, when it is to be kept.
    messages: Option<Vec<Value>>,
    salt: Option<String>,
}

impl Ending {
    /// The whole response; kept if that was asked for.
    pub fn finish(
        &self,
        app: &App,
        output: &Output,
        finish: &Finish,
        generation: &Generation,
    ) -> Value {
        let status = Status::Ended(finish.clone());
        let usage = usage_of(generation, output);
        let mut response = self.frame.json(&status, &output.items, usage);
        if let Some(messages) = &self.messages {
            let mut messages = messages.clone();
            messages.push(output.message());
            let kept = Kept {
                response: response.clone(),
                messages,
                salt: self.salt.clone(),
            };
            let mut store = app.responses.lock().unwrap_or_else(PoisonError::into_inner);
            store.insert(self.frame.id.clone(), kept);
        }
        if let Some(nvext) = self.wish.of_whole(finish, generation) {
            response["nvext"] = nvext;
        }
        response
    }
}

fn read_work(
    app: &App,
    body: &Value,
    headers: &HeaderMap,
    received_ms: u64,
) -> Result<(Work, Ending), ApiError> {
    let fields = Fields::root(body)?;
    let ask = read_ask(&fields)?;
    let parsed = read_hints(app, body, headers);
    let (tools, names) = read_tools(&fields)?;
    let mut talk = read_talk(&fields, tools)?;
    let mut messages = match fields.text("previous_response_id")? {
        None => Vec::new(),
        Some(id) => {
            let store = app.responses.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = store.get(id, parsed.salt.as_deref());
            let kept = kept.ok_or_else(|| missing(id, "previous_response_id"))?;
            kept.messages.clone()
        }
    };
    messages.extend(input::read(&fields, &names)?);
    if messages.is_empty() {
        let message = "input is missing; it is a string or a list of items";
        return Err(ApiError::param("input", message));
    }
    if let Some(instructions) = fields.text("instructions")? {
        talk.messages
            .push(json!({"role": "system", "content": instructions}));
    }
    talk.messages.extend(messages.iter().cloned());
    talk.canonical_ids();
    talk.thoughts_come_back = true;
    let stores = fields.flag("store")?.unwrap_or(true);
    let salt = parsed.salt.clone();
    let include = fields.list("include")?.unwrap_or_default();
    let work = Work::of_talk(&app.engine, ask, parsed, &talk, "input")?;
    let prompt = work
        .prompts
        .first()
        .map_or(&[][..], |prompt| &prompt.tokens);
    let ending = Ending {
        frame: Frame {
            id: app.new_id("resp").replacen('-', "_", 1),
            created: crate::clock::unix_seconds(),
            model: work
                .ask
                .model
                .clone()
                .unwrap_or_else(|| app.engine.card().name.clone()),
            echo: Frame::echo_of(body),
            names,
            with_handle: include
                .iter()
                .any(|name| name == "reasoning.encrypted_content"),
        },
        wish: NvextWish::new(&work.parsed, received_ms, prompt),
        messages: stores.then_some(messages),
        salt,
    };
    Ok((work, ending))
}
