//! The `kv_hints` envelope: `{protocol_version, message_id, actions: [{action_id, action_type,
//! action_version, payload}]}`, read leniently action by action.
//!
//! The envelope itself must have its form, else nothing is done. An action that is not understood
//! is answered as rejected, with the reason, and does not stop the others.
//!
//! ```text
//! payload   one target:  tokens [id, ..] | messages [..] (with tools, chat_template_kwargs)
//!                        | session "id" | program "id" | block_hashes [hash, ..] from the root on
//!                        | node "id", as /v1/kv/picture names it: the prefix that ends with it
//!                        | none, inside a request: its own prompt
//! kv.pin       ttl "5m" or seconds              kv.retain   priority, retention_seconds
//! kv.prefetch  destination, dp_rank             kv.release  children
//! kv.demote
//! ```

use rootstock::hints::{TTL_DEFAULT_S, parse_ttl, ttl_of_seconds};
use rootstock::radix::{NodeRef, Token, Ttl};
use serde_json::{Map, Value};

use crate::http::api_error::ApiError;

/// Actions of an envelope, at most.
pub const ACTIONS_MAX: usize = 64;
/// Bytes of a name: ids, sessions, versions.
const NAME_BYTES_MAX: usize = 256;

/// An envelope that was understood.
#[derive(Clone, Debug, PartialEq)]
pub struct Envelope {
    /// Goes back with the answer.
    pub message_id: String,
    /// In order.
    pub actions: Vec<Asked>,
}

/// One action.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Goes back with its outcome.
    pub id: String,
    /// What is wanted, or why that cannot be.
    pub what: Result<Wanted, String>,
}

/// What is to be done with what.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The verb.
    pub verb: Verb,
    /// What it is about.
    pub target: Target,
}

/// A verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Keep the bytes for a time.
    Pin(Ttl),
    /// Raise the importance.
    Retain {
        /// To this.
        priority: i32,
        /// Until so many idle seconds have passed; `None` is for good.
        seconds: Option<u64>,
    },
    /// Bring up what lies on a lower tier.
    Prefetch {
        /// Where to.
        to: Destination,
        /// What no tier has is computed, below all client work.
        compute: bool,
    },
    /// Bring down what lies on the device.
    Demote,
    /// Give up pins.
    Release {
        /// Also those of all programs that a session has started, and that these have.
        children: bool,
    },
}

/// Where something is brought up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The host tier.
    Host,
    /// A device: where the session ran last, else the first.
    Device,
    /// The device of this replica.
    DeviceOf(u16),
}

/// What a verb is about.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// A prompt as tokens.
    Tokens(Vec<Token>),
    /// A conversation, to be rendered: the fields of a chat request.
    Messages(Value),
    /// All that a session or program has; its last prompt while its first request runs.
    Session(String),
    /// Pages by their chained hashes, from the root on.
    Hashes(Vec<u64>),
    /// The prefix that ends with a node.
    Node(NodeRef),
    /// The prompt of the request that carries the envelope.
    Own,
}

/// Reads an envelope; `inside` a request, whose own prompt is meant where no target is named.
///
/// # Errors
/// It has not its form, or too many actions.
pub fn read(body: &Value, inside: bool) -> Result<Envelope, ApiError> {
    let object = body
        .as_object()
        .ok_or_else(|| ApiError::param("kv_hints", "an object with actions is wanted"))?;
    let version = object.get("protocol_version").and_then(Value::as_str);
    if !version.is_none_or(|version| version.starts_with("0.")) {
        let message = format!(
            "protocol_version is {:?}; this server knows 0.x",
            version.unwrap_or_default()
        );
        return Err(ApiError::param("protocol_version", message));
    }
    let message_id = name(object, "message_id").unwrap_or_default();
    let actions = object
        .get("actions")
        .and_then(Value::as_array)
        .ok_or_else(|| ApiError::param("actions", "actions must be an array"))?;
    if actions.len() > ACTIONS_MAX {
        let message = format!(
            "{} actions; at most {ACTIONS_MAX} are possible",
            actions.len()
        );
        return Err(ApiError::param("actions", message));
    }
    let actions = actions.iter().enumerate().map(|(at, action)| {
        let object = action.as_object();
        Asked {
            id: object
                .and_then(|object| name(object, "action_id"))
                .unwrap_or_else(|| at.to_string()),
            what: match object {
                Some(object) => wanted(object, inside),
                None => Err("an action must be an object".to_owned()),
            },
        }
    });
    Ok(Envelope {
        message_id,
        actions: actions.collect(),
    })
}

