//! `POST /v1/kv/actions`: verbs on cached content, each with its outcome.
//!
//! ```text
//! accepted   done for all pages            clipped   done for a leading part; the reason says why
//! deferred   copies are under way          missing   nothing of it is cached
//! rejected   not done; the reason says why
//! ```
//! A verb reaches what is cached under the caller's own salt, nothing else. It is carried out
//! between two steps of the engine; the answer comes when that is done.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, StatusCode};
use rootstock::ServingCore;
use rootstock::memory::ReplicaId;
use rootstock::radix::{
    ActReason, Action, Key, NamespaceId, NamespaceKey, NodeRef, Outcome, Target as Content, Token,
};
use rootstock_engine::service::Visit;
use serde_json::{Value, json};

use crate::app::App;
use crate::chat::ahead::Ahead;
use crate::chat::conversation::Conversation;
use crate::control::access::Caller;
use crate::control::envelope::{self, Destination, Envelope, Target, Verb, Wanted};
use crate::control::in_request;
use crate::engine_port::{Engine, TENANT, engine_dead, scoped};
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
            let caller = Caller::of(&app, &head.headers, stated);
            answer(&app, value.get("kv_hints").unwrap_or(&value), &caller).await
        }
        Err(error) => Err(error),
    };
    match answered {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(error) => error.response(),
    }
}

async fn answer(app: &App, body: &Value, caller: &Caller) -> Result<Value, ApiError> {
    outcomes(app, envelope::read(body, false)?, caller).await
}

