//! Anthropic's Messages over a backend that repeats its prompt: shape (E4), usage (E2),
//! `cache_control` (F2), the billing line (F3), errors (E5, E6), signs of life. One server for
//! most of the file.

use std::sync::OnceLock;

use crate::client::{Answer, Open};
use crate::server::{ParrotSetup, Server};
use serde_json::{Value, json};

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::parrot(ParrotSetup::default()))
}

fn ask(body: Value) -> Answer {
    let mut all = json!({"model": "some-haiku-name", "max_tokens": 400});
    all.as_object_mut()
        .unwrap()
        .extend(body.as_object().unwrap().clone());
    server().post("/v1/messages", &all)
}

/// A message of the user that makes the parrot say a text.
fn user(text: &str) -> Value {
    json!({"role": "user", "content": format!("~{text}")})
}

fn tools() -> Value {
    json!([{"name": "look", "description": "looks", "input_schema": {"type": "object",
        "properties": {"path": {"type": "string"}}}, "eager_input_streaming": true},
        {"type": "web_search_20250305", "name": "web_search"}])
}

fn call_text(arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"look\", \"arguments\": {arguments}}}\n</tool_call>")
}

/// A message put together from its events, in the form of a plain answer.
pub(crate) fn assembled(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut blocks: Vec<Value> = Vec::new();
    for (name, event) in events {
        assert_eq!(event["type"], name.as_str());
        let index = usize::try_from(event["index"].as_u64().unwrap_or_default()).unwrap();
        match name.as_str() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(index, blocks.len(), "blocks are numbered 0, 1, 2, ..");
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let (delta, block) = (&event["delta"], &mut blocks[index]);
                let add = |block: &mut Value, key: &str, more: &Value| {
                    let text = block[key].as_str().unwrap_or_default().to_owned();
                    block[key] = (text + more.as_str().unwrap()).into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add(block, "text", &delta["text"]),
                    "thinking_delta" => add(block, "thinking", &delta["thinking"]),
                    "signature_delta" => add(block, "signature", &delta["signature"]),
                    "input_json_delta" => {
                        let text = delta["partial_json"].as_str().unwrap();
                        block["input"] = serde_json::from_str(text).unwrap();
                    }
                    other => panic!("unknown delta {other}"),
                }
            }
            "message_delta" => {
                for key in ["stop_reason", "stop_sequence"] {
                    message[key] = event["delta"][key].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "content_block_stop" | "ping" | "message_stop" => {}
            other => panic!("unknown event {other}"),
        }
    }
    message["content"] = blocks.into();
    message
}

/// The part of an answer that does not differ from one request to the next.
pub(crate) fn lasting(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert!(
                block["id"].as_str().unwrap().starts_with("toolu_"),
                "{block}"
            );
            block["id"] = Value::Null;
        }
    }
    message
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    let names = events.iter().map(|(name, _)| name.as_str());
    names
        .filter(|name| *name != "ping" && *name != "content_block_delta")
        .collect()
}

#[test]
fn a_stream_put_together_is_the_plain_answer() {
    let bodies = [
        json!({"messages": [user("hello \u{1F600} there")]}),
        json!({"messages": [user("one two three")], "stop_sequences": ["two"]}),
        json!({"messages": [user("cut off")], "max_tokens": 3}),
        json!({"messages": [user(&format!("Let me see.\n{}\n{}", call_text("{\"path\": \"a\"}"),
            call_text("{}")))], "tools": tools()}),
        json!({"messages": [user(&call_text("{\"path\": \"a"))], "tools": tools()}),
        json!({"messages": [user("")]}),
        json!({"messages": [{"role": "user", "content": "~a"},
            {"role": "assistant", "content": "~and so on"}]}),
    ];
    for body in bodies {
        // The first request warms the cache, so that usage is the same in the next two.
        assert_eq!(ask(body.clone()).status, 200);
        let plain = ask(body.clone());
        let mut streaming = body.clone();
        streaming["stream"] = true.into();
        let events = ask(streaming).named_events();
        assert!(plain.json()["id"].as_str().unwrap().starts_with("msg_"));
        assert_eq!(lasting(assembled(&events)), lasting(plain.json()), "{body}");
        assert_eq!(names(&events).first(), Some(&"message_start"));
        assert_eq!(
            names(&events)[names(&events).len() - 2..],
            ["message_delta", "message_stop"]
        );
    }
}

