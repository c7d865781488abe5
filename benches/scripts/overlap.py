#!/usr/bin/env python3
"""What background copies to the host tier cost a server at full load.

Eight clients send unrelated prompts without a pause, first to a server without a host tier, then to one
that copies every page down (--write-policy through), in turn, --rounds times, each on a fresh server.
Steps and computed tokens are the same; what is compared is the time of a step and the whole time.
"""

import argparse
import json
import random
import re
import statistics
import sys
import threading
import time

import pins


def run(args, host):
    args.host_kv_mib = 512 if host else 0
    server = pins.Server(args, ["--write-policy", "through"])
    try:
        server.chat([{"role": "user", "content": "Hello."}], 4)

        def client(seed):
            rng = random.Random(seed)
            for _ in range(args.requests):
                message = {"role": "user", "content": pins.text(rng, 300)}
                server.chat([message], 16)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        page = server.request("GET", "/metrics").read().decode()
        pick = lambda name: float(re.search(rf"^rootstock_{name} ([0-9.e+-]+)", page, re.M)[1])
        return {"host": host, "seconds": seconds, "steps": pick("steps_total"),
                "computed_tokens": pick("computed_tokens_total"),
                "step_seconds": pick("step_seconds_sum")}
    finally:
        server.stop()


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
