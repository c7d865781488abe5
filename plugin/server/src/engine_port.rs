//! The one file of the server that knows the engine: prompts become tokens, jobs become tickets,
//! tokens become text, refusals become API errors.

mod grammar;
mod prompt;

use std::fmt;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rootstock::radix::{Hints, NamespaceKey, TenantId, Token};
use rootstock::scheduler::{CachedTokens, SamplingParams};
use rootstock_engine::constrained::{GrammarError, GrammarMaker};
use rootstock_engine::gguf::Gguf;
use rootstock_engine::history::History;
use rootstock_engine::service::{FlushError, Service, Submission, SubmitError, Visit};
use rootstock_engine::template::{ChatTemplate, TemplateError};
use rootstock_engine::text;
use rootstock_engine::tokenizer::{Tokenizer, TokenizerError};

pub use prompt::{Prompt, PromptError};
pub use rootstock_engine::constrained::Grammar;
pub use rootstock_engine::history::AnswerPlace;
pub use rootstock_engine::service::Event;

use crate::chat::ahead::{Ahead, Claim};
use crate::control::memory::Memory;
use crate::control::sessions::Sessions;
use crate::control::why::{Asked, Finding};
use crate::engine_metrics;
use crate::http::api_error::{ApiError, ErrorKind};
use crate::http::lifecycle::draining;
use crate::kv_events::publisher::Publisher;
use crate::tools::speech::Rules;
use crate::tools::style::{MARKERS, Style};

/// In whose name the server acts: what is whose is told by namespaces.
pub const TENANT: TenantId = TenantId(0);

/// Bytes of emitted tokens kept for later turns: some 10 million tokens.
const HISTORY_BYTES_MAX: usize = 64 << 20;
/// Sessions whose last prompt is kept, and tokens of all of those.
const SESSIONS_MAX: usize = 4096;
const SESSION_TOKENS_MAX: usize = 8 << 20;

/// What clients are told about the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// The model's name.
    pub name: String,
    /// Prompt and answer together, in tokens.
    pub max_len: u32,
    /// Number of tokens the model knows.
    pub vocab: u32,
    /// `system_fingerprint` of answers: changes when the same request may give another text.
    pub fingerprint: String,
}

/// One answer to generate.
#[derive(Clone, Debug)]
pub struct Job {
    /// The prompt.
    pub tokens: Vec<Token>,
    /// Output tokens at most.
    pub max_tokens: u32,
    /// Output tokens before which no stop token ends the answer.
    pub min_tokens: u32,
    /// Generate on through the model's own end tokens.
    pub ignore_eos: bool,
    /// Strings that end the answer and are cut from it.
    pub stop: Vec<String>,
    /// The caller's own stop tokens.
    pub stop_tokens: Vec<Token>,
    /// What the answer's text is read as.
    pub rules: Rules,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// What the answer has to be.
    pub grammar: Option<Grammar>,
    /// What the caller knows about the request.
    pub hints: Hints,
    /// Isolation key.
    pub salt: Option<String>,
}

/// Model, tokenizer, template and running engine.
pub struct Engine {
    service: Service,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    style: Style,
    /// Made when the first grammar is asked for.
    grammar_maker: OnceLock<Result<GrammarMaker, GrammarError>>,
    history: History,
    card: Card,
    kv_events: Option<Publisher>,
    sessions: Sessions,
    memory: Arc<Memory>,
    ahead: Arc<Ahead>,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("card", &self.card)
            .finish_non_exhaustive()
    }
}

/// A model file without a usable tokenizer or chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// The chat template.
    #[error("chat template: {0}")]
    Template(#[from] TemplateError),
}

