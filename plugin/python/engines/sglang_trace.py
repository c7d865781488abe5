"""The recorded trace through SGLang's cache, with our tree core and with its own: sglang_trace.py

Both cores must give the same cached pages, victims and refusals as the standalone scheduler. SGLang
evicts whole nodes, where the scheduler cuts them, and so hands pages out in another order: line for
line the two cores are compared with each other, and with the scheduler in sum.
"""

import sys

import torch
from recorded import HERE, PAGE, Player, play, table, tokens_of
from sglang_cores import MatchPrefixParams, RadixKey, array, make_cache
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams


class Sglang(Player):
    """Admission, chunk and end of a request, as SGLang's scheduler drives its cache."""

    def __init__(self, core: str, pages: int):
        super().__init__()
        self.cache = make_cache(core, PAGE, events=False, capacity=pages * PAGE)
        self.pool = self.cache.token_to_kv_pool_allocator
        self.live = {}

    def begin(self, number: int, contents: list[int]) -> str:
        tokens = array("q", tokens_of(contents))
        whole = len(contents) * PAGE
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:whole])))
        lock = self.cache.lock(found.last_device_node)
        cached = found.device_prefix_len
        # One page more, of which nothing is cached: the scheduler keeps one for each that runs.
        need = whole - cached + PAGE
        room = self.pool.available_size() + self.cache.evictable_size()
        if room < need + PAGE * len(self.live):
            self.cache.unlock(lock)
            return f"begin {number} short"
        short = need - self.pool.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        slots = self.pool.alloc(need)
        assert slots is not None, "what counts as evictable can be had"
        pages = [int(slot) // PAGE for slot in slots[::PAGE]]
        gone = self.handed_out(pages, contents[cached // PAGE :])
        had = self.cache.path_device_indices(found.last_device_node)
        value = torch.cat([had.to(torch.int64), slots[: whole - cached].to(torch.int64)])
        key = RadixKey(tokens[:whole])
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=cached))
        node = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:whole])))
        held = self.cache.lock(node.last_device_node)
        self.cache.unlock(lock)
        self.live[number] = (held, slots[whole - cached :])
        return f"begin {number} cached {cached // PAGE} evicted {gone}"

    def end(self, number: int) -> str:
        if number not in self.live:
            return f"end {number} missing"
        held, rest = self.live.pop(number)
        self.pool.free(rest)
        self.cache.unlock(held)
        self.cache.sanity_check()
        return f"end {number}"


def main() -> int:
    trace = (HERE / "conversation.trace").read_text().splitlines()
    golden = (HERE / "conversation.golden").read_text().splitlines()
    pages = int(trace[0].split()[1])
    said = {core: play(Sglang(core, pages), trace) for core in ("rootstock", "rust")}
    print("| host | admitted | pages cached | victims | short | ended |\n|---|---|---|---|---|---|")
    rows = {table("", lines) for lines in (golden, *said.values())}
    print(table("standalone scheduler", golden))
    print(table("SGLang, our tree core", said["rootstock"]))
    print(table("SGLang, its own", said["rust"]))
    pairs = zip(*said.values(), strict=True)
    wrong = [at for at, (one, other) in enumerate(pairs) if one != other]
    wrong += [] if len(rows) == 1 else [0]
    apart = sum(one != other for one, other in zip(golden, said["rootstock"], strict=True))
    print(f"lines that differ from the scheduler's: {apart} of {len(golden)}")
    for at in wrong[:3]:
        print(f"line {at + 2}: {said['rootstock'][at]!r}, its own core says {said['rust'][at]!r}")
    verdict = "FAILED" if wrong else "ok"
    print(f"test result: {verdict}. {int(not wrong)} passed; {len(wrong)} failed;")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
