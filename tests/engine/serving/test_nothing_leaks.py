"""Hundreds of random operations on a real engine with pools far too small; nothing may leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressing import POLICIES, RULE_ENV, uneven_profile
from engine_process import DEMO_MODEL, run_script

pytestmark = pytest.mark.engine

FUZZER = Path(__file__).parents[1] / "fuzz_runner.py"
OPERATIONS = 500


def test_every_slot_is_accounted_for_after_hundreds_of_random_operations(tmp_path):
    uneven_profile().save(tmp_path / "profile.json")
    plan = {
        "engine": {
            "model_path": str(DEMO_MODEL),
            "max_total_tokens": 3000,
            "chunked_prefill_size": 256,
            **POLICIES["kvtier"],
        },
        "operations": OPERATIONS,
        "seed": 7,
    }
    env = {
        **RULE_ENV,
        "KVTIER_HEAD_PROFILE": str(tmp_path / "profile.json"),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    out = run_script(FUZZER, tmp_path, plan, env)
    assert sum(out["counts"].values()) >= 0.96 * OPERATIONS, "the operations were issued"
    assert out["counts"]["aborts"] > 0.06 * OPERATIONS
    assert out["finished"] > 0.1 * OPERATIONS, "pressure must not stop the server from serving"
    assert out["state"]["integrity"] == []
    assert out["state"]["compacted_tokens"] > 0
    assert out["after_flush"]["slots_used"] == 0
