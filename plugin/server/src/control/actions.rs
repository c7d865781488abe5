//! `POST /v1/kv/actions`: verbs on cached content, each with its outcome.
//!
//! ```text
//! accepted   done for all pages            clipped   done for a leading part; the reason says why
//! deferred   copies are under way          missing   nothing of it is cached
//! rejected   not done; the reason says why
//! ```
//! A verb reaches what is cached under the caller's own salt, nothing else. It is carried out
//! between two steps of the engine; the answer comes when that is done.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use rootstock::memory::ReplicaId;
use rootstock::radix::{
    ActReason, Action, Key, NamespaceKey, Outcome, Target as Content, TenantId, Token,
};
use rootstock_engine::service::Visit;
use serde_json::{Value, json};

use crate::app::App;
use crate::control::access;
use crate::control::envelope::{self, Target, Verb, Wanted};
use crate::engine_port::engine_dead;
use crate::http::api_error::{ApiError, json_response};
use crate::http::body;
use crate::openai::fields::Fields;
use crate::openai::messages;

/// The route.
pub async fn route(State(app): State<Arc<App>>, request: Request) -> Response<Body> {
    let (head, incoming) = request.into_parts();
    let read = body::read_json(&head.headers, incoming, &app.limits).await;
    let answered = match read {
        Ok(value) => {
            let stated = value.get("cache_salt").and_then(Value::as_str);
            let salt = access::salt(&head.headers, stated);
            answer(&app, value.get("kv_hints").unwrap_or(&value), salt).await
        }
        Err(error) => Err(error),
    };
    match answered {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(error) => error.response(),
    }
}

/// Carries out an envelope for a salt.
///
/// # Errors
/// The envelope has not its form, or the engine is gone.
pub async fn answer(app: &App, body: &Value, salt: Option<String>) -> Result<Value, ApiError> {
    let envelope = envelope::read(body)?;
    let mut outcomes = Vec::with_capacity(envelope.actions.len());
    for asked in envelope.actions {
        let (status, mut outcome) = match asked.what {
            Err(reason) => ("rejected", json!({"reason": reason})),
            Ok(wanted) => carry_out(app, wanted, salt.clone()).await?,
        };
        outcome["action_id"] = asked.id.into();
        outcome["status"] = status.into();
        outcomes.push(outcome);
    }
    Ok(json!({
        "protocol_version": "0.1", "message_id": envelope.message_id, "outcomes": outcomes,
    }))
}

