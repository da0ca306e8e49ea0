"""Modules in processes of their own: what they find, failures with their log, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import BaseModel
from waiting import wait_for

from benchmarks.common.remote import WorkerError, run_job

WORKER = """
import json, subprocess, sys
job = json.load(open(sys.argv[1]))
if job["song"] < 0:
    sys.exit("no more of this")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
json.dump({**job, "child": child.pid}, open(sys.argv[2], "w"))
"""


class Job(BaseModel):
    song: int


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "told.py").write_text(WORKER)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_worker_finds_what_it_is_asked_and_nothing_of_it_is_left(environment) -> None:
    found = run_job("told", Job(song=3), environment)
    assert found["song"] == 3
    wait_for(lambda: gone(found["child"]))


def test_a_worker_that_fails_is_an_error_with_its_last_lines(environment) -> None:
    with pytest.raises(WorkerError, match="no more of this"):
        run_job("told", Job(song=-1), environment)
