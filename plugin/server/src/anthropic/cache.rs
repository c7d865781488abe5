//! `cache_control`, wherever Anthropic's API has it, and the usage that follows from it.
//!
//! A breakpoint keeps the prefix up to its block, for 5 minutes or an hour; each hit renews it.
//! As in that API there are at most four, and any other lifetime is the caller's mistake: one that
//! silently became another costs money.

use rootstock::radix::Ttl;
use serde_json::{Value, json};

use crate::chat::conversation::{Mark, Place};
use crate::http::api_error::ApiError;
use crate::openai::fields::{Fields, wrong_type};

/// Breakpoints of a request, at most.
pub const BREAKPOINTS_MAX: usize = 4;

const SHORT_S: u64 = 300;
const LONG_S: u64 = 3600;

/// The lifetime that a block's `cache_control` asks for.
///
/// # Errors
/// A type other than `ephemeral`, or a lifetime other than `5m` and `1h`.
pub fn read_ttl(fields: &Fields<'_>) -> Result<Option<Ttl>, ApiError> {
    let Some(control) = fields.get("cache_control") else {
        return Ok(None);
    };
    let control = Fields::at(control, &fields.name("cache_control"))?;
    let refuse = |key: &str, wanted: &str, found: &str| {
        let name = control.name(key);
        let found: String = found.chars().take(40).collect();
        let message = format!("{name} must be {wanted}, found {found:?}");
        ApiError::param(name, message)
    };
    match control.text("type")? {
        Some("ephemeral") => {}
        other => return Err(refuse("type", "\"ephemeral\"", other.unwrap_or_default())),
    }
    let seconds = match control.get("ttl") {
        None => SHORT_S,
        Some(Value::String(ttl)) => match ttl.as_str() {
            "5m" => SHORT_S,
            "1h" => LONG_S,
            other => return Err(refuse("ttl", "\"5m\" or \"1h\"", other)),
        },
        Some(other) => return Err(wrong_type(&control.name("ttl"), "\"5m\" or \"1h\"", other)),
    };
    Ok(Some(Ttl {
        seconds,
        clamped: false,
    }))
}

/// Checks the breakpoints of a request. A longer lifetime may stand behind a shorter one: released
/// clients send that.
///
/// # Errors
/// Too many.
pub fn check(marks: &[Mark]) -> Result<(), ApiError> {
    let found = marks.len();
    if found > BREAKPOINTS_MAX {
        let message =
            format!("at most {BREAKPOINTS_MAX} blocks may have cache_control, found {found}");
        return Err(ApiError::param("cache_control", message));
    }
    Ok(())
}

/// The breakpoint of `cache_control` at the root: the whole prompt.
///
/// # Errors
/// As [`read_ttl`].
pub fn read_root(fields: &Fields<'_>) -> Result<Option<Mark>, ApiError> {
    let place = Place::End;
    Ok(read_ttl(fields)?.map(|ttl| Mark { place, ttl }))
}

/// A prompt's tokens as Anthropic counts them: disjoint, and together the whole prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Neither read from the cache nor written for a breakpoint.
    pub input: u32,
    /// Found in the cache.
    pub read: u32,
    /// Written for breakpoints of 5 minutes.
    pub short: u32,
    /// Written for breakpoints of an hour.
    pub long: u32,
}

impl CacheUsage {
    /// Splits a prompt of which `cached` tokens were found. Each breakpoint (tokens before it, and
    /// its lifetime) stands for what lies between it and the one before.
    pub fn of(prompt_tokens: u32, cached: u32, breakpoints: &[(u32, Ttl)]) -> CacheUsage {
        let mut usage = CacheUsage {
            read: cached.min(prompt_tokens),
            ..CacheUsage::default()
        };
        let mut breakpoints = breakpoints.to_vec();
        breakpoints.sort_by_key(|(tokens, _)| *tokens);
        let mut at = usage.read;
        for (tokens, ttl) in breakpoints {
            let written = tokens.min(prompt_tokens).saturating_sub(at);
            at += written;
            if ttl.seconds >= LONG_S {
                usage.long += written;
            } else {
                usage.short += written;
            }
        }
        usage.input = prompt_tokens - at;
        usage
    }

    /// The `usage` object.
    pub fn json(self, output_tokens: u32) -> Value {
        json!({
            "input_tokens": self.input,
            "cache_creation_input_tokens": self.short + self.long,
            "cache_read_input_tokens": self.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": self.short,
                "ephemeral_1h_input_tokens": self.long,
            },
            "output_tokens": output_tokens,
            "service_tier": "standard",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ttl(control: Value) -> Result<Option<Ttl>, ApiError> {
        let body = json!({"cache_control": control});
        read_ttl(&Fields::root(&body).unwrap())
    }

    #[test]
    fn lifetimes_are_those_of_the_api_and_nothing_else() {
        let seconds = |control| ttl(control).unwrap().map(|ttl| ttl.seconds);
        assert_eq!(seconds(json!(null)), None);
        assert_eq!(seconds(json!({"type": "ephemeral"})), Some(300));
        assert_eq!(
            seconds(json!({"type": "ephemeral", "ttl": "5m"})),
            Some(300)
        );
        assert_eq!(
            seconds(json!({"type": "ephemeral", "ttl": "1h"})),
            Some(3600)
        );
        for bad in ["90s", "0s", "1hr", "", "-5m", "99999999999h", "5M"] {
            let error = ttl(json!({"type": "ephemeral", "ttl": bad})).unwrap_err();
            assert!(
                error.message.contains(&format!("{bad:?}")),
                "{}",
                error.message
            );
        }
        assert!(ttl(json!({"type": "ephemeral", "ttl": 300})).is_err());
        assert!(ttl(json!({"type": "persistent"})).is_err());
        assert!(ttl(json!("ephemeral")).is_err());
    }

    #[test]
    fn the_parts_of_a_prompt_add_up() {
        let marks = |list: &[(u32, u64)]| -> Vec<(u32, Ttl)> {
            let clamped = false;
            list.iter()
                .map(|&(at, seconds)| (at, Ttl { seconds, clamped }))
                .collect()
        };
        let lists = [
            marks(&[]),
            marks(&[(40, 3600), (70, 300)]),
            marks(&[(100, 300)]),
            marks(&[(500, 300)]),
        ];
        for list in lists {
            for cached in [0, 16, 48, 96, 200] {
                let usage = CacheUsage::of(100, cached, &list);
                let sum = usage.input + usage.read + usage.short + usage.long;
                assert_eq!(sum, 100, "{cached} {list:?}");
            }
        }
        let usage = CacheUsage::of(100, 48, &marks(&[(40, 3600), (70, 300)]));
        assert_eq!(
            (usage.read, usage.long, usage.short, usage.input),
            (48, 0, 22, 30)
        );
    }
}
