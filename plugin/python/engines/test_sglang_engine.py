"""SGLang's engine on a CPU with our tree core: the KV is right, pins last, and nobody is refused.

Each scenario is one engine in a process of its own (`sglang_engine.py`). Where a host tier is
needed, `sglang_cpu` lets SGLang's run without a GPU.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from sglang_engine import HOST

HERE = pathlib.Path(__file__).parent
OURS = "rootstock"
STOCK = "rust"
PRIORITY = {
    "enable_priority_scheduling": True,
    "max_running_requests": 1,
    "default_priority_value": 0,
}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """What runs SGLang on a CPU, with the entry point that loads it."""
    folder = tmp_path_factory.mktemp("plugins")
    for source in (HERE / "sglang_cpu").rglob("*.py"):
        target = folder / source.relative_to(HERE / "sglang_cpu")
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    info = folder / "host_tier-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: host_tier\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nhost_tier = host_tier:register\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(plugins, model):
    def run(scenario, flags, backend=OURS, **env):
        path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
        env = os.environ | env | {
            "PYTHONPATH": path,
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": backend,
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-W", "ignore", str(HERE / "sglang_engine.py")]
        done = subprocess.run(
            [*command, model, scenario, json.dumps(flags)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # Lines of the engine's other processes come in between, and sometimes on the same line.
        parts = done.stdout.split("ANSWER ")[1:]
        told = [json.JSONDecoder().raw_decode(part)[0] for part in parts]
        assert done.returncode == 0, done.stdout[-4000:]
        if backend == OURS:
            assert "Rootstock" in done.stdout
            assert "Tree Core: RootstockTreeCore" in done.stdout
        return told

    return run


def named(told):
    return {one["tag"]: one for one in told}


def test_kv_from_the_host_tier_gives_the_same_tokens_and_logprobs(run):
    told = named(run("tiers", HOST))
    cold, device, host = told["cold"], told["device"], told["host"]
    assert (cold["cached"], device["cached"], host["cached"]) == (0, 160, 160)
    assert (device["host"], host["host"]) == (0, 160)
    for found in (device, host):
        assert (found["tokens"], found["logprobs"]) == (cold["tokens"], cold["logprobs"])
    assert told["other"]["tokens"] != cold["tokens"], "the prefix decides what comes out"


def test_wrong_kv_would_be_noticed(run):
    told = named(run("tiers", HOST, HOST_TIER_FACTOR="0"))
    assert told["device"]["tokens"] == told["cold"]["tokens"]
    assert told["host"]["host"] == 160
    assert told["host"]["tokens"] != told["cold"]["tokens"]


def test_pins_programs_and_priority(run):
    settings = json.dumps({"pin_budget": 0.5, "prefill_tokens_per_s": 50})
    told = run("agents", PRIORITY, ROOTSTOCK=settings)
    found = named(told)
    assert found["pinned"]["cached"] == 160, "the pin outlasted the flood"
    assert found["pinned"]["tokens"] == found["pin"]["tokens"]
    assert found["released"]["cached"] == 0, "the program is over"
    assert found["gone"]["cached"] == 0
    after = [one["tag"] for one in told].index("over") + 2
    assert told[after]["cached"] == 192, "an older prompt stays longer than a finished program"
    order = [one["tag"] for one in told if one["tag"] in ("low", "high", "low cached")]
    assert order == ["high", "low cached", "low"]


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_verbs_about_a_session_by_name_over_the_host_tier(run, write_policy):
    told = run("sessions", HOST | {"hicache_write_policy": write_policy})
    found = named(told)
    first = found["first"]
    # The pin went to the host tier under pressure, and the prefetch brought it back.
    for tag, host in (("pinned", 0), ("from host", 160)):
        assert (found[tag]["cached"], found[tag]["host"]) == (160, host), tag
        assert found[tag]["tokens"] == first["tokens"], tag
        assert found[tag]["logprobs"] == first["logprobs"], tag
    assert found["not pinned"]["cached"] == 0, "the flood was one for both tiers"
    assert found["released"]["cached"] == 0


@pytest.mark.parametrize(("policy", "older"), [("agent", 160), ("lru", 0)])
def test_what_a_program_went_on_without_goes_first(run, policy, older):
    found = named(run("agent", {"radix_eviction_policy": policy}))
    assert found["turn 2"]["cached"] == 96
    assert found["older again"]["cached"] == older
    assert found["retained again"]["cached"] == 160, "retention is heard whatever the policy"


def test_who_waits_for_long_overtakes_the_more_important(run):
    told = run("queue", PRIORITY, ROOTSTOCK=json.dumps({"aging_s": 0.05}))
    assert [one["tag"] for one in told] == ["running", "aged", "high"]


def test_the_cached_prefix_goes_first_in_a_long_queue_too(run):
    flags = {"schedule_policy": "lpm", "max_running_requests": 1}
    order = [one["tag"] for one in run("long queue", flags)]
    assert len(order) == 153
    assert order[:3] == ["warm", "running", "cached"]


def test_stock_evicts_what_a_request_asked_to_pin(run):
    told = run("agents", PRIORITY, backend=STOCK)
    assert named(told)["pinned"]["cached"] == 0
    after = [one["tag"] for one in told].index("over") + 2
    assert told[after]["cached"] < 192


def test_who_gave_way_is_not_refused_and_goes_on_as_if_alone(run):
    flags = {"max_running_requests": 2, "max_queued_requests": 1}
    told = named(run("retraction", flags, SGLANG_TEST_RETRACT="1"))
    for tag in "012":
        assert told[tag].get("reason") == "length", told[tag]
        assert told[tag]["tokens"] == told[f"alone {tag}"]["tokens"]
