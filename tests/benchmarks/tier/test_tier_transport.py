"""The transport benchmark: ratios are paired, and a small run goes through."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc")


from benchmarks.tier.transport import __main__ as tier_transport
from benchmarks.tier.transport.paths import in_rounds
from benchmarks.tier.transport.rows import neighbour_rows

ON_LINUX = pytest.mark.skipif(
    not (sys.platform == "linux" and Path("/dev/shm").is_dir()), reason="reads /proc, /dev/shm"
)


def test_every_path_runs_in_every_round_and_the_first_round_is_dropped() -> None:
    order: list[str] = []

    def path(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_rounds({name: lambda name=name: path(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_a_neighbour_is_judged_against_having_none() -> None:
    found = {
        where: {"p99": p99} for where, p99 in (("alone", 1), ("beside", 1.1), ("elsewhere", 2))
    }
    beside, elsewhere = neighbour_rows("get", "its rate", found, claimed=True)
    assert (beside.value, beside.met) == ("1.10x", True)
    assert (elsewhere.value, elsewhere.met) == ("0.55x", None)
    beside, elsewhere = neighbour_rows("get", "no rate", found, claimed=False)
    assert (beside.value, beside.met) == ("1.10x", None)


@ON_LINUX
def test_a_quick_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    assert tier_transport.main(["--quick", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    seconds = document["outcome"]["throughput"]["768k"]["seconds"]
    assert all(taken[0] > 0 for taken in seconds.values())
    assert {"memcpy", "shared get", "stream put", "echo put", "tls get"} <= set(seconds)
    assert document["outcome"]["churn"]["put_bytes"] > 0
    assert "shared get / memcpy" in capsys.readouterr().out
