//! `POST /tokenize` and `POST /detokenize`, in the form of vLLM.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::app::App;
use crate::chat::work::read_hints;
use crate::http::answer::{answer, read_apart};
use crate::http::api_error::{ApiError, json_response};
use crate::http::body::read_json;
use crate::openai::ask::read_token;
use crate::openai::fields::Fields;
use crate::openai::messages;

/// `POST /tokenize`: the tokens of `prompt`, or of the prompt that `messages` and `tools` make.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let work = with_body(&app, request, read_tokens);
    answer(&app, "tokenize", work, ApiError::response).await
}

/// `POST /detokenize`: the text of `tokens`.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let read = |app: &App, body: &Value, _: Option<&str>| {
        let fields = Fields::root(body)?;
        let vocab = app.engine.card().vocab;
        let list = fields.list("tokens")?.ok_or_else(|| {
            ApiError::param("tokens", "tokens must be a list of token ids, found none")
        })?;
        let token = |(index, value)| read_token(value, &format!("tokens[{index}]"), vocab);
        let tokens: Vec<u32> = list
            .iter()
            .enumerate()
            .map(token)
            .collect::<Result<_, _>>()?;
        Ok(json!({"prompt": app.engine.text_of(&tokens)}))
    };
    let work = with_body(&app, request, read);
    answer(&app, "detokenize", work, ApiError::response).await
}

async fn with_body(
    app: &Arc<App>,
    request: Request,
    read: impl FnOnce(&App, &Value, Option<&str>) -> Result<Value, ApiError> + Send + 'static,
) -> Result<Response<Body>, ApiError> {
    let _live = app.life.enter()?;
    let (head, body) = request.into_parts();
    let body = read_json(&head.headers, body, &app.limits).await?;
    let apart = Arc::clone(app);
    let found = read_apart(move || {
        let salt = read_hints(&apart, &body, &head.headers).salt;
        read(&apart, &body, salt.as_deref())
    });
    Ok(json_response(StatusCode::OK, &found.await?))
}

fn read_tokens(app: &App, body: &Value, salt: Option<&str>) -> Result<Value, ApiError> {
    let fields = Fields::root(body)?;
    let (prompt, field) = if fields.get("messages").is_some() {
        let talk = messages::read(&fields)?;
        (app.engine.chat_prompt(&talk, salt), "messages")
    } else {
        let text = fields.text("prompt")?.ok_or_else(|| {
            ApiError::param(
                "prompt",
                "prompt is missing; it is a string, or give messages",
            )
        })?;
        (app.engine.text_prompt(text, salt), "prompt")
    };
    let tokens = prompt.map_err(|error| error.of(field))?.tokens;
    let mut found = json!({
        "count": tokens.len(), "max_model_len": app.engine.card().max_len, "tokens": tokens,
    });
    if fields.flag("return_token_strs")?.unwrap_or(false) {
        let texts = tokens.iter().map(|token| {
            let bytes = app.engine.token_bytes(*token);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        found["token_strs"] = texts.collect();
    }
    Ok(found)
}
