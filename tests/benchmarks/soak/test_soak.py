"""The soak's bars, each of which can be missed, and its 5-minute form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from benchmarks.soak.clients import KEPT_WHOLE, MOVED
from benchmarks.soak.faults import DISK_FULL
from benchmarks.soak.models import EVERYTHING, FIRST, LOCALITY, SECOND
from benchmarks.soak.report import FAULTS, KINDS, make_bars

ROOT = Path(__file__).resolve().parents[3]
TIER = {"used_bytes": 1, "capacity_bytes": 2, "blobs": 1, "evictions": 0, "quarantined": 0}
EACH = "compared, of each kind"
CLOSED = "breaker closed by itself, within 15 s"
USED = "tier used again after its last fault"
RESTORED = "requests restored from the tier"


def life(**changes) -> dict:
    return {"engine": "A", "rule": LOCALITY, "restored_requests": 1, "integrity": []} | changes


def used_again(**changes) -> dict:
    return {name: {"put": 3, "restored_requests": 1} | changes for name in "AB"}


def outcome(**changes) -> dict:
    kind = {"compared": 5, "restored": 1, "tokens": 50, "ties": 0, "wrong_tokens": 0,
            "wrong_logprobs": 0, "largest_off": 1e-5}  # fmt: skip
    right = {
        "load_s": 60.0,
        "requests": {"asked": 10, "finished": 10, "failed": 0, "given_up": 1},
        "answers": dict.fromkeys(KINDS, 5),
        "compared": {name: dict(kind) for name in KINDS},
        "compared_by_weights": {FIRST: 3, SECOND: 2},
        "compressed_shown": kind,
        "faults": dict.fromkeys(FAULTS, 1),
        "breaker_closed_s": {"bit flips": [0.5, 2.0], "slow": []},
        "tier_used_again": used_again(),
        "problems": [],
        "tier": TIER,
        "memory": {name: {"growth": 0.01} for name in ("engine-a", "engine-b", "tier")},
        "engines": [life(), life(engine="B")],
    }
    return right | changes


def compared(**changes) -> dict:
    found = outcome()["compared"]
    found["short"] |= changes
    return found


@pytest.mark.parametrize(
    ("changes", "unmet"),
    [
        ({}, []),
        ({"compared": compared(wrong_tokens=1)}, ["answers with a wrong token"]),
        ({"compared": compared(wrong_logprobs=1)}, ["answers with a wrong log-probability"]),
        ({"compared": compared(compared=0)}, [EACH]),
        ({"compared": {kind: one for kind, one in compared().items() if kind != MOVED}}, [EACH]),
        ({"requests": {"finished": 9, "failed": 1}}, ["failed requests"]),
        ({"requests": {"finished": 0, "failed": 0}}, ["failed requests"]),
        ({"compared_by_weights": {FIRST: 5}}, ["under both weights"]),
        ({"faults": dict.fromkeys(FAULTS[1:], 1)}, ["faults, of each kind"]),
        ({"faults": outcome()["faults"] | {"bit flips": 0}}, ["faults, of each kind"]),
        ({"faults": {one: 1 for one in FAULTS if one != DISK_FULL}}, []),
        ({"breaker_closed_s": {"bit flips": [0.5, 15.1]}}, [CLOSED]),
        ({"breaker_closed_s": {}}, [CLOSED]),
        ({"tier_used_again": used_again(put=0)}, [USED]),
        ({"tier_used_again": used_again(restored_requests=0)}, [USED]),
        ({"engines": [life(), life(engine="B", restored_requests=0)]}, [RESTORED]),
        ({"engines": [life()]}, [RESTORED]),
        ({"engines": [life(), life(engine="B", integrity=["a slot has no owner"])]}, ["accounts"]),
        ({"problems": ["a slot has no owner"]}, ["accounts"]),
        ({"tier": TIER | {"used_bytes": 3}}, ["accounts"]),
        ({"memory": {"engine-a": {"growth": 0.0}}}, ["memory's growth"]),
        (
            {"memory": outcome()["memory"] | {"tier": {"growth": 0.2}}},
            ["memory's growth"],
        ),
    ],
)  # fmt: skip
def test_every_bar_can_be_missed(changes, unmet) -> None:
    bars = make_bars(outcome(**changes), most_growth=0.1)
    assert [bar.name for bar in bars if not bar.met] == unmet


def test_rules_that_share_no_kv_need_not_have_shared_any() -> None:
    found = {kind: one for kind, one in compared().items() if kind != MOVED}
    lives = [life(rule=EVERYTHING), life(engine="B", rule="quality target")]
    bars = make_bars(outcome(compared=found, engines=lives), most_growth=0.1)
    assert all(bar.met for bar in bars)


# The bars that no machine is too slow for.
NEVER = ("answers with a wrong token", "answers with a wrong log", "failed", "accounts", "memory")


@pytest.mark.engine
@pytest.mark.slow
def test_a_few_minutes_serve_nothing_wrong_and_fail_no_request(tmp_path: Path) -> None:
    """Two minutes of load; memory, which fills up for longer, must not double. A busy machine comes
    to less in them, so what a whole soak has to come to, and how soon, is not asked."""
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak"]
    flags = ["--minutes", "2", "--most-growth", "1.0", "--out", str(out)]
    # It measures the processes that it starts: none is a fork's.
    environment = {k: v for k, v in os.environ.items() if k != "TESTS_FORK_SERVERS"}
    done = subprocess.run(
        [*command, *flags], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    assert out.exists(), told
    document = json.loads(out.read_text())
    never = [bar for bar in document["bars"] if bar["bar"].startswith(NEVER)]
    assert len(never) == len(NEVER)
    assert [bar for bar in never if not bar["met"]] == [], told
    assert document["outcome"]["requests"]["finished"] > 0
    assert document["outcome"]["compared"][KEPT_WHOLE]["tokens"] > 0
