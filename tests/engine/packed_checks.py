"""Packed spans in a tree of tests: a scorer under which heads compete, and what spans must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from tree_requests import digest

from kvtier.heads.profile import ModelShape
from kvtier.retention.scorers import Span, TokenScorer
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.radix.contexts import pruned_ranges
from kvtier_sglang.radix.node import KvNode

SHAPE = ModelShape(num_layers=2, num_kv_heads=3, num_attention_heads=6, head_dim=2)


@dataclass(frozen=True)
class AnyOrder(TokenScorer):
    """Heads want different tokens, and different numbers of them."""

    name: ClassVar[str] = "any-order"
    comparable: ClassVar[bool] = True

    def score(self, span: Span) -> torch.Tensor:
        factors = torch.arange(2, 2 + span.keys.shape[0]) + 3 * span.layer
        return span.keys[..., 0] * factors[:, None] % 97


def compacted(row: torch.Tensor, node: KvNode) -> torch.Tensor:
    """Which positions of a row lie in spans of which CA heads keep a part."""
    moved = torch.zeros(len(row), dtype=torch.bool)
    for pruned in pruned_ranges(node):
        moved[pruned.begin : pruned.end] = True
    return moved


def check_packed(pool: HeadSplitKVPool, row: torch.Tensor, tokens: list[int], node: KvNode) -> None:
    """Ordinary entries hold the digest of their own prefix, packed ones that of a token of their
    span, each once."""
    expected = torch.tensor([digest(tokens[: p + 1]) for p in range(len(row))])
    moved = compacted(row, node)
    for buffers in pool.ca:
        for head in range(SHAPE.num_kv_heads):
            found = buffers.k[row, head, 0]
            assert torch.equal(found[~moved], expected[~moved]), "an entry misplaced"
    cells = pool.packed.cells
    for pruned, span in zip(pruned_ranges(node), pool.packed.in_row(row), strict=True):
        part = slice(pruned.begin, pruned.end)
        place = span.cells
        for begin, count in zip(span.indptr, span.counts, strict=False):
            kept = cells.k[place[begin : begin + count], 0, 0]
            assert torch.isin(kept, expected[part]).all(), "an entry of another context"
            assert kept.unique().numel() == kept.numel(), "one token kept twice"
