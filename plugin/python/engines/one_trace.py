"""One recorded trace through the C ABI and vLLM's cache manager, compared with the scheduler's.

one_trace.py LIBROOTSTOCK.so

`conversation.golden` is what the standalone scheduler does with `conversation.trace`
(`cargo run -p rootstock --example cache_trace`, compared in its tests). Here the same lines are
played as cache calls of the C ABI and in vLLM, and must give the same cached pages, the same
victims and the same refusals.
"""

import ctypes as c
import json
import sys

from recorded import HERE, PAGE, Player, play, table, tokens_of

OK = 0


class Namespace(c.Structure):
    _fields_ = [("struct_size", c.c_uint32)] + [
        pair
        for name in ("model", "numerics", "lora", "salt")
        for pair in ((name, c.c_char_p), (name + "_length", c.c_size_t))
    ]


class Found(c.Structure):
    _fields_ = [("device", c.c_uint32), ("host", c.c_uint32), ("storage", c.c_uint32)]


class Prompt(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("replica", c.c_uint32),
        ("namespace_id", c.c_uint64),
        ("tokens", c.c_void_p),
        ("length", c.c_size_t),
        ("max_tokens", c.c_uint32),
    ]


class Span(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("lease", c.c_uint64),
        ("allocation", c.c_uint64),
        ("priority", c.c_int32),
        ("retention_s", c.c_uint32),
        ("keep_duplicates", c.c_uint32),
        ("tokens", c.c_void_p),
        ("length", c.c_size_t),
        ("busy_until", c.c_uint64),
    ]


class Swap(c.Structure):
    _fields_ = [("index", c.c_uint32), ("page", c.c_uint32)]


class Swaps(c.Structure):
    _fields_ = [("entries", c.c_void_p), ("capacity", c.c_size_t), ("count", c.c_size_t)]


class CHost(Player):
    """Depth one of the C ABI: match, allocate, extend, end."""

    def __init__(self, library: str, pages: int):
        super().__init__()
        self.lib = lib = c.CDLL(library)
        lib.rootstock_cache_free.argtypes = [c.c_void_p]
        self.cache = c.c_void_p()
        config = f'{{"page_tokens": {PAGE}, "device_pages": [{pages}], "policy": "lru"}}'.encode()
        self.ok(lib.rootstock_cache_new(config, c.c_size_t(len(config)), c.byref(self.cache)))
        name = Namespace(c.sizeof(Namespace), b"m", 1, b"n", 1)
        self.ns = c.c_uint64()
        self.ok(lib.rootstock_cache_namespace(self.cache, c.byref(name), c.byref(self.ns)))
        self.live = {}

    def ok(self, status: int) -> None:
        if status != OK:
            text = c.create_string_buffer(256)
            self.lib.rootstock_last_error(text, c.c_size_t(256))
            raise RuntimeError(f"status {status}: {text.value.decode()}")

    def clock(self) -> c.c_uint64:
        self.now += 1_000_000
        return c.c_uint64(self.now)

    def available(self) -> int:
        text, length = c.create_string_buffer(8192), c.c_size_t()
        self.ok(
            self.lib.rootstock_cache_stats(self.cache, text, c.c_size_t(8192), c.byref(length))
        )
        device = json.loads(text.raw[: length.value])["tiers"][0]
        return device["free"] + device["evictable"]

    def begin(self, number: int, contents: list[int]) -> str:
        tokens = tokens_of(contents)
        array = (c.c_uint32 * len(tokens))(*tokens)
        address = c.cast(array, c.c_void_p)
        size = c.sizeof(Prompt)
        prompt = Prompt(size, 0, self.ns, address, len(tokens), len(tokens) - 1)
        lease, found = c.c_uint64(), Found()
        lib, now = self.lib, self.clock()
        self.ok(
            lib.rootstock_cache_match(
                self.cache, c.byref(prompt), now, c.byref(lease), c.byref(found)
            )
        )
        cached = found.device // PAGE
        count = len(contents) + 1 - cached
        # The scheduler leaves one page for each request that runs.
        if self.available() < count + len(self.live):
            self.ok(lib.rootstock_cache_end(self.cache, lease, 0, now))
            return f"begin {number} short"
        pages, allocation = (c.c_uint32 * count)(), c.c_uint64()
        allocate = lib.rootstock_cache_allocate
        self.ok(allocate(self.cache, 0, count, now, pages, c.byref(allocation)))
        gone = self.handed_out(list(pages), contents[cached:])
        fresh = len(contents) - cached
        if fresh:
            entries = (Swap * fresh)()
            swaps = Swaps(c.cast(entries, c.c_void_p), fresh, 0)
            span = Span(
                struct_size=c.sizeof(Span),
                lease=lease,
                allocation=allocation,
                tokens=address.value + 4 * PAGE * cached,
                length=PAGE * fresh,
            )
            extend = lib.rootstock_cache_extend
            self.ok(extend(self.cache, c.byref(span), now, c.byref(swaps)))
        self.live[number] = (lease, allocation)
        return f"begin {number} cached {cached} evicted {gone}"

    def end(self, number: int) -> str:
        if number not in self.live:
            return f"end {number} missing"
        lease, allocation = self.live.pop(number)
        self.ok(self.lib.rootstock_cache_release(self.cache, allocation, c.c_uint64(0)))
        self.ok(self.lib.rootstock_cache_end(self.cache, lease, 0, self.clock()))
        self.ok(self.lib.rootstock_cache_check(self.cache))
        return f"end {number}"