#[test]
fn calls_become_blocks_and_text_before_them_stays_text() {
    let text = format!("Let me see.\n{}", call_text("{\"path\": \"a\", \"n\": 1}"));
    let answer = ask(json!({"messages": [user(&text)], "tools": tools()})).json();
    let content = answer["content"].as_array().unwrap();
    assert_eq!(content.len(), 2);
    assert_eq!(content[0], json!({"type": "text", "text": "Let me see."}));
    assert_eq!(content[1]["name"], "look");
    assert_eq!(content[1]["input"], json!({"path": "a", "n": 1}));
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["model"], "some-haiku-name");
}

#[test]
fn a_call_that_was_cut_off_is_no_call() {
    let text = call_text("{\"path\": \"a\"}");
    let cut = json!({"messages": [user(&text)], "tools": tools(), "max_tokens": 40});
    let answer = ask(cut);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    assert_eq!(answer["stop_reason"], "max_tokens");
    let content = answer["content"].as_array().unwrap();
    assert!(
        content.iter().all(|block| block["type"] == "text"),
        "{content:?}"
    );
    assert!(
        content[0]["text"]
            .as_str()
            .unwrap()
            .starts_with("<tool_call>")
    );
}

#[test]
fn stop_sequences_are_named_and_cut() {
    let body = json!({"messages": [user("one two three")], "stop_sequences": ["x", " tw"]});
    let answer = ask(body).json();
    assert_eq!(answer["content"][0]["text"], "one");
    assert_eq!(answer["stop_reason"], "stop_sequence");
    assert_eq!(answer["stop_sequence"], " tw");
}

/// The smallest body of E4: the model sees "42", and the note in the middle stays in its place.
#[test]
fn results_as_lists_and_system_messages_in_the_middle_keep_the_prefix() {
    let head = "E4 ".repeat(40);
    let mut messages = vec![
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": [
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}]}),
        json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "42~"}]}]}),
    ];
    let system = json!([{"type": "text", "text": head}]);
    let body = |messages: &[Value]| json!({"system": system, "messages": messages});
    let first = ask(body(&messages)).json();
    assert_eq!(
        first["content"][0]["text"], "\n</tool_response>",
        "behind the result's ~"
    );
    let prompt = total_input(&first["usage"]);
    messages.push(json!({"role": "assistant", "content": first["content"]}));
    messages.push(json!({"role": "system", "content": "note"}));
    messages.push(user("b"));
    let second = ask(body(&messages)).json();
    assert_eq!(second["content"][0]["text"], "b");
    let read = second["usage"]["cache_read_input_tokens"].as_u64().unwrap();
    assert!(read + 16 > prompt, "{read} of {prompt} were read");
}

fn total_input(usage: &Value) -> u64 {
    let keys = [
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    ];
    let split = &usage["cache_creation"];
    let created = split["ephemeral_5m_input_tokens"].as_u64().unwrap()
        + split["ephemeral_1h_input_tokens"].as_u64().unwrap();
    assert_eq!(usage["cache_creation_input_tokens"], created);
    keys.iter().map(|key| usage[key].as_u64().unwrap()).sum()
}

