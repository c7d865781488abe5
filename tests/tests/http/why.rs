//! `why`: causes planted one by one into conversations, each to be named with the token at which
//! it shows and the part of the conversation it is in.

use crate::client;
use crate::server::{ParrotSetup, Server};
use rootstock::radix::PolicyKind;
use rootstock_engine::service::ServiceConfig;
use serde_json::{Value, json};

/// As Hermes and Qwen write: tools in the system message, thoughts of the turn under way alone.
const TEMPLATE: &str = r#"{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call> to call one.<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"#;

fn server(pages: u32, policy: PolicyKind) -> Server {
    Server::parrot(ParrotSetup {
        pages,
        template: Some(TEMPLATE.to_owned()),
        service: ServiceConfig {
            page_size: 16,
            policy,
            ..ServiceConfig::default()
        },
        ..ParrotSetup::default()
    })
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn tool(name: &str, description: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": description,
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}})
}

/// An assistant's turn that thinks and calls a tool.
fn calling(thoughts: &str, query: &str) -> Value {
    let arguments = json!({"q": query}).to_string();
    json!({"role": "assistant", "content": "", "reasoning_content": thoughts, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": arguments}}]})
}

/// One answer: the report, the prompt's tokens, and those of the answer behind them.
struct Asked {
    id: String,
    miss: Value,
    prompt: Vec<u64>,
    all: Vec<u64>,
    said: Value,
}

fn ask(server: &Server, messages: &[Value], tools: &[Value], more: &Value) -> Asked {
    let mut body = json!({"messages": messages, "max_tokens": 120, "nvext": {"extra_fields":
        ["cache_report", "prompt_token_ids", "completion_token_ids"]}});
    if !tools.is_empty() {
        body["tools"] = json!(tools);
    }
    for (key, value) in more.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let nvext = &answer["nvext"];
    let ids = |name: &str| -> Vec<u64> {
        let ids = nvext[name].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap()).collect()
    };
    let prompt = ids("prompt_token_ids");
    let all = [prompt.clone(), ids("completion_token_ids")].concat();
    Asked {
        id: answer["id"].as_str().unwrap().to_owned(),
        miss: nvext["cache_report"]["miss"].clone(),
        said: answer["choices"][0]["message"].clone(),
        prompt,
        all,
    }
}

/// A prompt that is asked, and another one after it.
struct Planted {
    what: &'static str,
    change: &'static str,
    kind: &'static str,
    /// Changes messages and tools.
    plant: fn(&mut Vec<Value>, &mut Vec<Value>),
}

const fn planted(
    what: &'static str,
    kind: &'static str,
    change: &'static str,
    plant: fn(&mut Vec<Value>, &mut Vec<Value>),
) -> Planted {
    Planted {
        what,
        change,
        kind,
        plant,
    }
}

const SYSTEM: &str = "session 4f9a1c07. You are a careful assistant for gardeners.\nIt is 10:01 \
    on Monday.\nNever graft in the rain.\nAlways wash the knife before you begin to cut.";
const QUESTION: &str = "Which rootstock do I take for an apple tree on heavy clay soil?";
const RESULT: &str = "M9 wants light soil. MM106 stands heavy soil well. M25 becomes very large.";
const AGAIN: &str = "And for a pear tree that has to stay small? ~Quince.";

fn conversation() -> Vec<Value> {
    vec![
        message("system", SYSTEM),
        message("user", QUESTION),
        calling(
            "Soil matters here, so I should look it up.",
            "rootstock clay",
        ),
        json!({"role": "tool", "tool_call_id": "c1", "content": RESULT}),
        message("assistant", "MM106 is a good choice for heavy soil."),
        message("user", AGAIN),
    ]
}

fn tools() -> Vec<Value> {
    vec![
        tool(
            "search",
            "Searches books about trees and how they are grafted",
        ),
        tool("weather", "Tells the weather of the next days at a place"),
        tool("calendar", "Reads and writes the calendar of the garden"),
    ]
}

fn edit(message: &mut Value, from: &str, to: &str) {
    let text = message["content"].as_str().unwrap();
    assert!(text.contains(from), "{text}");
    message["content"] = text.replace(from, to).into();
}

const CASES: [Planted; 17] = [
    planted(
        "a nonce at the head of the prompt",
        "system",
        "replaced",
        |talk, _| {
            edit(&mut talk[0], "4f9a1c07", "b2e0d365");
        },
    ),
    planted("a timestamp", "system", "replaced", |talk, _| {
        edit(&mut talk[0], "10:01", "10:02");
    }),
    planted("another day", "system", "replaced", |talk, _| {
        edit(&mut talk[0], "Monday", "Sunday");
    }),
    planted(
        "a line put into the system prompt",
        "system",
        "inserted",
        |talk, _| {
            edit(
                &mut talk[0],
                "Never graft",
                "Be brief in all you say.\nNever graft",
            );
        },
    ),
    planted(
        "a line taken out of the system prompt",
        "system",
        "left_out",
        |talk, _| {
            edit(&mut talk[0], "Never graft in the rain.\n", "");
        },
    ),
    planted("tools in another order", "tools", "moved", |_, tools| {
        tools.rotate_left(1)
    }),
    planted(
        "two tools that changed places",
        "tools",
        "moved",
        |_, tools| tools.swap(1, 2),
    ),
    planted(
        "another description of a tool",
        "tools",
        "replaced",
        |_, tools| {
            tools[1]["function"]["description"] = "Tells how much rain there will be".into();
        },
    ),
    planted(
        "another type of a parameter",
        "tools",
        "replaced",
        |_, tools| {
            tools[2]["function"]["parameters"]["properties"]["q"]["type"] = "integer".into();
        },
    ),
    planted("a tool more", "tools", "inserted", |_, tools| {
        tools.insert(1, tool("photo", "Looks at a photo of a leaf"));
    }),
    planted("a tool less", "tools", "left_out", |_, tools| {
        drop(tools.remove(1))
    }),
    planted("an edited question", "history", "replaced", |talk, _| {
        edit(&mut talk[1], "apple", "cherry");
    }),
    planted(
        "a result of a tool that changed",
        "tool_output",
        "replaced",
        |talk, _| {
            edit(
                &mut talk[3],
                "stands heavy soil well",
                "does not like heavy soil",
            );
        },
    ),
    planted(
        "a result of a tool that was cut",
        "tool_output",
        "left_out",
        |talk, _| {
            edit(
                &mut talk[3],
                " MM106 stands heavy soil well. M25 becomes very large.",
                "",
            );
        },
    ),
    planted("an edited answer", "history", "replaced", |talk, _| {
        edit(&mut talk[4], "a good choice", "what most people take");
    }),
    planted(
        "an answer that was left out",
        "history",
        "left_out",
        |talk, _| drop(talk.remove(4)),
    ),
    planted("another last question", "history", "replaced", |talk, _| {
        edit(&mut talk[5], "pear", "plum");
    }),
];

#[test]
fn seventeen_changes_of_a_conversation_are_named_with_their_place_and_part() {
    let server = server(2048, PolicyKind::Agent);
    for (index, case) in CASES.iter().enumerate() {
        let salt = json!({"cache_salt": format!("case {index}")});
        let old = ask(&server, &conversation(), &tools(), &salt);
        assert_eq!(old.miss["cause"], "new", "{}", case.what);
        let (mut talk, mut list) = (conversation(), tools());
        (case.plant)(&mut talk, &mut list);
        let new = ask(&server, &talk, &list, &salt);
        let common = old.all.iter().zip(&new.prompt);
        let at = common.take_while(|(old, new)| old == new).count();
        let miss = &new.miss;
        let named = [&miss["cause"], &miss["kind"], &miss["change"]];
        let wanted = ["diverged", case.kind, case.change];
        assert_eq!(named, wanted, "{}: {miss}", case.what);
        assert_eq!(miss["at"], json!(at), "{}: {miss}", case.what);
        let computed = miss["computed_tokens"].as_u64().unwrap();
        let text = format!(
            "diverged at token {at}, inside {}: {computed} tokens",
            case.kind
        );
        let told = miss["text"].as_str().unwrap();
        assert!(told.starts_with(&text), "{}: {told}", case.what);
    }
}

#[test]
fn thoughts_that_the_next_turn_leaves_out_are_named_as_such() {
    let server = server(2048, PolicyKind::Agent);
    let long = "~<think>\nClay holds water, so the roots must stand that.\n</think>\n\nMM106.";
    let first = [message("system", SYSTEM), message("user", long)];
    let old = ask(&server, &first, &[], &json!({}));
    let mut answer = old.said.clone();
    answer["role"] = "assistant".into();
    let next = [
        first[0].clone(),
        first[1].clone(),
        answer,
        message("user", AGAIN),
    ];
    let new = ask(&server, &next, &[], &json!({}));
    let common = old.all.iter().zip(&new.prompt);
    let at = common.take_while(|(old, new)| old == new).count();
    assert!(
        at > 16 && at < old.all.len(),
        "the thoughts are not repeated"
    );
    let miss = &new.miss;
    let named = [&miss["cause"], &miss["kind"], &miss["change"]];
    assert_eq!(
        named,
        ["diverged", "thinking", "thinking_left_out"],
        "{miss}"
    );
    assert_eq!(miss["at"], json!(at), "{miss}");
    // The same within a turn of calls, when the next question ends it.
    let salt = json!({"cache_salt": "calls"});
    let amid = &conversation()[..4];
    ask(&server, amid, &tools(), &salt);
    let new = ask(&server, &conversation(), &tools(), &salt);
    assert_eq!(new.miss["kind"], "thinking", "{}", new.miss);
}

/// What a token of the prompt is, where the texts say it by their letters.
fn part_of(token: u64) -> Option<&'static str> {
    let parts = [
        (b'S', "system"),
        (b'T', "tools"),
        (b'U', "history"),
        (b'H', "thinking"),
        (b'O', "tool_output"),
    ];
    let found = parts
        .into_iter()
        .find(|(letter, _)| u64::from(*letter) == token);
    found.map(|(_, part)| part)
}

