"""Compaction in the real engine: the tokens are those of the transformers reference, and each
context keeps what it can afford. That nothing leaks is in test_nothing_leaks.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from compressing import RULE, RULE_ENV, competing, demo_model, keeping, uneven_profile
from engine_process import DEMO_MODEL, run_engine
from sessions import Prompt, Rounds, said, tokens
from tiered_engine import ENGINE

from kvtier.calibration.documents import load_curve
from kvtier.calibration.keys import policy_digest
from kvtier.calibration.measuring import QUESTIONS
from kvtier.config import load_settings
from kvtier.heads.profile import full_profile, load_profile
from kvtier.heads.reference.compaction import CompactingSession, ScoredSession
from kvtier.retention.rules import locality_rule, scorer_of
from kvtier.retention.scorers import SCORERS
from kvtier.retention.shares import PAGE
from kvtier.synthetic.recall import make_session

pytestmark = pytest.mark.engine

SHARE, NEW = 0.35, 9
STORED = load_profile(DEMO_MODEL / "head_profile.json")
EVERY_HEAD = full_profile(STORED.shape)


def compacting_rounds() -> tuple[Rounds, list[Prompt]]:
    """Sessions with long contexts for the engine, and the compacting reference's answers. Each goes
    on once more from its second turn.

    One request at a time: prompts that share a prefill chunk cut each other's windows, and then
    scores differ a little from those of a prompt alone.
    """
    rng = random.Random(11)
    rounds: Rounds = []
    expected: list[Prompt] = []

    def ask(session: CompactingSession, lengths: tuple[int, int], behind: int | None) -> int:
        prompt = tokens(rng, rng.randrange(*lengths))
        rounds.append([{"input_ids": prompt, "max_new_tokens": NEW}])
        if behind is not None:
            rounds[-1][0]["continues"] = [behind, 0]
        expected.append(session.turn(prompt, NEW).token_ids)
        return len(rounds) - 1

    for _ in range(4):
        session = CompactingSession(
            demo_model(), uneven_profile(), RULE, 512, SCORERS["compactor"](),
            kv_dtype=torch.float8_e4m3fn, in_pages=True,
        )  # fmt: skip
        keeping(session, SHARE)
        second = ask(session, (1, 400), ask(session, (300, 1500), None))
        fork = session.fork()
        # Both would otherwise note what their scorer wants to see in the same lists.
        fork.forget()
        ask(session, (1, 400), ask(session, (1, 400), second))
        ask(fork, (1, 400), second)
    return rounds, expected


def test_the_tokens_are_those_of_the_transformers_reference(tmp_path):
    """The stored profile and the default scorer: test_tier.py."""
    uneven_profile().save(tmp_path / "profile.json")
    rounds, expected = compacting_rounds()
    env = {
        **RULE_ENV,
        "KVTIER_RETENTION": f"{SHARE}",
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "KVTIER_SCORER": "compactor",
    }
    out = run_engine(tmp_path, {**ENGINE, "kv_cache_dtype": "fp8_e4m3"}, rounds, env)
    assert said(out) == [[answer] for answer in expected]
    state = out["state"]
    assert state["compacted_tokens"] > 1000
    assert state["retention"]["reasons"]["share"] >= 4
    assert state["retention"]["scorer"]["name"] == "compactor"


@pytest.mark.parametrize("competes", [False, True], ids=["of a profile", "compete"])
def test_contexts_of_one_batch_keep_what_each_of_them_can_afford(tmp_path, competes):
    """Filler and dense text side by side: shares follow the curve at each context's own NLL."""
    facts = (8, 110, 8, 60, 110, 30)
    sessions = (
        make_session(np.random.default_rng(i), 2000 + 100 * i, QUESTIONS, count, invented_share=0.0)
        for i, count in enumerate(facts)
    )
    contexts = [session.context_ids.tolist() for session in sessions]
    env = {"KVTIER_HEAD_PROFILE": str(DEMO_MODEL / "head_profile.json")}
    if competes:
        env = competing(tmp_path)
    settings = load_settings(**{n.removeprefix("KVTIER_").lower(): v for n, v in env.items()})
    edges = settings.locality.kept_tokens(competes=competes)
    curve = load_curve(DEMO_MODEL / "curve.json")
    if competes:
        # The curve is taken for one that was fitted so.
        policy = policy_digest(EVERY_HEAD, locality_rule(settings), scorer_of(settings))
        curve = curve.model_copy(update={"policy": policy})
    (tmp_path / "curve.json").write_text(curve.to_json())
    env |= {"KVTIER_QUALITY": "0.95", "KVTIER_CURVE": str(tmp_path / "curve.json")}
    requests = [{"input_ids": ids, "max_new_tokens": 2} for ids in contexts]
    engine = {**ENGINE, "chunked_prefill_size": 1024}
    out = run_engine(tmp_path, engine, [requests], env)
    assert out["state"]["integrity"] == []
    report = out["state"]["retention"]
    assert report["reasons"] == {"quality": len(contexts)}
    # All begin with <bos>, and some share a word more: that prefix belongs to the first to come.
    kept = {round(turn["prompt_tokens"], -2): turn for turn in report["recent"]}
    for ids in contexts:
        turn = kept[len(ids)]
        reference = ScoredSession(demo_model(), STORED)
        reference.turn(ids, 0)
        assert turn["nll"] == pytest.approx(reference.mean_nll(), abs=0.02)
        share = curve.retention(0.95, turn["nll"])
        assert turn["kept_tokens"] - edges == pytest.approx(share * (len(ids) - edges), abs=PAGE)
    dense, filler = (
        [kept[len(ids)]["retention"] for ids, n in zip(contexts, facts, strict=True) if n == count]
        for count in (110, 8)
    )
    assert min(dense) > 2 * max(filler)
