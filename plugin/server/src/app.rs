//! The HTTP application: its state, its routes, and what every answer has in common.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, Response};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use rootstock::hints::Compat;

use crate::anthropic::reply::error_response;
use crate::anthropic::routes as anthropic;
use crate::chat::derived::Agents;
use crate::chat::stream::Signs;
use crate::config::HttpLimits;
use crate::control::{access, actions, flush, picture, programs, stats, storage, tree, why};
use crate::engine_port::{Engine, EngineCollector};
use crate::http::admin;
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::keys::Keys;
use crate::http::label;
use crate::http::lifecycle::{Lifecycle, Phase};
use crate::kind_retention::KindRetention;
use crate::metrics::Metrics;
use crate::openai::routes;
use crate::openai::tokens;
use crate::page;
use crate::request_trace::RequestTrace;
use crate::responses::routes as responses;
use crate::responses::store::Store;
use crate::spans::Spans;

/// Bytes of responses that are kept for `previous_response_id`.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// What all handlers share.
#[derive(Debug)]
pub struct App {
    /// Model, tokenizer and engine.
    pub engine: Arc<Engine>,
    /// Serving or going down.
    pub life: Arc<Lifecycle>,
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Limits of bodies and connections.
    pub limits: HttpLimits,
    /// Whose rule turns hints into a place in the queue.
    pub compat: Compat,
    /// Whether the billing line at the head of an agent's system prompt is left out.
    pub strip_preamble: bool,
    /// How often waiting streams show life.
    pub signs: Signs,
    /// Who may ask; everybody without.
    pub keys: Option<Keys>,
    /// What requests of agent programs tell by themselves, unless that is switched off.
    pub agents: Option<Arc<Agents>>,
    /// What parts of prompts are worth by their kind.
    pub kind_retention: KindRetention,
    /// Whether clients on this machine may attach and detach a storage tier.
    pub storage_control: bool,
    /// Tokens that an answer may have at most, whatever its request says.
    pub max_output_tokens: u32,
    /// Where ends of requests are written.
    pub request_trace: Option<Arc<RequestTrace>>,
    /// Where ends of requests become spans.
    pub spans: Option<Spans>,
    /// Responses that may be continued.
    pub responses: Mutex<Store>,
    /// Seconds since 1970 at the start.
    pub started_s: u64,
    start_nanos: u64,
    next_id: AtomicU64,
}

/// How requests are read and answered, beside the limits.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Whose rule turns hints into a place in the queue.
    pub compat: Compat,
    /// Whether the billing line at the head of an agent's system prompt is left out.
    pub strip_preamble: bool,
    /// How often waiting streams show life.
    pub signs: Signs,
    /// Who may ask; everybody without.
    pub keys: Option<Keys>,
    /// Whether hints are derived that nobody gave.
    pub derive_hints: bool,
    /// What parts of prompts are worth by their kind.
    pub kind_retention: KindRetention,
    /// Whether clients on this machine may attach and detach a storage tier.
    pub storage_control: bool,
    /// Tokens that an answer may have at most, whatever its request says.
    pub max_output_tokens: u32,
    /// Where ends of requests are written.
    pub request_trace: Option<Arc<RequestTrace>>,
    /// Where ends of requests become spans.
    pub spans: Option<Spans>,
}

impl Default for ApiOptions {
    fn default() -> Self {
        ApiOptions {
            compat: Compat::default(),
            strip_preamble: true,
            signs: Signs::default(),
            keys: None,
            derive_hints: true,
            kind_retention: KindRetention::default(),
            storage_control: false,
            max_output_tokens: u32::MAX,
            request_trace: None,
            spans: None,
        }
    }
}

impl App {
    /// A server that takes requests.
    pub fn new(engine: Engine, limits: HttpLimits) -> Arc<App> {
        App::with(engine, limits, ApiOptions::default())
    }

    /// As [`App::new`], with other rules.
    pub fn with(engine: Engine, limits: HttpLimits, options: ApiOptions) -> Arc<App> {
        App::of(engine.publishing(None), limits, options)
    }

