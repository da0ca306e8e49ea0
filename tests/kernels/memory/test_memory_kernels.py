"""Attention over fixed prefixes: every backend against a formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_problems import HEADS, Shape, attention, exact_answer, exact_cosines, make, shapes
from thorough import THOROUGH

from kvtier_kernels import AttentionState, KernelUnavailableError, get_kernels, merge_states
from kvtier_kernels.memory.base import (
    PLACE_WIDTH,
    MemoryAnswer,
    lookup_keys,
    place_of,
    project,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
COSINE_TOLERANCE = 5e-5


def runnable(name: str):
    """The backend's name, to be skipped where this machine lacks what it needs."""
    try:
        get_kernels(name)
    except KernelUnavailableError as error:
        return pytest.param(name, marks=pytest.mark.skip(reason=str(error)))
    return name


backends = pytest.mark.parametrize("name", [runnable(name) for name in ("reference", "triton")])
triton_only = pytest.mark.parametrize("name", [runnable("triton")])
seeds = st.integers(0, 10_000)


@pytest.fixture(autouse=True)
def device():
    with torch.device(DEVICE):
        yield


def assert_same(got: MemoryAnswer, expected: MemoryAnswer, dtype: torch.dtype) -> None:
    assert got.state.o.dtype == dtype
    assert got.entry.dtype == torch.int32
    assert got.entry.tolist() == expected.entry.tolist()
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "check_dtype": False}
    torch.testing.assert_close(got.state.o, expected.state.o, **close)
    torch.testing.assert_close(got.state.lse, expected.state.lse, **close)
    near = {"rtol": 0, "atol": COSINE_TOLERANCE, "check_dtype": False}
    torch.testing.assert_close(got.cosine, expected.cosine, **near)


@backends
@settings(max_examples=100 if THOROUGH else 8)
@given(shape=shapes(), seed=seeds, dtype=st.sampled_from(list(TOLERANCE)))
# Several tiles of entries and of what is kept, beside memories and heads that have none.
@example(shape=Shape([300, 0], [150, 0, 17, 64, 1, 150], 6, 3, 16, 12), seed=0, dtype=torch.float32)
def test_every_token_gets_what_the_formula_says(name, shape, seed, dtype):
    problem = make(shape, seed, dtype)
    assert_same(get_kernels(name).memory.attend(*problem), exact_answer(problem), dtype)


def test_problems_have_both_kinds_of_answers():
    """The test above rests on this."""
    shape = Shape([300, 130], [64] * 2 * HEADS, 40, 2, 16, 5)
    answers = [exact_answer(make(shape, seed, torch.float32)) for seed in range(4)]
    found = torch.cat([answer.entry for answer in answers]) >= 0
    known = torch.cat([answer.cosine for answer in answers]) > -math.inf
    assert found.sum() > 20
    assert (known & ~found).sum() > 20
    assert (~known).sum() > 10


@backends
@settings(max_examples=10 if THOROUGH else 4)
@given(seed=seeds, dtype=st.sampled_from(list(TOLERANCE)))
def test_the_very_query_that_an_entry_was_made_of_gets_its_state(name, seed, dtype):
    problem = make(Shape([40, 60], [3] * 2 * HEADS, 4, 2, 16, 12), seed, dtype)
    layer, tokens = problem.layer, len(problem.q)
    ids = torch.arange(tokens, dtype=torch.int32) % 2
    chosen = layer.key_indptr[ids] + torch.randperm(40, dtype=torch.int32)[:tokens]
    behind = torch.randint(0, 10_000, (tokens,))
    keys = lookup_keys(problem.x[torch.arange(tokens), ids], behind, layer.place_weight[ids])
    layer.keys[chosen] = keys.to(dtype)
    layer = layer._replace(
        nearness=torch.full((2,), 0.98), looks_up=torch.ones(2, HEADS, dtype=torch.bool)
    )
    positions = behind + layer.prefix_tokens[ids]
    got = get_kernels(name).memory.attend(
        problem.q, problem.x, positions, ids, layer, problem.scale
    )
    same = {"rtol": 0, "atol": 0}
    assert got.entry.tolist() == chosen.tolist()
    torch.testing.assert_close(got.state.o, layer.o[chosen], **same)
    torch.testing.assert_close(got.state.lse, layer.lse[chosen], **same)
    atol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.cosine, torch.ones(tokens), rtol=0, atol=atol)


@backends
def test_of_equal_keys_the_first_answers(name):
    tokens = 2
    problem = make(Shape([600], [3] * HEADS, tokens, 2, 16, 12), 1, torch.float32)
    layer = problem.layer._replace(nearness=torch.tensor([0.9]))
    key = lookup_keys(problem.x[:1, 0], torch.tensor([7]), layer.place_weight)
    # In other rows of the first one's block, and in the same row of later ones, however long.
    apart = torch.tensor([0, 1, 16, 32, 64, 128, 256])
    for first in (3, 140, 298):
        keys = layer.keys.clone()
        keys[first + apart] = key
        got = get_kernels(name).memory.attend(
            problem.q,
            problem.x[:1].expand(tokens, -1, -1),
            7 + layer.prefix_tokens.long().expand(tokens),
            torch.zeros(tokens, dtype=torch.int32),
            layer._replace(keys=keys),
            problem.scale,
        )
        assert got.entry.tolist() == [first] * tokens


