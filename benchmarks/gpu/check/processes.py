"""The parts of the check that run in processes of their own: the equivalence suite, and engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import ROOT

TESTS_LIMIT_S = 240.0
TESTS_PROCESSES = 8
ENGINE_ARGUMENTS = (
    *("--turns", "5", "--len", "128k"),
    *("--policies", "full,kvtier", "--device", "cuda"),
)
ENGINE_LIMIT_S = 300.0
# Each engine has its limit, and all together end before ten minutes have passed.
SERVING_ARGUMENTS = ("--equal-bytes", "--turns", "3", "--limit-s", "150")
SERVING_LIMIT_S = 560.0
SERVING_FILE = "gpu-serving.json"


def run_tests(*, flashinfer: bool) -> dict[str, Any]:
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
    if not flashinfer:
        command += ["-k", "not flashinfer"]
    # FlashInfer compiles for minutes the first time.
    code, said = run_limited(command, None if flashinfer else TESTS_LIMIT_S)
    return {"ran": True, "passed": code == 0, "said": said.splitlines()[-60:]}


def run_engine() -> dict[str, Any]:
    """The bench's table, where there is an engine for it; its plugin is found by its metadata."""
    missing = [name for name in ("sglang", "kvtier") if not _installed(name)]
    if missing:
        return {"ran": False, "missing": missing}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "kvtier.bench", "--quiet", "--json", str(out)]
        _, said = run_limited([*command, *ENGINE_ARGUMENTS], ENGINE_LIMIT_S)
        if not out.exists():
            raise RuntimeError(f"kvtier.bench: {said[-2000:]}")
        bench = json.loads(out.read_text())
    return {
        "ran": True,
        "arguments": list(ENGINE_ARGUMENTS),
        "policies": {run["policy"]: run["summary"] for run in bench["runs"]},
        "ratios": bench["ratios"],
        "failures": bench["failures"],
    }


def run_serving(folder: Path | None) -> dict[str, Any]:
    """Measure what serving gains by every policy, where there is an engine for it. folder: gets its
    JSON, which is written anew after each engine, so that a machine that goes away leaves it."""
    missing = [name for name in ("sglang", "kvtier") if not _installed(name)]
    if missing:
        return {"ran": False, "missing": missing}
    with tempfile.TemporaryDirectory() as name:
        out = (folder or Path(name)) / SERVING_FILE
        # Without this another run's figures would be taken for ours.
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu.serving", "--out", str(out)]
        _, said = run_limited([*command, *SERVING_ARGUMENTS], SERVING_LIMIT_S)
        if not out.exists():
            raise RuntimeError(f"benchmarks.gpu.serving: {said[-2000:]}")
        document = json.loads(out.read_text())
    return {
        "ran": True,
        "arguments": list(SERVING_ARGUMENTS),
        "policies": document["policies"],
        "bars": document["bars"],
        "said": said.splitlines()[-60:],
    }


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


def _installed(package: str) -> bool:
    """Return whether the package's metadata is there: the engine finds its plugin by it."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


__all__ = ["run_engine", "run_serving", "run_tests"]
