"""SGLang's conformance kits on our tree core, as far as they ship and look from outside.

The wheel's `sglang/test/kits/unified_radix_cache` holds 32 classes of fixtures and helpers and no
test: those are in SGLang's repository alone. What is here drives the kits' fixtures for full
attention on the CPU, with our core and with SGLang's Python core, which must say the same. The
kits ask a core to show its inside by an interface of its own: ours answers what is seen of a tree
from outside, and refuses what reaches into it.
"""

import os
import re
import unittest
from unittest import mock

import pytest
import sglang_cores  # noqa: F401  registers our core
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

# SGLang's test helpers make a port of the first device's number.
with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}):
    from sglang.test.kits.unified_radix_cache import core, fixtures, insert_walk, kv_events, mixins
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspection_interface import (
    UnifiedTreeCoreInspectionInterface,
)
from sglang.test.mem_cache_utils import finish_req

from rootstock.sglang.core import RootstockTreeCore

FULL = (ComponentType.FULL,)
SERVED = [one for one in CONFIGS if one.components == FULL and not one.is_eagle]
CORES = ("rootstock", "python")


def _refuse(name):
    def refused(self, *args, **kwargs):
        raise NotImplementedError(f"{name} reaches into the tree")

    return refused


class Inspected(RootstockTreeCore):
    """What is seen of our tree from outside, by the names of the kits."""

    def _nodes(self):
        """(node, parent, tokens, leases) of all, from the outline."""
        above, found = [], []
        for line in self.tree.outline().splitlines():
            depth = (len(line) - len(line.lstrip())) // 2
            node, tokens, leases = re.findall(r"\d+", line)[:3]
            del above[depth:]
            found.append((int(node), above[-1] if above else None, int(tokens), int(leases)))
            above.append(int(node))
        return found

    def contains_node(self, node_id):
        return any(node == node_id for node, *_ in self._nodes())

    def get_parent_node_id(self, node_id):
        return next(parent for node, parent, *_ in self._nodes() if node == node_id)

    def get_child_node_ids(self, node_id):
        return [node for node, parent, *_ in self._nodes() if parent == node_id]

    def get_node_key_length(self, node_id):
        return next(tokens for node, _, tokens, _ in self._nodes() if node == node_id)

    def get_component_device_lock_ref(self, node_id, component_type):
        return next(leases for node, *_, leases in self._nodes() if node == node_id)

    def get_all_node_ids(self):
        return [node for node, *_ in self._nodes()]


INSIDE = UnifiedTreeCoreInspectionInterface.__abstractmethods__
for _name in INSIDE - set(dir(Inspected)):
    setattr(Inspected, _name, _refuse(_name))
UnifiedTreeCoreInspectionInterface.register(Inspected)


class Suite(unittest.TestCase):
    """Something for the kits' helpers to assert with."""

    def runTest(self):
        pass


def build(backend, cfg, **more):
    with (
        mock.patch.object(fixtures, "TREE_CORE_TEST_BACKEND", backend),
        mock.patch.object(fixtures, "get_device", lambda: "cpu"),
        mock.patch("rootstock.sglang.core.RootstockTreeCore", Inspected),
    ):
        return fixtures.build_fixture(cfg, **more)


def kit(cls, cfg):
    return type(f"Kit{cls.__name__}", (cls, Suite), {"cfg": cfg})()


def each(scenario, cfg, *args):
    """What both cores say; the first must be ours."""
    said = [scenario(backend, cfg, *args) for backend in CORES]
    assert said[0] == said[1]
    return said[0]


def chain(backend, cfg):
    suite = kit(mixins.UnifiedRadixCacheFixtures, cfg)
    cache, allocator, pool = build(backend, cfg)
    assert backend != "rootstock" or isinstance(cache.tree_core, Inspected)
    free = allocator.available_size()
    nodes = suite._build_chain_pages(cache, allocator, pool, 4)
    lengths = [fixtures.node_key_length(cache, node) for node in nodes]
    assert suite._path_chain(cache, nodes[-1]) == nodes
    evicted = []
    while cache.evictable_size():
        evicted.append(cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted)
        cache.sanity_check()
    assert allocator.available_size() == free
    return lengths, evicted


def requests(backend, cfg):
    """Two that computed the same at the same time, and one that goes on from them."""
    suite = kit(core.UnifiedRadixCacheCoreFixtures, cfg)
    cache, allocator, pool = build(backend, cfg)
    said = []
    for tail in ([], [], [900, 901]):
        tokens = suite._make_seq(1, 3) + tail
        req, _ = suite._make_inflight_req(cache, allocator, pool, tokens, [500], allocated=True)
        finish_req(cache, req, len(tokens) + 1)
        said.append((allocator.available_size(), cache.evictable_size(), cache.protected_size()))
        cache.sanity_check()
    return said


def events(backend, cfg):
    suite = kit(kv_events.UnifiedRadixCacheKVEventsFixtures, cfg)
    cache, allocator, _ = build(backend, cfg, enable_kv_cache_events=True)
    cache.take_events()
    page = cfg.page_size
    said = []
    for names in ({}, {"extra_key": "x"}, {"cache_salt": "s"}, {"session_id": "a"}):
        tokens = [len(names) + len(said) * 1000 + at for at in range(2 * page)]
        suite._insert(cache, allocator, tokens, **names)
        stored = suite._stored_events(cache)
        said.append((suite._event_hashes(stored), [one.token_ids for one in stored]))
    cache.evict(EvictParams(num_tokens=page))
    said.append(suite._event_hashes(suite._removed_events(cache)))
    assert all(said)
    return said


def receipts(backend, cfg):
    suite = kit(insert_walk.SegmentLockProtocolFixtures, cfg)
    cache, allocator, pool = build(backend, cfg)
    for start in (1, 1000):
        suite._insert(cache, allocator, pool, suite._make_seq(start, 2))
    one, other = (suite._match_leaf(cache, suite._make_seq(at, 2)) for at in (1, 1000))
    receipt = cache.inc_lock_ref(one).to_dec_params()
    suite._assert_protocol_violation(
        lambda: cache.dec_lock_ref(other, receipt), "lock receipt anchored on node"
    )
    held = [fixtures.node_device_lock_ref(cache, one, FULL[0]) for one in (one, other)]
    cache.dec_lock_ref(one, receipt)
    cache.sanity_check()
    return held, cache.protected_size(), suite._deepest(cache) in (one, other)


def session(backend, cfg):
    suite = kit(insert_walk.StreamingSessionLockLifecycleFixtures, cfg)
    cache, allocator, pool = build(backend, cfg)
    slot, req = suite._later_turn(cache, allocator, pool)
    return req.kv.kv_committed_len, len(req.origin_input_ids), cache.protected_size()


@pytest.mark.parametrize("cfg", SERVED, ids=lambda cfg: cfg.label)
@pytest.mark.parametrize("scenario", [chain, requests, events, receipts])
def test_fixtures_of_the_kits_see_the_same(scenario, cfg):
    each(scenario, cfg)


def test_a_streaming_session_goes_on():
    each(session, next(one for one in SERVED if one.page_size == 1))


def test_a_disabled_cache_is_built_and_checks_no_policy():
    params = core.DisabledUnifiedRadixCacheFixtures()._params(True)
    params.tree_core_backend = "rootstock"
    cache = UnifiedRadixCache(params=params)
    assert cache.evictable_size() == 0


def test_a_core_that_loses_slots_would_be_noticed():
    cfg = SERVED[0]
    with (
        mock.patch.object(Inspected, "evictable_size", lambda self: 1),
        pytest.raises(AssertionError),
    ):
        each(requests, cfg)