#[test]
fn breakpoints_move_and_usage_adds_up_to_the_prompt() {
    let long = json!({"type": "ephemeral", "ttl": "1h"});
    let short = json!({"type": "ephemeral"});
    let system = json!([
        {"type": "text", "text": "moving breakpoints", "cache_control": long},
        {"type": "text", "text": "second block ".repeat(9), "cache_control": long},
    ]);
    let turn = |messages: Value| json!({"system": system, "messages": messages});
    let one = json!([{"role": "user", "content": [
        {"type": "text", "text": "one ~first", "cache_control": short}]}]);
    let first = ask(turn(one.clone())).json()["usage"].clone();
    let counted = server()
        .post("/v1/messages/count_tokens", &turn(one))
        .json();
    let prompt = counted["input_tokens"].as_u64().unwrap();
    assert_eq!(total_input(&first), prompt);
    assert_eq!(first["cache_read_input_tokens"], 0);
    let created = &first["cache_creation"];
    assert!(
        created["ephemeral_1h_input_tokens"].as_u64().unwrap() > 100,
        "{created}"
    );
    assert!(
        created["ephemeral_5m_input_tokens"].as_u64().unwrap() > 5,
        "{created}"
    );
    // Only the head of the answer stands behind the last breakpoint.
    assert!(first["input_tokens"].as_u64().unwrap() < 16, "{first}");

    let two = json!([
        {"role": "user", "content": "one ~first"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": [
            {"type": "text", "text": "two ~second", "cache_control": short}]},
    ]);
    let second = ask(turn(two)).json()["usage"].clone();
    let read = second["cache_read_input_tokens"].as_u64().unwrap();
    assert!(read + 16 > prompt, "{read} of {prompt} were read");
    assert_eq!(second["cache_creation"]["ephemeral_1h_input_tokens"], 0);
    assert!(total_input(&second) > prompt);
}

#[test]
fn cache_control_changes_neither_tokens_nor_text_wherever_it_stands() {
    let marked = |control: Value| {
        let mut body = json!({
            "system": [{"type": "text", "text": "everywhere"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "ok"},
                    {"type": "text", "text": "~yes"}]},
            ],
        });
        for path in [
            "/system/0",
            "/tools/0",
            "/messages/1/content/0",
            "/messages/2/content/0",
        ] {
            body.pointer_mut(path).unwrap()["cache_control"] = control.clone();
        }
        body
    };
    let plain = ask(marked(Value::Null)).json();
    let kept = ask(marked(json!({"type": "ephemeral"}))).json();
    assert_eq!(plain["content"], kept["content"]);
    assert_eq!(total_input(&plain["usage"]), total_input(&kept["usage"]));
    let read = kept["usage"]["cache_read_input_tokens"].as_u64().unwrap();
    assert!(
        read + 16 >= total_input(&plain["usage"]),
        "they share their pages"
    );
}

#[test]
fn wrong_cache_control_is_refused_in_anthropics_form() {
    let block = |control: Value| {
        json!({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "x", "cache_control": control}]}]})
    };
    let mut bodies = vec![block(json!({"type": "persistent"}))];
    for ttl in ["90s", "0s", "1hr", "", "-5m", "5M"] {
        bodies.push(block(json!({"type": "ephemeral", "ttl": ttl})));
    }
    let five: Vec<Value> = (0..5)
        .map(|_| json!({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}))
        .collect();
    bodies.push(json!({"messages": [{"role": "user", "content": five}]}));
    for body in bodies {
        let answer = ask(body.clone());
        assert_eq!(answer.status, 400, "{body}");
        let error = answer.json();
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("cache_control"),
            "{error}"
        );
    }
}

#[test]
fn the_billing_line_does_not_cost_the_prefix() {
    let body = |digits: &str, text: &str| {
        json!({"system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.{digits};")},
            {"type": "text", "text": "billing ".repeat(20),
             "cache_control": {"type": "ephemeral"}}],
            "messages": [user(text)]})
    };
    let first = ask(body("abc", "one")).json()["usage"].clone();
    let second = ask(body("def", "two")).json()["usage"].clone();
    let read = second["cache_read_input_tokens"].as_u64().unwrap();
    assert!(
        read > 140,
        "{read} were read, the prompt had {}",
        total_input(&first)
    );
    // Elsewhere the same words are text.
    let mention = "x-anthropic-billing-header: no";
    let said = ask(json!({"messages": [user(mention)]})).json();
    assert_eq!(said["content"][0]["text"], mention);
}

