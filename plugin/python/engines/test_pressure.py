"""vLLM's scheduler under pressure, its own against Rootstock's, token by token without a model.

The scheduler, the cache manager and the pools are vLLM's and ours; only the forward pass is left out
(each step draws token 7). `pressure.py` plays the same cases on a real model. Needs the tests of
vLLM's release on the path, for their `create_scheduler`.
"""

import contextlib

import pytest
import vllm.v1.core.kv_cache_coordinator as coordinator
from tests.v1.core.utils import create_scheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

import rootstock.vllm as grafted
from rootstock.vllm.scheduling import AgentScheduler
from rootstock.vllm.settings import Settings

BLOCK, PROMPT = 32, 256


@contextlib.contextmanager
def stock_pool():
    ours = coordinator.BlockPool
    coordinator.BlockPool = ours.args[0]
    try:
        yield
    finally:
        coordinator.BlockPool = ours


def engine(monkeypatch, who: str, blocks: int, **settings) -> Scheduler:
    init_none_hash(sha256)
    grafted.register()
    chosen = Settings(**settings)
    monkeypatch.setattr(Settings, "of", classmethod(lambda cls, config: chosen))
    make = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True,
        "num_blocks": blocks,
        "block_size": BLOCK,
        "max_model_len": 1024,
        "scheduling_policy": "priority",
    }
    if who == "ours":
        made = create_scheduler(scheduler_cls=AgentScheduler, **make)
        assert isinstance(made, AgentScheduler)
        assert hasattr(made.kv_cache_manager.block_pool, "rootstock")
        return made
    with stock_pool():
        made = create_scheduler(**make)
    assert not hasattr(made.kv_cache_manager.block_pool, "rootstock")
    return made


class Counter:
    requests = 0


def request(kind: int, tokens: int = 8, priority: int = 0, **extra) -> Request:
    """Prompts of different kinds share nothing."""
    Counter.requests += 1
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra or None)
    params.update_from_generation_config({}, eos_token_id=2)
    return Request(
        f"r{Counter.requests}",
        [kind * 1000 + at for at in range(PROMPT)],
        params,
        None,
        priority=priority,
        arrival_time=float(Counter.requests),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def run(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """Cached tokens at the first admission of each, all of them waiting at once."""
    cached: dict[str, int] = {}
    for one in requests:
        scheduler.add_request(one)
    for _ in range(5000):
        plan = scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            cached.setdefault(new.req_id, new.num_computed_tokens)
        if not plan.num_scheduled_tokens:
            if not scheduler.has_unfinished_requests():
                break
            continue
        ids = list(plan.num_scheduled_tokens)
        drawn = []
        for name in ids:
            known = scheduler.requests[name]
            drawn.append([7] if known.num_computed_tokens >= known.num_tokens else [])
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: at for at, name in enumerate(ids)},
            sampled_token_ids=drawn,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        scheduler.update_from_output(plan, output)
    assert not scheduler.has_unfinished_requests(), "everybody is served"
    pool = scheduler.kv_cache_manager.block_pool
    if hasattr(pool, "rootstock"):
        pool.rootstock.check()
    return [cached[one.request_id] for one in requests]


def one_by_one(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    return [run(scheduler, [one])[0] for one in requests]


def cyclic(scheduler: Scheduler) -> list[int]:
    for _ in range(3):
        found = run(scheduler, [request(kind, 96) for kind in range(1, 9)])
    return found


def priority(scheduler: Scheduler) -> list[int]:
    one_by_one(scheduler, [request(kind, priority=-10) for kind in (1, 2)])
    one_by_one(scheduler, [request(kind, priority=5) for kind in range(11, 19)])
    return one_by_one(scheduler, [request(kind, priority=-10) for kind in (1, 2)])


def pin(scheduler: Scheduler) -> list[int]:
    one_by_one(scheduler, [request(1, pin_ttl="10m")])
    one_by_one(scheduler, [request(kind) for kind in range(11, 19)])
    return one_by_one(scheduler, [request(1)])


def program(scheduler: Scheduler) -> list[int]:
    one_by_one(scheduler, [request(kind) for kind in (1, 2)])
    one_by_one(scheduler, [request(3, program_id="p", session_final=1)])
    one_by_one(scheduler, [request(kind) for kind in (4, 5)])
    return one_by_one(scheduler, [request(kind) for kind in (1, 2)])


CASES = {
    "cyclic": (cyclic, 48, {"policy": "mru"}),
    "priority": (priority, 48, {"policy": "priority"}),
    "pin": (pin, 64, {"policy": "lru", "pin_budget": 0.3}),
    "program": (program, 36, {"policy": "lru"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_matters_stays_cached_where_vllm_loses_it(monkeypatch, case, capsys):
    play, blocks, settings = CASES[case]
    stock = play(engine(monkeypatch, "stock", blocks))
    ours = play(engine(monkeypatch, "ours", blocks, **settings))
    with capsys.disabled():
        print(f"\n{case}: cached tokens, vLLM {stock}, Rootstock {settings} {ours}")
    assert sum(ours) > sum(stock)


def test_least_recently_used_is_vllms_own_order(monkeypatch):
    for play, blocks, _ in CASES.values():
        stock = play(engine(monkeypatch, "stock", blocks))
        if play in (cyclic, priority):
            assert play(engine(monkeypatch, "ours", blocks, policy="lru")) == stock


def test_the_important_are_admitted_first_and_the_least_gives_way(monkeypatch):
    for who in ("stock", "ours"):
        scheduler = engine(monkeypatch, who, 34, policy="lru")
        low = [request(kind, 200, priority=5) for kind in range(1, 4)]
        high = [request(9, 200, priority=-5)]
        run(scheduler, low + high)
        preempted = [one.num_preemptions for one in low + high]
        assert preempted[-1] == 0 and sum(preempted) > 0, (who, preempted)
