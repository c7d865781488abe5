//! The tree for hosts that own their slots: each promise as a short sequence, and random operations
//! with a recount after each. Equality with SGLang's own cores is tested beside them, in
//! `plugin/python/engines`.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of a test: what they unwrap is the test, and what they cast is below ten"
)]

#[path = "shared/random.rs"]
mod random;

use random::Random;
use rootstock_radix::ProgramId;
use rootstock_radix::slots::{
    Digest, Freed, Handle, HostTier, Insertion, LeafEnd, SlotAction, SlotConfig, SlotError,
    SlotPolicy, SlotTree, SpaceName,
};
use std::collections::BTreeSet;

fn name(before: Option<&Digest>, tokens: &[u32]) -> Digest {
    let mut digest = before.copied().unwrap_or_default();
    for (at, byte) in tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .enumerate()
    {
        digest[at % 32] = digest[at % 32].wrapping_mul(31).wrapping_add(byte);
    }
    digest
}

fn tree(policy: SlotPolicy) -> SlotTree {
    SlotTree::new(SlotConfig {
        page_tokens: 1,
        policy,
        events: false,
        hasher: name,
        pin_budget: 0.5,
        device_tokens: 8,
    })
}

/// Slots for a key that no other key of the test has.
fn insert(tree: &mut SlotTree, tokens: &[u32], first_slot: i64) -> Handle {
    insert_as(tree, tokens, first_slot, None)
}

fn insert_as(
    tree: &mut SlotTree,
    tokens: &[u32],
    first_slot: i64,
    program: Option<ProgramId>,
) -> Handle {
    let step = tree.begin_insert(Insertion {
        tokens: tokens.to_vec(),
        slots: (first_slot..).take(tokens.len()).collect(),
        program,
        ..Insertion::default()
    });
    step.unwrap().result.unwrap().last
}

fn evict(tree: &mut SlotTree, tokens: usize) -> Vec<i64> {
    tree.begin_walk(tokens);
    let mut slots = Vec::new();
    while let Some(leaf) = tree.next_leaf(slots.len()).unwrap() {
        if let LeafEnd::Gone(Freed { device, .. }) = tree.take_leaf(leaf).unwrap() {
            slots.extend(device.into_iter().flatten());
        }
    }
    tree.end_walk();
    tree.check().unwrap();
    slots
}

fn find(tree: &mut SlotTree, tokens: &[u32]) -> (usize, Handle) {
    let found = tree.find_prefix(&SpaceName::default(), tokens);
    (found.device_tokens, found.device)
}

#[test]
fn a_lease_holds_what_was_matched_and_nothing_more() {
    let mut tree = tree(SlotPolicy::Lru);
    insert(&mut tree, &[1, 2, 3, 4, 5, 6], 10);
    let (tokens, node) = find(&mut tree, &[1, 2, 3, 9]);
    assert_eq!(tokens, 3);
    assert_eq!(tree.lease(node), Ok(3));
    assert_eq!((tree.evictable(), tree.protected()), (3, 3));
    assert_eq!(evict(&mut tree, 100), [13, 14, 15]);
    tree.release(node).unwrap();
    assert_eq!((tree.evictable(), tree.protected()), (3, 0));
    let state = tree.release(node);
    assert!(
        matches!(state, Err(SlotError::State { .. })),
        "a clamp hides a fault"
    );
}

#[test]
fn a_lease_survives_splits_of_its_node_at_every_place() {
    for cut in 1..4 {
        let mut tree = tree(SlotPolicy::Lru);
        let node = insert(&mut tree, &[1, 2, 3, 4], 10);
        tree.lease(node).unwrap();
        let mut other = vec![1, 2, 3, 4];
        other.truncate(cut);
        other.push(9);
        insert(&mut tree, &other, 20);
        assert_eq!(tree.protected(), 4);
        tree.release(node).unwrap();
        tree.check().unwrap();
        assert_eq!(tree.protected(), 0);
        assert_eq!(evict(&mut tree, 100).len(), 5);
    }
}

#[test]
fn what_was_computed_twice_is_freed_but_not_what_the_tree_has() {
    let mut tree = tree(SlotPolicy::Lru);
    insert(&mut tree, &[1, 2, 3], 10);
    let insertion = |owned| Insertion {
        tokens: vec![1, 2, 3, 4],
        slots: vec![10, 21, 22, 23],
        owned,
        ..Insertion::default()
    };
    let step = tree.begin_insert(insertion(1)).unwrap();
    assert_eq!(step.actions, [SlotAction::Free(vec![21, 22])]);
    assert_eq!(step.result.unwrap().taken, [(3, 4)]);
}

#[test]
fn handles_are_not_given_twice() {
    let mut tree = tree(SlotPolicy::Lru);
    let node = insert(&mut tree, &[1, 2], 10);
    tree.reset();
    assert_eq!(tree.lease(node), Err(SlotError::Missing(node.0)));
    let again = insert(&mut tree, &[1, 2], 10);
    assert_ne!(node, again);
}

