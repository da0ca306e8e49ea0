"""Packed spans: where every head's entries stand, what is moved there, and attention over them."""

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
from kvtier.retention.shares import PAGE, profile_slots, whole_pages
from kvtier_kernels import RaggedKV, get_kernels
from kvtier_sglang.attention.lists import RequestLists
from kvtier_sglang.compression.selection import AdaptiveSelection, ProfileSelection
from kvtier_sglang.pool.allocator import BundleAllocator
from kvtier_sglang.pool.kv_pool import HeadPagedKVPool
from kvtier_sglang.pool.packed import PackedSpan, bundles_first

LAYERS, HEADS, GROUP, DIM = 2, 3, 2, 4
SHAPE = ModelShape(
    num_layers=LAYERS, num_kv_heads=HEADS, num_attention_heads=HEADS * GROUP, head_dim=DIM
)
SLOTS = 160


@dataclass(frozen=True)
class LastDimension(TokenScorer):
    """A key's last number is its worth, so that a test can say which entries stay."""

    name: ClassVar[str] = "last-dimension"
    comparable: ClassVar[bool] = True

    def score(self, span):
        assert torch.equal(span.values, -span.keys)
        return span.keys[..., -1].float()


def a_pool(seed: int, *, compensates: bool = False) -> HeadPagedKVPool:
    pool = HeadPagedKVPool(
        SLOTS, shape=SHAPE, dtype=torch.float32, device="cpu", state_width=0, packs=True,
        votes=int(compensates),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.kv:
        layer.k.copy_(torch.randn(layer.k.shape, generator=generator))
        layer.v.copy_(-layer.k)
    return pool


def entries(pool: HeadPagedKVPool, slots: torch.Tensor) -> list[torch.Tensor]:
    """`[tokens, dim]` keys of every column."""
    return [layer.k[slots, head].clone() for layer in pool.kv for head in range(HEADS)]


def expected_of(keys: list[torch.Tensor], keep: int, page: int = PAGE) -> list[torch.Tensor]:
    """Return what every column keeps, in pages of so many."""
    kept = adaptive_selection(torch.stack([k[:, -1] for k in keys]), keep, page)
    return [k[mine] for k, mine in zip(keys, kept, strict=True)]


def packed_span(pool, slots, keep) -> PackedSpan:
    selection = AdaptiveSelection(pool, LastDimension(), [None] * LAYERS)
    stay, free = selection.compact(slots, 0, keep)
    assert torch.equal(torch.cat((stay, free)).sort().values, slots.sort().values)
    (span,) = pool.packed.in_row(stay)
    return span


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=6), more=st.integers(0, 2))
def test_every_page_has_a_place_of_its_own_and_its_own_column_first(counts, more):
    n, pages = len(counts), [math.ceil(count / PAGE) for count in counts]
    bundles = max(math.ceil(sum(pages) / n), 1) + more
    shape = ModelShape(num_layers=1, num_kv_heads=n, num_attention_heads=n, head_dim=DIM)
    pool = HeadPagedKVPool(20 * PAGE, shape=shape, dtype=torch.float32, device="cpu", packs=True)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(more))[:bundles]
    slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
    cells = (span := pool.packed.span(slots, counts)).cells
    assert torch.unique(cells).numel() == cells.numel() == sum(counts)
    assert torch.equal(torch.cat([span.of_column(column) for column in range(n)]), cells)
    allowed = torch.stack([pool.packed.cells.of(column, slots) for column in range(n)])
    assert torch.isin(cells, allowed).all()
    for column, (begin, count) in enumerate(zip(span.indptr, counts, strict=False)):
        own = cells[begin : begin + min(count, len(slots))]
        assert torch.equal(own, allowed[column, : own.numel()])
        for page in torch.split(cells[begin : begin + count], PAGE) if count else ():
            assert torch.equal(page, page[0] + torch.arange(len(page)))
            assert page[0] % PAGE == 0


