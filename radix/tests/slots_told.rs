//! What a host is told of a tree over its slots, and what its calls do to each tier: each promise
//! as a short sequence.
#![expect(clippy::unwrap_used, reason = "tests stop at the first surprise")]

use rootstock_radix::ProgramId;
use rootstock_radix::slots::{
    Digest, Freed, Handle, HostInserted, HostTier, Insertion, LeafEnd, SlotConfig, SlotError,
    SlotEvent, SlotPolicy, SlotTree, SpaceName,
};

/// The sum of all tokens so far, where a hash of eight bytes finds it.
fn name(before: Option<&Digest>, tokens: &[u32]) -> Digest {
    let before = before.map_or(0, |digest| digest[7]);
    let mut digest = [0; 32];
    digest[7] = tokens.iter().fold(before, |sum, &token| {
        sum.wrapping_add(u8::try_from(token).unwrap())
    });
    digest
}

fn named(sum: u8) -> Digest {
    let mut digest = [0; 32];
    digest[7] = sum;
    digest
}

fn config() -> SlotConfig {
    SlotConfig {
        page_tokens: 1,
        policy: SlotPolicy::Lru,
        events: false,
        hasher: name,
        pin_budget: 0.5,
        device_tokens: 16,
    }
}

fn with_host(write_back: bool) -> SlotTree {
    let mut tree = SlotTree::new(config());
    tree.host = HostTier {
        enabled: true,
        write_back,
        write_through_hits: 1000,
        storage: false,
        tokens: 0,
    };
    tree.set_host_tokens(16);
    tree
}

fn insert(tree: &mut SlotTree, what: Insertion) -> Handle {
    tree.begin_insert(what).unwrap().result.unwrap().last
}

fn plain(tokens: &[u32], first_slot: i64) -> Insertion {
    Insertion {
        tokens: tokens.to_vec(),
        slots: (first_slot..).take(tokens.len()).collect(),
        owned: tokens.len(),
        ..Insertion::default()
    }
}

fn other_space() -> SpaceName {
    SpaceName {
        extra: Some("adapter".to_owned()),
        salt: None,
    }
}

/// Evicts from the device; the slots, in their order.
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

/// A node gets its copy in these slots.
fn copy(tree: &mut SlotTree, node: Handle, slots: &[i64]) {
    tree.commit_backup(node, slots.to_vec()).unwrap();
    tree.begin_write(&[node], node.0).unwrap();
    tree.finish_write(&[node], node.0).unwrap();
    tree.check().unwrap();
}

/// Pages from a store below a node.
fn arrive(tree: &mut SlotTree, below: Handle, tokens: &[u32], first_slot: i64) -> HostInserted {
    let place = tree.place_in(below, &SpaceName::default(), [None, None]);
    let slots: Vec<_> = (first_slot..).take(tokens.len()).collect();
    let names: Vec<_> = tokens.iter().map(|&token| name(None, &[token])).collect();
    let arrived = tree.insert_host(place.unwrap(), tokens, &slots, &names);
    tree.check().unwrap();
    arrived.unwrap()
}

#[test]
fn a_peek_ends_where_the_key_leaves_an_edge_and_counts_the_nodes_that_it_needs() {
    let mut tree = SlotTree::new(config());
    let above = insert(&mut tree, plain(&[1, 2, 3], 10));
    let below = insert(&mut tree, plain(&[1, 2, 3, 4, 5], 10));
    let space = SpaceName::default();
    let peek = |tokens: &[u32]| tree.peek_device(&space, tokens);
    assert_eq!(peek(&[1, 2, 3, 4, 5, 6]), (5, below, 5));
    assert_eq!(peek(&[1, 2, 3, 4, 9]), (4, below, 5));
    assert_eq!(peek(&[1, 2, 3]), (3, above, 3));
    // 4 and 5 follow the whole edge, not its first token.
    assert_eq!(peek(&[1, 4, 5]), (1, above, 3));
    assert_eq!(peek(&[7]), (0, tree.root(), 0));
    assert_eq!(tree.peek_device(&other_space(), &[1]), (0, tree.root(), 0));
    assert_eq!(
        tree.own_slots(below),
        Ok(Some(&[13, 14][..])),
        "nothing was cut"
    );
}

#[test]
fn a_lookup_names_the_last_node_it_came_to() {
    let mut tree = SlotTree::new(config());
    let node = insert(&mut tree, plain(&[1, 2, 3], 10));
    let space = SpaceName::default();
    assert_eq!(tree.find_prefix(&space, &[1, 2, 3, 4]).visited, Some(node));
    assert_eq!(tree.find_prefix(&space, &[9]).visited, None);
    assert_eq!(tree.find_prefix(&other_space(), &[1, 2]).visited, None);
}

