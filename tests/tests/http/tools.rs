//! Tool calls and constrained answers: calls in streams (E3), forced calls, JSON of a schema,
//! patterns; over a parrot, and over a random model whose free text is noise.

use std::sync::OnceLock;

use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

use crate::client::Answer;
use crate::server::{ParrotSetup, Server};
use crate::tiny_model::TinyModel;

fn parrot() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::parrot(ParrotSetup::default()))
}

fn random_model() -> &'static Server {
    static SERVER: OnceLock<(TinyModel, Server)> = OnceLock::new();
    let (_, server) = SERVER.get_or_init(|| {
        let model = TinyModel::with_weights();
        let config = ServiceConfig {
            device_pages: Some(1024),
            threads: Some(1),
            ..ServiceConfig::default()
        };
        let server = Server::model(&model.path, config);
        (model, server)
    });
    server
}

fn tools() -> Value {
    let tool = |name: &str, properties: Value| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": properties, "required": ["path"],
            "additionalProperties": false}}})
    };
    json!([
        tool("look", json!({"path": {"enum": ["a", "b"]}})),
        tool(
            "count",
            json!({"path": {"enum": ["c"]}, "n": {"enum": [1, 9]}})
        ),
    ])
}

fn call_text(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

fn chat(server: &Server, text: &str, extra: Value) -> Answer {
    let mut body = json!({"model": "m", "max_tokens": 300, "temperature": 0,
        "messages": [{"role": "user", "content": format!("~{text}")}]});
    body.as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body)
}

/// Message and finish reason, the same with and without a stream.
fn both_ways(server: &Server, text: &str, extra: Value) -> (Value, String) {
    let plain = chat(server, text, extra.clone());
    assert_eq!(plain.status, 200, "{}", plain.body);
    let choice = plain.json()["choices"][0].clone();
    let mut streaming = extra;
    streaming["stream"] = true.into();
    let streamed = chat(server, text, streaming);
    let mut message = json!({"role": "assistant", "content": null, "refusal": null});
    let add = |message: &mut Value, key: &str, more: &Value| {
        if let Some(more) = more.as_str() {
            let text = message[key].as_str().unwrap_or_default().to_owned() + more;
            message[key] = text.into();
        }
    };
    let mut calls: Vec<Value> = Vec::new();
    for event in streamed.events() {
        let delta = &event["choices"][0]["delta"];
        add(&mut message, "content", &delta["content"]);
        add(
            &mut message,
            "reasoning_content",
            &delta["reasoning_content"],
        );
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(
                call["index"],
                calls.len(),
                "each call once, numbered 0, 1, .."
            );
            let mut call = call.clone();
            call.as_object_mut().unwrap().remove("index");
            calls.push(call);
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    if message["content"].is_null() && message.get("tool_calls").is_none() {
        message["content"] = "".into();
    }
    let reason = choice["finish_reason"].as_str().unwrap().to_owned();
    assert_eq!(
        streamed.finish_reasons(0),
        [reason.as_str()],
        "one reason, the same"
    );
    assert_eq!(without_ids(message), without_ids(choice["message"].clone()));
    (choice["message"].clone(), reason)
}

fn without_ids(mut message: Value) -> Value {
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        call["id"] = Value::Null;
    }
    message
}

fn arguments(message: &Value, call: usize) -> Value {
    let text = message["tool_calls"][call]["function"]["arguments"]
        .as_str()
        .unwrap();
    serde_json::from_str(text).unwrap()
}

#[test]
fn parallel_calls_have_their_own_index_and_whole_arguments() {
    let text = format!(
        "Both:\n{}\n{}",
        call_text("look", "{\"path\": \"a\"}"),
        call_text("count", "{\"path\": \"\u{1F600}\\n\"}")
    );
    let (message, reason) = both_ways(parrot(), &text, json!({"tools": tools()}));
    assert_eq!(message["content"], "Both:");
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(arguments(&message, 0), json!({"path": "a"}));
    assert_eq!(arguments(&message, 1), json!({"path": "\u{1F600}\n"}));
    assert_eq!(reason, "tool_calls");
    let one = json!({"tools": tools(), "parallel_tool_calls": false});
    let (message, _) = both_ways(parrot(), &text, one);
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
}

#[test]
fn without_tools_the_same_text_is_text() {
    let text = call_text("look", "{}");
    let (message, reason) = both_ways(parrot(), &text, json!({}));
    assert_eq!(
        (message["content"].as_str(), reason.as_str()),
        (Some(text.as_str()), "stop")
    );
    let none = json!({"tools": tools(), "tool_choice": "none"});
    assert_eq!(both_ways(parrot(), &text, none).0["content"], text.as_str());
}

