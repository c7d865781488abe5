//! Speculative prefill through the HTTP edge, over a backend that repeats its prompt: what the next
//! turn begins with is computed ahead on all chat routes, with a template that strips thoughts; it
//! is in nobody's bill, and only what is not cached is computed.

use crate::server::{ParrotSetup, Server};
use serde_json::{Value, json};

const TEMPLATE: &str = include_str!("../../data/thinking_template.jinja");
const STARTED: &str = "rootstock_speculative_requests_total";
const WARMED: &str = "rootstock_speculative_warmed_tokens_total";
const USED: &str = "rootstock_speculative_used_tokens_total";
const WASTED: &str = "rootstock_speculative_wasted_tokens_total";
const CACHED_ALREADY: &str = "rootstock_speculative_cached_already_total";
const PROMPTS: &str = "rootstock_prompt_tokens_total";

fn server(template: Option<&str>) -> Server {
    Server::parrot(ParrotSetup {
        template: template.map(str::to_owned),
        ..ParrotSetup::default()
    })
}

/// 300 bytes, and as many tokens.
fn long(word: &str) -> String {
    word.repeat(300 / word.len())
}

fn with_hint(mut body: Value, hint: bool) -> Value {
    body["nvext"] = json!({"agent_hints": {"speculative_prefill": hint}});
    body["max_tokens"] = 2000.into();
    body["temperature"] = 0.into();
    body
}

/// Two turns over the chat route: the usage of both.
fn two_turns(server: &Server, hint: bool, word: &str) -> [Value; 2] {
    let thoughts = format!("<think>\n{}\n</think>\n\n", long("hm "));
    let question = json!({"role": "user", "content": format!("{word}?~{thoughts}{}", long(word))});
    let first = with_hint(json!({"messages": [question]}), hint);
    let first = server.post("/v1/chat/completions", &first);
    assert_eq!(first.status, 200, "{}", first.body);
    let first = first.json();
    let answer = &first["choices"][0]["message"]["content"];
    assert_eq!(answer, &Value::from(long(word)));
    if hint {
        server.until_metric(WARMED, 280.0);
    }
    let next = json!({"role": "user", "content": "and now~ok"});
    let answer = json!({"role": "assistant", "content": answer});
    let second = with_hint(json!({"messages": [question, answer, next]}), false);
    let second = server.post("/v1/chat/completions", &second);
    assert_eq!(second.json()["choices"][0]["message"]["content"], "ok");
    [first["usage"].clone(), second.json()["usage"].clone()]
}

fn number(usage: &Value, path: &str) -> u64 {
    usage.pointer(path).and_then(Value::as_u64).unwrap()
}

fn uncached(usage: &Value) -> u64 {
    number(usage, "/prompt_tokens") - number(usage, "/prompt_tokens_details/cached_tokens")
}

#[test]
fn the_next_turn_finds_its_answer_computed_without_the_thoughts() {
    let without = server(Some(TEMPLATE));
    let [_, cold] = two_turns(&without, false, "red");
    assert!(
        uncached(&cold) >= 300,
        "the answer is computed anew: {cold}"
    );
    assert_eq!(without.metric(STARTED), 0.0);

    let server = server(Some(TEMPLATE));
    let [first, warm] = two_turns(&server, true, "red");
    assert_eq!(warm["prompt_tokens"], cold["prompt_tokens"]);
    // What the user says now, the head of the answer, and less than a page.
    assert!(uncached(&warm) < 16 + 45, "{warm} against {cold}");
    assert_eq!(server.metric(STARTED), 1.0);
    let (warmed, used) = (server.metric(WARMED), server.metric(USED));
    assert_eq!(used, warmed, "all of it was of use");
    assert_eq!(server.metric(WASTED), 0.0);
    // Nobody is billed for it, and it is no request.
    let billed = number(&first, "/prompt_tokens") + number(&warm, "/prompt_tokens");
    assert_eq!(server.metric(PROMPTS), billed as f64);
    assert_eq!(server.service.stats().admitted, 2);
    assert_eq!(server.service.stats().prompt_tokens, billed);
    assert_eq!(
        server.metric("rootstock_answers_total{outcome=\"stop\"}"),
        2.0
    );
}

