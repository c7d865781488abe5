"""Eviction, lookup, insertion and leases of one request, our tree core against SGLang's.

All cores in one process, in turn, over the same tree: leaves of one page of 16 tokens below a
shared prefix of 512; ours with policy lru, as SGLang's, and with policy agent as well. Prints
medians in microseconds of CPU time of the thread: bench_sglang.py [LEAVES..]
"""

import random
import statistics
import sys
import time
from array import array

import torch
from sglang_cores import CORES, FULL, InsertParams, MatchPrefixParams, RadixKey, make_cache

PAGE = 16
PREFIX = 512
ROUNDS = 31

# SGLang's Python core makes a heap of all leaves on each call: from here on it takes seconds, and
# above the second number a run takes an hour.
PYTHON_SLOW = 100_000
PYTHON_LEAVES_MAX = 100_000


def key(prefix, number):
    tail = [number >> 15 & 0x7FFF, number & 0x7FFF, *range(PAGE - 2)]
    return RadixKey(prefix + array("q", tail))


def insert(core, tokens, first, owned):
    slots = torch.arange(first, first + len(tokens), dtype=torch.int64)
    step = core.begin_insert(InsertParams(key=tokens, value=slots, prev_prefix_len=owned))
    core.end_insert()
    return step.result.last_device_node


def evict(core, tokens):
    freed = 0
    core.evict_device_start(FULL, tokens)
    while True:
        step = core.evict_device_next_node(FULL, {FULL: freed})
        if step.node_id is None:
            break
        gone = core.evict_device_leaf(step.node_id, False)
        freed += gone.tracker[FULL]
        gone.device_frees.clear()
    core.evict_device_end(FULL)
    assert freed >= tokens


def timed(times, name, call):
    start = time.thread_time_ns()
    result = call()
    times.setdefault(name, []).append((time.thread_time_ns() - start) / 1000)
    return result


def main():
    sizes = [int(size) for size in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    prefix = array("q", range(100, 100 + PREFIX))
    print(f"{'leaves':>8} {'core':>10} {'evict':>9} {'match':>7} {'insert':>7} {'lock':>6}")
    for leaves in sizes:
        cores = {
            name: make_cache(name, PAGE, events=False).tree_core
            for name in CORES
            if name != "python" or leaves <= PYTHON_LEAVES_MAX
        }
        # What it watches depends on how much the pool holds.
        capacity = PAGE * (leaves + PREFIX)
        agent = make_cache("rootstock", PAGE, policy="agent", events=False, capacity=capacity)
        cores["agent"] = agent.tree_core
        for core in cores.values():
            for number in range(leaves):
                owned = PREFIX if number else 0
                insert(core, key(prefix, number), number * PAGE, owned)
        times = {name: {} for name in cores}
        chooser = random.Random(0)
        for number in range(ROUNDS):
            known = key(prefix, chooser.randrange(leaves // 2, leaves))
            for name, core in cores.items():
                if name == "python" and leaves >= PYTHON_SLOW and number > 5:
                    continue
                into = times[name]
                timed(into, "evict", lambda: evict(core, PAGE))
                asked = MatchPrefixParams(key=known)
                found = timed(into, "match", lambda: core.match_prefix(asked))
                assert found.device_prefix_len == PREFIX + PAGE
                fresh = key(prefix, leaves + number)
                timed(into, "insert", lambda: insert(core, fresh, 0, PREFIX))

                def hold():
                    receipt = core.inc_lock_ref(found.last_device_node).to_dec_params()
                    core.dec_lock_ref(found.last_device_node, receipt)

                timed(into, "lock", hold)
        for name, into in times.items():
            medians = {what: statistics.median(all_of[1:]) for what, all_of in into.items()}
            print(
                f"{leaves:>8} {name:>10} {medians['evict']:>9.1f} {medians['match']:>7.1f}"
                f" {medians['insert']:>7.1f} {medians['lock']:>6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
