"""Three tree cores of SGLang side by side: its Python one, its Rust one, and ours.

Every operation goes to all of them with the same slots; what they answer must be the same, with
their names of nodes translated. The rig stands for the controller: it owns the slots of both tiers
and does what the actions say.
"""

import os
from array import array
from collections import defaultdict
from random import Random

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "rootstock"

import torch  # noqa: E402

torch.set_num_threads(1)

import rootstock.sglang  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.cache_action import (  # noqa: E402
    BackupKV,
    FreeDeviceKV,
    UpdatePendingBackupOnNodeSplit,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402
    ServerArgs,
    set_global_server_args_for_scheduler,
)

rootstock.sglang.register()
FULL = ComponentType.FULL
CORES = ("rootstock", "rust", "python")


def make_cache(backend, page=1, policy="lru", events=True, capacity=64, config=None, **more):
    """A cache of SGLang over a CPU pool, with the tree core named."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
    pool = MHATokenToKVPool(
        size=capacity, page_size=page, dtype=torch.float16, head_num=1, head_dim=1,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    allocator = TokenToKVPoolAllocator(
        size=capacity, dtype=torch.float16, device="cpu", kvcache=pool, need_sort=False
    )
    rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            eviction_policy=policy,
            eviction_policy_config=config,
            tree_components=(FULL,),
            enable_kv_cache_events=events,
            tree_core_backend=backend,
            **more,
        )
    )


class Names:
    """One name for the nodes that the cores name each in their way."""

    def __init__(self):
        self.common, self.own = {}, []

    def common_of(self, ids):
        ids = tuple(ids)
        if ids not in self.common:
            for core, node in enumerate(ids):
                known = [other for other in self.own if other[core] == node]
                assert not known, f"one core sees a node again where another does not: {ids}"
            self.common[ids] = len(self.own)
            self.own.append(ids)
        return self.common[ids]


def plain(value):
    """Comparable, without names of nodes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if one}
    return value