#[test]
fn evictions_of_each_part_are_named_with_who_needed_the_room_and_what_would_have_kept_it() {
    const PAGES: u32 = 56;
    let server = server(PAGES, PolicyKind::Lru);
    let much = |letter: &str| letter.repeat(72);
    let result = format!("{}~ab", much("O"));
    let talk = [
        message("system", &much("S").repeat(2)),
        message("user", &much("U")),
        calling(&much("H"), "x"),
        json!({"role": "tool", "tool_call_id": "c1", "content": result}),
    ];
    let tools = [tool("search", &much("T"))];
    let session = json!({"nvext": {"agent_hints": {"program_id": "flood"}}, "max_tokens": 1});
    let mut seen = Vec::new();
    for pages in (2..PAGES - 4).step_by(2) {
        let flushed = client::send(server.address, "POST", "/flush_cache", "");
        assert_eq!(flushed.status, 200, "{}", flushed.body);
        ask(&server, &talk, &tools, &json!({}));
        let mut other = session.clone();
        other["prompt"] = json!(vec![u64::from(pages); pages as usize * 16]);
        assert_eq!(server.post("/v1/completions", &other).status, 200);
        let again = ask(&server, &talk, &tools, &json!({}));
        let miss = &again.miss;
        if miss["cause"] != "evicted" {
            continue;
        }
        let at = usize::try_from(miss["at"].as_u64().unwrap()).unwrap();
        assert_eq!(at % 16, 0, "{miss}");
        assert_eq!(miss["tier"], "device");
        let by = &miss["evicted_by"];
        assert_eq!(by["session"], "flood", "{miss}");
        assert_eq!(by["prompt_tokens"], json!(pages * 16));
        let short = miss["pages_short"].as_u64().unwrap();
        let gone = (again.prompt.len() - at) as u64 / 16;
        assert!(
            short >= gone && short <= gone + 2,
            "{short} for {gone}: {miss}"
        );
        assert!(miss["bytes_short"].as_u64().unwrap() >= short);
        if let Some(part) = part_of(again.prompt[at]) {
            assert_eq!(miss["kind"], part, "{miss}");
            let told = miss["text"].as_str().unwrap();
            assert!(told.contains(&format!("inside {part}")), "{told}");
            if !seen.contains(&part) {
                seen.push(part);
            }
        }
    }
    seen.sort_unstable();
    let all = ["history", "system", "thinking", "tool_output", "tools"];
    assert_eq!(seen, all, "evictions of each part were met");
}