fn name(object: &Map<String, Value>, field: &str) -> Option<String> {
    let text = object.get(field)?.as_str()?;
    (text.len() <= NAME_BYTES_MAX).then(|| text.to_owned())
}

fn wanted(action: &Map<String, Value>, inside: bool) -> Result<Wanted, String> {
    let kind = name(action, "action_type").ok_or("action_type must be a string")?;
    if let Some(version) = action.get("action_version") {
        let text = version.as_str().unwrap_or_default();
        if !(text == "1" || text.starts_with("1.")) {
            return Err(format!(
                "action_version is {version}; this server knows 1.x"
            ));
        }
    }
    let empty = Map::new();
    let payload = match action.get("payload") {
        None | Some(Value::Null) => &empty,
        Some(Value::Object(payload)) => payload,
        Some(_) => return Err("payload must be an object".to_owned()),
    };
    let lower = kind.to_ascii_lowercase();
    let verb = match lower.strip_prefix("kv.").unwrap_or(&lower) {
        "pin" => Verb::Pin(ttl(payload)?),
        "retain" => retain(payload)?,
        "prefetch" => prefetch(payload)?,
        "demote" => Verb::Demote,
        "release" | "unpin" => release(payload)?,
        _ => {
            return Err(format!(
                "unknown action_type {kind:?}; known are kv.pin, kv.retain, kv.prefetch, \
                 kv.demote and kv.release"
            ));
        }
    };
    let target = target(payload, inside)?;
    if target == Target::Own && !matches!(verb, Verb::Pin(_) | Verb::Retain { .. }) {
        return Err(format!(
            "{kind} needs a target; a request's own prompt can be pinned and retained"
        ));
    }
    Ok(Wanted { verb, target })
}

fn prefetch(payload: &Map<String, Value>) -> Result<Verb, String> {
    let rank = number(payload, "dp_rank")?;
    let device = rank.map_or(Destination::Device, Destination::DeviceOf);
    let to = match payload.get("destination") {
        None | Some(Value::Null) => device,
        Some(place) => match place.as_str().map(str::to_ascii_lowercase).as_deref() {
            Some("device" | "gpu") => device,
            Some("host" | "cpu") => Destination::Host,
            _ => {
                return Err(format!(
                    "destination is {place}; device and host are possible"
                ));
            }
        },
    };
    let compute = match payload.get("compute") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(compute)) => *compute,
        Some(other) => return Err(format!("compute is {other}; true and false are possible")),
    };
    if compute && !payload.contains_key("messages") {
        return Err("compute needs messages, from which the prompt can be rendered".to_owned());
    }
    Ok(Verb::Prefetch { to, compute })
}

fn release(payload: &Map<String, Value>) -> Result<Verb, String> {
    let children = match payload.get("children") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(children)) => *children,
        Some(value) => return Err(format!("children is {value}; true or false is wanted")),
    };
    Ok(Verb::Release { children })
}

fn ttl(payload: &Map<String, Value>) -> Result<Ttl, String> {
    let stated = payload.get("ttl").or_else(|| payload.get("ttl_seconds"));
    match stated {
        None | Some(Value::Null) => Ok(ttl_of_seconds(TTL_DEFAULT_S)),
        Some(Value::String(text)) => {
            parse_ttl(text).map_err(|error| format!("ttl is {text:?}; {error}"))
        }
        Some(value) => match value.as_u64() {
            Some(seconds) => Ok(ttl_of_seconds(seconds)),
            None => Err(format!(
                "ttl is {value}; seconds or a text such as 5m is wanted"
            )),
        },
    }
}

fn retain(payload: &Map<String, Value>) -> Result<Verb, String> {
    let priority = number(payload, "priority")?;
    Ok(Verb::Retain {
        priority: priority.ok_or("priority is missing; a whole number is wanted")?,
        seconds: number(payload, "retention_seconds")?,
    })
}

