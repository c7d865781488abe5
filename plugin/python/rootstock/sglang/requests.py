"""What happens to requests: pins and programs, who goes first, and those that were retracted.

Each function here is a hook of SGLang's registry around the name that `hooks` lists it with. Where
another tree core serves, all of them do what SGLang does.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import Any

from .hints import hints_of, program_of
from .settings import Settings
from .verbs import carry_out, pin_prompt

logger = logging.getLogger(__name__)

# Waiting requests for which the cache is asked in one pass, when there are more than SGLang would
# order at all.
PROBED = 256

# SGLang stands requests without a priority at the end of 64 bits.
NO_PRIORITY = 1 << 40

_giving_way: ContextVar[bool] = ContextVar("rootstock_giving_way", default=False)


def _core_of(cache: Any) -> Any:
    from .core import RootstockTreeCore

    core = getattr(cache, "tree_core", None)
    return core if isinstance(core, RootstockTreeCore) else None


def checkpoint(original: Any, cache: Any, req: Any, **kwargs: Any) -> None:
    """A request's KV goes into the tree: with what it says, and its pins once the prompt is in."""
    core = _core_of(cache)
    if core is None:
        return original(cache, req, **kwargs)
    hints, program = hints_of(req), program_of(req)
    came = getattr(req, "_rootstock_came", None) or core.tree.now()
    asking = (hints, len(req.origin_input_ids), came, req.finished())
    core.asker = (program, asking)
    try:
        original(cache, req, **kwargs)
    finally:
        core.asker = None
    if hints is None or cache.disable:
        return None
    if hints.pins and not getattr(req, "_rootstock_pinned", False):
        pin_prompt(cache, core, req, hints, program)
    if hints.session_final and program is not None and req.finished():
        tokens = core.tree.release_program(program)
        logger.debug("Rootstock: program %s is over, %d tokens go first", hints.program, tokens)
    return None


def queued(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request is queued: what it says about programs by name is carried out."""
    cache = scheduler.tree_cache
    core = _core_of(cache)
    if core is not None:
        req._rootstock_came = getattr(req, "_rootstock_came", None) or core.tree.now()
        if not cache.disable:
            carry_out(cache, core, req)
    return original(scheduler, req, *args, **kwargs)


def host_tier(original: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
    """The host tier is there: how much it holds is a matter of pins and of what is learned."""
    done = original(cache, *args, **kwargs)
    core, controller = _core_of(cache), cache.cache_controller
    if core is not None and controller is not None:
        core.tree.set_host_tokens(controller.mem_pool_host.size)
    return done


def give_way(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A running request is retracted or preempted."""
    token = _giving_way.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _giving_way.reset(token)


def release_kv(original: Any, req: Any, tree_cache: Any, *, checkpoint: bool) -> Any:
    """Who gives way keeps what was computed, as cached KV that others may displace."""
    from sglang.srt.runtime_context import get_disagg

    is_whole = get_disagg().disaggregation_mode == "null"
    if _giving_way.get() and not req.finished() and is_whole and _core_of(tree_cache) is not None:
        checkpoint = True
    return original(req, tree_cache, checkpoint=checkpoint)


def queue_limit(original: Any, scheduler: Any, req: Any) -> bool:
    """Who was running once is not refused for a full queue, and takes no place in it."""
    if _core_of(scheduler.tree_cache) is None or scheduler.max_queued_requests is None:
        return original(scheduler, req)
    new = sum(not other.is_retracted for other in scheduler.waiting_queue)
    if req.is_retracted or new + 1 <= scheduler.max_queued_requests:
        return False
    return original(scheduler, req)


class Order:
    """Priority and age first, then what the cache has."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(
        self,
        original: Any,
        policy: Any,
        waiting_queue: list,
        running_batch: Any = None,
        processed_tokens: int = 0,
    ) -> None:
        from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, CacheAwarePolicy

        by_prefix = policy.policy == CacheAwarePolicy.LPM
        by_priority = policy.enable_priority_scheduling
        is_ours = by_prefix or (by_priority and policy.policy == CacheAgnosticPolicy.FCFS)
        if not is_ours or _core_of(policy.tree_cache) is None:
            original(policy, waiting_queue, running_batch, processed_tokens)
            return
        now = time.monotonic()
        for req in waiting_queue:
            if not hasattr(req, "_rootstock_queued"):
                req._rootstock_queued = now
        if len(waiting_queue) < 2:
            return
        later = self._match(policy, waiting_queue)
        steps = self._steps(policy, waiting_queue, now)
        waiting_queue.sort(key=lambda req: self._key(req, steps[req.rid], later, by_prefix))

    @staticmethod
    def _match(policy: Any, waiting_queue: list) -> set[str]:
        """Asks the cache for each; those are named that better wait for another's prefix."""
        from sglang.srt.managers.schedule_policy import (
            WAITING_QUEUE_PREFIX_MATCH_MAX,
            CacheAwarePolicy,
            match_kv_cache,
        )

        if len(waiting_queue) <= WAITING_QUEUE_PREFIX_MATCH_MAX:
            return policy._compute_prefix_matches(waiting_queue, CacheAwarePolicy.LPM)
        for req in waiting_queue[:PROBED]:
            match_kv_cache(req, policy.tree_cache)
        return set()

    def _steps(self, policy: Any, waiting_queue: list, now: float) -> dict[str, int]:
        """Priority of each, higher first, raised by one step with each `aging_s` of waiting."""
        sign = -policy.priority_sign
        given = {}
        for req in waiting_queue:
            priority = req.priority if policy.enable_priority_scheduling else 0
            is_given = priority is not None and abs(priority) < NO_PRIORITY
            given[req.rid] = sign * priority if is_given else None
        lowest = min((one for one in given.values() if one is not None), default=0)
        steps = {}
        for req in waiting_queue:
            priority = given[req.rid]
            base = lowest - 1 if priority is None else priority
            steps[req.rid] = base + int((now - req._rootstock_queued) / self._settings.aging_s)
        return steps

    def _key(self, req: Any, step: int, later: set[str], by_prefix: bool) -> tuple:
        matched = req.num_matched_prefix_tokens
        queued = req._rootstock_queued
        if by_prefix:
            return (-step, req.rid in later, -matched, queued)
        saved = min(matched / self._settings.prefill_tokens_per_s, self._settings.aging_s)
        return (-step, req.rid in later, queued - saved, queued)


def hooks(settings: Settings) -> dict[str, Any]:
    """Names of SGLang, and what is put around them."""
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    found = {
        f"{cache}.checkpoint_into_tree": checkpoint,
        f"{cache}.init_hicache": host_tier,
        "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache": queued,
        "sglang.srt.managers.schedule_batch.release_req": give_way,
        "sglang.srt.mem_cache.common.release_kv_cache": release_kv,
        "sglang.srt.managers.scheduler.Scheduler._abort_on_queued_limit": queue_limit,
    }
    if settings.queue:
        name = "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority"
        order = Order(settings)
        # The registry wraps functions.
        found[name] = lambda *args, **kwargs: order(*args, **kwargs)
    return found
