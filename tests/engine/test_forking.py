"""Commands that are forked from a process that has SGLang imported are processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import CLEAN_ENVIRONMENT, run_script
from waiting import SAFETY_S, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(sys.platform != "linux", reason="files are listed in /proc"),
]

SCRIPT = """
import json, os, subprocess, sys
plan, out = sys.argv[1:]
plan = json.load(open(plan))
print("said")
if plan.get("fails"):
    raise RuntimeError("on purpose")
left = subprocess.Popen(["sleep", "600"]).pid
here = {"pid": os.getpid(), "left": left, "setting": os.environ.get("KVTIER_MARK"),
        "left_behind": "LEFT_BEHIND" in os.environ,
        "imported": "sglang.srt.managers.scheduler" in sys.modules}
json.dump(here, open(out, "w"))
"""
ENDLESS = """
import os, signal, sys
os.write(int(sys.argv[1]), f"{os.getpid()}\\n".encode())
print(sys.stdin.readline().strip(), os.getcwd(), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.write(int(sys.argv[1]), b"handles\\n")
signal.pause()
"""


def written(folder: Path, text: str) -> Path:
    """A script where those of engine tests are."""
    path = folder / "tests" / "engine" / "script.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.fixture
def script(tmp_path):
    return written(tmp_path, SCRIPT)


def has_ended(pid: int) -> bool:
    return wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_scripts_do_not_share_settings_and_leave_no_process(script, tmp_path):
    one = run_script(script, tmp_path, {}, {"KVTIER_MARK": "one"})
    two = run_script(script, tmp_path, {})
    assert one["imported"]
    assert (one["setting"], two["setting"]) == ("one", None)
    assert len({one["pid"], two["pid"], os.getpid()}) == 3
    assert has_ended(one["left"])
    assert has_ended(two["left"])


def test_a_script_that_fails_says_why(script, tmp_path):
    with pytest.raises(AssertionError, match="on purpose"):
        run_script(script, tmp_path, {"fails": True})


def test_what_a_test_leaves_in_its_environment_reaches_no_engine(script, tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")
    assert not run_script(script, tmp_path, {})["left_behind"]


def test_where_a_test_wants_it_nothing_is_forked(script, tmp_path):
    assert not run_script(script, tmp_path, {}, {"TESTS_SPAWN": "1"})["imported"]


def test_files_folder_and_signals_are_those_of_whoever_waits(tmp_path):
    script = written(tmp_path, ENDLESS)
    reads, writes = os.pipe()
    waits = subprocess.Popen(
        [sys.executable, str(script), str(writes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env=CLEAN_ENVIRONMENT, pass_fds=(writes,),
    )  # fmt: skip
    os.close(writes)
    with os.fdopen(reads) as told:
        forked = int(told.readline())
        assert forked != waits.pid
        assert waits.stdin is not None
        assert waits.stdout is not None
        waits.stdin.write("hello\n")
        waits.stdin.close()
        assert waits.stdout.readline() == f"hello {tmp_path}\n"
        assert told.readline() == "handles\n"
        waits.send_signal(signal.SIGTERM)
        assert waits.wait(SAFETY_S) == 7
        assert has_ended(forked)
        assert told.read() == ""
    waits.stdout.close()
