//! What an answer says, out of its text as it comes: thoughts, text, complete tool calls.
//!
//! ```text
//! Start --"<think>"--> Thinking --"</think>"--> Text <--> Call
//!   \------------------------------------------^
//! ```
//!
//! A call is given out when it is whole, never before: a call that was cut off, or that is no call
//! after all, comes out as the text that it is. So what a stream shows is what a plain answer
//! shows, however the text was cut into pieces.
//!
//! The white space that templates put between text and call tags, and the line breaks around
//! thoughts, belong to the form and are no part of what is said; so an answer that comes back is
//! rendered as the bytes that the model wrote.

use std::sync::Arc;

use crate::tools::call::{self, Call};
use crate::tools::style::CallForm;

/// One thing said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// A piece of the answer's text; never empty.
    Text(String),
    /// A piece of the model's reasoning; never empty.
    Thought(String),
    /// A complete call.
    Call(Call),
}

/// Where thoughts may stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thoughts {
    /// The model has none, or the caller wants plain text.
    #[default]
    None,
    /// An answer may begin with `<think>`.
    Maybe,
    /// The prompt already opened them.
    Open,
}

/// How to read an answer.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The form of calls; none when there are no tools to call.
    pub calls: Option<CallForm>,
    /// Names of the tools; the Llama form, which has no tags, is a call only with one of them.
    pub names: Arc<[String]>,
    /// At most one call; what follows it is dropped.
    pub single: bool,
    /// Where thoughts may stand.
    pub thoughts: Thoughts,
}

impl Rules {
    /// True when the text is the answer, with nothing to be read out of it.
    pub fn is_plain(&self) -> bool {
        self.calls.is_none() && self.thoughts == Thoughts::None
    }
}

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const MISTRAL: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Start,
    Thinking,
    Text,
    Call,
}

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct Speech {
    rules: Rules,
    state: State,
    held: String,
    /// White space before the call that is being read; text again should it be no call.
    gap: String,
    /// Line breaks at the beginning of what follows are part of the form.
    trims: bool,
    /// Text was said: the Llama form counts only at the very beginning.
    has_text: bool,
    calls: usize,
    called: Vec<String>,
}

impl Speech {
    /// A reader at the beginning of an answer.
    pub fn new(rules: Rules) -> Speech {
        let state = match rules.thoughts {
            Thoughts::None => State::Text,
            Thoughts::Maybe => State::Start,
            Thoughts::Open => State::Thinking,
        };
        Speech {
            rules,
            state,
            held: String::new(),
            gap: String::new(),
            trims: state == State::Thinking,
            has_text: false,
            calls: 0,
            called: Vec::new(),
        }
    }

    /// Complete calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// The tools that were called, in order; they are told once.
    pub fn take_called(&mut self) -> Vec<String> {
        std::mem::take(&mut self.called)
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str, out: &mut Vec<Said>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    /// The answer is over; `whole` tells that the model ended it itself.
    pub fn finish(&mut self, whole: bool, out: &mut Vec<Said>) {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start => self.say(&held, out),
            State::Text if self.trims && held.trim_matches('\n').is_empty() => {}
            State::Text => self.say(&held, out),
            State::Thinking => think(held.trim_end_matches('\n'), out),
            State::Call => {
                let calls = whole.then(|| self.read_last(&held)).flatten();
                match calls {
                    Some(calls) => self.call(calls, out),
                    None => self.say_opened(&held, out),
                }
            }
        }
    }

    /// One move of the machine; false when it waits for more.
    fn step(&mut self, out: &mut Vec<Said>) -> bool {
        match self.state {
            State::Start => self.at_start(),
            State::Thinking => self.in_thoughts(out),
            State::Text => self.in_text(out),
            State::Call => self.in_call(out),
        }
    }

