#!/usr/bin/env python3
"""Do four real replicas confirm the order of the router's modes?

Each mode on a freshly started server with --replicas 4 and no host tier: the background programs of
`rootstock bench agents` and no users but one, which ends the run. What counts is the share of the
prompt tokens that was found, which no noise touches; times are told, too.

Only the standard library is used. Example, as recorded:

  benches/scripts/routers.py --binary target/release/rootstock
"""

import argparse
import os
import subprocess
import tempfile
import json

from served import Server, percentile

MODES = {
    "kv": [],
    "kv, hard affinity": ["--router-session-affinity-ttl-secs", "600"],
    "least-loaded": ["--router-mode", "least-loaded"],
    "power-of-two": ["--router-mode", "power-of-two"],
    "round-robin": ["--router-mode", "round-robin"],
    "random": ["--router-mode", "random"],
}


def run(args, flags):
    memory = ["--replicas", "4", "--threads", "1", "--kv-cache-mib", str(args.kv_cache_mib),
              "--host-kv-mib", "0"]
    with Server(args.binary, *memory, *flags) as server, tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "calls.json")
        command = [args.binary, "bench", "agents", "--url", "http://%s:%d" % server.address,
                   "--ignore-eos", "--users", "1", "--think-s", "8", "--turns", "5",
                   "--background", str(args.programs), "--hints", "--tool-words", "200",
                   "--background-output-tokens", "16", "--json", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            return [call for call in json.load(file)["calls"] if call["class"] == "background"]


def main():
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("--binary", default="target/release/rootstock")
    flags.add_argument("--programs", type=int, default=16)
    flags.add_argument("--kv-cache-mib", type=int, default=64)
    args = flags.parse_args()
    print("| mode | calls | found of the prompts | of turns 2+ | TTFT p50 ms | p95 |\n"
          "|---|---|---|---|---|---|")
    for name, mode in MODES.items():
        calls = [call for call in run(args, mode) if not call["error"]]
        later = [call for call in calls if call["turn"] > 0]
        share = lambda of: (sum(call["cached_tokens"] for call in of)
                            / max(1, sum(call["prompt_tokens"] for call in of)))
        first = [call["ttft_s"] * 1e3 for call in calls]
        print(f"| {name} | {len(calls)} | {share(calls):.3f} | {share(later):.3f} | "
              f"{percentile(first, 0.5):.0f} | {percentile(first, 0.95):.0f} |", flush=True)


if __name__ == "__main__":
    main()
