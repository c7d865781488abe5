//! The default model end to end: it is fetched by the server's own downloader where it is not in
//! the cache; only when it is not to be had are the tests skipped, with a line that says so.

use std::sync::OnceLock;

use crate::server::Server;
use rootstock_engine::model_source::{ModelSpec, resolve};
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

/// The server, or none when there is no model.
fn server() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match resolve(&ModelSpec::Auto, &mut |_| {}) {
        Ok(model) => {
            let config = ServiceConfig {
                kv_cache_mib: Some(512),
                ..ServiceConfig::default()
            };
            Some(Server::model(&model.path, config))
        }
        Err(error) => {
            println!("no default model: {error}");
            None
        }
    });
    if server.is_none() {
        println!("skipped: no model");
    }
    server.as_ref()
}

fn chat(server: &Server, messages: &Value, extra: Value) -> Value {
    let mut body = json!({"model": "any-name", "messages": messages});
    body.as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

#[test]
fn the_first_request_of_the_readme_is_answered_and_cached_the_second_time() {
    let Some(server) = server() else { return };
    let messages = json!([{"role": "user", "content": "What is gravity?"}]);
    let cold = chat(
        server,
        &messages,
        json!({"temperature": 0, "max_tokens": 64}),
    );
    let text = cold["choices"][0]["message"]["content"].as_str().unwrap();
    println!("{text}");
    assert!(text.starts_with("Gravity is"), "{text}");
    let warm = chat(
        server,
        &messages,
        json!({"temperature": 0, "max_tokens": 64}),
    );
    assert_eq!(
        warm["choices"][0]["message"]["content"], text,
        "warm equals cold"
    );
    let prompt = warm["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(
        cached(&warm) + 16 >= prompt,
        "{} of {prompt}",
        cached(&warm)
    );
}

#[test]
fn a_stream_of_real_text_equals_the_plain_answer() {
    let Some(server) = server() else { return };
    let messages = json!([{"role": "user",
        "content": "Write one line with three emoji and the word caf\u{e9}."}]);
    let fixed = json!({"temperature": 1, "seed": 5, "max_tokens": 60, "stop": ["\n\n"]});
    let plain = chat(server, &messages, fixed.clone());
    let mut body = fixed;
    body["messages"] = messages;
    body["stream"] = json!(true);
    let streamed = server.post("/v1/chat/completions", &body);
    assert_eq!(
        streamed.streamed_text(0),
        plain["choices"][0]["message"]["content"].as_str().unwrap()
    );
    assert_eq!(
        streamed.finish_reasons(0),
        [plain["choices"][0]["finish_reason"].as_str().unwrap()]
    );
}

#[test]
fn the_second_turn_reuses_the_first_however_its_text_would_tokenize() {
    let Some(server) = server() else { return };
    for number in 0..12_u64 {
        let question = format!("Give me a JSON object with {number} odd keys and values.");
        let mut messages = json!([{"role": "user", "content": question}]);
        let drawn = json!({"temperature": 1, "seed": number, "max_tokens": 40});
        let first = chat(server, &messages, drawn.clone());
        let text = first["choices"][0]["message"]["content"].clone();
        let turn = messages.as_array_mut().unwrap();
        turn.push(json!({"role": "assistant", "content": text}));
        turn.push(json!({"role": "user", "content": "Shorter, please."}));
        let second = chat(server, &messages, drawn);
        let usage = &first["usage"];
        let history =
            usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
        let found = cached(&second);
        assert!(
            found + 16 + 1 >= history,
            "{number}: {found} of {history} tokens, text {text}"
        );
    }
}
