"""Processes that do what they are told: answers, failures with their log, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from waiting import wait_for

from benchmarks.common.remote import WorkerError, run_module, running_module

WORKER = """
import json, os, sys
from benchmarks.common.remote import parents_lines
with parents_lines(sys.argv[2:]) as (reads, writes):
    for line in reads:
        said = json.loads(line)
        if said["do"] == "fall":
            sys.exit("no more of this")
        print(json.dumps({**said, "pid": os.getpid()}), file=writes, flush=True)
"""


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


def test_a_worker_answers_what_it_is_told_and_is_gone_afterwards(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with running_module("told", [tmp_path], environment, tmp_path / "log") as remote:
        first = remote.tell("sing", song=3)
        assert first == {"do": "sing", "song": 3, "pid": first["pid"]}
        assert remote.tell("sing", song=4)["pid"] == first["pid"]
        assert not gone(first["pid"])
    wait_for(lambda: gone(first["pid"]))


@pytest.mark.parametrize("waits", [False, True])
def test_a_worker_that_ends_before_it_answers_is_an_error_with_its_last_lines(
    tmp_path: Path, environment: dict[str, str], waits: bool
) -> None:
    """waits: until it is gone, before it is told anything."""
    if waits:
        (tmp_path / "told.py").write_text("import sys; sys.exit('no more of this')")
    with running_module("told", [tmp_path], environment, tmp_path / "log") as remote:
        wait_for(lambda: not waits or remote._process.poll() is not None)
        with pytest.raises(WorkerError, match="no more of this"):
            remote.tell("fall")


def test_a_module_that_fails_is_an_error_and_one_that_does_not_is_none(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text("import sys; sys.exit(sys.argv[1] == 'bad' and 'so bad')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run_module("once", [Path("good")], environment, tmp_path / "log")
    with pytest.raises(WorkerError, match="so bad"):
        run_module("once", [Path("bad")], environment, tmp_path / "log")
