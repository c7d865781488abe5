//! All tiers of the prefix cache with the bytes followed, on operations that libFuzzer makes up.
//!
//! `cargo +nightly fuzz run radix_tiers -- -max_total_time=60`, in `tests/`.
#![no_main]

#[path = "../../../radix/tests/shared/random.rs"]
mod random;
#[path = "../../../radix/tests/shared/store.rs"]
mod store;
#[path = "../../../radix/tests/shared/tiers.rs"]
mod tiers;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use random::Random;
use tiers::World;

/// Sizes and operations, each with what it hangs on; every value is a valid one.
#[derive(Arbitrary, Debug)]
struct Input {
    sizes: u16,
    ops: Vec<(u8, u16)>,
}

/// Longest sequence of operations; longer ones find nothing more and are slow to shrink.
const OPS: usize = 200;

fuzz_target!(|input: Input| {
    let mut world = World::new(u64::from(input.sizes));
    for (kind, detail) in input.ops.into_iter().take(OPS) {
        world.random = Random(u64::from(detail));
        world.apply(u64::from(kind) % World::KINDS);
    }
    let _ = world.finish();
});
