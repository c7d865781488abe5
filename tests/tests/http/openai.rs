//! The OpenAI routes over a backend that repeats its prompt: text (E1), usage (E2), mistakes
//! (E5), metrics (J2) and labels (J5). One server for the whole file.

use std::sync::OnceLock;

use crate::client::{Answer, Open};
use crate::server::{ParrotSetup, Server};
use crate::tiny_model::{DEF, HI, IM_END};
use serde_json::{Value, json};

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::parrot(ParrotSetup::default()))
}

/// A prompt for a completion whose answer is `tokens`.
fn say(tokens: &[u32]) -> Value {
    let mut prompt = vec![u32::from(b'~')];
    prompt.extend(tokens);
    json!(prompt)
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn complete(mut body: Value) -> Answer {
    body["model"] = json!("any-name");
    if body.get("max_tokens").is_none() {
        body["max_tokens"] = json!(200);
    }
    server().post("/v1/completions", &body)
}

fn chat(text: &str, extra: Value) -> Answer {
    let mut body = json!({
        "model": "any-name", "messages": [{"role": "user", "content": format!("~{text}")}],
    });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    server().post("/v1/chat/completions", &body)
}

/// Text and finish reason of a completion, equal with and without a stream, on both routes where
/// the prompt can be text.
fn both_ways(tokens: &[u32], stop: Value) -> (String, String) {
    let plain = complete(json!({"prompt": say(tokens), "stop": stop}));
    assert_eq!(plain.status, 200, "{}", plain.body);
    let choice = &plain.json()["choices"][0];
    let text = choice["text"].as_str().unwrap().to_owned();
    let reason = choice["finish_reason"].as_str().unwrap().to_owned();
    let streamed = complete(json!({"prompt": say(tokens), "stop": stop, "stream": true}));
    assert_eq!(streamed.streamed_text(0), text);
    assert_eq!(streamed.finish_reasons(0), [reason.as_str()]);
    assert!(streamed.is_done());
    for event in streamed.events() {
        let choice = &event["choices"][0];
        let filler = choice["text"] == "" && choice["finish_reason"].is_null();
        assert!(!filler, "an empty delta is filler: {event}");
    }
    (text, reason)
}

// E1: text is withheld until it is certain.

#[test]
fn a_stop_string_over_several_tokens_streams_nothing_of_itself() {
    let tokens = [DEF, u32::from(b'G'), HI, u32::from(b'J')];
    assert_eq!(
        both_ways(&tokens, json!(["DEFGHIJ"])),
        (String::new(), "stop".into())
    );
}

#[test]
fn text_before_a_stop_string_is_kept_to_the_byte() {
    let tokens = bytes("The quick brown fox");
    assert_eq!(
        both_ways(&tokens, json!(["own fox"])),
        ("The quick br".into(), "stop".into())
    );
}

#[test]
fn the_start_of_a_stop_string_is_released_when_the_answer_ends_in_it() {
    let tokens = bytes("The quick brown");
    let wanted = ("The quick brown".into(), "stop".into());
    assert_eq!(both_ways(&tokens, json!(["own fox"])), wanted);
}

#[test]
fn of_two_stop_strings_the_one_that_comes_first_ends_the_answer() {
    let tokens = bytes("one two three");
    assert_eq!(both_ways(&tokens, json!(["two three", "two"])).0, "one ");
    assert_eq!(both_ways(&tokens, json!(["e t", "one two t"])).0, "on");
}

#[test]
fn a_character_of_several_tokens_comes_in_one_delta() {
    let streamed = complete(json!({"prompt": say(&bytes("a\u{1F600}b")), "stream": true}));
    let texts: Vec<String> = streamed
        .events()
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .filter(|text| !text.is_empty())
        .collect();
    assert_eq!(texts, ["a", "\u{1F600}", "b"]);
}

#[test]
fn a_stop_string_inside_a_character_of_several_tokens_is_found() {
    let tokens = bytes("x\u{e9}\u{1F600}y");
    assert_eq!(both_ways(&tokens, json!(["\u{1F600}"])).0, "x\u{e9}");
}

#[test]
fn replacement_marks_come_only_when_the_answer_ends_inside_a_character() {
    let cut = &bytes("ok\u{1F600}")[..4];
    let (text, _) = both_ways(cut, Value::Null);
    assert!(text.starts_with("ok\u{FFFD}"), "{text:?}");
    assert!(
        !both_ways(&bytes("ok\u{1F600}"), Value::Null)
            .0
            .contains('\u{FFFD}')
    );
}

#[test]
fn chat_and_completions_cut_the_same_text() {
    let plain = chat("The quick brown fox", json!({"stop": "own fox"}));
    assert_eq!(
        plain.json()["choices"][0]["message"]["content"],
        "The quick br"
    );
    assert_eq!(plain.json()["choices"][0]["finish_reason"], "stop");
    let streamed = chat(
        "The quick brown fox",
        json!({"stop": "own fox", "stream": true}),
    );
    assert_eq!(streamed.streamed_text(0), "The quick br");
    assert_eq!(streamed.finish_reasons(0), ["stop"]);
    assert_eq!(
        streamed.events()[0]["choices"][0]["delta"],
        json!({"role": "assistant"})
    );
}

#[test]
fn length_is_the_reason_when_the_length_ends_the_answer() {
    let answer = complete(json!({"prompt": say(&bytes("abcdef")), "max_tokens": 3}));
    assert_eq!(answer.json()["choices"][0]["text"], "abc");
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_stop_token_ends_the_answer_without_its_text() {
    let body = json!({"prompt": say(&bytes("abc")), "stop": [u32::from(b'b')],
        "nvext": {"extra_fields": ["stop_reason"]}});
    let answer = complete(body).json();
    assert_eq!(answer["choices"][0]["text"], "a");
    assert_eq!(answer["nvext"]["stop_reason"], u32::from(b'b'));
}

// E2: usage numbers.

/// The usage of one request in a plain answer and in a stream; both on a prompt of their own.
fn usages(route: &str, prompt: &str, n: u64) -> Vec<Value> {
    let body = |stream: bool| {
        let mut body = json!({"model": "m", "max_tokens": 4, "n": n, "stream": stream,
            "stream_options": {"include_usage": true}});
        match route {
            "/v1/completions" => body["prompt"] = json!(prompt),
            _ => body["messages"] = json!([{"role": "user", "content": prompt}]),
        }
        body
    };
    let plain = server().post(route, &body(false)).json()["usage"].clone();
    let streamed = server().post(route, &body(true));
    assert!(streamed.is_done());
    let mut events = streamed.events();
    let last = events.pop().unwrap();
    assert_eq!(
        last["choices"],
        json!([]),
        "the last chunk has the totals alone"
    );
    for event in &events {
        assert!(event.get("usage").is_some_and(Value::is_null), "{event}");
    }
    vec![plain, last["usage"].clone()]
}

#[test]
fn cached_tokens_are_reported_on_each_route_with_and_without_a_stream() {
    for (route, word) in [
        ("/v1/completions", "comp"),
        ("/v1/chat/completions", "chat"),
    ] {
        let prompt = format!("~{}", word.repeat(25));
        let found = usages(route, &prompt, 1);
        let length = found[0]["prompt_tokens"].as_u64().unwrap();
        assert!(length > 100);
        assert_eq!(
            found[0]["prompt_tokens_details"]["cached_tokens"], 0,
            "cold is 0, not absent"
        );
        let reusable = (length - 1) / 16 * 16;
        assert_eq!(found[1]["prompt_tokens_details"]["cached_tokens"], reusable);
        for usage in &found {
            assert_eq!(
                usage["prompt_tokens"], length,
                "the full prompt, cached or not"
            );
            assert_eq!(usage["completion_tokens"], 4);
            assert_eq!(usage["total_tokens"], length + 4);
        }
    }
}

#[test]
fn a_stream_has_no_usage_unless_asked_for() {
    let streamed = complete(json!({"prompt": "~ab", "stream": true}));
    assert!(
        streamed
            .events()
            .iter()
            .all(|event| event.get("usage").is_none())
    );
    let streamed = complete(json!({"prompt": "~ab", "stream": true,
        "stream_options": {"include_usage": false}}));
    assert!(
        streamed
            .events()
            .iter()
            .all(|event| event.get("usage").is_none())
    );
}

#[test]
fn two_answers_count_the_prompt_once_and_their_tokens_both() {
    let found = usages("/v1/completions", &format!("~{}", "two ".repeat(10)), 2);
    for usage in found {
        assert_eq!(usage["prompt_tokens"], 41);
        assert_eq!(usage["completion_tokens"], 8);
    }
}

#[test]
fn an_answer_found_by_stop_string_counts_the_same_tokens_each_time() {
    let body = json!({"prompt": say(&bytes("abcdefghij")), "stop": "d"});
    for _ in 0..20 {
        assert_eq!(
            complete(body.clone()).json()["usage"]["completion_tokens"],
            4
        );
    }
}

// E5: a caller's mistake is a 4xx; a legal null is none.

#[test]
fn legal_nulls_and_forms_are_served() {
    let user = json!([{"role": "user", "content": "~a"}]);
    for extra in [
        json!({"stop": null}),
        json!({"stop": ""}),
        json!({"stop": []}),
        json!({"stop": ["a", "b", "c", "d", "e"]}),
        json!({"max_tokens": null}),
        json!({"temperature": null}),
        json!({"max_tokens": 5, "max_completion_tokens": 6}),
        json!({"user": "u", "metadata": {"a": "b"}, "store": true, "unknown_field": [1]}),
        json!({"response_format": {"type": "text"}}),
        json!({"nvext": null}),
        json!({"nvext": {"agent_hints": {"priority": "high", "osl": -1}}}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
        json!({"stream_options": null}),
        json!({"logprobs": null, "top_logprobs": null}),
    ] {
        let mut body = json!({"model": "m", "messages": user});
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        let answer = server().post("/v1/chat/completions", &body);
        assert_eq!(answer.status, 200, "{extra}: {}", answer.body);
    }
    let messages = json!([
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "user", "content": "~b"},
    ]);
    let answer = server().post("/v1/chat/completions", &json!({"messages": messages}));
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[test]
fn mistakes_are_400_and_name_the_parameter_before_anything_is_queued() {
    let rejected = server().service.stats().rejected;
    let user = json!([{"role": "user", "content": "x"}]);
    let chat_cases = [
        (json!({"messages": []}), "messages"),
        (json!({}), "messages"),
        (json!({"messages": user, "max_tokens": 0}), "max_tokens"),
        (json!({"messages": user, "max_tokens": -1}), "max_tokens"),
        (
            json!({"messages": user, "temperature": "hot"}),
            "temperature",
        ),
        (json!({"messages": user, "n": 0}), "n"),
        (json!({"messages": user, "n": 0, "stream": true}), "n"),
        (json!({"messages": user, "stop": vec!["x"; 17]}), "stop"),
        (json!({"messages": user, "stream": "yes"}), "stream"),
        (
            json!({"messages": user, "logit_bias": {"900000": 1}}),
            "logit_bias",
        ),
        (json!({"messages": user, "model": 5}), "model"),
        (
            json!({"messages": user, "tool_choice": "required"}),
            "tool_choice",
        ),
        (
            json!({"messages": [{"role": "robot", "content": "x"}]}),
            "messages[0].role",
        ),
        (
            json!({"messages": [{"role": "user", "content": null}]}),
            "messages[0].content",
        ),
    ];
    let completion_cases = [
        (json!({}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [999_999]}), "prompt[0]"),
        (json!({"prompt": ["a", 7]}), "prompt[1]"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": vec!["x"; 65]}), "prompt"),
        (json!({"prompt": ["x", "y"], "n": 33}), "n"),
    ];
    let chats = chat_cases.iter().map(|case| ("/v1/chat/completions", case));
    let completions = completion_cases
        .iter()
        .map(|case| ("/v1/completions", case));
    for (route, (body, param)) in chats.chain(completions) {
        let answer = server().post(route, body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], *param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| !text.is_empty())
        );
    }
    let stats = server().service.stats();
    assert_eq!(stats.rejected, rejected, "nothing of it reached the engine");
}

#[test]
fn a_body_that_is_no_json_object_is_400_in_the_apis_error_form() {
    for body in ["", "{", "[1,2]", "\"x\"", "{\"messages\": [}"] {
        let answer = crate::client::send(server().address, "POST", "/v1/chat/completions", body);
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(
        crate::client::send(server().address, "POST", "/v1/completions", &deep).status,
        400
    );
}

#[test]
fn a_prompt_beyond_the_context_is_400_with_the_code_clients_compact_on() {
    let answer = complete(json!({"prompt": "x".repeat(5000), "stream": true}));
    assert_eq!(answer.status, 400, "no stream is started");
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    let message = answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("5000") && message.contains("4096"),
        "{message}"
    );
}

#[test]
fn every_model_name_is_served_and_echoed() {
    for name in [
        "gpt-5.4-nano",
        "claude-haiku-4-5-20251001",
        "org/some:model",
    ] {
        let plain = chat("a", json!({"model": name}));
        assert_eq!(plain.json()["model"], name);
        let streamed = chat("a", json!({"model": name, "stream": true}));
        assert!(streamed.events().iter().all(|event| event["model"] == name));
        assert_eq!(
            server().get(&format!("/v1/models/{name}")).json()["id"],
            name
        );
    }
    assert_eq!(server().get("/v1/models").json()["data"][0]["id"], "parrot");
    assert_eq!(chat("a", json!({"model": null})).json()["model"], "parrot");
}

#[test]
fn unknown_paths_and_methods_are_json_errors() {
    assert_eq!(server().get("/v1/nothing").status, 404);
    assert!(server().get("/v1/nothing").json()["error"]["message"].is_string());
    assert_eq!(server().get("/v1/completions").status, 405);
    let mut open = Open::start(server().address);
    open.request("HEAD", "/", &[], "");
    assert_eq!(open.head().0, 200);
}

// What answers carry on request.

#[test]
fn several_prompts_and_answers_are_numbered_in_order() {
    let body = json!({"prompt": ["~one", "~two"], "n": 2, "stream": true});
    let streamed = complete(body.clone());
    let texts: Vec<String> = (0..4)
        .map(|choice| streamed.streamed_text(choice))
        .collect();
    assert_eq!(texts, ["one", "one", "two", "two"]);
    let mut body = body;
    body["stream"] = json!(false);
    let plain = complete(body).json();
    let texts: Vec<&str> = plain["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["one", "one", "two", "two"]);
}

#[test]
fn echo_stands_before_the_answer_with_and_without_a_stream() {
    let body = json!({"prompt": "x~abc", "echo": true});
    assert_eq!(complete(body).json()["choices"][0]["text"], "x~abcabc");
    let body = json!({"prompt": "x~abc", "echo": true, "stream": true});
    assert_eq!(complete(body).streamed_text(0), "x~abcabc");
}

#[test]
fn log_probabilities_are_the_same_with_and_without_a_stream() {
    let body = json!({"logprobs": true, "top_logprobs": 2});
    let plain = chat("ab\u{e9}", body.clone()).json();
    let plain = plain["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(
        plain.len(),
        4,
        "one entry a token of the text, none for the end token"
    );
    assert_eq!(plain[0]["token"], "a");
    assert_eq!(plain[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(plain[2]["bytes"], json!([0xC3]));
    let mut body = body;
    body["stream"] = json!(true);
    let events = chat("ab\u{e9}", body).events();
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, plain);
}

#[test]
fn completions_count_log_probabilities_from_the_start_of_the_answer() {
    let answer = complete(json!({"prompt": "~abc", "logprobs": 1})).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2]));
}

