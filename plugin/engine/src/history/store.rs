//! The kept answers, by place, with the order in which they were used.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::HistoryStats;
use crate::tokenizer::Tokenizer;

/// What an answer costs beside its ids: keys, links and allocations.
const ANSWER_BYTES: usize = 150;
/// Answers kept for one place: a prompt sampled a thousand times must not fill the store.
const ANSWERS_AT_PLACE_MAX: usize = 8;

/// A place in a text: how many bytes stand before it, and their hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    bytes: usize,
    hash: u64,
}

/// Ids to splice, and the bytes of the text that they stand for.
#[derive(Debug)]
pub(super) struct Splice {
    pub(super) bytes: Range<usize>,
    pub(super) ids: Arc<[u32]>,
}

/// Answers of one namespace: by length of the text before, then by its hash.
type ByPlace = BTreeMap<Place, Vec<Answer>>;

#[derive(Debug)]
struct Answer {
    ids: Arc<[u32]>,
    used: u64,
    /// Whether it was spliced once: the cache then holds what was computed behind these ids, so
    /// they stay the ids of this text even when another answer with the same text is kept.
    chosen: bool,
}

/// All kept answers.
#[derive(Debug)]
pub(super) struct Store {
    bytes_max: usize,
    bytes: usize,
    namespaces: BTreeMap<u64, ByPlace>,
    /// When each answer was last used: a counter, so that each entry is unique.
    order: BTreeMap<u64, (u64, Place)>,
    clock: u64,
    spliced_tokens: u64,
    dropped_answers: u64,
}

/// The hash of a growing text (64-bit FNV-1a). It only finds candidates: what is spliced is
/// compared byte by byte.
#[derive(Debug, Clone, Copy)]
struct TextHash(u64);

impl TextHash {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl Store {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            bytes: 0,
            namespaces: BTreeMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            spliced_tokens: 0,
            dropped_answers: 0,
        }
    }

    /// What to splice into a text, in order and without overlaps, and the place behind the text.
    pub(super) fn find(
        &mut self,
        namespace: u64,
        tokenizer: &Tokenizer,
        text: &str,
    ) -> (Vec<Splice>, Place) {
        let mut splices: Vec<Splice> = Vec::new();
        let mut used: Vec<(Place, usize)> = Vec::new();
        let mut hash = TextHash::new();
        let mut hashed = 0;
        let mut hash_to = |to: usize| {
            hash.add(text.as_bytes().get(hashed..to).unwrap_or_default());
            hashed = to;
            Place {
                bytes: to,
                hash: hash.0,
            }
        };
        let mut at = 0;
        if let Some(places) = self.namespaces.get(&namespace) {
            // The next length, behind what is spliced already, at which something is kept.
            let from = |bytes| Place { bytes, hash: 0 };
            while let Some((next, _)) = places.range(from(at)..).next() {
                let bytes = next.bytes;
                if bytes >= text.len() {
                    break;
                }
                at = bytes + 1;
                let Some(rest) = text.get(bytes..) else {
                    continue;
                };
                let place = hash_to(bytes);
                let Some(answers) = places.get(&place) else {
                    continue;
                };
                let Some((index, ids, length)) = longest(answers, tokenizer, rest) else {
                    continue;
                };
                splices.push(Splice {
                    bytes: bytes..bytes + length,
                    ids,
                });
                used.push((place, index));
                at = bytes + length;
            }
        }
        let end = hash_to(text.len());
        // Used last is dropped last: the first turn of a conversation must outlive the others.
        for &(place, index) in used.iter().rev() {
            self.touch(namespace, place, index, true);
        }
        self.spliced_tokens += splices
            .iter()
            .map(|splice| splice.ids.len() as u64)
            .sum::<u64>();
        (splices, end)
    }

    pub(super) fn insert(&mut self, namespace: u64, place: Place, ids: &[u32]) {
        if ids.is_empty() || cost(ids) > self.bytes_max {
            return;
        }
        let answers = self
            .namespaces
            .entry(namespace)
            .or_default()
            .entry(place)
            .or_default();
        if let Some(index) = answers.iter().position(|answer| *answer.ids == *ids) {
            self.touch(namespace, place, index, false);
            return;
        }
        self.clock += 1;
        answers.push(Answer {
            ids: ids.into(),
            used: self.clock,
            chosen: false,
        });
        self.order.insert(self.clock, (namespace, place));
        self.bytes += cost(ids);
        if answers.len() > ANSWERS_AT_PLACE_MAX
            && let Some(oldest) = answers.iter().map(|answer| answer.used).min()
        {
            self.drop_answer(oldest);
        }
        while self.bytes > self.bytes_max
            && let Some((&oldest, _)) = self.order.first_key_value()
        {
            self.drop_answer(oldest);
        }
    }

    fn touch(&mut self, namespace: u64, place: Place, index: usize, is_spliced: bool) {
        let answers = self
            .namespaces
            .get_mut(&namespace)
            .and_then(|all| all.get_mut(&place));
        if let Some(answer) = answers.and_then(|answers| answers.get_mut(index)) {
            self.order.remove(&answer.used);
            self.clock += 1;
            answer.used = self.clock;
            answer.chosen |= is_spliced;
            self.order.insert(self.clock, (namespace, place));
        }
    }

    fn drop_answer(&mut self, used: u64) {
        let Some((namespace, place)) = self.order.remove(&used) else {
            return;
        };
        let Some(places) = self.namespaces.get_mut(&namespace) else {
            return;
        };
        if let Some(answers) = places.get_mut(&place) {
            if let Some(index) = answers.iter().position(|answer| answer.used == used) {
                self.bytes -= cost(&answers.remove(index).ids);
                self.dropped_answers += 1;
            }
            if answers.is_empty() {
                places.remove(&place);
            }
        }
        if places.is_empty() {
            self.namespaces.remove(&namespace);
        }
    }

    pub(super) fn stats(&self) -> HistoryStats {
        HistoryStats {
            answers: self.order.len(),
            bytes: self.bytes,
            spliced_tokens: self.spliced_tokens,
            dropped_answers: self.dropped_answers,
        }
    }
}

