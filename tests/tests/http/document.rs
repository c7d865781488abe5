//! The OpenAPI document is true: it names the routes that there are, the fields that are read with
//! their types and ranges, and the form of errors.

use serde_json::{Map, Value, json};

use crate::client::send;
use crate::server::{ParrotSetup, Server};

/// Where routes are made.
const ROUTES: &str = include_str!("../../../plugin/server/src/app.rs");

fn document(server: &Server) -> Value {
    let answer = server.get("/openapi.json");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    answer.json()
}

fn paths(document: &Value) -> Map<String, Value> {
    document["paths"].as_object().unwrap().clone()
}

#[test]
fn every_route_is_in_the_document_and_every_path_of_it_is_a_route() {
    let server = Server::parrot(ParrotSetup::default());
    let document = document(&server);
    let mut known: Vec<String> = ROUTES
        .split("route(")
        .skip(1)
        .filter_map(|rest| rest.trim_start().strip_prefix('"'))
        .map(|rest| rest.split('"').next().unwrap().replace("{*", "{"))
        .collect();
    known.sort();
    let mut told: Vec<String> = paths(&document).keys().cloned().collect();
    told.sort();
    assert_eq!(known, told);
    for (path, operations) in paths(&document) {
        let asked = path.replace("{", "").replace("}", "");
        for method in operations.as_object().unwrap().keys() {
            let method = method.to_ascii_uppercase();
            let answer = send(server.address, &method, &asked, "");
            assert_ne!(answer.status, 405, "{method} {path}");
            let is_unknown = answer.body.contains("no such path");
            assert!(!is_unknown, "{method} {path}: {}", answer.body);
        }
        // What is not told is not taken.
        let answer = send(server.address, "PATCH", &asked, "");
        assert_eq!(answer.status, 405, "PATCH {path}");
    }
}

/// The least that a route takes.
fn least(name: &str) -> Value {
    match name {
        "CompletionRequest" => json!({"prompt": "~x", "max_tokens": 1}),
        "ResponsesRequest" => json!({"input": "~x", "max_output_tokens": 1}),
        "TokenizeRequest" => json!({"prompt": "x"}),
        "DetokenizeRequest" => json!({"tokens": [65]}),
        _ => json!({"max_tokens": 1, "messages": [{"role": "user", "content": "~x"}]}),
    }
}

/// A value that the type and range of a field forbid; none where any value is taken.
fn wrong(schema: &Value) -> Option<Value> {
    if schema.get("oneOf").is_some() {
        return Some(json!(true));
    }
    if let Some(most) = schema.get("maximum").and_then(Value::as_f64) {
        return Some(json!(most + 1.0));
    }
    if let Some(least) = schema.get("minimum").and_then(Value::as_f64) {
        return Some(json!(least - 1.0));
    }
    match schema["type"].as_str()? {
        "string" => Some(json!(5)),
        _ => Some(json!("wrong")),
    }
}

#[test]
fn every_field_with_a_type_is_read_and_checked_as_the_document_says() {
    let server = Server::parrot(ParrotSetup::default());
    let document = document(&server);
    let mut checked = 0;
    for (path, operations) in paths(&document) {
        let schema = &operations["post"]["requestBody"]["content"]["application/json"]["schema"];
        let Some(name) = schema["$ref"].as_str().and_then(|r| r.rsplit('/').next()) else {
            continue;
        };
        let schema = &document["components"]["schemas"][name];
        let Some(properties) = schema["properties"].as_object() else {
            continue;
        };
        let body = least(name);
        assert_eq!(server.post(&path, &body).status, 200, "{path}");
        for required in schema["required"].as_array().into_iter().flatten() {
            let mut without = body.clone();
            let key = required.as_str().unwrap();
            without.as_object_mut().unwrap().remove(key);
            let answer = server.post(&path, &without);
            assert_eq!(answer.status, 400, "{path} without {key}");
        }
        for (key, schema) in properties {
            let Some(wrong) = wrong(schema) else {
                continue;
            };
            let mut body = body.clone();
            body[key] = wrong.clone();
            let answer = server.post(&path, &body);
            assert_eq!(answer.status, 400, "{path} {key}: {wrong}: {}", answer.body);
            let error = answer.json()["error"].clone();
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(key.as_str()), "{path} {key}: {message}");
            assert!(error["type"].is_string());
            checked += 1;
        }
    }
    assert!(checked > 70, "{checked} fields");
}

#[test]
fn every_parameter_with_a_range_is_checked_as_the_document_says() {
    let server = Server::parrot(ParrotSetup::default());
    let mut checked = 0;
    for (path, operations) in paths(&document(&server)) {
        let parameters = operations["get"]["parameters"].as_array().cloned();
        for parameter in parameters.unwrap_or_default() {
            let (name, schema) = (parameter["name"].as_str().unwrap(), &parameter["schema"]);
            let status = |value: &Value| server.get(&format!("{path}?{name}={value}")).status;
            let Some(most) = schema["maximum"].as_u64() else {
                continue;
            };
            let least = schema["minimum"].as_u64().unwrap();
            let right = [json!(most), json!(least), schema["default"].clone()];
            assert!(
                right.iter().all(|value| status(value) == 200),
                "{path} {name}"
            );
            let wrong = [json!(most + 1), json!(least - 1), json!("x")];
            assert!(
                wrong.iter().all(|value| status(value) == 400),
                "{path} {name}"
            );
            checked += 1;
        }
    }
    assert_eq!(checked, 3);
}
