//! How long KV stays important: `retention_seconds` beside `priority`, and TensorRT-LLM's
//! `kv_cache_retention_config` (token ranges with priority 0 to 100 and a duration, and another
//! priority for what is generated). Its default priority of 35 is our 0.

use rootstock_radix::{Hints, Retention};
use serde_json::Value;

use super::fields::{Fields, Notes};

/// Token ranges that are kept of one request.
const RANGES_MAX: usize = 64;

const CONFIG: &str = "kv_cache_retention_config";
const RANGES: &str = "token_range_retention_configs";

/// Reads both forms into `hints`; the object may stand in `nvext` or at the top level.
pub(super) fn read(
    agent_hints: &Fields<'_>,
    body: &Fields<'_>,
    top: &Value,
    hints: &mut Hints,
    notes: &mut Notes,
) {
    hints.retention_s = agent_hints.int("retention_seconds", notes);
    let config = body.get(CONFIG).or_else(|| top.get(CONFIG));
    let fields = Fields::of(config, CONFIG, notes);
    let known = [RANGES, "decode_retention_priority", "decode_duration_ms"];
    fields.note_unknown(&known, notes);
    let priority = priority_of(&fields, "decode_retention_priority", notes);
    let seconds = seconds_of(&fields, &["decode_duration_ms"], notes);
    hints.retain_output =
        priority.map(|priority| Retention::of_tensorrt_priority(priority, seconds));
    let Some(value) = fields.get(RANGES) else {
        return;
    };
    let Some(ranges) = value.as_array() else {
        fields.expected(RANGES, "a list of objects", value, notes);
        return;
    };
    if ranges.len() > RANGES_MAX {
        let reason = format!("more than {RANGES_MAX} ranges");
        notes.add(&fields.path(RANGES), &reason);
    }
    for range in ranges.iter().take(RANGES_MAX) {
        read_range(range, hints, notes);
    }
}

/// `{token_start, token_end, priority, duration_ms}`; an absent end is the end of the prompt, an
/// absent duration is for good.
fn read_range(value: &Value, hints: &mut Hints, notes: &mut Notes) {
    let fields = Fields::of(Some(value), RANGES, notes);
    let known = [
        "token_start",
        "token_end",
        "start",
        "end",
        "priority",
        "duration_ms",
        "duration",
    ];
    fields.note_unknown(&known, notes);
    let mut bound = |long, short| {
        let long: Option<u32> = fields.int(long, notes);
        long.or_else(|| fields.int(short, notes))
    };
    let start = bound("token_start", "start").unwrap_or(0);
    let end = bound("token_end", "end").unwrap_or(u32::MAX);
    let seconds = seconds_of(&fields, &["duration_ms", "duration"], notes);
    let Some(priority) = priority_of(&fields, "priority", notes) else {
        return;
    };
    if start < end {
        let retention = Retention::of_tensorrt_priority(priority, seconds);
        hints.retain.push((start..end, retention));
    } else {
        notes.add(
            &fields.path("token_end"),
            &format!("{end} is not beyond {start}"),
        );
    }
}

fn priority_of(fields: &Fields<'_>, key: &str, notes: &mut Notes) -> Option<u32> {
    let priority: u32 = fields.int(key, notes)?;
    if priority > 100 {
        notes.add(&fields.path(key), &format!("{priority} clamped to 100"));
    }
    Some(priority.min(100))
}

/// Milliseconds, rounded up to seconds.
fn seconds_of(fields: &Fields<'_>, keys: &[&str], notes: &mut Notes) -> Option<u32> {
    let key = keys.iter().find(|key| fields.get(key).is_some())?;
    let ms = fields.number(key, notes)?;
    if ms < 0.0 {
        notes.add(&fields.path(key), "expected milliseconds >= 0");
        return None;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and a cast from a float saturates"
    )]
    let seconds = (ms / 1000.0).ceil() as u32;
    Some(seconds)
}