fn cost(ids: &[u32]) -> usize {
    size_of_val(ids) + ANSWER_BYTES
}

/// The answer that spells the most of what follows; of equals, one that was spliced before, then
/// the one used last.
fn longest(
    answers: &[Answer],
    tokenizer: &Tokenizer,
    rest: &str,
) -> Option<(usize, Arc<[u32]>, usize)> {
    let found = answers.iter().enumerate().filter_map(|(index, answer)| {
        let (count, bytes) = spelled(&answer.ids, tokenizer, rest);
        (count > 0).then_some((bytes, answer.chosen, answer.used, index, count))
    });
    let (bytes, _, _, index, count) = found.max()?;
    let ids = &answers.get(index)?.ids;
    let ids = if count == ids.len() {
        Arc::clone(ids)
    } else {
        ids.get(..count)?.into()
    };
    Some((index, ids, bytes))
}

/// How many leading ids spell the beginning of the text, and how many bytes that is: all of them,
/// or as many as end where the tokenizer would cut the text too.
fn spelled(ids: &[u32], tokenizer: &Tokenizer, text: &str) -> (usize, usize) {
    let mut ends = Vec::new();
    let mut at = 0;
    for &id in ids {
        let bytes = tokenizer.token_bytes(id);
        let rest = text.as_bytes().get(at..).unwrap_or_default();
        if bytes.is_empty() || !rest.starts_with(bytes) {
            break;
        }
        at += bytes.len();
        ends.push(at);
    }
    let is_whole = ends.len() == ids.len() && text.is_char_boundary(at);
    while let Some(&end) = ends.last() {
        if is_whole || is_border(tokenizer, text, end) {
            return (ends.len(), end);
        }
        ends.pop();
    }
    (0, 0)
}

/// Whether every pre-tokenizer begins a new piece here. A blank belongs to the word behind it, and
/// punctuation may belong to a word behind it or to a line end behind it.
fn is_border(tokenizer: &Tokenizer, text: &str, at: usize) -> bool {
    let (Some(before), Some(rest)) = (text.get(..at), text.get(at..)) else {
        return false;
    };
    let (Some(before), Some(after)) = (before.chars().next_back(), rest.chars().next()) else {
        return true;
    };
    let line_ended = matches!(before, '\n' | '\r');
    let differs = if after.is_alphanumeric() {
        line_ended
    } else if after.is_whitespace() {
        before.is_alphanumeric()
    } else {
        before.is_alphanumeric() || line_ended
    };
    differs || tokenizer.begins_with_special(rest)
}
