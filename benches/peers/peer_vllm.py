"""vLLM's cache manager beside the other peers: peer_vllm.py FILE..

Its own `KVCacheManager` over its own pool, with its default hash, from the released package. The files
are workloads as `peers workloads DIR` writes them. Prints figures as lines of JSON, in processor time
of the thread. A request is hash and lookup, allocation of prompt and answer, and freeing; vLLM
shows its blocks to others at once, the rest do at its end.
"""

import json
import os
import sys
import time

import numpy
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

PAGE = 16
MAGIC = 0x57504B31
CAPACITY = {"w1": 1 << 20, "w2": 4 << 20, "w3": 2 << 20}


def manager(tokens):
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        # One block is its null block.
        num_blocks=tokens // PAGE + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=1 << 18, scheduler_block_size=PAGE, hash_block_size=PAGE,
        enable_caching=True,
    )  # fmt: skip


def stream(number, start, count):
    with numpy.errstate(over="ignore"):
        first = numpy.uint64(number * 0x9E3779B97F4A7C15 % (1 << 64))
        x = first + numpy.arange(start, start + count, dtype=numpy.uint64)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        x = x ^ (x >> numpy.uint64(31))
    return (x % numpy.uint64(151_000)).astype(numpy.int64) + 1


def requests(path, hasher):
    name = os.path.basename(path).removesuffix(".bin")
    bytes_ = open(path, "rb").read()
    magic, count, ops, spans = numpy.frombuffer(bytes_, "<u4", 4).tolist()
    assert magic == MAGIC
    rows = numpy.frombuffer(bytes_, "<u4", count * 4, 16).reshape(count, 4).tolist()
    order = numpy.frombuffer(bytes_, "<u4", ops, 16 + count * 16).tolist()
    form = [("stream", "<u8"), ("start", "<u4"), ("len", "<u4")]
    parts = numpy.frombuffer(bytes_, form, spans, 16 + count * 16 + ops * 4).tolist()
    pool, spent, hits, held = manager(CAPACITY[name[:2]]), 0, 0, {}
    for word in order:
        at, ends = word >> 1, word & 1
        prompt, total, first, many = rows[at]
        if ends:
            start = time.thread_time_ns()
            if at in held:
                pool.free(held.pop(at))
            spent += time.thread_time_ns() - start
            continue
        tokens = numpy.concatenate([stream(*part) for part in parts[first : first + many]]).tolist()
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({}, eos_token_id=1)
        start = time.thread_time_ns()
        request = Request(str(at), tokens, params, None, block_hasher=hasher)
        blocks, cached, _ = pool.get_computed_blocks(request)
        got = pool.allocate_slots(request, total - cached, cached, blocks)
        if got is not None:
            request.num_computed_tokens = total
            held[at] = request
        spent += time.thread_time_ns() - start
        hits += min(cached, prompt)
    op = "W1 fleet" if name[:2] == "w1" else "W3 " + name.split("_", 1)[1]
    each = spent / count
    figure = {
        "peer": "vllm", "kind": "hashed", "op": op, "page_tokens": PAGE, "leaves": 0,
        "unit": "ns/request", "median": each, "low": each, "high": each,
        "hit_ratio": hits / sum(row[0] for row in rows),
    }  # fmt: skip
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    init_none_hash(sha256)
    for each in sys.argv[1:]:
        requests(each, get_request_block_hasher(PAGE, sha256))
