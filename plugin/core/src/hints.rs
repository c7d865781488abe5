//! Agent hints of a request: `nvext`, the top-level cache fields and the headers, read leniently.
//!
//! A hint can only help. The union of all released versions of `nvext` is read; what is unknown,
//! of a wrong type or out of range is noted by path in `Hints::ignored` and otherwise as if
//! absent. Nothing here is an error, nothing grows with what a client sends. A header beats the
//! body field by field; a malformed header is noted and the body's field counts.
//!
//! The one thing that is never dropped is isolation: a `cache_salt` of a wrong type still
//! separates (by its JSON text), and an overlong one by its digest.
//!
//! Source: the field tables of Dynamo's public crates 1.0.0 to 1.6.1 and captured requests of
//! released clients (`plugin/core/tests/data/captured_hints.jsonl`).

mod fields;
mod requests;
mod retention;
mod session;
mod ttl;

use rootstock_radix::{ContextKind, Hints, Ttl};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use fields::{Fields, Notes, printable};
pub use fields::{NOTE_BYTES_MAX, NOTES_MAX};
pub use requests::{Generation, Routing};
use requests::{generation_of, routing_of};
use session::{BodySources, Headers, starts_with_ignoring_case};
pub use session::{SESSION_ID_BYTES_MAX, Session, SessionSource};
pub use ttl::{TTL_CAP_S, TTL_DEFAULT_S, TtlError, parse_ttl, ttl_of_seconds};

/// The pin of a whole prompt, in `Hints::pins`.
pub const WHOLE_PROMPT: u32 = u32::MAX;

/// Bytes of a salt that is kept as it is; a longer one is replaced by its SHA-256.
pub const SALT_BYTES_MAX: usize = 256;

/// Items of `annotations`, `extra_fields` and taints that are kept.
const LIST_MAX: usize = 64;

/// Captured `x-claude-code-*` and `x-codex-*` headers: number, bytes of one, bytes of all.
const LIFECYCLE_MAX: usize = 64;
const LIFECYCLE_BYTES_MAX: usize = 16 * 1024;
const LIFECYCLE_TOTAL_BYTES_MAX: usize = 32 * 1024;

/// Which rule turns priority and latency sensitivity into a jump of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compat {
    /// `latency_sensitivity` seconds if present, else `priority`.
    #[default]
    Rootstock,
    /// As Dynamo 1.1 to 1.6: `priority` if present, else `latency_sensitivity`.
    #[serde(rename = "dynamo-1.6")]
    Dynamo16,
}

/// All that was read from one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedHints {
    /// What cache and scheduler act on; `ignored` lists what was not understood.
    pub hints: Hints,
    /// Isolation key of the namespace; empty never occurs.
    pub salt: Option<String>,
    /// Which agent it belongs to; `hints.program` and `hints.parent` repeat id and parent.
    pub session: Session,
    /// OpenAI's `prompt_cache_key`, as sent.
    pub prompt_cache_key: Option<String>,
    /// Names of response fields asked for.
    pub extra_fields: Vec<String>,
    /// Annotation frames asked for.
    pub annotations: Vec<String>,
    /// `x-dynamo-meta-policy-class`.
    pub policy_class: Option<String>,
    /// `x-request-id`: a label for traces, never a key.
    pub request_label: Option<String>,
    /// Fields that ask for another way to generate.
    pub generation: Generation,
    /// Fields that name workers.
    pub routing: Routing,
    /// `request_timestamp_ms` of a replayed trace.
    pub request_timestamp_ms: Option<f64>,
    /// Agents' own headers, opaque, names in lower case.
    pub lifecycle: Vec<(String, String)>,
    /// `kv_hints`, at the top level or under `nvext`, as sent: verbs for whoever carries them out.
    pub kv_hints: Option<Value>,
    /// What the operator lets this caller ask for.
    pub ceiling: Ceiling,
    /// The jump of the queue was not said: it is the priority, read as seconds.
    pub jump_is_priority: bool,
}

/// What an operator lets a caller ask for; applied after parsing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ceiling {
    /// Highest priority.
    pub priority: i32,
    /// Highest strict tier.
    pub strict: u32,
    /// Longest jump of the queue, in seconds.
    pub jump_s: f64,
    /// Prefixes that one request may pin.
    pub pins: u32,
    /// Longest lifetime of a pin, in seconds.
    pub pin_s: u64,
}

impl Default for Ceiling {
    /// No ceiling.
    fn default() -> Self {
        Self {
            priority: i32::MAX,
            strict: u32::MAX,
            jump_s: f64::MAX,
            pins: u32::MAX,
            pin_s: u64::MAX,
        }
    }
}

