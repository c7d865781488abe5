//! Why a prompt, or a part of it, was not in the cache; for `cache_report` and `GET /v1/kv/why`.
//!
//! The finding is made when a request comes, before it computes anything: where its prompt leaves
//! what is cached, inside which part of the conversation, and what went that would have helped.
//! The newest findings are kept by the id of their answer, for the salt they belong to.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, Response, StatusCode};
use rootstock::memory::Nanos;
use rootstock::radix::{
    ContextKind, EventTier, Ghosts, Key, KvEvent, NamespaceId, PrefixCache, Token,
};
use serde_json::{Value, json};

use crate::app::App;
use crate::control::{access, tree};
use crate::http::api_error::{ApiError, ErrorKind, json_response};

/// Removed pages that are remembered.
const GHOSTS_MAX: usize = 1 << 17;
/// Findings that are kept.
const FINDINGS_MAX: usize = 1024;

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
        /// In the prompt.
        prompt: Option<Token>,
        /// In what is cached.
        cached: Token,
    },
    /// It was cached and had to go.
    Evicted {
        /// The first token that is gone.
        at: u32,
        /// From where it went last.
        tier: &'static str,
        /// Seconds ago.
        ago_s: f64,
        /// Pages that the tier would have needed more to keep it.
        pages_short: u64,
    },
    /// Its last request asked for it to be dropped.
    Dropped {
        /// The first token that is gone.
        at: u32,
        /// Seconds ago.
        ago_s: f64,
    },
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
}

/// Looks a prompt up. Changes nothing.
pub fn find(
    cache: &PrefixCache,
    ghosts: &Ghosts,
    prompt: Asked<'_>,
    page_tokens: u32,
    now: Nanos,
) -> Finding {
    let key = Key {
        ns: prompt.ns,
        tokens: prompt.tokens,
    };
    let nearest = cache.nearest(key);
    let prompt_tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
    let whole = prompt_tokens / page_tokens * page_tokens;
    let ago_s = |then: Nanos| now.saturating_sub(then) as f64 / 1e9;
    let missing = (nearest.cached_tokens / page_tokens) as usize;
    let ghost = || ghosts.of(*cache.page_hashes(key).get(missing)?);
    let at = nearest.cached_tokens;
    let cause = if nearest.cached_tokens >= whole {
        Cause::Nothing
    } else if let Some(ghost) = ghost() {
        let ago_s = ago_s(ghost.at);
        if ghost.ephemeral {
            Cause::Dropped { at, ago_s }
        } else {
            Cause::Evicted {
                at,
                tier: match ghost.tier {
                    EventTier::Device(_) => "device",
                    EventTier::Host => "host",
                },
                ago_s,
                pages_short: ghosts.pages_short(&ghost),
            }
        }
    } else if let Some(cached) = nearest.other {
        let at = nearest.common_tokens;
        Cause::Diverged {
            at,
            prompt: prompt.tokens.get(at as usize).copied(),
            cached,
        }
    } else if let (0, Some(then)) = (nearest.cached_tokens, ghosts.flushed()) {
        Cause::Flushed { ago_s: ago_s(then) }
    } else {
        Cause::New
    };
    let begins = if let Cause::Diverged { at: token, .. } = cause {
        token
    } else {
        at
    };
    let span = prompt.spans.iter().find(|(span, _)| span.contains(&begins));
    Finding {
        prompt_tokens,
        cached_tokens: nearest.cached_tokens,
        cause,
        kind: span.map_or(ContextKind::Unknown, |span| span.1),
    }
}

/// A prompt that is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Its namespace.
    pub ns: NamespaceId,
    /// Its tokens.
    pub tokens: &'a [Token],
    /// What its parts are.
    pub spans: &'a [(Range<u32>, ContextKind)],
}

impl Finding {
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
            Cause::Diverged { at, prompt, cached } => {
                report["at"] = (*at).into();
                report["prompt_token"] = json!(prompt);
                report["cached_token"] = json!(cached);
                let text = format!("diverged at token {at}, inside {kind}: {computed} tokens");
                ("diverged", format!("{text} recomputed"))
            }
            Cause::Evicted {
                at,
                tier,
                ago_s,
                pages_short,
            } => {
                report["at"] = (*at).into();
                report["tier"] = (*tier).into();
                report["ago_s"] = (*ago_s).into();
                report["pages_short"] = (*pages_short).into();
                let text = format!(
                    "evicted from {tier} {ago_s:.1} s ago, from token {at} on: {computed} tokens \
                     recomputed; {pages_short} pages more would have kept it"
                );
                ("evicted", text)
            }
            Cause::Dropped { at, ago_s } => {
                report["at"] = (*at).into();
                report["ago_s"] = (*ago_s).into();
                let text = format!(
                    "dropped {ago_s:.1} s ago at the wish of its last request, from token {at} \
                     on: {computed} tokens recomputed"
                );
                ("dropped", text)
            }
        };
        report["cause"] = cause.into();
        report["text"] = text.into();
        report
    }
}

const fn kind_name(kind: ContextKind) -> &'static str {
    match kind {
        ContextKind::System => "system",
        ContextKind::Tools => "tools",
        ContextKind::History => "history",
        ContextKind::ToolOutput => "tool_output",
        ContextKind::Thinking => "thinking",
        ContextKind::Scratchpad => "scratchpad",
        ContextKind::Unknown => "unknown",
    }
}

/// What the server remembers to explain misses: removed pages, and findings by answer.
#[derive(Debug)]
pub struct Memory {
    ghosts: Mutex<Ghosts>,
    findings: Mutex<Findings>,
}

#[derive(Debug, Default)]
struct Findings {
    by_id: BTreeMap<String, (Option<String>, Value)>,
    order: VecDeque<String>,
}

impl Default for Memory {
    fn default() -> Self {
        Memory {
            ghosts: Mutex::new(Ghosts::new(GHOSTS_MAX)),
            findings: Mutex::default(),
        }
    }
}

impl Memory {
    /// Hears what changed in the cache. `dropped_only`: whatever was removed, none of it went for
    /// room.
    pub fn hear(&self, events: &[KvEvent], dropped_only: bool, now: Nanos) {
        let mut ghosts = self.ghosts.lock().unwrap_or_else(PoisonError::into_inner);
        for event in events {
            ghosts.hear(event, dropped_only, now);
        }
    }

    /// Looks a prompt up.
    pub fn find(&self, cache: &PrefixCache, asked: Asked<'_>, page: u32, now: Nanos) -> Finding {
        let ghosts = self.ghosts.lock().unwrap_or_else(PoisonError::into_inner);
        find(cache, &ghosts, asked, page, now)
    }

    /// Keeps the report of an answer.
    pub fn keep(&self, id: &str, salt: Option<String>, report: Value) {
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if findings
            .by_id
            .insert(id.to_owned(), (salt, report))
            .is_none()
        {
            findings.order.push_back(id.to_owned());
        }
        while findings.order.len() > FINDINGS_MAX {
            if let Some(oldest) = findings.order.pop_front() {
                findings.by_id.remove(&oldest);
            }
        }
    }

    /// The report of an answer, for its own salt only.
    pub fn report(&self, id: &str, salt: Option<&str>) -> Option<Value> {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let (owner, report) = findings.by_id.get(id)?;
        (owner.as_deref() == salt).then(|| report.clone())
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
    let salt = access::salt(&headers, tree::parameter(&query, "cache_salt"));
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