@backends
@settings(max_examples=10 if THOROUGH else 4)
@given(prefix=st.integers(0, 150), suffix=st.integers(1, 50), seed=seeds)
def test_with_all_of_the_prefix_kept_the_rest_adds_up_to_attention_over_everything(
    name, prefix, suffix, seed
):
    problem = make(Shape([5], [prefix] * HEADS, 2, 3, 16, 5), seed, torch.float32)
    ids = torch.zeros_like(problem.ids)
    layer = problem.layer._replace(looks_up=torch.zeros(1, HEADS, dtype=torch.bool))
    q, scale = problem.q, problem.scale
    over_prefix = get_kernels(name).memory.attend(
        q, problem.x, problem.positions, ids, layer, scale
    )
    k, v = torch.randn(2, HEADS, suffix, 16)
    over_suffix = AttentionState(torch.empty(q.shape), torch.empty(q.shape[:-1]))
    o, lse = torch.empty(q.shape).double(), torch.empty(q.shape[:-1]).double()
    for head in range(HEADS):
        rows = slice(head * prefix, (head + 1) * prefix)
        over_suffix.o[:, head], over_suffix.lse[:, head] = attention(
            q[:, head], k[head], v[head], scale
        )
        every_k = torch.cat([layer.kept_k[rows], k[head]]).double()
        every_v = torch.cat([layer.kept_v[rows], v[head]]).double()
        o[:, head], lse[:, head] = attention(q[:, head].double(), every_k, every_v, scale)
    merged = merge_states(over_prefix.state, over_suffix)
    torch.testing.assert_close(merged.o.double(), o, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(merged.lse.double(), lse, rtol=2e-5, atol=2e-5)


@triton_only
def test_the_angle_is_exact_a_million_tokens_behind_the_prefix(name):
    problem = make(Shape([300], [0] * HEADS, 6, 1, 16, 5), 3, torch.float32)
    layer = problem.layer._replace(nearness=torch.tensor([-2.0]), place_weight=torch.ones(1))
    positions = 1_000_000 + torch.arange(6) * 41
    problem = problem._replace(positions=positions, ids=torch.zeros_like(problem.ids), layer=layer)
    got = get_kernels(name).memory.attend(*problem)
    expected = torch.stack([exact_cosines(problem, t).max() for t in range(6)])
    torch.testing.assert_close(got.cosine.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_graph_can_be_recorded_and_replayed_with_other_tokens():
    kernels = get_kernels("triton").memory
    problem = make(Shape([300, 5], [150] * 2 * HEADS, 6, 2, 64, 16), 5, torch.bfloat16)
    kernels.attend(*problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = kernels.attend(*problem)
    for ids in ([0, 0, 1, -1, 1, 0], [-1, 1, 0, 0, -1, 1]):
        problem.ids.copy_(torch.tensor(ids, dtype=torch.int32))
        graph.replay()
        eager = kernels.attend(*problem)
        assert recorded.entry.tolist() == eager.entry.tolist()
        torch.testing.assert_close(recorded.state, eager.state, rtol=0, atol=0)


# -- keys --


@given(seed=seeds, tokens=st.integers(1, 20), rank=st.integers(1, 70), weight=st.floats(0, 5))
def test_keys_have_length_one_and_equal_queries_a_cosine_of_one(seed, tokens, rank, weight):
    torch.manual_seed(seed)
    x, behind = torch.randn(tokens, rank), torch.randint(0, 20_000, (tokens,))
    keys = lookup_keys(x, behind, weight)
    assert keys.dtype == torch.float32
    assert keys.shape == (tokens, rank + PLACE_WIDTH)
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(tokens), rtol=0, atol=1e-5)
    # Neither how long a query is counts, nor whether weights come one by one.
    again = lookup_keys(3 * x, behind, torch.full((tokens,), weight))
    torch.testing.assert_close((keys * again).sum(-1), torch.ones(tokens), rtol=0, atol=1e-5)


@given(seed=seeds, weight=st.floats(0, 5))
def test_a_cosine_is_that_of_directions_and_that_of_places_weighed(seed, weight):
    torch.manual_seed(seed)
    x, behind = torch.randn(2, 8), torch.randint(0, 20_000, (2,))
    a, b = lookup_keys(x, behind, weight).double()
    place_a, place_b = place_of(behind).double()
    direction = torch.cosine_similarity(x[0].double(), x[1].double(), dim=0)
    expected = (direction + weight**2 * (place_a @ place_b)) / (1 + weight**2)
    torch.testing.assert_close(a @ b, expected, rtol=0, atol=1e-5)


@given(behind=st.integers(0, 100_000))
def test_places_have_length_one_and_near_ones_are_more_alike(behind):
    here, next_to, farther = place_of(torch.tensor([behind, behind + 1, behind + 40]))
    torch.testing.assert_close(here.norm(), torch.tensor(1.0), rtol=0, atol=1e-5)
    assert here @ here > here @ next_to > here @ farther


def test_projections_of_parts_of_the_heads_add_up():
    q, projection = torch.randn(5, 4, 2, 16), torch.randn(3, 7, 4, 2, 16)
    parts = [project(q[:, part], projection[:, :, part]) for part in (slice(1), slice(1, 4))]
    whole = project(q, projection)
    assert whole.shape == (5, 3, 7)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        whole[2, 1, 4], (q[2] * projection[1, 4]).sum(), rtol=1e-4, atol=1e-4
    )
