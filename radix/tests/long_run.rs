//! Seeded random operations against the plain model, as many as asked for.
//!
//! `RADIX_OPS=10000000 RADIX_SEED=1 cargo test --release -p rootstock-radix --test long_run`.
//! A failure prints the seed of its world; that seed alone repeats it.

#[path = "shared/model.rs"]
mod model;
#[path = "shared/random.rs"]
mod random;

use model::{Op, Setup, World};
use random::{Random, number};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Operations in the life of one world.
const WORLD_OPS: u64 = 500;

fn live(seed: u64, ops: u64) {
    let mut random = Random(seed);
    let [page, pages, kind, swarm] = random.bytes();
    let mut world = World::new(&Setup::decode(page, pages, kind));
    for _ in 0..ops {
        let mut op: [u8; 4] = random.bytes();
        // Each world leaves some kinds of operations out.
        if swarm >> (op[0] % 8) & 1 == 1 {
            op[0] = random.bytes::<1>()[0] % 12;
        }
        world.apply(Op::decode(op));
    }
    world.finish();
}

#[test]
fn random_operations_agree_with_the_plain_model() {
    let (ops, seed) = (number("RADIX_OPS", 20_000), number("RADIX_SEED", 1));
    let mut done = 0;
    let mut worlds = Random(seed);
    while done < ops {
        let world = worlds.next();
        let n = WORLD_OPS.min(ops - done);
        let result = catch_unwind(AssertUnwindSafe(|| live(world, n)));
        assert!(
            result.is_ok(),
            "world {world:#x} of seed {seed} failed after {done} operations"
        );
        done += n;
    }
    println!("{done} operations of seed {seed} agree with the model");
}
