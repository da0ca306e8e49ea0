"""Compaction in the real engine: the tokens are those of the transformers reference, the slots
come back, and nothing leaks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_process import DEMO_MODEL, run_engine, run_script
from test_exactness import POLICIES, RULE, RULE_ENV, uneven_profile

from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.retention.share import FixedShare, Turn

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).with_name("fuzz_runner.py")
SHARE = 0.35


def compacting_rounds(profile: HeadProfile, model, sessions: int, turns: int):
    """Sessions with long contexts for the engine, and the compacting reference's answers.

    One request at a time: prompts that share a prefill chunk cut each other's windows, and then
    scores differ a little from those of a prompt alone.
    """
    import random

    from kvtier.heads.compacted import CompactingSession
    from kvtier_sglang.retention import Retention

    rng = random.Random(11)
    rounds: list[list[dict]] = []
    expected: list[list[list[int]]] = []
    for _ in range(sessions):
        session = CompactingSession(model, profile, RULE, chunk_tokens=512)
        rule = Retention(FixedShare(SHARE))
        session.keep_count = lambda prompt, span, rule=rule: rule.keep(Turn(prompt, span))
        for turn in range(turns):
            length = rng.randrange(300, 1500) if turn == 0 else rng.randrange(1, 400)
            prompt = [rng.randrange(6, 384) for _ in range(length)]
            request = {"input_ids": prompt, "max_new_tokens": 9}
            if turn:
                request["continues"] = [len(rounds) - 1, 0]
            rounds.append([request])
            expected.append([session.turn(prompt, 9).token_ids])
    return rounds, expected


@pytest.mark.parametrize("which", ["stored", "uneven", "all"])
def test_the_tokens_are_those_of_the_transformers_reference(tmp_path, which):
    from transformers import AutoModelForCausalLM

    stored = load_profile(DEMO_MODEL / "head_profile.json")
    profiles = {"stored": stored, "uneven": uneven_profile(), "all": full_profile(stored.shape)}
    profile = profiles[which]
    profile.save(tmp_path / "profile.json")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    rounds, expected = compacting_rounds(profile, model, sessions=8, turns=4)
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        **POLICIES["kvtier"],
    }
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_RETENTION": str(SHARE),
    }
    out = run_engine(tmp_path, engine, rounds, env)
    got = [[request["output_ids"] for request in requests] for requests in out["rounds"]]
    assert got == expected
    state = out["state"]
    assert state["integrity"] == []
    assert state["compacted_tokens"] > 1000
    assert state["retention"]["reasons"]["share"] >= 8


def test_every_slot_is_accounted_for_after_500_random_operations(tmp_path):
    uneven_profile().save(tmp_path / "profile.json")
    plan = {
        "engine": {
            "model_path": str(DEMO_MODEL),
            "max_total_tokens": 3000,
            "chunked_prefill_size": 256,
            **POLICIES["kvtier"],
        },
        "operations": 500,
        "seed": 8,
    }
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_LOCALITY_SLOTS": "1100",
        "KVTIER_RETENTION": "0.5",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    out = run_script(FUZZER, tmp_path, plan, env)
    assert out["counts"]["aborts"] > 30
    assert out["finished"] > 50
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["after_flush"]["ca_slots_used"] == 0
    assert out["after_flush"]["locality_slots_used"] == 0
