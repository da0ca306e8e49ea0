"""Attention over lists in pages: the reference against float64, the other backends against it."""

import itertools

import pytest
import torch
from list_problems import DENSE, ENTRIES, HEADS, LAYERS, make_problem
from test_equivalence import TOLERANCE, backends, device  # noqa: F401
from thorough import THOROUGH

from kvtier_kernels import get_kernels
from kvtier_kernels.fp8 import FP8_DTYPES
from kvtier_kernels.triton_backend.attention import tiles
from kvtier_kernels.triton_backend.launching import is_interpreted

# Those of `list_problems`, but shorter: in the interpreter every page takes its time.
SHORT = [[[0, 0, 0], [0, 0, 0]], [[1, 37, 0], [5, 0, 16]], [[52, 20, 3], [0, 9, 33]]]


def exact(problem, q, request, layer, scale):
    """float64, list by list: q [tokens, heads, group, dim] of one request."""
    k, v, _, votes, _ = problem.kv
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


def assert_exact(name, problem, group, dtype, news, layers=range(LAYERS)):
    """Decoding of every request, and extending by so many new tokens of each."""
    kernels, dim = get_kernels(name).lists, problem.kv.k.shape[1]
    plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS)
    indptr = [0, *itertools.accumulate(news)]
    q = torch.randn(max(indptr[-1], len(news)), HEADS, group, dim).to(dtype)
    for layer in layers:
        decoded = kernels.decode(q[: len(news)], problem.kv, plan, layer, dim**-0.5)
        extended = kernels.extend(q[: indptr[-1]], indptr, problem.kv, plan, layer, dim**-0.5)
        for state, bounds in ((decoded, range(len(news) + 1)), (extended, indptr)):
            assert state.o.dtype == dtype
            for request, (begin, end) in enumerate(itertools.pairwise(bounds)):
                part = type(state)(state.o[begin:end], state.lse[begin:end])
                o, lse = exact(problem, q[begin:end], request, layer, dim**-0.5)
                assert_state(part, o, lse, dtype)


def with_unseen(problem):
    """Make all entries of two lists and most of a third be for no query, in pages of layer 0."""
    for request, head, count in ((1, 0, 1), (1, 1, 37), (2, 0, 290)):
        problem.kv.log_votes[problem.cells[request][0][head][:count]] = float("-inf")
    return problem


@backends
@pytest.mark.parametrize(
    ("votes", "entries", "layers"),
    [(None, SHORT, [1]), ((), ENTRIES, [0, 1]), ((4,), SHORT, [0])],
    ids=["no votes", "per entry", "per head"],
)
def test_lists_are_attended_to_exactly(name, votes, entries, layers):
    """The layers are attended to one by one, and many programs share a list."""
    torch.manual_seed(1)
    problem = make_problem(votes=votes, entries=entries)
    assert_exact(name, problem, 4, torch.float32, [1, 0, 20], layers)


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
    problem = make_problem(kv_dtype, dim, None, entries=SHORT)
    assert_exact(name, problem, group, dtype, [3, 2, 1], layers=[1])


@backends
def test_the_rows_of_a_drafts_tokens_are_decoded_as_one_group(name):
    """Row g has the votes of query head g % 4."""
    torch.manual_seed(3)
    problem = make_problem(votes=(4,), entries=SHORT)
    assert_exact(name, problem, 100, torch.float32, [0, 0, 0], layers=[0])


@backends
@pytest.mark.parametrize("votes", [(), (4,)], ids=["per entry", "per head"])
def test_an_entry_whose_vote_is_minus_infinity_is_not_seen(name, votes):
    torch.manual_seed(5)
    problem = with_unseen(make_problem(votes=votes))
    assert_exact(name, problem, 4, torch.float32, [1, 0, 3], layers=[0])


@pytest.mark.skipif(not is_interpreted(), reason="a GPU takes its own tiles")
def test_the_tiles_of_a_gpu_give_what_the_interpreters_one_gives(monkeypatch):
    """The smallest: a page of entries at a time, and several blocks of rows."""
    monkeypatch.setattr(tiles, "INTERPRETED_TILE", 16)
    torch.manual_seed(16)
    problem = make_problem(dim=32, entries=SHORT)
    assert_exact("triton", problem, 4, torch.float32, [0, 5, 1], layers=[0])


@backends
def test_a_plan_is_filled_again_while_lists_grow_past_the_ends_of_pages(name):
    torch.manual_seed(4)
    problem, kernels = make_problem(votes=(), entries=SHORT), get_kernels(name).lists
    plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS)
    q = torch.randn(len(DENSE), HEADS, 4, 64)
    for step in range(12):
        problem.grow()
        plan = kernels.plan(problem.tables, problem.rows, problem.dense, LAYERS, HEADS, into=plan)
        # Request 0 begins a page, then 2, then 1.
        if step in (0, 3, 11) or THOROUGH:
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
