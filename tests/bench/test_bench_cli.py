"""The command over a fake worker: files, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_models import FAKE_WORKER
from waiting import SAFETY_S, wait_for

from kvtier.bench.__main__ import main
from kvtier.bench.report.html import render_report
from kvtier.bench.schema import Document

VOID = {"meta", "br"}


@pytest.fixture
def flags(model_path: Path, faked: None) -> list[str]:
    return ["--len", "512", "--turns", "2", "--model-path", str(model_path)]


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("sessions", ["1", "4"])
def test_the_outcome_is_as_documented_as_json_and_one_page_that_needs_no_other(
    flags: list[str], sessions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    policies = ["--policies", "stock,full,kvtier,window", "--sessions", sessions, "--seed", "3"]
    assert main([*flags, *policies, "--json", str(out), "--report", str(report)]) == 0
    document = json.loads(out.read_text())
    assert [run["policy"] for run in document["runs"]] == ["stock", "full", "kvtier", "window"]
    for run in document["runs"]:
        assert len(run["turns"]) == 2
        for turn in run["turns"]:
            assert {"ttft_ms", "tpot_ms", "cached_tokens", "kv_device_bytes", "recall"} <= set(turn)
    ratios = document["ratios"]
    assert {"kv_device_bytes", "median_ttft_ms", "median_tpot_ms", "recall"} <= set(ratios)
    assert (ratios["baseline"], ratios["policy"]) == ("full", "kvtier")
    assert sessions != "1" or ratios["kv_device_bytes"] == pytest.approx(4, rel=0.01)
    assert document["environment"]["seed"] == 3
    assert {"commit", "versions", "machine"} <= set(document["environment"])
    assert document["notes"] == []
    printed = capsys.readouterr()
    assert "Ratios (bigger is better)" in printed.out
    assert "turn 2" in printed.err
    text, page = report.read_text(encoding="utf-8"), Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert not any(one in text for one in ("http", "url(", "@import"))
    assert {"svg", "polyline", "table", "style"} <= page.seen
    assert not {"script", "link", "img", "iframe"} & page.seen
    assert ("Sessions still resident" in text) == (sessions != "1")
    # Something slower is not called half as many times faster.
    known = Document.model_validate(document)
    changed = known.ratios.model_copy(update={"median_ttft_ms": 0.5, "median_tpot_ms": 2.0})
    text = render_report(known.model_copy(update={"ratios": changed}))
    assert "<b>2.00x</b><span>slower first token, later turns</span>" in text
    assert "<b>2.00x</b><span>faster per token</span>" in text


def test_json_alone_goes_to_stdout_and_quiet_means_quiet(
    flags: list[str], model_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Without a head profile it is said that heads save nothing."""
    (model_path / "head_profile.json").unlink()
    assert main([*flags, "--format", "json", "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    document = Document.model_validate_json(printed.out)
    assert [run.ca_share for run in document.runs] == [1, 1]
    (note,) = document.notes
    assert "kvtier drops no KV of any head (head profile: none" in note


def test_a_failed_run_shows_its_log_and_exits_with_1(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FAKE_WORKER", "crash")
    out, report = tmp_path / "out.json", tmp_path / "r.html"
    assert main([*flags, "--json", str(out), "--report", str(report), "-q"]) == 1
    assert "no such weights" in capsys.readouterr().err
    document = json.loads(out.read_text())
    assert document["runs"] == []
    assert document["ratios"] is None
    assert [failure["policy"] for failure in document["failures"]] == ["full", "kvtier"]
    assert "failed (exit code" in report.read_text()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_with_130_and_kills_the_engine_with_its_children(
    sign: signal.Signals, model_path: Path, tmp_path: Path
):
    pid_file = tmp_path / "pid"
    script = (
        # A shell that started the tests in the background has SIGINT ignored.
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvtier.bench import runner\n"
        f"runner.WORKER_COMMAND = (sys.executable, {FAKE_WORKER!r})\n"
        "from kvtier.bench.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    environment = os.environ | {"FAKE_WORKER": "hang", "FAKE_WORKER_PID": str(pid_file)}
    command = [sys.executable, "-c", script, "--len", "512", "--model-path", str(model_path)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as bench:
        wait_for(lambda: pid_file.is_file() and pid_file.read_text() != "")
        bench.send_signal(sign)
        _, errors = bench.communicate(timeout=SAFETY_S)
    assert bench.returncode == 130
    assert "interrupted" in errors
    wait_for(lambda: not _is_running(int(pid_file.read_text())))


def _is_running(pid: int) -> bool:
    """Return whether a process still runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