impl ParsedHints {
    /// Lowers what is above the ceiling and notes each change.
    pub fn restrict(&mut self, ceiling: &Ceiling) {
        self.ceiling = *ceiling;
        let hints = &mut self.hints;
        let mut notes = Vec::new();
        if hints.priority > ceiling.priority {
            notes.push(format!(
                "priority {} clamped to {}",
                hints.priority, ceiling.priority
            ));
            hints.priority = ceiling.priority;
            if self.jump_is_priority {
                hints.jump_s = f64::from(ceiling.priority).max(0.0);
            }
        }
        let said = hints.retain.iter_mut().map(|(_, said)| said);
        let said = said.chain(&mut hints.retain_output);
        let above = said.filter(|said| said.priority > ceiling.priority);
        if above.map(|said| said.priority = ceiling.priority).count() > 0 {
            notes.push(format!(
                "retention clamped to priority {}",
                ceiling.priority
            ));
        }
        if hints.strict > ceiling.strict {
            notes.push(format!(
                "strict_priority {} clamped to {}",
                hints.strict, ceiling.strict
            ));
            hints.strict = ceiling.strict;
        }
        let jump_s = ceiling.jump_s.max(0.0); // A NaN reads as 0.
        if hints.jump_s > jump_s {
            notes.push(format!(
                "queue jump {} s clamped to {jump_s} s",
                hints.jump_s
            ));
            hints.jump_s = jump_s;
        }
        hints.ignored.extend(notes);
        self.pin([]);
    }

    /// Adds prefixes to pin, within the ceiling; what is above it is lowered and noted.
    pub fn pin(&mut self, pins: impl IntoIterator<Item = (u32, Ttl)>) {
        let Ceiling {
            pins: most, pin_s, ..
        } = self.ceiling;
        let hints = &mut self.hints;
        hints.pins.extend(pins);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if hints.pins.len() > most {
            let found = hints.pins.len();
            hints.pins.sort_by_key(|(tokens, _)| *tokens);
            hints
                .ignored
                .push(format!("{found} pins, at most {most} are kept"));
            // The longest prefixes hold the others.
            hints.pins.drain(..found - most);
        }
        let mut is_lowered = false;
        for (_, ttl) in &mut hints.pins {
            is_lowered |= ttl.seconds > pin_s;
            ttl.seconds = ttl.seconds.min(pin_s);
        }
        if is_lowered {
            hints.ignored.push(format!("pins clamped to {pin_s} s"));
        }
    }

    /// Puts the operator's salt in place of the caller's, whatever that was.
    pub fn bind_salt(&mut self, salt: &str) {
        if self.salt.as_deref().is_some_and(|asked| asked != salt) {
            self.hints
                .ignored
                .push("cache_salt: the server's own salt is used".to_owned());
        }
        self.salt = usable_salt(salt);
    }
}

/// Reads the hints of one request with the default jump rule.
///
/// `nvext` is the value of that body key (null when absent), `top` the whole body, `headers` the
/// request headers in order, names in any case.
///
/// # Cost
/// One pass over `nvext` and the headers; allocates only for what is present.
pub fn parse(nvext: &Value, top: &Value, headers: &[(&str, &str)]) -> ParsedHints {
    parse_as(Compat::Rootstock, nvext, top, headers)
}

