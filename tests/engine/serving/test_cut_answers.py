"""Requests that leave another one's compressed turn in its middle, in the real engine: they compute
a window of it, and say what a transformers model says over the same entries.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, run_engine
from tierd.live_tier import live_tier

from benchmarks.common.engines import ranks_on_a_cpu
from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.locality import CUT_WINDOW, WIDE_CUT_WINDOW
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn

pytestmark = pytest.mark.engine

NEW = 9


@pytest.mark.parametrize(("share", "ranks"), [(0.3, 1), (0.3, 2), (0.1, 1)])
def test_a_branch_says_what_transformers_says_over_the_same_entries(tmp_path, share, ranks):
    """The first session is left at 900 by two others and at 600 by one, and goes on."""
    from transformers import AutoModelForCausalLM

    window = WIDE_CUT_WINDOW if share < 0.2 else CUT_WINDOW
    # A window that was computed again stays whole, so that what the next one finds is known.
    rule = replace(RULE, recent_tokens=window)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    worth = fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth
    rng = random.Random(8)
    first, *tails, more = (
        [rng.randrange(6, 384) for _ in range(n)] for n in (1600, 300, 200, 90, 40)
    )
    session = AdaptiveSession(model, rule, 512, Reconstruction.of(worth), ranks=ranks)
    session.keep_count = lambda prompt, span: (
        FixedShare(share).choose(Turn(prompt, span)).kept_tokens
    )
    expected = [session.turn(first, NEW).token_ids]
    one, two, three = (session.cut(at - window) for at in (900, 900, 600))
    expected.append(one.turn(first[900 - window : 900] + tails[0], NEW).token_ids)
    two.turn(first[900 - window : 900], 0)
    expected.append(two.turn(tails[1], NEW).token_ids)
    expected.append(three.turn(first[600 - window : 600] + tails[2], NEW).token_ids)
    expected.append(session.turn(more, NEW).token_ids)
    asked = [first, first[:900] + tails[0], first[:900] + tails[1], first[:600] + tails[2]]
    rounds = [[{"input_ids": prompt, "max_new_tokens": NEW}] for prompt in asked]
    rounds.append([{"continues": [0, 0], "input_ids": more, "max_new_tokens": NEW}])
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 12_000,
        "chunked_prefill_size": 512,
        "tp_size": ranks,
        **POLICIES["kvtier"],
    }
    env = {
        **RULE_ENV,
        "KVTIER_LOCALITY_RECENT_TOKENS": str(window),
        **competing(tmp_path, worth),
        "KVTIER_RETENTION": str(share),
        **ranks_on_a_cpu(ranks),
    }
    out = run_engine(tmp_path, engine, rounds, env)
    assert out["state"]["integrity"] == []
    found = [request for (request,) in out["rounds"]]
    assert [request["cached_tokens"] for request in found] == [
        0, 900 - window, 900, 600 - window, 1600 + NEW - 1
    ]  # fmt: skip
    assert out["state"]["cut_spans"] == 2
    assert [request["output_ids"] for request in found] == expected


def test_below_a_fifth_a_tier_brings_the_window_back(tmp_path):
    """Whole spans of it; the rest, and what is new, is computed."""
    worth = fit_tokens(str(DEMO_MODEL), contexts=3, lengths=[512]).worth
    rng = random.Random(8)
    first, tail = ([rng.randrange(6, 384) for _ in range(n)] for n in (1600, 300))
    rounds = [[{"input_ids": ids, "max_new_tokens": NEW}] for ids in (first, first[:900] + tail)]
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 12_000,
        "chunked_prefill_size": 512,
        **POLICIES["kvtier"],
    }
    env = {
        **RULE_ENV,
        **competing(tmp_path, worth),
        "KVTIER_RETENTION": "0.1",
        "KVTIER_TIER_SPAN_TOKENS": "64",
    }
    with live_tier(tmp_path, "--memory", "512m") as tier:
        out = run_engine(tmp_path, engine, rounds, env | {"KVTIER_TIER": tier.address})
    assert out["state"]["integrity"] == []
    found = out["rounds"][1][0]["cached_tokens_details"]
    assert found["device"] == 900 - WIDE_CUT_WINDOW
    assert found["storage"] == 900 // 64 * 64 - found["device"]
