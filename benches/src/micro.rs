//! The micro tree of all benches: leaves of 64 tokens, 32 to a parent of 64. Own.

use crate::workload::{Request, Span};

/// Tokens of a leaf, and of a parent.
pub const LEAF_TOKENS: u32 = 64;

/// Leaves below one parent.
pub const LEAVES_A_PARENT: u32 = 32;

/// Tokens of a key: a parent's and a leaf's.
pub const KEY_TOKENS: u32 = 2 * LEAF_TOKENS;

/// The key of a leaf in its place.
pub fn key(leaf: u32) -> Vec<u32> {
    key_under(leaf / LEAVES_A_PARENT, leaf)
}

/// The key of a leaf below a parent of choice.
pub fn key_under(parent: u32, leaf: u32) -> Vec<u32> {
    let streams = [1 << 32 | u64::from(parent), 2 << 32 | u64::from(leaf)];
    let spans = streams.map(|stream| Span {
        stream,
        start: 0,
        len: LEAF_TOKENS,
    });
    let mut tokens = Vec::with_capacity(KEY_TOKENS as usize);
    Request::new(spans.to_vec(), 0).tokens(&mut tokens);
    tokens
}

/// Nodes of a tree of so many leaves.
pub const fn nodes(leaves: u32) -> u32 {
    leaves + leaves.div_ceil(LEAVES_A_PARENT)
}
