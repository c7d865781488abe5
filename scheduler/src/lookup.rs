//! Guessing by looking up: agents repeat what they read (code they edit, JSON they fill in, files
//! they quote), so what followed the same tokens earlier in the text often follows again.
//!
//! A guess costs one position in the step, and a right one saves a row in a later step. How often
//! guesses are right is learned, per request and, for requests that have made few yet, over all of
//! them; both by how many tokens before the guess matched. A guess is made while the share of
//! right ones times what it saves is worth more than what it costs, so a text that does not
//! repeat itself soon costs nothing. Verified tokens are drawn as always, so a text never depends
//! on its guesses.
//!
//! Source: prompt lookup decoding (Saxena 2023); the rule of when to guess is our own.

use std::ops::Range;

use rootstock_radix::Token;

/// Tokens that must match before a guess is made.
const MATCH_MIN: usize = 2;
/// Longest match that is told apart; a longer one ends the search.
const MATCH_MAX: usize = 16;
/// Classes of matches: 2 and 3 tokens, 4 to 7, 8 and more.
const CLASSES: usize = 3;
/// Weight of the past at each verified guess: half after some 44.
const FADE: f64 = 1.0 / 64.0;
/// Guesses of a request that count as much as what was learned from all others.
const PRIOR: f64 = 6.0;
/// Share of right guesses before any was verified.
const SHARE: f64 = 0.5;
/// What a right guess saves over what a guess costs, until step times are known.
pub(crate) const USUAL_WORTH: f64 = 3.0;
/// Most that a right guess is taken to save over the cost of one.
pub(crate) const WORTH_MAX: f64 = 16.0;
/// A request whose guesses do not pay tries one again after this many tokens.
const RETRY_TOKENS: u32 = 32;

/// Where the guesses of a request are in its text.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    /// Tokens that followed the match.
    pub(crate) follows: Range<usize>,
    /// Tokens that matched.
    pub(crate) matched: usize,
}

/// The latest of the longest earlier occurrences of the text's end, with what followed it.
///
/// # Cost
/// O(text); a few nanoseconds per 16 tokens where little matches.
pub(crate) fn find(text: &[Token], most: usize) -> Option<Found> {
    let (&last, before) = text.split_last()?;
    let mut best = Found::default();
    let mut end = before.len();
    while let Some(at) = before[..end].iter().rposition(|&token| token == last) {
        let earlier = text[..=at].iter().rev();
        let matched = earlier
            .zip(text.iter().rev())
            .take(MATCH_MAX)
            .take_while(|(a, b)| a == b)
            .count();
        if matched > best.matched {
            best = Found {
                follows: at + 1..(at + 1 + most).min(text.len()),
                matched,
            };
        }
        if matched == MATCH_MAX {
            break;
        }
        end = at;
    }
    (best.matched >= MATCH_MIN).then_some(best)
}

/// How often guesses were right, by how much of the text matched.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Record {
    /// Guesses verified and right ones, older ones counting less.
    classes: [(f64, f64); CLASSES],
}

fn class(matched: usize) -> usize {
    match matched {
        0..=3 => 0,
        4..=7 => 1,
        _ => 2,
    }
}

impl Record {
    /// Of guesses of which the first `right` were right; one more was verified if it was wrong.
    pub(crate) fn learn(&mut self, matched: usize, guesses: u32, right: u32) {
        let (verified, good) = &mut self.classes[class(matched)];
        for guess in 0..guesses.min(right + 1) {
            *verified = *verified * (1.0 - FADE) + 1.0;
            *good = *good * (1.0 - FADE) + f64::from(u8::from(guess < right));
        }
    }

    /// The share of right guesses, where those of `others` count as a few of its own.
    fn share(&self, others: &Record, matched: usize) -> f64 {
        let (all, all_good) = others.classes[class(matched)];
        let prior = (all_good + PRIOR * SHARE) / (all + PRIOR);
        let (verified, good) = self.classes[class(matched)];
        (good + PRIOR * prior) / (verified + PRIOR)
    }
}

/// The guessing of one request.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Lookup {
    record: Record,
    /// Tokens that matched for the guesses in flight.
    matched: usize,
    /// Output length at which the last guess was made or found not to pay.
    tried_at: u32,
    /// At the last look nothing matched, or what matched was not worth a guess.
    quiet: bool,
}

impl Lookup {
    /// Where in `text`, whose last `made` tokens are output, the guesses worth verifying after it
    /// are, `most` at most; `worth` is what a right one saves over the cost of one.
    pub(crate) fn guesses(
        &mut self,
        others: &Record,
        (text, made): (&[Token], u32),
        worth: f64,
        most: u32,
    ) -> Range<usize> {
        if most == 0 {
            return 0..0;
        }
        let Some(found) = find(text, most as usize) else {
            self.quiet = true;
            return 0..0;
        };
        let share = self.record.share(others, found.matched);
        let mut count = 0;
        let mut right = share;
        while count < found.follows.len() && right * worth > 1.0 {
            count += 1;
            right *= share;
        }
        if count == 0 && made >= self.tried_at.saturating_add(RETRY_TOKENS) {
            count = 1;
        }
        if count > 0 {
            self.tried_at = made;
        }
        self.quiet = count == 0;
        self.matched = found.matched;
        found.follows.start..found.follows.start + count
    }