    fn at_start(&mut self) -> bool {
        let begun = self.held.trim_start();
        if let Some(rest) = begun.strip_prefix(THINK) {
            self.held = rest.to_owned();
            self.state = State::Thinking;
            self.trims = true;
            return true;
        }
        if THINK.starts_with(begun) {
            return false;
        }
        self.state = State::Text;
        true
    }

    fn in_thoughts(&mut self, out: &mut Vec<Said>) -> bool {
        if self.trims {
            let kept = self.held.trim_start_matches('\n').len();
            self.held.drain(..self.held.len() - kept);
            self.trims = self.held.is_empty();
        }
        if let Some(at) = self.held.find(THINK_END) {
            let rest = self.held.split_off(at);
            think(self.held.trim_end_matches('\n'), out);
            self.held = rest.get(THINK_END.len()..).unwrap_or_default().to_owned();
            self.state = State::Text;
            self.trims = true;
            return true;
        }
        let certain = before_partial(&self.held, THINK_END);
        let certain = self.held.get(..certain).unwrap_or_default();
        let shown = certain.trim_end_matches('\n').len();
        let rest = self.held.split_off(shown);
        think(&self.held, out);
        self.held = rest;
        false
    }

    fn in_text(&mut self, out: &mut Vec<Said>) -> bool {
        if self.trims {
            let kept = self.held.trim_start_matches('\n').len();
            self.held.drain(..self.held.len() - kept);
            if self.held.is_empty() {
                return false;
            }
        }
        let Some(form) = self.rules.calls else {
            self.trims = false;
            let held = std::mem::take(&mut self.held);
            self.say(&held, out);
            return false;
        };
        if self.rules.single && self.calls > 0 {
            self.held.clear();
            return false;
        }
        match form {
            CallForm::Tags => self.until_marker(CALL, out),
            CallForm::Mistral => self.until_marker(MISTRAL, out),
            CallForm::Llama => self.maybe_llama(out),
        }
    }

    fn until_marker(&mut self, marker: &str, out: &mut Vec<Said>) -> bool {
        if let Some(at) = self.held.find(marker) {
            let rest = self.held.split_off(at);
            let mut text = std::mem::take(&mut self.held);
            self.gap = text.split_off(text.trim_end().len());
            self.say(&text, out);
            self.held = rest.get(marker.len()..).unwrap_or_default().to_owned();
            self.state = State::Call;
            return true;
        }
        let certain = before_partial(&self.held, marker);
        let certain = self.held.get(..certain).unwrap_or_default();
        let rest = self.held.split_off(certain.trim_end().len());
        let text = std::mem::replace(&mut self.held, rest);
        self.say(&text, out);
        false
    }

    /// Without tags an answer is calls from its first character on, or text.
    fn maybe_llama(&mut self, out: &mut Vec<Said>) -> bool {
        let begun = self.held.trim_start();
        if !self.has_text {
            if begun.starts_with('{') {
                self.state = State::Call;
                return true;
            }
            if let Some(rest) = begun.strip_prefix(PYTHON) {
                self.held = rest.to_owned();
                self.state = State::Call;
                return true;
            }
            if PYTHON.starts_with(begun) {
                return false;
            }
        }
        let held = std::mem::take(&mut self.held);
        self.say(&held, out);
        false
    }

    fn in_call(&mut self, out: &mut Vec<Said>) -> bool {
        let closing = match self.rules.calls {
            Some(CallForm::Tags) => CALL_END,
            // The end of the answer, or the next call.
            Some(CallForm::Mistral) => MISTRAL,
            Some(CallForm::Llama) | None => return false,
        };
        let Some(at) = self.held.find(closing) else {
            return false;
        };
        let rest = self.held.split_off(at);
        let body = std::mem::take(&mut self.held);
        self.held = rest.get(closing.len()..).unwrap_or_default().to_owned();
        let calls = self.read_last(&body);
        let is_call = calls.is_some();
        match calls {
            Some(calls) => self.call(calls, out),
            None => self.say_opened(&body, out),
        }
        if closing == CALL_END {
            self.state = State::Text;
            self.trims = is_call;
            if !is_call {
                self.say(closing, out);
            }
        }
        true
    }

