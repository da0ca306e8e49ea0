"""Sessions that another replica goes on with. Other servers: serving/test_tier.py."""

from __future__ import annotations

import random

import pytest
from serving import serve
from sessions import one_by_one, tokens
from tierd.live_tier import live_tier
from tiered_engine import RULE

from benchmarks.common.engines import ranks_on_a_cpu

pytestmark = pytest.mark.engine

TURNS, SESSIONS = 3, 3
ENV = {**RULE, "KVTIER_RETENTION": "0.5"}


def test_two_replicas_that_take_turns_say_what_one_server_says(tmp_path):
    """Every turn of three sessions meets that of two replicas that did not have the one before:
    what it lacks comes from the tier, compressed as it was.
    """
    rng = random.Random(8)
    lengths = [(700, 1200), *[(20, 90)] * (TURNS - 1)]
    sessions = [[tokens(rng, rng.randrange(*of)) for of in lengths] for _ in range(SESSIONS)]
    rounds = one_by_one(sessions, 8)
    alone = serve(tmp_path, 1, rounds, ENV)
    replicas = {"dp_size": 2, "load_balance_method": "round_robin"}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env = {**ENV, "KVTIER_TIER": tier.address, **ranks_on_a_cpu(2)}
        both = serve(tmp_path, 1, rounds, env, **replicas)
    assert [state["integrity"] for state in both["states"]] == [[], []]
    restored_turns = 0
    for session in range(SESSIONS):
        for turn in range(TURNS):
            (mine,), (theirs,) = (out["rounds"][turn * SESSIONS + session] for out in (both, alone))
            missing = theirs["cached_tokens"] - mine["cached_tokens"]
            # Less than a span of 64 tokens is not asked for.
            assert 0 <= missing < 64, [state["tier"] for state in both["states"]]
            if missing:
                break
            assert mine["output_ids"] == theirs["output_ids"]
            restored_turns += (mine["cached_tokens_details"] or {}).get("storage", 0) > 0
    assert restored_turns
