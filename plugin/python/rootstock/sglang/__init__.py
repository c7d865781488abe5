"""Rootstock in SGLang: a tree core by entry point, chosen by SGLang's own environment variable.

    SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rootstock python -m sglang.launch_server ...

Nothing happens where that variable names another backend.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from .settings import AGENT, NAME, SUPPORTED, Settings, is_chosen, policy_of

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of `sglang.srt.plugins`; may be called again."""
    if not is_chosen():
        return
    from sglang.version import __version__ as version

    if version not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        logger.error("Rootstock is off: SGLang %s was not tested, %s was", version, known)
        return
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        get_tree_core_factory,
        register_tree_core_backend,
    )

    # SGLang then refuses to start: it does not find the backend that was named.
    settings = Settings.read()
    if get_tree_core_factory(NAME) is not None:
        return
    _hook(settings)
    _add_policy()
    register_tree_core_backend(
        NAME, lambda params, components: _make_core(params, components, settings)
    )


def _hook(settings: Settings) -> None:
    """Puts our functions around those of SGLang that the documentation lists."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .requests import hooks

    for name, hook in hooks(settings).items():
        HookRegistry.register(name, hook, HookType.AROUND)


def _add_policy() -> None:
    """Makes `--radix-eviction-policy agent` a choice."""
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_radix_eviction_policy_choices,
    )
    from sglang.srt.mem_cache import utils

    if AGENT not in RADIX_EVICTION_POLICY_CHOICES:
        add_radix_eviction_policy_choices([AGENT])
    # For the trees of SGLang that are made beside ours, such as that of the waiting requests.
    utils._EVICTION_POLICY_FACTORIES.setdefault(AGENT, utils.LRUStrategy)


def _unsupported(params: Any, settings: Settings) -> str | None:
    """Why this model runs on SGLang's own tree core, if it does."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    components = tuple(params.tree_components or ())
    if components != (ComponentType.FULL,):
        return f"its KV is {', '.join(str(one) for one in components)}"
    if params.component_registry_override:
        return "it has components of its own"
    if params.is_eagle:
        return "its keys are pairs of tokens (EAGLE)"
    if params.enable_session_radix_cache:
        return "sessions are counted in the tree (--enable-session-radix-cache)"
    try:
        policy_of(params, settings)
    except AttributeError:
        return f"the eviction policy {params.eviction_policy} is not known"
    return None


def _make_core(params: Any, components: dict, settings: Settings) -> Any:
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core

    reason = _unsupported(params, settings)
    if reason is not None:
        logger.warning("Rootstock leaves this model to SGLang's own tree core: %s", reason)
        if params.eviction_policy.lower() == AGENT:
            logger.warning("SGLang's own tree core has no policy %s: it evicts by lru", AGENT)
            params = replace(params, eviction_policy="lru")
        return create_tree_core("rust", params, components)
    import rootstock

    from .core import RootstockTreeCore

    missing = sorted(RootstockTreeCore.__abstractmethods__)
    if missing:
        raise RuntimeError(
            f"Rootstock {rootstock.__version__} does not fit this SGLang:"
            f" its tree core lacks {', '.join(missing)}"
        )
    core = RootstockTreeCore(params, settings)
    logger.info(
        "Rootstock %s holds the KV tree: pages of %d tokens, policy %s, pins of %d %% at most",
        rootstock.__version__,
        params.page_size,
        policy_of(params, settings)[0],
        round(100 * settings.pin_budget),
    )
    return core
