"""vLLM's scheduler with Rootstock's order: who is admitted first, and who gives way.

Everything else of a step is vLLM's own code. Of the running requests the last one in the list
gives way when blocks run out, so the list is kept in the order of importance.
"""

import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from .hints import hints_of
from .pool import BlockPool
from .queue import AgentQueue
from .settings import Settings

logger = init_logger("vllm.rootstock")


def make(**kwargs: Any) -> Any:
    """The scheduler for this engine: asynchronous when the engine schedules ahead."""
    ahead = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AgentAsyncScheduler if ahead else AgentScheduler)(**kwargs)


class _Agent:
    """What both schedulers do differently from vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = Settings.of(self.vllm_config)
        pool = self.kv_cache_manager.block_pool
        self._pool = pool if isinstance(pool, BlockPool) else None
        self.waiting = self._queue()
        self.kv_holding_waiting = self._queue()
        # With this policy the last of the running ones gives way.
        self.policy = SchedulingPolicy.FCFS
        self._logged = time.monotonic()

    def _queue(self) -> AgentQueue:
        return AgentQueue(self._hints_of, self._cached_tokens, self._settings)

    def _hints_of(self, request: Any) -> Any:
        return hints_of(request, self.block_size)

    def _cached_tokens(self, request: Any) -> int:
        if self._pool is None or not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return 0
        count = (request.num_tokens - 1) // self.block_size
        return self.block_size * self._pool.rootstock.find_length(request.block_hashes, count)

    def _importance(self, request: Any) -> tuple[float, ...]:
        hints = self._hints_of(request)
        strict = hints.strict if hints is not None else 0
        return (-strict, request.priority, request.arrival_time)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.refresh()
        if len(self.running) > 1:
            self.running.sort(key=self._importance)
        return super().schedule(*args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        if self._pool is None:
            return super()._preempt_request(*args, **kwargs)
        self._pool.preempting = True
        try:
            return super()._preempt_request(*args, **kwargs)
        finally:
            self._pool.preempting = False

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        if self._pool is not None and 0 < self._settings.log_s <= now - self._logged:
            self._logged = now
            counts = self._pool.rootstock.stats()
            line = ", ".join(f"{name} {count}" for name, count in counts.items())
            logger.info("Rootstock: %s, waiting %d", line, len(self.waiting))
        return super().make_stats(*args, **kwargs)


class AgentScheduler(_Agent, Scheduler):
    """For engines that wait for each step."""


class AgentAsyncScheduler(_Agent, AsyncScheduler):
    """For engines that schedule ahead."""
