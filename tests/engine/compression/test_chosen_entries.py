"""Packed spans: what every head keeps stands there as it was or as its codes have it, wherever it
stood. That sessions answer over it as the reference does is in tests/engine/serving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.retention.head_budgets import adaptive_selection
from kvtier.retention.scorers import TokenScorer
from kvtier.retention.shares import PAGE
from kvtier_kernels.codes import recoded
from kvtier_sglang.compression.selection import AdaptiveSelection, ProfileSelection
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.packed import PackedSpan, Part, bundles_first

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 16
SHAPE = ModelShape(
    num_layers=LAYERS, num_kv_heads=HEADS, num_attention_heads=HEADS * GROUP, head_dim=DIM
)
SLOTS = 512


@dataclass(frozen=True)
class LastDimension(TokenScorer):
    """A key's last number is its worth, so that a test can say which entries stay."""

    name: ClassVar[str] = "last-dimension"
    comparable: ClassVar[bool] = True

    def score(self, span):
        assert torch.equal(span.values, -span.keys)
        return span.keys[..., -1].float()


def a_pool(seed: int, bits: int | None = None, votes: int = 0) -> HeadPagedKVPool:
    pool = HeadPagedKVPool(
        SLOTS, shape=SHAPE, dtype=torch.float32, device="cpu", state_width=0, packs=True,
        votes=votes, bits=bits,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.kv:
        layer.k.copy_(torch.randn(layer.k.shape, generator=generator))
        layer.v.copy_(-layer.k)
    return pool


def compacted(pool: HeadPagedKVPool, slots: torch.Tensor, keep: int) -> PackedSpan | None:
    """The span that so many tokens become, which their slots are; None where they stay."""
    selection = AdaptiveSelection(pool, LastDimension(), [None] * LAYERS)
    stay, free = selection.compact(slots, 0, keep)
    assert torch.equal(torch.cat((stay, free)).sort().values, slots.sort().values)
    return pool.packed.in_row(stay)[0] if free.numel() else None


def by_column(pool: HeadPagedKVPool, span: PackedSpan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    k, v = pool.packed.decoded(span)
    return list(zip(k.split(span.counts), v.split(span.counts), strict=True))


@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(17, 400),
    share=st.floats(0.01, 1),
    bits=st.sampled_from([None, 3, 4, 8]),
)
# A head that keeps all.
@example(seed=1, tokens=17, share=0.75, bits=None)
def test_the_best_pages_of_all_heads_stay(seed, tokens, share, bits):
    """They are in as many bundles as the pages of all columns fill, in order of position."""
    pool = a_pool(seed, bits)
    held = pool.packed.page
    # Some of whole bundles and some not, in any order.
    slots = torch.cat((PAGE + torch.arange(tokens), 430 + 2 * torch.arange(seed % 20)))
    slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
    tokens, whole = slots.numel(), bundles_first(slots)[1]
    keep = max(1, int(share * tokens))
    keys = [layer.k[slots, head].clone() for layer in pool.kv for head in range(HEADS)]
    span = compacted(pool, slots, keep)
    bundles = min(math.ceil(keep / held), whole // PAGE)
    if span is None:
        assert not 0 < PAGE * bundles < tokens
        return
    assert span.slots.numel() == PAGE * bundles
    kept = min(held * bundles, tokens)
    chosen = adaptive_selection(torch.stack([k[:, -1] for k in keys]), kept, held)
    for (k, v), key, mine in zip(by_column(pool, span), keys, chosen, strict=True):
        expected = key[mine], -key[mine]
        if bits is not None:
            expected = tuple(side[0] for side in recoded(key[mine][None], -key[mine][None], bits))
        torch.testing.assert_close((k, v), expected)
    assert list(pool.packed.problems(torch.zeros(SLOTS + 1, dtype=torch.int64))) == []


@given(seed=st.integers(0, 1000), tokens=st.integers(2, 100), kept=st.integers(1, 100))
def test_a_budget_of_pages_is_spent_on_the_best_first_entries(seed, tokens, kept):
    worth = torch.randn(5, tokens, generator=torch.Generator().manual_seed(seed))
    chosen = adaptive_selection(worth, kept)
    if kept >= tokens:
        assert chosen.all()
        return
    counts = chosen.sum(-1)
    pages = -(-counts // PAGE)
    assert int(pages.sum()) == 5 * kept // PAGE
    assert bool(((counts % PAGE == 0) | (counts == tokens)).all())
    ranked = worth.sort(-1, descending=True).values
    opened = [ranked[head, PAGE * page] for head in range(5) for page in range(pages[head])]
    for head in range(5):
        assert torch.equal(
            worth[head][chosen[head]].sort(descending=True).values, ranked[head, : counts[head]]
        )
        if opened and PAGE * pages[head] < tokens:
            assert ranked[head, PAGE * pages[head]] <= min(opened)


@given(seed=st.integers(0, 1000), at=st.integers(60, 380), again=st.integers(20, 40))
def test_a_cut_leaves_the_first_codes_as_they_were(seed, at, again):
    """The cut codes the others anew, as often as that is."""
    pool = a_pool(seed, bits=4)
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


@pytest.mark.parametrize("name", ["adaptive", "profile"])
def test_nothing_is_left_of_a_warm_up(name):
    pool, given = a_pool(0, votes=1), (LastDimension(), [None] * LAYERS)
    if name == "adaptive":
        AdaptiveSelection(pool, *given).warm_up()
    else:
        anchored = HeadProfile(model="test", shape=SHAPE, method="test", ca_heads=((1,), (0, 2)))
        by = {"profile": anchored, "most_anchored": 3, "compensation": True}
        ProfileSelection(pool, *given, **by).warm_up()
    assert torch.equal(pool.packed.dense_of, torch.arange(SLOTS + 1))
    assert not pool.packed.log_votes.any()
    assert BundleAllocator(pool).check_integrity() == []


def test_what_is_kept_does_not_depend_on_where_a_span_was_put():
    """Bundles that its slots do not have are free ones."""
    allocator = BundleAllocator(pool := a_pool(0))
    held = allocator.alloc(SLOTS // 2)
    allocator.free(held[::2])
    allocator.merge_and_sort_free()
    loose = allocator.free_pages[-40:]
    allocator.free_pages = allocator.free_pages[:-40]
    assert bundles_first(loose)[1] == 0
    keys = [layer.k[loose, head].clone() for layer in pool.kv for head in range(HEADS)]
    selection = AdaptiveSelection(pool, LastDimension(), [None] * LAYERS)
    stay, free = selection.compact(loose, 0, 20, allocator.alloc_bundles)
    row = allocator.compact(stay, free, 40)
    assert torch.equal(row, torch.cat((stay, row.new_zeros(8))))
    (span,) = pool.packed.in_row(stay)
    chosen = adaptive_selection(torch.stack([k[:, -1] for k in keys]), 32)
    for (k, _), key, mine in zip(by_column(pool, span), keys, chosen, strict=True):
        torch.testing.assert_close(k, key[mine])
    assert allocator.check_integrity() == []
    allocator.free(torch.cat((stay, held[1::2])))
    assert allocator.available_size() == SLOTS


def test_slots_that_are_freed_are_ordinary_again_and_one_that_is_packed_and_free_is_noticed():
    allocator = BundleAllocator(pool := a_pool(0))
    slots = allocator.alloc(60)
    stay = compacted(pool, slots, 32).slots
    allocator.compact(stay, slots[~torch.isin(slots, stay)], 60)
    assert allocator.check_integrity() == []
    assert allocator.available_size() == SLOTS - 32
    held = allocator.free_pages
    allocator.free_pages = torch.cat([held, stay[:1]])
    assert "a free slot is packed" in allocator.check_integrity()
    allocator.free_pages = held
    allocator.free(stay)
    assert allocator.check_integrity() == []
    assert torch.equal(pool.packed.dense_of, torch.arange(SLOTS + 1))


def test_prompts_take_whole_bundles_and_what_is_generated_takes_what_is_left():
    allocator = BundleAllocator(a_pool(0))
    first = allocator.alloc(50)
    allocator.free(first)
    held = allocator.alloc(40)
    assert bundles_first(held)[1] == 32
    generated = torch.cat([allocator.alloc(2) for _ in range(7)])
    assert not torch.isin(generated // PAGE, held[:32] // PAGE).any()
    assert generated.max() == SLOTS
    allocator.free(generated[::2])
    own = allocator.alloc_bundles(48)
    assert bundles_first(own)[1] == 48
    assert allocator.alloc_bundles(SLOTS - 64) is None
    assert allocator.check_integrity() == []
