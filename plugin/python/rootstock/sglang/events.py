"""The events of our tree, as SGLang's recorder publishes them."""

from typing import Any

from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder


class Recorder(KVCacheEventRecorder):
    """SGLang's queue, with its rules of coalescing, filled from our tree."""

    def __init__(self, tree: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tree = tree
        self._last_extra: str | None = None

    def take(self) -> list:
        self._fill()
        return super().take()

    def record_all_cleared(self) -> None:
        self._fill()
        super().record_all_cleared()

    def _fill(self) -> None:
        if not self.enabled:
            return
        for kind, space, hashes, on_device, *rest in self._tree.take_events():
            extra, salt = space
            name = self._name_of(extra)
            seed = self._seed_of(extra, salt, name)
            if seed is not None:
                hashes = [namespaced_block_hash(one, namespace_seed=seed) for one in hashes]
            medium = StorageMedium.GPU if on_device else StorageMedium.CPU
            if kind == "removed":
                self._add(BlockRemoved(block_hashes=hashes, medium=medium), extra)
                continue
            parent, tokens, session = rest
            if parent is not None:
                parent = namespaced_block_hash(parent, namespace_seed=seed)
            stored = BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=self.page_size,
                lora_id=None,
                medium=medium,
                cache_salt=salt,
                session_id=session,
                lora_name=name,
            )
            self._add(stored, extra)

    def _add(self, event: BlockStored | BlockRemoved, extra: str | None) -> None:
        """As SGLang's default core, which never joins events of two extra keys."""
        if extra == self._last_extra:
            self.enqueue(event)
        else:
            self._queue.append(event)
        self._last_extra = extra

    def _name_of(self, extra: str | None) -> str | None:
        names = self.lora_names
        return names.resolve(extra) if self.dynamo_format else names.get(extra)

    def _seed_of(self, extra: str | None, salt: str | None, name: str | None) -> bytes | None:
        if self.dynamo_format:
            return kv_event_namespace_seed(extra_key=extra, cache_salt=salt)
        named = self.lora_names.get(extra) is not None
        return kv_event_namespace_seed(extra_key=extra if named else None, cache_salt=None)
