"""What the `kv_hints` envelopes of vLLM and SGLang say, as the fields that the core reads."""

from typing import Any

# Fields of a hint that stand beside `agent_hints`.
NVEXT = ("agent_context", "cache_control", "kv_cache_retention_config", "session_control")


def kind_of(action: Any) -> str:
    """`pin` of `pin` and of `com.example.Pin`."""
    return action.action_type.rsplit(".", 1)[-1].lower()


def payload_of(action: Any) -> dict[str, Any]:
    return action.payload if isinstance(action.payload, dict) else {}


def seconds_of(payload: dict[str, Any]) -> Any:
    """The time of a pin, as it was given: a number of seconds or a text such as "5m"."""
    ttl = payload.get("ttl", payload.get("ttl_s"))
    if ttl is None and isinstance(payload.get("ttl_ms"), int | float):
        ttl = max(1, int(payload["ttl_ms"] // 1000))
    return ttl


def add_actions(envelope: Any, nvext: dict[str, Any], agent: dict[str, Any]) -> None:
    """The verbs of an envelope that are about this request: pin, retain, release, hint."""
    for action in envelope.actions:
        payload, kind = payload_of(action), kind_of(action)
        if "program_id" in payload:
            agent.setdefault("program_id", payload["program_id"])
        if kind == "pin":
            ttl = seconds_of(payload)
            control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl is not None else {})
            nvext.setdefault("cache_control", control)
        elif kind == "retain":
            if "priority" in payload:
                agent.setdefault("priority", payload["priority"])
            if "seconds" in payload:
                agent.setdefault("retention_seconds", payload["seconds"])
        elif kind == "hint":
            for name, value in payload.items():
                into = nvext if name in NVEXT else agent
                into.setdefault(name, value)
        elif kind == "release":
            context = nvext.setdefault("agent_context", {})
            if isinstance(context, dict):
                context.setdefault("trajectory_final", True)


def names_a_program(nvext: dict[str, Any], agent: dict[str, Any]) -> bool:
    """Whether a request names its program by itself."""
    context = nvext.get("agent_context")
    named = isinstance(context, dict) and ("trajectory_id" in context or "program_id" in context)
    return named or "program_id" in agent
