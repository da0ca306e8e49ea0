"""A module of ours in a process of its own, to its end. All that it started is gone then.

run_job("benchmarks.x", job, environment)      `python -m benchmarks.x JOB.json FOUND.json`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.common.benchmark import ROOT
from kvtier.bench.runner import running
from kvtier.config import ENV_PREFIX
from kvtier.errors import KvtierError

LOG_TAIL_LINES = 20


class WorkerError(KvtierError):
    """A worker that did not finish; the message ends with its last log lines."""

    def __init__(self, log: Path) -> None:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        super().__init__("the worker failed:\n" + "\n".join(tail))


def run_job(module: str, job: BaseModel, environment: Mapping[str, str]) -> Any:
    """Return what a module finds, in JSON, that is given a job. Raises WorkerError."""
    with tempfile.TemporaryDirectory(prefix="kvtier-job-") as name:
        asked, found = Path(name, "job.json"), Path(name, "found.json")
        asked.write_text(job.model_dump_json())
        run_module(module, [asked, found], environment, Path(name, "log"))
        return json.loads(found.read_text())


def run_module(
    module: str,
    files: Sequence[Path],
    environment: Mapping[str, str],
    log: Path,
    limit_s: float | None = None,
) -> None:
    """`python -m module files…` in a process group of its own, to its end or until `limit_s` have
    passed, which the log says then. log: gets what it says on stdout and stderr.

    Raises WorkerError where that is not a good end.
    """
    command = [sys.executable, "-m", module, *map(str, files)]
    with log.open("wb") as said:
        try:
            with running(
                command, cwd=ROOT, env=dict(environment), stdout=said, stderr=said
            ) as process:
                exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
            said.write(f"\nstopped after {limit_s:g} s\n".encode())
    if exit_code != 0:
        raise WorkerError(log)


def clean_environment() -> dict[str, str]:
    """This process's environment without KVTIER_* variables: what a worker starts from."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
