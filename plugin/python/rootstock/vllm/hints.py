"""What a request of vLLM says, as the hints of the core.

They come from `vllm_xargs` (`nvext`, a JSON text, or single fields of `agent_hints`), `kv_hints`,
`session_id`, `priority` (vLLM's lower is ours higher) and `cache_salt` (whose pins and programs).
Read leniently: what cannot be read is as if absent, and a hint never fails a request.
"""

import json
import zlib
from typing import Any

from rootstock import Hints
from rootstock.actions import add_actions, names_a_program

# Fields of `agent_hints` that may stand in `vllm_xargs` by themselves.
FIELDS = (
    "retention_seconds",
    "latency_sensitivity",
    "strict_priority",
    "osl",
    "program_id",
    "context_type",
    "total_requests",
    "iat",
)


def hints_of(request: Any, block_tokens: int) -> Hints | None:
    """The hints of a request, read once and kept with it; None when it says nothing."""
    try:
        return request._rootstock_hints
    except AttributeError:
        pass
    hints = _read(request, block_tokens)
    request._rootstock_hints = hints
    return hints


def _read(request: Any, block_tokens: int) -> Hints | None:
    params = request.sampling_params
    extra = (params.extra_args if params is not None else None) or {}
    if not (extra or request.priority or request.session_id or request.kv_hints):
        return None
    nvext = _nvext_of(extra)
    agent = nvext.setdefault("agent_hints", {})
    if not isinstance(agent, dict):
        agent = nvext["agent_hints"] = {}
    for name in FIELDS:
        if name in extra:
            agent.setdefault(name, extra[name])
    if "pin_ttl" in extra:
        nvext.setdefault("cache_control", {"type": "ephemeral", "ttl": extra["pin_ttl"]})
    if "session_final" in extra:
        context = nvext.setdefault("agent_context", {})
        if isinstance(context, dict):
            context.setdefault("trajectory_final", bool(extra["session_final"]))
    if request.kv_hints is not None:
        add_actions(request.kv_hints, nvext, agent)
    agent.setdefault("priority", -request.priority)
    if request.session_id and not names_a_program(nvext, agent):
        agent["program_id"] = request.session_id
    return Hints(
        json.dumps(nvext, default=str),
        tenant=zlib.crc32((request.cache_salt or "").encode()),
        prompt_tokens=request.num_prompt_tokens,
        block_tokens=block_tokens,
    )


def _nvext_of(extra: dict[str, Any]) -> dict[str, Any]:
    nvext = extra.get("nvext")
    if isinstance(nvext, str):
        try:
            nvext = json.loads(nvext)
        except ValueError:
            nvext = None
    return dict(nvext) if isinstance(nvext, dict) else {}
