//! Which bytes of a rendered conversation came from which message.
//!
//! The conversation is rendered a second time with a mark, in private-use characters, in place of
//! each content. What stands between the marks must stand in the real text too, in the same order,
//! with the contents (whole, or trimmed as templates do) between: so the contents are found even
//! when they repeat each other or the template's own words. Where that fails (a template that
//! looks into contents) the contents are searched one after the other.
//!
//! Spans steer only what the cache keeps, never what is computed: a wrong border costs a page.

use std::ops::Range;

use serde_json::Value as Json;

use super::values::from_json;

const OPEN: char = '\u{e000}';
const CLOSE: char = '\u{e001}';

/// What a span of the text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A system or developer message, or the template's own default.
    System,
    /// Tool definitions.
    Tools,
    /// What the user said.
    User,
    /// What the model answered before.
    Assistant,
    /// What the model thought before answering, where a message has it apart.
    Thinking,
    /// What a tool returned.
    Tool,
    /// The head of the answer to come.
    Generation,
}

/// A stretch of the rendered text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Bytes of the text.
    pub bytes: Range<usize>,
    /// What they are; the words that frame a message count as part of it.
    pub part: Part,
    /// The message, as an index into the messages given; none for what the template adds.
    pub message: Option<usize>,
}

/// How a template frames messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame<'a> {
    /// Texts that close a turn.
    pub(super) closings: &'a [String],
    /// Whether the text ends with the head of an answer.
    pub(super) has_answer_head: bool,
}

/// A content that was replaced by a mark.
#[derive(Debug)]
pub(super) struct Mark {
    message: usize,
    part: Part,
    text: String,
}

/// The messages with marks in place of their contents.
pub(super) fn with_marks(messages: &[Json]) -> (Vec<Json>, Vec<Mark>) {
    let mut marks = Vec::new();
    let mut marked = messages.to_vec();
    for (message, json) in marked.iter_mut().enumerate() {
        let part = match json.get("role").and_then(Json::as_str) {
            Some("system" | "developer") => Part::System,
            Some("assistant") => Part::Assistant,
            Some("tool" | "function" | "ipython") => Part::Tool,
            _ => Part::User,
        };
        for key in ["reasoning_content", "reasoning", "thinking"] {
            if let Some(field) = json.get_mut(key) {
                mark(field, message, Part::Thinking, &mut marks);
            }
        }
        match json.get_mut("content") {
            Some(Json::Array(pieces)) => {
                for field in pieces.iter_mut().filter_map(|piece| piece.get_mut("text")) {
                    mark(field, message, part, &mut marks);
                }
            }
            Some(field) => mark(field, message, part, &mut marks),
            None => {}
        }
    }
    (marked, marks)
}

/// Empty texts stay: templates ask whether there is one.
fn mark(field: &mut Json, message: usize, part: Part, marks: &mut Vec<Mark>) {
    if let Json::String(text) = field
        && !text.is_empty()
    {
        let id = marks.len();
        let text = std::mem::replace(text, format!("{OPEN}{id}{CLOSE}"));
        marks.push(Mark {
            message,
            part,
            text,
        });
    }
}

/// Where the definitions of the tools stand: from the first that is found to the end of the last.
pub(super) fn find_tools(text: &str, tools: &Json) -> Option<Range<usize>> {
    let mut found: Option<Range<usize>> = None;
    for tool in tools.as_array()? {
        let value = from_json(tool);
        let written = [
            None,
            Some(minijinja::Value::from(4)),
            Some(minijinja::Value::from(2)),
        ]
        .into_iter()
        .filter_map(|indent| {
            let none = minijinja::value::Kwargs::from_iter(std::iter::empty::<(
                String,
                minijinja::Value,
            )>());
            super::functions::to_json(&value, indent, none).ok()
        });
        let after = found.as_ref().map_or(0, |range| range.end);
        for json in written {
            let json = json.as_str().unwrap_or_default();
            if let Some(at) = text.get(after..).and_then(|rest| rest.find(json)) {
                let start = after + at;
                let end = start + json.len();
                found = Some(found.map_or(start..end, |range| range.start..end));
                break;
            }
        }
    }
    found
}

/// The spans of a text.
pub(super) fn find(
    text: &str,
    skeleton: Option<&str>,
    marks: &[Mark],
    tools: Option<Range<usize>>,
    frame: Frame<'_>,
) -> Vec<Span> {
    let contents = skeleton
        .and_then(|skeleton| align(text, skeleton, marks))
        .unwrap_or_else(|| search(text, marks));
    let mut spans = frame.spans(text, &contents, marks);
    if let Some(tools) = tools {
        carve(&mut spans, frame.around(text, tools, &contents));
    }
    spans
}

/// The bytes of each mark's content, by the skeleton; None when text and skeleton disagree.
fn align(text: &str, skeleton: &str, marks: &[Mark]) -> Option<Vec<(usize, Range<usize>)>> {
    let mut contents = Vec::new();
    let mut at = 0;
    let mut rest = skeleton;
    let mut content: Option<usize> = None;
    loop {
        let (literal, next) = match rest.find(OPEN) {
            None => (rest, None),
            Some(start) => {
                let (literal, marked) = rest.split_at(start);
                let marked = marked.get(OPEN.len_utf8()..)?;
                let (id, after) = marked.split_once(CLOSE)?;
                rest = after;
                (literal, Some(id.parse::<usize>().ok()?))
            }
        };
        let here = text.get(at..)?;
        match content {
            None => {
                here.starts_with(literal).then_some(())?;
            }
            Some(id) => {
                let is_last = next.is_none();
                let shown = shown_forms(&marks.get(id)?.text).into_iter().find(|form| {
                    here.strip_prefix(form).is_some_and(|after| {
                        if is_last {
                            after == literal
                        } else {
                            after.starts_with(literal)
                        }
                    })
                })?;
                contents.push((id, at..at + shown.len()));
                at += shown.len();
            }
        }
        at += literal.len();
        content = next;
        if content.is_none() {
            return (at == text.len()).then_some(contents);
        }
    }
}

