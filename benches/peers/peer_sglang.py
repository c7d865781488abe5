"""SGLang's tree cores beside the other peers: peer_sglang.py micro PAGE LEAVES.. | requests FILE..

Its Rust core, which is its default, and its Python core, from the released package, called as its
controller calls them. The files are workloads as the binary `workloads` of our benches writes them.
Prints figures as lines of JSON, in processor time of the thread.
"""

import json
import os
import statistics
import sys
import time
from array import array
from random import Random

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy
import torch

torch.set_num_threads(1)

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

FULL = ComponentType.FULL
NAMES = {"rust": "sglang-rust", "python": "sglang-python"}
LEAF, LEAVES_A_PARENT = 64, 32
ROUNDS, BATCH = 9, 64
MAGIC = 0x57504B31
# Its Python core makes a heap of all leaves on each eviction: above this it takes minutes.
PYTHON_LEAVES_MAX = 10_000
CAPACITY = {"w1": 1 << 20, "w2": 4 << 20, "w3": 2 << 20}


def make_core(backend, page):
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
    pool = MHATokenToKVPool(
        size=64, page_size=page, dtype=torch.float16, head_num=1, head_dim=1, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    slots = TokenToKVPoolAllocator(
        size=64, dtype=torch.float16, device="cpu", kvcache=pool, need_sort=False
    )
    rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=slots, page_size=page,
            eviction_policy="lru", tree_components=(FULL,), enable_kv_cache_events=False,
            tree_core_backend=backend,
        )
    )  # fmt: skip
    return cache.tree_core


class Peer:
    """A tree core, and the slots that its host would own."""

    def __init__(self, backend, page, capacity):
        self.core, self.page = make_core(backend, page), page
        self.root = self.core.root_node_handle()
        self.name, self.free, self.fresh = NAMES[backend], capacity, 0

    def begin(self, tokens):
        found = self.core.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        node, length = found.last_device_node, found.device_prefix_len
        lock = self.core.inc_lock_ref(node).to_dec_params()
        if length:
            self.core.collect_full_device_indices(node, self.root)
        return node, length, lock

    def take(self, tokens):
        if self.free < tokens:
            self.free += self.evict(tokens - self.free)
        if self.free < tokens:
            return False
        self.free -= tokens
        return True

    def insert(self, tokens, owned):
        # The slots' numbers do not matter to a core.
        slots = torch.arange(self.fresh, self.fresh + len(tokens), dtype=torch.int64)
        params = InsertParams(key=RadixKey(tokens), value=slots, prev_prefix_len=owned)
        step = self.core.begin_insert(params)
        self.core.end_insert()
        return step.result

    def end(self, node, lock):
        self.core.dec_lock_ref(node, lock)

    def evict(self, tokens):
        freed = 0
        self.core.evict_device_start(FULL, tokens)
        while True:
            step = self.core.evict_device_next_node(FULL, {FULL: freed})
            if step.node_id is None:
                break
            gone = self.core.evict_device_leaf(step.node_id, False)
            freed += gone.tracker[FULL]
            gone.device_frees.clear()
        self.core.evict_device_end(FULL)
        return freed


def show(peer, op, page, leaves, unit, values, **more):
    figure = {
        "peer": peer, "kind": "exact", "op": op, "page_tokens": page, "leaves": leaves, "unit": unit,
        "median": statistics.median(values), "low": min(values), "high": max(values), **more,
    }  # fmt: skip
    print(json.dumps(figure), flush=True)


def stream(number, start, count):
    with numpy.errstate(over="ignore"):
        first = numpy.uint64(number * 0x9E3779B97F4A7C15 % (1 << 64))
        x = first + numpy.arange(start, start + count, dtype=numpy.uint64)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        x = x ^ (x >> numpy.uint64(31))
    return (x % numpy.uint64(151_000)).astype(numpy.int64) + 1


def as_array(tokens):
    out = array("q")
    out.frombytes(tokens.tobytes())
    return out


def key(parent, leaf):
    parts = [stream((1 << 32) | parent, 0, LEAF), stream((2 << 32) | leaf, 0, LEAF)]
    return as_array(numpy.concatenate(parts))