impl Engine {
    /// Joins a running service with the text side of its model file.
    ///
    /// # Errors
    /// When the file has no tokenizer, or one that is not supported.
    pub fn new(service: Service, file: &Gguf) -> Result<Engine, TextError> {
        let tokenizer = Arc::new(Tokenizer::from_gguf(file)?);
        let info = service.model_info();
        let card = Card {
            name: info.name.clone(),
            max_len: info.max_model_len,
            vocab: info.vocab.min(tokenizer.vocabulary_len()),
            fingerprint: format!("rootstock-{}", info.numerics_id),
        };
        // Without a template the model still completes.
        let template = match ChatTemplate::from_gguf(file, &tokenizer) {
            Ok(template) => Some(template),
            Err(TemplateError::Absent) => None,
            Err(error) => return Err(error.into()),
        };
        let style = style_of(template.as_ref(), &tokenizer, card.vocab);
        let history = History::new(HISTORY_BYTES_MAX);
        Ok(Engine {
            service,
            tokenizer,
            template,
            style,
            grammar_maker: OnceLock::new(),
            history,
            card,
            kv_events: None,
            sessions: Sessions::new(SESSIONS_MAX, SESSION_TOKENS_MAX),
            memory: Arc::default(),
            ahead: Arc::default(),
        })
    }

    /// With another chat template than the model file's.
    ///
    /// # Errors
    /// It does not compile.
    pub fn with_template(self, source: &str) -> Result<Engine, TextError> {
        let template = Some(ChatTemplate::of_model(source, &self.tokenizer)?);
        Ok(Engine {
            style: style_of(template.as_ref(), &self.tokenizer, self.card.vocab),
            template,
            ..self
        })
    }

    /// Keeps the publisher that the service feeds, and asks for full accounts on its behalf.
    #[must_use]
    pub fn publishing(self, kv_events: Option<Publisher>) -> Arc<Engine> {
        let engine = Arc::new(Engine { kv_events, ..self });
        if let Some(publisher) = &engine.kv_events {
            let weak = Arc::downgrade(&engine);
            publisher.spawn_accounts(move || Some(weak.upgrade()?.service.tell_all_cached()));
        }
        engine
    }

    /// Explains misses with what `memory` hears of the service.
    #[must_use]
    pub fn remembering(self, memory: Arc<Memory>) -> Engine {
        Engine { memory, ..self }
    }

    /// What explains misses.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// What is computed ahead for turns to come.
    pub fn ahead(&self) -> &Ahead {
        &self.ahead
    }

    /// The last prompts of sessions.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// The publisher of cache events.
    pub fn kv_events(&self) -> Option<&Publisher> {
        self.kv_events.as_ref()
    }

    /// What clients are told about the model.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// How the model writes calls and thoughts.
    pub fn style(&self) -> &Style {
        &self.style
    }

    /// The running engine.
    pub fn service(&self) -> &Service {
        &self.service
    }

    /// False once the engine is lost.
    pub fn alive(&self) -> bool {
        self.service.alive()
    }

