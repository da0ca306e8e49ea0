"""Load or recompute: decided by what both really took."""

from __future__ import annotations

import pytest

from kvtier_sglang.rates import LEAST_CHUNK_TOKENS, LOAD_RATE_LIFE_S, Rates

TOKEN_BYTES = 1000


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_loading_is_tried_until_both_rates_are_known():
    rates = Rates()
    assert rates.loading_pays(TOKEN_BYTES)
    rates.computed(1.0, 2000)
    assert rates.loading_pays(TOKEN_BYTES)
    assert rates.compute_s(4000) == pytest.approx(2.0)
    assert Rates().compute_s(1) == float("inf")


@pytest.mark.parametrize(("loaded_tokens", "pays"), [(4000, True), (1000, False)])
def test_the_faster_one_is_chosen(loaded_tokens, pays):
    rates = Rates()
    rates.computed(1.0, 2000)
    rates.loaded(1.0, loaded_tokens * TOKEN_BYTES)
    assert rates.loading_pays(TOKEN_BYTES) is pays


def test_a_tier_that_was_slow_once_is_asked_again():
    clock = Clock()
    rates = Rates(clock)
    rates.computed(1.0, 2000)
    rates.loaded(10.0, TOKEN_BYTES)
    assert not rates.loading_pays(TOKEN_BYTES)
    clock.now += LOAD_RATE_LIFE_S + 1
    assert rates.loading_pays(TOKEN_BYTES)


def test_one_good_load_later_it_is_used_again():
    """What it was like when it was slow does not drag the average down."""
    clock = Clock()
    rates = Rates(clock)
    rates.computed(1.0, 2000)
    rates.loaded(10.0, TOKEN_BYTES)
    clock.now += LOAD_RATE_LIFE_S + 1
    rates.loaded(1.0, 4000 * TOKEN_BYTES)
    assert rates.loading_pays(TOKEN_BYTES)
    rates.loaded(1.0, 2000 * TOKEN_BYTES)
    assert rates.load_bytes_per_s == pytest.approx(3600 * TOKEN_BYTES)


def test_small_passes_and_empty_loads_say_nothing():
    rates = Rates()
    rates.computed(1.0, LEAST_CHUNK_TOKENS - 1)
    rates.computed(0.0, 2000)
    rates.loaded(1.0, 0)
    assert rates.compute_tokens_per_s is None
    assert rates.load_bytes_per_s is None
