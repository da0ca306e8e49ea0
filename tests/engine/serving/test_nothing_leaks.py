"""Hundreds of random operations on a real engine with pools far too small; nothing may leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressing import POLICIES, RULE_ENV, uneven_profile
from engine_process import DEMO_MODEL, run_script
from thorough import THOROUGH

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"


@pytest.mark.parametrize(
    ("operations", "seed", "settings"),
    [(500, 7, {}), (500 if THOROUGH else 250, 8, {"KVTIER_RETENTION": "0.5"})],
    ids=["heads alone", "a share, too"],
)
def test_every_slot_is_accounted_for_after_hundreds_of_random_operations(
    tmp_path, operations, seed, settings
):
    uneven_profile().save(tmp_path / "profile.json")
    plan = {
        "engine": {
            "model_path": str(DEMO_MODEL),
            "max_total_tokens": 3000,
            "chunked_prefill_size": 256,
            **POLICIES["kvtier"],
        },
        "operations": operations,
        "seed": seed,
    }
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        **settings,
    }
    out = run_script(FUZZER, tmp_path, plan, env)
    assert sum(out["counts"].values()) >= 0.96 * operations, "the operations were issued"
    assert out["counts"]["aborts"] > 0.06 * operations
    assert out["finished"] > 0.1 * operations, "pressure must not stop the server from serving"
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["after_flush"]["slots_used"] == 0