#[test]
fn a_call_cut_by_the_length_or_a_stop_string_is_never_a_call() {
    let text = call_text("look", "{\"path\": \"a\"}");
    for extra in [
        json!({"tools": tools(), "max_tokens": 45}),
        json!({"tools": tools(), "stop": ["\"a\""]}),
    ] {
        let (message, reason) = both_ways(parrot(), &text, extra);
        assert!(message.get("tool_calls").is_none(), "{message}");
        assert!(
            message["content"]
                .as_str()
                .unwrap()
                .starts_with("<tool_call>")
        );
        assert_ne!(reason, "tool_calls");
    }
}

#[test]
fn a_forced_call_is_a_call_of_the_schema_whatever_the_model_would_say() {
    for server in [parrot(), random_model()] {
        let required = json!({"tools": tools(), "tool_choice": "required",
            "parallel_tool_calls": false});
        let (message, reason) = both_ways(server, "no!", required);
        assert_eq!(reason, "tool_calls", "{message}");
        let name = &message["tool_calls"][0]["function"]["name"];
        assert!(name == "look" || name == "count", "{message}");
        let named = json!({"tools": tools(),
            "tool_choice": {"type": "function", "function": {"name": "count"}}});
        let (message, _) = both_ways(server, "no!", named);
        assert_eq!(message["tool_calls"][0]["function"]["name"], "count");
        assert_eq!(arguments(&message, 0)["path"], "c");
    }
    let body = json!({"model": "m", "max_tokens": 300, "tool_choice": {"type": "any",
        "disable_parallel_tool_use": true},
        "tools": [{"name": "look", "input_schema": tools()[0]["function"]["parameters"]}],
        "messages": [{"role": "user", "content": "~no!"}]});
    let answer = parrot().post("/v1/messages", &body).json();
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    assert_eq!(answer["content"][0]["input"]["path"], "a");
}

/// Whether a value is of a schema, for the few keywords used here.
#[test]
fn forced_calls_end_although_the_model_would_go_on() {
    use rootstock_engine::constrained::CALLS_MAX;
    let one = call_text("look", "{\"path\": \"a\"}");
    let endless = format!("{one}\n").repeat(CALLS_MAX + 4);
    let extra = json!({"tools": tools(), "tool_choice": "required", "max_tokens": 1500});
    let (message, reason) = both_ways(parrot(), &endless, extra);
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), CALLS_MAX);
    assert_eq!(reason, "tool_calls");
}

fn is_valid(value: &Value, schema: &Value) -> bool {
    if let Some(wanted) = schema.get("const") {
        return value == wanted;
    }
    if let Some(any) = schema["enum"].as_array() {
        return any.contains(value);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|schema| is_valid(value, schema));
    }
    let items = |list: &Vec<Value>| {
        let most = schema["maxItems"].as_u64().unwrap_or(u64::MAX);
        list.len() as u64 <= most && list.iter().all(|item| is_valid(item, &schema["items"]))
    };
    match schema["type"].as_str() {
        Some("object") => value.as_object().is_some_and(|fields| {
            let required = schema["required"].as_array().into_iter().flatten();
            required
                .clone()
                .all(|key| fields.contains_key(key.as_str().unwrap()))
                && fields
                    .iter()
                    .all(|(key, value)| is_valid(value, &schema["properties"][key]))
        }),
        Some("array") => value.as_array().is_some_and(items),
        Some("integer") => value.as_i64().is_some_and(|number| {
            number >= schema["minimum"].as_i64().unwrap_or(i64::MIN)
                && number <= schema["maximum"].as_i64().unwrap_or(i64::MAX)
        }),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some("string") => value.as_str().is_some_and(|text| {
            text.chars().count() as u64 <= schema["maxLength"].as_u64().unwrap_or(u64::MAX)
        }),
        _ => false,
    }
}