    /// As [`App::with`], for an engine that is shared.
    pub fn of(engine: Arc<Engine>, limits: HttpLimits, options: ApiOptions) -> Arc<App> {
        let ApiOptions {
            compat,
            strip_preamble,
            signs,
            keys,
            derive_hints,
            kind_retention,
            storage_control,
            max_output_tokens,
            request_trace,
            spans,
        } = options;
        let lost = spans.as_ref().map(Spans::lost);
        Arc::new(App {
            metrics: Metrics::new(&engine.card().name, lost, EngineCollector::new(&engine)),
            engine,
            life: Arc::default(),
            limits,
            compat,
            strip_preamble,
            signs,
            keys,
            agents: derive_hints.then(Arc::default),
            kind_retention,
            storage_control,
            max_output_tokens,
            request_trace,
            spans,
            responses: Mutex::new(Store::new(RESPONSE_BYTES_MAX)),
            started_s: crate::clock::unix_seconds(),
            start_nanos: crate::clock::unix_nanos(),
            next_id: AtomicU64::new(1),
        })
    }

    /// An id for one answer, unlike any other of this or an earlier process.
    pub fn new_id(&self, prefix: &str) -> String {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:016x}{number:08x}", self.start_nanos)
    }

    /// True when requests are taken.
    pub fn is_ready(&self) -> bool {
        self.life.phase() == Phase::Serving && self.engine.alive()
    }

    /// All routes.
    pub fn router(self: &Arc<App>) -> Router {
        let everybodys = Router::new()
            .route("/flush_cache", post(flush::route))
            .route("/v1/kv/stats", get(stats::route))
            .route(
                "/v1/kv/storage",
                post(storage::attach).delete(storage::detach),
            )
            .route_layer(middleware::from_fn(access::from_this_machine));
        let near = middleware::from_fn_with_state(Arc::clone(self), access::near_or_with_key);
        let own = Router::new()
            .route("/v1/kv/actions", post(actions::route))
            .route("/v1/kv/picture", get(picture::route))
            .route("/v1/kv/programs", get(programs::route))
            .route("/v1/kv/tree", get(tree::route))
            .route("/v1/kv/why/{request}", get(why::route))
            .route_layer(near);
        Router::new()
            .merge(everybodys)
            .merge(own)
            .route("/", get(page::root))
            .route("/page/{file}", get(page::part))
            .route("/health", get(admin::health))
            .route("/ready", get(admin::ready))
            .route("/metrics", get(admin::metrics))
            .route("/openapi.json", get(admin::openapi))
            .route("/v1/models", get(admin::models))
            .route("/v1/models/{*name}", get(admin::model))
            .route("/v1/chat/completions", post(routes::chat))
            .route("/v1/completions", post(routes::completions))
            .route("/tokenize", post(tokens::tokenize))
            .route("/detokenize", post(tokens::detokenize))
            .route("/v1/responses", post(responses::create))
            .route(
                "/v1/responses/{id}",
                get(responses::get).delete(responses::delete),
            )
            .route("/v1/messages", post(anthropic::messages))
            .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
            .fallback(not_found)
            .method_not_allowed_fallback(method_not_allowed)
            .layer(middleware::from_fn_with_state(Arc::clone(self), check_key))
            .layer(middleware::from_fn_with_state(
                Arc::clone(self),
                label::follow,
            ))
            .with_state(Arc::clone(self))
    }
}

/// Paths that answer without a key: probes and what this is. Flushing is for this machine only.
const OPEN_PATHS: [&str; 5] = ["/", "/health", "/ready", "/flush_cache", "/openapi.json"];

/// With keys, whoever has none is told so before anything is read.
async fn check_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    let path = request.uri().path();
    let is_open = OPEN_PATHS.contains(&path) || path.starts_with(page::FOLDER);
    if let Some(keys) = app.keys.as_ref().filter(|_| !is_open) {
        let begins = request.method() == Method::POST;
        let tenant = keys.tenant(request.headers());
        let allowed = tenant.and_then(|tenant| if begins { tenant.begin() } else { Ok(()) });
        if let Err(error) = allowed {
            return refuse(&request, &error);
        }
    }
    next.run(request).await
}

async fn not_found(request: Request) -> Response<Body> {
    let message = format!(
        "no such path: {} {}",
        request.method(),
        request.uri().path()
    );
    refuse(&request, &ApiError::new(ErrorKind::NotFound, message))
}

async fn method_not_allowed(request: Request) -> Response<Body> {
    let message = format!(
        "{} does not take {}",
        request.uri().path(),
        request.method()
    );
    refuse(
        &request,
        &ApiError::new(ErrorKind::MethodNotAllowed, message),
    )
}

/// An error in the form of the API whose path it is.
fn refuse(request: &Request, error: &ApiError) -> Response<Body> {
    if request.uri().path().starts_with("/v1/messages") {
        error_response(error)
    } else {
        error.response()
    }
}