#[test]
fn a_copy_stops_the_insertion_until_the_host_has_acted() {
    let mut tree = tree(SlotPolicy::Lru);
    tree.host = HostTier {
        enabled: true,
        write_back: false,
        write_through_hits: 2,
        storage: false,
        tokens: 0,
    };
    let above = insert(&mut tree, &[1, 2], 10);
    let what = Insertion {
        tokens: vec![1, 2, 3],
        slots: vec![10, 11, 12],
        owned: 2,
        ..Insertion::default()
    };
    let step = tree.begin_insert(what.clone()).unwrap();
    assert_eq!(step.actions, [SlotAction::BackUp(vec![above])]);
    assert_eq!(step.result, None);
    assert_eq!(
        tree.begin_insert(what),
        Err(SlotError::Insertion("under way"))
    );
    tree.commit_backup(above, vec![100, 101]).unwrap();
    let last = tree.resume_insert().unwrap().result.unwrap().last;
    assert_eq!(
        evict(&mut tree, 100),
        [12, 10, 11],
        "one dropped, one demoted"
    );
    assert_eq!(tree.places(last), Err(SlotError::Missing(last.0)));
    let found = tree.find_prefix(&SpaceName::default(), &[1, 2, 3]);
    assert_eq!(
        (found.device_tokens, found.host_tokens, found.best),
        (0, 2, above)
    );
    let plan = tree.load_plan(above).unwrap();
    assert_eq!(plan.slots, [100, 101]);
    tree.commit_load(above, &plan.nodes, &[30, 31]).unwrap();
    assert_eq!(tree.device_slots(above, tree.root()), Ok(vec![30, 31]));
}

#[test]
fn a_pin_outlasts_a_flood_within_its_budget_and_ends_in_time() {
    let mut tree = tree(SlotPolicy::Lru);
    let node = insert(&mut tree, &[1, 2, 3], 10);
    assert_eq!(tree.pin(node, None, 1000), Ok(3));
    let other = insert(&mut tree, &[5, 6], 20);
    assert_eq!(
        tree.pin(other, None, 2000),
        Ok(0),
        "half of eight tokens is all"
    );
    assert_eq!(evict(&mut tree, 100), [20, 21]);
    assert_eq!(tree.expire_pins(999), 0);
    assert_eq!(tree.expire_pins(1000), 1);
    assert_eq!((tree.pinned(), tree.protected()), (0, 0));
    assert_eq!(evict(&mut tree, 100), [10, 11, 12]);
}

#[test]
fn what_a_program_alone_used_goes_first_once_it_is_over() {
    let mut tree = tree(SlotPolicy::Lru);
    let (one, two) = (Some(ProgramId(1)), Some(ProgramId(2)));
    insert_as(&mut tree, &[1, 2], 10, two);
    insert_as(&mut tree, &[1, 2, 3], 10, one);
    insert_as(&mut tree, &[7], 20, two);
    let node = insert_as(&mut tree, &[1, 2, 3, 4], 10, one);
    tree.pin(node, one, 1000).unwrap();
    assert_eq!(tree.release_program(ProgramId(1)), 2);
    assert_eq!(tree.pinned(), 0);
    assert_eq!(evict(&mut tree, 2), [13, 12]);
    assert_eq!(evict(&mut tree, 1), [20], "the older one of the others");
}

#[test]
fn random_operations_lose_and_double_no_slot() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let policies = [
            SlotPolicy::Lru,
            SlotPolicy::Lfu,
            SlotPolicy::Slru { hits: 2.0 },
            SlotPolicy::Priority,
            SlotPolicy::Tlru {
                threshold: 3.0,
                estimate: 1.0,
            },
        ];
        let mut tree = tree(policies[random.below(5) as usize]);
        let mut free = BTreeSet::from_iter(0..24);
        let mut leases = Vec::new();
        for _ in 0..400 {
            let key: Vec<_> = (0..=random.below(6))
                .map(|_| random.below(2) as u32)
                .collect();
            match random.below(4) {
                0 => {
                    let tokens = 1 + random.below(8) as usize;
                    free.extend(evict(&mut tree, tokens));
                }
                1 if leases.len() < 3 => {
                    let (_, node) = find(&mut tree, &key);
                    tree.lease(node).unwrap();
                    leases.push(node);
                }
                2 => leases
                    .pop()
                    .into_iter()
                    .for_each(|node| tree.release(node).unwrap()),
                _ => insert_random(&mut tree, &key, &mut free),
            }
            tree.check().unwrap();
            assert_eq!(
                tree.device_tokens() as usize + free.len(),
                24,
                "seed {seed}"
            );
        }
    }
}

fn insert_random(tree: &mut SlotTree, key: &[u32], free: &mut BTreeSet<i64>) {
    let (owned, node) = find(tree, key);
    let mut slots = tree.device_slots(node, tree.root()).unwrap();
    while slots.len() < key.len() {
        let Some(slot) = free.pop_first() else {
            free.extend(slots.split_off(owned));
            return;
        };
        slots.push(slot);
    }
    let step = tree.begin_insert(Insertion {
        tokens: key.to_vec(),
        slots,
        owned,
        ..Insertion::default()
    });
    for action in step.unwrap().actions {
        if let SlotAction::Free(slots) = action {
            free.extend(slots);
        }
    }
}
