//! Why a prompt, or a part of it, was not in the cache; for `cache_report` and `GET /v1/kv/why`.
//!
//! The finding is made when a request comes, before it computes anything: where its prompt leaves
//! what is cached, inside which part of the conversation, and what went that would have helped.
//! Of what others have cached nothing is shown, not a token: only where a prompt leaves it.

use std::ops::Range;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::memory::Nanos;
use rootstock::radix::{
    ContextKind, EventTier, Ghost, Ghosts, Key, NamespaceId, Nearest, PrefixCache, Token,
};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::access::Caller;
use crate::control::memory::FINDINGS_MAX;
use crate::control::query::parameter;
use crate::http::api_error::{ApiError, ErrorKind, json_response};
use crate::metrics::asked::kind_name;

/// Tokens that have to agree for one text to go on where another one is.
const AGREE: usize = 16;
/// How far ahead in a prompt the cached text is looked for, in tokens.
const LOOK_AHEAD: usize = 4096;
/// Tokens beside a place that tell whether it is amid thoughts.
const NEAR: usize = 16;
const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Why tokens were not found.
#[derive(Clone, Debug, PartialEq)]
pub enum Cause {
    /// All whole pages of the prompt were cached.
    Nothing,
    /// Nothing like it was computed before, as far as is known.
    New,
    /// The cache was emptied.
    Flushed {
        /// Seconds ago.
        ago_s: f64,
    },
    /// What is cached goes on with another token.
    Diverged {
        /// The first token that differs.
        at: u32,
        /// How.
        change: Change,
    },
    /// It was cached and had to go.
    Evicted {
        /// The first token that is gone.
        at: u32,
        /// From where it went last.
        tier: &'static str,
        /// Seconds ago.
        ago_s: f64,
        /// Pages that the tier would have needed more to keep all of it.
        pages_short: u64,
        /// For whom room was made.
        by: Option<Evictor>,
    },
    /// Its last request asked for it to be dropped.
    Dropped {
        /// The first token that is gone.
        at: u32,
        /// Seconds ago.
        ago_s: f64,
    },
}

/// How a prompt differs from what is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Something else stands there.
    Replaced,
    /// What is cached goes on behind so many tokens that are new.
    Inserted(u32),
    /// The prompt goes on behind so many cached tokens that it leaves out.
    LeftOut(u32),
    /// Both go on further behind: parts have changed places.
    Moved,
    /// Thoughts of the model that the prompt does not repeat.
    ThinkingLeftOut,
}

/// A request that needed room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evictor {
    /// It has the same salt; of others nothing is told.
    pub is_own: bool,
    /// Its session or program.
    pub session: Option<String>,
    /// Tokens of its prompt.
    pub prompt_tokens: Option<u32>,
}

/// What was found about a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Whole pages of it that some tier had, in tokens.
    pub cached_tokens: u32,
    /// Why not more.
    pub cause: Cause,
    /// The part of the conversation in which that begins.
    pub kind: ContextKind,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// What came of `kv_hints` in the request.
    pub kv_hints: Option<Value>,
}

/// A prompt that is asked about.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// Its namespace.
    pub ns: NamespaceId,
    /// The salt of that.
    pub salt: Option<&'a str>,
    /// Its session or program.
    pub session: Option<&'a str>,
    /// Its tokens.
    pub tokens: &'a [Token],
    /// What its parts are.
    pub spans: &'a [(Range<u32>, ContextKind)],
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The text of tokens.
    pub text_of: &'a dyn Fn(&[Token]) -> String,
}

/// Looks a prompt up. Changes nothing.
pub fn find(
    cache: &PrefixCache,
    ghosts: &Ghosts,
    prompt: Asked<'_>,
    now: Nanos,
    evictor: impl Fn(Nanos) -> Option<Evictor>,
) -> Finding {
    let key = Key {
        ns: prompt.ns,
        tokens: prompt.tokens,
    };
    let nearest = cache.nearest(key);
    let page_tokens = cache.tokens_a_page();
    let stored = cache.stored_of(key);
    let prompt_tokens = count(prompt.tokens.len());
    let cached_tokens = nearest.cached_tokens + stored;
    let whole = prompt_tokens / page_tokens * page_tokens;
    let ago_s = |then: Nanos| now.saturating_sub(then) as f64 / 1e9;
    let missing = (cached_tokens / page_tokens) as usize;
    let gone: Vec<Ghost> = if cached_tokens < whole {
        let hashes = cache.page_hashes(key).into_iter().skip(missing);
        hashes.map_while(|hash| ghosts.of(hash)).collect()
    } else {
        Vec::new()
    };
    let at = cached_tokens;
    let cause = if cached_tokens >= whole {
        Cause::Nothing
    } else if let Some(ghost) = gone.first() {
        let ago_s = ago_s(ghost.at);
        if ghost.ephemeral {
            Cause::Dropped { at, ago_s }
        } else {
            Cause::Evicted {
                at,
                tier: tier_of(ghost),
                ago_s,
                // The deepest page went first.
                pages_short: gone
                    .iter()
                    .filter(|other| other.tier == ghost.tier)
                    .map(|other| ghosts.pages_short(other))
                    .max()
                    .unwrap_or_default(),
                by: evictor(ghost.at),
            }
        }
    } else if stored == 0 && nearest.other.is_some() {
        Cause::Diverged {
            at: nearest.common_tokens,
            change: change(&prompt, &nearest, &cache.continuation(key, LOOK_AHEAD)),
        }
    } else if let (0, Some(then)) = (cached_tokens, ghosts.flushed()) {
        Cause::Flushed { ago_s: ago_s(then) }
    } else {
        Cause::New
    };
    let kind = kind_of(&cause, &prompt, &nearest, at);
    Finding {
        prompt_tokens,
        cached_tokens,
        cause,
        kind,
        page_bytes: prompt.page_bytes,
        page_tokens,
        kv_hints: None,
    }
}

