"""The search for the fewest replicas, over answers that are made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.replay.schema import Percentiles
from kvtier.plan.answers import Answers
from kvtier.plan.study import fewest_replicas

NO_TIME = Percentiles(p50=0, p90=0, p99=0)


def answers(replicas: int, meets_times: bool, refused: int = 0, requests: int = 1) -> Answers:
    return Answers(
        policy="full", replicas=replicas, gpus=replicas, requests=requests, refused=refused,
        least_refused_tokens=9 if refused else None, request_room_tokens=8, hit_device=0,
        hit_tier=0, recomputed=1, ttft_s=NO_TIME, tpot_s=NO_TIME, goodput_share=1,
        meets_times=meets_times, resident_sessions=0, sessions=1, evicted_tokens=0, duration_s=1,
        output_tokens_per_s=1, cost_per_million_tokens=None,
    )  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 200), st.integers(0, 2))
def test_the_least_fleet_is_found_wherever_the_search_begins_whatever_is_refused(
    needed, most, begin, refused
):
    asked = []

    def answer(replicas: int) -> Answers:
        asked.append(replicas)
        return answers(replicas, replicas >= needed, refused)

    best, tried = fewest_replicas(answer, most, begin)
    assert (best.replicas if best else None) == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 30
    assert [one.replicas for one in tried] == sorted(asked)
    assert max(asked) <= most
