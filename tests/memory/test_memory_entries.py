"""Entries of a memory: what they say of the queries that they were made of, and of others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from heads.tiny_llama import KV_HEADS, LAYERS, VOCAB, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.memory.building import (
    GATE_LAYERS,
    NEVER,
    assemble,
    with_requeueing,
)
from kvtier.memory.collecting import Collected, collect, prefix_kv
from kvtier.memory.entries import averaged, make_entries
from kvtier.memory.prefixes import (
    ExactPrefix,
    KeptPrefix,
    MemoryPrefix,
    NoPrefix,
    logits_behind,
)
from kvtier.memory.recipe import Recipe
from kvtier.memory.traces import Trace

PREFIX_TOKENS = 60
PREFIX = random.Random(1).choices(range(VOCAB), k=PREFIX_TOKENS)
# Each query finds its own with as many entries as queries: none is grouped, none falls back.
EVERYTHING = Recipe(
    kept_share=0.1, entries=10**6, state_heads=1, key_width=256, place_weight=0.3, gate=0
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def kv(model):
    return prefix_kv(model, PREFIX)


def traces(count: int, seed: int) -> list[Trace]:
    rng = random.Random(seed)
    return [
        Trace(
            tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(3, 14))),
            tuple(rng.randrange(VOCAB) for _ in range(3)),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def made(model, kv) -> Collected:
    return collect(model, kv, traces(30, 2))


@pytest.fixture(scope="module")
def judged(model, kv) -> Collected:
    return collect(model, kv, traces(9, 3), with_own=True)


def test_a_memory_of_all_queries_gives_the_traces_own_outputs(model, kv, made, judged):
    built = assemble(kv, made, judged, EVERYTHING)
    assert [len(layer.keys) for layer in built.layers] == [len(made.behind)] * LAYERS
    memory = MemoryPrefix(built.layers)
    for trace in traces(30, 2):
        expected = logits_behind(model, ExactPrefix(kv), PREFIX_TOKENS, trace.ids)
        found = logits_behind(model, memory, PREFIX_TOKENS, trace.ids)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert memory.fell_back(100) == 0


def test_keeping_all_of_the_prefix_is_the_prefix(model, kv, made, judged):
    """The prefix is kept in all three ways: as kept KV, as what every query falls back to, and
    behind a gate alone."""
    whole = [[torch.arange(PREFIX_TOKENS)] * KV_HEADS] * LAYERS
    fewer = replace(EVERYTHING, entries=7, kept_share=1.0)
    far = [
        layer._replace(nearness=torch.tensor([NEVER]))
        for layer in assemble(kv, made, judged, fewer).layers
    ]
    gate = replace(fewer, state_heads=0)
    (trace,) = traces(1, 5)
    expected = logits_behind(model, ExactPrefix(kv), PREFIX_TOKENS, trace.ids)
    for way in (
        KeptPrefix(kv, whole),
        MemoryPrefix(far),
        MemoryPrefix(assemble(kv, made, judged, gate).layers),
    ):
        found = logits_behind(model, way, PREFIX_TOKENS, trace.ids)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    # Nothing of the prefix is something else.
    without = logits_behind(model, NoPrefix(), PREFIX_TOKENS, trace.ids)
    assert not torch.allclose(without, expected, atol=1e-2)


def test_chunks_that_do_not_see_each_other_are_another_prefix(model, kv):
    """The first chunk is the same; later ones were computed without it."""
    chunked = prefix_kv(model, PREFIX, chunk_tokens=25)
    for (k, v), (chunk_k, chunk_v) in zip(kv, chunked, strict=True):
        assert k.shape == chunk_k.shape
        torch.testing.assert_close(chunk_k[:, :25], k[:, :25], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(chunk_v[:, :25], v[:, :25], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(kv[-1][0], chunked[-1][0], atol=1e-2)
    # The first layer's KV is of the token and its place alone.
    torch.testing.assert_close(kv[0][0], chunked[0][0], atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match="chunk_tokens"):
        prefix_kv(model, PREFIX, chunk_tokens=0)


@given(members=st.lists(st.integers(0, 4), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_an_entry_is_the_average_merge_of_its_members(members, seed):
    """Its lse is that of all members' keys together, less ln n; equal members are one of them."""
    group = torch.unique(torch.tensor(members), return_inverse=True)[1]
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(len(members), 2, 3, 5, generator=generator)
    lse = 4 * torch.randn(len(members), 2, 3, generator=generator)
    count = int(group.max()) + 1
    found_o, found_lse = averaged(o, lse, group, count)
    for entry in range(count):
        mine = group == entry
        weights = lse[mine].double().exp()
        expected = (o[mine].double() * weights.unsqueeze(-1)).sum(0) / weights.sum(0).unsqueeze(-1)
        torch.testing.assert_close(found_o[entry].double(), expected, atol=1e-4, rtol=1e-4)
        mean = weights.mean(0).log()
        torch.testing.assert_close(found_lse[entry].double(), mean, atol=1e-4, rtol=1e-4)


