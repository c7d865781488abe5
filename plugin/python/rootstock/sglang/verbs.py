"""Pin, retain, release and prefetch, carried out by SGLang's controller where KV moves."""

from __future__ import annotations

import logging
from array import array
from typing import Any

from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

from .hints import Order, orders_of

logger = logging.getLogger(__name__)


def pin_node(cache: Any, core: Any, node: int, seconds: float, program: int | None) -> int:
    """Pins a path, and has what only the device has of it copied to the host tier."""
    held = core.tree.pin(node, seconds, program)
    copies = core.tree.copies_for_pin(node) if held else []
    if copies:
        cache._apply_cache_actions([BackupKV(node_ids=copies)])
    return held


def pin_prompt(cache: Any, core: Any, req: Any, hints: Any, program: int | None) -> None:
    """Pins what a request asks to pin of its own prompt, once that is computed."""
    prompt = array("q", req.origin_input_ids)
    for tokens, seconds in hints.pin_spans:
        key = prompt[: min(tokens, len(prompt))]
        whole = len(key) // core.page_size * core.page_size
        found, node, _ = core.tree.peek(key, req.extra_key, req.cache_salt)
        if found < whole or not seconds:
            # The rest of the prompt is still to be computed.
            return
        held = pin_node(cache, core, node, float(seconds), program)
        logger.debug("Rootstock: %d of %d tokens are pinned for %d s", held, found, seconds)
    req._rootstock_pinned = True


def carry_out(cache: Any, core: Any, req: Any) -> None:
    """What a request says about programs by name; done once, when it comes."""
    if getattr(req, "_rootstock_obeyed", False):
        return
    req._rootstock_obeyed = True
    for order in orders_of(req):
        tokens = _carry_out(cache, core, order)
        logger.debug("Rootstock: %s of program %x: %d", order.kind, order.program, tokens)


def _carry_out(cache: Any, core: Any, order: Order) -> int:
    if order.kind == "release":
        return core.tree.release_program(order.program)
    ends = core.tree.ends_of(order.program)
    if order.kind == "retain":
        for node in ends:
            core.tree.retain(node, order.priority, order.seconds)
        return len(ends)
    if order.kind == "pin" and order.seconds:
        return sum(pin_node(cache, core, one, float(order.seconds), order.program) for one in ends)
    if order.kind == "prefetch":
        return sum(_prefetch(cache, core, node) for node in ends)
    return 0


def _prefetch(cache: Any, core: Any, node: int) -> bool:
    """Brings a path back to the device. The copy goes out with the next batch of prompts, which
    waits for it layer by layer, as for its own: nothing is read before it is there."""
    is_here, is_copied = core.tree.places(node)
    if is_here or not is_copied or cache.cache_controller is None:
        return False
    # What others need is not evicted for it twice over.
    quota = cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size()
    return cache.load_back(node, mem_quota=quota)
