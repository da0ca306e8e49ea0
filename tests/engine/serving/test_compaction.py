"""Compaction in the real engine: the tokens are those of the transformers reference, and each
context keeps what it can afford. That nothing leaks is in test_nothing_leaks.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, uneven_profile
from engine_process import DEMO_MODEL, run_engine
from thorough import THOROUGH

from kvtier.calibration.documents import load_curve
from kvtier.calibration.measuring import QUESTIONS
from kvtier.heads.profile import HeadProfile, full_profile, load_profile
from kvtier.heads.reference.compaction import ScoredSession
from kvtier.retention.scorers import SCORERS
from kvtier.retention.shares import PAGE, FixedShare, Turn
from kvtier.synthetic.recall import make_session

pytestmark = pytest.mark.engine

SHARE = 0.35


def compacting_rounds(
    profile: HeadProfile,
    model,
    scorer: str,
    sessions: int,
    turns: int,
    kv_dtype: torch.dtype | None = None,
):
    """Sessions with long contexts for the engine, and the compacting reference's answers. In the
    end all go on once more from their second turn.

    One request at a time: prompts that share a prefill chunk cut each other's windows, and then
    scores differ a little from those of a prompt alone.
    """
    from kvtier.heads.reference.compaction import CompactingSession
    from kvtier_sglang.compression.retention import Retention

    rng = random.Random(11)
    rounds: list[list[dict]] = []
    expected: list[list[list[int]]] = []
    forks = []
    for _ in range(sessions):
        chosen = SCORERS[scorer]()
        session = CompactingSession(
            model, profile, RULE, chunk_tokens=512, scorer=chosen, kv_dtype=kv_dtype,
            in_pages=True,
        )  # fmt: skip
        rule = Retention(FixedShare(SHARE))
        session.keep_count = lambda prompt, span, rule=rule: (
            rule.choose(Turn(prompt, span)).kept_tokens
        )
        for turn in range(turns):
            length = rng.randrange(300, 1500) if turn == 0 else rng.randrange(1, 400)
            prompt = [rng.randrange(6, 384) for _ in range(length)]
            request = {"input_ids": prompt, "max_new_tokens": 9}
            if turn:
                request["continues"] = [len(rounds) - 1, 0]
            rounds.append([request])
            expected.append([session.turn(prompt, 9).token_ids])
            if turn == 1:
                fork = session.fork()
                # Both would otherwise note what their scorer wants to see in the same lists.
                fork.forget()
                forks.append((len(rounds) - 1, fork))
    for before, fork in forks:
        prompt = [rng.randrange(6, 384) for _ in range(rng.randrange(1, 400))]
        rounds.append([{"input_ids": prompt, "max_new_tokens": 9, "continues": [before, 0]}])
        expected.append([fork.turn(prompt, 9).token_ids])
    return rounds, expected


@pytest.mark.parametrize(
    ("which", "scorer", "kv"),
    [
        ("stored", "compactor", "auto"),
        ("uneven", "compactor", "auto"),
        ("all", "keydiff", "auto"),
        ("uneven", "compactor", "fp8_e4m3"),
        *([("uneven", "distinct-keys", "auto")] if THOROUGH else []),
    ],
)
def test_the_tokens_are_those_of_the_transformers_reference(tmp_path, which, scorer, kv):
    from transformers import AutoModelForCausalLM

    stored = load_profile(DEMO_MODEL / "head_profile.json")
    profiles = {"stored": stored, "uneven": uneven_profile(), "all": full_profile(stored.shape)}
    profile = profiles[which]
    profile.save(tmp_path / "profile.json")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    kv_dtype = torch.float8_e4m3fn if kv == "fp8_e4m3" else None
    rounds, expected = compacting_rounds(profile, model, scorer, 8, 4, kv_dtype)
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 512,
        "kv_cache_dtype": kv,
        **POLICIES["kvtier"],
    }
    # Two ways to say the same.
    setting, value = "KVTIER_RETENTION", str(SHARE)
    if which == "all":
        setting, value = "KVTIER_SHARE_RULE", f"retention={SHARE}"
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        setting: value,
        "KVTIER_SCORER": scorer,
    }
    out = run_engine(tmp_path, engine, rounds, env)
    got = [[request["output_ids"] for request in requests] for requests in out["rounds"]]
    assert got == expected
    state = out["state"]
    assert state["integrity"] == []
    assert state["compacted_tokens"] > 1000
    assert state["retention"]["reasons"]["share"] >= 8
    assert state["retention"]["scorer"].items() >= {"name": scorer}.items()


def test_contexts_of_one_batch_keep_what_each_of_them_can_afford(tmp_path):
    """Filler and dense text side by side: shares follow the curve at each context's own NLL."""
    from transformers import AutoModelForCausalLM

    facts = (8, 110, 8, 60, 110, 30)
    sessions = (
        make_session(np.random.default_rng(i), 2000 + 100 * i, QUESTIONS, count, invented_share=0.0)
        for i, count in enumerate(facts)
    )
    contexts = [tuple(session.context_ids.tolist()) for session in sessions]
    engine = {
        "model_path": str(DEMO_MODEL),
        "max_total_tokens": 30_000,
        "chunked_prefill_size": 1024,
        **POLICIES["kvtier"],
    }
    env = {
        "KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json"),
        "KVTIER_QUALITY": "0.95",
        "KVTIER_CURVE": str(DEMO_MODEL / "curve.json"),
    }
    requests = [{"input_ids": list(ids), "max_new_tokens": 2} for ids in contexts]
    report = run_engine(tmp_path, engine, [requests], env)["state"]["retention"]
    assert report["reasons"] == {"quality": len(contexts)}
    # All begin with <bos>, and some share a word more: that prefix belongs to the first to come.
    kept = {round(turn["prompt_tokens"], -2): turn for turn in report["recent"]}
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    curve = load_curve(DEMO_MODEL / "curve.json")
    for ids in contexts:
        turn = kept[len(ids)]
        reference = ScoredSession(model, load_profile(DEMO_MODEL / "head_profile.json"))
        reference.turn(ids, 0)
        assert turn["nll"] == pytest.approx(reference.mean_nll(), abs=0.02)
        droppable = len(ids) - 128 - 256
        share = curve.retention(0.95, turn["nll"])
        assert turn["kept_tokens"] - 384 == pytest.approx(share * droppable, abs=PAGE)
    dense, filler = (
        [kept[len(ids)]["retention"] for ids, n in zip(contexts, facts, strict=True) if n == count]
        for count in (110, 8)
    )
    assert min(dense) > 2 * max(filler)
