"""Calibration curves: the algebra of f and its inverse, what a fit can and cannot learn, and the
picture of it."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from calibration_samples import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.calibration.curves import (
    HALF_LIMITS,
    MIN_MEASUREMENTS,
    POWER_LIMITS,
    Curve,
    Measurement,
    fit_curve,
    goodness,
    held_out_rmse,
    unseen_tasks,
)
from kvtier.calibration.picture import draw_curve
from kvtier.errors import UsageError

shares = st.floats(0, 1)
halves = st.floats(*HALF_LIMITS)
powers = st.floats(*POWER_LIMITS)


def flat(half: float, power: float = 1.0) -> Curve:
    """The curve of one m for every NLL."""
    return Curve(0.0, half, power, 1.0, 4.0)


@given(st.floats(1e-6, 1), halves, powers)
def test_the_retention_for_a_quality_gives_that_quality(quality, half, power):
    curve = flat(half, power)
    assert curve.quality(curve.retention(quality, 2.0), 2.0) == pytest.approx(quality, rel=1e-8)


@given(st.lists(shares, min_size=2, max_size=9), st.floats(1e-300, 1), halves, powers)
def test_quality_is_a_share_that_never_falls_when_more_is_kept(retentions, quality, half, power):
    curve = flat(half, power)
    qualities = [curve.quality(retention, 2.0) for retention in sorted(retentions)]
    assert all(later - before >= -1e-15 for before, later in pairwise(qualities))
    assert all(0 <= one <= 1 for one in qualities)
    assert 0 < curve.retention(quality, 2.0) <= 1
    assert curve.quality(0.0, 2.0) == 0.0
    assert curve.quality(1.0, 2.0) == pytest.approx(1.0, abs=1e-15)
    assert curve.retention(1.0, 2.0) == 1.0


@given(shares, halves)
def test_with_a_power_of_one_f_is_the_published_formula(retention, half):
    b = -math.log(2) / half
    formula = math.expm1(b * retention) / math.expm1(b)
    assert flat(half).quality(retention, 2.0) == pytest.approx(formula, rel=1e-9, abs=1e-12)


@given(st.floats(-1e6, 1e6))
def test_an_unusual_context_is_the_nearest_measured_one(nll):
    curve = Curve(0.2, 0.1, 2.0, 1.0, 4.0)
    nearest = min(max(nll, 1.0), 4.0)
    assert curve.retention(0.95, nll) == curve.retention(0.95, nearest)
    assert curve.quality(0.5, nll) == curve.quality(0.5, nearest)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c: c.retention(0.9, math.nan), "nll"),
        (lambda c: Measurement(math.nan, 0.5, 1.0, 0), "nll"),
        (lambda c: Measurement(1.0, 0.5, math.inf, 0), "ratio"),
        (lambda c: Measurement(1.0, 0.0, 1.0, 0), "retention"),
        (lambda c: fit_curve(synthetic(0, 0, 0)[: MIN_MEASUREMENTS - 1]), "measurements"),
        (lambda c: fit_curve(synthetic(0, 0, 0, retentions=(1.0,))), "measurements"),
    ],
)
def test_bad_input_is_named(call, name):
    with pytest.raises(UsageError, match=f"^{name}"):
        call(flat(1.0))


@settings(max_examples=15, derandomize=True)
@given(st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.floats(0.7, 9), st.integers(0, 5))
def test_a_fit_without_noise_finds_the_curve_it_was_made_from(at_low, at_high, power, seed):
    alpha = (at_high - at_low) / 3
    measured = synthetic(alpha, at_low - alpha, 0.0, power=power, contexts=12, seed=seed)
    curve = fit_curve(measured, underestimate_weight=1.0)
    # Steep curves make a narrow valley: of 250 drawn ones the worst fit was off by 0.015.
    assert goodness(curve, measured).rmse < 3e-2


@pytest.mark.parametrize("seed", range(2))
def test_doubt_keeps_more(seed):
    """The heavier the weight, the larger r* on the whole: errors are made on the side of memory."""
    measured = synthetic(0.1, 0.1, 0.05, power=2.0, seed=seed)
    kept = [
        [fit_curve(measured, underestimate_weight=w).retention(0.95, n) for n in (1.2, 2.5, 3.8)]
        for w in (1.0, 4.0, 16.0)
    ]
    for lighter, heavier in pairwise(kept):
        assert sum(heavier) > sum(lighter)


def test_perfect_recall_is_steep_but_bounded_and_none_keeps_nearly_everything():
    measured = [Measurement(1.0 + c / 9, r, 1.0, c) for c in range(9) for r in (0.05, 0.1, 0.5)]
    curve = fit_curve(measured)
    assert HALF_LIMITS[0] <= curve.half(1.5) <= HALF_LIMITS[1]
    assert 0 < curve.retention(0.95, 1.5) < 0.1
    assert goodness(curve, measured).rmse < 0.05
    none = [Measurement(1.0, r, 0.0, c) for c in range(5) for r in (0.2, 0.8)]
    assert fit_curve(none).retention(0.95, 1.0) > 0.95


def test_what_was_not_measured_is_not_assumed():
    """Perfect recall at one half says little about a twentieth: the flatter curve is taken. One NLL
    has no slope."""
    half = fit_curve([Measurement(1.0, 0.5, 1.0, c) for c in range(9)])
    less = fit_curve([Measurement(1.0, 0.1, 1.0, c) for c in range(9)])
    assert half.retention(0.95, 1.0) > 2 * less.retention(0.95, 1.0)
    assert (half.alpha, half.nll_min, half.nll_max) == (0.0, 1.0, 1.0)
    assert math.isfinite(half.retention(0.9, 7.0))


def test_better_than_the_full_cache_counts_as_equal():
    once = synthetic(0.0, 0.3, 0.0)
    lucky = [Measurement(m.nll, m.retention, 9.0, m.context) for m in once if m.retention == 0.9]
    plain = [Measurement(m.nll, m.retention, 1.0, m.context) for m in lucky]
    assert fit_curve(once + lucky) == fit_curve(once + plain)


def test_held_out_contexts_are_left_out_whole():
    """Each context has a quality of its own that its NLL says nothing about: a split by measurement
    would have seen every context already."""
    rng = random.Random(3)
    measured = []
    for context in range(4):
        own = Curve(0.0, rng.uniform(0.05, 1.5), rng.uniform(1, 6), 0.0, 9.0)
        nll = float(context)
        measured += [Measurement(nll, r, own.quality(r, nll), context) for r in (0.2, 0.4, 0.6)]
    assert held_out_rmse(measured) > 1.3 * goodness(fit_curve(measured), measured).rmse
    two_ends = [m for m in measured if m.context in (0, 3)]
    expected = []
    for left, seen in ((0, 3), (3, 0)):
        curve = fit_curve([m for m in two_ends if m.context == seen] * 3)
        expected += [
            curve.quality(m.retention, m.nll) - m.ratio for m in two_ends if m.context == left
        ]
    assert held_out_rmse(two_ends) == pytest.approx(np.sqrt(np.mean(np.square(expected))), rel=1e-6)
    assert held_out_rmse(measured[:3]) is None, "one context cannot be left out"


SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
EASY, HARD = Curve(0.0, 0.05, 1.0, 2.0, 2.0), Curve(0.0, 0.2, 1.0, 2.0, 2.0)


def of_task(task: str, curve: Curve, contexts: range) -> list[Measurement]:
    return [
        Measurement(2.0, share, curve.quality(share, 2.0), context, task)
        for context in contexts
        for share in SHARES
    ]


def test_a_task_is_judged_by_the_curve_of_the_others():
    measurements = [*of_task("easy", EASY, range(2)), *of_task("hard", HARD, range(2, 4))]
    easy, hard = unseen_tasks(measurements, 0.95)
    assert (easy.task, hard.task) == ("easy", "hard")
    # Each task gets the share that the other one needs.
    assert easy.share == pytest.approx(HARD.retention(0.95, 2.0), abs=0.01)
    assert hard.share == pytest.approx(EASY.retention(0.95, 2.0), abs=0.01)
    assert easy.quality > 0.99
    assert hard.quality == pytest.approx(HARD.quality(hard.share, 2.0), abs=0.05)
    assert hard.quality < 0.8
    # A curve that has seen both knows better.
    assert fit_curve(measurements).retention(0.95, 2.0) > hard.share


def test_where_the_others_are_too_few_to_fit_nothing_is_said():
    assert unseen_tasks(of_task("alone", HARD, range(3)), 0.95) == []
    few = [Measurement(2.0, 0.5, 0.9, 9, "few")]
    found = unseen_tasks([*of_task("many", HARD, range(3)), *few], 0.95)
    assert [task.task for task in found] == ["few"]


@pytest.mark.parametrize("contexts", [1, 2, 40])
def test_a_picture_is_drawn_and_equal_curves_give_equal_files(contexts, tmp_path):
    measured = synthetic(2.0, -10.0, 0.05, contexts=max(contexts, 2))[: 5 * contexts] * 2
    curve = fit_curve(measured)
    for name in ("a.png", "b.png"):
        draw_curve(curve, measured, tmp_path / name, "a model")
    first, second = ((tmp_path / name).read_bytes() for name in ("a.png", "b.png"))
    assert first.startswith(b"\x89PNG")
    assert first == second
