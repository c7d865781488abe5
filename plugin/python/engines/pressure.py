"""A real engine under pressure, with or without Rootstock: pressure.py CASE MODEL [stock|ours]

Prints one JSON line. Cases: cyclic (the same prompts in turn, more than fit), priority (important
contexts among a flood), pin (a pinned prefix and a flood), program (a finished one goes first).
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

CYCLE = 8


def prompts(kind: str, count: int, repeat: int = 40) -> list[str]:
    body = "You are a careful assistant. " * repeat
    return [f"{kind} {at}. {body}\nQ: {at}+{at}?\nA:" for at in range(count)]


def engine(model: str, ours: bool, blocks: int, **settings):
    from vllm import LLM

    more = {}
    if ours:
        more["scheduler_cls"] = "rootstock.vllm.scheduler"
        more["additional_config"] = {"rootstock": settings}
    else:
        os.environ["VLLM_PLUGINS"] = ""
    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        block_size=32,
        enable_prefix_caching=True,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        disable_log_stats=False,
        num_gpu_blocks_override=blocks,
        scheduling_policy="priority",
        **more,
    )


def run(llm, texts, tokens=8, priority=None, **extra):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra or None
    )
    start = time.time()
    priority = [priority] * len(texts) if priority is not None else None
    done = llm.generate(texts, params, use_tqdm=False, priority=priority)
    return {
        "cached": [one.num_cached_tokens for one in done],
        "text": [one.outputs[0].text for one in done],
        "seconds": round(time.time() - start, 2),
    }


def cyclic(llm):
    texts = prompts("User", CYCLE)
    return [run(llm, texts, 96), run(llm, texts, 96)]


def one_by_one(llm, texts, tokens=8, **extra):
    return [run(llm, [text], tokens, **extra) for text in texts]


def priority(llm):
    important = prompts("Planner", 2)
    one_by_one(llm, important, priority=-10)
    one_by_one(llm, prompts("Flood", 8), priority=5)
    return one_by_one(llm, important, priority=-10)


def pin(llm):
    pinned = prompts("System", 1)
    one_by_one(llm, pinned, pin_ttl="10m")
    one_by_one(llm, prompts("Flood", 8))
    return one_by_one(llm, pinned)


def program(llm):
    one_by_one(llm, prompts("Kept", 2))
    one_by_one(llm, prompts("Done", 2), program_id="done", session_final=1)
    one_by_one(llm, prompts("Next", 2))
    return one_by_one(llm, prompts("Kept", 2))


CASES = {
    "cyclic": (cyclic, 48, {"policy": "mru"}),
    "priority": (priority, 48, {"policy": "priority"}),
    "pin": (pin, 64, {"policy": "lru", "pin_budget": 0.3}),
    "program": (program, 36, {"policy": "lru"}),
}


def main(case: str, model: str, who: str = "ours", policy: str | None = None) -> None:
    play, blocks, settings = CASES[case]
    if policy:
        settings = settings | {"policy": policy}
    llm = engine(model, who == "ours", blocks, **settings)
    rounds = play(llm)
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name in ("vllm:prefix_cache_hits", "vllm:num_preemptions")
    }
    line = {"case": case, "who": who, "settings": settings if who == "ours" else None}
    line["cached"] = [turn["cached"] for turn in rounds]
    line["seconds"] = [turn["seconds"] for turn in rounds]
    line["texts"] = [turn["text"] for turn in rounds]
    print(json.dumps(line | counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
