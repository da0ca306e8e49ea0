"""The planner's benchmarks: how they judge, and what they leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.planning import fleet_study, validation

ROW = {
    "policy": "full",
    "hit rate": [0.200, 0.209],
    "resident": [100, 94],
    "output tokens/s": [50.0, 45.5],
    "TTFT p50, ms": [80.0, 99.0],
    "TPOT p50, ms": [10.0, 30.0],
}


def test_a_bar_is_met_within_its_limit_alone_and_says_it():
    def met(**changes) -> list[bool]:
        return [bar.met for bar in validation.bars(ROW | changes)]

    assert met() == [True, False, True, True]
    assert met(**{"output tokens/s": [50.0, 44.5]}) == [True, False, False, True]
    assert met(**{"TTFT p50, ms": [80.0, 101.0]}) == [True, False, True, False]
    hit = validation.bars(ROW)[0]
    assert (hit.value, hit.wanted) == ("+4.5%", "within 5% of the engine's")
    # A difference from nothing is endless, and none is none.
    assert met(**{"hit rate": [0, 1], "resident": [0, 0]}) == [False, True, True, True]


def test_windows_are_scaled_for_the_run_and_restored_after_it():
    before = dict(os.environ)
    with validation.scaled_windows(16):
        assert os.environ["KVTIER_LOCALITY_RECENT_TOKENS"] == "16"
        assert os.environ["KVTIER_LOCALITY_SINK_TOKENS"] == "4"
    assert dict(os.environ) == before


def test_agents_sessions_are_studied_in_every_arm(tmp_path: Path):
    asked = [
        {"t": 9.0 * n, "in": 64 * n, "out": 9, "think_time": 5.0, "hash_ids": [*range(n)]}
        for n in range(20, 26)
    ]
    trace, out, picture = (tmp_path / name for name in ("agents.jsonl", "out.json", "out.png"))
    trace.write_text(json.dumps({"id": "one", "block_size": 64, "requests": asked}))
    given = ["--trace", trace, "--agents", "--out", out, "--picture", picture]
    assert fleet_study.main([str(one) for one in given]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == list(fleet_study.ARMS)
    for row in rows.values():
        # One GPU is enough for one session, which finds again what its last turn had.
        assert row["best"]["gpus"] == row["one"]["gpus"] == 1
        assert row["one"]["refused"] == 0
        assert row["one"]["hit_device"] > 0.7
    assert picture.stat().st_size > 0