/// Reads the hints of one request; `compat` chooses the jump rule.
pub fn parse_as(
    compat: Compat,
    nvext: &Value,
    top: &Value,
    headers: &[(&str, &str)],
) -> ParsedHints {
    let mut notes = Notes::default();
    let notes = &mut notes;
    let headers = Headers(headers);
    let body = Fields::of(Some(nvext), "", notes);
    body.note_unknown(NVEXT_FIELDS, notes);
    let agent_hints = Fields::of(body.get("agent_hints"), "agent_hints", notes);
    let sources = BodySources {
        agent_hints,
        agent_context: Fields::of(body.get("agent_context"), "agent_context", notes),
        session_control: Fields::of(body.get("session_control"), "session_control", notes),
        top,
    };
    let (hints, jump_is_priority) = hints_of(compat, &agent_hints, headers, notes);
    let mut parsed = ParsedHints {
        hints,
        salt: salt_of(&body, top, headers, notes),
        session: session::find(headers, &sources, notes),
        prompt_cache_key: top
            .get("prompt_cache_key")
            .and_then(Value::as_str)
            .map(|key| printable(key, SALT_BYTES_MAX)),
        extra_fields: body.texts("extra_fields", LIST_MAX, notes),
        annotations: body.texts("annotations", LIST_MAX, notes),
        policy_class: headers
            .get("x-dynamo-meta-policy-class")
            .map(|text| printable(text, 128)),
        request_label: headers.get("x-request-id").map(|text| printable(text, 256)),
        generation: generation_of(&body, notes),
        routing: routing_of(&body, headers, notes),
        request_timestamp_ms: body.number("request_timestamp_ms", notes),
        lifecycle: lifecycle_of(headers, notes),
        kv_hints: [top.get("kv_hints"), body.get("kv_hints")]
            .into_iter()
            .flatten()
            .find(|envelope| !envelope.is_null())
            .cloned(),
        ceiling: Ceiling::default(),
        jump_is_priority,
    };
    sources
        .session_control
        .note_unknown(&["session_id", "action", "timeout"], notes);
    sources
        .agent_context
        .note_unknown(AGENT_CONTEXT_FIELDS, notes);
    pin_of(&body, &mut parsed.hints, notes);
    retention::read(&agent_hints, &body, top, &mut parsed.hints, notes);
    parsed.hints.program.clone_from(&parsed.session.id);
    parsed.hints.parent.clone_from(&parsed.session.parent);
    parsed.hints.session_final = parsed.session.last;
    parsed.hints.ignored = std::mem::take(notes).into_lines();
    parsed
}

/// Every field of `nvext` that some release had.
const NVEXT_FIELDS: &[&str] = &[
    "greed_sampling",
    "use_raw_prompt",
    "annotations",
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "token_data",
    "max_thinking_tokens",
    "cache_salt",
    "extra_fields",
    "request_timestamp_ms",
    "routing_constraints",
    "router",
    "agent_hints",
    "cache_control",
    "kv_cache_retention_config",
    "session_control",
    "agent_context",
    "kv_hints",
];

const AGENT_HINTS_FIELDS: &[&str] = &[
    "priority",
    "retention_seconds",
    "latency_sensitivity",
    "strict_priority",
    "osl",
    "speculative_prefill",
    "program_id",
    "context_type",
    "prefix_id",
    "total_requests",
    "iat",
];

const AGENT_CONTEXT_FIELDS: &[&str] = &[
    "session_type_id",
    "session_id",
    "trajectory_id",
    "parent_trajectory_id",
    "trajectory_final",
    "workflow_type_id",
    "workflow_id",
    "program_id",
    "parent_program_id",
];

/// The hints, and whether the jump among them is the priority.
fn hints_of(
    compat: Compat,
    fields: &Fields<'_>,
    headers: Headers<'_>,
    notes: &mut Notes,
) -> (Hints, bool) {
    fields.note_unknown(AGENT_HINTS_FIELDS, notes);
    let priority = header_int(headers, &["x-dynamo-request-priority"], notes);
    let priority = priority.or_else(|| fields.int::<i32>("priority", notes));
    let strict = header_int(headers, &["x-dynamo-request-strict-priority"], notes);
    let strict = strict.or_else(|| fields.int::<u32>("strict_priority", notes));
    let sensitivity_s = fields.number("latency_sensitivity", notes);
    let by_priority = priority.map(f64::from);
    let jump_s = match compat {
        Compat::Rootstock => sensitivity_s.or(by_priority),
        Compat::Dynamo16 => by_priority.or(sensitivity_s),
    };
    let jump_is_priority =
        priority.is_some() && (compat == Compat::Dynamo16 || sensitivity_s.is_none());
    let hints = Hints {
        jump_s: jump_s.unwrap_or(0.0).max(0.0),
        priority: priority.unwrap_or(0),
        strict: strict.unwrap_or(0),
        osl: fields.int("osl", notes),
        speculate: fields
            .boolean("speculative_prefill", notes)
            .unwrap_or(false),
        iat_ms: fields.int("iat", notes),
        reuses: fields.int("total_requests", notes),
        context: context_of(fields, notes),
        ..Hints::default()
    };
    (hints, jump_is_priority)
}

