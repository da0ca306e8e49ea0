"""Attention over fixed prefixes: every backend against the contract in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_equivalence import DEVICE, device, runnable  # noqa: F401
from thorough import THOROUGH

from kvtier_kernels import AttentionState, get_kernels
from kvtier_kernels.memory.base import (
    PLACE_SPANS,
    PLACE_WIDTH,
    MemoryAnswer,
    MemoryLayer,
    lookup_keys,
    place_of,
    project,
)

HEADS = 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
COSINE_TOLERANCE = 5e-5
# Cosines nearer to each other, or to a memory's nearness, may come in any order.
MARGIN = 2e-4
backends = pytest.mark.parametrize("name", [runnable(name) for name in ("reference", "triton")])
seeds = st.integers(0, 10_000)


class Problem(NamedTuple):
    """The arguments of `attend`."""

    q: torch.Tensor
    x: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor
    layer: MemoryLayer
    scale: float


class Shape(NamedTuple):
    """The size of a problem. entries: of each memory; kept: of each memory and KV head."""

    entries: list[int]
    kept: list[int]
    tokens: int
    group: int
    dim: int
    rank: int


@st.composite
def shapes(draw) -> Shape:
    memories = draw(st.integers(1, 3))
    counts = st.lists(st.sampled_from([0, 1, 5, 130, 300]), min_size=memories, max_size=memories)
    return Shape(
        draw(counts),
        [draw(st.sampled_from([0, 1, 17, 64, 150])) for _ in range(memories * HEADS)],
        draw(st.integers(1, 6)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([16, 64])),
        draw(st.sampled_from([5, 12, 16])),
    )


def indptr_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def make(shape: Shape, seed: int, dtype: torch.dtype) -> Problem:
    """Every second token asks nearly what one of its memory's entries was made of."""
    torch.manual_seed(seed)
    memories, tokens = len(shape.entries), shape.tokens
    total, kept = sum(shape.entries), sum(shape.kept)
    heads = (HEADS, shape.group, shape.dim)
    projection = torch.randn(memories, shape.rank, *heads).to(dtype)
    prefix_tokens = torch.randint(0, 500, (memories,), dtype=torch.int32)
    place_weight = torch.rand(memories)
    ids = torch.randint(-1, memories, (tokens,), dtype=torch.int32)
    raw = torch.randn(total + tokens, *heads)
    behind = torch.randint(0, 2 * PLACE_SPANS[1], (total + tokens,))
    behind[::5] = torch.randint(0, 1_000_000, behind[::5].shape)
    key_indptr = indptr_of(shape.entries)
    for t in range(0, tokens, 2):
        begin, end = (int(key_indptr[max(0, int(ids[t])) + i]) for i in (0, 1))
        if ids[t] >= 0 and begin < end:
            chosen = int(torch.randint(begin, end, ()))
            raw[total + t] = raw[chosen] + 0.05 * torch.randn(heads)
            behind[total + t] = behind[chosen]
    x = project(raw, projection)
    whose = torch.repeat_interleave(torch.arange(memories), torch.tensor(shape.entries))
    keys = lookup_keys(x[torch.arange(total), whose], behind[:total], place_weight[whose])
    # Neither q nor, below, x lies in one piece.
    q = torch.randn(tokens, HEADS + 1, *heads[1:]).to(dtype)[:, 1:]
    layer = MemoryLayer(
        projection,
        keys.to(dtype),
        key_indptr,
        place_weight,
        torch.tensor([-2.0, 0.5, 0.9, 1.5])[torch.randint(0, 4, (memories,))],
        prefix_tokens,
        torch.randn(total, *heads).to(dtype),
        torch.randn(total, *heads[:2]),
        torch.rand(memories, HEADS) < 0.6,
        torch.randn(kept, shape.dim).to(dtype),
        torch.randn(kept, shape.dim).to(dtype),
        indptr_of(shape.kept),
    )
    positions = behind[total:] + prefix_tokens[ids.clamp_min(0)]
    x = x[total:].repeat(1, 2, 1)[:, :memories]
    problem = Problem(q, x, positions, ids, layer, shape.dim**-0.5)
    ids[[t for t in range(tokens) if is_close_call(problem, t)]] = -1
    return problem


def exact_cosines(problem: Problem, t: int) -> torch.Tensor:
    """Float64: of token t and all entries of its memory."""
    layer, memory = problem.layer, int(problem.ids[t])
    behind = int(problem.positions[t] - layer.prefix_tokens[memory])
    weight = float(layer.place_weight[memory])
    slow, fast = (behind / span * math.pi for span in PLACE_SPANS)
    slow = min(max(slow, 0), math.pi)
    place = [math.cos(slow), math.sin(slow), math.cos(fast), math.sin(fast)]
    direction = problem.x[t, memory].double()
    direction /= direction.norm()
    weighed = torch.tensor(place, dtype=torch.float64) * weight / math.sqrt(2)
    key = torch.cat([direction, weighed])
    begin, end = layer.key_indptr[memory], layer.key_indptr[memory + 1]
    return layer.keys[begin:end].double() @ (key / math.sqrt(1 + weight * weight))


