"""What a request of SGLang says, as the hints of the core.

They come from `kv_hints` (pin, release) and `session_id`, which names the program; `cache_salt`
says whose pins and programs they are. Read leniently: a hint never fails a request.
"""

import hashlib
import json
from typing import Any

from rootstock import Hints
from rootstock.actions import add_actions, names_a_program


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
        add_actions(request.kv_hints, nvext, agent)
    if request.session_id and not names_a_program(nvext, agent):
        agent["program_id"] = request.session_id
    return Hints(json.dumps(nvext, default=str), prompt_tokens=len(request.origin_input_ids))


def program_of(request: Any) -> int | None:
    """The number of a request's program: one name is another program under another salt."""
    hints = hints_of(request)
    if hints is None or not hints.program:
        return None
    named = f"{request.cache_salt or ''}\0{hints.program}".encode()
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")
