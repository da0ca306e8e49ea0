"""How much of a context CA heads keep: every rule, and what happens when something is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.curves import Curve
from kvtier.retention.share import Choice, Everything, FixedShare, QualityTarget, TokenBudget, Turn

CURVE = Curve(0.2, -0.1, 4.0, 1.0, 3.0)


class Source:
    def __init__(self, curve: Curve | None) -> None:
        self._curve = curve

    def curve(self) -> Curve | None:
        return self._curve


@given(st.integers(1, 200_000), st.floats(0.001, 1.0))
def test_rounding_never_undercuts_the_share(prompt_tokens, share):
    kept = Choice(share, "share").tokens(prompt_tokens)
    assert share * prompt_tokens - 1e-6 <= kept <= share * prompt_tokens + 1


def test_everything_is_the_default():
    assert Everything().choose(Turn(1000)).retention == 1.0


def test_a_fixed_share_is_for_every_context():
    assert FixedShare(0.3).choose(Turn(10)).tokens(10) == 3


@given(st.integers(1, 5000), st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_a_budget_holds_for_all_turns_of_a_session_together(budget, prompts):
    held = 0
    for prompt in prompts:
        kept = TokenBudget(budget).choose(Turn(prompt, held)).tokens(prompt)
        assert kept <= prompt
        held += kept
    # A turn always keeps an entry, even where nothing is left.
    assert held <= max(budget, 0) + len(prompts)


@given(st.floats(0.5, 5.0), st.floats(0.05, 1.0))
def test_a_quality_target_keeps_what_the_curve_says_and_says_what_it_predicts(nll, target):
    choice = QualityTarget(target, Source(CURVE)).choose(Turn(1000, nll=nll))
    assert choice.reason == "quality"
    assert choice.retention == CURVE.retention(target, nll)
    assert choice.quality == pytest.approx(target, abs=1e-6)


def test_more_surprising_text_keeps_more():
    rule = QualityTarget(0.95, Source(CURVE))
    kept = [rule.choose(Turn(1000, nll=nll)).retention for nll in (1.0, 2.0, 3.0)]
    assert kept == sorted(kept)
    assert kept[0] < kept[2]


def test_a_doubt_never_costs_an_answer():
    without_curve = QualityTarget(0.9, Source(None)).choose(Turn(1000, nll=2.0))
    without_nll = QualityTarget(0.9, Source(CURVE)).choose(Turn(1000))
    assert (without_curve.retention, without_curve.reason) == (1.0, "no-curve")
    assert (without_nll.retention, without_nll.reason) == (1.0, "no-nll")