    /// Empties the cache.
    ///
    /// # Errors
    /// `Conflict` when something runs; then nothing has changed.
    pub async fn flush(&self) -> Result<(), ApiError> {
        let service = self.service.clone();
        let flushed = tokio::task::spawn_blocking(move || service.flush()).await;
        match flushed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(FlushError::EngineDead)) | Err(_) => Err(engine_dead()),
            Ok(Err(refused)) => Err(ApiError::new(ErrorKind::Conflict, refused.to_string())),
        }
    }

    /// Queues an answer.
    ///
    /// # Errors
    /// Whatever refuses it; nothing is kept of it then.
    pub async fn submit(&self, mut job: Job) -> Result<Ticket, ApiError> {
        let stop_tokens = self.stop_tokens(&job);
        if let Some(session) = &job.hints.program {
            self.sessions
                .note(job.salt.as_deref(), session, &job.tokens);
        }
        let claim = self.ahead.arrived(job.salt.as_deref(), &job.tokens);
        for name in [&mut job.hints.program, &mut job.hints.parent] {
            *name = name.take().map(|name| scoped(job.salt.as_deref(), &name));
        }
        let why = self.why(&job).await;
        let submission = Submission {
            min_tokens: job.min_tokens,
            stop_tokens,
            sampling: job.sampling,
            grammar: job.grammar,
            hints: job.hints,
            salt: job.salt,
            tenant: TENANT,
            ..Submission::new(job.tokens, job.max_tokens)
        };
        let ticket = self
            .service
            .submit_async(submission)
            .await
            .map_err(refusal)?;
        let claim = claim.map(|claim| (Arc::clone(&self.ahead), claim));
        Ok(Ticket { ticket, why, claim })
    }

    /// What of the prompt is cached now, and why not more.
    async fn why(&self, job: &Job) -> Option<Finding> {
        let (tokens, spans) = (job.tokens.clone(), job.hints.spans.clone());
        let (salt, memory) = (job.salt.clone(), Arc::clone(&self.memory));
        let session = job.hints.program.clone();
        let page_bytes = self.service.model_info().page_bytes;
        let tokenizer = Arc::clone(&self.tokenizer);
        let look = move |at: Visit<'_>| {
            let name = NamespaceKey {
                salt: salt.clone(),
                ..at.namespace.clone()
            };
            let text_of = |tokens: &[Token]| {
                let bytes = tokens
                    .iter()
                    .flat_map(|token| tokenizer.token_bytes(*token));
                String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned()
            };
            let asked = Asked {
                ns: at.core.namespace(&name).ok()?,
                salt: salt.as_deref(),
                session: session.as_deref(),
                tokens: &tokens,
                spans: &spans,
                page_bytes,
                text_of: &text_of,
            };
            Some(memory.find(at.core.cache(), asked, at.now))
        };
        self.service.visit(look).await.ok().flatten()
    }

    /// `ignore_eos` is about the model's own end tokens, not about the caller's.
    fn stop_tokens(&self, job: &Job) -> Vec<Token> {
        let mut stop_tokens = job.stop_tokens.clone();
        if !job.ignore_eos {
            stop_tokens.extend(self.tokenizer.end_tokens());
        }
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        stop_tokens
    }

    /// The text side of an answer.
    pub fn text_stream(&self, job: &Job) -> TextStream {
        TextStream {
            tokenizer: Arc::clone(&self.tokenizer),
            stream: text::TextStream::new(&job.stop),
            stops: job.stop.clone(),
            stop_tokens: self.stop_tokens(job),
            shown: if job.rules.is_plain() {
                Vec::new()
            } else {
                self.style.shown.clone()
            },
        }
    }

    /// The bytes a token stands for; control tokens as their text.
    pub fn token_bytes(&self, token: Token) -> Vec<u8> {
        self.tokenizer.token_bytes(token).to_vec()
    }

    /// The text of tokens, as an answer shows it.
    pub fn text_of(&self, tokens: &[Token]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// Keeps a finished answer for prompts to come.
    pub fn remember(&self, place: AnswerPlace, ids: &[Token]) {
        self.history.record(place, ids);
    }
}

/// The name under which the core knows a session: those of two salts are never one.
pub fn scoped(salt: Option<&str>, session: &str) -> String {
    match salt {
        Some(salt) => format!("{}:{salt}/{session}", salt.len()),
        None => session.to_owned(),
    }
}

/// An answer in the engine. Dropping it stops the work.
#[derive(Debug)]
pub struct Ticket {
    ticket: rootstock_engine::service::Ticket,
    why: Option<Finding>,
    /// What was computed ahead for it.
    claim: Option<(Arc<Ahead>, Claim)>,
}

impl Ticket {
    /// The answer has begun, with so much of its prompt cached.
    pub fn started(&self, cached: CachedTokens) {
        if let Some((ahead, claim)) = &self.claim {
            ahead.used(*claim, cached);
        }
    }

    /// The events of the answer.
    pub fn events(&self) -> flume::Receiver<Event> {
        self.ticket.events.clone()
    }

