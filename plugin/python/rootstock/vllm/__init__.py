"""Rootstock in vLLM: the block pool by entry point, the scheduler by `--scheduler-cls`.

What is replaced, and nothing else:

1. `vllm.v1.core.kv_cache_coordinator.BlockPool`: for models whose only KV group is full attention
   it makes Rootstock's pool, for all others vLLM's own.
2. `UnitaryKVCacheCoordinator.find_longest_cache_hit`: a whole prompt is one call.
3. `FullAttentionManager._get_num_evictable_blocks`: so is counting which of them are idle.
4. `UnitaryKVCacheCoordinator.__init__` and `Scheduler.__init__` are wrapped to see, before the pool
   is made, what it is made for and `--additional-config`.
"""

from __future__ import annotations

import functools
import inspect
from contextvars import ContextVar
from typing import Any

from .settings import SUPPORTED, Settings, is_supported

_engine: ContextVar[Any] = ContextVar("rootstock_engine", default=None)
_group: ContextVar[tuple[Any, int] | None] = ContextVar("rootstock_group", default=None)


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called again."""
    from vllm.logger import init_logger
    from vllm.version import __version__ as version

    logger = init_logger("vllm.rootstock")
    if not is_supported(version):
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        logger.warning("Rootstock is off: vLLM %s was not tested, %s was", version, known)
        return
    import vllm.v1.core.kv_cache_coordinator as coordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as manager

    if getattr(coordinator, "_rootstock", False):
        return
    coordinator._rootstock = True
    unitary = coordinator.UnitaryKVCacheCoordinator
    coordinator.BlockPool = functools.partial(_make_pool, coordinator.BlockPool)
    unitary.__init__ = _seeing_the_group(unitary.__init__)
    unitary.find_longest_cache_hit = _in_one_call(unitary.find_longest_cache_hit)
    manager._get_num_evictable_blocks = classmethod(
        _counting(manager._get_num_evictable_blocks.__func__)
    )
    Scheduler.__init__ = _seeing_the_engine(Scheduler.__init__)


def scheduler(**kwargs: Any) -> Any:
    """For `--scheduler-cls rootstock.vllm.scheduler`: the scheduler that the engine needs."""
    from .scheduling import make

    register()
    return make(**kwargs)


def _make_pool(stock: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.logger import init_logger
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    logger = init_logger("vllm.rootstock")
    wanted = inspect.signature(stock).bind(*args, **kwargs).arguments
    if not wanted["enable_caching"] or wanted["num_gpu_blocks"] < 2:
        return stock(*args, **kwargs)
    group = _group.get()
    if group is None or type(group[0]) not in (FullAttentionSpec, MLAAttentionSpec):
        kind = "several groups" if group is None else type(group[0]).__name__
        logger.info("Rootstock leaves this model to vLLM's own pool: its KV is %s", kind)
        return stock(*args, **kwargs)
    from .pool import BlockPool

    spec, max_model_len = group
    settings = Settings.of(_engine.get())
    request_blocks = -(-max_model_len // spec.block_size)
    pool = BlockPool(*args, settings=settings, request_blocks=request_blocks, **kwargs)
    logger.info(
        "Rootstock %s holds the KV cache: %d blocks, policy %s, pins of %d %% at most",
        _version(),
        pool.num_gpu_blocks,
        settings.policy,
        round(100 * settings.pin_budget),
    )
    return pool


def _version() -> str:
    import rootstock

    return rootstock.__version__


def _seeing_the_group(init: Any) -> Any:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        groups = given["kv_cache_config"].kv_cache_groups
        sharded = given["dcp_world_size"] > 1 or given["pcp_world_size"] > 1
        known = (groups[0].kv_cache_spec, given["max_model_len"])
        token = _group.set(known if len(groups) == 1 and not sharded else None)
        try:
            init(self, *args, **kwargs)
        finally:
            _group.reset(token)

    return wrapped


def _seeing_the_engine(init: Any) -> Any:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        token = _engine.set(given["vllm_config"])
        try:
            init(self, *args, **kwargs)
        finally:
            _engine.reset(token)

    return wrapped


def _counting(stock: Any) -> Any:
    import rootstock

    @functools.wraps(stock)
    def _get_num_evictable_blocks(cls: Any, blocks: Any) -> int:
        if blocks and type(blocks[0]) is rootstock.Block:
            return rootstock.count_idle(blocks)
        return stock(cls, blocks)

    return _get_num_evictable_blocks


def _in_one_call(stock: Any) -> Any:
    @functools.wraps(stock)
    def find_longest_cache_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Any:
        try:
            find = self.block_pool.find
        except AttributeError:
            return stock(self, block_hashes, max_cache_hit_length)
        blocks = find(block_hashes, max_cache_hit_length // self.block_size)
        if blocks and 0 in self.eagle_group_ids:
            blocks.pop()
        return (blocks,), len(blocks) * self.block_size, 0

    return find_longest_cache_hit
