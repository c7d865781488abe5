"""Makes replay_small.jsonl and replay_small.table, the trace and the table of tests/replay.rs.

Own code, no dependencies: python3 make_replay_small.py
The figures come from the plainest models there are: LRU looks through all blocks for the oldest,
the optimum through all blocks for the one whose next use is farthest; both drop deeper blocks
before shallower ones and count the leading blocks that are present.
"""
import json, os, random

TOKENS = 512
CAPACITIES = [4, 8, 16, 32, 64, 128]


def requests():
    """Three prompts of 3 shared blocks, each used by several programs that grow turn by turn."""
    rng = random.Random(20261129)
    fresh = iter(range(10**6, 10**9))
    systems = [[next(fresh) for _ in range(3)] for _ in range(3)]
    programs, rows, clock = [], [], 0
    for _ in range(90):
        if len(programs) < 3 or rng.random() < 0.2:
            programs.append(list(rng.choice(systems)))
        program = programs[rng.randrange(max(0, len(programs) - 5), len(programs))]
        program += [next(fresh) for _ in range(rng.randint(0, 3))]
        clock += rng.randint(1, 900)
        partial = rng.randint(0, TOKENS - 1)
        # A partial last block has an id of its own, so it is never found again.
        ids = program + ([next(fresh)] if partial else [])
        rows.append({"timestamp": clock, "input_length": len(program) * TOKENS + partial,
                     "output_length": rng.randint(1, 500), "hash_ids": ids})
    return rows


def hits(paths, capacity, worth):
    """`worth(block, now)` is what the least valuable block has least of."""
    cache, found = set(), 0
    for now, path in enumerate(paths):
        for block in path:
            if block not in cache:
                break
            found += 1
        cache |= set(path)
        while len(cache) > capacity:
            cache.remove(min(cache, key=lambda block: worth(block, now)))
    return found


def main():
    rows = requests()
    paths = [row["hash_ids"] for row in rows]
    uses, depth = {}, {}
    for now, path in enumerate(paths):
        for at, block in enumerate(path):
            uses.setdefault(block, []).append(now)
            depth[block] = at
    lru = lambda block, now: (max(at for at in uses[block] if at <= now), -depth[block])
    optimum = lambda block, now: (-min([at for at in uses[block] if at > now], default=10**9),
                                  -depth[block])
    total = sum(map(len, paths))
    lines = {"lru": [hits(paths, capacity, lru) for capacity in CAPACITIES],
             "optimum": [hits(paths, capacity, optimum) for capacity in CAPACITIES],
             "infinite": [total - len(uses)] * len(CAPACITIES)}
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "replay_small.jsonl"), "w") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
    with open(os.path.join(here, "replay_small.table"), "w") as out:
        out.write(f"replay_small.jsonl: {len(rows)} requests, {total} blocks of {TOKENS} tokens, "
                  f"{len(uses)} distinct\nhit ratio in blocks, by capacity in tokens\n\n")
        out.write(" " * 8 + "".join(f"{c * TOKENS:>8}" for c in CAPACITIES) + "\n")
        for name, found in lines.items():
            out.write(f"{name:<8}" + "".join(f"{n / total:>8.4f}" for n in found) + "\n")


if __name__ == "__main__":
    main()
