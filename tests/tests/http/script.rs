//! What a scripted model says, turn by turn: for programs that loop over a conversation, each turn
//! has its own answer.
//!
//! A script is a list of parts. A part plays in requests whose conversation names its marker; of
//! several the one whose marker was named last plays. Its turn is the number of answers of the
//! assistant behind the marker, so a program that sends the conversation back hears the next one.
//!
//! A part with `until` keeps silent until there is a file of that name, as a long prefill does; one
//! with `breaks` fails once, behind so many tokens.

use std::path::PathBuf;

use serde_json::Value;

/// How a template of the ChatML family begins an answer.
const BEGIN: &str = "<|im_start|>";
const ANSWER: &str = "<|im_start|>assistant\n";
/// What the server writes in front of tools for templates that know none.
const TOOLS: &str = "# Tools\n\nYou may call these functions.";

/// A script.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script {
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    marker: String,
    /// Plays only in requests that have tools, or that have none.
    tools: Option<bool>,
    /// Does not play where this text stands.
    unless: Option<String>,
    until: Option<PathBuf>,
    breaks: Option<u32>,
    turns: Vec<String>,
}

/// The line of a part in one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Whose it is.
    pub(crate) marker: String,
    /// Which of its turns, from 1.
    pub(crate) turn: usize,
    /// What is said.
    pub(crate) text: String,
    /// Nothing is said before there is this file.
    pub(crate) until: Option<PathBuf>,
    /// The first time the step fails behind so many tokens.
    pub(crate) breaks: Option<u32>,
}

impl Script {
    /// Reads `[{"marker": "..", "tools": true, "turns": ["..", ".."]}, ..]`.
    pub(crate) fn read(json: &str) -> Script {
        let list: Value = serde_json::from_str(json).unwrap();
        let part = |part: &Value| Part {
            marker: part["marker"].as_str().unwrap().to_owned(),
            tools: part["tools"].as_bool(),
            unless: part["unless"].as_str().map(str::to_owned),
            until: part["until"].as_str().map(PathBuf::from),
            breaks: part["breaks"].as_u64().map(|at| at.try_into().unwrap()),
            turns: part["turns"]
                .as_array()
                .unwrap()
                .iter()
                .map(|turn| turn.as_str().unwrap().to_owned())
                .collect(),
        };
        Script {
            parts: list.as_array().unwrap().iter().map(part).collect(),
        }
    }

    /// What the model says to this prompt; after the last turn of a part the last again.
    pub(crate) fn line(&self, prompt: &str) -> Line {
        let has_tools = prompt.contains(TOOLS);
        let plays = |part: &&Part| {
            let unless = part.unless.as_ref();
            part.tools.is_none_or(|tools| tools == has_tools)
                && !unless.is_some_and(|text| prompt.contains(text.as_str()))
        };
        let place = |part: &Part| last_of_user(prompt, &part.marker);
        let found = self
            .parts
            .iter()
            .filter(plays)
            .filter_map(|part| Some((place(part).filter(|_| !part.marker.is_empty())?, part)))
            .max_by_key(|(at, _)| *at);
        let fallback = || {
            self.parts
                .iter()
                .filter(plays)
                .find(|part| part.marker.is_empty())
        };
        let (at, part) = match (found, fallback()) {
            (Some((at, part)), _) => (at, part),
            (None, Some(part)) => (0, part),
            (None, None) => panic!("no part of the script plays"),
        };
        // The last is the answer that is to come.
        let turn = prompt[at..].matches(ANSWER).count().saturating_sub(1);
        let text = part.turns.get(turn).or(part.turns.last()).unwrap();
        Line {
            marker: part.marker.clone(),
            turn: turn + 1,
            text: text.clone(),
            until: part.until.clone(),
            breaks: part.breaks,
        }
    }
}

/// Where a user names the marker last; calls of the model may name it too.
fn last_of_user(prompt: &str, marker: &str) -> Option<usize> {
    let mut found = None;
    let mut from = 0;
    for message in prompt.split_inclusive(BEGIN) {
        if message.starts_with("user") {
            found = message.rfind(marker).map(|at| from + at).or(found);
        }
        from += message.len();
    }
    found
}

#[test]
fn a_part_goes_on_with_each_answer_and_the_last_named_one_plays() {
    let script = Script::read(
        "[{\"marker\": \"ONE\", \"turns\": [\"a\", \"b\"]},
          {\"marker\": \"TWO\", \"tools\": true, \"turns\": [\"c\"]},
          {\"marker\": \"\", \"turns\": [\"else\"]}]",
    );
    let user = |text: &str| format!("{BEGIN}user\n{text}");
    let says = |prompt: &str| script.line(&format!("{prompt}{ANSWER}")).text;
    assert_eq!(says(&user("x")), "else");
    assert_eq!(says(&user("ONE")), "a");
    assert_eq!(
        says(&format!("{ANSWER}before {}{ANSWER}a", user("ONE"))),
        "b"
    );
    let twice = format!("{}{ANSWER}call TWO{}", user("ONE"), user("seen"));
    assert_eq!(says(&format!("{TOOLS} {twice}")), "b", "a call is no wish");
    assert_eq!(says(&format!("{TOOLS} {twice}{}", user("TWO"))), "c");
    assert_eq!(
        says(&format!("{twice}{}", user("TWO"))),
        "b",
        "not without tools"
    );
}
