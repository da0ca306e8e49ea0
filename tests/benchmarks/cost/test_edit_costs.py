"""The questions of the benchmark of edits, and how it judges."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.cost import edits
from benchmarks.cost.edits import TURNS, all_traffic, new_tokens
from benchmarks.cost.traffic import ANSWER_TOKENS, Cost, Traffic, plain

ANSWERS = [[500 + number] * ANSWER_TOKENS for number in range(TURNS)]


def by_name() -> dict[str, Traffic]:
    return {traffic.name: traffic for traffic in all_traffic(seed=0, scale=1.0)}


def test_all_habits_come_to_some_16k_tokens_in_16_turns():
    for traffic in all_traffic(seed=0, scale=1.0):
        assert len(traffic.prompts) == TURNS
        assert 14_000 < max(len(plain(prompt, ANSWERS)) for prompt in traffic.prompts) < 19_000


def test_a_clock_is_all_that_changes_near_the_front():
    for before, after in pairwise(by_name()["clock"].prompts):
        first, second = plain(before, ANSWERS), plain(after, ANSWERS)
        assert first[:40] == second[:40]
        assert first[40:49] != second[40:49]
        assert second[49 : len(first)] == first[49:]


def test_the_oldest_exchange_goes_when_a_new_one_comes():
    prompts = by_name()["oldest"].prompts
    assert [len(prompt) for prompt in prompts] == [2, 4, 6, 8, 10, *[10] * 11]
    for before, after in pairwise(prompts[4:]):
        assert after[1:-2] == before[3:]


def test_a_summary_takes_the_place_of_the_first_exchanges_once():
    prompts = by_name()["summary"].prompts
    assert prompts[8][2:] == (*prompts[7], 7, prompts[8][-1])[9:]
    assert all(one[:2] == prompts[8][:2] for one in prompts[8:])


def test_what_is_new_is_counted_once():
    a, b, c = (1, 2, 3), (4, 5), (6,)
    traffic = Traffic(name="", prompts=((a, b), (a, c, b, 0), (a, b, 0, 1)))
    assert new_tokens(traffic) == 5 + 1 + 1 + 1


def test_bars():
    costs = [Cost(name="x", computed=computed, kv_bytes=0) for computed in (120, 121)]
    assert [bar.met for bar in edits.judged(costs, [100, 100], 1.0)] == [True, True, False]
    assert [bar.met for bar in edits.judged(costs[:1], [100], 1.1)] == [False, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_looking_in_vain_takes_time():
    """It imports SGLang, which imports what is deprecated."""
    assert edits.looking_ms(seed=0) > 0