    /// What was found of its prompt in the cache, and why not more.
    pub fn why(&self) -> Option<&Finding> {
        self.why.as_ref()
    }

    /// Lets go of an answer that has ended here. When a stop string ended it, the engine learns
    /// that it ended well: what was computed stays in the cache.
    pub fn close(self, by_stop_string: bool) {
        if by_stop_string {
            self.ticket.finish();
        }
    }
}

/// Tokens to text: certain pieces, stop strings, nothing of stop tokens.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    stream: text::TextStream,
    stops: Vec<String>,
    stop_tokens: Vec<Token>,
    /// Control tokens whose text counts, ascending.
    shown: Vec<Token>,
}

/// What a token brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that is certain; empty when there is none.
    pub text: String,
    /// The stop string that ended the answer.
    pub stop: Option<String>,
    /// The token is a stop token: the end of the answer, and no part of it.
    pub is_end: bool,
}

impl TextStream {
    /// Takes one token.
    pub fn push(&mut self, token: Token) -> Piece {
        if self.stop_tokens.binary_search(&token).is_ok() {
            return Piece {
                is_end: true,
                ..Piece::default()
            };
        }
        let bytes = if self.shown.binary_search(&token).is_ok() {
            self.tokenizer.token_bytes(token)
        } else {
            self.tokenizer.visible_bytes(token)
        };
        let piece = self.stream.push(bytes);
        let stop = piece.stop.and_then(|index| self.stops.get(index).cloned());
        Piece {
            text: piece.text.unwrap_or_default(),
            stop,
            is_end: false,
        }
    }

    /// What was held back, once the answer is over.
    pub fn finish(&mut self) -> String {
        self.stream.finish().unwrap_or_default()
    }
}

/// Adds what the engine counts to the metrics, as of each scrape.
#[derive(Debug)]
pub struct EngineCollector(Arc<Engine>);

impl EngineCollector {
    /// A collector over this engine.
    pub fn new(engine: &Arc<Engine>) -> EngineCollector {
        EngineCollector(Arc::clone(engine))
    }
}

impl Collector for EngineCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let publisher = self.0.kv_events.as_ref().map(Publisher::state);
        let (stats, ahead) = (self.0.service.stats(), self.0.ahead.stats());
        engine_metrics::encode(encoder, &stats, &ahead, publisher.as_ref())
    }
}

/// How a model writes, from the words of its template and the control tokens it has for them.
fn style_of(template: Option<&ChatTemplate>, tokenizer: &Tokenizer, vocab: u32) -> Style {
    let mut style = Style::of(template.map_or("", ChatTemplate::source));
    style.shown = (0..vocab)
        .filter(|id| tokenizer.visible_bytes(*id).is_empty())
        .filter(|id| {
            let text = str::from_utf8(tokenizer.token_bytes(*id)).unwrap_or_default();
            MARKERS.contains(&text)
        })
        .collect();
    style
}

pub(crate) fn engine_dead() -> ApiError {
    ApiError::new(
        ErrorKind::EngineDead,
        "the engine has stopped; restart the server",
    )
}

fn refusal(error: SubmitError) -> ApiError {
    let message = error.to_string();
    match error {
        SubmitError::Deferred { retry_after_s, .. } => {
            ApiError::new(ErrorKind::Overloaded, message).retry_after(retry_after_s.max(1))
        }
        SubmitError::Rejected(_) => ApiError::new(ErrorKind::ContextLength, message),
        SubmitError::NoGrammars => ApiError::new(ErrorKind::Unsupported, message),
        SubmitError::Draining => draining(),
        SubmitError::EngineDead => engine_dead(),
        SubmitError::Namespace(_) => ApiError::new(ErrorKind::Overloaded, message).retry_after(5),
        SubmitError::Token { .. } | SubmitError::Parameter { .. } => {
            ApiError::new(ErrorKind::BadRequest, message)
        }
        _ => ApiError::new(ErrorKind::BadRequest, message),
    }
}