/// Bounded schemas, made from a number: nested objects, lists, enums, strings, numbers.
fn schema(seed: u64) -> Value {
    fn part(seed: &mut u64, depth: u32) -> Value {
        *seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let pick = (*seed >> 33) % if depth == 0 { 5 } else { 8 };
        match pick {
            0 => json!({"type": "integer", "minimum": -5, "maximum": 120}),
            1 => json!({"type": "boolean"}),
            2 => json!({"type": "string", "maxLength": 6}),
            3 => json!({"enum": ["red", "green", 3, null]}),
            4 => json!({"anyOf": [{"type": "null"}, {"const": "x y"}]}),
            5 => json!({"type": "array", "items": part(seed, depth - 1), "maxItems": 3}),
            _ => {
                let (a, b) = (part(seed, depth - 1), part(seed, depth - 1));
                json!({"type": "object", "properties": {"a": a, "b c": b},
                    "required": ["a", "b c"], "additionalProperties": false})
            }
        }
    }
    let mut seed = seed;
    let field = part(&mut seed, 2);
    json!({"type": "object", "properties": {"value": field, "ok": {"type": "boolean"}},
        "required": ["value", "ok"], "additionalProperties": false})
}

#[test]
fn every_answer_of_a_schema_that_ends_is_valid_and_bounded_ones_end() {
    let mut ended = 0;
    let count = 60;
    for seed in 0..count {
        let schema = schema(seed);
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let extra = json!({"response_format": format, "temperature": 1, "seed": seed});
        let answer = chat(random_model(), "anything", extra).json();
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "length" {
            continue;
        }
        ended += 1;
        let text = choice["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
        assert!(is_valid(&value, &schema), "{text} is not of {schema}");
    }
    assert!(ended * 100 >= count * 95, "{ended} of {count} ended");
}

#[test]
fn patterns_and_choices_bind_the_whole_answer() {
    for server in [parrot(), random_model()] {
        let pattern = json!({"response_format": {"type": "regex", "pattern": "[a-c]{3}-[0-9]{2}"}});
        let (message, _) = both_ways(server, "zz", pattern);
        let text = message["content"].as_str().unwrap();
        assert_eq!(text.len(), 6, "{text}");
        assert_eq!(text.as_bytes()[3], b'-', "{text}");
        let choice = json!({"guided_choice": ["yes.", "no"]});
        let (message, _) = both_ways(server, "zz", choice);
        assert!(
            ["yes.", "no"].contains(&message["content"].as_str().unwrap()),
            "{message}"
        );
    }
}

#[test]
fn json_has_the_spacing_of_templates() {
    let schema = json!({"type": "object", "properties": {"a": {"const": 1},
        "b": {"type": "array", "items": {"const": 2}, "minItems": 2, "maxItems": 2}},
        "required": ["a", "b"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let (message, _) = both_ways(parrot(), "zz", json!({"response_format": format}));
    assert_eq!(message["content"], "{\"a\": 1, \"b\": [2, 2]}");
}

#[test]
fn schemas_and_patterns_that_mean_nothing_are_400_and_name_the_field() {
    for extra in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"schema": {"type": "thing"}}}}),
        json!({"response_format": {"type": "regex", "pattern": "a(b"}}),
        json!({"response_format": {"type": "xml"}}),
        json!({"tools": tools(), "tool_choice": {"type": "function",
            "function": {"name": "nobody"}}}),
        json!({"tool_choice": "required"}),
    ] {
        let answer = chat(parrot(), "x", extra.clone());
        assert_eq!(answer.status, 400, "{extra}: {}", answer.body);
        let param = answer.json()["error"]["param"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let known = ["response_format", "tool_choice"];
        assert!(
            known.iter().any(|known| param.starts_with(known)),
            "{extra}: {param}"
        );
    }
}

/// Three clients that send the arguments back in a spacing and with ids of their own.
#[test]
fn arguments_in_any_spacing_continue_on_the_generated_tokens() {
    let text = call_text("look", "{\"path\": \"a\", \"why\": [1, 2]}");
    let first = chat(parrot(), &text, json!({"tools": tools()})).json();
    let usage = &first["usage"];
    let whole =
        usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    for (id, spelled) in [
        ("call_1", "{\"path\":\"a\",\"why\":[1,2]}"),
        ("toolu_2", "{\"path\": \"a\", \"why\": [1, 2]}"),
        ("x", "{ \"path\" : \"a\",\n\"why\":[1 , 2]}"),
    ] {
        let call = json!({"id": id, "type": "function",
            "function": {"name": "look", "arguments": spelled}});
        let body = json!({"tools": tools(), "messages": [
            {"role": "user", "content": format!("~{text}")},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": format!("{id}~seen")},
        ]});
        let second = chat(parrot(), "", body).json();
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap();
        assert!(cached + 16 >= whole, "{cached} of {whole} for {spelled}");
    }
}