    fn read_last(&self, body: &str) -> Option<Vec<Call>> {
        match self.rules.calls? {
            CallForm::Tags => Some(vec![call::read_tagged(body)?]),
            CallForm::Mistral => call::read_mistral(body),
            CallForm::Llama => call::read_bare(body).filter(|calls| {
                calls
                    .iter()
                    .all(|call| self.rules.names.contains(&call.name))
            }),
        }
    }

    /// What opened the call that is being read.
    fn opening(&self) -> &'static str {
        match self.rules.calls {
            Some(CallForm::Tags) => CALL,
            Some(CallForm::Mistral) => MISTRAL,
            Some(CallForm::Llama) | None => "",
        }
    }

    /// What looked like a call and is none.
    fn say_opened(&mut self, body: &str, out: &mut Vec<Said>) {
        let text = format!("{}{}{body}", std::mem::take(&mut self.gap), self.opening());
        self.say(&text, out);
    }

    fn call(&mut self, calls: Vec<Call>, out: &mut Vec<Said>) {
        for call in calls {
            if self.rules.single && self.calls > 0 {
                return;
            }
            self.calls += 1;
            self.called.push(call.name.clone());
            out.push(Said::Call(call));
        }
    }

    fn say(&mut self, text: &str, out: &mut Vec<Said>) {
        if !text.is_empty() {
            self.has_text = true;
            self.trims = false;
            out.push(Said::Text(text.to_owned()));
        }
    }
}

fn think(text: &str, out: &mut Vec<Said>) {
    if !text.is_empty() {
        out.push(Said::Thought(text.to_owned()));
    }
}

