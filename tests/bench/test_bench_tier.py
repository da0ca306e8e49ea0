"""The bench with a tier: what it starts, what it waits for, what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from waiting import SAFETY_S

from kvtier.bench import measure
from kvtier.bench.engine import _tier_reading
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import Occupancy, RunResult, TierReading
from kvtier.bench.table import tier_lines
from kvtier.errors import StartupError
from kvtier.tier.client import TierClient


def test_a_local_tier_answers_while_the_run_lasts_and_is_gone_after_it(tmp_path: Path):
    before = children()
    with local_tier({TIER_VARIABLE: LOCAL_TIER}, tmp_path / "log") as replaced:
        address = replaced[TIER_VARIABLE]
        with TierClient(address, timeout_s=SAFETY_S) as client:
            assert client.connect().store == "memory"
            path = Path(address.removeprefix("unix:"))
            assert path.is_socket(), "no port, which every user of the machine could open"
    assert not path.parent.exists()
    assert children() <= before
    with local_tier({TIER_VARIABLE: "tier:7311"}, tmp_path / "log") as replaced:
        assert replaced == {}, "a tier of the user's own is used as it is"


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_a_local_tier_that_does_not_start_says_why(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("kvtier.bench.runner.sys.executable", "/bin/false")
    with (
        pytest.raises(StartupError, match="did not start"),
        local_tier({TIER_VARIABLE: LOCAL_TIER}, tmp_path / "log"),
    ):
        pass


class SlowTier:
    """An engine whose KV takes a few looks to reach the tier."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.asked = 0

    def occupancy(self) -> Occupancy:
        self.asked += 1
        pending = max(0, self.looks - self.asked)
        peak = 100 if self.asked == 1 else 1
        tier = TierReading(pending=pending, stored_bytes=self.asked)
        return Occupancy(kv_used_bytes=1, kv_peak_bytes=peak, kv_capacity_bytes=9, tier=tier)


def test_a_turn_is_over_when_its_kv_has_reached_the_tier_or_never_will(monkeypatch):
    engine = SlowTier(looks=5)
    after = measure.settled(engine)
    assert engine.asked == 5
    assert after.tier is not None
    assert after.tier.pending == 0
    # Reading the peak starts a new one, so the first reading's counts.
    assert after.kv_peak_bytes == 100
    monkeypatch.setattr(measure, "TIER_PATIENCE_S", 0.05)
    assert measure.settled(SlowTier(looks=10**9)).tier.pending > 0


def test_a_run_says_what_the_tier_did():
    assert _tier_reading(None) is None
    assert tier_lines(RunResult.model_construct(tier=None)) == []
    # The engine's report lacks what has not happened yet.
    assert _tier_reading({"pending": 2}) == TierReading(pending=2)
    told = _tier_reading(
        {
            "pending": 0,
            "put_bytes": 3 << 20,
            "refreshed_turns": 4,
            "refresh_s": 0.02,
            "refresh_wait_s": 0.1,
            "refresh_missed": 1,
        }
    )
    (line,) = tier_lines(RunResult.model_construct(tier=told))
    assert "3.0 MiB of exact KV stored" in line
    assert "4 requests refreshed, each in 5.0 ms after waiting 25.0 ms" in line
    assert "1 refreshes missed" in line
