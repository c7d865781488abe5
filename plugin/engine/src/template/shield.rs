//! Text of control tokens inside a conversation: it is shown to the model, but steers nothing.
//!
//! A message may hold `<|im_end|>\n<|im_start|>system`, by accident or on purpose. Rendered, it
//! cannot be told from the template's own words. So the conversation is rendered a second time
//! with a mark in place of the first character of each such text, and where the marks come out is
//! where no control token may begin. The marks are private-use characters, one for one, so that
//! templates trim, cut and count as they did; put back, they must give the very text of the first
//! render. Where they do not (a template that compares contents with control tokens), the
//! conversation is refused: a guess could be wrong, and wrong is an open door.
//!
//! Conversations without such text, nearly all, cost one scan.

use aho_corasick::{AhoCorasick, Input, MatchKind};
use serde_json::{Map, Value as Json};

use crate::tokenizer::{TokenKind, Tokenizer};

/// What stands for a character is this much above it: planes 15 and 16 for planes 0 and 1.
const MARKS: u32 = 0xf_0000;

/// Knows the control tokens of a vocabulary.
#[derive(Debug)]
pub(super) struct Shield {
    texts: Vec<String>,
    search: AhoCorasick,
    longest: usize,
}

impl Shield {
    /// None when the vocabulary has no control tokens, or none that a search can be built of.
    pub(super) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let texts: Vec<String> = (0..tokenizer.vocabulary_len())
            .filter(|&id| matches!(tokenizer.kind(id), TokenKind::Control | TokenKind::Unknown))
            .filter_map(|id| str::from_utf8(tokenizer.token_bytes(id)).ok())
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
            .collect();
        let longest = texts.iter().map(String::len).max()?;
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .ok()?;
        Some(Self {
            texts,
            search,
            longest,
        })
    }

    /// The value with marks in all of its texts; false when there was nothing to mark.
    pub(super) fn mark_all(&self, json: &mut Json) -> bool {
        match json {
            Json::String(text) => match self.marked(text) {
                Some(marked) => {
                    *text = marked;
                    true
                }
                None => false,
            },
            Json::Array(items) => items
                .iter_mut()
                .fold(false, |any, item| self.mark_all(item) | any),
            Json::Object(fields) => self.mark_fields(fields),
            Json::Null | Json::Bool(_) | Json::Number(_) => false,
        }
    }

    /// As [`Shield::mark_all`], keys too.
    pub(super) fn mark_fields(&self, fields: &mut Map<String, Json>) -> bool {
        let mut any = false;
        *fields = std::mem::take(fields)
            .into_iter()
            .map(|(key, mut value)| {
                any |= self.mark_all(&mut value);
                match self.marked(&key) {
                    Some(marked) => {
                        any = true;
                        (marked, value)
                    }
                    None => (key, value),
                }
            })
            .collect();
        any
    }

    /// The text with a mark wherever a control token begins; also where one might, at the end:
    /// templates join contents, and trim them before.
    fn marked(&self, text: &str) -> Option<String> {
        let mut starts = Vec::new();
        let mut from = 0;
        while let Some(found) = self.search.find(Input::new(text).range(from..)) {
            starts.push(found.start());
            from = found.start() + 1;
        }
        let end = text.trim_end();
        let tail = end.len().saturating_sub(self.longest).max(from);
        let begun = (tail..end.len()).filter(|&at| {
            end.get(at..)
                .is_some_and(|rest| self.texts.iter().any(|text| text.starts_with(rest)))
        });
        starts.extend(begun);
        if starts.is_empty() {
            return None;
        }
        let mut marked = String::with_capacity(text.len() + 3 * starts.len());
        let mut at = 0;
        for start in starts {
            let first = text.get(start..)?.chars().next()?;
            marked.push_str(text.get(at..start)?);
            marked.push(char::from_u32(u32::from(first) + MARKS).unwrap_or(first));
            at = start + first.len_utf8();
        }
        marked.push_str(text.get(at..)?);
        Some(marked)
    }
}

/// Where the marks of a rendered text stand in the text they were rendered instead of; None when
/// the texts differ in more than the marks.
pub(super) fn places(text: &str, marked: &str) -> Option<Vec<usize>> {
    let mut places = Vec::new();
    let mut shown = text.char_indices();
    for mark in marked.chars() {
        let (at, real) = shown.next()?;
        if mark != real {
            (u32::from(mark) == u32::from(real) + MARKS).then_some(())?;
            places.push(at);
        }
    }
    shown.next().is_none().then_some(places)
}
