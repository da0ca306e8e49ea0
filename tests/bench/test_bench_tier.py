"""The bench with a tier: what it starts, what it waits for, what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from waiting import SAFETY_S

from kvtier.bench import measure
from kvtier.bench.engine import _tier_reading
from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.runner import LOCAL_TIER, TIER_VARIABLE, local_tier
from kvtier.bench.schema import Occupancy, RunResult, TierReading
from kvtier.bench.table import tier_lines
from kvtier.errors import StartupError, UsageError
from kvtier.tier.client import TierClient

TIERED = ["--tier", "localhost:7311", "--retention", "0.25", "--refresh", "turn"]


def environments(*flags: str) -> dict[str, dict[str, str]]:
    argv = ["--policies", "full,kvtier,random", "--len", "4k", *flags]
    _, plans = make_plans(parse_options(argv))
    return {planned.plan.policy: planned.plan.environment for planned in plans}


def test_a_refresh_every_so_many_tokens_by_the_tier_reaches_the_engine():
    flags = [*TIERED[:-1], "32", "--refresh-by", "near-data", "--merge", "keepkv"]
    found = environments(*flags)["kvtier"]
    assert found["KVTIER_REFRESH"] == "32"
    assert found["KVTIER_REFRESH_BY"] == "near-data"
    assert found["KVTIER_MERGE"] == "keepkv"


def test_only_the_policy_that_compacts_has_the_tier():
    found = environments(*TIERED, "--merge", "keepkv")
    assert found["kvtier"][TIER_VARIABLE] == "localhost:7311"
    assert found["kvtier"]["KVTIER_REFRESH"] == "turn"
    assert found["kvtier"]["KVTIER_MERGE"] == "keepkv"
    for other in ("full", "random"):
        assert TIER_VARIABLE not in found[other]
        assert found[other]["KVTIER_REFRESH"] == "off"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--refresh", "never"], "--refresh"),
        (["--refresh", "0"], "--refresh"),
        (["--refresh-by", "hand"], "--refresh-by"),
        (["--merge", "some"], "--merge"),
        (["--refresh", "turn", "--retention", "0.5"], "--refresh: expected a tier"),
        (["--refresh", "turn", "--tier", "local"], "--refresh: expected a tier, and a share"),
        (
            ["--merge", "keepkv", "--retention", "0.5", "--tier", "local"],
            "--merge: expected a refresh",
        ),
    ],
)
def test_a_tier_that_could_not_work_is_refused_by_name(flags, named):
    with pytest.raises(UsageError, match=named):
        parse_options(flags)


def test_a_local_tier_answers_while_the_run_lasts_and_is_gone_after_it(tmp_path: Path):
    with local_tier({TIER_VARIABLE: LOCAL_TIER}, tmp_path / "log") as replaced:
        address = replaced[TIER_VARIABLE]
        with TierClient(address, timeout_s=SAFETY_S) as client:
            assert client.connect().store == "memory"
            path = Path(address.removeprefix("unix:"))
            assert path.is_socket(), "no port, which every user of the machine could open"
    assert not path.parent.exists()


def test_a_tier_of_the_users_own_is_used_as_it_is(tmp_path: Path):
    with local_tier({TIER_VARIABLE: "tier:7311"}, tmp_path / "log") as replaced:
        assert replaced == {}


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


def test_a_turn_is_over_when_its_kv_has_reached_the_tier():
    engine = SlowTier(looks=5)
    after = measure.settled(engine)
    assert engine.asked == 5
    assert after.tier is not None
    assert after.tier.pending == 0
    # Reading the peak starts a new one, so the first reading's counts.
    assert after.kv_peak_bytes == 100


def test_a_tier_that_never_settles_does_not_hold_up_the_bench(monkeypatch):
    monkeypatch.setattr(measure, "TIER_PATIENCE_S", 0.05)
    after = measure.settled(SlowTier(looks=10**9))
    assert after.tier is not None
    assert after.tier.pending > 0


def test_a_run_says_what_the_tier_did():
    tier = TierReading(
        stored_bytes=3 << 20, refreshed_turns=4, refresh_s=0.02, refresh_wait_s=0.1, missed=1
    )
    run = RunResult.model_construct(tier=tier)
    (line,) = tier_lines(run)
    assert "3.0 MiB of exact KV stored" in line
    assert "4 requests refreshed, each in 5.0 ms after waiting 25.0 ms" in line
    assert "1 refreshes missed" in line
    assert tier_lines(RunResult.model_construct(tier=None)) == []


def test_the_engines_report_is_read_whether_or_not_anything_happened():
    assert _tier_reading(None) is None
    assert _tier_reading({"pending": 2}) == TierReading(pending=2)
    report = json.loads('{"pending": 0, "put_bytes": 7, "refreshed_turns": 1, "spill_s": 0.5}')
    found = _tier_reading(report)
    assert found == TierReading(stored_bytes=7, refreshed_turns=1, spill_s=0.5)


def test_nothing_is_left_running(tmp_path: Path):
    before = children()
    with local_tier({TIER_VARIABLE: LOCAL_TIER}, tmp_path / "log"):
        pass
    assert children() <= before


def children() -> set[int]:
    me = os.getpid()
    tasks = Path(f"/proc/{me}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}
