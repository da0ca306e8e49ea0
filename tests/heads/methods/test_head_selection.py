"""Selection rules, on scores and losses that are known; no model runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.heads.methods import (
    HeadScores,
    Target,
    base,
    make_method,
)
from kvtier.heads.methods.base import best_heads, mean_matrix
from kvtier.heads.methods.contextkeeper import ContextKeeper, candidates, default_candidate_share
from kvtier.heads.probes.quality import Quality
from kvtier.heads.profile import ModelShape
from kvtier.heads.samples.questions import CalibrationSample, Question

Weights = dict[tuple[int, int], float]


def shape(layers: int, heads: int) -> ModelShape:
    return ModelShape(num_layers=layers, num_kv_heads=heads, num_attention_heads=heads, head_dim=8)


def fake_batch(size: ModelShape) -> Any:
    full = ((True,) * size.num_kv_heads,) * size.num_layers
    return SimpleNamespace(shape=size, probe=SimpleNamespace(full=lambda: full))


def additive(weights: Weights) -> Any:
    """A model whose every head is worth its weight: dropping it costs that much, alone or not."""

    def measure(_: Any, kept: Any) -> Quality:
        lost = sum(w for (layer, head), w in weights.items() if not kept[layer][head])
        right = max(0.0, 1.0 - lost)
        return Quality(recall=right, tokens=right, loss=lost)

    return measure


matrices = st.integers(1, 4).flatmap(
    lambda heads: st.lists(
        st.tuples(*[st.floats(0, 1, width=16)] * heads), min_size=1, max_size=4
    ).map(tuple)
)


@given(matrices, st.floats(0.01, 1.0))
def test_candidates_are_the_best_of_each_layer(matrix: Any, share: float) -> None:
    for row, marks in zip(matrix, candidates(matrix, share), strict=True):
        chosen = [s for s, mark in zip(row, marks, strict=True) if mark]
        others = [s for s, mark in zip(row, marks, strict=True) if not mark]
        assert len(chosen) == max(1, round(share * len(row)))
        assert not others or min(chosen) >= max(others)


@given(matrices, st.integers(0, 16))
def test_best_heads_are_distinct_and_no_other_is_better(matrix: Any, count: int) -> None:
    chosen = best_heads(matrix, count)
    everything = [(layer, head) for layer, row in enumerate(matrix) for head in range(len(row))]
    assert len(set(chosen)) == len(chosen) == min(count, len(everything))
    others = [matrix[at[0]][at[1]] for at in everything if at not in chosen]
    assert not chosen or not others or min(matrix[a][b] for a, b in chosen) >= max(others)


def keeper_scores(*samples: tuple[str, tuple[float, ...]]) -> HeadScores:
    per_sample = tuple((row,) for _, row in samples)
    return HeadScores(mean_matrix(per_sample), per_sample, tuple(task for task, _ in samples))


FOUR = [fake_batch(shape(1, 4))]


def test_thresholds_need_samples_and_tasks() -> None:
    scores = keeper_scores(
        ("a", (0.9, 0.8, 0.1, 0.2)), ("a", (0.9, 0.8, 0.1, 0.2)), ("a", (0.9, 0.8, 0.1, 0.2)),
        ("b", (0.9, 0.1, 0.8, 0.2)),
    )  # fmt: skip
    by_samples = ContextKeeper(candidate_share=0.5, sample_consensus=0.7, task_consensus=0.5)
    assert by_samples.select(scores, FOUR, Target()).ca_heads == ((0, 1),)
    by_tasks = ContextKeeper(candidate_share=0.5, sample_consensus=0.7, task_consensus=0.9)
    assert by_tasks.select(scores, FOUR, Target()).ca_heads == ((0,),)
    none = ContextKeeper(candidate_share=0.25, sample_consensus=0.7)
    varied = keeper_scores(("a", (1, 0, 0, 0)), ("a", (0, 1, 0, 0)), ("a", (0, 0, 1, 0)))
    assert none.select(varied, FOUR, Target()).ca_heads == ((),)


def test_candidates_follow_the_paper_for_mha_and_gqa() -> None:
    """0.8 to 0.85 of a layer's heads for MHA, 0.6 to 0.7 for GQA, unless it is said."""
    mha = shape(1, 20)
    gqa = mha.model_copy(update={"num_attention_heads": 80})
    assert 0.8 <= default_candidate_share(mha) <= 0.85
    assert 0.6 <= default_candidate_share(gqa) <= 0.7
    scores = keeper_scores(("a", tuple(range(20))))
    for size, share, count in ((mha, None, 16), (gqa, None, 13), (gqa, 0.3, 6)):
        keeper = ContextKeeper(candidate_share=share)
        selection = keeper.select(scores, [fake_batch(size)], Target())
        assert selection.ca_heads == (tuple(range(20 - count, 20)),)
        assert selection.parameters["candidate_share"] == (share or default_candidate_share(size))


