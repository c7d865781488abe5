//! What does a policy cost: the operations of the prefix cache one by one, to be counted under
//! callgrind, since times of a shared machine are noise.
//!
//! `valgrind --tool=callgrind --toggle-collect='policy_cost::measured*' --callgrind-out-file=FILE
//! policy_cost POLICY OPERATION [LEAVES]`, then the instructions collected divided by those it
//! prints. The tree has 20,000 leaves of 64 tokens, 32 to a parent of 64, pages of 16; between two
//! operations 10 ms pass. `match` is match and end of a random key of 128 tokens, `insert` match,
//! reserve, extend and end of a new leaf, `evict` room for one leaf.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io::{self, Write};

use rootstock_benches::drive::{Bench, DEVICE};
use rootstock_benches::micro::{LEAF_TOKENS, key, nodes};
use rootstock_benches::python_random::PythonRandom;
use rootstock_radix::PolicyKind;

/// Leaves where none are asked for.
const LEAVES: u32 = 20_000;
const OPERATIONS: u32 = 10_000;
const PAGE_TOKENS: u32 = 16;
const STEP_NS: u64 = 10_000_000;

#[derive(Clone, Copy)]
enum Operation {
    Match,
    Insert,
    Evict,
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage =
        || io::Error::other("usage: policy_cost lru|priority|agent match|insert|evict [LEAVES]");
    let (policy, operation, leaves) = match args.as_slice() {
        [policy, operation] => (policy, operation, LEAVES),
        [policy, operation, leaves] => (policy, operation, leaves.parse().map_err(|_| usage())?),
        _ => return Err(usage()),
    };
    let policy = match policy.as_str() {
        "lru" => PolicyKind::Lru,
        "priority" => PolicyKind::Priority,
        "agent" => PolicyKind::Agent,
        _ => return Err(usage()),
    };
    let operation = match operation.as_str() {
        "match" => Operation::Match,
        "insert" => Operation::Insert,
        "evict" => Operation::Evict,
        _ => return Err(usage()),
    };
    let pages = nodes(leaves + OPERATIONS) * (LEAF_TOKENS / PAGE_TOKENS);
    let mut bench = Bench::new(PAGE_TOKENS, pages, policy).map_err(io::Error::other)?;
    for leaf in 0..leaves {
        bench.now += STEP_NS;
        bench.insert(&key(leaf));
    }
    let mut rng = PythonRandom::new(1);
    for step in 0..OPERATIONS {
        bench.now += STEP_NS;
        let leaf = match operation {
            Operation::Match => rng.randint(0, leaves - 1),
            Operation::Insert | Operation::Evict => leaves + step,
        };
        let tiers = bench.cache.stats().tiers;
        let free = tiers.first().map_or(0, |tier| tier.free);
        let room = free + LEAF_TOKENS / PAGE_TOKENS;
        measured(&mut bench, operation, &key(leaf), room);
    }
    writeln!(io::stdout(), "{OPERATIONS} operations")
}

/// Where callgrind counts.
#[inline(never)]
fn measured(bench: &mut Bench, operation: Operation, key: &[u32], room: u32) {
    match operation {
        Operation::Match => {
            let (lease, found) = bench.begin(key);
            black_box(found);
            bench.end(lease);
        }
        Operation::Insert => {
            black_box(bench.insert(key));
        }
        Operation::Evict => {
            let made = bench.cache.make_room(DEVICE, room, bench.now);
            drop(black_box(made));
        }
    }
}
