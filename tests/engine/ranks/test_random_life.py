"""Random operations on two ranks, over a tier that dies and comes back and fails one of them more
often: nothing hangs, nothing leaks, and SGLang's checker sees the ranks decide alike.

TESTS_THOROUGH=1 goes on for some ten minutes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from compressing import uneven_profile
from engine_process import run_script
from thorough import THOROUGH
from tierd.live_tier import LiveTier, live_tier
from tiered_engine import ENGINE, RULE
from waiting import wait_for

from benchmarks.common.engines import ranks_on_a_cpu

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"
# The number of times that the tier is killed, and that it is paused.
TIMES = 60 if THOROUGH else 2


@contextmanager
def dying(tier: LiveTier, enough: Path) -> Iterator[list[str]]:
    """Kills it, stops it for a while, and starts it again; yields what it did. enough: a file that
    it makes when it has done that as often as it should."""
    ended, rng, done = threading.Event(), random.Random(0), list[str]()

    def disturb() -> None:
        begun = enough.with_suffix(".begun")
        wait_for(lambda: begun.exists() or ended.is_set())
        for what in ("killed", "paused") * TIMES:
            if ended.wait(rng.uniform(2, 6)):
                return
            if what == "killed":
                tier.kill()
                ended.wait(rng.uniform(0, 3))
                tier.start()
            else:
                tier.pause()
                ended.wait(rng.uniform(0.2, 3))
                tier.resume()
            done.append(what)
        enough.touch()

    thread = threading.Thread(target=disturb, name="disturber")
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


def test_two_ranks_live_on_whatever_their_tier_does(tmp_path: Path):
    uneven_profile().save(tmp_path / "profile.json")
    flags = {"tp_size": 2, "max_total_tokens": 3000, "chunked_prefill_size": 256}
    plan = {
        "engine": {**ENGINE, **flags},
        "operations": 100_000,
        "until": str(tmp_path / "enough"),
        "seed": 11,
        "fault": "unsteady",
    }
    env = {
        **RULE,
        **ranks_on_a_cpu(2),
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_RETENTION": "0.4",
        "KVTIER_REFRESH": "turn",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    with (
        live_tier(tmp_path, "--memory", "64m") as tier,
        dying(tier, tmp_path / "enough") as disturbed,
    ):
        out = run_script(FUZZER, tmp_path, plan, env | {"KVTIER_TIER": tier.address})
    print(out["counts"], out["finished"], out["state"]["tier"], len(disturbed))
    assert disturbed == ["killed", "paused"] * TIMES
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["state"]["tier"]["restored_requests"] > 0
    assert out["after_flush"]["slots_used"] == 0
