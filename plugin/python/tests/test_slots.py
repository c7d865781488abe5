"""The tree for engines that own their slots: what such an engine does with it."""

from array import array

import pytest

from rootstock import SlotTree

COMMON = (None, None)


def insert(tree, tokens, slots, *, space=COMMON, owned=0, program=None):
    key, slots = array("q", tokens), array("q", slots)
    _, done = tree.begin_insert((space, key, slots, owned, 0, 0, None, program, None))
    return done


def longs(raw):
    return memoryview(raw).cast("q").tolist()


def evict(tree, tokens):
    freed = []
    tree.begin_walk(tokens)
    while (node := tree.next_leaf(len(freed))) is not None:
        (device, _, _, _), copies = tree.take_leaf(node)
        assert not copies
        freed += [slot for slots in device for slot in longs(slots)]
    tree.end_walk()
    tree.check()
    return freed


def test_a_prefix_is_found_with_its_slots_and_what_is_twice_is_given_back():
    tree = SlotTree(2, "lru")
    assert insert(tree, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])[0] == 0
    tokens, node, *_ = tree.find(array("q", [1, 2, 3, 9]), None, None)
    assert tokens == 2, "whole pages alone"
    assert longs(tree.device_slots(node, tree.root())) == [10, 11]
    actions, done = tree.begin_insert(
        (COMMON, array("q", [1, 2, 3, 4]), array("q", [20, 21, 22, 23]), 2, 0, 0, None, None, None)
    )
    assert [(kind, longs(slots)) for kind, slots in actions] == [("free", [22, 23])]
    assert done[0] == 4


def test_namespaces_share_nothing():
    tree = SlotTree(1, "lru")
    insert(tree, [1, 2], [10, 11], space=("adapter", None))
    insert(tree, [1, 2], [20, 21], space=(None, "salt"))
    for space in [COMMON, ("adapter", "salt")]:
        assert tree.find(array("q", [1, 2]), *space)[0] == 0
    _, node, *_ = tree.find(array("q", [1, 2]), None, "salt")
    assert longs(tree.device_slots(node, tree.root())) == [20, 21]


def test_leases_and_pins_hold_and_an_ended_program_goes_first():
    tree = SlotTree(1, "lru", pin_budget=0.5, device_tokens=10)
    insert(tree, [1, 2], [10, 11], program=7)
    insert(tree, [3, 4], [20, 21])
    _, node, *_ = tree.find(array("q", [3, 4]), None, None)
    tree.lease(node)
    assert evict(tree, 2) == [10, 11]
    tree.release(node)
    _, ours, _ = insert(tree, [1, 2], [30, 31], program=7)
    assert tree.pin(ours, 600.0, 7) == 2
    assert (tree.pinned, tree.protected) == (2, 2)
    assert tree.release_program(7) == 2
    assert evict(tree, 2) == [30, 31], "younger, and yet first"


def test_mistakes_are_exceptions():
    tree = SlotTree(1, "lru")
    node = insert(tree, [1], [10])[1]
    with pytest.raises(AssertionError, match="more often"):
        tree.release(node)
    evict(tree, 1)
    with pytest.raises(KeyError):
        tree.lease(node)
    with pytest.raises(ValueError, match="64-bit"):
        tree.find([1, 2], None, None)
    with pytest.raises(ValueError, match="policy"):
        SlotTree(1, "slru")
