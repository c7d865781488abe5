"""One engine of SGLang on a CPU, driven by scenarios: sglang_engine.py MODEL SCENARIO [JSON flags]

Prints one JSON line for each answer. The model is random, with weights large enough that every
token of the prompt changes the answer.
"""

import asyncio
import json
import os
import sys

BASE = [1, *range(10, 170)]
OTHER = [1, *range(410, 570)]
END = [5, 6, 7]
SIZES = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.4,
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "log_level": "info",
    "page_size": 16,
}
HOST = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
}


def make_model(folder):
    """Saves the random model, once."""
    if os.path.exists(os.path.join(folder, "model.safetensors")):
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1024, max_position_embeddings=2048,
        initializer_range=0.25, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Driver:
    """Asks, and prints what comes back."""

    def __init__(self, model, **flags):
        import sglang

        self.engine = sglang.Engine(model_path=model, **(SIZES | flags))

    def ask(self, tag, tokens, new=6, **more):
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        answer = self.engine.generate(
            input_ids=tokens, sampling_params=sampling, return_logprob=True, **more
        )
        meta = answer["meta_info"]
        self.tell(
            tag,
            tokens=answer["output_ids"],
            logprobs=[round(one[0], 3) for one in meta["output_token_logprobs"]],
            cached=meta["cached_tokens"],
            host=(meta["cached_tokens_details"] or {}).get("host", 0),
        )

    def tell(self, tag, **fields):
        print("ANSWER " + json.dumps({"tag": tag} | fields), flush=True)

    def flood(self, count=6, start=0):
        for k in range(start, start + count):
            self.ask("flood", [2, *((k * 97 + j * 13) % 1000 + 3 for j in range(200))], new=2)

    def together(self, requests):
        """`requests`: (tag, tokens, tokens to compute, seconds before it is asked, more).

        The seconds of all but the first count from the first one's first token.
        """
        begun = asyncio.Event()

        async def one(tag, tokens, new, delay, more):
            sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
            if tag != requests[0][0]:
                await begun.wait()
                await asyncio.sleep(delay)
            try:
                answers = await self.engine.async_generate(
                    input_ids=tokens, sampling_params=sampling, stream=True, **more
                )
                async for answer in answers:
                    begun.set()
            except Exception as error:
                self.tell(tag, error=str(error)[:200])
                return
            reason = answer["meta_info"]["finish_reason"]
            self.tell(
                tag,
                tokens=answer["output_ids"],
                cached=answer["meta_info"]["cached_tokens"],
                reason=reason["type"],
                message=reason.get("message"),
            )

        async def all_of_them():
            await asyncio.gather(*(one(*request) for request in requests))

        self.engine.loop.run_until_complete(all_of_them())


def hint(*actions):
    """A `kv_hints` envelope."""
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {"action_id": str(k), "action_type": kind, "action_version": "1", "payload": payload}
            for k, (kind, payload) in enumerate(actions)
        ],
    }


def tiers(driver):
    """Cold, from the device, and from the host tier after a flood."""
    driver.ask("cold", BASE + END)
    driver.ask("device", BASE + END)
    driver.ask("other", OTHER + END)
    driver.flood()
    driver.ask("host", BASE + END)


def agents(driver):
    """Pins, the end of a program, and who goes first."""
    driver.ask("pin", BASE + END, kv_hints=hint(("pin", {"ttl": 600, "program_id": "p"})))
    driver.flood()
    driver.ask("pinned", BASE + END)
    driver.ask("last", [3, 4, 5], kv_hints=hint(("release", {"program_id": "p"})))
    driver.flood(start=10)
    driver.ask("released", BASE + END)
    # The flood is older than what the program used, and yet stays longer.
    driver.engine.flush_cache()
    driver.flood(1)
    driver.ask("over", OTHER + END, kv_hints=hint(("release", {"program_id": "q"})))
    driver.flood(1, start=20)
    driver.flood(1)
    driver.ask("gone", OTHER + END)
    driver.ask("warm", BASE + END)
    far = [[2, *((k * 31 + j * 7) % 1000 + 3 for j in range(60))] for k in range(3)]
    driver.together(
        [
            ("running", far[0], 240, 0, {"priority": 0}),
            ("low", far[1], 4, 0, {"priority": 0}),
            ("high", far[2], 4, 0.01, {"priority": 10}),
            ("low cached", BASE + [9], 4, 0.02, {"priority": 0}),
        ]
    )


