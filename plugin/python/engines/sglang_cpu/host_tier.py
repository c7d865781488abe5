"""Lets SGLang's host tier run without a GPU: memory is not registered, copies are torch's.

`HOST_TIER_FACTOR` scales what is copied: 0 shows that a test notices KV that is wrong.
"""

import os


def register():
    import sglang.srt.mem_cache.pool_host.mha as mha
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factor = float(os.environ.get("HOST_TIER_FACTOR", "1"))

    def copy(src_layers, dst_layers, src_indices, dst_indices, page_size):
        for source, into in zip(src_layers, dst_layers, strict=True):
            moved = source[src_indices.to(source.device)] * factor
            into[dst_indices.to(into.device)] = moved.to(into.dtype)

    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        lambda *args, **kwargs: None,
        HookType.REPLACE,
    )
    mha.transfer_kv_direct = copy
