"""The duties of every token scorer, whichever the registry holds, and what each says of itself."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.keys import policy_digest
from kvtier.config import load_settings
from kvtier.errors import UsageError
from kvtier.heads.profile import ModelShape, full_profile
from kvtier.retention.locality import LocalityRule
from kvtier.retention.rules import scorer_of
from kvtier.retention.scorers import SCORERS, Chunk, Span, TokenScorer, select
from kvtier.retention.scorers.compactor import Compactor
from kvtier.retention.scorers.simple import KeyDiff
from kvtier.retention.token_worth import TokenWorth, feature_width
from kvtier_kernels.scores import Rotation

HEADS, GROUP, DIM = 2, 3, 16


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_chunk(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Chunk:
    q, k, v = (normal(seed + i, tokens, HEADS, *shape) for i, shape in enumerate(
        ((GROUP, DIM), (DIM,), (DIM,))
    ))  # fmt: skip
    return Chunk(q.to(dtype), k.to(dtype), v.to(dtype), [0, tokens], [0], DIM**-0.5)


def make_span(scorer: TokenScorer, chunk: Chunk, first: int = 0) -> Span:
    tokens = chunk.k.shape[0]
    state = torch.empty(HEADS, 0, tokens)
    if scorer.state_width:
        state = scorer.observe(chunk)
    angles = normal(9, first + tokens, DIM // 2)[first:]
    rotation = Rotation(angles.cos(), angles.sin())
    keys, values = chunk.k.transpose(0, 1), chunk.v.transpose(0, 1)
    return Span(keys, state, first, rotation, values)


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    """Make a file that a fitted scorer reads."""
    file = tmp_path_factory.mktemp("fitted") / "weights.npz"
    TokenWorth(normal(0, 1, HEADS, feature_width(HEADS, DIM))).save(file)
    return file


def a_scorer(name: str, weights: Path) -> TokenScorer:
    compete = {"head_budgets": "adaptive", "retention": 0.5} if SCORERS[name].comparable else {}
    return scorer_of(load_settings(scorer=name, scorer_file=weights, **compete))


@pytest.fixture(params=SCORERS, ids=str)
def scorer(request, weights) -> TokenScorer:
    return a_scorer(request.param, weights)


# ---- the contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_every_token_gets_a_number(scorer, tokens, dtype):
    chunk = make_chunk(tokens, dtype=dtype)
    span = make_span(scorer, chunk)
    before = [x.clone() for x in (*chunk[:3], span.state)]
    assert span.state.shape == (HEADS, scorer.state_width, tokens)
    assert span.state.dtype == torch.float32
    scores = scorer.score(span)
    assert scores.shape == (HEADS, tokens)
    assert scores.dtype == torch.float32
    assert bool(scores.isfinite().all())
    kept = select(scores, min(tokens, 10))
    assert kept.tolist() == [sorted(set(row)) for row in kept.tolist()]
    given = (*chunk[:3], span.state)
    assert all(map(torch.equal, before, given)), "nothing that is given is changed"


def test_a_server_scores_as_another_does(scorer, weights):
    again = a_scorer(scorer.name, weights)
    assert again == scorer
    if not scorer.is_fitted:
        assert type(scorer)(**scorer.parameters()) == scorer
    chunk = make_chunk(80, seed=5)
    one, two = (s.score(make_span(s, chunk, first=7)) for s in (scorer, again))
    assert torch.equal(one, two)


def test_heads_do_not_see_each_other(scorer):
    chunk = make_chunk(70)
    span = make_span(scorer, chunk)
    turned = Span(span.keys.flip(0), span.state.flip(0), span.first, span.rotation)
    if scorer.name != "random" and not scorer.comparable:
        assert torch.allclose(scorer.score(turned), scorer.score(span).flip(0), atol=1e-5)


@pytest.mark.parametrize("name", [name for name, kind in SCORERS.items() if kind.state_width])
@given(cut=st.integers(1, 3), seed=st.integers(0, 100))
def test_a_prefill_in_chunks_is_observed_as_one(name, cut, seed):
    scorer = scorer_of(load_settings(scorer=name, scorer_window_tokens=16))
    chunk, at = make_chunk(64, seed), 16 * cut
    parts = [
        scorer.observe(
            Chunk(*(x[part] for x in chunk[:3]), [0, part.stop - part.start], [start], chunk[5])
        )
        for part, start in ((slice(0, at), 0), (slice(at, 64), at))
    ]
    whole = scorer.observe(chunk)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-4, atol=1e-5)


def test_all_that_decides_the_scores_is_in_the_digest_and_is_json(scorer):
    with pytest.raises(FrozenInstanceError):
        scorer.extra = 1
    parameters = scorer.parameters()
    assert set(parameters) == {field.name for field in fields(scorer) if field.compare}
    assert json.loads(json.dumps(parameters)) == parameters
    assert set(scorer.state_parameters()) <= set(parameters)
    assert SCORERS[scorer.name] is type(scorer)


def test_a_curve_of_one_scorer_is_of_no_other(weights):
    shape = ModelShape(num_layers=2, num_kv_heads=2, num_attention_heads=4, head_dim=DIM)
    profile, rule = full_profile(shape), LocalityRule(4, 8, 4)
    scorers = [a_scorer(name, weights) for name in SCORERS]
    digests = {policy_digest(profile, rule, scorer) for scorer in scorers}
    assert len(digests) == len(scorers)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"head_budgets": "adaptive"}, r"scorer\.file: expected a file that"),
        ({"scorer_file": "any.npz"}, "head_budgets: expected adaptive, with a share"),
        (
            {"head_budgets": "adaptive", "scorer": "keydiff"},
            "scorer: expected reconstruction with head_budgets",
        ),
        ({"scorer": "best"}, "scorer: expected one of compactor"),
    ],
)
def test_settings_that_no_scorer_serves_are_refused_by_name(asked, expected):
    """Scores must compare where heads compete; one that sees all heads serves no locality heads."""
    settings = load_settings(**{"scorer": "reconstruction", "retention": 0.5} | asked)
    with pytest.raises(UsageError, match=expected):
        scorer_of(settings)


# ---- selection


@given(st.integers(0, 1000), st.integers(1, 200), st.integers(1, 200))
def test_the_best_tokens_stay_in_order(seed: int, tokens: int, count: int) -> None:
    count = min(count, tokens)
    scores = normal(seed, 2, tokens)
    chosen = select(scores, count)
    assert chosen.shape == (2, count)
    for row, kept in zip(scores, chosen, strict=True):
        assert kept.tolist() == sorted(set(kept.tolist()))
        left = set(range(tokens)) - set(kept.tolist())
        assert all(row[t] <= row[kept].min() for t in left)


# ---- Compactor: signals that say nothing are ignored, spans stay whole


def by_compactor(keys: torch.Tensor, mass: torch.Tensor, **parameters) -> torch.Tensor:
    return Compactor(**parameters).score(Span(keys, mass.unsqueeze(1)))


def test_leverage_that_says_nothing_leaves_the_choice_to_attention() -> None:
    """Fewer tokens than key dimensions: every leverage is the same but for rounding."""
    keys, mass = normal(0, 1, 20, 32), normal(1, 1, 20).abs()
    by_mass = by_compactor(keys, mass, leverage_weight=0.0, pool_width=1)
    both = by_compactor(keys, mass, leverage_weight=1.0, pool_width=1)
    torch.testing.assert_close(both, by_mass, rtol=0, atol=0.2)


def test_what_sticks_out_stays_with_its_neighbours_where_attention_says_nothing() -> None:
    keys = 0.1 * normal(3, 1, 500, 16)
    keys[0, 250] *= 50
    chosen = select(by_compactor(keys, torch.ones(1, 500), pool_width=5), 5)
    assert chosen.tolist() == [[248, 249, 250, 251, 252]]


# ---- the others


def test_keydiff_keeps_the_key_that_is_unlike_the_others() -> None:
    keys = torch.ones(1, 50, DIM) + 0.1 * normal(4, 1, 50, DIM)
    keys[0, 31] *= -3
    span = Span(keys, torch.empty(1, 0, 50))
    assert KeyDiff().score(span).argmax() == 31


def test_distinct_keys_see_what_a_token_says_and_not_where_it_stands() -> None:
    """One key that repeats at every position, and one that differs: rotation hides neither."""
    tokens = 60
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -2, DIM // 2)
    rotation = Rotation(angles.cos(), angles.sin())
    keys = normal(6, 1, 1, DIM).repeat(1, tokens, 1) + 0.05 * normal(8, 1, tokens, DIM)
    keys[0, 40] = normal(7, DIM)
    half = DIM // 2
    a, b = keys[..., :half], keys[..., half:]
    cos, sin = rotation.cos, rotation.sin
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    span = Span(rotated, torch.empty(1, 0, tokens), 0, rotation)
    scorer = SCORERS["distinct-keys"](pool_width=1)
    assert scorer.score(span).argmax() == 40
    again = scorer.score(Span(keys, span.state))
    torch.testing.assert_close(scorer.score(span), again, rtol=1e-3, atol=1e-3)


def test_streaming_llm_keeps_the_newest_and_random_tokens_are_each_heads_own() -> None:
    newest, random = SCORERS["streaming-llm"](), SCORERS["random"]()
    span = make_span(newest, make_chunk(40))
    assert select(newest.score(span), 3).tolist() == [[37, 38, 39]] * HEADS
    here, there = (random.score(make_span(random, make_chunk(200), first)) for first in (0, 200))
    assert not torch.equal(here[0], here[1])
    assert not torch.equal(here, there), "and of their place"
