//! Which agent a request belongs to: session headers of Dynamo, Claude Code, Codex and OpenCode,
//! then the body fields that released clients put the same thing in.
//!
//! Headers beat the body. Among headers Dynamo's own come first, because whoever sends them means
//! this kind of server; then the agents' in the order of Dynamo's front end. A parent equal to the
//! session itself is dropped, blank counts as absent.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::fields::{Fields, Notes};

/// Bytes of a session id at most; a longer one is noted and not used.
pub const SESSION_ID_BYTES_MAX: usize = 256;

/// Where a session id was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionSource {
    /// No id at all.
    #[default]
    None,
    /// `x-dynamo-session-id`.
    Dynamo,
    /// `x-claude-code-*`.
    ClaudeCode,
    /// `thread-id`, `session-id`, `x-codex-*`.
    Codex,
    /// `x-session-id`.
    OpenCode,
    /// A field of the body.
    Body,
}

/// One agent's run, as far as the client told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// The agent's own id.
    pub id: Option<String>,
    /// The agent that spawned it.
    pub parent: Option<String>,
    /// The root of the tree of agents, where the client names it.
    pub root: Option<String>,
    /// The client said that this is the session's last request.
    pub last: bool,
    /// Where the id was found.
    pub source: SessionSource,
}

/// Request headers, looked up without regard to case.
#[derive(Clone, Copy)]
pub(crate) struct Headers<'a>(pub(crate) &'a [(&'a str, &'a str)]);

impl<'a> Headers<'a> {
    /// The last value of that name that is not blank, trimmed.
    pub(crate) fn get(self, name: &str) -> Option<&'a str> {
        self.0
            .iter()
            .rev()
            .filter(|(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .find(|value| !value.is_empty())
    }

    /// The first of several names that is present, with the name.
    pub(crate) fn first<'n>(self, names: &[&'n str]) -> Option<(&'n str, &'a str)> {
        names.iter().find_map(|name| Some((*name, self.get(name)?)))
    }

    fn any_with_prefix(self, prefix: &str) -> bool {
        self.0
            .iter()
            .any(|(name, _)| starts_with_ignoring_case(name, prefix))
    }

    fn id(self, name: &str, notes: &mut Notes) -> Option<String> {
        let value = self.get(name)?;
        if value.len() > SESSION_ID_BYTES_MAX {
            notes.add(name, &too_long(value));
            return None;
        }
        Some(value.to_owned())
    }
}

pub(crate) fn starts_with_ignoring_case(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|head| head.eq_ignore_ascii_case(prefix))
}

/// The objects of the body that may name a session.
pub(crate) struct BodySources<'a> {
    pub(crate) agent_hints: Fields<'a>,
    pub(crate) agent_context: Fields<'a>,
    pub(crate) session_control: Fields<'a>,
    pub(crate) top: &'a Value,
}

/// Finds the session of a request.
pub(crate) fn find(headers: Headers<'_>, body: &BodySources<'_>, notes: &mut Notes) -> Session {
    let mut found = from_headers(headers, notes);
    let from_body = from_body(body, notes);
    if found.id.is_none() {
        // A header may still say which session is the parent or that this is the last request.
        let Session { parent, last, .. } = found;
        found = from_body;
        found.parent = parent.or(found.parent);
        found.last |= last;
    }
    if found.parent == found.id {
        found.parent = None;
    }
    found
}

fn from_headers(headers: Headers<'_>, notes: &mut Notes) -> Session {
    let mut session = headers_of_dynamo(headers, notes);
    if session.id.is_some() {
        return session;
    }
    for read in [
        headers_of_claude_code,
        headers_of_codex,
        headers_of_opencode,
    ] {
        let found = read(headers, notes);
        if found.id.is_some() {
            return Session {
                last: session.last,
                parent: found.parent.or(session.parent),
                ..found
            };
        }
    }
    session.source = SessionSource::None;
    session
}

fn headers_of_dynamo(headers: Headers<'_>, notes: &mut Notes) -> Session {
    const FINAL: &str = "x-dynamo-session-final";
    let last = match headers.get(FINAL) {
        Some(text) if text.eq_ignore_ascii_case("true") || text == "1" => true,
        Some(text) if text.eq_ignore_ascii_case("false") || text == "0" => false,
        Some(text) => {
            notes.expected(FINAL, "true or false", &Value::from(text));
            false
        }
        None => false,
    };
    Session {
        id: headers.id("x-dynamo-session-id", notes),
        parent: headers.id("x-dynamo-parent-session-id", notes),
        root: None,
        last,
        source: SessionSource::Dynamo,
    }
}

