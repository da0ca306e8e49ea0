"""Hit rates of all cache sizes in one pass, against a cache of each size by the book."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic.trace_models import lru_hit_rate, make_trace

from kvtier.traffic.lru import NEVER, hit_rates, stack_distances


@given(st.integers(0, 10_000), st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_hit_rates_are_those_of_a_cache_of_that_size(seed, sizes):
    trace = make_trace(seed)
    tokens = [size * trace.block_tokens for size in sizes]
    wanted = [lru_hit_rate(trace, size) for size in sizes]
    assert hit_rates(trace, tokens) == pytest.approx(wanted, abs=1e-12)


@given(st.integers(0, 10_000))
def test_more_budget_never_lowers_the_hit_rate(seed):
    trace = make_trace(seed)
    rates = hit_rates(trace, [0, *(512 * 2**i for i in range(10)), math.inf])
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(lru_hit_rate(trace, math.inf))


def test_a_distance_counts_what_was_used_since_and_itself():
    first, second, third = stack_distances([[1, 2], [3], [2, 1]])
    assert first.tolist() == [NEVER, NEVER]
    assert second.tolist() == [NEVER]
    assert third.tolist() == [2, 3]
