"""Our tree core against SGLang's two: the same operations, the same answers."""

import logging

import pytest
from sglang_cores import Rig, make_cache

MODES = ("device", "through", "selective", "back")
POLICIES = ("lru", "lfu", "slru", "priority", "tlru")
PAGES = (1, 16, 64)

# For every mode, policy and page size; 10,200 in all.
OPERATIONS = 170


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_three_cores_give_the_same_answers(mode, policy, page):
    numbers = {"threshold": 3 * page, "next_prompt_estimate": page}
    rig = Rig(page, policy, mode, seed=page, config=numbers if policy == "tlru" else None)
    for count in range(OPERATIONS):
        rig.step()
        if count % 50 == 49:
            rig.check_deeply()
        if count == OPERATIONS // 2:
            rig.restart()
    rig.restart()
    assert rig.done["inserted"] and rig.done["evicted"] and rig.done["hits"]
    if mode != "device":
        assert rig.done["evicted from host"] or rig.done["host hits"]


def test_a_core_that_answers_otherwise_is_noticed():
    rig = Rig(1, "lru", "device", seed=1)
    stock = rig.cores[0].evict_device_next_node

    def other(component, tracker):
        first, second = stock(component, tracker), stock(component, tracker)
        return second if second.node_id is not None else first

    rig.cores[0].evict_device_next_node = other
    with pytest.raises(AssertionError):
        for _ in range(OPERATIONS):
            rig.step()


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"is_eagle": True}, "EAGLE"), ({"enable_session_radix_cache": True}, "sessions")],
)
def test_what_we_do_not_serve_runs_on_stock_with_a_line_in_the_log(asked, why, caplog):
    with caplog.at_level(logging.WARNING, logger="rootstock.sglang"):
        cache = make_cache("rootstock", **asked)
    assert type(cache.tree_core).__module__.startswith("sglang.")
    assert any(why in record.getMessage() for record in caplog.records)
