//! Bodies that nobody should send: captured ones of released clients, changed at random. Each is
//! answered, none by a 5xx, and afterwards the server is idle and well.

use serde_json::{Value, json};

use crate::client::Open;
use crate::server::{ParrotSetup, Server};

const BODIES: &str = include_str!("../../data/captured_bodies.jsonl");
const ROUNDS: u64 = 800;

/// A small generator: the same changes in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides.max(1) as u64).unwrap()
    }
}

fn odd(dice: &mut Dice) -> Value {
    let mut deep = Value::Null;
    for _ in 0..60 {
        deep = json!([deep]);
    }
    let all = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(0),
        json!(1e308),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(""),
        json!("\u{0}\u{1F600}\\\""),
        json!("x".repeat(3000)),
        json!([]),
        json!({}),
        json!([null, {"type": "text"}, 1]),
        json!({"type": "nothing", "content": [{}]}),
        deep,
    ];
    all[dice.roll(all.len())].clone()
}

/// Changes one place in a body, however deep.
fn change(value: &mut Value, dice: &mut Dice) {
    let goes_on = dice.roll(4) > 0;
    match value {
        Value::Object(fields) if goes_on && !fields.is_empty() => {
            let at = dice.roll(fields.len());
            let key = fields.keys().nth(at).unwrap().clone();
            match dice.roll(8) {
                0 => drop(fields.remove(&key)),
                1 => {
                    let odd = odd(dice);
                    fields.insert(format!("{key}_more"), odd);
                }
                _ => change(&mut fields[&key], dice),
            }
        }
        Value::Array(list) if goes_on && !list.is_empty() => {
            let at = dice.roll(list.len());
            match dice.roll(8) {
                0 => drop(list.remove(at)),
                1 => {
                    let one = list[at].clone();
                    list.extend(std::iter::repeat_n(one, 40));
                }
                2 => list.reverse(),
                _ => change(&mut list[at], dice),
            }
        }
        Value::Object(_)
        | Value::Array(_)
        | Value::Null
        | Value::Bool(_)
        | Value::Number(_)
        | Value::String(_) => *value = odd(dice),
    }
}

#[test]
fn no_change_of_a_body_is_the_servers_fault() {
    let server = Server::parrot(ParrotSetup::default());
    let captured: Vec<Value> = BODIES
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut statuses = std::collections::BTreeMap::new();
    for round in 0..ROUNDS {
        let from = &captured[dice.roll(captured.len())];
        let mut body = from["body"].clone();
        for key in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            if body.get(key).is_some() {
                body[key] = 3.into();
            }
        }
        for _ in 0..=dice.roll(3) {
            change(&mut body, &mut dice);
        }
        let mut text = body.to_string();
        if dice.roll(20) == 0 {
            text.truncate(dice.roll(text.len()).min(100));
            text.push('"');
        }
        let mut open = Open::start(server.address);
        open.request("POST", from["path"].as_str().unwrap(), &[], &text);
        let answer = open.answer();
        assert!(answer.status < 500, "{round}: {text}: {}", answer.body);
        if answer.status >= 400 {
            assert!(
                answer.json()["error"]["message"].is_string(),
                "{}",
                answer.body
            );
        }
        *statuses.entry(answer.status).or_insert(0) += 1;
    }
    assert!(statuses[&200] > 50 && statuses[&400] > 50, "{statuses:?}");
    server.until_stats(|stats| stats.live == 0);
    let body = json!({"prompt": "~well", "max_tokens": 9});
    let well = server.post("/v1/completions", &body).json();
    assert_eq!(well["choices"][0]["text"], "well");
}
