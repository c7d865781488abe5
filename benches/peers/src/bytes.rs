//! Bytes that a tree keeps alive: all that was allocated since before the cache was made, and what
//! the cache had taken before its first token (its pool of pages, where it makes one).

use std::alloc::System;

use cap::Cap;
use rootstock_benches::micro::{LEAF_TOKENS, nodes};

use crate::micro::Micro;
use crate::peer::Peer;
use crate::record::Record;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes a token and a node of `leaves` leaves, all in, and how much of it the empty cache took.
pub(crate) fn run<P: Peer>(page_tokens: u32, leaves: u32) -> std::io::Result<()> {
    let before = ALLOCATOR.allocated();
    let mut micro = Micro::<P>::empty(page_tokens, leaves);
    let empty = ALLOCATOR.allocated() - before;
    micro.fill();
    let full = ALLOCATOR.allocated() - before;
    drop(micro);
    let nodes = f64::from(nodes(leaves));
    let tokens = nodes * f64::from(LEAF_TOKENS);
    let figures = [
        ("bytes a token", full as f64 / tokens),
        (
            "bytes a token beside the empty cache",
            (full - empty) as f64 / tokens,
        ),
        (
            "bytes a node beside its tokens",
            (full - empty) as f64 / nodes - 4.0 * f64::from(LEAF_TOKENS),
        ),
    ];
    for (op, bytes) in figures {
        if let Some(record) = Record::of::<P>(op, "bytes", &mut [bytes]) {
            record.at(page_tokens, leaves).print()?;
        }
    }
    Ok(())
}
