"""Hints of sessions: what the simulator makes of them, and that it is unmoved by none. What holds
of every outcome, with hints too, is in test_simulator.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.plan.fleet import Cache, FleetPlan, Rates
from kvtier.plan.hints import Hints, away_s
from kvtier.plan.simulate import Outcome, run, simulate
from kvtier.traffic.described import Description, make_traffic
from kvtier.traffic.prefixes import Traffic, traffic_of
from kvtier.traffic.trace import Trace, TraceRequest

RATES = Rates(0.005, 4e-5, 1e-9, 0.01, 1e-4, 2e-8, tier_token_s=1e-5, tier_spill_token_s=1e-5)
FULL = Cache("full", slots=20_000)
QUARTER = Cache("kvtier-tier", 8_000, compresses=True, retention=0.25, tier_tokens=100_000)
SHARED_TOKENS = 300


def described(seed: int) -> Traffic:
    description = Description(
        sessions=15, sessions_per_s=3.0, turns=4, shared_tokens=SHARED_TOKENS,
        context_tokens=1500, turn_tokens=200, output_tokens=40, think_s=2.0, max_tokens=12_000,
    )  # fmt: skip
    return make_traffic(description, seed)


def turns(*sessions: tuple[float, float]) -> Traffic:
    """Sessions of two turns with a context of 8,000 tokens each: when they begin, and how long they
    think."""
    requests = []
    for number, (begin_s, think_s) in enumerate(sessions):
        for turn in range(2):
            requests.append(
                TraceRequest(
                    arrival_s=begin_s + turn * (think_s + 1),
                    input_tokens=8000 + 512 * turn,
                    output_tokens=2,
                    block_ids=tuple(100 * number + block for block in range(16 + turn)),
                    session=str(number),
                    delay_s=think_s if turn else None,
                )
            )
    return traffic_of(Trace(tuple(sorted(requests, key=lambda one: one.arrival_s))))


def hits_of_second_turns(outcome: Outcome) -> list[bool]:
    """Return of each session whether most of its second turn's prompt was cached."""
    second = outcome.traffic.next_request[np.argsort(outcome.traffic.session, kind="stable")]
    return [bool(outcome.hit_device[one] > 4000) for one in second[second >= 0]]


@given(st.integers(0, 10_000), st.sampled_from([FULL, QUARTER]), st.integers(1, 2))
@settings(max_examples=20)
def test_hints_that_say_nothing_change_nothing(seed, cache, replicas):
    traffic, plan = described(seed), FleetPlan(replicas, RATES, cache, max_running=4)
    without, nothing = simulate(traffic, plan), simulate(traffic, plan, Hints())
    assert (without.finish_s == nothing.finish_s).all()
    assert (without.hit_device == nothing.hit_device).all()
    assert without.evicted_tokens == nothing.evicted_tokens


def test_by_return_times_the_session_that_comes_back_last_makes_room():
    # Two of three fit. The oldest is the one that asks again next, all the way.
    traffic = turns((0, 10), (2, 40), (4, 100))
    plan = FleetPlan(1, RATES, FULL)
    assert hits_of_second_turns(simulate(traffic, plan)) == [False, False, False]
    assert hits_of_second_turns(simulate(traffic, plan, Hints(away_s=away_s(traffic)))) == [
        True, False, True,
    ]  # fmt: skip


def test_a_session_that_has_ended_makes_room_for_one_that_has_not():
    # The second ends before the third begins, and has been used more recently than the first.
    traffic = turns((0, 100), (1, 1), (10, 100))
    plan = FleetPlan(1, RATES, FULL)
    away = away_s(traffic)
    done = Hints(away_s=np.where(np.isinf(away), away, np.nan))
    assert hits_of_second_turns(simulate(traffic, plan))[0] is False
    assert hits_of_second_turns(simulate(traffic, plan, done))[0] is True


def test_a_session_of_higher_priority_stays_and_another_makes_room():
    traffic = turns((0, 10), (2, 40), (4, 100))
    kept = Hints(priority=np.array([1.0, 0, 0, 0]))
    assert hits_of_second_turns(simulate(traffic, FleetPlan(1, RATES, FULL), kept))[0] is True


def test_a_sessions_retention_decides_what_its_turns_hold():
    traffic = turns((0, 1))
    plan = FleetPlan(1, RATES, replace(QUARTER, slots=20_000, tier_tokens=0))
    held = [
        int(run(traffic, plan, Hints(retention=np.array([share, 0.25])))[0].replicas.used[0])
        for share in (0.1, 0.25)
    ]
    assert held[0] / held[1] == pytest.approx(0.4, rel=0.05)
