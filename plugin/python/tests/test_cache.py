"""The cache over buffers: what an engine in Python would do, on arrays and memoryviews."""

import array
import json
import threading

import pytest

from rootstock import Cache, Hints


def ids(count: int) -> array.array:
    return array.array("i", [0] * count)


def prompt(length: int, first: int = 0) -> array.array:
    return array.array("i", range(first, first + length))


def made(pages: int = 64, **settings) -> tuple[Cache, int]:
    cache = Cache(pages, policy="lru", **settings)
    return cache, cache.namespace("model")


def test_one_call_matches_keeps_allocates_and_writes_the_pages():
    cache, ns = made()
    pages = ids(5)
    request, cached = cache.begin(ns, prompt(70), pages, now_ns=1)
    assert cached == 0 and sorted(set(pages)) == sorted(pages) and 0 not in pages
    assert cache.commit(request, 70, pages, now_ns=2) is False
    cache.end(request, now_ns=3)
    again = ids(5)
    request, cached = cache.begin(ns, prompt(70), again, now_ns=4)
    assert cached == 64 and again[:4] == pages[:4]
    cache.end(request)
    cache.check()
    assert json.loads(cache.stats())["lookups"] == 2


def test_a_page_computed_twice_changes_the_table_of_the_second():
    cache, ns = made()
    one, two = ids(2), ids(2)
    first, _ = cache.begin(ns, prompt(32), one)
    second, _ = cache.begin(ns, prompt(32), two)
    assert not set(one) & set(two)
    assert cache.commit(first, 32, one) is False
    assert cache.commit(second, 32, two) is True
    assert two == one
    cache.end(first)
    cache.end(second)
    cache.check()
    assert cache.available() == 64


def test_generated_tokens_are_found_by_the_next_turn():
    cache, ns = made()
    pages = ids(8)
    request, _ = cache.begin(ns, prompt(20), pages)
    for token in range(20, 60):
        cache.append(request, array.array("i", [token]), pages)
    cache.commit(request, 60, pages)
    cache.end(request)
    assert cache.probe(ns, prompt(60)) == 48
    assert cache.probe(cache.namespace("model", salt="other"), prompt(60)) == 0


def test_too_much_is_refused_with_its_numbers_and_changes_nothing():
    cache, ns = made(pages=4)
    held, _ = cache.begin(ns, prompt(48), ids(3))
    with pytest.raises(MemoryError, match="4 pages needed: 1 free"):
        cache.begin(ns, prompt(60, 500), ids(4))
    cache.end(held)
    held, _ = cache.begin(ns, prompt(16), ids(1))
    other = cache.namespace("other")
    with pytest.raises(ValueError, match="room for 1, 2 are needed"):
        cache.begin(other, prompt(32, 500), ids(1))
    with pytest.raises(ValueError, match="no buffer of 32-bit integers"):
        cache.begin(ns, [1, 2, 3], ids(1))
    with pytest.raises(ValueError, match="negative"):
        cache.begin(ns, array.array("i", [-1]), ids(1))
    with pytest.raises(KeyError, match="request 99"):
        cache.end(99)
    cache.check()
    assert cache.available() == 3
    cache.end(held)


def test_a_pin_outlives_a_flood_until_its_time():
    cache, ns = made(pages=16)
    request, _ = cache.begin(ns, prompt(64), ids(4), now_ns=0)
    cache.commit(request, 64, ids(4), now_ns=0)
    cache.end(request, now_ns=0)
    assert cache.pin(ns, prompt(64), 60, now_ns=0) == "accepted"
    for flood in range(1, 20):
        other = prompt(96, 1000 * flood)
        request, _ = cache.begin(ns, other, ids(6), now_ns=flood)
        cache.commit(request, 96, ids(6), now_ns=flood)
        cache.end(request, now_ns=flood)
    assert cache.probe(ns, prompt(64)) == 64


def test_threads_may_share_a_cache():
    cache, ns = made(pages=4096)
    text = prompt(16_000)

    def work():
        for _ in range(20):
            pages = ids(1000)
            request, _ = cache.begin(ns, text, pages)
            cache.commit(request, 16_000, pages)
            cache.end(request)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check()
    assert cache.probe(ns, text) == 16_000


def test_policies_are_named_and_hints_are_read_leniently():
    with pytest.raises(ValueError, match='policy is "best"'):
        Cache(4, policy="best")
    hints = Hints('{"agent_hints": {"priority": 7, "osl": "many"}, "new": 1}')
    assert hints.priority == 7 and len(hints.ignored) == 2
    with pytest.raises(ValueError):
        Hints("no json")