#[test]
fn what_agents_send_beside_the_api_is_taken() {
    let body = json!({
        "model": "x", "max_tokens": 9, "messages": [user("ok")], "stream": true,
        "metadata": {"user_id": "{\"session_id\":\"s\"}"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, "tools": tools(), "service_tier": "auto",
        "container": null, "mcp_servers": [],
    });
    let mut open = Open::start(server().address);
    let headers = [
        ("anthropic-version", "2026-10-21"),
        (
            "anthropic-beta",
            "claude-code-20250219,never-heard-of-2030-01-01",
        ),
        ("accept", "application/json"),
        ("x-api-key", "anything"),
    ];
    open.request(
        "POST",
        "/v1/messages?beta=true",
        &headers,
        &body.to_string(),
    );
    let answer = open.answer();
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert!(answer.header("request-id").is_some());
    let message = assembled(&answer.named_events());
    assert_eq!(
        (&message["content"][0]["text"], &message["model"]),
        (&json!("ok"), &json!("x"))
    );
}

#[test]
fn mistakes_are_400_in_anthropics_form_and_no_stream() {
    for (body, names) in [
        (json!({"max_tokens": 5}), "messages"),
        (json!({"max_tokens": 5, "messages": []}), "messages"),
        (json!({"messages": [user("x")]}), "max_tokens"),
        (
            json!({"max_tokens": 0, "messages": [user("x")]}),
            "max_tokens",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "robot", "content": "x"}]}),
            "role",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user"}]}),
            "content",
        ),
        (
            json!({"max_tokens": 5, "messages": [user("x")], "temperature": "hot"}),
            "temperature",
        ),
        (
            json!({"max_tokens": 5, "messages": [user("x")], "tools": [{"input_schema": {}}]}),
            "tools[0].name",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user", "content":
            [{"type": "image", "source": {}}]}]}),
            "image",
        ),
        (json!("no object"), "object"),
    ] {
        let mut body = body;
        if body.is_object() {
            body["stream"] = true.into();
        }
        let answer = server().post("/v1/messages", &body);
        assert_eq!(answer.status, 400, "{body}");
        let error = answer.json();
        assert_eq!(error["type"], "error", "{error}");
        assert!(
            error["error"]["message"].as_str().unwrap().contains(names),
            "{error}"
        );
    }
    let lost = server().post("/v1/messages/nothing", &json!({}));
    assert_eq!(
        (lost.status, lost.json()["error"]["type"].clone()),
        (404, json!("not_found_error"))
    );
}

#[test]
fn a_prompt_over_the_window_says_both_numbers() {
    let answer = ask(json!({"messages": [user(&"x".repeat(5000))], "stream": true}));
    assert_eq!(answer.status, 400);
    let message = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    let count = server().post(
        "/v1/messages/count_tokens",
        &json!({"messages": [user(&"x".repeat(5000))]}),
    );
    let tokens = count.json()["input_tokens"].as_u64().unwrap();
    let wanted = format!("prompt is too long: {tokens} tokens > 4095 maximum");
    assert!(message.starts_with(&wanted), "{message}");
}

#[test]
fn counting_takes_tools_alone_and_touches_nothing() {
    let before = server().metric("rootstock_prompt_tokens_total");
    let body = json!({"tools": tools(), "messages": [{"role": "user", "content": "foo"}]});
    let count = server().post("/v1/messages/count_tokens?beta=true", &body);
    assert_eq!(count.status, 200);
    let counted = count.json()["input_tokens"].as_u64().unwrap();
    let asked = ask(body).json();
    assert_eq!(total_input(&asked["usage"]), counted);
    assert!(server().metric("rootstock_prompt_tokens_total") >= before);
}

#[test]
fn a_failure_in_a_stream_is_one_error_event_in_anthropics_form() {
    // A server of its own: who shares the failing step fails with it.
    let server = Server::parrot(ParrotSetup::default());
    let body = json!({"max_tokens": 9, "messages": [user("ab^c")], "stream": true});
    let events = server.post("/v1/messages", &body).named_events();
    let (name, error) = events.last().unwrap();
    assert_eq!(name, "error");
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("api_error"))
    );
    assert!(
        events.iter().all(|(name, _)| name != "message_delta"),
        "no reason of a good end"
    );
}
