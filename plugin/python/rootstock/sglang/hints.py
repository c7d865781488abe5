"""What a request of SGLang says, as the hints of the core.

They come from `kv_hints` and `session_id`, which names the program; `cache_salt` says whose pins
and programs they are. Read leniently: a hint never fails a request. An action whose payload has a
`session_id` is about that session, and not about the request that brings it.
"""

import hashlib
import json
from typing import Any, NamedTuple

from rootstock import Hints
from rootstock.actions import add_actions, kind_of, names_a_program, payload_of, seconds_of


class Order(NamedTuple):
    """A verb about the prefixes of a program."""

    kind: str
    program: int
    priority: int
    seconds: int | None


class _Own(NamedTuple):
    """The actions of an envelope that are about the request itself."""

    actions: list


def hints_of(request: Any) -> Hints | None:
    """The hints of a request, read once and kept with it; None when it says nothing."""
    try:
        return request._rootstock_hints
    except AttributeError:
        pass
    try:
        hints = _read(request)
    except (TypeError, ValueError):
        hints = None
    request._rootstock_hints = hints
    return hints


def _read(request: Any) -> Hints | None:
    if not (request.kv_hints or request.session_id):
        return None
    nvext: dict[str, Any] = {"agent_hints": {}}
    agent = nvext["agent_hints"]
    if request.kv_hints:
        own = [one for one in request.kv_hints.actions if not _is_order(one)]
        add_actions(_Own(own), nvext, agent)
    if request.session_id and not names_a_program(nvext, agent):
        agent["program_id"] = request.session_id
    return Hints(json.dumps(nvext, default=str), prompt_tokens=len(request.origin_input_ids))


def program_of(request: Any) -> int | None:
    """The number of a request's program."""
    hints = hints_of(request)
    if hints is None or not hints.program:
        return None
    return _number(hints.program, request)


def _number(name: str, request: Any) -> int:
    """One name is another program under another salt."""
    named = f"{request.cache_salt or ''}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")


def _is_order(action: Any) -> bool:
    named = payload_of(action).get("session_id")
    is_prefetch = kind_of(action) == "prefetch"
    return is_prefetch or (isinstance(named, str) and named != "")


def orders_of(request: Any) -> list[Order]:
    """The verbs of a request that are about programs by name, its own included."""
    orders = []
    for action in request.kv_hints.actions if request.kv_hints else ():
        payload = payload_of(action)
        name = payload.get("session_id") or payload.get("program_id") or request.session_id
        if not _is_order(action) or not isinstance(name, str) or not name:
            continue
        try:
            orders.append(_order(kind_of(action), payload, _number(name, request)))
        except (TypeError, ValueError):
            continue
    return orders


def _order(kind: str, payload: dict[str, Any], program: int) -> Order:
    seconds = payload.get("seconds")
    if kind == "pin":
        # The core's own reader knows the forms of a time, its default and its limit.
        ttl = seconds_of(payload)
        control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl is not None else {})
        spans = Hints(json.dumps({"cache_control": control}), prompt_tokens=1).pin_spans
        seconds = spans[0][1] if spans else None
    priority = max(-(1 << 31), min(int(payload.get("priority", 1)), (1 << 31) - 1))
    seconds = None if seconds is None else max(0, min(int(seconds), (1 << 32) - 1))
    return Order(kind, program, priority, seconds)