fn number<T: TryFrom<i64>>(payload: &Map<String, Value>, field: &str) -> Result<Option<T>, String> {
    match payload.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let number = value.as_i64().and_then(|number| T::try_from(number).ok());
            let wrong = || format!("{field} is {value}; a whole number in its range is wanted");
            number.map(Some).ok_or_else(wrong)
        }
    }
}

fn target(payload: &Map<String, Value>, inside: bool) -> Result<Target, String> {
    const NAMES: [&str; 6] = [
        "tokens",
        "messages",
        "session",
        "program",
        "block_hashes",
        "node",
    ];
    let nested = payload.get("target").and_then(Value::as_object);
    let from = nested.unwrap_or(payload);
    let stated = |name: &&str| from.get(*name).is_some_and(|value| !value.is_null());
    let found: Vec<&str> = NAMES.into_iter().filter(stated).collect();
    if inside && found.is_empty() {
        return Ok(Target::Own);
    }
    let &[field] = found.as_slice() else {
        return Err(format!(
            "one target of tokens, messages, session, program, block_hashes and node is wanted, {} \
             found",
            found.len()
        ));
    };
    let value = from.get(field).cloned().unwrap_or_default();
    match field {
        "tokens" => {
            let token = |value: &Value| value.as_u64().and_then(|id| Token::try_from(id).ok());
            let tokens = list(&value, token).ok_or("tokens must be an array of token ids")?;
            Ok(Target::Tokens(tokens))
        }
        "messages" => Ok(Target::Messages(Value::Object(from.clone()))),
        "node" => {
            let node = value.as_str().and_then(|id| id.parse().ok());
            node.map(Target::Node)
                .ok_or_else(|| "node must be the id of a node, as 12.3".to_owned())
        }
        "block_hashes" => {
            // Signed or unsigned: the same 64 bits.
            let hash = |value: &Value| {
                let signed = value.as_i64().map(i64::cast_unsigned);
                value.as_u64().or(signed)
            };
            let hashes = list(&value, hash).ok_or("block_hashes must be an array of integers")?;
            Ok(Target::Hashes(hashes))
        }
        _ => match value.as_str() {
            Some(id) if !id.is_empty() && id.len() <= NAME_BYTES_MAX => {
                Ok(Target::Session(id.to_owned()))
            }
            Some(_) | None => Err(format!(
                "{field} must be a text of 1 to {NAME_BYTES_MAX} bytes"
            )),
        },
    }
}

