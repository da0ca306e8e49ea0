"""Coded pages: what codes lose, and attention over them against float64 over their numbers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_equivalence import TOLERANCE, backends, device  # noqa: F401

from kvtier.retention.shares.base import CODED_PAGES
from kvtier_kernels import CellKV, ListTables, get_kernels
from kvtier_kernels.codes import (
    CODED_ENTRY_BITS,
    PLANES,
    coded_shape,
    decode,
    encode,
    feedback,
    recoded,
    rotated,
)
from kvtier_kernels.lists import PAGE_CELLS

LAYERS, HEADS = 2, 3
# The lists of every request by layer and head have none, one entry, and ends in the middle of a
# page.
ENTRIES = [[[0, 0, 0], [0, 0, 0]], [[1, 57, 0], [5, 0, 56]], [[300, 20, 3], [0, 90, 160]]]
bits_of_a_code = pytest.mark.parametrize("bits", sorted(PLANES))


@bits_of_a_code
@pytest.mark.parametrize("dim", [8, 16, 32, 64, 80, 96, 128, 256])
def test_a_page_of_codes_is_no_larger_than_one_of_entries_and_planners_know_it(bits, dim):
    shape = coded_shape(bits, dim)
    assert PAGE_CELLS < shape.entries < 1 << CODED_ENTRY_BITS
    assert shape.side_bytes <= PAGE_CELLS * dim * 2
    assert dim < 64 or CODED_PAGES[f"int{bits}"] == shape.entries


@pytest.mark.parametrize(("bits", "dim", "named"), [(5, 64, "bits"), (4, 12, "dim"), (4, 0, "dim")])
def test_what_has_no_layout_is_refused_by_name(bits, dim, named):
    with pytest.raises(ValueError, match=named):
        coded_shape(bits, dim)


@given(
    bits=st.sampled_from(sorted(PLANES)),
    dim=st.sampled_from([8, 16, 32, 64, 80, 96, 128, 256]),
    seed=st.integers(0, 99),
    size=st.sampled_from([0.0, 1e-2, 1.0, 1e3]),
    data=st.data(),
)
def test_a_number_is_off_by_half_a_step_at_most(bits, dim, seed, size, data):
    """The numbers that share a scale span that many steps in rotated space. What is behind a page's
    count is not read, whoever's errors are fed back."""
    shape = coded_shape(bits, dim)
    torch.manual_seed(seed)
    k, v = size * torch.randn(2, 2, shape.entries, dim) + (size == 0)
    counts = torch.tensor([shape.entries, data.draw(st.integers(1, shape.entries))])
    fed_back = feedback(seen_by(torch.randn(9, dim)))[None], torch.tensor([0, 0])
    by_feedback = decode(*encode(k, v, counts, bits, fed_back), shape)
    k[1, counts[1] :], v[1, counts[1] :] = torch.nan, 1e6
    found = decode(*encode(k, v, counts, bits), shape, rotate=False)
    again = decode(*encode(k, v, counts, bits, fed_back), shape)
    levels = (1 << bits) - 1
    for page, count in enumerate(counts.tolist()):
        keys, values = rotated(k[page, :count]), rotated(v[page, :count])
        apart = (found[0][page, :count] - keys).abs()
        step = (keys.amax(0) - keys.amin(0)) / levels
        assert (apart <= 0.51 * step + 2e-3 * keys.abs().amax() + 1e-6).all()
        apart = (found[1][page, :count] - values).abs().view(count, shape.groups, -1)
        grouped = values.view(count, shape.groups, -1)
        step = (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / levels
        assert (apart <= 0.51 * step + 2e-3 * grouped.abs().amax() + 1e-6).all()
        for mine, other in zip(again, by_feedback, strict=True):
            assert torch.equal(mine[page, :count], other[page, :count])


def seen_by(queries):
    """The mean of q qᵀ."""
    return queries.mT @ queries / queries.shape[-2]


@bits_of_a_code
@pytest.mark.parametrize("dim", [64, 80])
def test_queries_see_less_of_errors_that_are_fed_back(bits, dim):
    """Queries that look in few directions, as those of a head do, each page's those of its head.
    What is weighed stays as it is."""
    torch.manual_seed(bits)
    directions = torch.randn(3, dim, dim) * 0.8 ** torch.arange(dim)[:, None]
    q, others = torch.randn(2, 3, 400, dim) @ directions
    k, v = torch.randn(2, 3, 500, dim)
    by_head = feedback(seen_by(q))
    plain, values = recoded(k, v, bits)
    fed, the_same = recoded(k, v, bits, by_head)
    lost, less = ((found - k) @ others.mT for found in (plain, fed))
    assert (less.square().mean((1, 2)) < 0.6 * lost.square().mean((1, 2))).all()
    assert torch.equal(the_same, values)
    for head in range(3):
        one = slice(head, head + 1)
        assert torch.equal(recoded(k[one], v[one], bits, by_head[one])[0], fed[one])


def test_queries_that_look_everywhere_or_nowhere_round_each_number_by_itself():
    k, v = torch.randn(2, 1, 100, 64)
    for queries in (3.0 * torch.eye(64), torch.zeros(64, 64)):
        torch.testing.assert_close(feedback(queries), torch.eye(64))
        fed = recoded(k, v, 4, feedback(queries)[None])[0]
        torch.testing.assert_close(fed, recoded(k, v, 4)[0])
    assert recoded(k[:, :0], k[:, :0], 4)[0].shape == (1, 0, 64)


def make_problem(bits, dim, dtype):
    """Tables of random coded pages, and per request, layer and head what they stand for."""
    shape, columns = coded_shape(bits, dim), LAYERS * HEADS
    pages = 64
    k, v = (torch.randn(pages * PAGE_CELLS, dim).to(dtype) for _ in "kv")
    kv = CellKV(k, v, pages * PAGE_CELLS // columns, bits=bits)
    free = torch.randperm(pages).tolist()
    order = torch.randperm(len(ENTRIES) + 1)[: len(ENTRIES)]
    begins = torch.zeros(len(ENTRIES) + 1, columns, dtype=torch.int64)
    count, words, found = torch.zeros_like(begins, dtype=torch.int32), [], {}
    for (i, row), layer, head in itertools.product(
        enumerate(order.tolist()), range(LAYERS), range(HEADS)
    ):
        begins[row, layer * HEADS + head] = len(words)
        left = ENTRIES[i][layer][head]
        parts = [torch.zeros(2, 0, dim)]
        while left:
            # Some pages are not full, as where a span was cut.
            fill = min(left, shape.entries if left % 3 else 7)
            page, own = free.pop(), torch.randn(2, 1, shape.entries, dim)
            coded = encode(*own, torch.tensor([fill]), bits)
            for side, written in zip(kv.pages, coded, strict=True):
                side[page, : shape.side_bytes] = written[0]
            parts.append(torch.stack(decode(*coded, shape))[:, 0, :fill])
            words.append(page << CODED_ENTRY_BITS | fill)
            left -= fill
        count[row, layer * HEADS + head] = len(words) - begins[row, layer * HEADS + head]
        found[i, layer, head] = torch.cat(parts, 1)
    arena = torch.tensor(words, dtype=torch.int32)
    slots = torch.zeros(len(begins), 1, dtype=torch.int32)
    tables = ListTables(begins * 4 + arena.data_ptr(), count, slots)
    return kv, tables, order, found, arena


@backends
@bits_of_a_code
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (128, torch.bfloat16)])
def test_codes_are_attended_to_as_what_they_stand_for(name, bits, dim, dtype):
    torch.manual_seed(bits)
    kernels, scale, group = get_kernels(name).lists, dim**-0.5, 4
    kv, tables, rows, found, arena = make_problem(bits, dim, dtype)
    dense = torch.zeros(len(rows), dtype=torch.int32)
    plan = kernels.plan(tables, rows, dense, LAYERS, HEADS)
    indptr = [0, 1, 1, 21]
    q = torch.randn(indptr[-1], HEADS, group, dim).to(dtype)
    limit = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for layer in range(LAYERS):
        decoded = kernels.decode(q[: len(rows)], kv, plan, layer, scale)
        extended = kernels.extend(q, indptr, kv, plan, layer, scale)
        for state, bounds in ((decoded, range(len(rows) + 1)), (extended, indptr)):
            pairs = enumerate(itertools.pairwise(bounds))
            for (request, (begin, end)), head in itertools.product(pairs, range(HEADS)):
                k, v = found[request, layer, head].double()
                logits = q[begin:end, head].double() @ k.T * scale
                lse = logits.logsumexp(-1)
                o = (logits - lse[..., None]).exp() @ v if len(k) else 0.0 * q[begin:end, head]
                torch.testing.assert_close(state.o[begin:end, head], o.to(dtype), **limit)
                torch.testing.assert_close(state.lse[begin:end, head], lse.float(), **limit)
    assert arena.numel()