    /// What came of the guesses in flight.
    pub(crate) fn learn(&mut self, others: &mut Record, guesses: u32, right: u32) {
        self.record.learn(self.matched, guesses, right);
        others.learn(self.matched, guesses, right);
    }

    /// Whether the next row may have guesses, so that it has to know the text before it. Where
    /// nothing matches, rows run ahead and look again now and then.
    pub(crate) fn hopes(&self, made: u32) -> bool {
        !self.quiet || made.is_multiple_of(8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_longest_matches_is_found() {
        let text = [7, 8, 9, 1, 8, 9, 2, 7, 8, 9];
        let found = find(&text, 3).unwrap();
        assert_eq!((found.matched, &text[found.follows]), (3, &[1, 8, 9][..]));
        let text = [8, 9, 1, 8, 9, 2, 8, 9];
        assert_eq!(&text[find(&text, 2).unwrap().follows], [2, 8]);
        assert_eq!(find(&[1, 2, 3, 4], 4), None);
        assert_eq!(find(&[5, 1, 2, 1], 4), None, "one token is no match");
        assert_eq!(find(&[], 4), None);
        let repeated = find(&[3; 40], 4).unwrap();
        assert_eq!((repeated.matched, repeated.follows), (16, 39..40));
    }

    /// All texts of up to 11 tokens of 2 kinds, against a search without shortcuts.
    #[test]
    fn what_is_found_follows_the_longest_match_in_every_short_text() {
        for len in 0..12 {
            for word in 0_u32..1 << len {
                let text: Vec<Token> = (0..len).map(|at| word >> at & 1).collect();
                let matches = |end: usize| {
                    let pairs = text[..end].iter().rev().zip(text.iter().rev());
                    pairs.take_while(|(a, b)| a == b).count()
                };
                let expected = (1..text.len())
                    .max_by_key(|&end| (matches(end), end))
                    .filter(|&end| matches(end) >= MATCH_MIN)
                    .map(|end| Found {
                        follows: end..(end + 3).min(text.len()),
                        matched: matches(end),
                    });
                assert_eq!(find(&text, 3), expected, "{text:?}");
            }
        }
    }

    #[test]
    fn there_are_never_more_guesses_than_have_room_whatever_was_learned() {
        let text: Vec<Token> = (0..20).chain(0..10).collect();
        for right in [0, 1] {
            let (mut lookup, mut others) = (Lookup::default(), Record::default());
            for made in 1..200 {
                for most in [0, 1, 2, 8] {
                    let guesses = lookup.guesses(&others, (&text, made), 3.0, most);
                    assert!(guesses.len() <= most as usize, "{guesses:?} of {most}");
                }
                lookup.learn(&mut others, 1, right);
            }
        }
    }

    #[test]
    fn right_guesses_bring_more_and_wrong_ones_silence() {
        let text: Vec<Token> = (0..20).chain(0..10).collect();
        let (mut lookup, mut others) = (Lookup::default(), Record::default());
        let first = lookup.guesses(&others, (&text, 1), 3.0, 8).len();
        assert!((1..4).contains(&first), "{first}");
        for made in 2..30 {
            let guesses = lookup.guesses(&others, (&text, made), 3.0, 8).len();
            let guesses = u32::try_from(guesses).expect("at most 8");
            lookup.learn(&mut others, guesses, guesses);
        }
        assert_eq!(lookup.guesses(&others, (&text, 30), 3.0, 8), 10..18);
        let mut other = Lookup::default();
        let informed = other.guesses(&others, (&text, 1), 3.0, 8).len();
        assert!(informed > first, "learned from others");
        let mut made = 30;
        while !lookup.guesses(&others, (&text, made), 3.0, 8).is_empty() {
            lookup.learn(&mut others, 1, 0);
            made += 1;
        }
        assert!(made < 200);
        assert!(!lookup.hopes(made.next_multiple_of(8) + 1));
        let later = made + RETRY_TOKENS;
        assert_eq!(lookup.guesses(&others, (&text, later), 3.0, 8), 10..11);
    }

    #[test]
    fn a_guess_that_costs_what_it_saves_is_not_made() {
        let text: Vec<Token> = (0..20).chain(0..10).collect();
        let mut lookup = Lookup::default();
        let guesses = lookup.guesses(&Record::default(), (&text, 1), 1.0, 8);
        assert!(guesses.is_empty());
    }
}