/// The root session has no agent id; a subagent's parent is another subagent or the root.
fn headers_of_claude_code(headers: Headers<'_>, notes: &mut Notes) -> Session {
    let root = headers.id("x-claude-code-session-id", notes);
    let agent = headers.id("x-claude-code-agent-id", notes);
    let parent = headers.id("x-claude-code-parent-agent-id", notes);
    let parent = parent.or_else(|| agent.as_ref().and(root.clone()));
    let id = agent.or_else(|| root.clone());
    Session {
        id,
        parent,
        root,
        last: false,
        source: SessionSource::ClaudeCode,
    }
}

/// `session-id` is the root's in every request of a tree, `thread-id` the agent's own. OpenCode
/// sends `session-id` as well: without a mark of Codex and with OpenCode's own header, it is not
/// Codex that speaks.
fn headers_of_codex(headers: Headers<'_>, notes: &mut Notes) -> Session {
    let marked = headers.get("thread-id").is_some() || headers.any_with_prefix("x-codex-");
    if !marked && headers.get("x-session-id").is_some() {
        return Session::default();
    }
    let root = headers.id("session-id", notes);
    let id = headers.id("thread-id", notes).or_else(|| root.clone());
    let parent = headers.id("x-codex-parent-thread-id", notes);
    Session {
        id,
        parent,
        root,
        last: false,
        source: SessionSource::Codex,
    }
}

fn headers_of_opencode(headers: Headers<'_>, notes: &mut Notes) -> Session {
    Session {
        id: headers.id("x-session-id", notes),
        parent: headers.id("x-parent-session-id", notes),
        root: None,
        last: false,
        source: SessionSource::OpenCode,
    }
}

fn from_body(body: &BodySources<'_>, notes: &mut Notes) -> Session {
    let context = &body.agent_context;
    let mut text = |fields: &Fields<'_>, key| fields.text(key, SESSION_ID_BYTES_MAX, notes);
    let root = text(context, "session_id").or_else(|| text(context, "workflow_id"));
    let own = text(context, "trajectory_id").or_else(|| text(context, "program_id"));
    let parent =
        text(context, "parent_trajectory_id").or_else(|| text(context, "parent_program_id"));
    let controlled = text(&body.session_control, "session_id");
    let program = text(&body.agent_hints, "program_id");
    let prefix = text(&body.agent_hints, "prefix_id");
    let prefix = prefix.filter(|id| {
        let per_request = is_fresh_per_request(id);
        if per_request {
            notes.add(
                "agent_hints.prefix_id",
                "a new random id in each request, not a session",
            );
        }
        !per_request
    });
    let last = context.boolean("trajectory_final", notes).unwrap_or(false)
        || body.session_control.get("action").and_then(Value::as_str) == Some("close");
    let id = own
        .or_else(|| root.clone())
        .or(controlled)
        .or(program)
        .or(prefix)
        .or_else(|| session_in_user_id(body.top))
        .or_else(|| {
            let key = body.top.get("prompt_cache_key")?.as_str()?.trim();
            (!key.is_empty() && key.len() <= SESSION_ID_BYTES_MAX).then(|| key.to_owned())
        });
    let source = if id.is_some() {
        SessionSource::Body
    } else {
        SessionSource::None
    };
    Session {
        id,
        parent,
        root,
        last,
        source,
    }
}

/// LangChain's Dynamo client makes a new `prefix_id` for each request.
fn is_fresh_per_request(prefix_id: &str) -> bool {
    prefix_id
        .strip_prefix("langchain-dynamo-")
        .is_some_and(|tail| tail.len() == 12 && tail.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Claude Code's `metadata.user_id` is a JSON text with a `session_id`.
fn session_in_user_id(top: &Value) -> Option<String> {
    let text = top.get("metadata")?.get("user_id")?.as_str()?;
    if text.len() > 4 * SESSION_ID_BYTES_MAX {
        return None;
    }
    let inner: Value = serde_json::from_str(text).ok()?;
    let id = inner.get("session_id")?.as_str()?.trim();
    (!id.is_empty() && id.len() <= SESSION_ID_BYTES_MAX).then(|| id.to_owned())
}

fn too_long(value: &str) -> String {
    format!(
        "longer than {SESSION_ID_BYTES_MAX} bytes ({} bytes)",
        value.len()
    )
}