#[test]
fn with_a_template_that_strips_nothing_nothing_is_computed_ahead() {
    let server = server(None);
    let question = json!({"role": "user", "content": format!("q~{}", long("blue "))});
    let first = with_hint(json!({"messages": [question]}), true);
    assert_eq!(server.post("/v1/chat/completions", &first).status, 200);
    // What is missing is at most the page in which the user's turn begins.
    for _ in 0..100_000 {
        if server.metric(CACHED_ALREADY) + server.metric(WARMED) > 0.0 {
            break;
        }
    }
    assert!(server.metric(WARMED) <= 48.0, "{}", server.metric(WARMED));
}

#[test]
fn a_call_is_followed_by_its_result_and_tools_stand_in_the_prompt() {
    let server = server(Some(TEMPLATE));
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "weather", "description": long("sun "),
        "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n\
        </tool_call>";
    let thoughts = format!("<think>\n{}\n</think>\n\n", long("hm "));
    let said = format!("{thoughts}{}\n{call}", long("let me see "));
    let question = json!({"role": "user", "content": format!("weather?~{said}")});
    let first = with_hint(json!({"messages": [question], "tools": tools}), true);
    let first = server.post("/v1/chat/completions", &first);
    assert_eq!(first.status, 200, "{}", first.body);
    let message = first.json()["choices"][0]["message"].clone();
    let calls = message["tool_calls"].clone();
    assert_eq!(calls[0]["function"]["name"], "weather", "{message}");
    server.until_metric(WARMED, 200.0);
    let answer = json!({"role": "assistant", "content": message["content"], "tool_calls": calls});
    let result = json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "21~fine"});
    let body = json!({"messages": [question, answer, result], "tools": tools});
    let second = server.post("/v1/chat/completions", &with_hint(body, false));
    assert_eq!(second.status, 200, "{}", second.body);
    let usage = second.json()["usage"].clone();
    assert!(uncached(&usage) < 16 + 45, "{usage}");
    assert!(server.metric(USED) >= 200.0);
}

/// Two turns without the hint: a call in some spacing, then its result. What the second had to
/// compute.
fn second_after_call(server: &Server, arguments: &str) -> u64 {
    let city = long("Rome ");
    let spelled = arguments.replace("$", city.trim_end());
    let call = format!("<tool_call>\n{{\"name\":\"w\",\"arguments\":{spelled}}}\n</tool_call>");
    let tools = json!([{"type": "function", "function": {"name": "w"}}]);
    let question = json!({"role": "user", "content": format!("weather?~{call}")});
    let body = json!({"messages": [question], "tools": tools});
    let first = server
        .post("/v1/chat/completions", &with_hint(body, false))
        .json();
    let calls = first["choices"][0]["message"]["tool_calls"].clone();
    assert_eq!(calls[0]["function"]["name"], "w", "{first}");
    if arguments.contains("\":\"") {
        server.until_metric(WARMED, 250.0);
    }
    let answer = json!({"role": "assistant", "content": null, "tool_calls": calls});
    let result = json!({"role": "tool", "tool_call_id": calls[0]["id"], "content": "21~fine"});
    let body = json!({"messages": [question, answer, result], "tools": tools});
    let second = server.post("/v1/chat/completions", &with_hint(body, false));
    uncached(&second.json()["usage"])
}

#[test]
fn a_call_in_an_odd_spacing_is_computed_ahead_as_it_will_come_back() {
    let server = server(Some(TEMPLATE));
    let fresh = second_after_call(&server, "{\"city\":\"$\"}");
    assert!(fresh < 16 + 60, "{fresh} tokens had to be computed");
    assert_eq!(server.metric(STARTED), 1.0);
}

