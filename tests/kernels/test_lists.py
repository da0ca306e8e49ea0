"""Attention over lists in pages: every kernel backend against float64."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from test_equivalence import E4M3, E5M2, TOLERANCE, backends, device  # noqa: F401
from thorough import THOROUGH

from kvtier_kernels import CellKV, ListTables, get_kernels
from kvtier_kernels.triton_backend.attention import tiles

LAYERS, HEADS = 2, 3
PAGES_PER_COLUMN = 40
COLUMN_CELLS = 16 * PAGES_PER_COLUMN
# The lists of every request by layer and head, and its dense tokens: none of either, one entry,
# ends in the middle of a page, one list far longer than the others.
ENTRIES = [[[0, 0, 0], [0, 0, 0]], [[1, 37, 0], [5, 0, 16]], [[300, 20, 3], [0, 90, 160]]]
DENSE = [0, 21, 45]
# The same, but shorter: in the interpreter every page takes its time.
SHORT = [[[0, 0, 0], [0, 0, 0]], [[1, 37, 0], [5, 0, 16]], [[52, 20, 3], [0, 9, 33]]]


@dataclass
class Problem:
    """The content of tables, written out: cells[request][layer][head] of all entries."""

    kv: CellKV
    tables: ListTables
    rows: torch.Tensor
    dense: torch.Tensor
    arena: torch.Tensor
    cells: list

    def planned(self, kernels, into=None):
        return kernels.plan(self.tables, self.rows, self.dense, LAYERS, HEADS, into=into)

    def grow(self):
        """Every request gets a dense token more; its slot is in the table already."""
        self.dense += 1
        numbers = zip(self.cells, self.rows.tolist(), self.dense.tolist(), strict=True)
        for of_request, row, n in numbers:
            slot = self.tables.slots[row, n - 1 : n]
            for (layer, of_layer), head in itertools.product(enumerate(of_request), range(HEADS)):
                of_layer[head] = torch.cat([of_layer[head], column_of(layer, head) + slot])


def column_of(layer, head):
    return (layer * HEADS + head) * COLUMN_CELLS


def make_problem(kv_dtype=torch.float32, dim=64, votes=(), entries=ENTRIES, dense=DENSE):
    """Lists of random pages of all columns, and dense tokens of random slots; rows in no order.

    votes: the shape of an entry's in a page; None for no votes.
    """
    torch.manual_seed(0)
    columns, requests = LAYERS * HEADS, len(dense)
    cells = columns * COLUMN_CELLS
    k, v = (torch.randn(cells, dim).to(kv_dtype) for _ in "kv")
    log_votes = None if votes is None else torch.randn(cells, *votes)
    # The last pages of every column are of dense tokens, the others of any column's lists.
    width = 64
    first_dense = COLUMN_CELLS - requests * width
    assert first_dense % 16 == 0
    if log_votes is not None:
        log_votes.view(columns, COLUMN_CELLS, *votes)[:, first_dense:] = 0
    slots = first_dense + torch.randperm(requests * width)
    of_lists = torch.arange(cells // 16).view(columns, -1)[:, : first_dense // 16].flatten()
    free = of_lists[torch.randperm(of_lists.numel())].tolist()
    order = torch.randperm(requests + 2)[:requests]
    table = torch.zeros(requests + 2, width, dtype=torch.int32)
    pages = torch.zeros(requests + 2, columns, dtype=torch.int32)
    begins = torch.zeros(requests + 2, columns, dtype=torch.int64)
    words, written = [], []
    for i, row in enumerate(order.tolist()):
        table[row] = slots[i * width : (i + 1) * width]
        written.append([[None] * HEADS for _ in range(LAYERS)])
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            left, own = entries[i][layer][head], []
            begins[row, layer * HEADS + head] = len(words)
            while left:
                # Some pages are not full, as where a span ended.
                fill = min(left, 16 if left % 3 else 7)
                page = free.pop()
                words.append(page << 5 | fill)
                own += range(page * 16, page * 16 + fill)
                left -= fill
            if len(own) > 50:
                words.append(free.pop() << 5)
            pages[row, layer * HEADS + head] = len(words) - begins[row, layer * HEADS + head]
            own += (column_of(layer, head) + table[row, : dense[i]]).tolist()
            written[i][layer][head] = torch.tensor(own, dtype=torch.int64)
    arena = torch.tensor(words, dtype=torch.int32)
    tables = ListTables(begins * 4 + arena.data_ptr(), pages, table)
    kv = CellKV(k, v, COLUMN_CELLS, log_votes)
    return Problem(kv, tables, order, torch.tensor(dense, dtype=torch.int32), arena, written)


def with_unseen(problem):
    """Make all entries of two lists and most of a third be for no query, in pages of layer 0."""
    for request, head, count in ((1, 0, 1), (1, 1, 37), (2, 0, 290)):
        problem.kv.log_votes[problem.cells[request][0][head][:count]] = float("-inf")
    return problem


def assert_states(problem, state, q, bounds, layer):
    """The rows of every request, bounds[i] to bounds[i + 1], against float64, list by list."""
    k, v, _, votes, _ = problem.kv
    assert state.o.dtype == q.dtype
    limit = {"rtol": TOLERANCE[q.dtype], "atol": TOLERANCE[q.dtype]}
    for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for head in range(HEADS):
            own = problem.cells[request][layer][head]
            logits = q[begin:end, head].double() @ k[own].double().T * q.shape[-1] ** -0.5
            if votes is not None:
                of_entry = votes.view(len(votes), -1)[own].double()
                logits = logits + of_entry.T.repeat(q.shape[2] // of_entry.shape[1], 1)
            lse = logits.logsumexp(-1)
            o = (logits - lse[..., None]).exp() @ v[own].double()
            torch.testing.assert_close(state.o[begin:end, head], o.to(q.dtype), **limit)
            torch.testing.assert_close(state.lse[begin:end, head], lse.float(), **limit)


def assert_exact(kernels, problem, group, dtype, news, layers=range(LAYERS)):
    """Decoding of every request, and extending by so many new tokens of each, a layer at a time."""
    plan, dim = problem.planned(kernels), problem.kv.k.shape[1]
    indptr = [0, *itertools.accumulate(news)]
    q = torch.randn(max(indptr[-1], len(news)), HEADS, group, dim).to(dtype)
    for layer in layers:
        rows = q[: len(news)]
        state = kernels.decode(rows, problem.kv, plan, layer, dim**-0.5)
        assert_states(problem, state, rows, range(len(news) + 1), layer)
        rows = q[: indptr[-1]]
        state = kernels.extend(rows, indptr, problem.kv, plan, layer, dim**-0.5)
        assert_states(problem, state, rows, indptr, layer)


def assert_grows(kernels, problem, dtype=torch.float32, asked=(0, 3, 11)):
    """A plan is filled again while lists grow past the ends of pages: request 0 begins a page,
    then 2, then 1."""
    plan, q = problem.planned(kernels), torch.randn(len(DENSE), HEADS, 4, 64).to(dtype)
    for step in range(12):
        problem.grow()
        plan = problem.planned(kernels, into=plan)
        if step in asked or THOROUGH:
            state = kernels.decode(q, problem.kv, plan, step % LAYERS, 64**-0.5)
            assert_states(problem, state, q, range(len(DENSE) + 1), step % LAYERS)


class Case(NamedTuple):
    votes: tuple[int, ...] | None = None
    entries: list = SHORT
    layers: tuple[int, ...] = (0,)
    news: tuple[int, ...] = (1, 0, 20)
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    group: int = 4
    dim: int = 64
    tile: int = tiles.INTERPRETED_TILE


CASES = {
    "no votes": Case(layers=(1,)),
    # Many programs share a list.
    "votes per entry": Case((), ENTRIES, layers=(0, 1)),
    "votes per head": Case((4,)),
    "bfloat16": Case(None, SHORT, (1,), (3, 2, 1), torch.bfloat16, torch.bfloat16, 8, 128),
    "e4m3": Case(None, SHORT, (1,), (3, 2, 1), torch.bfloat16, E4M3, 4, 128),
    "e5m2": Case(None, SHORT, (1,), (3, 2, 1), torch.float32, E5M2, 1, 64),
    # Row g of a group has the votes of query head g % 4.
    "the rows of a draft's tokens": Case((4,), news=(0, 0, 0), group=100),
    "unseen entries, votes per entry": Case((), ENTRIES, news=(1, 0, 3)),
    "unseen entries, votes per head": Case((4,), ENTRIES, news=(1, 0, 3)),
    # A page of entries at a time, and several blocks of rows.
    "the smallest tile of a GPU": Case((), news=(0, 5, 1), dim=32, tile=16),
}


@backends
@pytest.mark.parametrize("case", CASES)
def test_lists_are_attended_to_exactly(name, case, monkeypatch):
    one = CASES[case]
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", one.tile)
    problem = make_problem(one.kv_dtype, one.dim, one.votes, one.entries)
    problem = with_unseen(problem) if "unseen" in case else problem
    assert_exact(get_kernels(name).lists, problem, one.group, one.dtype, one.news, one.layers)


@backends
def test_a_plan_is_filled_again_while_lists_grow_past_the_ends_of_pages(name):
    kernels, problem = get_kernels(name).lists, make_problem(entries=SHORT)
    assert_grows(kernels, problem)
    if name == "triton":
        # Its numbers on the device stay where they are: a CUDA graph fills them again.
        plan = problem.planned(kernels)
        kernels.decode(torch.randn(len(DENSE), HEADS, 4, 64), problem.kv, plan, 0, 0.2)
        again = problem.planned(kernels, into=plan)
        assert [id(deal) for deal in again.deals.values()] == [*map(id, plan.deals.values())] != []


@backends
def test_a_batch_without_entries_gets_empty_states(name):
    problem = make_problem(entries=[[[0] * HEADS] * LAYERS] * 2, dense=[0, 0])
    kernels, q = get_kernels(name).lists, torch.randn(2, HEADS, 4, 64)
    plan = problem.planned(kernels)
    for state in (
        kernels.decode(q, problem.kv, plan, 1, 0.2),
        kernels.extend(q, [0, 2, 2], problem.kv, plan, 0, 0.2),
    ):
        assert (state.o == 0).all()
        assert (state.lse == float("-inf")).all()
    state = kernels.extend(q[:0], [0, 0, 0], problem.kv, plan, 0, 0.2)
    assert state.o.shape == (0, HEADS, 4, 64)
