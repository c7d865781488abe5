#!/usr/bin/env python3
"""What can be won on the agent fleet by whoever knows less than everything: programs as wholes.

ceiling.py ROWS CAPACITY_BLOCKS...   with the rows of `workloads --mooncake 128 SEED`.

Of each program the blocks are kept from its first on, and the whole cache goes by one order:
  lru         last request first
  optimum     next request last (offline)
  law         dead programs first, then by the highest rate of uses per second that keeping a
              program of this age can bring, from the true distribution of gaps in the generator:
              no policy that is told programs and final flags alone can know more
  law+length  the same when the length of the answer is known beforehand, as `osl` says it
  law+end     the same when it is known once the answer is there, as a server sees it
Prints hit ratios in blocks, and in brackets the share of the way from lru to the optimum.
"""
import json
import math
import sys

PAUSE_LOW, PAUSE_HIGH = 0.2, 30.0  # log-uniform, s
ANSWER_LOW, ANSWER_HIGH = 20, 600  # log-uniform, tokens
REQUEST_S, TOKEN_S = 0.2, 0.02
SHARED_BLOCKS = 32
STEP_S = 0.1
STEPS = 450
LENGTHS = 20


def pause_by(time_s):
    """Probability that a pause is over."""
    if time_s <= PAUSE_LOW:
        return 0.0
    return min(1.0, math.log(time_s / PAUSE_LOW) / math.log(PAUSE_HIGH / PAUSE_LOW))


def rates(cdf):
    """By age: the best of uses per second over all times to keep something."""
    area = [0.0]
    for one, other in zip(cdf, cdf[1:]):
        area.append(area[-1] + STEP_S * (1 - (one + other) / 2))
    def best(age):
        gains = [(cdf[to] - cdf[age]) / (area[to] - area[age])
                 for to in range(age + 1, len(cdf)) if area[to] > area[age] + 1e-9]
        return max(gains, default=0.0)
    return [best(age) for age in range(len(cdf))]


def answer_s(part):
    tokens = ANSWER_LOW * (ANSWER_HIGH / ANSWER_LOW) ** part
    return REQUEST_S + TOKEN_S * tokens


TIMES = [step * STEP_S for step in range(STEPS + 1)]
DURATIONS = [answer_s((at + 0.5) / LENGTHS) for at in range(LENGTHS)]
BY_LENGTH = [rates([pause_by(time - lasts) for time in TIMES]) for lasts in DURATIONS]
ANY_LENGTH = rates([sum(pause_by(time - lasts) for lasts in DURATIONS) / LENGTHS for time in TIMES])
FROM_END = rates([pause_by(time) for time in TIMES])


def at(table, age_s):
    return table[max(0, min(STEPS, int(age_s / STEP_S)))]


def law(program, now):
    return 0.0 if program["last"] else at(ANY_LENGTH, now - program["at"])


def law_length(program, now):
    part = math.log(max(program["answer"], ANSWER_LOW) / ANSWER_LOW)
    part /= math.log(ANSWER_HIGH / ANSWER_LOW)
    table = BY_LENGTH[min(LENGTHS - 1, int(part * LENGTHS))]
    return 0.0 if program["last"] else at(table, now - program["at"])


def law_end(program, now):
    ended = program["at"] + REQUEST_S + TOKEN_S * program["answer"]
    if program["last"] or now < ended:
        return law(program, now)
    return at(FROM_END, now - ended)


ORDERS = {
    "lru": lambda program, now: program["at"],
    "optimum": lambda program, now: -program["next"],
    "law": law,
    "law+length": law_length,
    "law+end": law_end,
}


def load(path):
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    following = {}
    for row in reversed(rows):
        row["next"] = following.get(row["session_id"], 1e18)
        following[row["session_id"]] = row["timestamp"]
    return rows


def hit_ratio(rows, capacity, order):
    kept, used, hits, total = {}, SHARED_BLOCKS, 0, 0
    for row in rows:
        now, blocks = row["timestamp"] / 1000, len(row["hash_ids"])
        before = kept.get(row["session_id"], {"blocks": 0, "whole": 0})
        hits += SHARED_BLOCKS + min(before["blocks"], before["whole"])
        total += blocks
        own = blocks - SHARED_BLOCKS
        used += own - before["blocks"]
        kept[row["session_id"]] = {
            "blocks": own, "whole": row["input_length"] // 128 - SHARED_BLOCKS, "at": now,
            "answer": row["output_length"], "last": row["session_final"], "next": row["next"],
        }
        if used <= capacity:
            continue
        for name in sorted(kept, key=lambda name: (order(kept[name], now), -kept[name]["at"])):
            program = kept[name]
            gone = min(program["blocks"], used - capacity)
            program["blocks"] -= gone
            used -= gone
            if program["blocks"] == 0 and name != row["session_id"]:
                del kept[name]
            if used <= capacity:
                break
    return hits / total


def main():
    rows = load(sys.argv[1])
    for capacity in map(int, sys.argv[2:]):
        found = {name: hit_ratio(rows, capacity, order) for name, order in ORDERS.items()}
        way = found["optimum"] - found["lru"]
        print(capacity, *(f"{name} {ratio:.4f} ({(ratio - found['lru']) / way:.0%})"
                          for name, ratio in found.items()), flush=True)


if __name__ == "__main__":
    main()
