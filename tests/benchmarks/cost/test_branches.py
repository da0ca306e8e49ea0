"""The questions of the benchmark of branches, and how it judges."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.cost import branches
from benchmarks.cost.branches import all_traffic
from benchmarks.cost.traffic import ANSWER_TOKENS, Cost, plain


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_every_turn_leaves_the_one_before_where_its_tool_result_began():
    users, elided, sessions = all_traffic(seed=0, scale=1.0)
    answers = [[number] * ANSWER_TOKENS for number in range(8)]
    prompts = [plain(prompt, answers) for prompt in elided.prompts]
    for before, after in pairwise(prompts):
        # Random tokens may agree for a while.
        assert 0 <= common(before, after) - (len(before) - 600) <= 2
        assert len(after) == len(before) + 10 + ANSWER_TOKENS + 150
    for traffic, shared, own in ((users, 4000, 700), (sessions, 15_000, 200)):
        first, *others = (plain(prompt) for prompt in traffic.prompts)
        assert {len(one) for one in others} == {shared + own}
        assert all(0 <= common(first, one) - shared <= 2 for one in others)


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        ([(2048, 33), (115, 0), (0, 33)], [True] * 4),
        ([(2049, 34), (116, 0), (0, 34)], [False] * 4),
    ],
)
def test_bars(ours, met):
    full = [Cost(name="", computed=100, kv_bytes=100) for _ in ours]
    (users, users_kv), (elided, _), (_, sessions_kv) = ours
    found = [
        Cost(name="", computed=100 + users, kv_bytes=users_kv),
        Cost(name="", computed=elided, kv_bytes=0),
        Cost(name="", computed=0, kv_bytes=sessions_kv),
    ]
    costs = list(zip(full, found, strict=True))
    bars = branches.judged(costs, all_traffic(seed=0, scale=0.1))
    assert [bar.met for bar in bars] == met
