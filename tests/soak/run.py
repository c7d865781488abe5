#!/usr/bin/env python3
"""A server at full load for as long as wanted, with everything that goes wrong at once.

Agents of all APIs walk the turns of conversations on the default model, plain and streamed, with
pins, priorities, programs and speculative prefill; some hang up in mid-stream, some send nonsense.
Meanwhile pages in the store are cut, damaged, removed and mixed up, the store is detached and
attached, its folder vanishes, pins are made and released. Device, host tier and store are all too
small. A server that nobody else uses has said beforehand what each turn must answer.

What must hold: every text that ends is the one expected; nothing but the nonsense is refused; the
server's memory does not grow from the first quarter to the last; and when all are gone no request,
lease, pin or page is left over.

Usage: run.py BINARY [--seconds N] [--agents N] [--seed N] [--json FILE]. BINARY has the feature
`storage`. Prints results in the form of Rust's test harness. Only the standard library is used.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time

from agents import Agent, Conversations
from chaos import Chaos
from process import Server

GROWTH_MAX = 0.03
LONG_S = 1200


def memory(server, seconds, out, stop):
    """Resident MiB of the server, once a second."""
    end = time.monotonic() + seconds
    while not stop.is_set() and time.monotonic() < end:
        out.append(server.resident_mib())
        time.sleep(1)


def load(args, server, conversations, store):
    stop, agents = threading.Event(), []
    for number in range(args.agents):
        rng = random.Random(f"{args.seed} {number}")
        agents.append(Agent(server.address, conversations, rng, stop))
    chaos = Chaos(server, store, agents, random.Random(f"{args.seed} chaos"), stop)
    resident = []
    watch = threading.Thread(target=memory, args=(server, args.seconds, resident, stop))
    threads = [threading.Thread(target=one.run) for one in (*agents, chaos)]
    for one in (watch, *threads):
        one.start()
    watch.join()
    stop.set()
    for one in threads:
        one.join()
    return agents, chaos, resident


def check_texts(agents):
    wrong = [text for agent in agents for text in agent.wrong]
    done = sum(agent.counts["answered"] for agent in agents)
    assert done >= len(agents), f"only {done} answers"
    assert not wrong, f"{len(wrong)} of {done}: {wrong[:3]}"


def check_refusals(agents, chaos):
    refused = [text for agent in agents for text in agent.refused]
    refused += [chaos.failure] if chaos.failure else []
    assert not refused, f"{len(refused)}: {refused[:3]}"


def check_memory(resident):
    quarter = max(1, len(resident) // 4)
    first, last = statistics.mean(resident[:quarter]), statistics.mean(resident[-quarter:])
    print(f"resident: first quarter {first:.1f} MiB, last {last:.1f} ({last / first - 1:+.2%}), "
          f"most {max(resident):.1f}")
    if len(resident) < LONG_S:
        print(f"  memory is judged from {LONG_S} s on: the pools are touched for the first time before")
    else:
        assert last <= first * (1 + GROWTH_MAX), "the server's memory grows"


def check_idle(server):
    stats = server.until_idle()
    assert stats["pins"]["pages"] == 0, stats["pins"]
    for tier in stats["tiers"]:
        pages = tier["pages"]
        assert pages["leased"] == pages["in_transit"] == 0, tier
        assert pages["free"] + pages["evictable"] + pages["held"] == pages["total"], tier
    assert server.metric("idle_breaches_total") == 0, "a recount did not add up"
    assert server.metric("steps_failed_total") == 0, "steps failed"


def counts(agents, chaos):
    total = {}
    for agent in agents:
        for name, count in agent.counts.items():
            total[name] = total.get(name, 0) + count
    return {**total, **{f"chaos {name}": count for name, count in chaos.counts.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        conversations = Conversations(random.Random(args.seed))
        with Server(args.binary, "--kv-cache-mib", "256") as server:
            conversations.learn(server.address)
        print(f"{len(conversations.all)} conversations")
        store = os.path.join(folder, "store")
        with Server(args.binary, "--kv-cache-mib", "32", "--host-kv-mib", "48", "--max-queue", "64",
                    "--storage", f"fs://{store}", "--storage-mib", "64", "--storage-control", "true",
                    "--write-policy", "through") as server:
            agents, chaos, resident = load(args, server, conversations, store)
            checks = [
                ("soak_every_text_is_the_expected_one", lambda: check_texts(agents)),
                ("soak_nothing_but_nonsense_is_refused", lambda: check_refusals(agents, chaos)),
                ("soak_memory_does_not_grow", lambda: check_memory(resident)),
                ("soak_nothing_is_left_when_all_are_gone", lambda: check_idle(server)),
            ]
            failed = 0
            for name, check in checks:
                try:
                    check()
                    print(f"test {name} ... ok")
                except AssertionError as error:
                    failed += 1
                    print(f"test {name} ... FAILED: {error}")
            told = {**counts(agents, chaos), **server.totals()}
    for name, count in told.items():
        print(f"  {name}: {count}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"counts": told, "resident_mib": resident}, file)
    print(f"test result: {'FAILED' if failed else 'ok'}. {len(checks) - failed} passed; "
          f"{failed} failed; 0 ignored")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
