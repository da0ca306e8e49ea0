"""A small memory, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvtier.heads.profile import ModelShape
from kvtier.memory.card import Identity, Row
from kvtier.memory.storage import Card, save
from kvtier_kernels.memory.base import PLACE_WIDTH, MemoryLayer


def row(way: str, held: int, lost: float = 0.0) -> Row:
    return Row(
        way=way, requests=9, nll_gap=lost, kl=0, right=1, bytes_held=held, bytes_read=held
    )  # fmt: skip


def a_card(model_path: Path, prefix: list[int], **fields: Any) -> Card:
    identity = Identity.of(str(model_path), "float32", prefix)
    made: dict[str, Any] = {
        "model": identity.model, "revision": identity.revision, "identity": identity,
        "recipe": {"seed": 0}, "requeue_above": 0.4, "traces": {"making": 9}, "least_members": 1,
        "positions": 9, "build_seconds": 1.0, "target_nats": 0.05, "refusals": [],
        "rows": {"held-out requests": [row("exact", 1000), row("memory", 220, 0.0061)]},
    }  # fmt: skip
    return Card(**(made | fields))


def a_layer(shape: ModelShape, prefix: list[int]) -> MemoryLayer:
    """Two entries, and in every head one more token of the prefix than in the head before."""
    heads, group, dim = shape.num_kv_heads, shape.group_size, shape.head_dim
    counts = torch.arange(1, heads + 1)
    kept = int(counts.sum())
    random = torch.Generator().manual_seed(sum(prefix))
    return MemoryLayer(
        projection=torch.randn(1, 4, heads, group, dim, generator=random),
        keys=torch.randn(2, 4 + PLACE_WIDTH, generator=random),
        key_indptr=torch.tensor([0, 2], dtype=torch.int32),
        place_weight=torch.zeros(1),
        nearness=torch.zeros(1),
        prefix_tokens=torch.tensor([len(prefix)], dtype=torch.int32),
        o=torch.randn(2, heads, group, dim, generator=random),
        lse=torch.randn(2, heads, group, generator=random),
        looks_up=torch.zeros(1, heads, dtype=torch.bool),
        kept_k=torch.randn(kept, dim, generator=random),
        kept_v=torch.randn(kept, dim, generator=random),
        kept_indptr=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
    )


def write_memory(model_path: Path, folder: Path, prefix: list[int], **fields: Any) -> Card:
    """fields: of its card."""
    card = a_card(model_path, prefix, **fields)
    shape = card.identity.shape
    return save(folder, card, prefix, [a_layer(shape, prefix) for _ in range(shape.num_layers)])