@given(seed=st.integers(0, 1000), tokens=st.integers(17, SLOTS), share=st.floats(0.05, 0.95))
# A head that keeps all.
@example(seed=1, tokens=17, share=0.75)
def test_the_best_pages_of_all_heads_stay(seed, tokens, share):
    pool = a_pool(seed)
    # Some of whole bundles and some not, in any order.
    slots = torch.arange(1, SLOTS + 1)
    slots = slots[torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:tokens]]
    slots = torch.cat((slots, torch.arange(PAGE, 4 * PAGE))).unique()
    keep = whole_pages(int(share * len(slots)), len(slots))
    keep = min(keep, bundles_first(slots)[1])
    keys = entries(pool, slots)
    expected = expected_of(keys, keep)
    if keep == len(slots):
        return
    span = packed_span(pool, slots, keep)
    cells = pool.packed.cells
    place = span.cells
    for column, k in enumerate(expected):
        own = place[span.indptr[column] : span.indptr[column + 1]]
        torch.testing.assert_close(cells.k[own], k)
        torch.testing.assert_close(cells.v[own], -k)
    pages = sum(math.ceil(count / PAGE) for count in span.counts)
    assert pages == keep // PAGE * LAYERS * HEADS


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


def test_slots_of_whole_bundles_come_first():
    slots = torch.tensor([3, 40, *range(16, 32), 47, *range(64, 80)])
    ordered, whole = bundles_first(slots)
    assert ordered.tolist() == [*range(16, 32), *range(64, 80), 3, 40, 47]
    assert whole == 32


@given(seed=st.integers(0, 1000), spans=st.integers(0, 2), tokens=st.integers(1, 5))
def test_attention_is_that_over_the_entries_that_stay(seed, spans, tokens):
    """Two requests: one with packed spans, another with ordinary entries only."""
    pool, kernels = a_pool(seed), get_kernels("reference", "cpu")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(15, generator=generator) + 1
    ordinary = (order[:7], order[7:10])
    held, stay = [], []
    for number in range(spans):
        slots = torch.arange(16 + 64 * number, 80 + 64 * number)
        held.append(expected_of(entries(pool, slots), 32))
        stay.append(packed_span(pool, slots, 32).slots)
    rows = [torch.cat([ordinary[0], *stay]), ordinary[1]]
    lists = RequestLists(kernels, pool, torch.zeros(2, SLOTS, dtype=torch.int32))
    dense = [lists.begin(number, row, row[:0]) for number, row in enumerate(rows)]
    assert all(torch.equal(*pair) for pair in zip(dense, ordinary, strict=True))
    plan = lists.prefixes(torch.arange(2), [7, 3])
    q = torch.randn(2 * tokens, HEADS, GROUP, DIM, generator=generator)
    k, v = (torch.randn(2 * tokens, HEADS, DIM, generator=generator) for _ in range(2))
    q_indptr = (0, tokens, 2 * tokens)
    for layer in range(LAYERS):
        before = lists.extend(q, q_indptr, plan, layer, 0.5)
        own = kernels.extend(
            q, k, v, q_indptr, RaggedKV(k[:0], v[:0]), kernels.plan(ordinary[0][:0], (0, 0, 0)), 0.5
        )
        extended = kernels.merge_states(before, own).o
        first = torch.stack([q[0], q[tokens]])
        decoded = lists.decode(first, plan, layer, 0.5)
        for request, begin in enumerate((0, tokens)):
            for head in range(HEADS):
                column = layer * HEADS + head
                of_spans = [span[column] for span in held] if request == 0 else []
                keys = torch.cat([torch.empty(0, DIM), *of_spans])
                mine = pool.kv[layer].k[ordinary[request], head]
                keys = torch.cat([keys, mine])
                logits = q[begin, head] @ keys.T * 0.5
                torch.testing.assert_close(decoded.lse[request, head], logits.logsumexp(-1))
                torch.testing.assert_close(decoded.o[request, head], logits.softmax(-1) @ -keys)
                for token in range(tokens):
                    new = slice(begin, begin + token + 1)
                    every = torch.cat([keys, k[new, head]])
                    values = torch.cat([-keys, v[new, head]])
                    logits = q[begin + token, head] @ every.T * 0.5
                    torch.testing.assert_close(
                        extended[begin + token, head], logits.softmax(-1) @ values
                    )


