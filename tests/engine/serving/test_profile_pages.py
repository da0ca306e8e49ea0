"""A head profile whose heads share one pool, in the real engine: it says what the same profile says
in two slot spaces, whatever else is asked for.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from compressing import POLICIES, RULE_ENV
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE, run_never_missing

from benchmarks.common.recall_engine import ranks_on_a_cpu

pytestmark = pytest.mark.engine

Rounds = list[list[dict[str, Any]]]

PROFILE = {"KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json")}
ONE_POOL = {"KVTIER_HEAD_BUDGETS": "profile"}


class Asking:
    """Requests of random tokens."""

    def __init__(self) -> None:
        self._rng = random.Random(21)

    def __call__(self, count: int, continues: list[int] | None = None) -> dict[str, Any]:
        ids = [self._rng.randrange(6, 384) for _ in range(count)]
        request: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 9}
        return request if continues is None else request | {"continues": continues}


def turns_at_once() -> Rounds:
    """Four sessions, later turns that are packed and others that are too short, and a fork."""
    ask = Asking()
    rounds = [[ask(count) for count in (1300, 700, 2100, 900)]]
    for turn in range(3):
        rounds.append([ask(n, [turn, index]) for index, n in enumerate((5, 30, 400, 17))])
    rounds[2].append(ask(50, [0, 0]))
    return rounds


def turn_by_turn() -> Rounds:
    """Two sessions, a request at a time."""
    ask, rounds = Asking(), []
    for first, *later in ((1300, 5, 400, 17), (800, 30, 100)):
        rounds.append([ask(first)])
        for count in later:
            rounds.append([ask(count, [len(rounds) - 1, 0])])
    return rounds


def said(out: dict[str, Any]) -> list[list[list[int]]]:
    assert out["state"]["integrity"] == []
    return [[request["output_ids"] for request in requests] for requests in out["rounds"]]


def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "two", tmp_path / "one"]
    for folder in found:
        folder.mkdir()
    return found


@pytest.mark.parametrize(
    ("settings", "flags", "ranks"),
    [
        ({}, {}, 1),
        ({"KVTIER_RETENTION": "0.5"}, {}, 1),
        ({"KVTIER_LOCALITY_COMPENSATION": "false"}, {}, 1),
        ({"KVTIER_RETENTION": "0.3"}, {"kv_cache_dtype": "fp8_e4m3"}, 1),
        ({"KVTIER_RETENTION": "0.5"}, {}, 2),
    ],
    ids=["profile", "half", "no compensation", "fp8", "two ranks"],
)
def test_one_pool_says_what_two_slot_spaces_say(tmp_path, settings, flags, ranks):
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        "tp_size": ranks,
        **POLICIES["kvtier"],
        **flags,
    }
    env = {**RULE_ENV, **PROFILE, **settings, **ranks_on_a_cpu(ranks)}
    two, one = (
        run_engine(folder, engine, turns_at_once(), env | more)
        for folder, more in zip(folders(tmp_path), ({}, ONE_POOL), strict=True)
    )
    assert said(one) == said(two)
    # Of all heads, where in two slot spaces none of them or only some go.
    assert one["state"]["compacted_tokens"] > two["state"]["compacted_tokens"] + 1000


@pytest.mark.parametrize(
    "settings",
    [{"KVTIER_REFRESH": "4"}, {"KVTIER_REFRESH": "4", "KVTIER_MERGE": "beta"},
     {"KVTIER_REFRESH": "turn", "KVTIER_REFRESH_MOVED": "0.05"}],
    ids=["every four tokens", "merged", "moved"],
)  # fmt: skip
def test_one_pool_is_refreshed_while_a_turn_is_generated(tmp_path, settings):
    """Asked again until what is chosen in the background has come before the end of an answer."""
    longer = [[{**one, "max_new_tokens": 80} for one in asked] for asked in turn_by_turn()[:2]]
    longer += [{"until": "refreshed_again", "request": longer[1][0]}]
    env = {**RULE, **settings, **ONE_POOL, "KVTIER_RETENTION": "0.4"}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        out = run_engine(tmp_path, ENGINE, longer, env | {"KVTIER_TIER": tier.address})
    assert out["state"]["integrity"] == []
    assert out["state"]["tier"]["refreshed_again"] > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"KVTIER_MERGE": "beta"}, {"KVTIER_REFRESH_BY": "near-data"}],
    ids=["refreshed", "merged", "near data"],
)
def test_one_pool_is_refreshed_as_two_slot_spaces_are(tmp_path, settings):
    env = {**RULE, **settings, "KVTIER_RETENTION": "0.4", "KVTIER_REFRESH": "turn"}
    outs = []
    with live_tier(tmp_path, "--memory", "512m") as tier:
        env["KVTIER_TIER"] = tier.address
        for folder, more in zip(folders(tmp_path), ({}, ONE_POOL), strict=True):
            outs.append(run_never_missing(folder, turn_by_turn(), env | more, ENGINE))
        two, one = outs
        assert said(one) == said(two)
        assert one["state"]["tier"]["refreshed_turns"] == 5
        assert "unrefreshed_layers" not in one["state"]["tier"]
        # The last turn of a server that comes new to it.
        (last,), (request,) = one["rounds"][-2], turn_by_turn()[-1]
        ids = [*last["prompt"], *last["output_ids"], *request["input_ids"]]
        again = {"input_ids": ids, "max_new_tokens": 9}
        back = run_engine(tmp_path, ENGINE, [[again]], env | ONE_POOL)
    assert back["state"]["tier"]["restored_requests"] == 1
    assert said(back)[0] == said(one)[-1]