/// The part of the conversation in which a cause shows; `at` is where the cached part ends.
fn kind_of(cause: &Cause, prompt: &Asked<'_>, nearest: &Nearest, at: u32) -> ContextKind {
    let Cause::Diverged { at, change } = *cause else {
        return prompt.kind_at(at);
    };
    match change {
        Change::ThinkingLeftOut => ContextKind::Thinking,
        // What is not there any more is told by what is cached.
        Change::LeftOut(_) if nearest.kind != ContextKind::Unknown => nearest.kind,
        Change::LeftOut(_) | Change::Replaced | Change::Inserted(_) | Change::Moved => {
            prompt.kind_at(at)
        }
    }
}

fn tier_of(ghost: &Ghost) -> &'static str {
    match ghost.tier {
        EventTier::Device(_) => "device",
        EventTier::Host => "host",
    }
}

/// How a prompt differs from `cached`, which goes on after what both have in common.
fn change(prompt: &Asked<'_>, nearest: &Nearest, cached: &[Token]) -> Change {
    let at = nearest.common_tokens as usize;
    let own = prompt.tokens.get(at..).unwrap_or_default();
    let own = &own[..own.len().min(LOOK_AHEAD)];
    let before = &prompt.tokens[at.saturating_sub(NEAR)..at.min(prompt.tokens.len())];
    let was_thinking = nearest.kind == ContextKind::Thinking
        || prompt.opens_thoughts(cached)
        || prompt.is_amid_thoughts(before);
    let kind = prompt.kind_at(nearest.common_tokens);
    if was_thinking && kind != ContextKind::Thinking && !prompt.opens_thoughts(own) {
        return Change::ThinkingLeftOut;
    }
    let cached_behind = place_of(cached, own);
    let own_behind = place_of(own, cached);
    match (cached_behind, own_behind) {
        (Some(_), Some(_)) => Change::Moved,
        (Some(tokens), None) => Change::Inserted(tokens),
        (None, Some(tokens)) => Change::LeftOut(tokens),
        (None, None) => Change::Replaced,
    }
}

/// Where in `text` the first tokens of `part` stand.
fn place_of(part: &[Token], text: &[Token]) -> Option<u32> {
    let first = part.get(..AGREE)?;
    text.windows(AGREE)
        .position(|window| window == first)
        .map(count)
}

pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl Asked<'_> {
    fn kind_at(&self, token: u32) -> ContextKind {
        let span = self.spans.iter().find(|(span, _)| span.contains(&token));
        span.map_or(ContextKind::Unknown, |span| span.1)
    }

    fn opens_thoughts(&self, tokens: &[Token]) -> bool {
        let text = (self.text_of)(&tokens[..tokens.len().min(NEAR)]);
        text.trim_start().starts_with(OPEN)
    }

    fn is_amid_thoughts(&self, before: &[Token]) -> bool {
        let text = (self.text_of)(before);
        text.rfind(OPEN) > text.rfind(CLOSE)
    }
}

impl std::fmt::Debug for Asked<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asked")
            .field("ns", &self.ns)
            .field("tokens", &self.tokens.len())
            .finish_non_exhaustive()
    }
}

impl Finding {
    /// The finding, now that so many tokens turned out to be cached: a store that others write to
    /// may have had more than anybody knew.
    #[must_use]
    pub fn seen(&self, cached_tokens: u32) -> Finding {
        let mut finding = self.clone();
        if cached_tokens > self.cached_tokens {
            finding.cached_tokens = cached_tokens;
            let rest = self.prompt_tokens - cached_tokens.min(self.prompt_tokens);
            finding.cause = if rest <= self.page_tokens {
                Cause::Nothing
            } else {
                Cause::New
            };
        }
        finding
    }

