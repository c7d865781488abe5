"""Plain numpy forward pass of the Llama family (llama, qwen2, qwen3), the independent reference
for logits. It follows the published model definitions and the GGUF metadata; it shares no code
with the engine, keeps no cache and computes every position at once.

Weights are `{gguf tensor name: array}`, matrices as [out, in]. Sizes come from `Config`.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Config:
    arch: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_base: float
    rope_scaling: str = "none"  # none | linear | yarn
    rope_factor: float = 1.0
    rope_orig_ctx: int = 0

    @property
    def interleaved(self):
        """llama files hold q and k permuted for pairs (2i, 2i+1); qwen uses halves (i, i + d/2)."""
        return self.arch == "llama"


def rope_tables(cfg, positions, factors, dtype):
    half = cfg.head_dim // 2
    i = np.arange(half, dtype=np.float64)
    freq = cfg.rope_base ** (-2.0 * i / cfg.head_dim)
    if factors is not None:
        freq = freq / np.asarray(factors, dtype=np.float64)
    scale = 1.0
    if cfg.rope_scaling == "linear":
        freq = freq / cfg.rope_factor
    elif cfg.rope_scaling == "yarn":

        def correction(turns):
            return (
                cfg.head_dim
                * math.log(cfg.rope_orig_ctx / (turns * 2 * math.pi))
                / (2 * math.log(cfg.rope_base))
            )

        low = max(0, math.floor(correction(32.0)))
        high = min(cfg.head_dim - 1, math.ceil(correction(1.0)))
        ramp = np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
        freq = freq / cfg.rope_factor * ramp + freq * (1.0 - ramp)
        scale = 1.0 + 0.1 * math.log(cfg.rope_factor)
    angle = np.asarray(positions, dtype=np.float64)[:, None] * freq[None, :]
    return (np.cos(angle) * scale).astype(dtype), (np.sin(angle) * scale).astype(dtype)


def rope(x, cos, sin, interleaved):
    """x [n, heads, head_dim]."""
    out = np.empty_like(x)
    c, s = cos[:, None, :], sin[:, None, :]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        out[..., 0::2] = a * c - b * s
        out[..., 1::2] = a * s + b * c
    else:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        out[..., :half] = a * c - b * s
        out[..., half:] = a * s + b * c
    return out


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def forward(cfg, w, tokens, dtype=np.float32):
    """Logits [n, vocab] of a cold run over `tokens`."""
    w = _Cast(w, dtype)
    n = len(tokens)
    x = w["token_embd.weight"][np.asarray(tokens)]
    cos, sin = rope_tables(cfg, np.arange(n), w.get("rope_freqs.weight"), dtype)
    group = cfg.heads // cfg.kv_heads
    mask = np.triu(np.full((n, n), -np.inf, dtype=dtype), 1)
    for layer in range(cfg.layers):
        p = f"blk.{layer}."

        def linear(h, name):
            y = h @ w[p + name + ".weight"].T
            bias = w.get(p + name + ".bias")
            return y if bias is None else y + bias

        h = rms(x, w[p + "attn_norm.weight"], cfg.eps)
        q = linear(h, "attn_q").reshape(n, cfg.heads, cfg.head_dim)
        k = linear(h, "attn_k").reshape(n, cfg.kv_heads, cfg.head_dim)
        v = linear(h, "attn_v").reshape(n, cfg.kv_heads, cfg.head_dim)
        if w.get(p + "attn_q_norm.weight") is not None:
            q = rms(q, w[p + "attn_q_norm.weight"], cfg.eps)
            k = rms(k, w[p + "attn_k_norm.weight"], cfg.eps)
        q = rope(q, cos, sin, cfg.interleaved)
        k = rope(k, cos, sin, cfg.interleaved)
        att = np.empty((n, cfg.heads, cfg.head_dim), dtype=dtype)
        for head in range(cfg.heads):
            s = q[:, head] @ k[:, head // group].T * dtype(1.0 / math.sqrt(cfg.head_dim)) + mask
            s = np.exp(s - s.max(axis=-1, keepdims=True))
            att[:, head] = (s / s.sum(axis=-1, keepdims=True)) @ v[:, head // group]
        x = x + linear(att.reshape(n, -1), "attn_output")
        h = rms(x, w[p + "ffn_norm.weight"], cfg.eps)
        gate = linear(h, "ffn_gate")
        x = x + linear(gate / (1.0 + np.exp(-gate)) * linear(h, "ffn_up"), "ffn_down")
    x = rms(x, w["output_norm.weight"], cfg.eps)
    head = w.get("output.weight")
    return x @ (w["token_embd.weight"] if head is None else head).T


class _Cast:
    def __init__(self, w, dtype):
        self.w, self.dtype = w, dtype

    def __getitem__(self, name):
        return self.w[name].astype(self.dtype, copy=False)

    def get(self, name):
        return self[name] if name in self.w else None


def load_gguf(path):
    """(Config, weights as float32, tokens list) of a GGUF file, by the `gguf` package."""
    import gguf

    r = gguf.GGUFReader(path)

    def field(key, default=None):
        f = r.get_field(key)
        return default if f is None else f.contents()

    arch = field("general.architecture")
    heads = field(f"{arch}.attention.head_count")
    dim = field(f"{arch}.embedding_length")
    cfg = Config(
        arch=arch,
        layers=field(f"{arch}.block_count"),
        dim=dim,
        heads=heads,
        kv_heads=field(f"{arch}.attention.head_count_kv", heads),
        head_dim=field(f"{arch}.attention.key_length", dim // heads),
        eps=field(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_base=field(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=field(f"{arch}.rope.scaling.type", "none"),
        rope_factor=field(f"{arch}.rope.scaling.factor", 1.0),
        rope_orig_ctx=field(f"{arch}.rope.scaling.original_context_length", 0),
    )
    w = {}
    for t in r.tensors:
        shape = [int(d) for d in reversed(t.shape)]
        w[t.name] = gguf.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)
    return cfg, w