#[test]
fn slots_of_a_path_end_at_the_node_above_or_at_the_root_of_any_namespace() {
    for space in [SpaceName::default(), other_space()] {
        let mut tree = SlotTree::new(config());
        let of = |tokens: &[u32], first_slot| Insertion {
            space: space.clone(),
            ..plain(tokens, first_slot)
        };
        let above = insert(&mut tree, of(&[1, 2], 10));
        let below = insert(&mut tree, of(&[1, 2, 3], 10));
        let beside = insert(&mut tree, of(&[7, 8], 20));
        let root = tree.root();
        assert_eq!(tree.device_slots(below, root), Ok(vec![10, 11, 12]));
        assert_eq!(tree.device_slots(below, above), Ok(vec![12]));
        assert_eq!(tree.device_slots(root, root), Ok(Vec::new()));
        for (from, until) in [(below, beside), (above, below), (root, above)] {
            let slots = tree.device_slots(from, until);
            assert!(matches!(slots, Err(SlotError::State { .. })), "{slots:?}");
        }
    }
}

#[test]
fn a_node_that_left_the_device_has_no_slots_there_and_one_that_is_gone_has_no_answer() {
    let mut tree = with_host(false);
    let kept = insert(&mut tree, plain(&[1, 2], 10));
    let gone = insert(&mut tree, plain(&[7, 8], 20));
    copy(&mut tree, kept, &[100, 101]);
    assert_eq!(tree.own_slots(kept), Ok(Some(&[10, 11][..])));
    assert_eq!(evict(&mut tree, 4), [10, 11, 20, 21]);
    assert_eq!(tree.own_slots(kept), Ok(None));
    assert_eq!(tree.own_copy(kept), Ok(Some((&[100, 101][..], vec![1, 2]))));
    assert_eq!(tree.own_slots(gone), Err(SlotError::Missing(gone.0)));
    let space = SpaceName::default();
    assert_eq!(
        tree.peek_device(&space, &[1, 2]).0,
        0,
        "it is on host alone"
    );
}

/// A prompt of 6 tokens that grows by 2 and may compute 4 needs the first 4 of them.
#[test]
fn tlru_drops_first_what_no_next_prompt_needs_though_it_was_used_last() {
    let mut tree = SlotTree::new(SlotConfig {
        page_tokens: 2,
        policy: SlotPolicy::Tlru {
            threshold: 4.0,
            estimate: 2.0,
        },
        ..config()
    });
    insert(&mut tree, plain(&[7, 8, 9, 10], 20));
    insert(&mut tree, plain(&[1, 2, 3, 4], 10));
    insert(&mut tree, plain(&[1, 2, 3, 4, 5, 6], 10));
    assert_eq!(evict(&mut tree, 1), [14, 15], "the end of the longer one");
    assert_eq!(evict(&mut tree, 1), [20, 21, 22, 23], "then the oldest");
}

#[test]
fn events_and_stores_have_the_names_of_pages_chained_over_what_is_before_them() {
    let mut tree = SlotTree::new(SlotConfig {
        events: true,
        ..config()
    });
    insert(&mut tree, plain(&[1, 2], 10));
    insert(&mut tree, plain(&[1, 2, 4], 10));
    assert_eq!(evict(&mut tree, 1), [12]);
    let stored = |tokens: &[u32], hashes: &[i64], parent| SlotEvent::Stored {
        space: SpaceName::default(),
        hashes: hashes.to_vec(),
        parent,
        tokens: tokens.to_vec(),
        device: true,
        session: None,
    };
    let removed = SlotEvent::Removed {
        space: SpaceName::default(),
        hashes: vec![7],
        device: true,
    };
    let told = [
        stored(&[1, 2], &[1, 3], None),
        stored(&[4], &[7], Some(3)),
        removed,
    ];
    assert_eq!(tree.take_events(), told);
}

#[test]
fn names_are_given_once_to_all_nodes_that_have_none() {
    let mut tree = SlotTree::new(config());
    insert(&mut tree, plain(&[1, 2], 10));
    let below = insert(&mut tree, plain(&[1, 2, 4], 10));
    insert(&mut tree, plain(&[9], 20));
    assert_eq!(tree.names(below), Ok(None));
    assert_eq!(tree.name_all(), 3);
    assert_eq!(tree.names(below), Ok(Some(&[named(7)][..])));
    assert_eq!(tree.names_before(below), Ok(vec![named(1), named(3)]));
    assert_eq!(tree.name_all(), 0);
}

