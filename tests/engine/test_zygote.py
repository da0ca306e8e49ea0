"""Scripts forked from a process that has SGLang imported are processes of their own."""

from __future__ import annotations

import os
import time

import pytest
from engine_process import CLEAN_ENVIRONMENT, run_script, zygotes

pytestmark = pytest.mark.engine

SCRIPT = """
import json, os, subprocess, sys
plan, out = sys.argv[1:]
plan = json.load(open(plan))
print("said")
if plan.get("fails"):
    raise RuntimeError("on purpose")
left = subprocess.Popen(["sleep", "600"]).pid
assert "sglang.srt.managers.scheduler" in sys.modules
here = {"pid": os.getpid(), "left": left, "setting": os.environ.get("KVTIER_MARK"),
        "left_behind": "LEFT_BEHIND" in os.environ}
json.dump(here, open(out, "w"))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_scripts_do_not_share_settings_and_leave_no_process(script, tmp_path):
    one = run_script(script, tmp_path, {}, {"KVTIER_MARK": "one"})
    two = run_script(script, tmp_path, {})
    assert (one["setting"], two["setting"]) == ("one", None)
    assert len({one["pid"], two["pid"], os.getpid()}) == 3
    for pid in (one["left"], two["left"]):
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}"), "a process outlived its script"


def test_a_script_that_fails_says_why(script, tmp_path):
    with pytest.raises(AssertionError, match="on purpose"):
        run_script(script, tmp_path, {"fails": True})


def test_what_a_test_leaves_in_its_environment_reaches_no_engine(script, tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT_BEHIND", "1")
    assert not run_script(script, tmp_path, {})["left_behind"]


def test_what_decides_imports_has_a_zygote_of_its_own():
    environment = dict(CLEAN_ENVIRONMENT)
    one = zygotes.of(environment)
    assert zygotes.of(environment | {"KVTIER_MARK": "x", "PYTEST_CURRENT_TEST": "y"}) is one
    others = [
        zygotes.of(environment | decides)
        for decides in (
            {"TRITON_INTERPRET": "0"},
            {"PYTHONPATH": "/elsewhere"},
            {"KVTIER_FORCE_CPU": "true"},
        )
    ]
    assert len({id(zygote) for zygote in (one, *others)}) == 4
