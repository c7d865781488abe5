"""SGLang's TreeCore over Rootstock's tree: tensors at this edge alone, 64-bit buffers below.

Full attention on one device pool, with SGLang's host tier and stores. The tree gives slots back as
values and actions; the controller frees and copies.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from rootstock import SlotTree
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import (
    BackupKV,
    FreeDeviceKV,
    UpdatePendingBackupOnNodeSplit,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase
from sglang.srt.mem_cache.unified_cache.unified_tree_core import StorageBackupSpec
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DecSwaLockOnlyResult,
    DemoteResult,
    DriveHostEvictionResult,
    DropSubtreeNoHostResult,
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
    InsertStepResult,
    RadixCacheWalkResult,
    TreePathNodeInfo,
    UnifiedTreeCoreInterface,
)

from .events import Recorder
from .settings import Settings, policy_of
from .sizes import FULL, Sizes
from .tensors import host_tensor, longs, wide


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(f"Rootstock's tree core has no {what}")


class RootstockTreeCore(Sizes, UnifiedTreeCoreInterface):
    """One tree for the FULL component."""

    supports_rotation_base = False

    def __init__(self, params: Any, settings: Settings) -> None:
        allocator = params.token_to_kv_pool_allocator
        self.device = torch.device(allocator.device if allocator else "cpu")
        self.is_eagle = False
        self._page_size = params.page_size
        self._host = {"enabled": False, "write_back": False, "hits": 256, "storage": False}
        # The program of who inserts and what it says, set around a checkpoint of a request.
        self.asker: tuple[int | None, tuple | None] | None = None
        policy, numbers = policy_of(params, settings)
        self.tree = SlotTree(
            params.page_size,
            policy,
            numbers,
            events=params.enable_kv_cache_events,
            pin_budget=settings.pin_budget,
            device_tokens=allocator.size if allocator else 0,
        )
        self.kv_events = Recorder(
            self.tree,
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._empty = self._empty_result()

    def _tensor(self, raw: bytearray) -> torch.Tensor:
        found = host_tensor(raw)
        return found if self.device.type == "cpu" else found.to(self.device)

    def _empty_result(self) -> MatchResult:
        root = self.tree.root()
        return MatchResult(
            device_prefix_len=0,
            last_device_node=root,
            last_host_node=root,
            best_match_node=root,
            cache_actions=[],
        )

    def _action(self, told: tuple) -> Any:
        kind, *rest = told
        if kind == "free":
            return FreeDeviceKV(indices=[self._tensor(rest[0])])
        if kind == "backup":
            return BackupKV(node_ids=rest[0])
        ack, upper, lower = rest
        return UpdatePendingBackupOnNodeSplit(
            ack_id=ack, old_node_id=lower, new_node_id=upper, new_child_node_id=lower
        )

    def _actions(self, told: list[tuple]) -> list:
        return [self._action(one) for one in told]

    def _freed(self, freed: tuple, result: Any) -> Any:
        device, host, tokens, unbacked = freed
        if device:
            result.device_frees[FULL].extend(self._tensor(raw) for raw in device)
        if host:
            result.host_frees[FULL].extend(host_tensor(raw) for raw in host)
        if tokens:
            result.tracker[FULL] = tokens
        if hasattr(result, "unbacked_tokens"):
            result.unbacked_tokens = unbacked
        return result

    # What the controller reads and sets.

    @property
    def page_size(self) -> int:
        return self._page_size

    def _set_host(self, **changed: Any) -> None:
        self._host.update(changed)
        self.tree.set_host(*self._host.values())

    @property
    def enable_hicache(self) -> bool:
        return self._host["enabled"]

    def set_hicache_enabled(self) -> None:
        self._set_host(enabled=True)

    @property
    def is_write_back(self) -> bool:
        return self._host["write_back"]

    @is_write_back.setter
    def is_write_back(self, value: bool) -> None:
        self._set_host(write_back=value)

    @property
    def write_through_threshold(self) -> int:
        return self._host["hits"]

    @write_through_threshold.setter
    def write_through_threshold(self, value: int) -> None:
        self._set_host(hits=value)

    @property
    def enable_storage(self) -> bool:
        return self._host["storage"]

    @enable_storage.setter
    def enable_storage(self, value: bool) -> None:
        self._set_host(storage=value)

    @property
    def enable_external_cache_linker(self) -> bool:
        return False

    @enable_external_cache_linker.setter
    def enable_external_cache_linker(self, value: bool) -> None:
        if value:
            raise _refused("external cache linker: leave the backend at rust")

    @property
    def has_swa_host_pool(self) -> bool:
        return False

    @has_swa_host_pool.setter
    def has_swa_host_pool(self, value: bool) -> None:
        if value:
            raise _refused("sliding windows")

    @property
    def is_host_memory_buffer_only(self) -> bool:
        return False

    def set_host_memory_buffer_only(self) -> None:
        raise _refused("buffer-only host memory: leave the backend at rust")

    # The tree.

    def reset(self) -> None:
        self.tree.reset()
        self._empty = self._empty_result()

    @property
    def empty_match_result(self) -> MatchResult:
        return self._empty

    def node_by_id(self, node_id: int) -> Any:
        raise _refused("nodes as objects")

    def root_node_handle(self, extra_key: str | None = None) -> int:
        return self.tree.root()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        if len(key) < self._page_size:
            return self._empty
        device_tokens, device, best, host_tokens, tokens, visited, cut = self.tree.find(
            key.raw_token_ids(), key.extra_key, key.cache_salt
        )
        return MatchResult(
            device_prefix_len=device_tokens,
            last_device_node=device,
            last_host_node=best if self.enable_hicache else device,
            best_match_node=best,
            last_visited_node_id=visited,
            host_hit_length=host_tokens,
            full_kv_hit_length=tokens,
            cache_actions=[] if cut is None else [self._action(cut)],
        )

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        return self.tree.peek(key.raw_token_ids(), key.extra_key, key.cache_salt)

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        key = params.key
        tokens = key.raw_token_ids()
        if params.rotation_base is not None:
            raise _refused("rotation bases")
        slots = tokens if params.value is None else longs(params.value)
        # Who inserts outside of a checkpoint is done with it.
        program, asking = self.asker or (None, (None, len(tokens), 0, True))
        if self.asker is not None:
            # SGLang inserts the prompt once more, to cut the node where the answer begins.
            self.asker = (program, None)
        asked = (
            (key.extra_key, key.cache_salt),
            tokens,
            slots,
            params.prev_prefix_len,
            params.inserted_len,
            params.priority or 0,
            params.session_id,
            program,
            asking,
        )
        return self._step(*self.tree.begin_insert(asked), params.track_adopted_ranges)

    def resume_insert(self) -> InsertStepResult:
        return self._step(*self.tree.resume_insert(), self._tracks)

    def _step(self, told: list[tuple], done: tuple | None, tracks: bool) -> InsertStepResult:
        self._tracks = tracks
        actions = self._actions(told)
        if done is None:
            return InsertStepResult(actions=actions)
        found, node, taken = done
        is_empty = node == self._empty.last_device_node
        ranges = None if is_empty or not tracks else {FULL: taken} if taken else {}
        result = InsertResult(
            prefix_len=found,
            last_device_node=node,
            mamba_exist=is_empty,
            adopted_ranges=ranges,
        )
        return InsertStepResult(actions=actions, result=result)

    def has_ongoing_insert(self) -> bool:
        return self.tree.is_inserting()

    def end_insert(self) -> list:
        return self._actions(self.tree.end_insert())

    # Leases.

    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> IncLockRefResult:
        skipped = tuple(skip_lock_components)
        result = IncLockRefResult(node_id=node_id, skipped_lock_components=skipped)
        if FULL not in skipped:
            result.delta = self.tree.lease(node_id)
        return result

    @staticmethod
    def _check_anchor(node_id: int, params: DecLockRefParams) -> None:
        assert params.node_id == node_id, (
            f"lock receipt anchored on node {params.node_id} released on node {node_id}"
        )

    def dec_lock_ref(
        self, node_id: int, params: DecLockRefParams, skip_swa: bool = False
    ) -> DecLockRefResult:
        self._check_anchor(node_id, params)
        if FULL not in params.skipped_lock_components:
            self.tree.release(node_id)
        return DecLockRefResult()

    def dec_swa_lock_only(self, node_id: int, params: DecLockRefParams) -> DecSwaLockOnlyResult:
        self._check_anchor(node_id, params)
        return DecSwaLockOnlyResult()

    def inc_host_lock_ref(self, node_id: int) -> IncLockRefResult:
        result = IncLockRefResult(node_id=node_id)
        receipt = self.tree.lease_host(node_id)
        if receipt is not None:
            result.set_lock_uuid(FULL, receipt, lock_host=True)
        return result

    def dec_host_lock_ref(self, node_id: int, params: DecLockRefParams) -> DecLockRefResult:
        self._check_anchor(node_id, params)
        skipped = FULL in params.skipped_lock_components
        if FULL in params.component_host_lock_uuids and not skipped:
            self.tree.release_host(node_id, params.get_lock_uuid(FULL, lock_host=True))
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        self.tree.lease(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        self.tree.release(node_id)

    # Eviction.

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        self.tree.expire_pins()
        self.tree.begin_walk(request_cnt)

    def evict_device_next_node(
        self, component_type: ComponentType, tracker: dict[ComponentType, int]
    ) -> EvictDeviceNextNodeResult:
        node = self.tree.next_leaf(tracker.get(FULL, 0))
        return EvictDeviceNextNodeResult(node_id=node, made_progress=node is not None)

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        assert is_write_back == self.is_write_back, "another write policy than the tree's"
        freed, copies = self.tree.take_leaf(node_id)
        if freed is None:
            return EvictDeviceLeafResult(backup_kv=BackupKV(node_ids=copies))
        return self._freed(freed, EvictDeviceLeafResult())

    def evict_device_end(self, component_type: ComponentType) -> None:
        self.tree.end_walk()

    def demote(self, node_id: int) -> DemoteResult:
        return self._freed(self.tree.demote(node_id), DemoteResult())

    def drop_subtree_no_host(self, node_id: int) -> DropSubtreeNoHostResult:
        freed = self.tree.drop_branch(node_id)
        if freed is None:
            return DropSubtreeNoHostResult(is_dropped=False)
        return self._freed(freed, DropSubtreeNoHostResult(is_dropped=True))

    def drive_host_eviction(
        self, component_type: ComponentType, num_tokens: int
    ) -> DriveHostEvictionResult:
        if component_type != FULL:
            return DriveHostEvictionResult()
        keeps = envs.SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM.get()
        return self._freed(self.tree.evict_host(num_tokens, keeps), DriveHostEvictionResult())

    def finish_mamba_state_eviction(self, node_id: int) -> EvictDeviceNextNodeResult:
        raise _refused("Mamba states")

    def finish_swa_state_eviction(self, node_id: int) -> EvictDeviceNextNodeResult:
        raise _refused("sliding windows")

    def evict_excess_path_states(self, *args: Any, **kwargs: Any) -> None:
        raise _refused("Mamba states")

    # The host tier and stores.

    def is_backuped(self, node_id: int) -> bool:
        return self.tree.places(node_id)[1]

    def is_full_device_evicted(self, node_id: int) -> bool:
        return not self.tree.places(node_id)[0]

    def is_root(self, node_id: int) -> bool:
        return self.tree.is_root(node_id)

    def is_write_through_compatible(self) -> bool:
        return self.tree.copies_are_prefixes()

    def build_backup_spec(self, node_id: int) -> tuple[torch.Tensor, dict]:
        return self._tensor(self.tree.backup_source(node_id)), {}

    def commit_backup(self, node_id: int, host_indices: torch.Tensor, comp_xfers: dict) -> None:
        self.tree.commit_backup(node_id, longs(host_indices))

    def build_load_back_spec(
        self, node_id: int, req: Any | None = None
    ) -> tuple[PoolTransfer, dict]:
        raw, nodes = self.tree.load_plan(node_id)
        source = PoolTransfer(
            name=PoolName.KV,
            host_indices=host_tensor(raw),
            device_indices=None,
            nodes_to_load=nodes,
        )
        return source, {}

    def commit_load_back(
        self, node_id: int, device_indices: torch.Tensor, kv_xfer: PoolTransfer, comp_xfers: dict
    ) -> list:
        kv_xfer.device_indices = device_indices
        self.tree.commit_load(node_id, kv_xfer.nodes_to_load or [], longs(device_indices))
        return []

    def finish_load_back(self, anchor_node_id: int) -> None:
        self.tree.finish_load(anchor_node_id)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> list[int]:
        return self.tree.begin_write(list(node_ids), ack_id)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        self.tree.finish_write(list(node_ids), ack_id)

    def insert_host(
        self, node_id: int, key: RadixKey, host_value: torch.Tensor, hash_value: list[str]
    ) -> InsertResult:
        tokens = key.raw_token_ids()
        if not len(tokens):
            return InsertResult(prefix_len=0, mamba_exist=True)
        found, node, dropped, told = self.tree.insert_host(
            node_id,
            tokens,
            longs(host_value),
            list(hash_value),
            (key.extra_key, key.cache_salt),
        )
        return InsertResult(
            prefix_len=found,
            total_len=len(tokens),
            inserted_host_node=node,
            host_insert_dropped=dropped,
            cache_actions=self._actions(told),
        )

    def build_storage_backup_spec(
        self, node_id: int, pass_prefix_keys: bool
    ) -> StorageBackupSpec | None:
        copy = self.tree.own_copy(node_id)
        if copy is None:
            return None
        return StorageBackupSpec(
            host_value=host_tensor(copy[0]),
            token_ids=wide(copy[1]),
            hash_value=self.tree.names(node_id),
            prefix_keys=self.tree.names_before(node_id) if pass_prefix_keys else None,
            comp_xfers={},
        )

    def build_hicache_transfers(
        self,
        component_type: ComponentType,
        node_id: int,
        phase: CacheTransferPhase,
        **kwargs: Any,
    ) -> list[PoolTransfer] | None:
        if component_type != FULL or phase != CacheTransferPhase.LOAD_BACK:
            return None
        return [self.build_load_back_spec(node_id)[0]]

    def commit_hicache_transfers(
        self, node_id: int, phase: CacheTransferPhase, comp_xfers: dict, **kwargs: Any
    ) -> None:
        if any(comp_xfers.values()):
            raise _refused("components beside FULL")

    def prefetch_anchor_info(self, node_id: int) -> tuple[str | None, str | None]:
        return self.tree.namespace_of(node_id)

    def get_last_hash_value(self, node_id: int) -> str | None:
        names = self.tree.names(node_id)
        return names[-1] if names else None

    def get_hash_values(self, node_id: int) -> list[str]:
        return self.tree.names(node_id) or []

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        return self.tree.names_before(node_id)

    def backfill_missing_hash_values(self) -> int:
        return self.tree.name_all()

    def snapshot_buffer_backup(self, node_id: int, pass_prefix_keys: bool) -> Any:
        raise _refused("buffer-only host memory")

    def validate_buffer_backup(self, node_id: int, expected_key_length: int) -> Any:
        raise _refused("buffer-only host memory")

    def build_external_linker_offload_transfers(self, node_id: int) -> Any:
        raise _refused("external cache linker")

    def mark_external_cache_stored_path(self, from_node_id: int, until_node_id: int) -> None:
        raise _refused("external cache linker")

    def mark_external_linker_offload_pending(self, node_id: int) -> None:
        raise _refused("external cache linker")

    def finish_external_linker_offload(self, *args: Any) -> None:
        raise _refused("external cache linker")

    @property
    def write_back_duplicate_reclaim_digest(self) -> int:
        return self.tree.reclaim_digest

    # What the controller counts and shows.

    def adjust_component_size(
        self, node_id: int, component_type: ComponentType, delta: int
    ) -> None:
        raise _refused("values whose size changes in place")

    def total_size(self) -> tuple[int, int]:
        return self.tree.evictable + self.tree.protected, 0

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        return self._tensor(self.tree.device_slots(from_node_id, until_node_id))

    def all_values_flatten(self) -> torch.Tensor:
        return self._tensor(self.tree.rows(True)[0])

    def all_mamba_values_flatten(self) -> torch.Tensor:
        return torch.tensor([], dtype=torch.int64, device=self.device)

    def walk_for_kv_canary(
        self, unlocked_only: bool, swa_resident_only: bool
    ) -> RadixCacheWalkResult:
        slots, positions, before = self.tree.rows(not unlocked_only)
        return RadixCacheWalkResult(
            slot_indices=host_tensor(slots),
            positions=host_tensor(positions),
            prev_slot_indices=host_tensor(before),
        )

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        return self.tree.order_by_weight(list(node_ids))

    def collect_path_info(
        self, end_node_ids: Sequence[int]
    ) -> tuple[tuple[TreePathNodeInfo, ...], ...]:
        paths = (self.tree.path(node) for node in end_node_ids)
        return tuple(tuple(TreePathNodeInfo(*part) for part in path) for path in paths)

    def get_component_device_value(
        self, node_id: int, component_type: ComponentType
    ) -> torch.Tensor | None:
        raw = self.tree.own_slots(node_id) if component_type == FULL else None
        return None if raw is None else self._tensor(raw)

    def set_component_device_value(
        self, node_id: int, component_type: ComponentType, value: torch.Tensor
    ) -> None:
        raise _refused("components beside FULL")

    def component_has_host_value_only(self, node_id: int, component_type: ComponentType) -> bool:
        on_device, on_host = self.tree.places(node_id)
        return component_type == FULL and on_host and not on_device

    def swa_tombstone_ranges(self, *args: Any, **kwargs: Any) -> list[tuple[int, int]]:
        raise _refused("sliding windows")

    def attach_swa_window(self, *args: Any, **kwargs: Any) -> list:
        raise _refused("sliding windows")

    def sanity_check(
        self,
        ongoing_write_through: list[tuple[int, int]],
        ongoing_load_back: list[tuple[int, int]],
    ) -> None:
        self.tree.check()

    def pretty_print(self) -> None:
        print(self.tree.outline(), end="")
