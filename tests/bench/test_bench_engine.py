"""One small run of the bench on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import SAFETY_S

from kvtier.heads.model.config import model_shape, read_config
from kvtier.heads.profile import full_profile

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "kvtier-demo"
TIMEOUT_S = 900


@pytest.mark.engine
@pytest.mark.slow
def test_three_policies_serve_the_same_sessions(tmp_path: Path):
    """With every head CA, kvtier's tree must answer what stock SGLang answers."""
    profile, out = tmp_path / "all.json", tmp_path / "out.json"
    full_profile(model_shape(read_config(str(MODEL)))).save(profile)
    command = [
        *(sys.executable, "-m", "kvtier.bench", "--len", "1k", "--turns", "2", "--questions", "2"),
        *("--policies", "stock,full,kvtier", "--head-profile", str(profile)),
        *("--model-path", str(MODEL), "--json", str(out), "-q"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SAFETY_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert [run["policy"] for run in runs] == ["stock", "full", "kvtier"]
    answers = [[request["output_ids"] for request in run["requests"]] for run in runs]
    assert answers[0] == answers[1] == answers[2]
    for run in runs:
        first, second = run["turns"]
        assert first["cached_tokens"] == 0
        assert second["cached_tokens"] >= 1024
        assert second["kv_device_bytes"] > first["kv_device_bytes"] > 0
        assert run["summary"]["recall"] > 0.5
