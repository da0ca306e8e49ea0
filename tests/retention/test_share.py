"""How much of a context CA heads keep: every rule, and what happens when something is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.curves import Curve
from kvtier.retention.share import Everything, FixedShare, QualityTarget, TokenBudget, Turn

CURVE = Curve(0.2, -0.1, 4.0, 1.0, 3.0)


class Source:
    def __init__(self, curve: Curve | None) -> None:
        self._curve = curve

    def curve(self) -> Curve | None:
        return self._curve


def turn(prompt: int, protected: int = 0, **known: float) -> Turn:
    return Turn(prompt, max(1, prompt - protected), **known)


@given(st.integers(1, 200_000), st.integers(0, 400), st.floats(0.001, 1.0))
def test_a_share_counts_the_prompt_and_rounding_never_undercuts_it(prompt, protected, share):
    this = turn(prompt, protected)
    kept = this.protected_tokens + FixedShare(share).choose(this).kept_tokens
    wanted = share * prompt
    assert wanted - 1e-6 <= kept <= max(wanted, this.protected_tokens) + 1


def test_everything_is_the_default():
    assert Everything().choose(turn(1000, 384)).kept_tokens == 616


def test_a_fixed_share_is_for_every_context():
    assert FixedShare(0.3).choose(turn(10)).kept_tokens == 3
    assert FixedShare(0.3).choose(turn(1000, 100)).kept_tokens == 200
    assert FixedShare(0.3).choose(turn(1000, 384)).kept_tokens == 1


@given(st.integers(1, 5000), st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_a_budget_holds_for_all_turns_of_a_session_together(budget, prompts):
    held = 0
    for prompt in prompts:
        kept = TokenBudget(budget).choose(turn(prompt, held_tokens=held)).kept_tokens
        assert kept <= prompt
        held += kept
    # A turn always keeps an entry, even where nothing is left.
    assert held <= max(budget, 0) + len(prompts)


@given(st.floats(0.5, 5.0), st.floats(0.05, 1.0), st.integers(0, 500))
def test_a_quality_target_keeps_what_the_curve_says_and_says_what_it_predicts(
    nll, target, protected
):
    choice = QualityTarget(target, Source(CURVE)).choose(turn(1000, protected, nll=nll))
    assert choice.reason == "quality"
    share = CURVE.retention(target, nll)
    assert choice.kept_tokens == pytest.approx(share * (1000 - protected), abs=1)
    kept = choice.kept_tokens / (1000 - protected)
    assert choice.quality == CURVE.quality(kept, nll)
    assert choice.quality >= target - 1e-6


def test_more_surprising_text_keeps_more():
    rule = QualityTarget(0.95, Source(CURVE))
    kept = [rule.choose(turn(1000, nll=nll)).kept_tokens for nll in (1.0, 2.0, 3.0)]
    assert kept == sorted(kept)
    assert kept[0] < kept[2]


def test_a_doubt_never_costs_an_answer():
    without_curve = QualityTarget(0.9, Source(None)).choose(turn(1000, nll=2.0))
    without_nll = QualityTarget(0.9, Source(CURVE)).choose(turn(1000))
    assert (without_curve.kept_tokens, without_curve.reason) == (1000, "no-curve")
    assert (without_nll.kept_tokens, without_nll.reason) == (1000, "no-nll")
