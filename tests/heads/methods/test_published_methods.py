"""ContextKeeper and RazorAttention choose as their papers say, on scores that are known; Razor's
masses are those of eager attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import HEADS, LAYERS, RULE, VOCAB, make_ids

from kvtier.errors import UsageError
from kvtier.heads.methods import HeadScores, Target, base, make_method
from kvtier.heads.methods.base import best_heads, mean_matrix
from kvtier.heads.methods.contextkeeper import ContextKeeper, default_candidate_share
from kvtier.heads.methods.razor import Razor, RazorScores
from kvtier.heads.probes import copies, watching
from kvtier.heads.probes.context import HeadProbe
from kvtier.heads.probes.copies import RepeatMasses, plain_tokens, repeat_masses
from kvtier.heads.probes.quality import Quality
from kvtier.heads.profile import ModelShape
from kvtier.heads.samples.questions import CalibrationSample, Question


def fake_batch(layers: int, heads: int, group: int = 1) -> Any:
    """A batch of a model of that shape, which does not run."""
    shape = ModelShape(
        num_layers=layers, num_kv_heads=heads, num_attention_heads=heads * group, head_dim=8
    )
    full = ((True,) * heads,) * layers
    return SimpleNamespace(shape=shape, probe=SimpleNamespace(full=lambda: full))


def keeper_scores(*samples: tuple[str, tuple[float, ...]]) -> HeadScores:
    per_sample = tuple((row,) for _, row in samples)
    return HeadScores(mean_matrix(per_sample), per_sample, tuple(task for task, _ in samples))


def test_candidates_follow_the_paper_for_mha_and_gqa() -> None:
    """0.8 to 0.85 of a layer's heads for MHA, 0.6 to 0.7 for GQA, unless it is said."""
    mha, gqa = fake_batch(1, 20), fake_batch(1, 20, group=4)
    assert 0.8 <= default_candidate_share(mha.shape) <= 0.85
    assert 0.6 <= default_candidate_share(gqa.shape) <= 0.7
    scores = keeper_scores(("a", tuple(range(20))))
    for batch, share, count in ((mha, None, 16), (gqa, None, 13), (gqa, 0.3, 6)):
        keeper = ContextKeeper(candidate_share=share)
        assert keeper.select(scores, [batch], Target()) == (tuple(range(20 - count, 20)),)


@given(st.integers(1, 30), st.integers(1, 30))
def test_consensus_is_reached_by_exactly_the_share_asked_for(agreeing: int, total: int) -> None:
    """0.55 of 20 tasks are 11, whatever floating point makes of the product."""
    agreeing = min(agreeing, total)
    rows = [(0.9, 0.1) if index < agreeing else (0.1, 0.9) for index in range(total)]
    samples = keeper_scores(*[("a", row) for row in rows])
    tasks = keeper_scores(*[(f"task {index}", row) for index, row in enumerate(rows)])
    two_heads = [fake_batch(1, 2)]
    share = agreeing / total
    by_tasks = ContextKeeper(candidate_share=0.5, sample_consensus=0.01, task_consensus=share)
    assert 0 in by_tasks.select(tasks, two_heads, Target())[0]
    by_samples = ContextKeeper(candidate_share=0.5, sample_consensus=share, task_consensus=0.01)
    found = by_samples.select(samples, two_heads, Target())[0]
    assert (0 in found) == (share > 0.5), "the only task agrees when most of its samples do"


def test_a_share_goes_by_consensus_and_a_budget_takes_as_few_heads_as_it_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four, keeper = [fake_batch(1, 4)], ContextKeeper(candidate_share=0.5)
    scores = keeper_scores(("a", (0.5, 0.9, 0.1, 0.6)), ("a", (0.5, 0.2, 0.1, 0.6)))
    # Votes: head 0 once, 1 once, 3 twice; head 1 has more mass than head 0.
    assert keeper.select(scores, four, Target(share=0.25)) == ((3,),)
    assert keeper.select(scores, four, Target(share=0.5)) == ((1, 3),)
    # Dropping a head of this model costs its weight, alone or not.
    weights = (0.1, 0.5, 0.0, 0.3)

    def measure(_: Any, kept: Any) -> Quality:
        lost = sum(weight for weight, is_kept in zip(weights, kept[0], strict=True) if not is_kept)
        return Quality(recall=0.0, tokens=0.0, loss=lost)

    monkeypatch.setattr(base, "measure", measure)
    scores = keeper_scores(("a", (0.3, 0.9, 0.1, 0.6)))
    assert keeper.select(scores, four, Target(budget=0.2)) == ((1, 3),)
    assert keeper.select(scores, four, Target(budget=0.05)) == ((0, 1, 3),)
    both = Target(share=0.75, budget=0.2)
    assert keeper.select(scores, four, both) == ((0, 1, 3),)


