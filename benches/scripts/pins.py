#!/usr/bin/env python3
"""Does a pinned conversation survive a flood, and what does it cost the flood?

For each depth (turns of at most 450 tokens) four runs on a freshly started server, in turn:

  cold      the last turn alone, nothing cached
  kept      the turns before it, then at once the last turn: never evicted
  pinned    the turns with a pin (nvext.cache_control), a flood of unrelated requests of three times
            the KV cache, then the last turn
  unpinned  the same without the pin

and the whole again, --rounds times. Recovered = (cold - pinned) / (cold - kept) of the time to the
first token. The cost to the flood is counted in tokens and steps computed, which no noise touches.

Only the standard library is used. Example, as recorded:

  benches/scripts/pins.py --binary target/release/rootstock --json benches/record/.../pins.json
"""

import argparse
import json
import random
import statistics
import sys
import time

from served import Server, text


def start(args, *flags):
    return Server(args.binary, "--kv-cache-mib", str(args.kv_cache_mib),
                  "--host-kv-mib", str(args.host_kv_mib), *args.flag, *flags)


def chat(server, messages, max_tokens, pin=None):
    fields = {"nvext": {"cache_control": {"type": "ephemeral", "ttl": pin}}} if pin else {}
    return server.chat(messages, max_tokens, ignore_eos=True, **fields)


def counters(server):
    return server.counters("computed_tokens", "steps")


def warm(server, args, rng, depth, pin):
    """All turns but the last; gives the messages with the last question added."""
    messages = [{"role": "system", "content": text(rng, 40)}]
    for _turn in range(depth):
        messages.append({"role": "user", "content": text(rng, args.turn_words)})
        _, answer, _ = chat(server, messages, args.answer_tokens, pin)
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": text(rng, 24)})
    return messages


def flood(server, args):
    """Unrelated requests of about 150 tokens, three times what the KV cache holds."""
    rng = random.Random(99)
    before, start = counters(server), time.perf_counter()
    count = -(-server.pages * server.page_tokens * 3 // 150)
    for _ in range(count):
        chat(server, [{"role": "user", "content": text(rng, 95)}], 8)
    after = counters(server)
    cost = {name: after[name] - before[name] for name in after}
    return {"requests": count, "seconds": time.perf_counter() - start, **cost}


def run(args, depth, kind):
    with start(args) as server:
        rng = random.Random(depth)
        chat(server, [{"role": "user", "content": "Hello."}], 4)
        result = {"depth": depth, "kind": kind}
        if kind == "cold":
            messages = args.transcripts[depth]
        else:
            messages = warm(server, args, rng, depth, "1h" if kind == "pinned" else None)
            args.transcripts[depth] = messages
        if kind in ("pinned", "unpinned"):
            result["flood"] = flood(server, args)
        first, answer, usage = chat(server, messages, 8)
        details = usage.get("prompt_tokens_details") or {}
        result.update(ttft=first, answer=answer, prompt_tokens=usage["prompt_tokens"],
                      cached_tokens=details.get("cached_tokens", 0))
        return result


def report(results, depths):
    print("\ndepth  prompt  cached: kept pinned unpinned   TTFT ms: cold  kept  pinned  unpinned"
          "   recovered  unpinned/pinned  flood tokens  flood steps  flood seconds")
    for depth in depths:
        of = lambda kind: [r for r in results if r["depth"] == depth and r["kind"] == kind]
        ttft = {k: statistics.median(r["ttft"] for r in of(k)) * 1e3
                for k in ("cold", "kept", "pinned", "unpinned")}
        cached = {k: of(k)[-1]["cached_tokens"] for k in ttft}
        recovered = (ttft["cold"] - ttft["pinned"]) / (ttft["cold"] - ttft["kept"])
        ratio = lambda name: (sum(r["flood"][name] for r in of("pinned"))
                              / sum(r["flood"][name] for r in of("unpinned")))
        print(f"{depth:5}  {of('kept')[-1]['prompt_tokens']:6}  {cached['kept']:12} "
              f"{cached['pinned']:6} {cached['unpinned']:8}   {ttft['cold']:13.0f} "
              f"{ttft['kept']:5.0f} {ttft['pinned']:7.0f} {ttft['unpinned']:9.0f}   "
              f"{recovered:9.3f}  {ttft['unpinned'] / ttft['pinned']:15.1f}  "
              f"{ratio('computed_tokens'):12.4f}  {ratio('steps'):11.4f}  {ratio('seconds'):13.3f}")
        answers = {r["answer"] for r in results if r["depth"] == depth}
        if len(answers) > 1:
            print(f"       answers differ: {answers}")


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("--binary", default="target/release/rootstock")
    flags.add_argument("--kv-cache-mib", type=int, default=192)
    flags.add_argument("--host-kv-mib", type=int, default=384)
    flags.add_argument("--depths", default="2,6,10,16")
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--turn-words", type=int, default=230)
    flags.add_argument("--answer-tokens", type=int, default=40)
    flags.add_argument("--flag", action="append", default=[], help="passed to the server, repeatable")
    flags.add_argument("--json", help="where the single results go")
    args = flags.parse_args()
    args.transcripts = {}
    depths = [int(depth) for depth in args.depths.split(",")]
    results = []
    for turn in range(args.rounds):
        for depth in depths:
            for kind in ("kept", "pinned", "unpinned", "cold"):
                result = run(args, depth, kind)
                results.append(result)
                print(turn, json.dumps({k: v for k, v in result.items() if k != "answer"}), flush=True)
    report(results, depths)
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"command": sys.argv, "results": results}, out, indent=1)


if __name__ == "__main__":
    main()