#[test]
fn of_others_nothing_is_told_but_that_they_needed_room() {
    let server = server(24, PolicyKind::Lru);
    let mine = json!({"cache_salt": "mine"});
    let talk = [message("user", &format!("{}~ab", "m".repeat(120)))];
    let first = ask(&server, &talk, &[], &mine);
    let secret = json!({"cache_salt": "theirs", "max_tokens": 1,
        "nvext": {"agent_hints": {"program_id": "secret"}}, "prompt": vec![7; 20 * 16]});
    assert_eq!(server.post("/v1/completions", &secret).status, 200);
    let again = ask(&server, &talk, &[], &mine);
    assert_eq!(again.miss["evicted_by"], "another tenant", "{}", again.miss);
    assert!(!again.miss.to_string().contains("secret"));
    for id in [&first.id, &again.id] {
        let why = |salt: &str| {
            server
                .get(&format!("/v1/kv/why/{id}?cache_salt={salt}"))
                .status
        };
        assert_eq!((why("theirs"), why("mine")), (404, 200));
    }
    // The same text under another salt is new there: not diverged, not evicted.
    let fresh = ask(&server, &talk, &[], &json!({"cache_salt": "fresh"}));
    assert_eq!(fresh.miss["cause"], "new");
}

#[test]
fn what_is_whole_new_or_flushed_is_named() {
    let server = server(2048, PolicyKind::Agent);
    let first = ask(&server, &conversation(), &tools(), &json!({}));
    assert_eq!(first.miss["cause"], "new", "{}", first.miss);
    let again = ask(&server, &conversation(), &tools(), &json!({}));
    assert_eq!(again.miss["cause"], "none", "{}", again.miss);
    let flushed = client::send(server.address, "POST", "/flush_cache", "");
    assert_eq!(flushed.status, 200);
    let after = ask(&server, &conversation(), &tools(), &json!({}));
    assert_eq!(after.miss["cause"], "flushed", "{}", after.miss);
    assert!(after.miss["ago_s"].as_f64().unwrap() >= 0.0);
}
