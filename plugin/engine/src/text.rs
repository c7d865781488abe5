//! Text out of tokens, piece by piece: nothing is shown before it is certain, nothing is held
//! longer than it must be.
//!
//! Two things keep bytes back. A character may be cut between tokens: its bytes wait until they
//! are whole. And the tail may be the beginning of a stop string: it waits until it no longer can
//! be. Everything else goes out at once, and the pieces joined are, byte for byte, the text that
//! one call for the whole answer would give:
//!
//! - the answer ends at the first byte that completes any stop string, and the text before the
//!   longest stop string that ends there is what the client gets;
//! - bytes that can never become UTF-8 are U+FFFD, as `String::from_utf8_lossy` places them.
//!
//! Stops are searched in the bytes, by one Knuth-Morris-Pratt automaton a stop string, so a token
//! costs its bytes times the number of stops, however the tokens cut the text.

/// Turns the bytes of tokens into pieces of text.
#[derive(Debug, Clone)]
pub struct TextStream {
    /// Bytes that are not shown yet.
    held: Vec<u8>,
    stops: Vec<Stop>,
    stopped: bool,
}

/// What a push brought.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// Text to show, never empty.
    pub text: Option<String>,
    /// The stop string that ended the answer, as an index into the list given to
    /// [`TextStream::new`].
    pub stop: Option<usize>,
}

impl TextStream {
    /// A stream that ends at any of these texts. Empty ones never match.
    #[must_use]
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        let stops = stops
            .iter()
            .map(|stop| Stop::new(stop.as_ref().as_bytes()))
            .collect();
        Self {
            held: Vec::new(),
            stops,
            stopped: false,
        }
    }

    /// Takes the bytes of one or more tokens. After a stop, further bytes are ignored.
    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        if self.stopped {
            return Piece::default();
        }
        for &byte in bytes {
            self.held.push(byte);
            if let Some(found) = self.advance(byte) {
                let stop_bytes = self.stops.get(found).map_or(0, |stop| stop.pattern.len());
                self.held
                    .truncate(self.held.len().saturating_sub(stop_bytes));
                self.stopped = true;
                return Piece {
                    text: self.take_all(),
                    stop: Some(found),
                };
            }
        }
        Piece {
            text: self.take_certain(),
            stop: None,
        }
    }

    /// The answer is over: shows what was held back.
    pub fn finish(&mut self) -> Option<String> {
        self.stopped = true;
        self.take_all()
    }

    /// Moves all automata by one byte; the longest stop that is now complete.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<(usize, usize)> = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            let len = stop.pattern.len();
            if stop.advance(byte) && longest.is_none_or(|(_, best)| len > best) {
                longest = Some((index, len));
            }
        }
        longest.map(|(index, _)| index)
    }

    /// Takes what can no longer be part of a stop, up to the last whole character.
    fn take_certain(&mut self) -> Option<String> {
        let possible = self
            .stops
            .iter()
            .map(|stop| stop.matched)
            .max()
            .unwrap_or(0);
        let free = self.held.len().saturating_sub(possible);
        let (text, taken) = whole_characters(self.held.get(..free).unwrap_or_default());
        self.held.drain(..taken);
        (!text.is_empty()).then_some(text)
    }

    fn take_all(&mut self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        (!text.is_empty()).then_some(text)
    }
}

/// The text of the bytes without a character that is only begun at the end, and how many bytes
/// that took.
fn whole_characters(bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let broken = chunk.invalid();
        if broken.is_empty() || (taken + broken.len() == bytes.len() && is_begun(broken)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += broken.len();
    }
    (text, taken)
}

/// Whether more bytes could make a character of these.
fn is_begun(bytes: &[u8]) -> bool {
    str::from_utf8(bytes)
        .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

/// One stop string with its automaton.
#[derive(Debug, Clone)]
struct Stop {
    pattern: Vec<u8>,
    /// `fallback[n]`: the longest proper prefix of the pattern that ends its first `n + 1` bytes.
    fallback: Vec<usize>,
    /// How many bytes of the pattern the text so far ends with.
    matched: usize,
}

impl Stop {
    fn new(pattern: &[u8]) -> Self {
        let mut stop = Self {
            pattern: pattern.to_vec(),
            fallback: Vec::new(),
            matched: 0,
        };
        for (index, &byte) in pattern.iter().enumerate() {
            if index > 0 {
                stop.step(byte);
            }
            stop.fallback.push(stop.matched);
        }
        stop.matched = 0;
        stop
    }

    /// Whether the pattern is complete with this byte.
    fn advance(&mut self, byte: u8) -> bool {
        self.step(byte);
        let complete = !self.pattern.is_empty() && self.matched == self.pattern.len();
        if complete {
            self.matched = self.fallback.last().copied().unwrap_or(0);
        }
        complete
    }

    fn step(&mut self, byte: u8) {
        while self.matched > 0 && self.pattern.get(self.matched) != Some(&byte) {
            self.matched = self.fallback.get(self.matched - 1).copied().unwrap_or(0);
        }
        if self.pattern.get(self.matched) == Some(&byte) {
            self.matched += 1;
        }
    }
}