def compacted(allocator: BundleAllocator, tokens: int, keep: int) -> torch.Tensor:
    """The slots that stay of so many tokens."""
    slots = allocator.alloc(tokens)
    selection = AdaptiveSelection(allocator.pool, LastDimension(), [None] * LAYERS)
    stay, free = selection.compact(slots, 0, keep)
    assert torch.equal(allocator.compact(stay, free), torch.cat((stay, torch.zeros_like(free))))
    return stay


@pytest.mark.parametrize("name", ["adaptive", "profile"])
def test_nothing_is_left_of_a_warm_up(name):
    pool = a_pool(0, compensates=True)
    if name == "adaptive":
        AdaptiveSelection(pool, LastDimension(), [None] * LAYERS).warm_up()
    else:
        by_profile(pool).warm_up()
    assert torch.equal(pool.packed.dense_of, torch.arange(SLOTS + 1))
    assert not pool.packed.log_votes.any()
    assert BundleAllocator(pool).check_integrity() == []


def test_slots_that_are_freed_are_ordinary_again():
    pool = a_pool(0)
    allocator = BundleAllocator(pool)
    stay = compacted(allocator, 60, 32)
    assert allocator.check_integrity() == []
    assert allocator.available_size() == SLOTS - 32
    assert int((pool.packed.dense_of == 0).sum()) == 33
    allocator.free(stay)
    assert allocator.check_integrity() == []
    assert pool.packed.in_row(stay) == ()
    assert torch.equal(pool.packed.dense_of, torch.arange(SLOTS + 1))


def test_a_packed_slot_that_is_free_is_noticed():
    pool = a_pool(0)
    allocator = BundleAllocator(pool)
    stay = compacted(allocator, 60, 32)
    allocator.free_pages = torch.cat([allocator.free_pages, stay[:1]])
    assert "a free slot is packed" in allocator.check_integrity()


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
    assert allocator.alloc_bundles(96) is None
    assert allocator.check_integrity() == []


ANCHORED = ((1,), (0, 2))


def by_profile(pool: HeadPagedKVPool, *, compensation: bool = True) -> ProfileSelection:
    return ProfileSelection(
        pool, LastDimension(), [None] * LAYERS, most_anchored=3, compensation=compensation,
        profile=HeadProfile(model="test", shape=SHAPE, method="test", ca_heads=ANCHORED),
    )  # fmt: skip


@given(
    seed=st.integers(0, 1000), tokens=st.integers(40, SLOTS), share=st.floats(0.05, 1),
    compensation=st.booleans(),
)  # fmt: skip
def test_anchored_heads_keep_their_best_and_the_others_one_entry_for_all(
    seed, tokens, share, compensation
):
    pool = a_pool(seed, compensates=True)
    allocator = BundleAllocator(pool)
    slots = allocator.alloc(tokens)
    keys = entries(pool, slots)
    keep = whole_pages(int(share * tokens), tokens)
    selection = by_profile(pool, compensation=compensation)
    stay, free = selection.compact(slots, 0, keep)
    wanted = profile_slots(keep, 3, LAYERS * HEADS)
    if not free.numel():
        assert wanted >= tokens or wanted > bundles_first(slots)[1]
        return
    assert stay.numel() == wanted
    allocator.compact(stay, free)
    assert allocator.check_integrity() == []
    (span,) = pool.packed.in_row(stay)
    for column, k in enumerate(keys):
        own = span.cells[span.indptr[column] : span.indptr[column + 1]]
        found, votes = pool.packed.cells.k[own], pool.packed.log_votes[own, 0]
        if column % HEADS in ANCHORED[column // HEADS]:
            best = k[k[:, -1].topk(keep).indices]
            assert {tuple(one) for one in found.tolist()} == {tuple(one) for one in best.tolist()}
            assert not votes.any()
        elif compensation:
            torch.testing.assert_close(found, k.mean(0, keepdim=True))
            torch.testing.assert_close(votes, torch.tensor([math.log(tokens)]))
        else:
            assert not own.numel()
        torch.testing.assert_close(pool.packed.cells.v[own], -found)
    allocator.free(stay)
    assert not pool.packed.log_votes.any()
    assert allocator.check_integrity() == []
