"""Lookup, allocation and freeing of one request, Rootstock against vLLM's own pool.

Both in one process, alternating, the very same requests: a prompt of which 15 of 16 parts are
cached. Prints medians in microseconds: bench_pool.py [ROUNDS] [POLICY]
"""

import statistics
import sys
import time

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 16


def manager(policy: str | None, blocks: int, length: int) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    import rootstock.vllm as grafted
    import vllm.v1.core.kv_cache_coordinator as coordinator

    class Config:
        additional_config = {"rootstock": {"policy": policy}}

    grafted.register()
    ours = coordinator.BlockPool
    if policy is None:
        coordinator.BlockPool = ours.args[0]
    token = grafted._engine.set(Config())
    try:
        made = KVCacheManager(
            config,
            max_model_len=length + 64,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
        )
    finally:
        coordinator.BlockPool = ours
        grafted._engine.reset(token)
    assert hasattr(made.block_pool, "rootstock") == (policy is not None)
    return made


def one(at: KVCacheManager, request: Request, length: int, times: dict) -> None:
    def timed(name, call):
        start = time.perf_counter_ns()
        result = call()
        times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
        return result

    blocks, cached, _ = timed("lookup", lambda: at.get_computed_blocks(request))
    got = timed("allocate", lambda: at.allocate_slots(request, length - cached, cached, blocks))
    assert got is not None
    request.num_computed_tokens = length
    timed("free", lambda: at.free(request))
    times.setdefault("cached", []).append(cached)


def main(rounds: int = 200, policy: str = "agent") -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    print("tokens | pool | lookup | allocate | free | sum (us, medians) | cached")
    for length in (1024, 8192, 32768):
        for pressed in (False, True):
            # Enough for all, or so few that each request evicts.
            blocks = 4 * length // BLOCK + (rounds * length // 16 // BLOCK + 64) * (not pressed)
            pools = {"vLLM": manager(None, blocks, length)}
            pools["Rootstock"] = manager(policy, blocks, length)
            times = {name: {} for name in pools}
            shared = list(range(length - length // 16))
            for turn in range(rounds):
                own = [100_000 + turn * 7 + at for at in range(length // 16)]
                for name, at in pools.items():
                    params = SamplingParams(max_tokens=8)
                    params.update_from_generation_config({}, eos_token_id=1)
                    request = Request(
                        f"{name}{turn}", shared + own, params, None, block_hasher=hasher
                    )
                    one(at, request, length, times[name])
            sums = {}
            for name, found in times.items():
                median = {key: statistics.median(found[key][5:]) for key in found}
                sums[name] = median["lookup"] + median["allocate"] + median["free"]
                load = "evicting" if pressed else "roomy"
                print(
                    f"{length} {load} | {name} | {median['lookup']:.1f} |"
                    f" {median['allocate']:.1f} | {median['free']:.1f} | {sums[name]:.1f} |"
                    f" {median['cached']:.0f}"
                )
            print(f"{length} | ratio {sums['vLLM'] / sums['Rootstock']:.2f}")


if __name__ == "__main__":
    main(*(kind(given) for kind, given in zip((int, str), sys.argv[1:])))