@given(st.integers(1, 30), st.integers(1, 30))
def test_consensus_is_reached_by_exactly_the_share_asked_for(agreeing: int, total: int) -> None:
    """0.55 of 20 tasks are 11, whatever floating point makes of the product."""
    agreeing = min(agreeing, total)
    rows = [(0.9, 0.1) if index < agreeing else (0.1, 0.9) for index in range(total)]
    samples = keeper_scores(*[("a", row) for row in rows])
    tasks = keeper_scores(*[(f"task {index}", row) for index, row in enumerate(rows)])
    two_heads = [fake_batch(shape(1, 2))]
    share = agreeing / total
    by_tasks = ContextKeeper(candidate_share=0.5, sample_consensus=0.01, task_consensus=share)
    assert 0 in by_tasks.select(tasks, two_heads, Target()).ca_heads[0]
    by_samples = ContextKeeper(candidate_share=0.5, sample_consensus=share, task_consensus=0.01)
    found = by_samples.select(samples, two_heads, Target()).ca_heads[0]
    assert (0 in found) == (share > 0.5), "the only task agrees when most of its samples do"


def test_a_share_goes_by_consensus_and_mass_decides_ties() -> None:
    scores = keeper_scores(("a", (0.5, 0.9, 0.1, 0.6)), ("a", (0.5, 0.2, 0.1, 0.6)))
    keeper = ContextKeeper(candidate_share=0.5)
    # Votes: head 0 once, 1 once, 3 twice; head 1 has more mass than head 0.
    assert keeper.select(scores, FOUR, Target(share=0.25)).ca_heads == ((3,),)
    assert keeper.select(scores, FOUR, Target(share=0.5)).ca_heads == ((1, 3),)


def test_a_budget_takes_as_few_heads_as_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {(0, 0): 0.1, (0, 1): 0.5, (0, 2): 0.0, (0, 3): 0.3}
    monkeypatch.setattr(base, "measure", additive(weights))
    scores = keeper_scores(("a", (0.3, 0.9, 0.1, 0.6)))
    keeper = ContextKeeper(candidate_share=0.5)
    assert keeper.select(scores, FOUR, Target(budget=0.2)).ca_heads == ((1, 3),)
    assert keeper.select(scores, FOUR, Target(budget=0.05)).ca_heads == ((0, 1, 3),)
    both = Target(share=0.75, budget=0.2)
    assert keeper.select(scores, FOUR, both).ca_heads == ((0, 1, 3),)


def test_errors_name_the_argument_and_the_valid_values() -> None:
    with pytest.raises(
        UsageError,
        match=r"--method.*contextkeeper, razor, taylor.*'duo'",
    ):
        make_method("duo")
    for bad in (0.0, 1.5, -1.0):
        with pytest.raises(UsageError, match="--share"):
            Target(share=bad)
    with pytest.raises(UsageError, match="--budget"):
        Target(budget=1.0)
    with pytest.raises(UsageError, match="candidate_share"):
        make_method("contextkeeper", candidate_share=0)
    with pytest.raises(UsageError, match="prefill_rows"):
        make_method("contextkeeper", prefill_rows=0)
    with pytest.raises(UsageError, match="unscored"):
        Question((1,), (2,), unscored=1)
    with pytest.raises(UsageError, match="prompt_ids"):
        Question((), (2,))
    with pytest.raises(UsageError, match="samples"):
        CalibrationSample((), ())
