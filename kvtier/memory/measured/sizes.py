"""The bytes that are held of a prefix, and those that a generated token reads of it.

Lookups also read their projection, as every pass reads the model's weights: once, however many
tokens it computes. It is held, but not counted as read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier.heads.profile import ModelShape
from kvtier.memory.storage import IN_MODEL_DTYPE
from kvtier_kernels.memory.base import MemoryLayer


def exact_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the KV of so many tokens, in all layers and heads; held and read."""
    return tokens * kept_bytes(shape, 1, dtype) * shape.num_kv_heads * shape.num_layers


def kept_bytes(shape: ModelShape, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the KV of so many tokens in one KV head."""
    return tokens * 2 * shape.head_dim * dtype.itemsize


def held_bytes(layers: Sequence[MemoryLayer], dtype: torch.dtype) -> int:
    """Return the bytes of a memory, as it is stored for a model of that dtype."""
    return sum(
        tensor.numel() * (dtype if name in IN_MODEL_DTYPE else tensor.dtype).itemsize
        for layer in layers
        for name, tensor in layer._asdict().items()
    )


def read_bytes(layers: Sequence[MemoryLayer], dtype: torch.dtype, fell_back: float) -> int:
    """Return the bytes of a memory that a generated token reads, where that share of its lookups
    falls back."""
    total = 0.0
    for layer in layers:
        looks_up, kept = layer.looks_up[0], layer.kept_indptr.diff()
        group, dim = layer.o.shape[2:]
        total += layer.keys.numel() * layer.keys.element_size()
        token = 2 * dim * dtype.itemsize
        state = group * (dim * dtype.itemsize + layer.lse.dtype.itemsize)
        total += float(kept[~looks_up].sum()) * token
        total += float(kept[looks_up].sum()) * token * fell_back
        total += int(looks_up.sum()) * state * (1 - fell_back)
    return round(total)


__all__ = ["exact_bytes", "held_bytes", "kept_bytes", "read_bytes"]