#[test]
fn a_copy_that_the_device_has_too_goes_unless_a_pin_or_a_hold_needs_it() {
    let mut tree = with_host(true);
    let tokens = [[1, 2], [3, 4], [5, 6]];
    let nodes = tokens.map(|tokens| {
        let first_slot = i64::from(tokens[0]) * 10;
        let node = insert(&mut tree, plain(&tokens, first_slot));
        copy(&mut tree, node, &[first_slot + 100, first_slot + 101]);
        node
    });
    let [pinned, held, _] = nodes;
    assert_eq!(tree.pin(pinned, None, 1000), Ok(2));
    let receipt = tree.lease_host(held).unwrap().unwrap();
    let none: [Vec<i64>; 0] = [];
    assert_eq!(tree.evict_host(100, true).host, none, "copies are kept");
    assert_eq!(tree.evict_host(100, false).host, [[150, 151]]);
    assert_eq!(tree.evict_host(100, false).host, none);
    assert_eq!(tree.expire_pins(1000), 1);
    tree.release_host(held, receipt).unwrap();
    assert_eq!(tree.evict_host(1, false).host, [[110, 111]]);
    assert_eq!(tree.evict_host(100, false).host, [[130, 131]]);
    tree.check().unwrap();
    assert_eq!(tree.device_tokens(), 6, "the device has lost nothing");
}

#[test]
fn pages_of_a_store_hang_below_copies_and_come_once() {
    let mut tree = with_host(false);
    let root = tree.root();
    let first = arrive(&mut tree, root, &[1, 2], 100);
    assert_eq!((first.found, first.dropped), (0, false));
    let node = first.last.unwrap();
    let again = arrive(&mut tree, root, &[1, 2], 110);
    assert_eq!((again.found, again.last), (2, Some(node)));
    let longer = arrive(&mut tree, root, &[1, 2, 3], 120);
    assert_eq!((longer.found, longer.dropped), (2, false));
    assert_eq!(tree.own_copy(node), Ok(Some((&[100, 101][..], vec![1, 2]))));
    assert_eq!(
        tree.own_copy(longer.last.unwrap()),
        Ok(Some((&[122][..], vec![3])))
    );
    // What is above them has no copy.
    let above = insert(&mut tree, plain(&[7, 8], 10));
    let dropped = arrive(&mut tree, above, &[9], 130);
    assert_eq!((dropped.last, dropped.dropped), (None, true));
    assert!(tree.copies_are_prefixes());
    // On their way from the root they bring it one.
    let whole = arrive(&mut tree, root, &[7, 8, 9], 140);
    assert_eq!((whole.found, whole.dropped), (0, false));
    assert_eq!(tree.places(above), Ok((true, true)));
    assert_eq!(tree.places(whole.last.unwrap()), Ok((false, true)));
}

#[test]
fn pages_of_a_store_need_a_slot_for_each_token_and_a_name_for_each_page() {
    let mut tree = with_host(false);
    let root = tree.root();
    let place = tree.place_in(root, &SpaceName::default(), [None, None]);
    let place = place.unwrap();
    for (slots, names) in [(1, 2), (2, 1), (3, 3)] {
        let slots = vec![100; slots];
        let inserted = tree.insert_host(place, &[1, 2], &slots, &vec![named(1); names]);
        assert!(matches!(inserted, Err(SlotError::Length { tokens: 2, .. })));
    }
    tree.check().unwrap();
}

#[test]
fn a_prefix_of_a_program_that_loses_its_end_is_found_where_it_ends_now() {
    let mut tree = SlotTree::new(config());
    let of_program = |tokens: &[u32], first_slot| Insertion {
        program: Some(ProgramId(1)),
        ..plain(tokens, first_slot)
    };
    let above = insert(&mut tree, of_program(&[1, 2], 10));
    let below = insert(&mut tree, of_program(&[1, 2, 3], 10));
    let beside = insert(&mut tree, of_program(&[7, 8], 20));
    assert_eq!(tree.ends_of(ProgramId(1)), [below, beside]);
    assert_eq!(evict(&mut tree, 1), [12]);
    assert_eq!(tree.ends_of(ProgramId(1)), [above, beside]);
    assert_eq!(evict(&mut tree, 1), [10, 11]);
    assert_eq!(tree.ends_of(ProgramId(1)), [beside]);
}