#[test]
fn messages_and_responses_compute_ahead_as_well_and_thoughts_that_come_back_are_stripped() {
    let server = server(Some(TEMPLATE));
    let thoughts = format!("<think>\n{}\n</think>\n\n", long("hm "));
    let said = format!("green?~{thoughts}{}", long("green "));
    let first = with_hint(
        json!({"messages": [{"role": "user", "content": said}], "stream": true}),
        true,
    );
    let answer = server.post("/v1/messages", &first);
    assert_eq!(answer.status, 200, "{}", answer.body);
    server.until_metric(WARMED, 280.0);
    let blocks = json!([
        {"type": "thinking", "thinking": long("hm ").trim_end(), "signature": "s"},
        {"type": "text", "text": long("green ")},
    ]);
    let body = json!({"messages": [
        {"role": "user", "content": said},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "and now~ok"},
    ]});
    let second = server.post("/v1/messages", &with_hint(body, false)).json();
    assert_eq!(second["content"][0]["text"], "ok", "{second}");
    let fresh = number(&second, "/usage/input_tokens");
    assert!(fresh < 16 + 45, "{second}");

    let warmed = server.metric(WARMED);
    let said = format!("teal?~{thoughts}{}", long("teal "));
    let mut body = with_hint(json!({"input": said}), true);
    body["max_output_tokens"] = 2000.into();
    let first = server.post("/v1/responses", &body);
    assert_eq!(first.status, 200, "{}", first.body);
    server.until_metric(WARMED, warmed + 280.0);
    let id = first.json()["id"].clone();
    let body = json!({"input": "and now~ok", "previous_response_id": id});
    let second = server.post("/v1/responses", &with_hint(body, false)).json();
    let cached = number(&second, "/usage/input_tokens_details/cached_tokens");
    let all = number(&second, "/usage/input_tokens");
    assert!(all - cached < 16 + 45, "{second}");
}

#[test]
fn a_salt_keeps_what_was_computed_ahead_apart() {
    let server = server(Some(TEMPLATE));
    let thoughts = format!("<think>\n{}\n</think>\n\n", long("hm "));
    let question = json!({"role": "user", "content": format!("q~{thoughts}{}", long("gray "))});
    let mut first = with_hint(json!({"messages": [question]}), true);
    first["nvext"]["cache_salt"] = "a".into();
    assert_eq!(server.post("/v1/chat/completions", &first).status, 200);
    server.until_metric(WARMED, 280.0);
    let answer = json!({"role": "assistant", "content": long("gray ")});
    let next = json!({"role": "user", "content": "and now~ok"});
    let turn = |salt: &str| {
        let body = json!({"messages": [question, answer, next]});
        let mut body = with_hint(body, false);
        body["nvext"]["cache_salt"] = salt.into();
        server.post("/v1/chat/completions", &body).json()["usage"].clone()
    };
    let other = turn("b");
    assert_eq!(other["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(server.metric(USED), 0.0, "not the turn it was for");
    assert!(uncached(&turn("a")) < 16 + 45);
    assert_eq!(server.metric(USED), server.metric(WARMED));
}

#[test]
fn a_program_that_is_about_to_start_finds_its_system_prompt_and_tools() {
    let server = server(None);
    let system = json!({"role": "system", "content": long("careful ")});
    let tools = json!([{"type": "function", "function": {
        "name": "look", "description": long("far "), "parameters": {"type": "object"},
    }}]);
    let prefetch = |compute: Value| {
        let payload = json!({"messages": [system], "tools": tools, "compute": compute});
        let action = json!({"action_id": "a", "action_type": "kv.prefetch", "payload": payload});
        let envelope = json!({"protocol_version": "0.1", "message_id": "1", "actions": [action]});
        let answer = server.post("/v1/kv/actions", &envelope);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["outcomes"][0].clone()
    };
    assert_eq!(prefetch(false.into())["status"], "missing");
    let wrong = prefetch("yes".into());
    assert_eq!(wrong["status"], "rejected", "{wrong}");
    let begun = prefetch(true.into());
    let as_said = begun["status"] == "deferred" && begun["computed_ahead"] == true;
    assert!(as_said, "{begun}");
    server.until_metric(WARMED, 500.0);
    let question = json!({"role": "user", "content": "now~yes"});
    let body = json!({"messages": [system, question], "tools": tools});
    let usage = server.post("/v1/chat/completions", &body).json()["usage"].clone();
    let page = 16;
    assert!(uncached(&usage) < 100 + page, "{usage}");
    let [used, prompts] = [USED, PROMPTS].map(|name| server.metric(name));
    assert!(used >= 500.0, "{used} tokens of it were used");
    let asked = usage["prompt_tokens"].as_f64();
    assert_eq!(
        Some(prompts),
        asked,
        "what is computed ahead is nobody's prompt"
    );
}
