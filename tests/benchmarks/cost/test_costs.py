"""The questions of the benchmarks of branches and edits, and how they judge."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.cost import branches, edits
from benchmarks.cost.edits import TURNS, new_tokens
from benchmarks.cost.traffic import ANSWER_TOKENS, Cost, Traffic, plain

ANSWERS = [[500 + number] * ANSWER_TOKENS for number in range(TURNS)]


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_every_branch_leaves_the_prompt_before_it_where_it_says():
    users, elided, sessions = branches.all_traffic(seed=0)
    for before, after in pairwise(plain(prompt, ANSWERS) for prompt in elided.prompts):
        # Random tokens may agree for a while.
        assert 0 <= common(before, after) - (len(before) - 600) <= 2
        assert len(after) == len(before) + 10 + ANSWER_TOKENS + 150
    for traffic, shared, own in ((users, 4000, 700), (sessions, 15_000, 200)):
        first, *others = (plain(prompt) for prompt in traffic.prompts)
        assert {len(one) for one in others} == {shared + own}
        assert all(0 <= common(first, one) - shared <= 2 for one in others)


def test_every_habit_edits_what_it_says_in_16_turns_of_some_16k_tokens():
    habits = edits.all_traffic(seed=0)
    for traffic in habits:
        assert len(traffic.prompts) == TURNS
        assert 14_000 < max(len(plain(prompt, ANSWERS)) for prompt in traffic.prompts) < 19_000
    prompts = {traffic.name: traffic.prompts for traffic in habits}
    for first, second in pairwise(plain(prompt, ANSWERS) for prompt in prompts["clock"]):
        assert first[:40] == second[:40]
        assert first[40:49] != second[40:49]
        assert second[49 : len(first)] == first[49:]
    for before, after in pairwise(prompts["oldest"][4:]):
        assert after[1:-2] == before[3:]
    summary = prompts["summary"]
    assert summary[8][2:] == (*summary[7], 7, summary[8][-1])[9:]
    assert all(one[:2] == summary[8][:2] for one in summary[8:])


def test_what_is_new_is_counted_once():
    a, b, c = (1, 2, 3), (4, 5), (6,)
    traffic = Traffic(name="", prompts=((a, b), (a, c, b, 0), (a, b, 0, 1)))
    assert new_tokens(traffic) == 5 + 1 + 1 + 1


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        ([(2048, 33), (115, 0), (0, 33)], [True] * 4),
        ([(2049, 34), (116, 0), (0, 34)], [False] * 4),
    ],
)
def test_bars_of_branches(ours, met):
    full = [Cost(name="", computed=100, kv_bytes=100) for _ in ours]
    (users, users_kv), (elided, _), (_, sessions_kv) = ours
    found = [
        Cost(name="", computed=100 + users, kv_bytes=users_kv),
        Cost(name="", computed=elided, kv_bytes=0),
        Cost(name="", computed=0, kv_bytes=sessions_kv),
    ]
    costs = list(zip(full, found, strict=True))
    bars = branches.judged(costs, users=8)
    assert [bar.met for bar in bars] == met


def test_bars_of_edits():
    costs = [Cost(name="x", computed=computed, kv_bytes=0) for computed in (120, 121)]
    assert [bar.met for bar in edits.judged(costs, [100, 100], 1.0)] == [True, True, False]
    assert [bar.met for bar in edits.judged(costs[:1], [100], 1.1)] == [False, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_looking_in_vain_takes_time():
    """It imports SGLang, which imports what is deprecated."""
    assert edits.looking_ms(seed=0) > 0
