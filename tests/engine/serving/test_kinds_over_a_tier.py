"""Models with experts, and with windows, through all that a served model goes through: it is
calibrated, compressed, and goes on from the tier when its server was restarted.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import POLICIES, RULE, RULE_ENV, competing
from engine_process import DEMO_MODEL, run_engine
from kinds import ENGINE, KINDS, OVER_A_TIER, write_model
from thorough import THOROUGH
from tierd.live_tier import live_tier
from tiered_engine import continued

from kvtier.heads.reference.compaction import AdaptiveSession
from kvtier.heads.tokens import fit_tokens
from kvtier.retention.scorers.reconstruction import Reconstruction
from kvtier.retention.shares import FixedShare, Turn

pytestmark = pytest.mark.engine

NEW = 9
TESTED = OVER_A_TIER if THOROUGH else OVER_A_TIER[:3]


@pytest.mark.parametrize("name", TESTED)
def test_it_goes_on_from_the_tier_as_the_reference_says(tmp_path: Path, name: str) -> None:
    """Two sessions of three turns, the last of each behind another server."""
    kind = KINDS[name]
    model = write_model(tmp_path / "model", kind, vocab_size=384, max_position_embeddings=4096)
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    worth = fit_tokens(str(tmp_path / "model"), contexts=2, lengths=[256]).worth
    share = FixedShare(0.3)
    random = torch.Generator().manual_seed(2)
    turns = [
        [torch.randint(6, 384, (count,), generator=random).tolist() for count in counts]
        for counts in ((500, 700), (40, 200), (60, 30))
    ]
    rule = replace(RULE, window=kind.extra.get("sliding_window") or 0)
    sessions = [AdaptiveSession(model, rule, 256, Reconstruction.of(worth)) for _ in turns[0]]
    for session in sessions:
        session.keep_count = lambda prompt, span: share.choose(Turn(prompt, span)).kept_tokens
    wanted = [
        [session.turn(prompt, NEW).token_ids for session, prompt in zip(sessions, new, strict=True)]
        for new in turns
    ]
    # One request at a time.
    rounds: list[list[dict[str, Any]]] = []
    for turn, new in enumerate(turns):
        for session, prompt in enumerate(new):
            request: dict[str, Any] = {"input_ids": prompt, "max_new_tokens": NEW}
            if turn:
                request["continues"] = [2 * (turn - 1) + session, 0]
            rounds.append([request])
    engine = {
        "model_path": str(tmp_path / "model"), "dtype": "float32", "max_total_tokens": 6000,
        "chunked_prefill_size": 256, **ENGINE, **POLICIES["kvtier"],
    }  # fmt: skip
    env = {**RULE_ENV, **competing(tmp_path, worth), "KVTIER_RETENTION": "0.3"}
    with live_tier(tmp_path, "--memory", "256m") as tier:
        env |= {"KVTIER_TIER": tier.address, "KVTIER_TIER_SPAN_TOKENS": "32"}
        before = run_engine(tmp_path, engine, rounds[:-2], env)
        back = run_engine(tmp_path, engine, continued(rounds, before["rounds"], 2), env)
    said = [one["output_ids"] for (one,) in (*before["rounds"], *back["rounds"])]
    assert said == [answer for new in wanted for answer in new]
    assert before["state"]["compacted_tokens"] > 0
    assert back["state"]["tier"]["restored_requests"] == 2
    assert before["state"]["integrity"] == back["state"]["integrity"] == []