/// The forms in which templates show a content, longest first.
fn shown_forms(text: &str) -> Vec<&str> {
    let mut forms = vec![text, text.trim_start(), text.trim_end(), text.trim()];
    if let Some((_, answer)) = text.rsplit_once("</think>") {
        forms.extend([answer, answer.trim_start_matches('\n'), answer.trim()]);
    }
    forms.sort_by_key(|form| std::cmp::Reverse(form.len()));
    forms.dedup();
    forms
}

/// Looks for the contents one after the other.
fn search(text: &str, marks: &[Mark]) -> Vec<(usize, Range<usize>)> {
    let mut contents = Vec::new();
    let mut at = 0;
    for (id, mark) in marks.iter().enumerate() {
        let rest = text.get(at..).unwrap_or_default();
        for form in shown_forms(&mark.text)
            .into_iter()
            .filter(|form| !form.is_empty())
        {
            if let Some(found) = rest.find(form) {
                contents.push((id, at + found..at + found + form.len()));
                at += found + form.len();
                break;
            }
        }
    }
    contents
}

impl Frame<'_> {
    /// The definitions with the words about them: from the content before, and up to the last turn
    /// that is closed before the next content.
    fn around(
        self,
        text: &str,
        tools: Range<usize>,
        contents: &[(usize, Range<usize>)],
    ) -> Range<usize> {
        let ends = contents.iter().map(|(_, bytes)| bytes.end);
        let before = ends.filter(|&end| end <= tools.start).max();
        let start = before.map_or(tools.start, |end| closed_end(text, end, self.closings));
        let starts = contents.iter().map(|(_, bytes)| bytes.start);
        let next = starts.filter(|&start| start >= tools.end).min();
        let end = next.map_or(tools.end, |next| last_closed(text, next, self.closings));
        start.min(tools.start)..end.max(tools.end)
    }

    /// Gives the words between contents to the messages that they frame.
    fn spans(self, text: &str, contents: &[(usize, Range<usize>)], marks: &[Mark]) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        let mut at = 0;
        for (index, (id, bytes)) in contents.iter().enumerate() {
            let Some(mark) = marks.get(*id) else { continue };
            if index == 0 && mark.part != Part::System {
                // What the template says before the first message is a system prompt of its own.
                at = last_closed(text, bytes.start, self.closings);
                push(&mut spans, 0..at, Part::System, None);
            }
            let end = closed_end(text, bytes.end, self.closings);
            push(&mut spans, at..end, mark.part, Some(mark.message));
            at = end;
        }
        match spans.last_mut() {
            Some(last) if !self.has_answer_head => last.bytes.end = text.len(),
            Some(_) => push(&mut spans, at..text.len(), Part::Generation, None),
            None => push(&mut spans, at..text.len(), Part::System, None),
        }
        spans
    }
}

fn push(spans: &mut Vec<Span>, bytes: Range<usize>, part: Part, message: Option<usize>) {
    if !bytes.is_empty() {
        spans.push(Span {
            bytes,
            part,
            message,
        });
    }
}

/// Where the last closed turn before a place ends; 0 when there is none.
fn last_closed(text: &str, before: usize, closings: &[String]) -> usize {
    let head = text.get(..before).unwrap_or_default();
    let ends = closings
        .iter()
        .filter_map(|closing| Some(head.rfind(closing.as_str())? + closing.len()));
    ends.max().map_or(0, |end| end + newline(head, end))
}

/// Where a message ends whose content ends here: behind the text that closes a turn.
fn closed_end(text: &str, end: usize, closings: &[String]) -> usize {
    let rest = text.get(end..).unwrap_or_default();
    let closing = closings
        .iter()
        .filter(|closing| rest.starts_with(closing.as_str()));
    match closing.map(String::len).max() {
        None | Some(0) => end,
        Some(length) => end + length + newline(text, end + length),
    }
}

fn newline(text: &str, at: usize) -> usize {
    usize::from(text.get(at..).is_some_and(|rest| rest.starts_with('\n')))
}

/// Puts a span of tool definitions over what is there.
fn carve(spans: &mut Vec<Span>, tools: Range<usize>) {
    let mut out = Vec::with_capacity(spans.len() + 2);
    let mut placed = false;
    for span in spans.drain(..) {
        let before = span.bytes.start..span.bytes.end.min(tools.start);
        let after = span.bytes.start.max(tools.end)..span.bytes.end;
        if !before.is_empty() {
            out.push(Span {
                bytes: before,
                ..span.clone()
            });
        }
        if span.bytes.end > tools.start && !placed {
            out.push(Span {
                bytes: tools.clone(),
                part: Part::Tools,
                message: None,
            });
            placed = true;
        }
        if !after.is_empty() {
            out.push(Span {
                bytes: after,
                ..span
            });
        }
    }
    *spans = out;
}
