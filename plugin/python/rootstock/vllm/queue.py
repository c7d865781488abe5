"""The queue of waiting requests: by tier, priority, and arrival with what a cached prefix saves.

Waiting raises the tier, so nobody waits for ever. Keys are computed once a step.
"""

import bisect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

Key = tuple[float, ...]

# Requests at the head for which the cache is asked in one step.
PROBED = 64


class AgentQueue(RequestQueue):
    """Orders by (tier and age, vLLM's priority, arrival less what is saved, arrival, id)."""

    def __init__(
        self, hints_of: Callable[[Any], Any], cached_tokens: Callable[[Any], int], settings: Any
    ) -> None:
        self._hints_of = hints_of
        self._cached_tokens = cached_tokens
        self._settings = settings
        self._items: list[tuple[Key, Any]] = []
        self._now = time.monotonic()

    def refresh(self) -> None:
        """A step begins: ages and savings are those of now."""
        self._now = time.monotonic()
        if len(self._items) < 2:
            return
        self._items = [
            (self._key(request, at < PROBED), request)
            for at, (_, request) in enumerate(self._items)
        ]
        self._items.sort(key=lambda item: item[0])

    def _key(self, request: Any, probe: bool) -> Key:
        hints = self._hints_of(request)
        waited = max(0.0, self._now - self._queued(request))
        strict = hints.strict if hints is not None else 0
        tier = strict + int(waited / self._settings.aging_s)
        jump = hints.jump_s if hints is not None else 0.0
        saved = 0.0
        if probe:
            saved = self._cached_tokens(request) / self._settings.prefill_tokens_per_s
        arrival = request.arrival_time - jump - min(saved, self._settings.aging_s)
        return (-tier, request.priority, arrival, request.arrival_time)

    @staticmethod
    def _queued(request: Any) -> float:
        """When the request came here first; what a client says of its arrival only orders."""
        try:
            return request._rootstock_queued
        except AttributeError:
            request._rootstock_queued = time.monotonic()
            return request._rootstock_queued

    def add_request(self, request: Any) -> None:
        key = self._key(request, len(self._items) < PROBED)
        at = bisect.bisect(self._items, key, key=lambda item: item[0])
        self._items.insert(at, (key, request))

    def pop_request(self) -> Any:
        if not self._items:
            raise IndexError("pop from an empty queue")
        return self._items.pop(0)[1]

    def peek_request(self) -> Any:
        if not self._items:
            raise IndexError("peek from an empty queue")
        return self._items[0][1]

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        before = len(self._items)
        self._items = [item for item in self._items if item[1] is not request]
        if len(self._items) == before:
            raise ValueError(f"request {request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = {request.request_id for request in requests}
        self._items = [item for item in self._items if item[1].request_id not in gone]

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: int) -> Any:
        return self._items[at][1]

    def __iter__(self) -> Iterator[Any]:
        return iter([request for _, request in self._items])
