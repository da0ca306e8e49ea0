"""Attention over lists in pages: the reference against float64, the other backends against it."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from test_equivalence import TOLERANCE, backends, device  # noqa: F401
from thorough import THOROUGH

from kvtier_kernels import CellKV, ListTables, get_kernels
from kvtier_kernels.fp8 import FP8_DTYPES
from kvtier_kernels.triton_backend.attention import tiles
from kvtier_kernels.triton_backend.launching import is_interpreted

LAYERS, HEADS = 2, 3
PAGES_PER_COLUMN = 40
COLUMN_CELLS = 16 * PAGES_PER_COLUMN
# Of every request's lists by layer and head, and its dense tokens: none of either, one entry, ends
# in the middle of a page, one list far longer than the others.
ENTRIES = [[[0, 0, 0], [0, 0, 0]], [[1, 37, 0], [5, 0, 16]], [[300, 20, 3], [0, 90, 160]]]
DENSE = [0, 21, 45]


@dataclass
class Problem:
    """What tables say, written out: cells[request][layer][head] of all entries."""

    kv: CellKV
    tables: ListTables
    rows: torch.Tensor
    dense: torch.Tensor
    arena: torch.Tensor
    cells: list

    def grow(self):
        """Every request gets a dense token more; its slot is in the table already."""
        self.dense += 1
        self.cells = [
            [
                [
                    torch.cat([own, column_of(layer, head) + self.tables.slots[row, n - 1 : n]])
                    for head, own in enumerate(of_layer)
                ]
                for layer, of_layer in enumerate(of_request)
            ]
            for of_request, row, n in zip(
                self.cells, self.rows.tolist(), self.dense.tolist(), strict=True
            )
        ]


def column_of(layer, head):
    return (layer * HEADS + head) * COLUMN_CELLS


def make_problem(kv_dtype=torch.float32, dim=64, votes=(), seed=0, entries=ENTRIES, dense=DENSE):
    """Lists of random pages of all columns, and dense tokens of random slots; rows in no order.

    votes: the shape of an entry's; None for no votes.
    """
    g = torch.Generator("cpu").manual_seed(seed)
    columns, requests = LAYERS * HEADS, len(dense)
    cells = columns * COLUMN_CELLS
    k, v = (torch.randn(cells, dim, generator=g, device="cpu").to(kv_dtype) for _ in "kv")
    log_votes = None if votes is None else torch.randn(cells, *votes, generator=g, device="cpu")
    # The last pages of every column are of dense tokens, the others of any column's lists.
    width = 64
    first_dense = COLUMN_CELLS - requests * width
    assert first_dense % 16 == 0
    slots = first_dense + torch.randperm(requests * width, generator=g, device="cpu")
    of_lists = torch.arange(cells // 16, device="cpu").view(columns, -1)[:, : first_dense // 16]
    free = of_lists.flatten()[torch.randperm(of_lists.numel(), generator=g, device="cpu")].tolist()
    order = torch.randperm(requests + 2, generator=g, device="cpu")[:requests]
    table = torch.zeros(requests + 2, width, dtype=torch.int32, device="cpu")
    pages = torch.zeros(requests + 2, columns, dtype=torch.int32, device="cpu")
    begins = torch.zeros(requests + 2, columns, dtype=torch.int64, device="cpu")
    words, written = [], []
    for i, row in enumerate(order.tolist()):
        table[row] = slots[i * width : (i + 1) * width]
        written.append([[None] * HEADS for _ in range(LAYERS)])
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            left, own = entries[i][layer][head], []
            begins[row, layer * HEADS + head] = len(words)
            while left:
                # As where a span ended: some pages are not full.
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
    tables = ListTables(begins.to(arena.device) * 4 + arena.data_ptr(), *on(arena, pages, table))
    log_votes = None if log_votes is None else log_votes.to(arena.device)
    kv = CellKV(*on(arena, k, v), COLUMN_CELLS, log_votes)
    tokens = torch.tensor(dense, dtype=torch.int32)
    return Problem(kv, tables, *on(arena, order), tokens, arena, written)


def on(like, *tensors):
    return [x.to(like.device) for x in tensors]


def exact(problem, q, request, layer, scale):
    """float64, list by list: q [tokens, heads, group, dim] of one request."""
    k, v, _, votes = problem.kv
    states = []
    for head in range(HEADS):
        own = problem.cells[request][layer][head]
        rows = q[:, head].double()
        logits = rows @ k[own].double().T * scale
        if votes is not None:
            group, of_entry = q.shape[2], votes.view(len(votes), -1)[own].double()
            logits = logits + of_entry.T.repeat(group // of_entry.shape[1], 1)
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp()
        states.append((weights @ v[own].double(), lse))
    return (torch.stack(part, 1) for part in zip(*states, strict=True))


def assert_state(state, o, lse, dtype):
    limit = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(state.o, o.to(state.o.dtype), **limit)
    torch.testing.assert_close(state.lse, lse.float(), **limit)


def assert_exact(name, problem, group, dtype, news):
    """Decoding of every request, and extending by so many new tokens of each."""
    kernels, dim = get_kernels(name).lists, problem.kv.k.shape[1]
    plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS)
    indptr = [0, *itertools.accumulate(news)]
    q = torch.randn(max(indptr[-1], len(news)), HEADS, group, dim).to(dtype)
    for layer in range(LAYERS):
        decoded = kernels.decode(q[: len(news)], problem.kv, plan, layer, dim**-0.5)
        extended = kernels.extend(q[: indptr[-1]], indptr, problem.kv, plan, layer, dim**-0.5)
        for state, bounds in ((decoded, range(len(news) + 1)), (extended, indptr)):
            assert state.o.dtype == dtype
            for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
                part = type(state)(state.o[begin:end], state.lse[begin:end])
                o, lse = exact(problem, q[begin:end], request, layer, dim**-0.5)
                assert_state(part, o, lse, dtype)


@backends
@pytest.mark.parametrize("votes", [None, (), (4,)], ids=["no votes", "per entry", "per head"])
def test_lists_are_attended_to_exactly(name, votes):
    torch.manual_seed(1)
    assert_exact(name, make_problem(votes=votes), 4, torch.float32, [1, 0, 40])


@backends
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "group", "dim"),
    [
        (torch.bfloat16, torch.bfloat16, 8, 128),
        (torch.bfloat16, FP8_DTYPES[0], 4, 128),
        (torch.float32, FP8_DTYPES[1], 1, 64),
    ],
)
def test_lists_of_any_dtype_are_attended_to_in_the_querys(name, dtype, kv_dtype, group, dim):
    torch.manual_seed(2)
    problem = make_problem(kv_dtype, dim, None)
    assert_exact(name, problem, group, dtype, [3, 2, 1])


@backends
def test_the_rows_of_a_drafts_tokens_are_decoded_as_one_group(name):
    """Row g has the votes of query head g % 4."""
    torch.manual_seed(3)
    assert_exact(name, make_problem(votes=(4,)), 100, torch.float32, [0, 0, 0])


@pytest.mark.skipif(not is_interpreted(), reason="a GPU takes its own tiles")
@pytest.mark.parametrize("tile", [16, 32])
def test_the_tiles_of_a_gpu_give_what_the_interpreters_one_gives(tile, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", tile)
    torch.manual_seed(tile)
    assert_exact("triton", make_problem(dim=32), 4, torch.float32, [0, 10, 1])


@backends
def test_a_plan_is_filled_again_while_lists_grow_past_the_ends_of_pages(name):
    torch.manual_seed(4)
    problem, kernels = make_problem(votes=()), get_kernels(name).lists
    plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS)
    q = torch.randn(len(DENSE), HEADS, 4, 64)
    for step in range(14):
        problem.grow()
        plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS, into=plan)
        # Request 0 begins a page, 1 and 2 end one; and the step behind that.
        if step in (0, 3, 4, 11, 12) or THOROUGH:
            state = kernels.decode(q, problem.kv, plan, step % LAYERS, 0.2)
            for request in range(len(DENSE)):
                o, lse = exact(problem, q[request : request + 1], request, step % LAYERS, 0.2)
                part = type(state)(state.o[request : request + 1], state.lse[request : request + 1])
                assert_state(part, o, lse, torch.float32)


@backends
def test_a_batch_without_entries_gets_empty_states(name):
    nothing = [[[0] * HEADS] * LAYERS] * 2
    problem, kernels = make_problem(entries=nothing, dense=[0, 0]), get_kernels(name).lists
    plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS)
    q = torch.randn(2, HEADS, 4, 64)
    for state in (
        kernels.decode(q, problem.kv, plan, 1, 0.2),
        kernels.extend(q, [0, 2, 2], problem.kv, plan, 0, 0.2),
    ):
        assert (state.o == 0).all()
        assert (state.lse == float("-inf")).all()
    state = kernels.extend(q[:0], [0, 0, 0], problem.kv, plan, 0, 0.2)
    assert state.o.shape == (0, HEADS, 4, 64)


@backends
def test_tables_that_do_not_fit_are_named(name):
    problem, kernels = make_problem(votes=None), get_kernels(name).lists
    with pytest.raises(ValueError, match=r"tables\.words: expected"):
        kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS + 1)
    with pytest.raises(ValueError, match="dense: expected 3 requests, got 2"):
        kernels.plan(problem.tables, problem.rows, problem.dense[:2], LAYERS, HEADS)