def test_entries_that_stand_for_too_few_are_left_out(kv, made, judged):
    few, many = (
        make_entries(
            made.layers[1], made.behind, entries=40, width=8, place_weight=0.1, least_members=least
        )
        for least in (1, 6)
    )
    assert len(few.keys) <= 40
    assert int(few.members.sum()) == len(made.behind)
    assert int(many.members.min()) >= 6
    assert len(many.keys) == int((few.members >= 6).sum()) < len(few.keys)
    with pytest.raises(UsageError, match="no-store-queries"):
        assemble(kv, made, judged, replace(EVERYTHING, least_members=1000))


def test_few_of_the_judging_prompts_are_above_the_limit_as_they_are_served(model, kv, made, judged):
    """They are served behind the memory, not behind the prefix, and whatever was answered."""
    gated = replace(EVERYTHING, entries=20, gate=0.25)
    built = with_requeueing(model, assemble(kv, made, judged, gated), traces(9, 3))
    shares = []
    for trace in traces(9, 3):
        memory = MemoryPrefix(built.layers)
        logits_behind(model, memory, PREFIX_TOKENS, trace.ids)
        shares.append(memory.fell_back(len(trace.prompt_ids)))
    assert 0 < sorted(shares)[-2] <= built.requeue_above <= max(shares)
    silent = [replace(trace, answer_ids=()) for trace in traces(9, 3)]
    assert with_requeueing(model, built, silent).requeue_above == built.requeue_above
    ungated = assemble(kv, made, judged, EVERYTHING)
    assert with_requeueing(model, ungated, silent).requeue_above == 0


def test_the_heads_that_states_serve_best_look_up(kv, made, judged):
    """A layer of which none does holds no entries."""
    built = assemble(kv, made, judged, replace(EVERYTHING, entries=10, state_heads=0.5))
    looks_up = torch.cat([layer.looks_up for layer in built.layers])
    assert int(looks_up.sum()) == LAYERS * KV_HEADS // 2
    errors = built.head_errors
    assert float(errors.sum()) == pytest.approx(1)
    assert errors[~looks_up].min() >= errors[looks_up].max()
    one_head = replace(EVERYTHING, entries=10, state_heads=0.01)
    built = assemble(kv, made, judged, one_head)
    assert sum(bool(len(layer.keys)) for layer in built.layers) == len(built.members) == 1


def test_a_gate_alone_is_in_a_few_layers_and_turns_away(model, kv, made, judged):
    built = assemble(kv, made, judged, Recipe(kept_share=0.3, entries=10, gate=0.25))
    layers = [layer for layer in built.layers if len(layer.keys)]
    assert 1 <= len(layers) <= GATE_LAYERS
    assert not any(layer.looks_up.any() for layer in built.layers)
    assert built.head_errors is None
    memory = MemoryPrefix(built.layers)
    (trace,) = traces(1, 77)
    logits_behind(model, memory, PREFIX_TOKENS, trace.ids)
    assert len(memory.fell) == len(layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entries", 0), ("key_width", 0), ("kept_share", -0.1), ("least_members", 0),
        ("state_heads", 1.5), ("gate", -0.1), ("place_weight", -1.0), ("kept_share", 0),
    ],
)  # fmt: skip
def test_a_recipe_that_makes_no_memory_is_refused(field, value):
    flag = "no-store-queries" if field == "least_members" else field.replace("_", "-")
    with pytest.raises(UsageError, match=f"--{flag}: expected"):
        replace(Recipe(), **{field: value})
