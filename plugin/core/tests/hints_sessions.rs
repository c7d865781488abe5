//! Which agent a request belongs to, as the headers and bodies of known agents say it, and the
//! requests captured from released SDKs.

use rootstock::hints::{ParsedHints, SessionSource, parse};
use serde_json::{Value, json};

fn nvext(nvext: Value) -> ParsedHints {
    parse(&nvext, &json!({}), &[])
}

fn agent_hints(hints: Value) -> ParsedHints {
    nvext(json!({ "agent_hints": hints }))
}

fn headers(headers: &[(&str, &str)]) -> ParsedHints {
    parse(&Value::Null, &json!({}), headers)
}

fn ignored(parsed: &ParsedHints) -> Vec<&str> {
    parsed.hints.ignored.iter().map(String::as_str).collect()
}

/// Headers written as one line, `name: value` parted by commas.
fn header_line(line: &str) -> ParsedHints {
    let sent: Vec<(&str, &str)> = line
        .split(", ")
        .filter_map(|h| h.split_once(": "))
        .collect();
    headers(&sent)
}

#[test]
fn sessions_of_known_agents_are_found_in_their_headers() {
    use SessionSource::{ClaudeCode, Codex, Dynamo, OpenCode};
    const CC: &str = "X-Claude-Code-Session-Id: s";
    let cases = [
        (
            "x-dynamo-session-id: 1, x-dynamo-parent-session-id: 0",
            "1",
            "0",
            Dynamo,
        ),
        (
            "x-dynamo-session-id: d, x-claude-code-session-id: s",
            "d",
            "",
            Dynamo,
        ),
        (CC, "s", "", ClaudeCode),
        (
            &format!("{CC}, x-claude-code-agent-id: a"),
            "a",
            "s",
            ClaudeCode,
        ),
        (
            &format!("{CC}, x-claude-code-agent-id: b, x-claude-code-parent-agent-id: a"),
            "b",
            "a",
            ClaudeCode,
        ),
        (
            "session-id: r, thread-id: r, x-codex-window-id: r:0",
            "r",
            "",
            Codex,
        ),
        (
            "session-id: r, thread-id: c, x-codex-parent-thread-id: r",
            "c",
            "r",
            Codex,
        ),
        ("session-id: r", "r", "", Codex),
        (
            "x-session-id: 2, x-parent-session-id: 1, session-id: 2",
            "2",
            "1",
            OpenCode,
        ),
        ("x-session-id: 1, x-parent-session-id: 1", "1", "", OpenCode),
        ("x-session-id:   ", "", "", SessionSource::None),
        ("", "", "", SessionSource::None),
    ];
    for (line, id, parent, source) in cases {
        let parsed = header_line(line);
        assert_eq!(parsed.session.id.as_deref().unwrap_or(""), id, "{line}");
        assert_eq!(
            parsed.session.parent.as_deref().unwrap_or(""),
            parent,
            "{line}"
        );
        assert_eq!(parsed.session.source, source, "{line}");
        assert_eq!(parsed.hints.program, parsed.session.id);
        assert_eq!(parsed.hints.parent, parsed.session.parent);
    }
}

#[test]
fn a_final_session_is_marked_and_a_malformed_mark_is_noted() {
    let last = |text| {
        headers(&[
            ("x-dynamo-session-id", "r"),
            ("x-dynamo-session-final", text),
        ])
    };
    assert!(last("true").hints.session_final && last("1").hints.session_final);
    assert!(!last("false").hints.session_final);
    let parsed = last("maybe");
    assert!(!parsed.hints.session_final);
    assert_eq!(parsed.hints.ignored.len(), 1);
}

#[test]
fn sessions_in_the_body_are_a_fallback() {
    let id = |nvext: Value, top: Value| parse(&nvext, &top, &[]).session.id;
    let user = json!({"metadata": {"user_id": "{\"device_id\":\"d\",\"session_id\":\"u1\"}"}});
    assert_eq!(id(Value::Null, user).as_deref(), Some("u1"));
    assert_eq!(
        id(Value::Null, json!({"metadata": {"user_id": "plain"}})),
        None
    );
    assert_eq!(
        id(Value::Null, json!({"prompt_cache_key": "k1"})).as_deref(),
        Some("k1")
    );
    let context = json!({"agent_context": {
        "session_id": "root", "trajectory_id": "t", "parent_trajectory_id": "p",
        "trajectory_final": true, "session_type_id": "x"
    }});
    let parsed = nvext(context);
    assert!(ignored(&parsed).is_empty(), "{:?}", parsed.hints.ignored);
    assert_eq!(parsed.hints.program.as_deref(), Some("t"));
    assert_eq!(parsed.hints.parent.as_deref(), Some("p"));
    assert_eq!(parsed.session.root.as_deref(), Some("root"));
    assert!(parsed.hints.session_final);
    let control = json!({"session_control": {"session_id": "c", "action": "close", "timeout": 9}});
    let parsed = nvext(control);
    assert_eq!(
        (parsed.hints.program.as_deref(), parsed.hints.session_final),
        (Some("c"), true)
    );
}

#[test]
fn a_prefix_id_made_new_for_each_request_is_no_program() {
    let parsed = agent_hints(json!({"prefix_id": "langchain-dynamo-119c40072b55"}));
    assert_eq!(parsed.hints.program, None);
    assert_eq!(parsed.hints.ignored.len(), 1);
    let parsed = agent_hints(json!({"prefix_id": "eval-q001"}));
    assert_eq!(parsed.hints.program.as_deref(), Some("eval-q001"));
}

#[test]
fn overlong_ids_and_floods_of_agent_headers_are_bounded() {
    let long = "x".repeat(10_000);
    let parsed = headers(&[("x-dynamo-session-id", &long), ("x-request-id", &long)]);
    assert_eq!(parsed.session.id, None);
    assert!(parsed.request_label.expect("a label").len() <= 256);
    let flood: Vec<_> = (0..200).map(|_| ("X-Codex-Thing", long.as_str())).collect();
    let parsed = headers(&flood);
    assert_eq!(parsed.lifecycle.len(), 3, "32 KiB of values of 10 kB");
    assert_eq!(parsed.lifecycle[0].0, "x-codex-thing");
}

#[test]
fn requests_captured_from_released_sdks_are_understood() {
    let captured = include_str!("data/captured_hints.jsonl");
    let mut seen = 0;
    for line in captured.lines() {
        let record: Value = serde_json::from_str(line).expect("a JSON line");
        let sent: Vec<(&str, &str)> = record["headers"]
            .as_object()
            .expect("headers")
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str().expect("a text")))
            .collect();
        let parsed = parse(&record["nvext"], &record["top"], &sent);
        let random = record["client"]
            .as_str()
            .is_some_and(|name| name.contains("nvidia-ai"));
        let notes = usize::from(random);
        assert_eq!(
            parsed.hints.ignored.len(),
            notes,
            "{line}: {:?}",
            parsed.hints.ignored
        );
        let hints = &record["nvext"]["agent_hints"];
        assert_eq!(
            i64::from(parsed.hints.priority),
            hints["priority"].as_i64().unwrap_or(0)
        );
        assert_eq!(parsed.hints.osl.map(u64::from), hints["osl"].as_u64());
        assert_eq!(parsed.hints.iat_ms.map(u64::from), hints["iat"].as_u64());
        let pinned = record["nvext"]["cache_control"].is_object();
        assert_eq!(parsed.hints.pins.len(), usize::from(pinned), "{line}");
        seen += 1;
    }
    assert!(seen >= 15, "{seen} captured requests");
}
