"""Tensors at the edge: what goes into the tree and what comes out of it."""

from __future__ import annotations

from array import array
from typing import Any

import torch


def longs(values: torch.Tensor) -> Any:
    """A buffer of 64-bit integers of a tensor, from any device."""
    return values.detach().to("cpu", torch.int64).contiguous().numpy()


def host_tensor(raw: bytearray) -> torch.Tensor:
    if not raw:
        return torch.empty((0,), dtype=torch.int64)
    return torch.frombuffer(raw, dtype=torch.int64)


def wide(raw: bytearray) -> array:
    tokens = array("q")
    tokens.frombytes(raw)
    return tokens
