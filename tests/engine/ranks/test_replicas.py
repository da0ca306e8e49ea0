"""A session that another server goes on with: data parallel replicas and separate servers over one
tier answer as one server does, and compute only what is new.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from serving import serve, tokens
from tierd.live_tier import live_tier
from tiered_engine import RULE

from benchmarks.common.engines import ranks_on_a_cpu

pytestmark = pytest.mark.engine

TURNS, SESSIONS = 3, 3
ENV = {**RULE, "KVTIER_RETENTION": "0.5"}


@pytest.fixture
def tier(tmp_path):
    with live_tier(tmp_path, "--memory", "256m") as live:
        yield live


def said(out: dict[str, Any]) -> list[list[int]]:
    """The answers of rounds of one request."""
    assert [state["integrity"] for state in out["states"]] == [[]] * len(out["states"])
    return [one["output_ids"] for (one,) in out["rounds"]]


def session_rounds() -> list[list[dict[str, Any]]]:
    """Turn by turn and session by session, one request at a time."""
    rng = random.Random(8)
    asked = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            length = rng.randrange(700, 1200) if turn == 0 else rng.randrange(20, 90)
            request: dict[str, Any] = {"input_ids": tokens(rng, length), "max_new_tokens": 8}
            if turn:
                request["continues"] = [(turn - 1) * SESSIONS + session, 0]
            asked.append([request])
    return asked


def test_two_replicas_that_take_turns_say_what_one_server_says(tmp_path, tier):
    """Every turn of three sessions meets that of two replicas that did not have the one before:
    what it lacks comes from the tier, compressed as it was.
    """
    alone = serve(tmp_path, 1, session_rounds(), ENV)
    env = {**ENV, "KVTIER_TIER": tier.address, **ranks_on_a_cpu(2)}
    replicas = {"dp_size": 2, "load_balance_method": "round_robin"}
    both = serve(tmp_path, 1, session_rounds(), env, **replicas)
    assert len(both["states"]) == 2
    assert len(said(both)) == len(said(alone))
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


def test_a_server_answers_what_another_has_computed(tmp_path, tier):
    """Prefill and decode: asked the same prompt, the second server has exact KV and says what one
    server says; asked the prompt and the first token, it goes on from the compressed context."""
    rng = random.Random(9)
    prompts = [tokens(rng, length) for length in (1300, 700, 2000)]

    def asked(some: list[list[int]], new_tokens: int, namespace: str) -> dict[str, Any]:
        env = {**ENV, "KVTIER_TIER": tier.address, "KVTIER_TIER_NAMESPACE": namespace}
        requests = [[{"input_ids": one, "max_new_tokens": new_tokens}] for one in some]
        return serve(tmp_path, 1, requests, env)

    alone = asked(prompts, 12, "alone")
    prefill = asked(prompts, 1, "both")
    begun = [prompt + first for prompt, first in zip(prompts, said(prefill), strict=True)]
    compressed = asked(begun, 11, "both")
    exact = asked(prompts, 12, "both")
    assert said(exact) == said(alone)
    for out, not_computed in ((exact, lambda n: n - 1 - (n - 1) % 64), (compressed, lambda n: n)):
        assert out["state"]["tier"]["restored_requests"] == len(prompts)
        for (one,), prompt in zip(out["rounds"], prompts, strict=True):
            # Whole spans, or the turn as it ended.
            assert one["cached_tokens"] == not_computed(len(prompt))
    # The context had let go of what it does not keep before the second server answered.
    assert compressed["state"]["compacted_tokens"] == prefill["state"]["compacted_tokens"] > 1000
