"""pytest -p grafted: vLLM's own tests with Rootstock's pool, policy lru.

The plug-in does what the entry point does in an engine, and beyond it gives the pool to tests that
make one themselves. GRAFTED_SCHEDULER=1 gives them the scheduler too. At the end it says how
many pools were made and what they did, so that a run that grafted nothing is seen.
"""

import os
import pathlib

import rootstock.vllm as grafted
from rootstock.vllm import pool as ours
from rootstock.vllm.settings import Settings

made = {"pools": 0, "lookups": 0, "hits": 0, "blocks": 0, "freed": 0}


class CountedPool(ours.BlockPool):
    """Rootstock's pool, recounted from scratch whenever something is given back."""

    def __init__(self, *args, **kwargs):
        kwargs["settings"] = Settings(policy="lru")
        super().__init__(*args, **kwargs)
        made["pools"] += 1

    def find(self, *args):
        found = super().find(*args)
        made["lookups"] += 1
        made["hits"] += len(found)
        return found

    def get_new_blocks(self, num_blocks):
        made["blocks"] += num_blocks
        return super().get_new_blocks(num_blocks)

    def free_blocks(self, ordered_blocks):
        ordered = list(ordered_blocks)
        made["freed"] += len(ordered)
        super().free_blocks(ordered)
        self.rootstock.check()


ours.BlockPool = CountedPool
grafted.register()

if os.environ.get("GRAFTED_DIRECT"):
    import vllm.v1.core.block_pool as stock

    stock.BlockPool = CountedPool

if os.environ.get("GRAFTED_SCHEDULER"):
    from rootstock.vllm import scheduling
    from vllm.v1.core.sched import async_scheduler, scheduler

    scheduling.BlockPool = CountedPool
    scheduler.Scheduler = scheduling.AgentScheduler
    async_scheduler.AsyncScheduler = scheduling.AgentAsyncScheduler


def pytest_collection_modifyitems(config, items):
    """Leaves out what `private.txt` names, all its cases and no other test."""
    text = (pathlib.Path(__file__).parent / "private.txt").read_text()
    private = {line.split()[0] for line in text.splitlines() if line and line[0] != "#"}
    out = [one for one in items if f"{one.path.name}::{one.originalname}" in private]
    config.hook.pytest_deselected(items=out)
    items[:] = [one for one in items if one not in out]


def pytest_terminal_summary(terminalreporter):
    line = ", ".join(f"{name} {count}" for name, count in made.items())
    terminalreporter.write_line(f"grafted: {line}")