/// Bytes before an end of the text that may be the beginning of the marker.
fn before_partial(text: &str, marker: &str) -> usize {
    let longest = marker.len().saturating_sub(1).min(text.len());
    let partial = (1..=longest).rev().find(|len| {
        let tail = text.as_bytes().get(text.len() - len..);
        tail == marker.as_bytes().get(..*len)
    });
    text.len() - partial.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(form: CallForm) -> Rules {
        Rules {
            calls: Some(form),
            names: ["f".to_owned(), "g".to_owned()].into(),
            ..Rules::default()
        }
    }

    /// What is said, neighbors joined, for a text cut into pieces of every size.
    fn heard(rules: &Rules, text: &str, whole: bool) -> Vec<String> {
        let mut found: Option<Vec<String>> = None;
        for size in 1..=text.chars().count().max(1) {
            let mut speech = Speech::new(rules.clone());
            let mut out = Vec::new();
            let characters: Vec<char> = text.chars().collect();
            for piece in characters.chunks(size) {
                speech.push(&piece.iter().collect::<String>(), &mut out);
            }
            speech.finish(whole, &mut out);
            let mut lines: Vec<String> = Vec::new();
            for said in out {
                let (kind, text) = match said {
                    Said::Text(text) => ("text:", text),
                    Said::Thought(text) => ("thought:", text),
                    Said::Call(call) => {
                        lines.push(format!("call:{}{}", call.name, call.arguments_text()));
                        continue;
                    }
                };
                match lines.last_mut().filter(|line| line.starts_with(kind)) {
                    Some(line) => line.push_str(&text),
                    None => lines.push(format!("{kind}{text}")),
                }
            }
            assert_eq!(
                *found.get_or_insert_with(|| lines.clone()),
                lines,
                "pieces of {size}"
            );
        }
        found.unwrap_or_default()
    }

    #[test]
    fn text_and_parallel_calls_are_told_apart_in_pieces_of_any_size() {
        let text = "Let me look. <b>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \
            \"</b>\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
        let wanted = [
            "text:Let me look. <b>",
            "call:f{\"x\":\"</b>\"}",
            "call:g{}",
        ];
        assert_eq!(heard(&rules(CallForm::Tags), text, true), wanted);
    }

    #[test]
    fn a_call_that_was_cut_off_is_text() {
        let cut = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1";
        let wanted = [format!("text:{cut}")];
        assert_eq!(heard(&rules(CallForm::Tags), cut, false), wanted);
        assert_eq!(heard(&rules(CallForm::Tags), cut, true), wanted);
        // A model may forget the closing tag, but a cut tells that there was more to come.
        let open = "<tool_call>{\"name\": \"f\"}";
        assert_eq!(heard(&rules(CallForm::Tags), open, true), ["call:f{}"]);
        assert_eq!(
            heard(&rules(CallForm::Tags), open, false),
            [format!("text:{open}")]
        );
    }

    #[test]
    fn what_is_no_call_stays_to_the_byte() {
        let text = "a <tool_cal b <tool_call> not json </tool_call> c  ";
        let joined: String = heard(&rules(CallForm::Tags), text, true)
            .iter()
            .map(|line| line.trim_start_matches("text:"))
            .collect();
        assert_eq!(joined, text);
        let plain = heard(
            &Rules::default(),
            "<tool_call>{\"name\": \"f\"}</tool_call>",
            true,
        );
        assert_eq!(plain, ["text:<tool_call>{\"name\": \"f\"}</tool_call>"]);
    }

    #[test]
    fn only_one_call_where_only_one_is_wanted() {
        let rules = Rules {
            single: true,
            ..rules(CallForm::Tags)
        };
        let text = "<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \
            \"g\"}</tool_call>";
        assert_eq!(heard(&rules, text, true), ["call:f{}"]);
    }

    #[test]
    fn mistral_calls_follow_their_mark() {
        let text = "ok[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g[ARGS]{}";
        let wanted = ["text:ok", "call:f{\"x\":1}", "call:g{}"];
        assert_eq!(heard(&rules(CallForm::Mistral), text, true), wanted);
        let list = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]";
        assert_eq!(heard(&rules(CallForm::Mistral), list, true), ["call:f{}"]);
    }

    #[test]
    fn llama_calls_are_whole_answers_that_name_a_tool() {
        let form = rules(CallForm::Llama);
        let call = "{\"name\": \"f\", \"parameters\": {\"x\": 1}}";
        assert_eq!(heard(&form, call, true), ["call:f{\"x\":1}"]);
        assert_eq!(
            heard(&form, &format!("<|python_tag|>{call}"), true),
            ["call:f{\"x\":1}"]
        );
        let other = "{\"name\": \"nobody\", \"parameters\": {}}";
        assert_eq!(heard(&form, other, true), [format!("text:{other}")]);
        let later = format!("Here: {call}");
        assert_eq!(heard(&form, &later, true), [format!("text:{later}")]);
    }

    #[test]
    fn thoughts_stand_apart_from_the_answer() {
        let maybe = Rules {
            thoughts: Thoughts::Maybe,
            ..rules(CallForm::Tags)
        };
        let text = "<think>\nhm\n\nyes\n</think>\n\nFour.\n";
        assert_eq!(
            heard(&maybe, text, true),
            ["thought:hm\n\nyes", "text:Four.\n"]
        );
        assert_eq!(
            heard(&maybe, "<think>\n\n</think>\n\nFour.", true),
            ["text:Four."]
        );
        assert_eq!(
            heard(&maybe, "no <think>x</think>", true),
            ["text:no <think>x</think>"]
        );
        assert_eq!(heard(&maybe, "<think>cut o", false), ["thought:cut o"]);
        let open = Rules {
            thoughts: Thoughts::Open,
            ..Rules::default()
        };
        assert_eq!(
            heard(&open, "hm</think>Four.", true),
            ["thought:hm", "text:Four."]
        );
    }
}
