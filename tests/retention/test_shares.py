"""The duties of every share rule, whichever the registry holds, and what each says of itself."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.calibration.curves import Curve
from kvtier.config import load_settings
from kvtier.errors import ConfigurationError, UsageError
from kvtier.retention.shares import (
    PAGE,
    SHARE_RULES,
    ByteBudget,
    FixedShare,
    Number,
    QualityTarget,
    Serving,
    ShareRule,
    TokenBudget,
    Turn,
    configured_share,
    expected_share,
)

CURVE = Curve(0.2, -0.1, 4.0, 1.0, 3.0)


class Source:
    def __init__(self, curve: Curve | None) -> None:
        self._curve = curve

    def curve(self) -> Curve | None:
        return self._curve


def turn(prompt: int, protected: int = 0, **known: float) -> Turn:
    return Turn(prompt, max(1, prompt - protected), **known)


# ---- the contract

ENTRY_BYTES = 100
SERVING = Serving(ENTRY_BYTES, Source(CURVE))
EVERY_RULE = pytest.mark.parametrize("kind", SHARE_RULES.values(), ids=SHARE_RULES)


def numbers(kind: type[ShareRule]) -> st.SearchStrategy[float]:
    """Any number that the rule takes."""
    if kind.takes is Number.SHARE:
        return st.floats(0.001, 1.0)
    return st.integers(1, 100_000)


turns = st.builds(
    lambda droppable, protected, held, nll: Turn(droppable + protected, droppable, held, nll),
    st.integers(1, 5000),
    st.integers(0, 500),
    st.integers(0, 2000),
    st.none() | st.floats(0.0, 8.0),
)


@EVERY_RULE
@given(data=st.data())
def test_a_turn_keeps_one_entry_or_more_and_no_more_than_there_are(kind, data):
    rule, this = kind.of(data.draw(numbers(kind)), SERVING), data.draw(turns)
    choice = rule.choose(this)
    assert isinstance(choice.kept_tokens, int)
    assert 1 <= choice.kept_tokens <= this.droppable_tokens
    assert choice.reason
    assert rule.choose(this) == choice
    if not kind.needs_nll:
        without = Turn(this.prompt_tokens, this.droppable_tokens, this.held_tokens)
        assert rule.choose(without).kept_tokens == choice.kept_tokens


@EVERY_RULE
@given(data=st.data())
def test_what_was_kept_is_within_what_may_have_been(kind, data):
    """The tier's records of earlier turns are checked so: their NLL is not known any more."""
    rule, this = kind.of(data.draw(numbers(kind)), SERVING), data.draw(turns)
    most_held = this.held_tokens + data.draw(st.integers(0, 2000))
    held = data.draw(st.integers(this.held_tokens, most_held))
    kept = rule.choose(Turn(this.prompt_tokens, this.droppable_tokens, held, this.nll)).kept_tokens
    unknown = Turn(this.prompt_tokens, this.droppable_tokens, this.held_tokens)
    least, most = rule.bounds(unknown, most_held)
    assert least <= kept <= most


@EVERY_RULE
@given(data=st.data())
def test_settings_ask_for_a_rule_by_its_name_and_number(kind, data):
    number = data.draw(numbers(kind))
    asked = configured_share(load_settings(share_rule=f"{kind.name}={number}"))
    assert asked == (SHARE_RULES[kind.name], number)
    rule = kind.of(number, SERVING)
    assert rule == kind.of(number, SERVING)
    with pytest.raises(FrozenInstanceError):
        rule.extra = 1


@EVERY_RULE
@pytest.mark.parametrize("number", ["", "much", "nan", "inf", "0", "-1", "1e999"])
def test_a_number_that_a_rule_does_not_take_is_named(kind, number):
    with pytest.raises(UsageError, match=f"share_rule: expected {kind.name}=a"):
        configured_share(load_settings(share_rule=f"{kind.name}={number}"))


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("quality", 0.9, QualityTarget(0.9, SERVING.source)),
        ("retention", 0.25, FixedShare(0.25)),
        ("budget_tokens", 4096, TokenBudget(4096)),
        ("budget_bytes", 4096, ByteBudget(40)),
        ("budget_bytes", 1, ByteBudget(1)),
    ],
)
def test_four_rules_have_a_setting_of_their_own(setting, value, rule):
    settings = load_settings(**{setting: value})
    assert settings.compacts
    asked = configured_share(settings)
    assert asked.rule.of(asked.number, SERVING) == rule
    named = load_settings(share_rule=f"{asked.rule.name}={value}")
    assert configured_share(named) == asked
    assert configured_share(settings.keeping_everything()) is None
    assert configured_share(named.keeping_everything()) is None


@pytest.mark.parametrize("asked", [{"retention": 0.25}, {"share_rule": "retention=0.25"}])
def test_plans_count_with_a_fixed_share_however_it_is_asked_for(asked):
    assert expected_share(load_settings(**asked)) == 0.25
    assert expected_share(load_settings(quality=0.9)) == 1.0
    assert expected_share(load_settings()) == 1.0


def test_settings_ask_for_one_rule_at_most_and_one_that_there_is():
    assert configured_share(load_settings()) is None
    with pytest.raises(UsageError, match="share_rule: expected NAME=NUMBER with one of quality"):
        configured_share(load_settings(share_rule="best=1"))
    with pytest.raises(ConfigurationError, match="only one of retention, share_rule"):
        load_settings(retention=0.5, share_rule="quality=0.9")


# ---- each rule


@given(st.integers(1, 200_000), st.integers(0, 400), st.floats(0.001, 1.0))
def test_a_share_counts_the_prompt_and_rounding_never_undercuts_it(prompt, protected, share):
    this = turn(prompt, protected)
    kept = this.protected_tokens + FixedShare(share).choose(this).kept_tokens
    wanted = share * prompt
    assert wanted - 1e-6 <= kept <= max(wanted, this.protected_tokens) + PAGE


@given(st.integers(1, 5000), st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_a_budget_holds_for_all_turns_of_a_session_together(budget, prompts):
    held = 0
    for prompt in prompts:
        kept = TokenBudget(budget).choose(turn(prompt, held_tokens=held)).kept_tokens
        assert kept <= prompt
        held += kept
    # A turn always keeps a page, even where nothing is left.
    assert held <= budget + PAGE * len(prompts)


@given(st.floats(0.5, 5.0), st.floats(0.05, 1.0), st.integers(0, 500))
def test_a_quality_target_keeps_what_the_curve_says_and_says_what_it_predicts(
    nll, target, protected
):
    choice = QualityTarget(target, Source(CURVE)).choose(turn(1000, protected, nll=nll))
    assert choice.reason == "quality"
    share = CURVE.retention(target, nll)
    assert choice.kept_tokens == pytest.approx(share * (1000 - protected), abs=PAGE)
    kept = choice.kept_tokens / (1000 - protected)
    assert choice.quality == CURVE.quality(kept, nll)
    assert choice.quality >= target - 1e-6


def test_a_doubt_never_costs_an_answer():
    without_curve = QualityTarget(0.9, Source(None)).choose(turn(1000, nll=2.0))
    without_nll = QualityTarget(0.9, Source(CURVE)).choose(turn(1000))
    assert (without_curve.kept_tokens, without_curve.reason) == (1000, "no-curve")
    assert (without_nll.kept_tokens, without_nll.reason) == (1000, "no-nll")
