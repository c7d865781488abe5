"""Settings, from the environment variable `ROOTSTOCK` (a JSON object), checked once."""

import json
import os
from dataclasses import dataclass, fields
from typing import Any

# Releases whose seams were tested; others run stock.
SUPPORTED = ("0.5.23",)

# The name of our tree core, for SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.
NAME = "rootstock"

# Our eviction policy beside those of SGLang.
AGENT = "agent"

# Those that can be named in the settings; slru and tlru have numbers, which SGLang's flags bring.
POLICIES = ("lru", "lfu", "priority", "fifo", "filo", "mru", AGENT)

BACKEND = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@dataclass(frozen=True)
class Settings:
    """What an operator may choose beside SGLang's own flags.

    policy: what goes first, where it is not what `--radix-eviction-policy` says.
    pin_budget: share that pins may hold of the tokens of the host tier, or of the device where
        there is no host tier, 0 to 1.
    queue: orders the waiting requests by priority and cached prefix, with aging.
    aging_s: seconds of waiting that raise a request by one step of priority.
    prefill_tokens_per_s: how fast a prompt is computed, for what a cached prefix saves.
    """

    policy: str = ""
    pin_budget: float = 0.2
    queue: bool = True
    aging_s: float = 30.0
    prefill_tokens_per_s: float = 5000.0

    @classmethod
    def read(cls) -> "Settings":
        """Those of this process; raises ValueError for what is not known."""
        text = os.environ.get("ROOTSTOCK", "").strip() or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"ROOTSTOCK is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"ROOTSTOCK is {text}, not an object")
        known = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"ROOTSTOCK.{name} is unknown, one of {', '.join(known)} is possible"
                )
            kinds = {bool: bool, str: str, float: int | float}[known[name]]
            # True is an integer to Python.
            is_flag = isinstance(value, bool)
            if isinstance(value, kinds) and is_flag == (known[name] is bool):
                continue
            raise ValueError(f"ROOTSTOCK.{name} is {value!r}, not a {known[name].__name__}")
        settings = cls(**given)
        if settings.policy and settings.policy not in POLICIES:
            possible = ", ".join(POLICIES)
            raise ValueError(f"ROOTSTOCK.policy is {settings.policy!r}, not one of {possible}")
        return settings


def is_chosen() -> bool:
    """Whether this process is to use our tree core."""
    return os.environ.get(BACKEND) == NAME


def policy_of(params: Any, settings: Settings) -> tuple[str, list[float]]:
    """SGLang's eviction policy as ours: its name, and its numbers."""
    from sglang.srt.mem_cache.utils import get_eviction_strategy

    if settings.policy:
        return settings.policy, []
    name = params.eviction_policy.lower()
    if name == AGENT:
        return name, []
    # Checks the configuration as SGLang does.
    strategy = get_eviction_strategy(name, params.eviction_policy_config)
    if name == "slru":
        return name, [float(strategy.protected_threshold)]
    if name == "tlru":
        return name, [float(strategy.threshold), float(strategy.next_prompt_estimate)]
    return name, []
