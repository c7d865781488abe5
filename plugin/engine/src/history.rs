//! Token-faithful history: a conversation that comes back as text gets the token ids it had.
//!
//! A model may write a text in other tokens than a tokenizer would (measured on the default model:
//! 17 to 29 % of free answers, 75 % of JSON answers). When the client sends the answer back as
//! text, plain tokenization gives other ids from the first such place on, and everything cached
//! behind it is lost. So the ids of each answer are kept, and spliced in where the text that comes
//! back has the same bytes.
//!
//! An answer is kept under the namespace and the text before it: its length and hash. Encoding a
//! text looks, left to right, for kept answers whose place it passes. The prompt behind an answer
//! is encoded from exactly where the answer began, as it was the first time, so by induction the
//! ids of the whole conversation are those of the turns before.
//!
//! ```text
//! turn 1   prompt text P1 -> ids p1        answer ids a1, kept under hash(P1)
//! turn 2   P1 + A1 + U2   -> p1 | a1 | u2  answer ids a2, kept under hash(P1 + A1 + U2)
//! turn 3   P1 + A1 + U2 + A2 + U3 -> p1 | a1 | u2 | a2 | u3
//! ```
//!
//! Rules:
//! - The bytes of the result are those of the text, always: ids are spliced only where their own
//!   bytes equal the text there, compared byte by byte. A hash only finds candidates; should two
//!   hashes collide, the ids spliced still spell the text.
//! - Where an answer comes back changed (trimmed by the template, cut at a stop string, edited),
//!   the ids up to the change are spliced, back to a place where no word is cut.
//! - Memory is bounded; the least recently used answer goes first, and of one conversation the
//!   last turn before the first, because a turn is useless without those before it.
//! - The same calls give the same results: no randomness, no clock.

mod store;

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::tokenizer::{Tokenizer, TokenizerError};
use store::{Place, Store};

/// The kept answers of all conversations. Shared by reference; the lock is held for look-ups only,
/// never while text is encoded.
pub struct History {
    store: Mutex<Store>,
}

/// A text as token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The ids, with the BOS token first where the model wants one.
    pub ids: Vec<u32>,
    /// Which of them were spliced from kept answers, in order.
    pub spliced: Vec<Range<usize>>,
    /// Where an answer to this text begins: give it to [`History::record`].
    pub end: AnswerPlace,
}

/// The place behind a text, under which its answer is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerPlace {
    namespace: u64,
    place: Place,
}

/// Counts, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistoryStats {
    /// Answers kept.
    pub answers: usize,
    /// Bytes they take.
    pub bytes: usize,
    /// Tokens spliced since the start.
    pub spliced_tokens: u64,
    /// Answers dropped for room since the start.
    pub dropped_answers: u64,
}

impl fmt::Debug for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("History")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl History {
    /// A history that keeps at most this many bytes: 4 a token and about 150 an answer.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self {
            store: Mutex::new(Store::new(bytes_max)),
        }
    }

    /// Encodes a text whose special tokens count (a raw prompt), with the ids that parts of it had
    /// when the model wrote them.
    ///
    /// `namespace` parts tenants and models that must not see each other's answers.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    ///
    /// # Cost
    /// [`Tokenizer::encode`] of what is not spliced, and one pass over the bytes.
    pub fn encode(
        &self,
        namespace: u64,
        tokenizer: &Tokenizer,
        text: &str,
    ) -> Result<Encoded, TokenizerError> {
        self.encode_guarded(namespace, tokenizer, text, &[])
    }

    /// As [`History::encode`], for a rendered conversation: at the bytes of `literal` (ascending)
    /// no control token begins, and none is spliced there either.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_guarded(
        &self,
        namespace: u64,
        tokenizer: &Tokenizer,
        text: &str,
        literal: &[usize],
    ) -> Result<Encoded, TokenizerError> {
        let (mut splices, place) = self.lock().find(namespace, tokenizer, text);
        splices
            .retain(|splice| !tokenizer.has_control_at(&splice.ids, splice.bytes.start, literal));
        // A BOS that a message begins with is not the model's.
        let head = if literal.first() == Some(&0) {
            ""
        } else {
            text
        };
        let mut ids: Vec<u32> = tokenizer.leading_bos(head).into_iter().collect();
        let mut spliced = Vec::with_capacity(splices.len());
        let mut at = 0;
        for splice in &splices {
            tokenizer.encode_guarded(text, at..splice.bytes.start, literal, &mut ids)?;
            let start = ids.len();
            ids.extend_from_slice(&splice.ids);
            spliced.push(start..ids.len());
            at = splice.bytes.end;
        }
        tokenizer.encode_guarded(text, at..text.len(), literal, &mut ids)?;
        Ok(Encoded {
            ids,
            spliced,
            end: AnswerPlace { namespace, place },
        })
    }

    /// Keeps the ids that the model wrote behind a text, up to its end or to where it was stopped.
    pub fn record(&self, place: AnswerPlace, ids: &[u32]) {
        self.lock().insert(place.namespace, place.place, ids);
    }

    /// What is kept.
    #[must_use]
    pub fn stats(&self) -> HistoryStats {
        self.lock().stats()
    }

    /// The store is consistent after each of its calls, so a panic elsewhere does not spoil it.
    fn lock(&self) -> std::sync::MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
