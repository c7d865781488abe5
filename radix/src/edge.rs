//! The tokens of an edge, in three bytes each and still exact. Vocabularies end below 2^24; only an
//! edge with a larger token (hosts name images by such) has a fourth byte for all of its tokens.
//!
//! ```text
//!   narrow   | low halves, 2 bytes each | third bytes |                  3 bytes for each there is
//!   wide     | low halves, 2 bytes each | third bytes | fourth bytes |   room for, or 4
//! ```
//! One buffer, which says by its length which it is: three divides that of a narrow edge alone. The
//! planes begin where they do for all that there is room for, so that growth moves nothing. Each
//! loop is over planes side by side, which the compiler turns into the widest vectors of the
//! machine. How many tokens are in use the edge does not know.

use crate::Token;
use fearless_simd::{Level, dispatch};
use std::ops::Range;

/// Bytes of tokens, by plane.
#[derive(Debug, Default)]
pub(crate) struct Edge(Box<[u8]>);

/// The planes of some tokens; the last is empty where the edge is narrow.
#[derive(Clone, Copy)]
struct Planes<'a> {
    low: &'a [[u8; 2]],
    third: &'a [u8],
    fourth: &'a [u8],
}

impl Edge {
    /// Room for exactly these.
    pub(crate) fn new(tokens: &[Token]) -> Self {
        let mut edge = Self(vec![0; 3 * tokens.len()].into_boxed_slice());
        edge.append(0, tokens);
        edge
    }

    /// A buffer that begins with the tokens of these planes.
    fn of(planes: Planes<'_>, room: usize, is_wide: bool) -> Self {
        let room = room + usize::from(is_wide && room.is_multiple_of(3));
        let len = room * if is_wide { 4 } else { 3 };
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(planes.low.as_flattened());
        bytes.resize(2 * room, 0);
        bytes.extend_from_slice(planes.third);
        bytes.resize(3 * room, 0);
        if is_wide {
            bytes.extend_from_slice(planes.fourth);
            bytes.resize(len, 0);
        }
        Self(bytes.into_boxed_slice())
    }

    const fn is_wide(&self) -> bool {
        !self.0.len().is_multiple_of(3)
    }

    /// Tokens that there is room for.
    pub(crate) const fn room(&self) -> usize {
        self.0.len() / if self.is_wide() { 4 } else { 3 }
    }

    fn planes(&self, part: Range<usize>) -> Planes<'_> {
        let room = self.room();
        let (low, rest) = self.0.split_at(2 * room);
        let (third, fourth) = rest.split_at(room);
        Planes {
            low: &low.as_chunks().0[part.clone()],
            third: &third[part.clone()],
            fourth: fourth.get(part).unwrap_or_default(),
        }
    }

    /// How many of the first `len` tokens are those that `others` begins with.
    pub(crate) fn common_prefix(&self, len: usize, others: &[Token]) -> usize {
        let len = len.min(others.len());
        let (planes, others) = (self.planes(0..len), &others[..len]);
        dispatch!(Level::new(), _simd => planes.common_prefix(others))
    }

    /// The tokens of a part.
    pub(crate) fn tokens(&self, part: Range<usize>) -> Vec<Token> {
        let planes = self.planes(part);
        dispatch!(Level::new(), _simd => planes.decode())
    }

    /// The token at a place.
    pub(crate) fn token(&self, at: usize) -> Token {
        self.planes(at..at + 1).token(0)
    }

    /// Appends to the first `len` tokens. With some room where it is moved, so that an answer that
    /// grows page by page is not moved each time.
    pub(crate) fn append(&mut self, len: usize, tokens: &[Token]) {
        let end = len + tokens.len();
        if self.room() < end {
            *self = Self::of(self.planes(0..len), end + end / 4, self.is_wide());
        }
        if self.write(len, tokens) >> 24 != 0 && !self.is_wide() {
            *self = Self::of(self.planes(0..len), self.room(), true);
            self.write(len, tokens);
        }
    }

    /// Writes tokens as far as the planes hold them; returns all their bits.
    fn write(&mut self, at: usize, tokens: &[Token]) -> Token {
        let (room, part) = (self.room(), at..at + tokens.len());
        let (low, rest) = self.0.split_at_mut(2 * room);
        let (third, fourth) = rest.split_at_mut(room);
        let low = &mut low.as_chunks_mut().0[part.clone()];
        let third = &mut third[part.clone()];
        if let Some(fourth) = fourth.get_mut(part) {
            for (byte, token) in fourth.iter_mut().zip(tokens) {
                *byte = token.to_le_bytes()[3];
            }
        }
        dispatch!(Level::new(), _simd => encode(tokens, low, third))
    }

    /// Cuts the first `len` tokens at `at`: keeps those before it, returns the others.
    pub(crate) fn split_off(&mut self, len: usize, at: usize) -> Self {
        let lower = self.part(at..len);
        self.shrink(at);
        lower
    }

    /// A part in a buffer of exactly its size, wide only where it has to be.
    fn part(&self, part: Range<usize>) -> Self {
        let (len, planes) = (part.len(), self.planes(part));
        Self::of(planes, len, planes.needs_fourth())
    }

    /// Gives back the room beyond the first `room` tokens.
    pub(crate) fn shrink(&mut self, room: usize) {
        if self.is_wide() {
            *self = self.part(0..room);
            return;
        }
        let old = self.room();
        let mut bytes = std::mem::take(&mut self.0).into_vec();
        bytes.copy_within(2 * old..2 * old + room, 2 * room);
        bytes.truncate(3 * room);
        self.0 = bytes.into_boxed_slice();
    }
}

