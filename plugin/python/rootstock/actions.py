"""What the `kv_hints` envelopes of vLLM and SGLang say, as the fields that the core reads."""

from typing import Any


def add_actions(envelope: Any, nvext: dict[str, Any], agent: dict[str, Any]) -> None:
    """The verbs of an envelope that are about this request: pin, retain, release."""
    for action in envelope.actions:
        payload = action.payload if isinstance(action.payload, dict) else {}
        kind = action.action_type.rsplit(".", 1)[-1].lower()
        if "program_id" in payload:
            agent.setdefault("program_id", payload["program_id"])
        if kind == "pin":
            ttl = payload.get("ttl", payload.get("ttl_s"))
            if ttl is None and isinstance(payload.get("ttl_ms"), int | float):
                ttl = max(1, int(payload["ttl_ms"] // 1000))
            control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl is not None else {})
            nvext.setdefault("cache_control", control)
        elif kind == "retain":
            if "priority" in payload:
                agent.setdefault("priority", payload["priority"])
            if "seconds" in payload:
                agent.setdefault("retention_seconds", payload["seconds"])
        elif kind == "release":
            context = nvext.setdefault("agent_context", {})
            if isinstance(context, dict):
                context.setdefault("trajectory_final", True)


def names_a_program(nvext: dict[str, Any], agent: dict[str, Any]) -> bool:
    """Whether a request names its program by itself."""
    context = nvext.get("agent_context")
    named = isinstance(context, dict) and ("trajectory_id" in context or "program_id" in context)
    return named or "program_id" in agent
