"""A workflow for `nat run`: conversations that take turns, each a run of its own.

The runs of one `nat run` (one for each --input) are concurrent. They go in lock-step, so that two
runs of it ask for the same things in the same order: in each round every conversation has one turn,
one after the other, and between rounds there is a pause. What each turn was told goes to a file.
"""

import asyncio
import json
import time
import urllib.request

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.function import FunctionBaseConfig

SYSTEM = "You keep the log of a ship and answer in one short sentence. "
STEPS = asyncio.Condition()
DONE = 0


class Turns(FunctionBaseConfig, name="turns"):
    llm: LLMRef
    server: str
    record: str
    conversations: int
    rounds: int
    pause_s: float


def place_of(config, conversation, round_):
    """When a turn is: each round the other way round, so that recency finds something."""
    forth = round_ % 2 == 0
    at = conversation if forth else config.conversations - 1 - conversation
    return round_ * config.conversations + at


async def wait_for(config, place):
    async with STEPS:
        await STEPS.wait_for(lambda: DONE == place)
    if place % config.conversations == 0 and place > 0:
        await asyncio.sleep(config.pause_s)


async def step():
    global DONE
    async with STEPS:
        DONE += 1
        STEPS.notify_all()


def get(config, path):
    with urllib.request.urlopen(config.server + path) as answer:
        return json.load(answer)


def told(config):
    """What the server knows of the program that asked last."""
    programs = get(config, "/v1/kv/programs?limit=1")["programs"]
    tree = get(config, f"/v1/kv/tree?session={programs[0]['id']}") if programs else {"nodes": []}
    return {
        "program": programs[0] if programs else None,
        "priorities": sorted({node["priority"] for node in tree["nodes"]}),
        "pinned_pages": get(config, "/v1/kv/stats")["pins"]["pages"],
    }


@register_function(config_type=Turns, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def turns(config: Turns, builder: Builder):
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def talk(number: str) -> str:
        """Talks about one ship."""
        conversation = int(number)
        own = f"This is ship {conversation}. " + f"Cargo item {conversation} is stowed. " * 12
        messages = [("system", SYSTEM + own)]
        for round_ in range(config.rounds):
            await wait_for(config, place_of(config, conversation, round_))
            said = f"Day {round_} on ship {conversation}. " + "The wind is fair and the sea calm. " * 5
            messages.append(("user", said + "What do we note?"))
            begun = time.monotonic()
            answer = await llm.ainvoke(messages)
            messages.append(("assistant", answer.content))
            usage = answer.usage_metadata
            line = {
                "conversation": conversation,
                "round": round_,
                "prompt": usage["input_tokens"],
                "cached": usage["input_token_details"].get("cache_read", 0),
                "text": answer.content,
                "seconds": time.monotonic() - begun,
                **told(config),
            }
            with open(config.record, "a") as record:
                record.write(json.dumps(line) + "\n")
            await step()
        return str(len(messages))

    yield talk