def is_close_call(problem: Problem, t: int) -> bool:
    if problem.ids[t] < 0:
        return False
    best = exact_cosines(problem, t).sort(descending=True).values[:2]
    nearness = problem.layer.nearness[problem.ids[t]].double()
    return bool((best[:-1] - best[1:] < MARGIN).any() or ((best - nearness).abs() < MARGIN).any())


def exact_answer(problem: Problem) -> MemoryAnswer:
    """The contract, token by token and head by head, in float64."""
    q, layer = problem.q, problem.layer
    o, lse = torch.zeros(q.shape).double(), torch.full(q.shape[:-1], -math.inf).double()
    entry = torch.full((len(q),), -1, dtype=torch.int32)
    cosine = torch.full((len(q),), -math.inf).double()
    for t, memory in enumerate(problem.ids.tolist()):
        if memory < 0:
            continue
        cosines = exact_cosines(problem, t)
        if len(cosines):
            cosine[t] = cosines.max()
            if cosine[t] >= layer.nearness[memory]:
                entry[t] = layer.key_indptr[memory] + cosines.argmax()
        for head in range(HEADS):
            if layer.looks_up[memory, head] and entry[t] >= 0:
                o[t, head], lse[t, head] = layer.o[entry[t], head], layer.lse[entry[t], head]
                continue
            begin, end = layer.kept_indptr[memory * HEADS + head :][:2]
            logits = q[t, head].double() @ layer.kept_k[begin:end].double().T * problem.scale
            o[t, head] = torch.softmax(logits, -1) @ layer.kept_v[begin:end].double()
            lse[t, head] = torch.logsumexp(logits, -1)
    return MemoryAnswer(AttentionState(o, lse), entry, cosine)


@backends
@settings(max_examples=100 if THOROUGH else 8)
@given(shape=shapes(), seed=seeds, dtype=st.sampled_from(list(TOLERANCE)))
# Several tiles of entries and of what is kept, beside memories and heads that have none.
@example(shape=Shape([300, 0], [150, 0, 17, 64, 1, 150], 6, 3, 16, 12), seed=0, dtype=torch.float32)
@example(shape=Shape([300, 130], [64] * 2 * HEADS, 12, 2, 16, 5), seed=1, dtype=torch.bfloat16)
def test_every_token_gets_what_the_formula_says(name, shape, seed, dtype):
    problem = make(shape, seed, dtype)
    got, expected = get_kernels(name).memory.attend(*problem), exact_answer(problem)
    assert got.state.o.dtype == dtype
    assert got.entry.dtype == torch.int32
    assert got.entry.tolist() == expected.entry.tolist()
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "check_dtype": False}
    torch.testing.assert_close(got.state.o, expected.state.o, **close)
    torch.testing.assert_close(got.state.lse, expected.state.lse, **close)
    near = {"rtol": 0, "atol": COSINE_TOLERANCE, "check_dtype": False}
    torch.testing.assert_close(got.cosine, expected.cosine, **near)


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


@given(seed=seeds, rank=st.integers(1, 70), weight=st.floats(0, 5))
def test_a_cosine_is_that_of_directions_and_that_of_places_weighed(seed, rank, weight):
    """Neither how long a query is counts, nor whether weights come one by one."""
    torch.manual_seed(seed)
    x, behind = torch.randn(2, rank), torch.randint(0, 20_000, (2,))
    keys = lookup_keys(x, behind, weight)
    again = lookup_keys(3 * x, behind, torch.full((2,), weight))
    assert keys.dtype == torch.float32
    assert keys.shape == (2, rank + PLACE_WIDTH)
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    places = place_of(behind).double()
    expected = (unit @ unit.T + weight**2 * (places @ places.T)) / (1 + weight**2)
    torch.testing.assert_close(expected.diagonal(), torch.ones(2).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(keys.double() @ again.double().T, expected, rtol=0, atol=1e-5)


def test_projections_of_parts_of_the_heads_add_up():
    q, projection = torch.randn(5, 4, 2, 16), torch.randn(3, 7, 4, 2, 16)
    parts = [project(q[:, part], projection[:, :, part]) for part in (slice(1), slice(1, 4))]
    whole = project(q, projection)
    assert whole.shape == (5, 3, 7)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        whole[2, 1, 4], (q[2] * projection[1, 4]).sum(), rtol=1e-4, atol=1e-4
    )
