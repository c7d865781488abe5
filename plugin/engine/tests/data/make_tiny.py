"""Makes the golden logits of the tiny seeded models (tiny_*.golden beside this file).

    python3 plugin/engine/tests/data/make_tiny.py

The weights are a function of (tensor name, index), the same one that `tests/support/tiny.rs`
has, so only the logits are stored: little-endian f32 [positions][vocab], computed in float64 by
`tests/reference/llama_ref.py`.
"""

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3] / "tests" / "reference"))
from llama_ref import Config, forward  # noqa: E402

VOCAB, DIM, FFN, LAYERS, HEADS, KV_HEADS, POSITIONS = 304, 64, 96, 2, 4, 2, 40


def mix(z):
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def fnv(name):
    h = 0xCBF29CE484222325
    for b in name.encode():
        h = ((h ^ b) * 0x100000001B3) % 2**64
    return np.uint64(h)


def values(name, shape):
    """Uniform in [-1, 1) with 24 bits, then scaled and shifted by kind; exact in f32 steps."""
    with np.errstate(over="ignore"):
        z = mix(fnv(name) + np.arange(np.prod(shape), dtype=np.uint64))
    u = (z >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    if name == "rope_freqs.weight":
        u = 2.0 + u
    elif name.endswith("norm.weight"):
        u = 1.0 + 0.25 * u
    elif name == "token_embd.weight":
        pass
    elif name.endswith(".bias"):
        u = 0.5 * u
    else:
        u = 0.25 * u
    return u.astype(np.float32).reshape(shape)


def model(arch):
    head_dim = 32 if arch == "qwen3" else DIM // HEADS
    cfg = Config(arch, LAYERS, DIM, HEADS, KV_HEADS, head_dim, 1e-5, 10000.0)
    names = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    if arch == "llama":
        names["rope_freqs.weight"] = (head_dim // 2,)
    if arch == "qwen2":
        cfg.rope_scaling, cfg.rope_factor = "linear", 4.0
    if arch == "qwen3":
        names["output.weight"] = (VOCAB, DIM)
        cfg.rope_scaling, cfg.rope_factor, cfg.rope_orig_ctx = "yarn", 4.0, 1024
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        names[p + "attn_norm.weight"] = (DIM,)
        names[p + "ffn_norm.weight"] = (DIM,)
        names[p + "attn_q.weight"] = (HEADS * head_dim, DIM)
        names[p + "attn_k.weight"] = (KV_HEADS * head_dim, DIM)
        names[p + "attn_v.weight"] = (KV_HEADS * head_dim, DIM)
        names[p + "attn_output.weight"] = (DIM, HEADS * head_dim)
        names[p + "ffn_gate.weight"] = (FFN, DIM)
        names[p + "ffn_up.weight"] = (FFN, DIM)
        names[p + "ffn_down.weight"] = (DIM, FFN)
        if arch == "qwen2":
            names[p + "attn_q.bias"] = (HEADS * head_dim,)
            names[p + "attn_k.bias"] = (KV_HEADS * head_dim,)
            names[p + "attn_v.bias"] = (KV_HEADS * head_dim,)
        if arch == "qwen3":
            names[p + "attn_q_norm.weight"] = (head_dim,)
            names[p + "attn_k_norm.weight"] = (head_dim,)
    return cfg, {name: values(name, shape) for name, shape in names.items()}


def tokens():
    return [(i * 37 + 11) % VOCAB for i in range(POSITIONS)]


def main():
    for arch in ("llama", "qwen2", "qwen3"):
        cfg, w = model(arch)
        logits = forward(cfg, w, tokens(), np.float64)
        assert np.isfinite(logits).all()
        path = HERE / f"tiny_{arch}.golden"
        path.write_bytes(logits.astype("<f4").tobytes())
        print(path.name, logits.shape, "largest", np.abs(logits).max())


if __name__ == "__main__":
    main()
