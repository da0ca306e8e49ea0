"""Packed spans: where every head's entries stand, what is moved there, and attention over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.heads.profile import ModelShape, full_profile
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.scorers import TokenScorer
from kvtier_kernels import get_kernels
from kvtier_sglang.attention.packed import PackedPlan
from kvtier_sglang.compression.packing import AdaptiveSelection
from kvtier_sglang.pool.allocator import HeadSplitAllocator
from kvtier_sglang.pool.kv_pool import HeadSplitKVPool
from kvtier_sglang.pool.packed import PackedSpan

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 4
SHAPE = ModelShape(
    num_layers=LAYERS, num_kv_heads=HEADS, num_attention_heads=HEADS * GROUP, head_dim=DIM
)
SLOTS = 80


@dataclass(frozen=True)
class LastDimension(TokenScorer):
    """A key's last number is its worth, so that a test can say which entries stay."""

    name: ClassVar[str] = "last-dimension"
    comparable: ClassVar[bool] = True

    def score(self, span):
        assert torch.equal(span.values, -span.keys)
        return span.keys[..., -1].float()


def a_pool(seed: int) -> HeadSplitKVPool:
    pool = HeadSplitKVPool(
        SLOTS, SLOTS, profile=full_profile(SHAPE), dtype=torch.float32, device="cpu", start_layer=0,
        state_width=0, packs=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for buffers in pool.ca:
        buffers.k.copy_(torch.randn(buffers.k.shape, generator=generator))
        buffers.v.copy_(-buffers.k)
    return pool


def entries(pool: HeadSplitKVPool, slots: torch.Tensor) -> list[torch.Tensor]:
    """`[tokens, dim]` keys of every column."""
    return [buffers.k[slots, head].clone() for buffers in pool.ca for head in range(HEADS)]


def expected_of(keys: list[torch.Tensor], keep: int) -> list[torch.Tensor]:
    """What every column keeps."""
    kept = adaptive_selection(torch.stack([k[:, -1] for k in keys]), keep)
    return [k[mine] for k, mine in zip(keys, kept, strict=True)]


def packed_span(pool, slots, keep) -> PackedSpan:
    AdaptiveSelection(pool, LastDimension(), [None] * LAYERS).compact(slots, 0, keep)
    (span,) = pool.packed.in_row(slots[:keep])
    return span


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=6), data=st.data())
def test_every_entry_has_a_cell_of_its_own_and_its_own_column_first(counts, data):
    least = max(math.ceil(sum(counts) / len(counts)), 1)
    keep = data.draw(st.integers(least, 12))
    n = len(counts)
    shape = ModelShape(num_layers=1, num_kv_heads=n, num_attention_heads=n, head_dim=DIM)
    pool = HeadSplitKVPool(
        20, 0, profile=full_profile(shape), dtype=torch.float32, device="cpu", start_layer=0,
        packs=True,
    )  # fmt: skip
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(keep))[:keep] + 1
    span = PackedSpan(slots, tuple(counts))
    cells = span.cells(pool.packed.cells)
    assert torch.unique(cells).numel() == cells.numel() == sum(counts)
    allowed = pool.packed.cells.of(slice(None), slots)
    assert torch.isin(cells, allowed).all()
    for column, (begin, count) in enumerate(zip(span.indptr, counts, strict=False)):
        own = cells[begin : begin + min(count, keep)]
        assert torch.equal(own, allowed[column, : own.numel()])


@given(
    seed=st.integers(0, 1000), tokens=st.integers(2, 40), share=st.floats(0.05, 0.95),
)  # fmt: skip
def test_the_best_entries_of_all_heads_stay(seed, tokens, share):
    pool = a_pool(seed)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=generator)[:tokens] + 1
    keep = min(max(int(share * tokens), 1), tokens - 1)
    expected = expected_of(entries(pool, slots), keep)
    span = packed_span(pool, slots, keep)
    cells = pool.packed.cells
    place = span.cells(cells)
    for column, k in enumerate(expected):
        own = place[span.indptr[column] : span.indptr[column + 1]]
        torch.testing.assert_close(cells.k[own, 0], k)
        torch.testing.assert_close(cells.v[own, 0], -k)
    assert sum(span.counts) == keep * LAYERS * HEADS


