#!/usr/bin/env python3
"""What background copies to the host tier cost a server at full load.

Eight clients send unrelated prompts without a pause, first to a server without a host tier, then to one
that copies every page down (--write-policy through), in turn, --rounds times, each on a fresh server.
Steps and computed tokens are the same; what is compared is the time of a step and the whole time.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time

import pins
from served import text


def run(args, host):
    args.host_kv_mib = 512 if host else 0
    with pins.start(args, "--write-policy", "through") as server:
        pins.chat(server, [{"role": "user", "content": "Hello."}], 4)

        def client(seed):
            rng = random.Random(seed)
            for _ in range(args.requests):
                message = {"role": "user", "content": text(rng, 300)}
                pins.chat(server, [message], 16)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        return {"host": host, "seconds": seconds, "steps": server.metric("steps_total"),
                "computed_tokens": server.metric("computed_tokens_total"),
                "step_seconds": server.metric("step_seconds_sum")}


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--binary", default="target/release/rootstock")
    flags.add_argument("--kv-cache-mib", type=int, default=192)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--requests", type=int, default=4)
    flags.add_argument("--flag", action="append", default=[])
    flags.add_argument("--json")
    args = flags.parse_args()
    results = []
    for _ in range(args.rounds):
        for host in (False, True):
            results.append(run(args, host))
            print(json.dumps(results[-1]), flush=True)
    of = lambda host, name: statistics.median(r[name] for r in results if r["host"] == host)
    for name in ("step_seconds", "seconds", "steps", "computed_tokens"):
        print(f"{name}: {of(False, name):.2f} without, {of(True, name):.2f} with copies, "
              f"ratio {of(True, name) / of(False, name):.3f}")
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"command": sys.argv, "results": results}, out, indent=1)


if __name__ == "__main__":
    main()
