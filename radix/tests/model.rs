//! The cache against the plain model: random operations, and all short sequences of them.

#[path = "shared/model.rs"]
mod model;

use model::{Op, Setup, World};
use proptest::prelude::*;
use rootstock_radix::PolicyKind;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500, failure_persistence: None, ..Default::default()
    })]

    #[test]
    fn the_cache_agrees_with_the_plain_model(
        (page, pages, kind) in any::<(u8, u8, u8)>(),
        ops in prop::collection::vec(any::<[u8; 4]>(), 0..80),
    ) {
        let setup = Setup::decode(page, pages, kind);
        let ops: Vec<Op> = ops.into_iter().map(Op::decode).collect();
        let mut world = World::new(&setup);
        println!("{setup:?} {ops:?}");
        ops.into_iter().for_each(|op| world.apply(op));
        world.finish();
    }
}

/// Operations over two tokens and three pages that meet in every way: whole and partial matches,
/// splits, growth, duplicates, evictions, early ends.
const ALPHABET: [Op; 10] = [
    Op::Start {
        ns: 0,
        replica: 0,
        bits: 0b00,
        len: 1,
    },
    Op::Start {
        ns: 0,
        replica: 0,
        bits: 0b10,
        len: 2,
    },
    Op::Start {
        ns: 0,
        replica: 0,
        bits: 0b01,
        len: 3,
    },
    Op::Compute {
        slot: 0,
        pages: 1,
        keep: false,
        busy: 0,
        priority: 0,
    },
    Op::Compute {
        slot: 1,
        pages: 2,
        keep: false,
        busy: 0,
        priority: 1,
    },
    Op::Compute {
        slot: 0,
        pages: 2,
        keep: true,
        busy: 0,
        priority: 0,
    },
    Op::Grow { slot: 1 },
    Op::End { slot: 0, fate: 0 },
    Op::End { slot: 1, fate: 2 },
    Op::MakeRoom {
        replica: 0,
        pages: 2,
    },
];

#[test]
fn all_short_sequences_over_two_tokens_and_three_pages_agree_with_the_plain_model() {
    // Every sequence is a prefix of one of full length.
    const LENGTH: u32 = 5;
    for policy in [PolicyKind::Lru, PolicyKind::Priority] {
        let setup = Setup {
            page_tokens: 1,
            device_pages: vec![3],
            policy,
            max_nodes: 1 << 20,
        };
        for number in 0..ALPHABET.len().pow(LENGTH) {
            let mut world = World::new(&setup);
            let mut rest = number;
            for _ in 0..LENGTH {
                world.apply(ALPHABET[rest % ALPHABET.len()]);
                rest /= ALPHABET.len();
            }
            world.finish();
        }
    }
}
