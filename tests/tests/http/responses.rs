//! `/v1/responses` over a backend that repeats its prompt: items, events, namespaces, stored
//! responses; and every body that was captured from released clients, on all routes.

use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::client::{Answer, Open};
use crate::server::{ParrotSetup, Server};

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::parrot(ParrotSetup::default()))
}

fn ask(body: Value) -> Answer {
    let mut all = json!({"model": "gpt-any-nano"});
    all.as_object_mut()
        .unwrap()
        .extend(body.as_object().unwrap().clone());
    server().post("/v1/responses", &all)
}

fn call_text(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

fn tools() -> Value {
    json!([
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": false},
        {"type": "namespace", "name": "agents", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object"}}]},
        {"type": "web_search", "external_web_access": true},
    ])
}

/// A response without what differs from one request to the next.
pub(crate) fn lasting(mut response: Value) -> Value {
    for key in ["id", "created_at"] {
        response[key] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item.get("call_id").is_some() {
            item["call_id"] = Value::Null;
        }
    }
    response["stream"] = Value::Null;
    response
}

/// The items put together from their events, and the object of the last event.
pub(crate) fn assembled(events: &[(String, Value)]) -> (Vec<Value>, Value) {
    let mut items: Vec<Value> = Vec::new();
    let mut last = Value::Null;
    for (number, (name, event)) in events.iter().enumerate() {
        assert_eq!(event["type"], name.as_str());
        assert_eq!(event["sequence_number"], number, "numbers grow by one");
        match name.as_str() {
            "response.output_item.done" => {
                assert_eq!(event["output_index"], items.len());
                items.push(event["item"].clone());
            }
            "response.completed" | "response.incomplete" | "response.failed" => {
                last = event["response"].clone();
            }
            _ => {}
        }
    }
    (items, last)
}

#[test]
fn a_stream_ends_in_the_plain_response() {
    let calls = format!(
        "Two:\n{}\n{}",
        call_text("look", "{\"a\": 1}"),
        call_text("spawn", "{}")
    );
    for body in [
        json!({"input": "~hello \u{1F600}"}),
        json!({"input": [{"role": "user", "content": format!("~{calls}")}], "tools": tools()}),
        json!({"input": "~cut off", "max_output_tokens": 3}),
        json!({"input": "~"}),
    ] {
        assert_eq!(ask(body.clone()).status, 200);
        let plain = ask(body.clone()).json();
        let mut streaming = body.clone();
        streaming["stream"] = true.into();
        let events = ask(streaming).named_events();
        assert_eq!(events[0].0, "response.created");
        let (items, last) = assembled(&events);
        assert_eq!(
            last["output"],
            Value::Array(items),
            "items done are the output"
        );
        assert_eq!(lasting(last), lasting(plain), "{body}");
    }
}

#[test]
fn a_call_into_a_namespace_comes_back_with_it() {
    let text = call_text("spawn", "{\"task\": \"x\"}");
    let response = ask(json!({"input": format!("~{text}"), "tools": tools()})).json();
    let call = &response["output"][0];
    assert_eq!(call["type"], "function_call");
    assert_eq!(
        (&call["name"], &call["namespace"]),
        (&json!("spawn"), &json!("agents"))
    );
    assert_eq!(call["arguments"], "{\"task\":\"x\"}");
    assert_eq!(
        (&response["status"], &response["model"]),
        (&json!("completed"), &json!("gpt-any-nano"))
    );
}

#[test]
fn the_next_turn_reads_the_last_whatever_ids_the_client_makes() {
    let text = call_text("look", "{\"a\": 1}");
    let first = ask(json!({"input": [
        {"type": "message", "role": "developer", "content":
            [{"type": "input_text", "text": "base instructions ".repeat(5)}]},
        {"type": "message", "role": "user", "content":
            [{"type": "input_text", "text": format!("~{text}")}]}], "tools": tools(),
        "store": false, "include": ["reasoning.encrypted_content"]}))
    .json();
    let usage = &first["usage"];
    let whole = usage["total_tokens"].as_u64().unwrap();
    assert_eq!(
        whole,
        usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
    );
    for id in ["msg_a", "msg_b"] {
        let call = json!({"type": "function_call", "id": format!("fc_{id}"), "call_id": id,
            "name": "look", "arguments": "{ \"a\":1 }"});
        let body = json!({"input": [
            {"type": "message", "id": id, "role": "developer", "content":
                [{"type": "input_text", "text": "base instructions ".repeat(5)}]},
            {"type": "message", "role": "user", "content":
                [{"type": "input_text", "text": format!("~{text}")}]},
            call,
            {"type": "function_call_output", "call_id": id, "output": "~seen"}],
            "tools": tools(), "store": false});
        let second = ask(body).json();
        let cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        assert!(cached + 16 >= whole, "{cached} of {whole} with {id}");
    }
}

#[test]
fn a_stored_response_is_continued_read_and_deleted() {
    let first = ask(json!({"input": "~kept", "instructions": "not carried on"})).json();
    let id = first["id"].as_str().unwrap();
    assert!(id.starts_with("resp_"));
    let second = ask(json!({"input": "and~more", "previous_response_id": id})).json();
    assert_eq!(second["output"][0]["content"][0]["text"], "more");
    let by_hand = ask(json!({"input": [{"role": "user", "content": "~kept"},
        {"role": "assistant", "content": "kept"}, {"role": "user", "content": "and~more"}]}));
    assert_eq!(
        second["usage"]["input_tokens"],
        by_hand.json()["usage"]["input_tokens"]
    );
    let path = format!("/v1/responses/{id}");
    assert_eq!(server().get(&path).json()["output"], first["output"]);
    let delete = |wanted: u16| {
        let mut open = Open::start(server().address);
        open.request("DELETE", &path, &[], "");
        assert_eq!(open.answer().status, wanted);
    };
    delete(200);
    delete(404);
    assert_eq!(server().get(&path).status, 404);
    let lost = ask(json!({"input": "x", "previous_response_id": id}));
    assert_eq!(lost.status, 404);
    assert_eq!(lost.json()["error"]["param"], "previous_response_id");
    let unkept = ask(json!({"input": "~x", "store": false})).json();
    let path = format!("/v1/responses/{}", unkept["id"].as_str().unwrap());
    assert_eq!(server().get(&path).status, 404);
}

#[test]
fn mistakes_are_400_and_failures_are_one_event() {
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": 5}), "input"),
        (
            json!({"input": [{"role": "robot", "content": "x"}]}),
            "input[0].role",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"input": "x", "max_output_tokens": 0}),
            "max_output_tokens",
        ),
        (
            json!({"input": "x", "tools": [{"type": "function"}]}),
            "tools[0].name",
        ),
    ] {
        let answer = ask(body.clone());
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
    let long = ask(json!({"input": "x".repeat(5000), "stream": true}));
    assert_eq!(
        (long.status, long.json()["error"]["code"].clone()),
        (400, json!("context_length_exceeded"))
    );
    // A server of its own: who shares the failing step fails with it.
    let server = Server::parrot(ParrotSetup::default());
    let body = json!({"input": "~ab^c", "stream": true});
    let events = server.post("/v1/responses", &body).named_events();
    let (name, event) = events.last().unwrap();
    assert_eq!(name, "response.failed");
    assert_eq!(event["response"]["error"]["code"], "server_error");
    assert_eq!(event["response"]["status"], "failed");
}

#[test]
fn every_captured_body_is_answered_200() {
    let bodies = include_str!("../../data/captured_bodies.jsonl");
    let mut count = 0;
    for line in bodies.lines() {
        let captured: Value = serde_json::from_str(line).unwrap();
        let headers: Vec<(&str, &str)> = captured["headers"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str().unwrap()))
            .collect();
        let mut open = Open::start(server().address);
        let path = captured["path"].as_str().unwrap();
        open.request("POST", path, &headers, &captured["body"].to_string());
        let answer = open.answer();
        assert_eq!(answer.status, 200, "{line}: {}", answer.body);
        let streams = captured["body"]["stream"] == true;
        let kind = answer.header("content-type").unwrap();
        assert_eq!(kind == "text/event-stream", streams, "{line}");
        count += 1;
    }
    assert!(count >= 20, "{count} bodies");
}