/// Tokens that are compared without a branch: many, and few.
const MANY: usize = 64;
const FEW: usize = 16;

impl Planes<'_> {
    #[inline(always)]
    fn token(&self, at: usize) -> Token {
        let fourth = self
            .fourth
            .get(at)
            .map_or(0, |&byte| Token::from(byte) << 24);
        joined(self.low[at], self.third[at]) | fourth
    }

    fn needs_fourth(&self) -> bool {
        self.fourth.iter().any(|&byte| byte != 0)
    }

    #[inline(always)]
    fn decode(&self) -> Vec<Token> {
        let bytes = self.low.iter().zip(self.third);
        let mut tokens: Vec<Token> = bytes.map(|(&low, &third)| joined(low, third)).collect();
        for (token, &fourth) in tokens.iter_mut().zip(self.fourth) {
            *token |= Token::from(fourth) << 24;
        }
        tokens
    }

    /// How many tokens are the same, of equally many.
    #[inline(always)]
    fn common_prefix(&self, others: &[Token]) -> usize {
        let mut at = if self.fourth.is_empty() {
            let at = self.same::<MANY>(others, 0);
            self.same::<FEW>(others, at)
        } else {
            0
        };
        while at < others.len() && self.token(at) == others[at] {
            at += 1;
        }
        at
    }

    /// Where whole blocks of `N` stop being the same, from `at` on, in a narrow edge.
    #[inline(always)]
    fn same<const N: usize>(&self, others: &[Token], mut at: usize) -> usize {
        let (low, _) = self.low[at..].as_chunks::<N>();
        let (third, _) = self.third[at..].as_chunks::<N>();
        let (others, _) = others[at..].as_chunks::<N>();
        for ((low, third), others) in low.iter().zip(third).zip(others) {
            let mut differ = 0;
            for at in 0..N {
                differ |= joined(low[at], third[at]) ^ others[at];
            }
            if differ != 0 {
                break;
            }
            at += N;
        }
        at
    }
}

#[inline(always)]
fn joined(low: [u8; 2], third: u8) -> Token {
    Token::from(u16::from_le_bytes(low)) | Token::from(third) << 16
}

/// Three bytes of each token; returns all their bits.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "cut into parts")]
fn encode(tokens: &[Token], low: &mut [[u8; 2]], third: &mut [u8]) -> Token {
    let mut bits = 0;
    for ((&token, low), third) in tokens.iter().zip(low).zip(third) {
        *low = (token as u16).to_le_bytes();
        *third = (token >> 16) as u8;
        bits |= token;
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tokens of a usual vocabulary, and now and then any.
    fn token() -> impl Strategy<Value = Token> {
        prop_oneof![
            40 => 0..1_u32 << 18,
            1 => any::<Token>(),
            1 => prop::sample::select(vec![0xff_ffff, 0x100_0000, Token::MAX]),
        ]
    }

    fn tokens(most: usize) -> impl Strategy<Value = Vec<Token>> {
        prop_oneof![
            prop::collection::vec(0..1_u32 << 24, 0..most),
            prop::collection::vec(token(), 0..most),
        ]
    }

    fn has(edge: &Edge, tokens: &[Token]) {
        assert_eq!(edge.tokens(0..tokens.len()), tokens);
        assert_eq!(edge.common_prefix(tokens.len(), tokens), tokens.len());
        for (at, &token) in tokens.iter().enumerate() {
            assert_eq!(edge.token(at), token);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn an_edge_holds_the_tokens_that_a_plain_list_does(
            first in tokens(300),
            more in prop::collection::vec(tokens(90), 0..6),
            cut: prop::sample::Index,
        ) {
            let (mut edge, mut plain) = (Edge::new(&first), first);
            let (is_wide, len) = (plain.iter().any(|token| token >> 24 != 0), plain.len());
            let least = if is_wide { 4 * len } else { 3 * len };
            prop_assert!((least..=least + 4 * usize::from(is_wide)).contains(&edge.0.len()));
            for tokens in more {
                edge.append(plain.len(), &tokens);
                plain.extend(tokens);
                has(&edge, &plain);
            }
            let at = cut.index(plain.len() + 1);
            let lower = edge.split_off(plain.len(), at);
            has(&edge, &plain[..at]);
            has(&lower, &plain[at..]);
            prop_assert!(edge.room() <= at + 1 && lower.room() <= plain.len() - at + 1);
            edge.append(at, &plain[at..]);
            has(&edge, &plain);
            edge.shrink(at);
            has(&edge, &plain[..at]);
        }

        #[test]
        fn the_first_difference_is_found_wherever_it_is(
            plain in tokens(400),
            at: prop::sample::Index,
            bit in 0..32_u32,
            len: prop::sample::Index,
        ) {
            prop_assume!(!plain.is_empty());
            let edge = Edge::new(&plain);
            let (at, len) = (at.index(plain.len()), len.index(plain.len() + 1));
            let mut other = plain.clone();
            other[at] ^= 1 << bit;
            prop_assert_eq!(edge.common_prefix(plain.len(), &other), at);
            prop_assert_eq!(edge.common_prefix(len, &other), at.min(len));
            prop_assert_eq!(edge.common_prefix(plain.len(), &other[..len]), at.min(len));
            // The same without the vectors of this machine.
            prop_assert_eq!(edge.planes(0..plain.len()).common_prefix(&other), at);
        }
    }
}