class Vllm(Player):
    """vLLM's own cache manager over Rootstock's pool, as its scheduler drives it."""

    def __init__(self, pages: int):
        super().__init__()
        from bench_pool import manager
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash

        init_none_hash(sha256)
        self.manager = manager("lru", pages + 1, 1 << 16)
        self.live = {}

    def begin(self, number: int, contents: list[int]) -> str:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        tokens = tokens_of(contents)
        params = SamplingParams(max_tokens=8)
        params.update_from_generation_config({}, eos_token_id=1)
        hasher = get_request_block_hasher(PAGE, sha256)
        request = Request(str(number), tokens, params, None, block_hasher=hasher)
        blocks, cached, _ = self.manager.get_computed_blocks(request)
        new, running = len(tokens) - cached, len(self.live)
        got = self.manager.allocate_slots(request, new, cached, blocks, reserved_blocks=running)
        if got is None:
            return f"begin {number} short"
        pages = [block.block_id for block in got.blocks[0]]
        gone = self.handed_out(pages, contents[cached // PAGE :])
        self.live[number] = request
        return f"begin {number} cached {cached // PAGE} evicted {gone}"

    def end(self, number: int) -> str:
        if number not in self.live:
            return f"end {number} missing"
        self.manager.free(self.live.pop(number))
        self.manager.block_pool.rootstock.check()
        return f"end {number}"


def main(library: str) -> int:
    trace = (HERE / "conversation.trace").read_text().splitlines()
    golden = (HERE / "conversation.golden").read_text().splitlines()
    pages = int(trace[0].split()[1])
    players = {"C ABI": CHost(library, pages), "vLLM": Vllm(pages)}
    rows, wrong = [table("standalone scheduler", golden)], 0
    for who, player in players.items():
        said = play(player, trace)
        rows.append(table(who, said))
        for at, (one, other) in enumerate(zip(golden, said)):
            if one != other:
                wrong += 1
                if wrong < 4:
                    print(f"{who}, line {at + 2}: {other!r}, the scheduler says {one!r}")
    print("| host | admitted | pages cached | victims | short | ended |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"test result: {'FAILED' if wrong else 'ok'}. {int(not wrong)} passed; {wrong} failed;")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