/// Carries out an envelope, action by action.
///
/// # Errors
/// The engine is gone.
pub async fn outcomes(app: &App, envelope: Envelope, caller: &Caller) -> Result<Value, ApiError> {
    let mut outcomes = Vec::with_capacity(envelope.actions.len());
    for asked in envelope.actions {
        let (status, mut outcome) = match asked.what {
            Err(reason) => ("rejected", json!({"reason": reason})),
            Ok(wanted) if wanted.target == Target::Own => in_request::own_outcome(wanted.verb),
            Ok(wanted) => carry_out(app, wanted, caller).await?,
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

async fn carry_out(app: &App, wanted: Wanted, caller: &Caller) -> Result<Told, ApiError> {
    let salt = caller.salt.clone();
    let program = match (&wanted.verb, &wanted.target) {
        (Verb::Prefetch { compute: true, .. }, Target::Messages(fields)) => {
            conversation(fields).ok()
        }
        _ => None,
    };
    let about = match about(app, wanted.target, salt.as_deref()) {
        Ok(about) => about,
        Err(told) => return Ok(told),
    };
    let mut verb = wanted.verb;
    if let Verb::Retain { priority, .. } = &mut verb {
        *priority = (*priority).min(caller.priority_max);
    }
    let service = app.engine.service();
    let scope = salt.clone();
    let told = service.visit(move |at| act(at, verb, about, scope)).await;
    let told = told.map_err(|_| engine_dead())?;
    Ok(match program {
        Some(talk) => computed_ahead(app, talk, salt, told),
        None => told,
    })
}

/// What every prompt of a program begins with is computed, as far as it is not cached.
fn computed_ahead(app: &App, talk: Conversation, salt: Option<String>, told: Told) -> Told {
    let begun = Ahead::begin_with(&app.engine, talk, salt);
    let (status, mut outcome) = told;
    outcome["computed_ahead"] = begun.into();
    match status {
        "missing" | "clipped" if begun => ("deferred", outcome),
        _ => (status, outcome),
    }
}

enum About {
    Tokens(Vec<Token>),
    Node(NodeRef),
    Hashes(Vec<u64>),
    /// By name, and by the last prompt as long as no request of it has ended.
    Session(String, Option<Arc<[Token]>>),
}

fn about(app: &App, target: Target, salt: Option<&str>) -> Result<About, Told> {
    match target {
        Target::Tokens(tokens) => Ok(About::Tokens(tokens)),
        Target::Hashes(hashes) => Ok(About::Hashes(hashes)),
        Target::Node(node) => Ok(About::Node(node)),
        Target::Session(name) => {
            let prompt = app.engine.sessions().prompt(salt, &name);
            Ok(About::Session(name, prompt))
        }
        Target::Messages(fields) => match rendered(app, &fields, salt) {
            Ok(tokens) => Ok(About::Tokens(tokens)),
            Err(reason) => Err(("rejected", json!({"reason": reason}))),
        },
        Target::Own => Err(("rejected", json!({"reason": "a target is wanted"}))),
    }
}

fn conversation(fields: &Value) -> Result<Conversation, String> {
    let fields = Fields::root(fields).map_err(|error| error.message)?;
    messages::read(&fields).map_err(|error| error.message)
}

/// A conversation as a chat request would have it, in tokens.
fn rendered(app: &App, fields: &Value, salt: Option<&str>) -> Result<Vec<Token>, String> {
    let talk = conversation(fields)?;
    let prompt = app.engine.chat_prompt(&talk, salt);
    let prompt = prompt.map_err(|error| format!("messages cannot be used: {error}"))?;
    Ok(prompt.tokens)
}

fn act(at: Visit<'_>, verb: Verb, about: About, salt: Option<String>) -> Told {
    let scope = salt.clone();
    let name = NamespaceKey {
        salt,
        ..at.namespace.clone()
    };
    let Ok(ns) = at.core.namespace(&name) else {
        let reason = "no further salt can be kept now; ask again when requests have ended";
        return ("rejected", json!({"reason": reason}));
    };
    let cache = at.core.cache();
    let mut asked_pages = None;
    let (target, cached_pages) = match about {
        About::Tokens(tokens) => prefix(at.core, ns, tokens),
        About::Node(node) => match cache.tokens_of_node(ns, node) {
            Some(tokens) => prefix(at.core, ns, tokens),
            None => {
                let reason = format!("node {node} is not cached any more");
                return ("missing", json!({"pages": 0, "reason": reason}));
            }
        },
        About::Hashes(hashes) => {
            asked_pages = Some(hashes.len() as u64);
            prefix(at.core, ns, cache.tokens_of_hashes(ns, &hashes))
        }
        About::Session(name, prompt) => {
            let known = cache.find_program(TENANT, ns, &scoped(scope.as_deref(), &name));
            match (known, prompt) {
                (Some(program), _) if cache.program_pages(program) > 0 => {
                    (Content::Program(program), cache.program_pages(program))
                }
                (_, Some(tokens)) => prefix(at.core, ns, tokens.to_vec()),
                (Some(program), None) if releases_children(verb) => (Content::Program(program), 0),
                (Some(_), None) => {
                    let reason = format!("nothing of {name:?} is cached any more");
                    return ("missing", json!({"pages": 0, "reason": reason}));
                }
                (None, None) => {
                    let reason = format!("no request of {name:?} was seen lately");
                    return ("missing", json!({"pages": 0, "reason": reason}));
                }
            }
        }
    };
    let children = match target {
        Content::Program(program) if releases_children(verb) => cache.program_descendants(program),
        Content::Program(_) | Content::Prefix { .. } => BTreeSet::new(),
    };
    let action = match action(at.core, verb, target) {
        Ok(action) => action,
        Err(reason) => return ("rejected", json!({"reason": reason})),
    };
    let outcome = at.core.act(TENANT, &action, at.now);
    let mut told = told(outcome, cached_pages, asked_pages);
    if releases_children(verb) {
        let below = children.into_iter().map(|child| {
            let action = action.on(Content::Program(child));
            match at.core.act(TENANT, &action, at.now) {
                Outcome::Accepted { pages } | Outcome::Clipped { pages, .. } => pages,
                Outcome::Deferred { .. } | Outcome::Rejected(_) | Outcome::Missing => 0,
            }
        });
        let below: Vec<u32> = below.collect();
        told.1["children"] = json!({"programs": below.len(), "pages": below.iter().sum::<u32>()});
    }
    told
}

const fn releases_children(verb: Verb) -> bool {
    matches!(verb, Verb::Release { children: true })
}

/// A verb as the core knows it.
fn action(core: &ServingCore, verb: Verb, target: Content) -> Result<Action, String> {
    let to_replica = |to: Destination| match (to, &target) {
        (Destination::Host, _) => None,
        (Destination::DeviceOf(rank), _) => Some(ReplicaId(rank)),
        (Destination::Device, Content::Program(id)) => core.cache().program_replica(*id),
        (Destination::Device, Content::Prefix { .. }) => Some(ReplicaId(0)),
    };
    Ok(match verb {
        Verb::Pin(ttl) => Action::Pin { target, ttl },
        Verb::Retain { priority, seconds } => Action::Retain {
            target,
            priority,
            seconds,
        },
        Verb::Prefetch { to, .. } => {
            let replica = to_replica(to);
            let replicas = core.config().replicas();
            if let Some(ReplicaId(rank)) = replica.filter(|to| usize::from(to.0) >= replicas) {
                return Err(format!("dp_rank is {rank}; there are {replicas} replicas"));
            }
            Action::Prefetch { target, replica }
        }
        Verb::Demote => Action::Demote { target },
        Verb::Release { .. } => Action::Release { target },
    })
}

/// A session waits for one that has just ended: what it needs is brought up, unless it runs.
pub async fn expect_session(engine: &Engine, name: &str, salt: Option<&str>) {
    let prompt = engine.sessions().prompt(salt, name);
    let (name, salt) = (name.to_owned(), salt.map(str::to_owned));
    let visit = move |at: Visit<'_>| {
        let own_name = scoped(salt.as_deref(), &name);
        let cache = at.core.cache();
        let waits = cache.programs_named(TENANT, &own_name).any(|id| {
            let known = cache.program_stats(id);
            known.is_some_and(|known| known.running == 0 && !known.done)
        });
        let verb = Verb::Prefetch {
            to: Destination::Device,
            compute: false,
        };
        if waits {
            let _what_is_gone_needs_nothing = act(at, verb, About::Session(name, prompt), salt);
        }
    };
    // A lost engine is told by requests.
    let _lost = engine.service().visit(visit).await;
}

/// A prefix, and how many pages of it some tier has.
fn prefix(core: &ServingCore, ns: NamespaceId, tokens: Vec<Token>) -> (Content, u32) {
    let key = Key {
        ns,
        tokens: &tokens,
    };
    let cached_tokens = core.cache().nearest(key).cached_tokens;
    let pages = cached_tokens / core.config().cache.page_tokens;
    (Content::Prefix { ns, tokens }, pages)
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
