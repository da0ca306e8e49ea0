"""Calibration curves: the algebra of f and its inverse, and what a fit can and cannot learn."""

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
    quality_at,
    retention_at,
)
from kvtier.errors import UsageError

shares = st.floats(0, 1)
positive_shares = st.floats(1e-300, 1)
halves = st.floats(*HALF_LIMITS)
powers = st.floats(*POWER_LIMITS)


def flat(half: float, power: float = 1.0) -> Curve:
    """The curve of one m for every NLL."""
    return Curve(0.0, half, power, 1.0, 4.0)


@given(st.floats(1e-3, 1), halves, powers)
def test_the_inverse_gives_back_the_retention(retention, half, power):
    curve = flat(half, power)
    quality = curve.quality(retention, 2.0)
    # Neighbouring retentions share one floating-point quality where f is level.
    if 1e-9 < quality < 1 - 1e-9:
        assert curve.retention(quality, 2.0) == pytest.approx(retention, abs=1e-6)


@given(st.floats(1e-6, 1), halves, powers)
def test_the_retention_for_a_quality_gives_that_quality(quality, half, power):
    curve = flat(half, power)
    assert curve.quality(curve.retention(quality, 2.0), 2.0) == pytest.approx(quality, rel=1e-8)


@given(st.lists(shares, min_size=2, max_size=9), halves, powers)
def test_quality_never_falls_when_more_is_kept(retentions, half, power):
    qualities = quality_at(np.sort(np.array(retentions)), np.float64(half), np.float64(power))
    assert np.all(np.diff(qualities) >= -1e-15)


@given(halves, powers)
def test_nothing_kept_is_worth_nothing_and_everything_is_worth_one(half, power):
    assert flat(half, power).quality(0.0, 2.0) == 0.0
    assert flat(half, power).quality(1.0, 2.0) == pytest.approx(1.0, abs=1e-15)
    assert flat(half, power).retention(1.0, 2.0) == 1.0


@given(shares, positive_shares, halves, powers)
def test_every_curve_gives_shares(retention, quality, half, power):
    assert 0 <= quality_at(np.float64(retention), np.float64(half), np.float64(power)) <= 1
    assert 0 < retention_at(quality, half, power) <= 1


@given(st.floats(0.01, 0.4), st.floats(2, 24))
def test_half_of_the_quality_is_left_at_m(half, power):
    """The whole context still adds something beyond m, which is little where m is small."""
    rest = 2 ** -((1 / half) ** power)
    assert flat(half, power).quality(half, 2.0) == pytest.approx(0.5 / (1 - rest), rel=1e-9)
    assert rest < 0.02


@given(shares, halves)
def test_with_a_power_of_one_f_is_the_published_formula(retention, half):
    b = -math.log(2) / half
    formula = math.expm1(b * retention) / math.expm1(b)
    assert flat(half).quality(retention, 2.0) == pytest.approx(formula, rel=1e-9, abs=1e-12)


def test_a_strong_bend_keeps_the_published_share():
    assert flat(math.log(2) / 10).retention(0.95, 2.0) == pytest.approx(0.30, abs=0.005)


@given(st.floats(-1e6, 1e6))
def test_an_unusual_context_is_the_nearest_measured_one(nll):
    curve = Curve(0.2, 0.1, 2.0, 1.0, 4.0)
    nearest = min(max(nll, 1.0), 4.0)
    assert curve.retention(0.95, nll) == curve.retention(0.95, nearest)
    assert curve.quality(0.5, nll) == curve.quality(0.5, nearest)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c: c.quality(1.1, 2.0), "retention"),
        (lambda c: c.quality(math.nan, 2.0), "retention"),
        (lambda c: c.retention(0.0, 2.0), "quality"),
        (lambda c: c.retention(math.nan, 2.0), "quality"),
        (lambda c: c.retention(0.9, math.nan), "nll"),
        (lambda c: Curve(math.inf, 0.0, 1.0, 1.0, 2.0), "alpha"),
        (lambda c: Curve(0.0, 0.0, 0.0, 1.0, 2.0), "power"),
        (lambda c: Curve(0.0, 0.0, 1.0, 2.0, 1.0), "nll_min"),
        (lambda c: Measurement(math.nan, 0.5, 1.0, 0), "nll"),
        (lambda c: Measurement(-0.1, 0.5, 1.0, 0), "nll"),
        (lambda c: Measurement(1.0, 0.5, math.inf, 0), "ratio"),
        (lambda c: Measurement(1.0, 0.0, 1.0, 0), "retention"),
        (lambda c: Measurement(1.0, math.nan, 1.0, 0), "retention"),
        (lambda c: fit_curve([]), "measurements"),
        (lambda c: fit_curve(synthetic(0, 0, 0)[: MIN_MEASUREMENTS - 1]), "measurements"),
        (lambda c: fit_curve(synthetic(0, 0, 0, retentions=(1.0,))), "measurements"),
        (lambda c: fit_curve(synthetic(0, 0, 0), underestimate_weight=0.5), "underestimate_weight"),
        (lambda c: fit_curve(synthetic(0, 0, 0), underestimate_weight=math.inf), "underest"),
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


