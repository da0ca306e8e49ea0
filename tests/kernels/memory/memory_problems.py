"""Memories and queries of them, and what the contract says of those in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from kvtier_kernels import AttentionState
from kvtier_kernels.memory.base import (
    PLACE_SPANS,
    MemoryAnswer,
    MemoryLayer,
    lookup_keys,
    project,
)

HEADS = 3
# Cosines nearer to each other, or to a memory's nearness, may come in any order.
MARGIN = 2e-4


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
    behind[::5] = torch.randint(0, 10_000, behind[::5].shape)
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
            k, v = layer.kept_k[begin:end].double(), layer.kept_v[begin:end].double()
            o[t, head], lse[t, head] = attention(q[t, head].double(), k, v, problem.scale)
    return MemoryAnswer(AttentionState(o, lse), entry, cosine)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [..., dim] over k, v [entries, dim]."""
    logits = q @ k.T * scale
    return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)