fn list<T>(value: &Value, item: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    value.as_array()?.iter().map(item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(action: Value) -> Result<Wanted, String> {
        let body = json!({"protocol_version": "0.1", "message_id": "m", "actions": [action]});
        let mut envelope = read(&body, false).unwrap();
        assert_eq!(envelope.message_id, "m");
        envelope.actions.remove(0).what
    }

    #[test]
    fn each_verb_is_read_with_its_payload() {
        let tokens = || Target::Tokens(vec![1, 2]);
        let act = |kind: &str, mut payload: Value| {
            payload["tokens"] = json!([1, 2]);
            let wanted = one(json!({"action_type": kind, "payload": payload})).unwrap();
            assert_eq!(wanted.target, tokens());
            wanted.verb
        };
        assert_eq!(act("kv.pin", json!({})), Verb::Pin(ttl_of_seconds(300)));
        assert_eq!(
            act("Pin", json!({"ttl": "2m"})),
            Verb::Pin(ttl_of_seconds(120))
        );
        assert_eq!(
            act("pin", json!({"ttl_seconds": 7})),
            Verb::Pin(ttl_of_seconds(7))
        );
        let retain = Verb::Retain {
            priority: -3,
            seconds: Some(60),
        };
        let payload = json!({"priority": -3, "retention_seconds": 60});
        assert_eq!(act("kv.retain", payload), retain);
        let up = |to| Verb::Prefetch { to, compute: false };
        let second = up(Destination::DeviceOf(2));
        assert_eq!(act("Prefetch", json!({"dp_rank": 2})), second);
        let device = act("Prefetch", json!({"destination": "GPU"}));
        assert_eq!(device, up(Destination::Device));
        let host = act("Prefetch", json!({"destination": "host"}));
        assert_eq!(host, up(Destination::Host));
        assert_eq!(act("kv.demote", json!({})), Verb::Demote);
        let release = |children| Verb::Release { children };
        assert_eq!(act("RELEASE", json!({})), release(false));
        let all = act("kv.release", json!({"children": true}));
        assert_eq!(all, release(true));
    }

    #[test]
    fn each_target_is_read() {
        let target = |payload: Value| {
            one(json!({"action_type": "kv.demote", "payload": payload})).map(|wanted| wanted.target)
        };
        let session = || Ok(Target::Session("s".into()));
        assert_eq!(target(json!({"session": "s"})), session());
        assert_eq!(target(json!({"target": {"program": "s"}})), session());
        let hashes = target(json!({"block_hashes": [-1, 5, u64::MAX]}));
        assert_eq!(hashes, Ok(Target::Hashes(vec![u64::MAX, 5, u64::MAX])));
        assert!(matches!(
            target(json!({"messages": []})),
            Ok(Target::Messages(_))
        ));
    }

    #[test]
    fn what_is_wrong_with_an_action_is_told_and_stops_no_other() {
        let cases = [
            (json!(5), "an object"),
            (
                json!({"action_type": "kv.fetch", "payload": {}}),
                "unknown action_type",
            ),
            (json!({"action_type": "pin", "payload": {}}), "0 found"),
            (
                json!({"action_type": "pin", "payload": {"tokens": [], "session": "s"}}),
                "2 found",
            ),
            (
                json!({"action_type": "pin", "payload": {"tokens": [-1]}}),
                "token ids",
            ),
            (
                json!({"action_type": "pin", "payload": {"tokens": [1], "ttl": "1d"}}),
                "\"1d\"",
            ),
            (
                json!({"action_type": "retain", "payload": {"tokens": [1]}}),
                "priority is missing",
            ),
            (
                json!({"action_type": "pin", "action_version": "2.0"}),
                "this server knows 1.x",
            ),
            (
                json!({"action_type": "prefetch", "payload": {"dp_rank": 70000}}),
                "dp_rank is",
            ),
            (
                json!({"action_type": "prefetch", "payload": {"destination": "moon"}}),
                "device and host",
            ),
            (
                json!({"action_type": "release", "payload": {"session": "s", "children": 1}}),
                "children is 1",
            ),
        ];
        for (action, wanted) in cases {
            let reason = one(action.clone()).unwrap_err();
            assert!(reason.contains(wanted), "{action}: {reason}");
        }
        let body = json!({"actions": [1, {"action_type": "release", "action_id": "b",
            "payload": {"session": "s"}}]});
        let envelope = read(&body, false).unwrap();
        assert!(envelope.actions[0].what.is_err() && envelope.actions[1].what.is_ok());
        assert_eq!(envelope.actions[0].id, "0");
        assert_eq!(envelope.actions[1].id, "b");
    }

    #[test]
    fn an_envelope_without_its_form_is_refused() {
        let many = vec![json!({}); ACTIONS_MAX + 1];
        for (body, param) in [
            (json!([]), "kv_hints"),
            (json!({}), "actions"),
            (json!({"actions": {}}), "actions"),
            (json!({"actions": many}), "actions"),
            (
                json!({"actions": [], "protocol_version": "2.0"}),
                "protocol_version",
            ),
        ] {
            let refused = read(&body, false).unwrap_err();
            assert_eq!(refused.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn inside_a_request_its_own_prompt_is_meant_where_that_makes_sense() {
        let body = json!({"actions": [
            {"action_type": "pin"}, {"action_type": "retain", "payload": {"priority": 2}},
            {"action_type": "demote"}, {"action_type": "pin", "payload": {"session": "s"}},
        ]});
        let found = read(&body, true).unwrap().actions;
        let target = |at: usize| found[at].what.clone().map(|wanted| wanted.target);
        assert_eq!((target(0), target(1)), (Ok(Target::Own), Ok(Target::Own)));
        assert!(target(2).unwrap_err().contains("needs a target"));
        assert_eq!(target(3), Ok(Target::Session("s".into())));
        let apart = read(&body, false).unwrap().actions;
        assert!(apart[0].what.is_err() && apart[3].what.is_ok());
    }
}
