"""The part of the check that runs in a process of its own: the equivalence suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.common.benchmark import ROOT

TESTS_LIMIT_S = 240.0
TESTS_PROCESSES = 8


def run_tests() -> dict[str, Any]:
    """The equivalence suite on the device, where what it is written with is installed."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        return {"ran": False, "missing": missing}
    suites = ["tests/kernels"]
    if find_spec("sglang") is not None:
        suites.append("tests/engine/attention/test_streams.py")
        suites.append("tests/engine/serving/test_absent_gpu.py")
    # Others' warnings are no errors of ours, in whatever versions there are here.
    command = [sys.executable, "-m", "pytest", "-q", *suites, "-m", "not slow", "-W", "default"]
    if find_spec("xdist") is not None:
        # Most of the time is compiling.
        command += ["-n", str(TESTS_PROCESSES)]
    code, said = run_limited(command, TESTS_LIMIT_S)
    return {"ran": True, "passed": code == 0, "said": said.splitlines()[-60:]}


def run_limited(command: Sequence[str], limit_s: float | None) -> tuple[int | None, str]:
    """A command's exit status, and what it says. Past the limit it is ended with all that it
    started, which would hold the device's memory: no status, and the last line says so."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=said, start_new_session=True
        ) as process,
    ):
        code, late = None, ""
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            late = f"\nstopped after {limit_s} s"
        said.seek(0)
        return code, said.read().strip() + late