class Micro:
    def __init__(self, backend, page, leaves):
        self.peer, self.leaves, self.next = Peer(backend, page, 1 << 40), leaves, leaves
        self.random, self.times, self.python = Random(1), {}, backend == "python"
        for leaf in range(leaves):
            self.peer.insert(key(leaf // LEAVES_A_PARENT, leaf), 0)

    def timed(self, op, count, call):
        start = time.thread_time_ns()
        result = call()
        self.times.setdefault(op, []).append((time.thread_time_ns() - start) / count)
        return result

    def round(self):
        half = self.leaves // 2
        leaves = [self.random.randint(half, self.leaves - 1) for _ in range(BATCH)]
        keys = [key(leaf // LEAVES_A_PARENT, leaf) for leaf in leaves]
        held = self.timed("match+lock", BATCH, lambda: [self.peer.begin(one) for one in keys])
        assert all(length == 2 * LEAF for _, length, _ in held)
        self.timed("unlock", BATCH, lambda: [self.peer.end(node, lock) for node, _, lock in held])
        unknown = key(2**32 - 1, 2**32 - 1)
        asked = MatchPrefixParams(key=RadixKey(unknown))
        self.timed("miss", BATCH, lambda: [self.peer.core.match_prefix(asked) for _ in keys])
        keys = self.fresh()
        self.timed("insert", BATCH, lambda: [self.peer.insert(one, LEAF) for one in keys])
        calls = 4 if self.python else max(4, BATCH * 20_000 // max(self.leaves, 20_000))
        self.timed("evict 1 leaf", calls, lambda: [self.peer.evict(LEAF) for _ in range(calls)])
        for one in self.fresh():
            self.peer.insert(one, LEAF)
        self.timed("evict 64 leaves", 1, lambda: self.peer.evict(64 * LEAF))

    def fresh(self):
        first = self.leaves // 2 // LEAVES_A_PARENT + 1
        last = (self.leaves - 1) // LEAVES_A_PARENT - 1
        numbers = range(self.next, self.next + BATCH)
        self.next += BATCH
        return [key(self.random.randint(first, last), leaf) for leaf in numbers]


def micro(page, sizes):
    for leaves in sizes:
        backends = [one for one in NAMES if one != "python" or leaves <= PYTHON_LEAVES_MAX]
        peers = [Micro(one, page, leaves) for one in backends]
        for _ in range(ROUNDS + 1):
            for peer in peers:
                peer.round()
        for peer in peers:
            for op, values in peer.times.items():
                show(peer.peer.name, op, page, leaves, "ns", values[1:])


def requests(path):
    name = os.path.basename(path).removesuffix(".bin")
    bytes_ = open(path, "rb").read()
    magic, count, ops, spans = numpy.frombuffer(bytes_, "<u4", 4).tolist()
    assert magic == MAGIC
    rows = numpy.frombuffer(bytes_, "<u4", count * 4, 16).reshape(count, 4).tolist()
    order = numpy.frombuffer(bytes_, "<u4", ops, 16 + count * 16).tolist()
    form = [("stream", "<u8"), ("start", "<u4"), ("len", "<u4")]
    parts = numpy.frombuffer(bytes_, form, spans, 16 + count * 16 + ops * 4).tolist()
    label = {"w1": "W1 fleet", "w2": "W2 conversation"}
    op = label.get(name[:2], "W3 " + name.split("_", 1)[1])
    # Evictions of the Python core take milliseconds each: the larger workloads are for the other.
    for backend in NAMES:
        if backend == "python" and name[:2] == "w2":
            continue
        peer = Peer(backend, 16, CAPACITY[name[:2]])
        spent, hits, held = 0, 0, {}
        for word in order:
            at, ends = word >> 1, word & 1
            prompt, total, first, many = rows[at]
            tokens = [stream(*part) for part in parts[first : first + many]]
            tokens = numpy.concatenate(tokens)
            whole = as_array(tokens[: total // 16 * 16])
            asked = as_array(tokens[:prompt])
            start = time.thread_time_ns()
            if not ends:
                node, length, lock = peer.begin(asked)
                if peer.take((total - length) // 16 * 16):
                    held[at] = node, length, lock
                else:
                    peer.end(node, lock)
                hits += length
            elif at in held:
                node, length, lock = held.pop(at)
                result = peer.insert(whole, length)
                # What somebody else put in meanwhile is free again.
                peer.free += max(0, result.prefix_len - length)
                peer.end(node, lock)
            spent += time.thread_time_ns() - start
        prompts = sum(row[0] for row in rows)
        ratio = hits / prompts
        show(peer.name, op, 16, 0, "ns/request", [spent / count], hit_ratio=ratio)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "micro":
        micro(int(rest[0]), [int(size) for size in rest[1:]])
    else:
        for path in rest:
            requests(path)
