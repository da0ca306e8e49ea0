"""The soak's processes: their memory, their ends, and who started them again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from benchmarks.common.processes import ProcessError, Served
from benchmarks.soak.report import growth, memory
from benchmarks.soak.run import Sample, restarted


def samples(name: str, values, start: int = 1) -> list[Sample]:
    return [Sample(float(i), name, start, value) for i, value in enumerate(values)]


def test_memory_that_grows_all_the_time_shows_and_filling_up_does_not() -> None:
    assert growth(samples("a", [100 + i for i in range(100)])) == pytest.approx(0.366, abs=0.01)
    assert growth(samples("a", [min(i, 10) * 10 for i in range(100)])) == 0.0
    assert growth(samples("a", range(1, 9))) is None


def test_memory_is_that_of_the_longest_lived_start() -> None:
    seen = [*samples("a", [5] * 20), *samples("a", [9] * 40, start=2), *samples("b", [1] * 5)]
    found = memory(seen, load_s=50.0)
    assert (found["a"]["start"], found["a"]["resident_bytes"]) == (2, 9)
    assert found["a"]["growth"] == 0.0
    assert found["b"]["growth"] is None


def test_memory_is_that_of_a_process_and_its_children(tmp_path) -> None:
    own = "import signal; block = bytearray(50 << 20); print(flush=True); signal.pause()"
    code = f"""
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", {own!r}], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path({str(tmp_path / "ready")!r}).touch()
child.wait()
"""
    parent = process(tmp_path, code)
    parent.ready = (tmp_path / "ready").exists
    parent.start()
    try:
        assert parent.resident_bytes() > 50 << 20
    finally:
        parent.kill()


def process(folder: Path, code: str) -> Served:
    return Served("child", [sys.executable, "-c", code], folder, lambda: True)


def test_a_process_that_ends_by_itself_is_told_with_its_last_words(tmp_path) -> None:
    child = process(tmp_path, "import sys; sys.exit('no more of this')")
    child.start()
    assert child._process is not None
    child._process.wait()
    with pytest.raises(ProcessError, match=r"(?s)child ended by itself .*no more of this"):
        child.check()
    assert child.resident_bytes() is None
    # One that was killed has not ended by itself.
    child.command[-1] = "import signal; signal.pause()"
    child.start()
    assert child.resident_bytes() > 0
    child.kill()
    child.check()


def test_a_restarted_engine_listens_where_it_did() -> None:
    where = ["--host", "127.0.0.1", "--port", "1"]
    command = ["python", "-m", "kvtier", "serve", "--model", "m", "--old", "1", *where]
    found = restarted(command, ["--model", "m"], ["--new", "2"])
    assert found == ["python", "-m", "kvtier", "serve", "--model", "m", "--new", "2", *where]
