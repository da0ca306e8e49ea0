"""The search for the fewest replicas, over answers that are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.plan.answers import Answers, Percentiles
from kvtier.plan.search import fewest_replicas

NO_TIME = Percentiles(p50=0, p90=0, p99=0)


def answers(replicas: int, meets_slo: bool) -> Answers:
    return Answers(
        policy="full", replicas=replicas, gpus=replicas, requests=1, refused=0, hit_device=0,
        hit_tier=0, recomputed=1, ttft_s=NO_TIME, tpot_s=NO_TIME, goodput_share=1,
        meets_slo=meets_slo, resident_sessions=0, sessions=1, evicted_tokens=0, duration_s=1,
        output_tokens_per_s=1, cost_per_million_tokens=None,
    )  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 200))
def test_the_least_fleet_is_found_wherever_the_search_begins(needed, most, begin):
    asked = []

    def answer(replicas: int) -> Answers:
        asked.append(replicas)
        return answers(replicas, replicas >= needed)

    best, tried = fewest_replicas(answer, most, begin)
    assert (best.replicas if best else None) == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 30
    assert [one.replicas for one in tried] == sorted(asked)
    assert max(asked) <= most


def test_a_search_of_nothing_is_refused():
    with pytest.raises(UsageError, match="--max-replicas"):
        fewest_replicas(lambda replicas: answers(replicas, True), 0)
