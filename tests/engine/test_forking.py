"""Commands that are forked from a process that has SGLang imported are processes of their own."""

from __future__ import annotations

import os
import sys

import pytest
from engine_process import run_script
from waiting import wait_for

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


def has_ended(pid: int) -> bool:
    return wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def test_scripts_do_not_share_settings_and_leave_no_process(tmp_path, monkeypatch):
    """A script that fails says why, and what a test leaves in its environment reaches none."""
    script = tmp_path / "tests" / "engine" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    monkeypatch.setenv("LEFT_BEHIND", "1")
    one = run_script(script, tmp_path, {}, {"KVTIER_MARK": "one"})
    two = run_script(script, tmp_path, {})
    assert one["imported"]
    assert (one["setting"], two["setting"]) == ("one", None)
    assert len({one["pid"], two["pid"], os.getpid()}) == 3
    assert has_ended(one["left"])
    assert has_ended(two["left"])
    assert not one["left_behind"]
    with pytest.raises(AssertionError, match="on purpose"):
        run_script(script, tmp_path, {"fails": True})
