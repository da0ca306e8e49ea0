"""The answers of sessions behind a memory's prefix, in a real tier: restored and refreshed as any
other KV, and never taken for what was computed behind the exact prefix.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_process import run_engine
from memory_samples import Stored
from sessions import tokens
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE, continued, run_never_missing

pytestmark = pytest.mark.engine

TURNS = 3
# Each session has a memory, or None: the first one's prefix, exactly, with the same turns behind
# it.
SESSIONS = (0, None, 1, 1)


@pytest.fixture
def tier(tmp_path):
    with live_tier(tmp_path, "--memory", "512m") as live:
        yield live


@pytest.fixture
def rule(env) -> dict[str, str]:
    return {**env, **RULE}


def session_rounds(stored: list[Stored]) -> list[list[dict[str, Any]]]:
    """Turns of sessions, one request at a time. Neither prefix ends where a span does, and the last
    session's first turn ends within the span in which its prefix does."""
    rng = random.Random(21)
    first = [tokens(rng, 700), None, tokens(rng, 900), tokens(rng, 9)]
    # Long enough that a request rather waits for the tier than computes.
    later = [[tokens(rng, rng.randrange(300, 500)) for _ in SESSIONS] for _ in range(TURNS - 1)]
    rounds = []
    for turn in range(TURNS):
        for session, which in enumerate(SESSIONS):
            # The exact session says what the one before it says.
            at = session if which is not None else session - 1
            own = first[at] if turn == 0 else later[turn - 1][at]
            request: dict[str, Any] = {"input_ids": own, "max_new_tokens": 12}
            if turn:
                request["continues"] = [(turn - 1) * len(SESSIONS) + session, 0]
            else:
                request["input_ids"] = [*stored[which or 0].prefix, *own]
            if which is None:
                request["custom_params"] = {"kvtier_memory": False}
            rounds.append([request])
    return rounds


def test_a_session_behind_a_memory_comes_back_to_a_restarted_server(tmp_path, tier, stored, rule):
    rule["KVTIER_RETENTION"] = "0.5"
    rounds, count = session_rounds(stored), len(SESSIONS)
    stayed = run_engine(tmp_path, ENGINE, rounds, rule)
    rule |= {"KVTIER_TIER": tier.address}
    before = run_engine(tmp_path, ENGINE, rounds[:-count], rule)
    back = run_engine(tmp_path, ENGINE, continued(rounds, before["rounds"], count), rule)
    for (a,), (b,) in zip(back["rounds"], stayed["rounds"][-count:], strict=True):
        assert a["prompt"] == b["prompt"]
        # Everything but the new turn came from the tier, as it would have from the device.
        assert a["cached_tokens"] == b["cached_tokens"]
        assert a["output_ids"] == b["output_ids"]
    assert back["state"]["tier"]["restored_requests"] == count
    assert back["state"]["integrity"] == []
    # The test could tell one prefix's KV from the other's.
    assert stayed["rounds"][-count][0]["output_ids"] != stayed["rounds"][1 - count][0]["output_ids"]


def test_a_turn_behind_a_memory_is_refreshed(tmp_path, tier, stored, rule):
    rule |= {
        "KVTIER_TIER": tier.address, "KVTIER_RETENTION": "0.25", "KVTIER_REFRESH": "turn",
        "KVTIER_TIER_NAMESPACE": "refreshed",
    }  # fmt: skip
    rounds = session_rounds(stored)[: 2 * len(SESSIONS)]
    found = run_never_missing(tmp_path, rounds, rule)
    assert found["state"]["integrity"] == []
    # The short session's first turn had nothing to prune.
    assert found["state"]["tier"]["refreshed_turns"] == len(SESSIONS) - 1
