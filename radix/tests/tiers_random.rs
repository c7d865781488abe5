//! Random worlds over all tiers, as many operations as asked for.
//!
//! `RADIX_OPS=10000000 RADIX_SEED=1 cargo test --release -p rootstock-radix --test tiers_random`.
//! A failure prints the seed of its world; that seed alone repeats it.

#[path = "shared/random.rs"]
mod random;
#[path = "shared/store.rs"]
mod store;
#[path = "shared/tiers.rs"]
mod tiers;

use random::{Random, number};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tiers::World;

/// Operations in the life of one world.
const WORLD_OPS: u64 = 400;

#[test]
fn no_request_ever_meets_wrong_bytes_and_nothing_is_lost() {
    let (ops, seed) = (number("RADIX_OPS", 20_000), number("RADIX_SEED", 1));
    let mut worlds = Random(seed);
    let (mut done, mut promoted, mut fetched, mut seen) = (0, 0, 0, 0);
    while done < ops {
        let world = worlds.next();
        let n = WORLD_OPS.min(ops - done);
        let live = || {
            let mut world = World::new(world);
            (0..n).for_each(|_| world.step());
            world.finish()
        };
        let result = catch_unwind(AssertUnwindSafe(live));
        assert!(
            result.is_ok(),
            "world {world:#x} of seed {seed} failed after {done} operations"
        );
        let (by_copy, by_read, by_look) = result.unwrap_or_default();
        promoted += by_copy;
        fetched += by_read;
        seen += by_look;
        done += n;
    }
    assert!(
        promoted > done / 1_000,
        "{promoted} promotions are too few to show anything"
    );
    assert!(
        fetched > done / 2_000,
        "{fetched} pages from storage are too few"
    );
    println!(
        "{done} operations of seed {seed}, {promoted} promotions, {fetched} pages from storage, \
         {seen} seen there: all bytes right"
    );
}