fn context_of(fields: &Fields<'_>, notes: &mut Notes) -> Option<ContextKind> {
    let value = fields.get("context_type")?;
    let kind = match value.as_str().map(str::to_ascii_lowercase).as_deref() {
        Some("system" | "system_prompt") => Some(ContextKind::System),
        Some("tools" | "tool_definition" | "tool_definitions") => Some(ContextKind::Tools),
        Some("history") => Some(ContextKind::History),
        Some("tool_output") => Some(ContextKind::ToolOutput),
        Some("thinking" | "reasoning" | "reasoning_branch") => Some(ContextKind::Thinking),
        Some("scratchpad") => Some(ContextKind::Scratchpad),
        _ => None,
    };
    if kind.is_none() {
        let known = "system, tools, history, tool_output, thinking or scratchpad";
        fields.expected("context_type", known, value, notes);
    }
    kind
}

/// `cache_control` under `nvext` pins the whole prompt. What cannot be read sets no pin: the note
/// says so, instead of a default that the caller did not ask for.
fn pin_of(body: &Fields<'_>, hints: &mut Hints, notes: &mut Notes) {
    let fields = Fields::of(body.get("cache_control"), "cache_control", notes);
    if !fields.is_present() {
        return;
    }
    fields.note_unknown(&["type", "ttl"], notes);
    if let Some(kind) = fields
        .get("type")
        .filter(|kind| kind.as_str() != Some("ephemeral"))
    {
        fields.expected("type", "\"ephemeral\" (no pin is set)", kind, notes);
        return;
    }
    let ttl = match fields.get("ttl") {
        None => ttl_of_seconds(TTL_DEFAULT_S),
        Some(value) => {
            let read = match (value.as_str(), value.as_u64()) {
                (Some(text), _) => parse_ttl(text).ok(),
                (None, Some(seconds)) => Some(ttl_of_seconds(seconds)),
                (None, None) => None,
            };
            let Some(ttl) = read else {
                let what = "N, Ns, Nm or Nh such as 5m (no pin is set)";
                fields.expected("ttl", what, value, notes);
                return;
            };
            ttl
        }
    };
    if ttl.clamped {
        notes.add(
            "cache_control.ttl",
            &format!("above the cap, clamped to {} s", ttl.seconds),
        );
    }
    if ttl.seconds > 0 {
        hints.pins.push((WHOLE_PROMPT, ttl));
    }
}

/// Header `x-tenant-id`, else `nvext.cache_salt`, else the top-level `cache_salt`.
fn salt_of(
    body: &Fields<'_>,
    top: &Value,
    headers: Headers<'_>,
    notes: &mut Notes,
) -> Option<String> {
    if let Some(tenant) = headers.get("x-tenant-id") {
        return usable_salt(tenant);
    }
    for value in [body.get("cache_salt"), top.get("cache_salt")]
        .into_iter()
        .flatten()
    {
        match value {
            Value::Null => {}
            Value::String(text) if text.is_empty() => {}
            Value::String(text) => return usable_salt(text),
            other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
                notes.expected("cache_salt", "a string (its JSON text is the salt)", other);
                return usable_salt(&other.to_string());
            }
        }
    }
    None
}

/// The salt itself, or `sha256:` and its digest when it is long; empty is absent.
fn usable_salt(text: &str) -> Option<String> {
    if text.len() <= SALT_BYTES_MAX {
        return (!text.is_empty()).then(|| text.to_owned());
    }
    let digest = Sha256::digest(text.as_bytes());
    let mut salt = String::from("sha256:");
    for byte in digest {
        salt.push_str(&format!("{byte:02x}"));
    }
    Some(salt)
}

/// The first of these headers, as an integer; noted and absent when it is not one.
fn header_int<T: fields::HintInt + std::str::FromStr>(
    headers: Headers<'_>,
    names: &[&str],
    notes: &mut Notes,
) -> Option<T> {
    let (name, text) = headers.first(names)?;
    let read = text.parse().ok();
    if read.is_none() {
        notes.expected(name, T::EXPECTED, &Value::from(text));
    }
    read
}

fn lifecycle_of(headers: Headers<'_>, notes: &mut Notes) -> Vec<(String, String)> {
    let mut captured = Vec::new();
    let mut bytes = 0;
    for (name, value) in headers.0 {
        let agent = ["x-claude-code-", "x-codex-"]
            .iter()
            .any(|prefix| starts_with_ignoring_case(name, prefix));
        if !agent {
            continue;
        }
        let size = name.len() + value.len();
        let fits = captured.len() < LIFECYCLE_MAX
            && value.len() <= LIFECYCLE_BYTES_MAX
            && bytes + size <= LIFECYCLE_TOTAL_BYTES_MAX;
        if fits {
            bytes += size;
            captured.push((name.to_ascii_lowercase(), (*value).to_owned()));
        } else {
            notes.add(name, "not kept: too many or too long agent headers");
        }
    }
    captured
}
