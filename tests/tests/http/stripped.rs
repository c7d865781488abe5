//! Thoughts that the next turn's template leaves out, through HTTP: they go before anything else,
//! whatever priority their request had, and before a prompt that nobody ranks lower.

use crate::server::{ParrotSetup, Server};
use serde_json::{Value, json};

const TEMPLATE: &str = include_str!("../../data/thinking_template.jinja");
const EVICTED: &str = "rootstock_evicted_pages_total{tier=\"device\",replica=\"0\"}";
const FREE: &str = "rootstock_kv_pages{tier=\"device\",replica=\"0\",state=\"free\"}";
const PAGES: u32 = 160;

fn server() -> Server {
    Server::parrot(ParrotSetup {
        pages: PAGES,
        template: Some(TEMPLATE.to_owned()),
        ..ParrotSetup::default()
    })
}

fn cached(answer: &Value) -> u64 {
    let usage = answer.pointer("/usage/prompt_tokens_details/cached_tokens");
    usage.and_then(Value::as_u64).unwrap()
}

/// A prompt of so many pages, of one letter; the answer tells what of it was cached.
fn fill(server: &Server, letter: &str, pages: usize, priority: i32) -> Value {
    let prompt = format!("{}~a", letter.repeat(pages * 16 - 2));
    let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0,
        "nvext": {"agent_hints": {"priority": priority}}});
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn chat(server: &Server, messages: &[Value]) -> Value {
    let body = json!({"messages": messages, "max_tokens": 2000, "temperature": 0,
        "nvext": {"agent_hints": {"priority": 10}}});
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A prompt of low priority, a conversation of high priority that thinks for 18 pages, with its
/// second turn or without, then as much of other prompts as those thoughts leave room for. Returns
/// the tokens cached of the low prompt and of the conversation's second turn, asked again.
fn survivors(second_turn: bool) -> (u64, u64, u64) {
    let server = server();
    fill(&server, "l", 30, -5);
    let thoughts = format!("<think>\n{}\n</think>\n\n", "hm ".repeat(100));
    let said = "said ".repeat(60);
    let first = message("user", &format!("think~{thoughts}{said}"));
    let answer = chat(&server, std::slice::from_ref(&first));
    assert_eq!(answer["choices"][0]["message"]["content"], said);
    let next = [
        first,
        message("assistant", &said),
        message("user", "next~ok"),
    ];
    let prompt = if second_turn {
        chat(&server, &next)["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap()
    } else {
        0
    };
    // What is free, and two thirds of what the thoughts and the answer behind them take.
    server.until_stats(|stats| stats.live == 0);
    let wanted = server.metric(FREE) + 24.0;
    for (letter, _) in ('A'..='Z')
        .zip(0..)
        .take_while(|&(_, at)| f64::from(at) * 8.0 < wanted)
    {
        fill(&server, &letter.to_string(), 8, 0);
    }
    assert!(server.metric(EVICTED) >= 16.0, "nothing had to go");
    let low = cached(&fill(&server, "l", 30, -5));
    let conversation = if second_turn {
        cached(&chat(&server, &next))
    } else {
        0
    };
    (low, conversation, prompt)
}

#[test]
fn thoughts_that_the_next_turn_strips_go_before_anything_of_lower_priority() {
    let (low, conversation, prompt) = survivors(true);
    assert_eq!(low, 30 * 16 - 16, "the low prompt lost pages to thoughts");
    assert!(conversation + 16 >= prompt, "{conversation} of {prompt}");
    // While nothing has been stripped, the low prompt is what goes.
    let (low, ..) = survivors(false);
    assert!(low < 16 * 16, "{low} tokens are left of the low prompt");
}
