#!/usr/bin/env python3
"""What does speculative prefill of the next turn bring, and what does it cost?

--users conversations of --turns turns at a time on one server, --gap seconds between the end of an
answer and the next message (the mean; drawn from half to one and a half of it). Answers are
constrained to the shape of a thinking model's: --think words of thoughts, then --answer words. With
--template FILE (tests/data/thinking_template.jinja) the template strips the thoughts of earlier
turns, so that without the hint each turn computes the last answer anew; without --template the
model's own template is used, thoughts are left out, and nothing is to be gained.

Off and on alternate, --rounds times, each on a freshly started server. Told are the times to the
first token of turns 2 and later, and the tokens the server computed.

Only the standard library is used. Example, as recorded:

  benches/scripts/next_turn.py --binary target/release/rootstock \
    --template tests/data/thinking_template.jinja
"""

import argparse
import json
import random
import statistics
import threading
import time

from served import Server, percentile, text

COUNTERS = ["computed_tokens", *(f"speculative_{what}" for what in (
    "requests", "cached_already", "skipped", "cancelled", "warmed_tokens", "used_tokens",
    "wasted_tokens"))]


def start(args):
    template = ["--chat-template", args.template] if args.template else []
    return Server(args.binary, *args.flag, *template)


def turn(server, args, messages, on):
    thoughts = rf"<think>\n([a-z]{{3,6}} ){{{args.think}}}\n</think>\n\n" if args.template else ""
    pattern = thoughts + rf"([a-z]{{3,6}} ){{{args.answer}}}"
    fields = {"response_format": {"type": "regex", "pattern": pattern}}
    if on:
        fields["nvext"] = {"agent_hints": {"speculative_prefill": True}}
    first, answer, usage = server.chat(messages, 4000, **fields)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first, answer, usage["prompt_tokens"] - cached, usage["completion_tokens"]


def user(server, args, number, on, rows):
    rng = random.Random(args.seed * 1000 + number)
    messages = [{"role": "system", "content": text(random.Random(args.seed), 40)}]
    time.sleep(rng.random() * args.gap)
    for at in range(args.turns):
        messages.append({"role": "user", "content": text(rng, 24)})
        first, answer, fresh, output = turn(server, args, messages, on)
        rows.append((at, first, fresh, output))
        messages.append({"role": "assistant", "content": answer})
        time.sleep(args.gap * (0.5 + rng.random()))


def run(args, on):
    with start(args) as server:
        rows, begin = [], time.monotonic()
        users = [threading.Thread(target=user, args=(server, args, n, on, rows))
                 for n in range(args.users)]
        for one in users:
            one.start()
        for one in users:
            one.join()
        return rows, time.monotonic() - begin, server.counters(*COUNTERS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default="target/release/rootstock")
    parser.add_argument("--template")
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gap", type=float, default=5.0)
    parser.add_argument("--think", type=int, default=200)
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flag", action="append", default=[], help="a further flag of serve")
    parser.add_argument("--json")
    args = parser.parse_args()
    kept = {False: [], True: []}
    for number in range(args.rounds):
        for on in (False, True):
            rows, seconds, counters = run(args, on)
            later = sorted(first for at, first, _, _ in rows if at > 0)
            kept[on].append({"rows": rows, "seconds": seconds, "counters": counters})
            fresh = statistics.mean(fresh for at, _, fresh, _ in rows if at > 0)
            print(f"round {number + 1} {'on ' if on else 'off'}: turns 2+ TTFT p50 "
                  f"{statistics.median(later) * 1e3:.0f} ms, p95 "
                  f"{percentile(later, 0.95) * 1e3:.0f} ms, {fresh:.0f} uncached tokens, "
                  f"{seconds:.0f} s; {counters}", flush=True)
    print()
    print("| | TTFT p50 ms | p95 ms | uncached tokens | computed tokens | seconds |")
    print("|---|---|---|---|---|---|")
    for on in (False, True):
        runs = kept[on]
        later = sorted(first for one in runs for at, first, _, _ in one["rows"] if at > 0)
        fresh = statistics.mean(
            fresh for one in runs for at, _, fresh, _ in one["rows"] if at > 0)
        computed = statistics.mean(one["counters"]["computed_tokens"] for one in runs)
        seconds = statistics.mean(one["seconds"] for one in runs)
        print(f"| {'on' if on else 'off'} | {statistics.median(later) * 1e3:.0f} | "
              f"{percentile(later, 0.95) * 1e3:.0f} | {fresh:.0f} | {computed:.0f} | "
              f"{seconds:.0f} |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"off": kept[False], "on": kept[True]}, file)


if __name__ == "__main__":
    main()