#[test]
fn nvext_comes_back_only_with_what_was_asked_for() {
    assert!(
        complete(json!({"prompt": "~ab"}))
            .json()
            .get("nvext")
            .is_none()
    );
    let hints = json!({"agent_hints": {"priority": true, "prefix_id": "p"}});
    let silent = complete(json!({"prompt": "~ab", "nvext": hints}));
    assert!(silent.json().get("nvext").is_none());
    let wish = json!({"agent_hints": {"priority": true}, "extra_fields": ["timing", "worker_id",
        "completion_token_ids", "prompt_token_ids", "stop_reason", "ignored_fields"]});
    let plain = complete(json!({"prompt": "~ab", "nvext": wish})).json();
    let nvext = &plain["nvext"];
    assert_eq!(nvext["prompt_token_ids"], json!([126, 97, 98]));
    assert_eq!(nvext["completion_token_ids"], json!([97, 98, IM_END]));
    assert_eq!(nvext["stop_reason"], IM_END);
    assert_eq!(nvext["worker_id"]["decode_worker_id"], 0);
    assert!(nvext["timing"]["total_time_ms"].is_u64());
    assert!(
        nvext["ignored_fields"][0]
            .as_str()
            .unwrap()
            .contains("priority")
    );
    let streamed = complete(json!({"prompt": "~ab", "nvext": wish, "stream": true}));
    let ids: Vec<Value> = streamed
        .events()
        .iter()
        .filter_map(|event| event["nvext"]["completion_token_ids"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(json!(ids), json!([97, 98, IM_END]));
}

// J5: the caller's request id is a label.

#[test]
fn two_requests_may_carry_one_label() {
    let body = json!({"prompt": "~same", "max_tokens": 9}).to_string();
    let headers = [("x-request-id", "label-1"), ("traceparent", "00-1-1-01")];
    let mut first = Open::start(server().address);
    let mut second = Open::start(server().address);
    first.request("POST", "/v1/completions", &headers, &body);
    second.request("POST", "/v1/completions", &headers, &body);
    let (first, second) = (first.answer(), second.answer());
    for answer in [&first, &second] {
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-request-id"), Some("label-1"));
        assert_eq!(answer.json()["choices"][0]["text"], "same");
    }
    assert_ne!(
        first.json()["id"],
        second.json()["id"],
        "our ids are our own"
    );
}

#[test]
fn odd_labels_do_no_harm() {
    let body = json!({"prompt": "~x"}).to_string();
    let long = "a".repeat(10_000);
    for label in ["", long.as_str(), "caf\u{e9}"] {
        let headers = [("x-request-id", label)];
        let answer =
            crate::client::send_with(server().address, "POST", "/v1/completions", &headers, &body);
        assert_eq!(answer.status, 200, "{} bytes", label.len());
        assert_eq!(answer.header("x-request-id"), None);
    }
}
