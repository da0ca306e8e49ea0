"""A request that loses its prefix while it is queued gets it from the tier."""

from __future__ import annotations

import pytest
from engine_process import run_engine
from tierd.live_tier import live_tier
from tiered_engine import ENGINE, RULE

pytestmark = pytest.mark.engine

FIRST, OTHER, MORE, NEW = 500, 1100, 20, 4


def test_what_was_there_when_it_came_and_was_evicted_since_is_restored(tmp_path):
    """One request runs at a time, and the pool holds one context. The second turn comes while the
    first one's context is there, and waits behind a request that evicts it, which asks nothing of
    the tier, and so waits for nothing but the one that runs."""
    exact = {"kvtier": {"exact": True}}
    first = {"input_ids": [6 + at % 300 for at in range(FIRST)], "max_new_tokens": NEW}
    running = {"input_ids": [8] * 10, "max_new_tokens": 100, "custom_params": exact}
    evicting = {
        "input_ids": [7 + at % 200 for at in range(OTHER)], "max_new_tokens": NEW,
        "custom_params": exact,
    }  # fmt: skip
    second = {"continues": [0, 0], "input_ids": [9] * MORE, "max_new_tokens": NEW}
    rounds = [[first], {"settle": True}, [running, evicting, second]]
    engine = {**ENGINE, "max_total_tokens": 1300, "max_running_requests": 1}
    rule = {name: value for name, value in RULE.items() if name != "KVTIER_HEAD_PROFILE"}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env = {**rule, "KVTIER_TIER": tier.address, "KVTIER_TIER_PATIENCE_S": "600"}
        out = run_engine(tmp_path, engine, rounds, env)
    (told,), _, (*_, answer) = out["rounds"]
    span = int(RULE["KVTIER_TIER_SPAN_TOKENS"])
    spans = (len(told["prompt"]) + len(told["output_ids"])) // span
    assert answer["cached_tokens_details"]["storage"] >= (spans - 1) * span
    assert out["state"]["tier"]["restored_requests"] == 1
    assert out["state"]["integrity"] == []