type Told = (&'static str, Value);

async fn carry_out(app: &App, wanted: Wanted, salt: Option<String>) -> Result<Told, ApiError> {
    let about = match about(app, wanted.target, salt.as_deref()) {
        Ok(about) => about,
        Err(told) => return Ok(told),
    };
    let verb = wanted.verb;
    let service = app.engine.service();
    let told = service.visit(move |at| act(at, verb, about, salt)).await;
    told.map_err(|_| engine_dead())
}

enum About {
    Tokens(Vec<Token>),
    Hashes(Vec<u64>),
}

fn about(app: &App, target: Target, salt: Option<&str>) -> Result<About, Told> {
    match target {
        Target::Tokens(tokens) => Ok(About::Tokens(tokens)),
        Target::Hashes(hashes) => Ok(About::Hashes(hashes)),
        Target::Session(name) => {
            let known = app.engine.sessions().prompt(salt, &name);
            let known = known.map(|tokens| About::Tokens(tokens.to_vec()));
            known.ok_or_else(|| {
                let reason = format!("no request of {name:?} was seen lately");
                ("missing", json!({"pages": 0, "reason": reason}))
            })
        }
        Target::Messages(fields) => match rendered(app, &fields, salt) {
            Ok(tokens) => Ok(About::Tokens(tokens)),
            Err(reason) => Err(("rejected", json!({"reason": reason}))),
        },
    }
}

/// A conversation as a chat request would have it, in tokens.
fn rendered(app: &App, fields: &Value, salt: Option<&str>) -> Result<Vec<Token>, String> {
    let fields = Fields::root(fields).map_err(|error| error.message)?;
    let talk = messages::read(&fields).map_err(|error| error.message)?;
    let prompt = app.engine.chat_prompt(&talk, salt);
    let prompt = prompt.map_err(|error| format!("messages cannot be used: {error}"))?;
    Ok(prompt.tokens)
}

fn act(at: Visit<'_>, verb: Verb, about: About, salt: Option<String>) -> Told {
    let name = NamespaceKey {
        salt,
        ..at.namespace.clone()
    };
    let Ok(ns) = at.core.namespace(&name) else {
        let reason = "no further salt can be kept now; ask again when requests have ended";
        return ("rejected", json!({"reason": reason}));
    };
    let (tokens, asked_pages) = match about {
        About::Tokens(tokens) => (tokens, None),
        About::Hashes(hashes) => {
            let tokens = at.core.cache().tokens_of_hashes(ns, &hashes);
            (tokens, Some(hashes.len() as u64))
        }
    };
    let replicas = at.core.config().replicas();
    let key = Key {
        ns,
        tokens: &tokens,
    };
    let cached_tokens = at.core.cache().nearest(key).cached_tokens;
    let cached_pages = cached_tokens / at.core.config().cache.page_tokens;
    let target = Content::Prefix { ns, tokens };
    let action = match verb {
        Verb::Pin(ttl) => Action::Pin { target, ttl },
        Verb::Retain { priority, seconds } => Action::Retain {
            target,
            priority,
            seconds,
        },
        Verb::Prefetch { rank } if usize::from(rank) < replicas => Action::Prefetch {
            target,
            replica: ReplicaId(rank),
        },
        Verb::Prefetch { rank } => {
            let reason = format!("dp_rank is {rank}; there are {replicas} replicas");
            return ("rejected", json!({"reason": reason}));
        }
        Verb::Demote => Action::Demote { target },
        Verb::Release => Action::Release { target },
    };
    let outcome = at.core.act(TenantId(0), &action, at.now);
    told(outcome, cached_pages, asked_pages)
}

fn told(outcome: Outcome, cached_pages: u32, asked: Option<u64>) -> Told {
    match outcome {
        Outcome::Accepted { pages } => match asked.filter(|&asked| asked > pages.into()) {
            Some(asked) => ("clipped", clipped(pages, asked, cached_pages)),
            None => ("accepted", json!({"pages": pages})),
        },
        Outcome::Clipped { pages, asked_pages } => {
            let asked = asked.unwrap_or_else(|| asked_pages.into());
            ("clipped", clipped(pages, asked, cached_pages))
        }
        Outcome::Deferred { pages } => {
            let reason = "copies are under way; it takes effect when they are done";
            ("deferred", json!({"pages": pages, "reason": reason}))
        }
        Outcome::Rejected(reason) => ("rejected", json!({"reason": reason_text(reason)})),
        Outcome::Missing => {
            let reason = if cached_pages == 0 {
                "nothing of it is cached"
            } else {
                "what is cached of it is not of the kind that the action is about"
            };
            ("missing", json!({"pages": 0, "reason": reason}))
        }
    }
}

fn clipped(pages: u32, asked: u64, cached_pages: u32) -> Value {
    let reason = if pages >= cached_pages {
        format!("only {cached_pages} of {asked} pages are cached")
    } else {
        format!("the budget ends at {pages} of {cached_pages} cached pages")
    };
    json!({"pages": pages, "asked_pages": asked, "reason": reason})
}

fn reason_text(reason: ActReason) -> String {
    match reason {
        ActReason::Unsupported => "this version does not do that with such a target".into(),
        ActReason::ZeroTtl => "a ttl of 0 seconds pins nothing".into(),
        ActReason::Budget => "the pin budget is used up; release or wait for other pins".into(),
        other => format!("{other:?}"),
    }
}
