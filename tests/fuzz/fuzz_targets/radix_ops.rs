//! The prefix cache against its plain model, on operations that libFuzzer makes up.
//!
//! `cargo +nightly fuzz run radix_ops -- -max_total_time=60`, in `tests/`.
#![no_main]

#[path = "../../../radix/tests/shared/model.rs"]
mod model;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use model::{Op, Setup, World};

/// Sizes and operations; every value is a valid one.
#[derive(Arbitrary, Debug)]
struct Input {
    page: u8,
    pages: u8,
    kind: u8,
    ops: Vec<[u8; 4]>,
}

/// Longest sequence of operations; longer ones find nothing more and are slow to shrink.
const OPS: usize = 200;

fuzz_target!(|input: Input| {
    let mut world = World::new(&Setup::decode(input.page, input.pages, input.kind));
    for op in input.ops.into_iter().take(OPS) {
        world.apply(Op::decode(op));
    }
    world.finish();
});
