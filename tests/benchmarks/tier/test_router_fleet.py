"""Real servers behind the real router, of which one is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tier import router
from benchmarks.tier.fleet import Turn

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# There are so many sessions that a server without any is unlikely; and no server computes what its
# tier has.
FLAGS = ["--len", "1k", "--sessions", "10", "--patience-s", "600"]


def verdicts(out: Path) -> dict[str, bool]:
    """Return whether each bar of a benchmark is met, but for those on time. No request failed, or
    why it did is in the report of the test."""
    record = json.loads(out.read_text())
    assert record["failures"] == []
    found = {bar["bar"]: bar["met"] for bar in record["bars"]}
    return {bar: met for bar, met in found.items() if bar != "restored below computed"}


def test_a_server_is_killed_and_no_request_fails_and_no_context_is_computed_again(tmp_path):
    """Sessions of the other server stay; all answers are those of an undisturbed server."""
    router.main([*FLAGS, "--turns", "2", "--out", str(tmp_path / "out.json")])
    found = verdicts(tmp_path / "out.json")
    assert found == dict.fromkeys(found, True)
    assert len(found) == 5


@pytest.mark.parametrize(("cached", "again"), [(999, 0), (1000, 0), (744, 0), (743, 256), (0, 999)])
def test_what_was_computed_again_is_what_was_neither_on_the_device_nor_in_the_tier(cached, again):
    """The last token of an answer, whose KV is of the next turn, is left out, and less than a
    span."""
    turn = Turn("s", (1,), (2,), 1000, cached, from_tier=0, ttft_ms=1.0)
    assert turn.computed_again == again