@given(seed=st.integers(0, 1000), spans=st.integers(0, 2), tokens=st.integers(1, 5))
def test_attention_is_that_over_the_entries_that_stay(seed, spans, tokens):
    """Two requests: one with packed spans, another with ordinary entries only."""
    pool, kernels = a_pool(seed), get_kernels("reference", "cpu")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SLOTS, generator=generator) + 1
    ordinary = (order[:7], order[7:10])
    held = []
    for number in range(spans):
        slots = order[10 + 20 * number : 30 + 20 * number]
        held.append(expected_of(entries(pool, slots), 8))
        packed_span(pool, slots, 8)
    rows = [
        torch.cat([ordinary[0], *(order[10 + 20 * n : 18 + 20 * n] for n in range(spans))]),
        ordinary[1],
    ]
    plan = PackedPlan(kernels, pool, tuple(pool.packed.in_row(row) for row in rows))
    q = torch.randn(2 * tokens, HEADS, GROUP, DIM, generator=generator)
    k, v = (torch.randn(2 * tokens, HEADS, DIM, generator=generator) for _ in range(2))
    q_indptr = (0, tokens, 2 * tokens)
    for layer in range(LAYERS):
        extended = plan.extend(layer, q, k, v, q_indptr, ordinary, 0.5)
        first = torch.stack([q[0], q[tokens]])
        decoded = plan.decode(layer, first, 0.5)
        for request, begin in enumerate((0, tokens)):
            for head in range(HEADS):
                column = layer * HEADS + head
                of_spans = [span[column] for span in held] if request == 0 else []
                keys = torch.cat([torch.empty(0, DIM), *of_spans])
                query = q[begin, head]
                if len(keys):
                    logits = query @ keys.T * 0.5
                    torch.testing.assert_close(decoded.lse[request, head], logits.logsumexp(-1))
                    expected = logits.softmax(-1) @ -keys
                    torch.testing.assert_close(decoded.o[request, head], expected)
                else:
                    assert torch.isinf(decoded.lse[request, head]).all()
                mine = pool.ca[layer].k[ordinary[request], head]
                for token in range(tokens):
                    new = slice(begin, begin + token + 1)
                    every = torch.cat([keys, mine, k[new, head]])
                    values = torch.cat([-keys, -mine, v[new, head]])
                    logits = q[begin + token, head] @ every.T * 0.5
                    torch.testing.assert_close(
                        extended[begin + token, head], logits.softmax(-1) @ values
                    )


def test_slots_that_are_freed_are_ordinary_again():
    pool = a_pool(0)
    allocator = HeadSplitAllocator(pool, streaming_tokens=None, need_sort=False)
    slots = allocator.alloc(30)
    allocator.free_locality(slots)
    packed_span(pool, slots, 10)
    allocator.compact(slots, 10)
    assert allocator.check_integrity() == []
    assert allocator.available_size() == SLOTS - 10
    assert int((pool.packed.dense_of == 0).sum()) == 11
    allocator.free(slots[:10])
    assert allocator.check_integrity() == []
    assert pool.packed.in_row(slots) == ()
    assert torch.equal(pool.packed.dense_of, torch.arange(SLOTS + 1))


def test_a_packed_slot_that_is_free_is_noticed():
    pool = a_pool(0)
    allocator = HeadSplitAllocator(pool, streaming_tokens=None, need_sort=False)
    slots = allocator.alloc(30)
    packed_span(pool, slots, 10)
    allocator.free_pages = torch.cat([allocator.free_pages, slots[:1]])
    assert "a free slot is packed" in allocator.check_integrity()
