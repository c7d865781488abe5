"""Rootstock for Python: a KV cache for agents, for engines that schedule themselves.

`Cache` is the prefix cache over buffers of token ids. `Blocks` is the same for engines that count
references to blocks; `rootstock.vllm` grafts it into vLLM. `SlotTree` is the tree alone, for
engines that own their slots; `rootstock.sglang` grafts it into SGLang. Nothing here imports an
engine.
"""

from ._rootstock import Block, Blocks, Cache, Hints, SlotTree, __version__, count_idle

__all__ = ["Block", "Blocks", "Cache", "Hints", "SlotTree", "__version__", "count_idle"]
