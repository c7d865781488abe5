"""Stands for SGLang's kernels, of which none is published for CPUs: torch-native layers call none."""

__version__ = "0.0.0"


def copy_all_layer_kv_cache_cpu(*args, **kwargs):
    raise NotImplementedError("no kernels on this machine")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return copy_all_layer_kv_cache_cpu
