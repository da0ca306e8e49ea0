"""Spans that are coded: what heads keep stands there as its codes have it, wherever it stood."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_chosen_entries import LastDimension, expected_of

from kvtier.heads.profile import ModelShape
from kvtier.retention.shares import PAGE
from kvtier_kernels import get_kernels
from kvtier_kernels.codes import coded_shape, recoded
from kvtier_sglang.attention.lists import RequestLists
from kvtier_sglang.compression.selection import AdaptiveSelection
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.packed import PackedSpan, Part

LAYERS, HEADS, GROUP, DIM, BITS = 2, 3, 2, 16, 4
SHAPE = ModelShape(
    num_layers=LAYERS, num_kv_heads=HEADS, num_attention_heads=HEADS * GROUP, head_dim=DIM
)
SLOTS, HELD = 512, coded_shape(BITS, DIM).entries


def a_pool(seed: int, bits: int = BITS) -> HeadPagedKVPool:
    pool = HeadPagedKVPool(
        SLOTS, shape=SHAPE, dtype=torch.float32, device="cpu", state_width=0, packs=True, bits=bits
    )
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.kv:
        layer.k.copy_(torch.randn(layer.k.shape, generator=generator))
        layer.v.copy_(-layer.k)
    return pool


def compacted(pool: HeadPagedKVPool, slots: torch.Tensor, keep: int) -> PackedSpan | None:
    selection = AdaptiveSelection(pool, LastDimension(), [None] * LAYERS)
    stay, free = selection.compact(slots, 0, keep)
    assert torch.equal(torch.cat((stay, free)).sort().values, slots.sort().values)
    return pool.packed.in_row(stay)[0] if free.numel() else None


def by_column(pool: HeadPagedKVPool, span: PackedSpan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    k, v = pool.packed.decoded(span)
    return list(zip(k.split(span.counts), v.split(span.counts), strict=True))


def keys_of(pool: HeadPagedKVPool, slots: torch.Tensor) -> list[torch.Tensor]:
    return [layer.k[slots, head].clone() for layer in pool.kv for head in range(HEADS)]


@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(20, SLOTS // PAGE * PAGE - 20),
    share=st.floats(0.01, 1),
    bits=st.sampled_from([3, 4, 8]),
)
def test_what_is_kept_is_what_its_codes_say(seed, tokens, share, bits):
    """The entries are in as many bundles as the pages of all columns fill, and in order of
    position."""
    pool, held = a_pool(seed, bits), coded_shape(bits, DIM).entries
    slots = PAGE + torch.arange(tokens)
    slots = slots[torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))]
    keep = max(1, int(share * tokens))
    keys = keys_of(pool, slots)
    span = compacted(pool, slots, keep)
    bundles = min(math.ceil(min(keep, tokens) / held), tokens // PAGE)
    if span is None:
        assert not 0 < PAGE * bundles < tokens
        return
    assert span.slots.numel() == PAGE * bundles
    kept = expected_of(keys, min(held * bundles, tokens), held)
    for (k, v), mine in zip(by_column(pool, span), kept, strict=True):
        expected_k, expected_v = recoded(mine[None], -mine[None], bits)
        torch.testing.assert_close(k, expected_k[0])
        torch.testing.assert_close(v, expected_v[0])
    assert list(pool.packed.problems(torch.zeros(SLOTS + 1, dtype=torch.int64))) == []


@given(seed=st.integers(0, 1000), at=st.integers(60, 380), again=st.integers(20, 40))
def test_a_cut_leaves_the_first_codes_as_they_were(seed, at, again):
    """The cut codes the others anew, as often as that is."""
    pool = a_pool(seed)
    span = compacted(pool, PAGE + torch.arange(400), 100)
    assert span is not None
    next_free = PAGE + 400 + PAGE - (PAGE + 400) % PAGE
    for token in (at, again):
        before = by_column(pool, span)
        parts = Part.of(span, 0, token), Part.of(span, token, 400)
        above, below = (part.slots for part in parts)
        if not above or above > span.slots.numel() or not below:
            return
        slots = torch.arange(next_free, next_free + below)
        first = span.tokens.split(span.counts)
        left = pool.packed.cut(span, *parts, span.slots[:above].clone(), slots)
        assert above + left.numel() == span.slots.numel()
        pool.packed.forget(left)
        span, later = (pool.packed.of(x) for x in (span.slots[:above], slots))
        assert later.slots.numel() == below
        for column, (k, v) in enumerate(before):
            mine = first[column] < token
            for part, those in ((span, mine), (later, ~mine)):
                found = by_column(pool, part)[column]
                step = 0 if part is span else 0.5
                torch.testing.assert_close(found[0], k[those], atol=step, rtol=0)
                torch.testing.assert_close(found[1], v[those], atol=step, rtol=0)
        next_free += below


@pytest.mark.parametrize("new", [1, 5])
def test_requests_attend_to_codes_and_to_what_is_dense(new):
    """Also one that has no codes, and one that has nothing else."""
    pool, kernels = a_pool(5), get_kernels("reference")
    rows = torch.zeros(4, SLOTS, dtype=torch.int32)
    span = compacted(pool, PAGE + torch.arange(400), 100)
    assert span is not None
    dense = torch.arange(420, 440)
    lists = RequestLists(kernels, pool, rows)
    prefixes = [torch.cat((span.slots, dense)), dense, span.slots]
    counts = [lists.begin(row, slots, slots[:0]).numel() for row, slots in enumerate(prefixes)]
    assert counts == [20, 20, 0]
    q = torch.randn(3 * new, HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(1))
    plans = lists.prefixes(torch.arange(3), counts)
    for layer in range(LAYERS):
        state = lists.extend(q, range(0, 3 * new + 1, new), plans, layer, 0.25)
        if new == 1:
            decoded = lists.decode(q, plans, layer, 0.25)
            torch.testing.assert_close(decoded.o, state.o)
        codes = by_column(pool, span)[layer * HEADS : (layer + 1) * HEADS]
        for request in range(3):
            for head, (k, v) in enumerate(codes):
                here = [pool.kv[layer].k[dense, head], pool.kv[layer].v[dense, head]]
                parts = [here] * (request < 2) + [[k, v]] * (request != 1)
                keys, values = (torch.cat(x) for x in zip(*parts, strict=True))
                mine = q[request * new : (request + 1) * new, head]
                weights = (mine @ keys.T * 0.25).softmax(-1)
                found = state.o[request * new : (request + 1) * new, head]
                torch.testing.assert_close(found, weights @ values, atol=1e-5, rtol=1e-4)
    # A row that loses its codes has none.
    lists.begin(0, dense, dense[:0])
    plans = lists.prefixes(torch.arange(2), [20, 20])
    state = lists.decode(torch.cat((q[:1], q[:1])), plans, 0, 0.25)
    torch.testing.assert_close(state.o[0], state.o[1])