class Rig:
    """The cores, and what the controller would hold."""

    def __init__(self, page, policy, mode, seed, config=None):
        self.page, self.mode, self.random = page, mode, Random(seed)
        self.cores = [make_cache(core, page, policy, config=config).tree_core for core in CORES]
        self.capacity = {"device": 40 * page, "host": 30 * page}
        for core in self.cores:
            core.take_events()
            if mode != "device":
                core.set_hicache_enabled()
                core.write_through_threshold = 1 if mode == "through" else 2
                core.is_write_back = mode == "back"
                core.enable_storage = True
        self.start()
        self.done = defaultdict(int)

    def start(self):
        self.names = Names()
        self.free = {tier: list(range(size)) for tier, size in self.capacity.items()}
        self.leases, self.host_leases, self.writes, self.loads = [], [], {}, []
        self.root = self.same_node([core.root_node_handle() for core in self.cores])

    # Comparison.

    def each(self, call):
        return [call(core, place) for place, core in enumerate(self.cores)]

    def same(self, answers, what=""):
        for place, answer in enumerate(answers):
            assert answer == answers[0], (
                f"{what}: {CORES[0]} says {answers[0]}, {CORES[place]} {answer}"
            )
        return answers[0]

    def same_node(self, ids):
        missing = self.same([node is None for node in ids], "a node")
        return None if missing else self.names.common_of(ids)

    def of(self, node, place):
        return self.names.own[node][place]

    def slots(self, tensor_lists):
        return self.same([plain(one) for one in tensor_lists], "slots")

    def act(self, action_lists):
        """Compares actions and does them."""
        self.same([[type(a).__name__ for a in some] for some in action_lists], "actions")
        for actions in zip(*action_lists, strict=True):
            if isinstance(actions[0], FreeDeviceKV):
                for freed in self.slots([a.indices for a in actions]):
                    self.give("device", freed)
            elif isinstance(actions[0], BackupKV):
                self.back_up([a.node_ids for a in actions])
            elif isinstance(actions[0], UpdatePendingBackupOnNodeSplit):
                upper = self.same_node([a.new_node_id for a in actions])
                lower = self.same_node([a.old_node_id for a in actions])
                self.same_node([a.new_child_node_id for a in actions])
                ack = self.same_node([a.ack_id for a in actions])
                nodes = self.writes[ack]
                nodes.insert(nodes.index(lower), upper)
            else:
                raise AssertionError(actions[0])

    def give(self, tier, slots):
        assert not set(slots) & set(self.free[tier]), "a slot is freed twice"
        self.free[tier].extend(slots)

    def drain(self, results):
        """Frees what a step of eviction gave up."""
        self.same([r.tracker.get(FULL, 0) for r in results], "tracker")
        if hasattr(results[0], "unbacked_tokens"):
            self.same([r.unbacked_tokens for r in results], "unbacked tokens")
        for tier, name in (("device", "device_frees"), ("host", "host_frees")):
            for freed in self.slots([getattr(r, name).get(FULL, []) for r in results]):
                self.give(tier, freed)
        for result in results:
            result.device_frees.clear()
            result.host_frees.clear()
        self.act([r.cache_actions for r in results])
        for result in results:
            result.cache_actions.clear()
        return results[0].tracker.get(FULL, 0)

    # The two tiers.

    def room(self, tier, tokens):
        if len(self.free[tier]) < tokens:
            missing = tokens - len(self.free[tier])
            (self.evict if tier == "device" else self.evict_host)(missing)
        if len(self.free[tier]) < tokens:
            return None
        taken, self.free[tier] = self.free[tier][:tokens], self.free[tier][tokens:]
        return torch.tensor(taken, dtype=torch.int64)

    def back_up(self, id_lists, waits=True):
        nodes = [self.same_node(ids) for ids in zip(*id_lists, strict=True)]
        written = []
        for node in nodes:
            specs = self.each(lambda core, i, node=node: core.build_backup_spec(self.of(node, i)))
            tokens = len(self.slots([spec[0] for spec in specs]))
            if not tokens:
                continue
            host = self.room("host", tokens)
            if host is None:
                break
            self.each(
                lambda core, i, node=node, host=host: core.commit_backup(
                    self.of(node, i), host, {}
                )
            )
            written.append(node)
        if not written:
            return 0
        ack = written[-1]
        marked = self.each(
            lambda core, i: core.mark_write_through_pending(
                [self.of(node, i) for node in written], self.of(ack, i)
            )
        )
        order = [self.same_node(ids) for ids in zip(*marked, strict=True)]
        self.lease(ack, self.leases_of_writes())
        self.writes[ack] = order
        if not waits:
            self.finish_write(ack)
        return len(written)

    def leases_of_writes(self):
        self._write_leases = getattr(self, "_write_leases", {})
        return self._write_leases

    def finish_write(self, ack):
        nodes = self.writes.pop(ack)
        self.each(
            lambda core, i: core.finish_write_through(
                [self.of(node, i) for node in nodes], self.of(ack, i)
            )
        )
        self.unlock(ack, self._write_leases.pop(ack))

    def lease(self, node, into):
        results = self.each(lambda core, i: core.inc_lock_ref(self.of(node, i)))
        self.same([result.delta for result in results], "delta")
        receipts = [result.to_dec_params() for result in results]
        if isinstance(into, dict):
            into[node] = receipts
        else:
            into.append((node, receipts))

    def unlock(self, node, receipts):
        self.each(lambda core, i: core.dec_lock_ref(self.of(node, i), receipts[i]))

    def evict(self, tokens):
        freed = 0
        self.each(lambda core, _: core.evict_device_start(FULL, tokens))
        while True:
            steps = self.each(lambda core, _: core.evict_device_next_node(FULL, {FULL: freed}))
            freed += self.drain(steps)
            victim = self.same_node([step.node_id for step in steps])
            if victim is None:
                break
            back = self.mode == "back"
            gone = self.each(lambda core, i: core.evict_device_leaf(self.of(victim, i), back))
            freed += self.drain(gone)
            asked = [one.backup_kv for one in gone]
            if self.same([one is not None for one in asked], "a copy first"):
                if self.back_up([one.node_ids for one in asked], waits=False):
                    freed += self.drain(self.each(lambda c, i: c.demote(self.of(victim, i))))
                else:
                    drops = self.each(lambda c, i: c.drop_subtree_no_host(self.of(victim, i)))
                    self.same([drop.is_dropped for drop in drops], "dropped")
                    freed += self.drain(drops)
        self.each(lambda core, _: core.evict_device_end(FULL))
        self.done["evicted"] += freed
        return freed

    def evict_host(self, tokens):
        freed = self.drain(self.each(lambda core, _: core.drive_host_eviction(FULL, tokens)))
        self.done["evicted from host"] += freed

    # Requests.

    def key(self):
        random = self.random
        pages = random.randrange(7)
        tokens = array("q")
        for _ in range(pages):
            tokens.extend([random.randrange(2)] * (self.page - 1) + [random.randrange(2)])
        tokens.extend([7] * random.randrange(self.page))
        extra, salt = random.choice([(None, None), (None, None), ("x", None), ("x", "s")])
        return lambda: RadixKey(array("q", tokens), extra_key=extra, cache_salt=salt)

    def match(self, key):
        results = self.each(lambda core, _: core.match_prefix(MatchPrefixParams(key=key())))
        fields = ("device_prefix_len", "host_hit_length", "full_kv_hit_length")
        for field in fields:
            self.same([getattr(result, field) for result in results], field)
        nodes = ("last_device_node", "last_host_node", "best_match_node", "last_visited_node_id")
        device, _, best, _ = (
            self.same_node([getattr(result, name) for result in results]) for name in nodes
        )
        self.act([result.cache_actions for result in results])
        found = results[0]
        self.done["hits"] += bool(found.device_prefix_len)
        self.done["host hits"] += bool(found.host_hit_length)
        return found, device, best

    def insert(self):
        key = self.key()
        found, node, _ = self.match(key)
        self.lease(node, self.leases)
        total = len(key()) // self.page * self.page
        values = self.each(
            lambda core, i: core.collect_full_device_indices(
                self.of(node, i), core.root_node_handle()
            )
        )
        had = self.slots(values)
        fresh = self.room("device", total - found.device_prefix_len)
        if fresh is not None:
            value = torch.cat([torch.tensor(had, dtype=torch.int64), fresh])
            # As another request that computed the same at the same time.
            own = self.random.random() < 0.2 and found.device_prefix_len == 0
            counted = self.random.choice([0, found.device_prefix_len])
            self.run_insert(key, value, 0 if own else found.device_prefix_len, counted)
        self.unlock(*self.leases.pop())

    def run_insert(self, key, value, owned, counted):
        priority = self.random.choice([0, 0, 1, 5, -2])
        params = [
            InsertParams(
                key=key(), value=value.clone(), prev_prefix_len=owned, inserted_len=counted,
                priority=priority, session_id="a", track_adopted_ranges=True,
            )
            for _ in self.cores
        ]  # fmt: skip
        steps = self.each(lambda core, i: core.begin_insert(params[i]))
        while True:
            self.act([step.actions for step in steps])
            if not self.same([step.result is None for step in steps], "the end"):
                break
            steps = self.each(lambda core, _: core.resume_insert())
        results = [step.result for step in steps]
        self.same([result.prefix_len for result in results], "prefix_len")
        self.same([plain(result.adopted_ranges) for result in results], "ranges")
        self.same_node([result.last_device_node for result in results])
        self.same([core.end_insert() for core in self.cores])
        self.done["inserted"] += 1

    def load_back(self):
        _, device, best = self.match(self.key())
        if device == best:
            return
        self.lease(device, self.leases)
        host = self.each(lambda core, i: core.inc_host_lock_ref(self.of(best, i)))
        receipts = [result.to_dec_params() for result in host]
        specs = self.each(lambda core, i: core.build_load_back_spec(self.of(best, i))[0])
        slots = self.slots([spec.host_indices for spec in specs])
        nodes = zip(*[spec.nodes_to_load for spec in specs], strict=True)
        nodes = [self.same_node(ids) for ids in nodes]
        fresh = self.room("device", len(slots)) if slots else None
        if fresh is not None:
            moved = self.each(
                lambda core, i: core.commit_load_back(self.of(best, i), fresh, specs[i], {})
            )
            self.act(moved)
            loaded = []
            self.lease(best, loaded)
            self.loads.extend(loaded)
            self.done["loaded"] += len(nodes)
        self.each(lambda core, i: core.dec_host_lock_ref(self.of(best, i), receipts[i]))
        self.unlock(*self.leases.pop())

    def prefetched(self):
        """Pages that came from a store."""
        key = self.key()
        total = len(key()) // self.page * self.page
        host = self.room("host", total)
        if host is None:
            return
        names = [f"{self.random.getrandbits(256):064x}" for _ in range(total // self.page)]
        results = self.each(
            lambda core, i: core.insert_host(
                core.root_node_handle(), key().page_aligned(self.page), host, list(names)
            )
        )
        self.act([result.cache_actions for result in results])
        self.same_node([result.inserted_host_node for result in results])
        dropped = self.same([result.host_insert_dropped for result in results], "dropped")
        found = self.same([result.prefix_len for result in results], "prefix_len")
        self.give("host", host.tolist() if dropped else host.tolist()[:found])
        self.done["prefetched"] += not dropped

    def hold(self):
        _, device, best = self.match(self.key())
        if self.random.random() < 0.7 or self.mode == "device":
            self.lease(device, self.leases)
            return
        copied = self.each(lambda core, i: core.is_backuped(self.of(best, i)))
        if not self.same(copied, "a copy"):
            return
        results = self.each(lambda core, i: core.inc_host_lock_ref(self.of(best, i)))
        self.host_leases.append((best, [result.to_dec_params() for result in results]))

    def let_go(self):
        kinds = [kind for kind in (self.leases, self.host_leases, self.loads) if kind]
        if self.writes and self.random.random() < 0.5:
            self.finish_write(self.random.choice(sorted(self.writes)))
        elif kinds:
            kind = self.random.choice(kinds)
            node, receipts = kind.pop(self.random.randrange(len(kind)))
            if kind is self.host_leases:
                self.each(lambda core, i: core.dec_host_lock_ref(self.of(node, i), receipts[i]))
                return
            if kind is self.loads:
                self.each(lambda core, i: core.finish_load_back(self.of(node, i)))
            self.unlock(node, receipts)

    def look(self):
        keys = [self.key() for _ in range(5)]
        peeks = [self.each(lambda c, _, k=k: c.match_full_device_prefix(k())) for k in keys]
        for peek in peeks:
            self.same([(found, held) for found, _, held in peek], "a look")
            self.same_node([node for _, node, _ in peek])
        nodes = [self.match(key)[1] for key in keys]
        orders = self.each(lambda c, i: c.dfs_weight_order([self.of(n, i) for n in nodes]))
        self.same(orders, "the order by weight")
        for node in nodes:
            facts = self.each(
                lambda c, i, n=node: [
                    (p.path_start, p.path_end, p.full_value_len, p.num_children)
                    for p in c.collect_path_info([self.of(n, i)])[0]
                ]
            )
            self.same(facts, "a path")
            for name in ("get_hash_values", "get_prefix_hash_values", "prefetch_anchor_info"):
                if self.mode != "device":
                    self.same(self.each(lambda c, i, n=node: getattr(c, name)(self.of(n, i))), name)
            for name in ("is_backuped", "is_root", "is_full_device_evicted"):
                self.same(self.each(lambda c, i, n=node: getattr(c, name)(self.of(n, i))), name)

    def check(self):
        sizes = self.each(lambda c, _: (c.full_evictable_size(), c.full_protected_size()))
        evictable, protected = self.same(sizes, "sizes")
        self.same(self.each(lambda c, _: tuple(c.total_size())), "total size")
        held = evictable + protected
        assert held + len(self.free["device"]) == self.capacity["device"], "a slot is lost"
        ours, rust, python = self.each(lambda c, _: [plain_event(e) for e in c.take_events()])
        self.same([ours, rust], "events")
        # SGLang's Python core also joins what is of different namespaces.
        self.same([list(single(some)) for some in (ours, rust, python)], "events page by page")
        self.same(self.each(lambda c, _: sorted(c.all_values_flatten().tolist())), "values")

    def check_deeply(self):
        """Their own checks, which do not know of loads that the rig has not finished."""
        if not self.loads:
            self.each(lambda core, _: core.sanity_check([], []))

    def restart(self):
        while self.loads or self.leases or self.host_leases or self.writes:
            self.let_go()
        self.each(lambda core, _: core.reset())
        self.each(lambda core, _: core.kv_events.record_all_cleared())
        self.start()

    def step(self):
        kind = self.random.choices(
            ["insert", "match", "hold", "let go", "evict", "load", "store", "evict host", "look"],
            [30, 12, 8, 14, 8, 12, 4, 4, 3],
        )[0]
        if kind == "insert":
            self.insert()
        elif kind == "match":
            self.match(self.key())
        elif kind == "hold" and len(self.leases) < 3:
            self.hold()
        elif kind == "let go":
            self.let_go()
        elif kind == "evict":
            self.evict(self.random.randrange(1, 6 * self.page))
        elif kind == "load" and self.mode != "device":
            self.load_back()
        elif kind == "store" and self.mode != "device":
            self.prefetched()
        elif kind == "evict host" and self.mode != "device":
            self.evict_host(self.random.randrange(1, 4 * self.page))
        elif kind == "look":
            self.look()
        self.check()


def plain_event(event):
    return type(event).__name__, {
        name: getattr(event, name) for name in event.__struct_fields__
    }


def single(events):
    """Events of one page each."""
    for kind, fields in events:
        hashes = fields.get("block_hashes", [None])
        size = fields.get("block_size", 1)
        parents = [fields.get("parent_block_hash"), *hashes]
        for page, (one, parent) in enumerate(zip(hashes, parents, strict=False)):
            changed = {"block_hashes": [one]}
            if "token_ids" in fields:
                changed["token_ids"] = fields["token_ids"][page * size : (page + 1) * size]
                changed["parent_block_hash"] = parent
            yield kind, fields | changed