@pytest.mark.parametrize(
    ("alpha", "beta", "power"), [(0.1, 0.1, 1), (-0.1, 0.6, 2), (0, 0.3, 1), (0.2, -0.1, 6)]
)
def test_a_noisy_fit_recovers_the_curve(alpha, beta, power):
    measured = synthetic(alpha, beta, 0.03, power=power)
    curve = fit_curve(measured, underestimate_weight=1.0)
    true = Curve(alpha, beta, power, 1.0, 4.0)
    errors = [
        curve.quality(r, n) - true.quality(r, n)
        for r in np.linspace(0.1, 0.9, 10)
        for n in np.linspace(1.2, 3.8, 5)
    ]
    assert np.sqrt(np.mean(np.square(errors))) < 0.02
    assert goodness(curve, measured).rmse < 0.035
    assert held_out_rmse(measured, underestimate_weight=1.0) < 0.037


@pytest.mark.parametrize("seed", range(5))
def test_doubt_keeps_more(seed):
    """The heavier the weight, the larger r* on the whole: errors are made on the side of memory."""
    measured = synthetic(0.1, 0.1, 0.05, power=2.0, seed=seed)
    kept = [
        [fit_curve(measured, underestimate_weight=w).retention(0.95, n) for n in (1.2, 2.5, 3.8)]
        for w in (1.0, 4.0, 16.0)
    ]
    for lighter, heavier in pairwise(kept):
        assert sum(heavier) > sum(lighter)


def test_perfect_recall_is_steep_but_bounded():
    measured = [Measurement(1.0 + c / 9, r, 1.0, c) for c in range(9) for r in (0.05, 0.1, 0.5)]
    curve = fit_curve(measured)
    assert HALF_LIMITS[0] <= curve.half(1.5) <= HALF_LIMITS[1]
    assert 0 < curve.retention(0.95, 1.5) < 0.1
    assert goodness(curve, measured).rmse < 0.05


def test_what_was_not_measured_is_not_assumed():
    """Perfect recall at one half says little about a twentieth: the flatter curve is taken."""
    half = fit_curve([Measurement(1.0, 0.5, 1.0, c) for c in range(9)])
    less = fit_curve([Measurement(1.0, 0.1, 1.0, c) for c in range(9)])
    assert half.retention(0.95, 1.0) > 2 * less.retention(0.95, 1.0)


def test_no_recall_at_all_keeps_nearly_everything():
    measured = [Measurement(1.0, r, 0.0, c) for c in range(5) for r in (0.2, 0.8)]
    assert fit_curve(measured).retention(0.95, 1.0) > 0.95


def test_one_retention_is_enough_for_a_curve_through_it():
    measured = synthetic(0.1, 0.2, 0.0, retentions=(0.5,))
    curve = fit_curve(measured)
    assert goodness(curve, measured).rmse < 1e-2


def test_one_nll_has_no_slope():
    measured = [Measurement(2.0, r, g, c) for c in range(4) for r, g in ((0.2, 0.5), (0.5, 0.9))]
    curve = fit_curve(measured)
    assert curve.alpha == 0.0
    assert (curve.nll_min, curve.nll_max) == (2.0, 2.0)
    assert math.isfinite(curve.retention(0.9, 7.0))


def test_better_than_the_full_cache_counts_as_equal():
    once = synthetic(0.0, 0.3, 0.0)
    lucky = [Measurement(m.nll, m.retention, 9.0, m.context) for m in once if m.retention == 0.9]
    plain = [Measurement(m.nll, m.retention, 1.0, m.context) for m in lucky]
    assert fit_curve(once + lucky) == fit_curve(once + plain)


def test_the_order_of_measurements_does_not_matter():
    measured = synthetic(0.1, 0.1, 0.05)
    shuffled = random.Random(1).sample(measured, len(measured))
    assert fit_curve(measured) == fit_curve(measured)
    assert fit_curve(shuffled).beta == pytest.approx(fit_curve(measured).beta, abs=1e-4)


def test_held_out_contexts_are_left_out_whole():
    """Each context has a quality of its own that its NLL says nothing about: a split by measurement
    would have seen every context already."""
    rng = random.Random(3)
    measured = []
    for context in range(4):
        own = Curve(0.0, rng.uniform(0.05, 1.5), rng.uniform(1, 6), 0.0, 9.0)
        nll = float(context)
        measured += [Measurement(nll, r, own.quality(r, nll), context) for r in (0.2, 0.4, 0.6)]
    two_ends = [m for m in measured if m.context in (0, 3)]
    rmse = goodness(fit_curve(measured), measured).rmse
    assert held_out_rmse(measured) > 1.3 * rmse
    expected = []
    for left, seen in ((0, 3), (3, 0)):
        curve = fit_curve([m for m in two_ends if m.context == seen] * 3)
        expected += [
            curve.quality(m.retention, m.nll) - m.ratio for m in two_ends if m.context == left
        ]
    assert held_out_rmse(two_ends) == pytest.approx(np.sqrt(np.mean(np.square(expected))), rel=1e-6)


def test_one_context_cannot_be_held_out():
    assert held_out_rmse([Measurement(1.0, 0.5, 0.9, 7)] * 9) is None


def test_goodness_of_equal_qualities_is_all_or_nothing():
    even = flat(0.5).quality(0.5, 1.0)
    measured = [Measurement(1.0, 0.5, even, c) for c in range(9)]
    assert goodness(flat(0.5), measured).r2 == 1.0
    assert goodness(flat(0.1), measured).r2 == 0.0