    /// The report as it is kept for later, with what came of verbs in the request.
    pub fn kept(&self) -> Value {
        let mut report = self.report();
        if let Some(outcomes) = &self.kv_hints {
            report["kv_hints"] = outcomes.clone();
        }
        report
    }

    /// As JSON, with a sentence for people.
    pub fn report(&self) -> Value {
        let computed = self.prompt_tokens - self.cached_tokens;
        let kind = kind_name(self.kind);
        let mut report = json!({
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "computed_tokens": computed, "kind": kind,
        });
        let (cause, text) = match &self.cause {
            Cause::Nothing => ("none", "every whole page was cached".to_owned()),
            Cause::New => {
                let at = self.cached_tokens;
                let text = format!("new from token {at} on: {computed} tokens computed");
                ("new", text)
            }
            Cause::Flushed { ago_s } => {
                report["ago_s"] = (*ago_s).into();
                let text = format!("the cache was emptied {ago_s:.1} s ago");
                ("flushed", format!("{text}: {computed} tokens computed"))
            }
            Cause::Diverged { at, change } => {
                report["at"] = (*at).into();
                let (name, what) = change.told();
                report["change"] = name.into();
                let text = format!("diverged at token {at}, inside {kind}: {computed} tokens");
                ("diverged", format!("{text} recomputed; {what}"))
            }
            Cause::Evicted { at, ago_s, .. } => {
                report["at"] = (*at).into();
                report["ago_s"] = (*ago_s).into();
                ("evicted", self.evicted(&mut report, computed))
            }
            Cause::Dropped { at, ago_s } => {
                report["at"] = (*at).into();
                report["ago_s"] = (*ago_s).into();
                let text = format!(
                    "dropped {ago_s:.1} s ago at the wish of its last request, from token {at} \
                     on, inside {kind}: {computed} tokens recomputed"
                );
                ("dropped", text)
            }
        };
        report["cause"] = cause.into();
        report["text"] = text.into();
        report
    }

    fn evicted(&self, report: &mut Value, computed: u32) -> String {
        let Cause::Evicted {
            at,
            tier,
            ago_s,
            pages_short,
            by,
        } = &self.cause
        else {
            return String::new();
        };
        let kind = kind_name(self.kind);
        let bytes_short = pages_short.saturating_mul(self.page_bytes);
        report["tier"] = (*tier).into();
        report["pages_short"] = (*pages_short).into();
        report["bytes_short"] = bytes_short.into();
        let mut whom = String::new();
        if let Some(by) = by {
            report["evicted_by"] = by.report();
            whom = by.told();
        }
        let mib = bytes_short as f64 / f64::from(1 << 20);
        format!(
            "evicted from {tier} {ago_s:.1} s ago{whom}, from token {at} on, inside {kind}: \
             {computed} tokens recomputed; {pages_short} pages ({mib:.2} MiB) more would have kept \
             it"
        )
    }
}

impl Change {
    fn told(self) -> (&'static str, String) {
        match self {
            Change::Replaced => ("replaced", "another text stands there".to_owned()),
            Change::Inserted(tokens) => {
                let text = format!("{tokens} tokens stand there that are new");
                ("inserted", text)
            }
            Change::LeftOut(tokens) => {
                let text = format!("{tokens} tokens that stood there are left out");
                ("left_out", text)
            }
            Change::Moved => ("moved", "parts have changed places".to_owned()),
            Change::ThinkingLeftOut => {
                let text = "thoughts that stood there are left out";
                ("thinking_left_out", text.to_owned())
            }
        }
    }
}

impl Evictor {
    fn report(&self) -> Value {
        if self.is_own {
            json!({"session": self.session, "prompt_tokens": self.prompt_tokens})
        } else {
            json!("another tenant")
        }
    }

    fn told(&self) -> String {
        let tokens = self.prompt_tokens.unwrap_or_default();
        match &self.session {
            _ if !self.is_own => " for a request of another tenant".to_owned(),
            Some(session) => format!(" for a request of {session:?} with {tokens} tokens"),
            None => format!(" for a request with {tokens} tokens"),
        }
    }
}

/// `GET /v1/kv/why/{request}`: by the id of the answer.
pub async fn route(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    let query = query.unwrap_or_default();
    let salt = Caller::of(&app, &headers, parameter(&query, "cache_salt").as_deref()).salt;
    match app.engine.memory().report(&id, salt.as_deref()) {
        Some(report) => json_response(StatusCode::OK, &report),
        None => {
            let message = format!(
                "nothing is known of {id:?}; the newest {FINDINGS_MAX} answers are, each for its \
                 own cache_salt"
            );
            ApiError::new(ErrorKind::NotFound, message).response()
        }
    }
}