PERIOD, REPEATS = 12, 4
BASE = list(range(10, 10 + PERIOD))


@pytest.mark.parametrize("chunk", [5, 64])
def test_masses_are_those_of_eager_attention(
    model: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Echo and induction mass of every head, from whole attention matrices."""
    ids = BASE * REPEATS
    monkeypatch.setattr(watching, "CHUNK_TOKENS", chunk)
    masses = repeat_masses(model, BASE, REPEATS)
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.inference_mode():
            attentions = model(
                torch.tensor([ids]), use_cache=False, output_attentions=True
            ).attentions
    finally:
        model.config._attn_implementation = before
    rows = range(PERIOD, len(ids))
    for layer, weights in enumerate(attentions):
        for behind, found in enumerate((masses.echo, masses.induction)):
            total = torch.zeros(HEADS, dtype=weights.dtype)
            for row in rows:
                copies = [t for t in range(row) if ids[t] == ids[row]]
                total += weights[0, :, row, [t + behind for t in copies]].sum(-1)
            assert found[layer] == pytest.approx((total / len(rows)).tolist(), abs=1e-5)
    assert layer == LAYERS - 1


@st.composite
def some_masses(draw: st.DrawFn) -> tuple[int, RepeatMasses]:
    """Query heads of a KV head, and masses of layers of such heads."""
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    row = st.tuples(*[st.floats(0, 1)] * (group * kv_heads))
    layers = st.tuples(*[row] * draw(st.integers(1, 4)))
    return group, RepeatMasses(draw(layers), draw(layers))


@given(some_masses(), st.floats(0.01, 0.6), st.floats(0.01, 0.3))
def test_the_rule_protects_groups_of_the_best_heads_and_shares_pass_through_it(
    case: tuple[int, RepeatMasses], induction_share: float, echo_share: float
) -> None:
    group, found = case
    razor = Razor(induction_share=induction_share, echo_share=echo_share)
    mean = tuple(tuple(1 / a for a in row) for row in razor.admissions(found, group))
    scores = RazorScores(mean=mean, masses=found)
    batches = [fake_batch(len(mean), len(mean[0]), group)]

    def chosen(target: Target) -> set[tuple[int, int]]:
        ca_heads = razor.select(scores, batches, target)
        return {(layer, head) for layer, row in enumerate(ca_heads) for head in row}

    own = chosen(Target())
    total = sum(map(len, found.echo))
    assert own == {
        (layer, head // group)
        for masses, share in ((found.induction, induction_share), (found.echo, echo_share))
        for layer, head in best_heads(masses, max(1, round(share * total)))
    }
    kv_heads = sum(map(len, mean))
    before: set[tuple[int, int]] = set()
    for count in range(1, kv_heads + 1):
        heads = chosen(Target(share=count / kv_heads))
        assert len(heads) == count
        assert before < heads
        before = heads
        if count == len(own):
            assert heads == own


def test_it_says_as_many_random_tokens_as_fit_and_no_special_ones(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = {model.config.bos_token_id, model.config.eos_token_id}
    assert plain_tokens(model) == [i for i in range(VOCAB) if i not in special]
    sample = CalibrationSample(tuple(make_ids(40)), (Question((1,), (2,)),))
    batch = HeadProbe(model, RULE).prepare(sample)
    said: list[int] = []

    def noting(model: Any, base: list[int], *rest: Any) -> RepeatMasses:
        said.append(len(set(base)))
        return repeat_masses(model, base, *rest)

    monkeypatch.setattr(copies, "repeat_masses", noting)
    first = Razor().score([batch])
    assert Razor(seed=1).score([batch]) != first
    Razor(random_tokens=2500, repeats=128).score([batch])
    # Fewer plain tokens than 2500, and four times as many fit into the context of 512.
    assert said == [len(plain_tokens(model))] * 2 + [512 // 128]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: make_method("duo"), r"--method.*contextkeeper, razor, taylor.*'duo'"),
        (lambda: Target(share=0.0), "--share"),
        (lambda: Target(budget=1.0), "--budget"),
        (lambda: make_method("contextkeeper", candidate_share=0), "candidate_share"),
        (lambda: make_method("contextkeeper", task_consensus=1.5), "task_consensus"),
    ],
)
def test_errors_name_the_argument_and_the_valid_values(call: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        call()
