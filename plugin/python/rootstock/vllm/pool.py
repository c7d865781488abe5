"""vLLM's block pool over Rootstock's cache.

The order in which blocks go, which prefix is cached, and pins are the core's; the objects and the
events are vLLM's. A block that was computed twice stays with its request and carries no hash.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved
from vllm.logger import init_logger
from vllm.v1.core import block_pool as stock
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
)

import rootstock

from .hints import hints_of
from .settings import Settings

logger = init_logger("vllm.rootstock")


class FreeBlocks:
    """What remains of vLLM's free queue: how many blocks can be had."""

    def __init__(self, blocks: rootstock.Blocks) -> None:
        self._blocks = blocks

    @property
    def num_free_blocks(self) -> int:
        return self._blocks.available()


class BlockPool(stock.BlockPool):
    """Stands where vLLM's BlockPool stands, for one group of full attention."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = MEDIUM_GPU,
        *,
        settings: Settings | None = None,
        request_blocks: int = 0,
    ) -> None:
        settings = settings or Settings()
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.medium = medium
        self.rootstock = rootstock.Blocks(
            num_gpu_blocks,
            policy=settings.policy,
            pin_budget=settings.pin_budget,
            request_blocks=request_blocks,
            block_tokens=hash_block_size,
        )
        self.blocks = self.rootstock.blocks()
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeBlocks(self.rootstock)
        self.kv_event_queue: list[Any] = []
        self.preempting = False
        self._reuse_watchers: dict[int, Callable[[Any], None]] = {}

    # Lookup.

    def find(self, block_hashes: Sequence[bytes], count: int) -> list[Any]:
        """The blocks of the longest cached prefix among the first `count` hashes."""
        return self.rootstock.find(block_hashes, count)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        block = self.rootstock.block_of(block_hash)
        return None if block is None else [block] * len(kv_cache_group_ids)

    # From free to cached and back.

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        blocks, gone = self.rootstock.allocate(num_blocks)
        if gone and self.enable_kv_cache_events:
            self._tell_removed(gone)
        if self._reuse_watchers:
            self._notify_reuse(blocks)
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_evicted(block)
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def touch(self, blocks: Sequence[Any]) -> None:
        if not blocks:
            return
        self.rootstock.touch(blocks)
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if block_mask is not None and not all(block_mask):
            num_full_blocks = num_cached_blocks + block_mask.index(False)
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        hints = hints_of(request, block_size)
        self.rootstock.cache(blocks, num_cached_blocks, num_full_blocks, hashes, hints)
        if self.enable_kv_cache_events:
            span = range(num_cached_blocks, num_full_blocks)
            self._tell_stored(request, hashes, span, block_size, kv_cache_group_id)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        self.rootstock.free(ordered_blocks, self.preempting)

    # What else vLLM asks of a pool.

    def cache_partial_block(self, *_args: Any, **_kwargs: Any) -> None:
        """Only groups that this pool does not serve have partial blocks."""
        return None

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        self._maybe_evict_cached_block(src_block)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        blocks = list(blocks)
        for block in blocks:
            self._reuse_watchers[block.block_id] = on_reuse
        self.rootstock.free(blocks)

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        if self.metrics_collector:
            self.metrics_collector.on_block_evicted(block)
        gone = self.rootstock.spoil(block.block_id)
        if gone is not None and self.enable_kv_cache_events:
            self._tell_removed([gone])
        return gone is not None

    def reset_prefix_cache(self) -> bool:
        if not self.rootstock.reset():
            used = sum(block.ref_cnt > 0 for block in self.blocks)
            logger.warning("The prefix cache is not reset: %d blocks are in use", used)
            return False
        if self._reuse_watchers:
            self._notify_reuse([self.blocks[at] for at in list(self._reuse_watchers)])
        if self.metrics_collector:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def get_num_free_blocks(self) -> int:
        return self.rootstock.available()

    # Events, as vLLM's own pool makes them.

    def _tell_removed(self, hashes: list[bytes]) -> None:
        for name in hashes:
            self.kv_event_queue.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(name)],
                    medium=self.medium,
                    group_idx=0,
                )
            )

    def _tell_stored(
        self, request: Any, hashes: Sequence[bytes], span: range, block_size: int, group: int
    ) -> None:
        keys, at = [], 0
        for index in span:
            start = index * block_size
            key, at = generate_block_hash_extra_keys(request, start, start + block_size, at)
            keys.append(key)
        parent = maybe_convert_block_hash(hashes[span.start - 1]) if span.start else None
        self.kv_event_queue.append(
            self._build_block_stored_event(
                request,
                block_hashes=[maybe_convert_block_hash(hashes[index]) for index in span],
                parent_block_hash=parent,
                start_token_idx=span.start * block_size,
                end_token_idx=span.stop * block_size,
                block_size=block_size,
                kv_cache_group_id=group,
                extra_keys_list=keys,
            )
        )