def sessions(driver):
    """Verbs about a session by name, over a host tier that a flood fills twice. What is pinned
    leaves the device for a prompt that needs nearly all of it."""
    big = [2, *((j * 11) % 1000 + 3 for j in range(440))]
    driver.ask("first", BASE + END, session_id="s")
    driver.ask("other", OTHER + END, session_id="t")
    driver.ask("verb", [3, 4, 5], kv_hints=hint(("pin", {"session_id": "s", "ttl": 600})))
    driver.flood(24)
    driver.ask("big", big, new=2)
    driver.ask("verb", [4, 5, 6], kv_hints=hint(("prefetch", {"session_id": "s"})))
    driver.ask("pinned", BASE + END)
    driver.ask("not pinned", OTHER + END)
    driver.ask("big", [3, *big[1:]], new=2)
    driver.ask("from host", BASE + END)
    driver.ask("verb", [5, 6, 7], kv_hints=hint(("release", {"session_id": "s"})))
    driver.flood(24, start=40)
    driver.ask("released", BASE + END)


def agent(driver):
    """A program goes on without a part of its prompt, while another's is older."""
    driver.ask("older", OTHER + END, new=1)
    driver.ask("turn 1", BASE + END, new=1, session_id="p")
    driver.ask("turn 2", BASE[:96] + list(range(800, 864)) + END, new=1, session_id="p")
    driver.ask("room", [2, *range(600, 730)], new=1)
    driver.ask("older again", OTHER + END, new=1)
    # What is retained outlasts what is younger.
    retain = hint(("retain", {"priority": 5, "seconds": 600}))
    driver.ask("retained", BASE + END, new=1, kv_hints=retain)
    driver.flood(4)
    driver.ask("retained again", BASE + END, new=1)


def queue(driver):
    """One that waits for long, and a long queue with one in it whose prefix is cached."""
    far = [[2, *((k * 31 + j * 7) % 1000 + 3 for j in range(60))] for k in range(3)]
    driver.together(
        [
            ("running", far[0], 300, 0, {"priority": 0}),
            ("aged", far[1], 1, 0, {"priority": 0}),
            ("high", far[2], 1, 0.25, {"priority": 3}),
        ]
    )


def long_queue(driver):
    """More wait than SGLang would order, and the last one's prefix is cached."""
    driver.ask("warm", BASE + END, new=1)
    cold = [(f"cold {k}", [3, k % 1000 + 3, 5, 6], 1, 0, {}) for k in range(150)]
    driver.together(
        [("running", [2, 4, 6, 8], 220, 0, {}), *cold, ("cached", BASE + [9], 1, 0.02, {})]
    )


def retraction(driver):
    """Two that run and give way again and again, and one more, with a queue for one."""
    prompts = [[2, *((k * 97 + j * 13) % 1000 + 3 for j in range(40))] for k in range(3)]
    sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}

    async def one(k, running):
        try:
            answers = await driver.engine.async_generate(
                input_ids=prompts[k], sampling_params=sampling, stream=True
            )
            tokens = []
            async for answer in answers:
                tokens = answer["output_ids"]
                running[k].set()
        except Exception as error:
            running[k].set()
            driver.tell(f"{k}", error=str(error)[:200])
            return
        reason = answer["meta_info"]["finish_reason"]
        driver.tell(
            f"{k}",
            tokens=tokens,
            reason=reason["type"],
            message=reason.get("message"),
            cached=answer["meta_info"]["cached_tokens"],
            retracted=answer["meta_info"].get("num_retractions"),
        )

    async def all_of_them():
        running = [asyncio.Event() for _ in prompts]
        first = [asyncio.ensure_future(one(0, running))]
        # The queue is for one: what comes while another waits would be refused rightly.
        await running[0].wait()
        first.append(asyncio.ensure_future(one(1, running)))
        await running[1].wait()
        await asyncio.gather(*first, one(2, running))

    driver.engine.loop.run_until_complete(all_of_them())
    for k, prompt in enumerate(prompts):
        driver.ask(f"alone {k}", prompt, new=60)


SCENARIOS = {
    "tiers": tiers,
    "agents": agents,
    "sessions": sessions,
    "agent": agent,
    "queue": queue,
    "long queue": long_queue,
    "retraction": retraction,
}


def main():
    model, scenario = sys.argv[1:3]
    flags = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    make_model(model)
    driver = Driver(model, **flags)
    SCENARIOS[scenario](driver)
    driver.engine.shutdown()


if __name__ == "__main__":
    main()
