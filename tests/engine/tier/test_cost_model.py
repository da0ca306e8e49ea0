"""Load or recompute: decided by what both really took."""

from __future__ import annotations

import pytest
from waiting import FakeClock

from kvtier_sglang.tier.cost_model import LEAST_TOKENS, LOAD_RATE_LIFE_S, CostModel

TOKEN_BYTES = 1000


def test_loading_is_tried_until_both_rates_are_known_and_then_the_faster_one_is_chosen():
    for loaded_tokens, pays in ((4000, True), (1000, False)):
        costs = CostModel()
        assert costs.compute_s(1) == float("inf")
        assert costs.loading_pays(TOKEN_BYTES)
        costs.computed(1.0, 2000)
        assert costs.loading_pays(TOKEN_BYTES)
        assert costs.compute_s(4000) == pytest.approx(2.0)
        costs.loaded(1.0, loaded_tokens, loaded_tokens * TOKEN_BYTES)
        assert costs.loading_pays(TOKEN_BYTES) is pays


def test_a_tier_that_was_slow_once_is_asked_again_and_one_good_load_later_it_is_used():
    """The slow load before does not drag the average down."""
    clock = FakeClock()
    costs = CostModel(clock)
    costs.computed(1.0, 2000)
    costs.loaded(10.0, 1000, 1000 * TOKEN_BYTES)
    assert not costs.loading_pays(TOKEN_BYTES)
    clock.passes(LOAD_RATE_LIFE_S + 1)
    assert costs.loading_pays(TOKEN_BYTES)
    costs.loaded(1.0, 4000, 4000 * TOKEN_BYTES)
    assert costs.loading_pays(TOKEN_BYTES)
    costs.loaded(1.0, 2000, 2000 * TOKEN_BYTES)
    assert costs.load_bytes_per_s == pytest.approx(3600 * TOKEN_BYTES)


def test_small_passes_and_small_loads_say_nothing():
    costs = CostModel()
    costs.computed(1.0, LEAST_TOKENS - 1)
    costs.computed(0.0, 2000)
    costs.loaded(1.0, 0, 0)
    costs.loaded(1.0, LEAST_TOKENS - 1, (LEAST_TOKENS - 1) * TOKEN_BYTES)
    assert costs.compute_tokens_per_s is None
    assert costs.load_bytes_per_s is None


def test_the_planner_simulates_these_very_numbers():
    """It may not import the engine, so it has them itself."""
    pytest.importorskip("numba")
    from kvtier.plan.core import measured
    from kvtier_sglang.tier import connector, cost_model

    for name in ("WEIGHT", "LEAST_TOKENS", "LOAD_RATE_LIFE_S"):
        assert getattr(measured, name) == getattr(cost_model, name), name
    assert measured.LONGEST_WAIT_S == connector.LONGEST_WAIT_S
