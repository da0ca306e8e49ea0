"""Long samples fit a small machine: the whole command's peak memory, imports included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import THOROUGH

from kvtier.heads.profile import load_profile

DEMO = Path(__file__).parents[2] / "models" / "kvtier-demo"
LENGTH, LIMIT_BYTES = ("32k", 4 << 30) if THOROUGH else ("16k", 3 << 29)


@pytest.mark.slow
def test_long_samples_fit_in_a_small_machine(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    command = [
        sys.executable, "-m", "kvtier", "calibrate", "heads", "--model-path", str(DEMO),
        "--share", "0.25", "--len", LENGTH, "--samples", "2", "--out", str(out), "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert load_profile(out).costs[0].context_tokens == int(LENGTH[:-1]) << 10
    peak_bytes = usage.ru_maxrss * 1024  # Linux counts in KiB
    print(f"peak resident memory: {peak_bytes / 2**30:.2f} GiB")
    assert peak_bytes < LIMIT_BYTES
