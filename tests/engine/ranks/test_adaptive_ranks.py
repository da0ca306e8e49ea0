"""Heads of a rank compete for a context's entries, and tell their partners what their KV says of
the tokens: while the tier answers one rank late, or never. That the tokens are the reference's is
in serving/test_adaptive.py.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_process import DEMO_MODEL
from serving import first_turns, next_turns, said, serve
from tierd.live_tier import live_tier
from tiered_engine import RULE

from kvtier.heads.tokens import fit_tokens

pytestmark = pytest.mark.engine


@pytest.fixture
def adaptive(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "worth.npz"
    fit_tokens(str(DEMO_MODEL), contexts=2, lengths=[512]).worth.save(file)
    return {
        **{name: value for name, value in RULE.items() if name != "KVTIER_HEAD_PROFILE"},
        "KVTIER_SCORER": "reconstruction",
        "KVTIER_SCORER_FILE": str(file),
        "KVTIER_HEAD_BUDGETS": "adaptive",
        "KVTIER_RETENTION": "0.3",
    }


def test_ranks_refresh_together_or_not_at_all(tmp_path, adaptive):
    rng = random.Random(8)
    first, second = first_turns(rng, 2, 900), next_turns(rng, 0, 2)
    # One at a time: what a refresh waits for is the same in every run.
    rounds = [[first[0]], [first[1]]]
    rounds += [[{**one, "continues": [at, 0]}] for at, one in enumerate(second)]
    answers = {}
    with live_tier(tmp_path, "--memory", "512m") as tier:
        tiered = {**adaptive, "KVTIER_REFRESH": "turn", "KVTIER_TIER": tier.address}
        for fault in (None, "slow", "losing"):
            env = {**tiered, "KVTIER_TIER_NAMESPACE": f"{fault}"}
            out = serve(tmp_path, 2, rounds, env, fault=fault)
            answers[fault] = said(out)
            refreshed = out["state"]["tier"].get("refreshed_turns", 0)
            assert refreshed == (0 if fault == "losing" else 2), fault
            assert out["state"]["compacted_tokens"] > 300
    assert answers["slow"] == answers[None]
    assert answers["losing"] == said(serve(tmp_path, 2, rounds, adaptive))
