#!/usr/bin/env python3
"""What do user-facing agents feel of background ones, and what do hints change?

Arms, each on a freshly started server, in the order alone, off, on, on, off, alone, and that --rounds
times:

  alone  the user-facing programs of `rootstock bench agents` without any background
  off    beside the background ones, nothing said in nvext
  on     the same with hints: priority, latency sensitivity, output length, program

With --nat the arms are off and on of the seven-call graph of NAT's latency demo instead. Told are the
users' times to the first token against `alone`, and the background's tokens a second (prompt tokens
that were not cached, and output) over the time that it ran.

Only the standard library is used. Example, as recorded:

  benches/scripts/classes.py --binary target/release/rootstock
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

from served import Server, percentile


def run(args, arm, seed):
    with Server(args.binary, *args.flag) as server, tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "calls.json")
        command = [args.binary, "bench", "agents", "--url", "http://%s:%d" % server.address,
                   "--ignore-eos", "--seed", str(seed), "--json", path, *args.bench]
        if args.nat:
            command += ["--scenario", "nat"]
        if arm == "alone":
            command += ["--background", "0"]
        if arm == "on":
            command += ["--hints"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def told(reports, classes):
    calls = [call for report in reports for call in report["calls"] if call["class"] in classes]
    done = [call for call in calls if not call["error"]]
    first = [call["ttft_s"] * 1e3 for call in done]
    whole = [call["total_s"] * 1e3 for call in done]
    seconds = sum(report["seconds"] for report in reports)
    tokens = sum(c["prompt_tokens"] - c["cached_tokens"] + c["output_tokens"] for c in done)
    return {
        "calls": len(done), "errors": len(calls) - len(done),
        "ttft_p50": statistics.median(first) if first else 0.0,
        "ttft_p95": percentile(first, 0.95) if first else 0.0,
        "total_p50": statistics.median(whole) if whole else 0.0,
        "total_p95": percentile(whole, 0.95) if whole else 0.0,
        "output_per_s": sum(c["output_tokens"] for c in done) / seconds,
        "tokens_per_s": tokens / seconds,
    }


def line(name, row):
    print(f"| {name} | {row['calls']} | {row['errors']} | {row['ttft_p50']:.0f} | "
          f"{row['ttft_p95']:.0f} | {row['total_p50']:.0f} | {row['total_p95']:.0f} | "
          f"{row['output_per_s']:.1f} | {row['tokens_per_s']:.1f} |", flush=True)


def main():
    flags = argparse.ArgumentParser(description=__doc__,
                                    formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("--binary", default="target/release/rootstock")
    flags.add_argument("--rounds", type=int, default=1)
    flags.add_argument("--arms", help="other arms, by commas; the second half with other seeds")
    flags.add_argument("--nat", action="store_true")
    flags.add_argument("--flag", action="append", default=[], help="a further flag of serve")
    flags.add_argument("--bench", action="append", default=[], help="a further flag of the bench")
    flags.add_argument("--json", help="where the single calls go")
    args = flags.parse_args()
    order = ["off", "on", "on", "off"] if args.nat else ["alone", "off", "on", "on", "off", "alone"]
    order = args.arms.split(",") if args.arms else order
    kept = {arm: [] for arm in order}
    head = ("| | calls | errors | TTFT p50 ms | p95 | whole p50 ms | p95 | output tokens/s | "
            "computed + output tokens/s |\n|---|---|---|---|---|---|---|---|---|")
    print(head)
    for number in range(args.rounds):
        for at, arm in enumerate(order):
            report = run(args, arm, 1 + number * 2 + at * 2 // len(order))
            kept[arm].append(report)
            for name in sorted({call["class"] for call in report["calls"]}):
                line(f"{number + 1}.{at + 1} {arm}: {name}", told([report], {name}))
    print("\nall rounds\n\n" + head)
    for arm, reports in kept.items():
        for name in sorted({call["class"] for report in reports for call in report["calls"]}):
            line(f"{arm}: {name}", told(reports, {name}))
    if not args.nat and set(kept) == {"alone", "off", "on"}:
        users = {arm: told(reports, {"user"}) for arm, reports in kept.items()}
        others = {arm: told(reports, {"background"}) for arm, reports in kept.items()}
        for arm in ("off", "on"):
            print(f"{arm}: users' TTFT p50 {users[arm]['ttft_p50'] / users['alone']['ttft_p50']:.2f}x, "
                  f"p95 {users[arm]['ttft_p95'] / users['alone']['ttft_p95']:.2f}x that of alone")
        print(f"background, on to off: {others['on']['tokens_per_s'] / others['off']['tokens_per_s']:.3f} "
              f"tokens/s, {others['on']['calls'] / others['off']['calls']:.3f} calls")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(kept, file)


if __name__ == "__main__":
    main()
