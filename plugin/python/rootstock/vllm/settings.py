"""Settings, from vLLM's `--additional-config '{"rootstock": {...}}'`, checked once."""

from dataclasses import dataclass, fields
from typing import Any

# Minor releases whose seams were tested; others run stock.
SUPPORTED = ((0, 32),)


@dataclass(frozen=True)
class Settings:
    """What an operator may choose.

    policy: in which order blocks go: agent, lru, priority, lfu, fifo, filo, mru, slru.
    pin_budget: share of the blocks that pins may hold, 0 to 1.
    aging_s: seconds of waiting that raise a request by one strict tier.
    prefill_tokens_per_s: how fast a prompt is computed, for what a cached prefix saves.
    log_s: seconds between lines of counters; 0 is none.
    """

    policy: str = "agent"
    pin_budget: float = 0.2
    aging_s: float = 30.0
    prefill_tokens_per_s: float = 5000.0
    log_s: float = 60.0

    @classmethod
    def of(cls, vllm_config: Any) -> "Settings":
        """Those of an engine; raises ValueError for what is not known."""
        given = getattr(vllm_config, "additional_config", None) or {}
        given = given.get("rootstock", {}) if isinstance(given, dict) else {}
        known = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"additional_config.rootstock.{name} is unknown, one of"
                    f" {', '.join(known)} is possible"
                )
            if name != "policy" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"additional_config.rootstock.{name} is {value!r}, not a number")
        return cls(**given)


def is_supported(version: str) -> bool:
    """Whether the seams of this release of vLLM were tested."""
    parts = version.split("+")[0].split(".")
    try:
        return (int(parts[0]), int(parts[1])) in SUPPORTED
    except (IndexError, ValueError):
        return False
