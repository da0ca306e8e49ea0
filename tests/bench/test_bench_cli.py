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
from waiting import SAFETY_S, wait_for

from kvtier.bench import runner
from kvtier.bench.__main__ import main
from kvtier.bench.report.html import render_report
from kvtier.bench.schema import Document
from kvtier.environment import git_commit

FAKE_WORKER = str(Path(__file__).with_name("fake_worker.py"))
VOID = {"meta", "br"}


@pytest.fixture
def flags(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(runner, "WORKER_COMMAND", (sys.executable, FAKE_WORKER))
    return ["--len", "512", "--turns", "2", "--model-path", str(model_path)]


def test_the_json_has_what_the_documentation_promises(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.json"
    assert main([*flags, "--seed", "3", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [run["policy"] for run in document["runs"]] == ["full", "kvtier"]
    for run in document["runs"]:
        assert len(run["turns"]) == 2
        for turn in run["turns"]:
            assert {"ttft_ms", "tpot_ms", "cached_tokens", "kv_device_bytes", "recall"} <= set(turn)
    assert {"kv_device_bytes", "median_ttft_ms", "median_tpot_ms", "recall"} <= set(
        document["ratios"]
    )
    assert document["ratios"]["kv_device_bytes"] == pytest.approx(4, rel=0.01)
    assert document["environment"]["seed"] == 3
    assert {"commit", "versions", "machine"} <= set(document["environment"])
    assert Document.model_validate(document).runs[0].policy == "full"
    printed = capsys.readouterr()
    assert "Ratios (bigger is better)" in printed.out
    assert "turn 2" in printed.err


def test_json_alone_goes_to_stdout_and_quiet_means_quiet(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*flags, "--format", "json", "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out)["ratios"]["baseline"] == "full"


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
def test_the_report_is_one_file_that_needs_no_other(
    flags: list[str], sessions: str, tmp_path: Path
):
    path = tmp_path / "report.html"
    policies = ["--policies", "stock,full,kvtier,window", "--sessions", sessions]
    assert main([*flags, *policies, "--report", str(path), "-q"]) == 0
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert {"svg", "polyline", "table", "style"} <= page.seen
    assert not {"script", "link", "img", "iframe"} & page.seen
    assert ("Sessions still resident" in text) == (sessions != "1")


def test_what_is_slower_is_not_called_half_as_many_times_faster(flags: list[str], tmp_path: Path):
    path = tmp_path / "out.json"
    assert main([*flags, "--json", str(path), "-q"]) == 0
    document = Document.model_validate_json(path.read_text())
    assert document.ratios is not None
    ratios = document.ratios.model_copy(update={"median_ttft_ms": 0.5, "median_tpot_ms": 2.0})
    text = render_report(document.model_copy(update={"ratios": ratios}))
    assert "<b>2.00x</b><span>slower first token, later turns</span>" in text
    assert "<b>2.00x</b><span>faster per token</span>" in text


def test_a_failed_run_shows_its_log_and_exits_with_1(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FAKE_WORKER", "crash")
    out = tmp_path / "out.json"
    assert main([*flags, "--json", str(out), "--report", str(tmp_path / "r.html"), "-q"]) == 1
    assert "no such weights" in capsys.readouterr().err
    document = json.loads(out.read_text())
    assert document["runs"] == []
    assert document["ratios"] is None
    assert [failure["policy"] for failure in document["failures"]] == ["full", "kvtier"]


def test_without_a_head_profile_the_table_says_that_heads_save_nothing(
    flags: list[str], model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = [tmp_path / "with.json", tmp_path / "without.json", tmp_path / "page.html"]
    assert main([*flags, "--json", str(files[0]), "-q"]) == 0
    assert "Note" not in capsys.readouterr().out
    (model_path / "head_profile.json").unlink()
    assert main([*flags, "--json", str(files[1]), "--report", str(files[2]), "-q"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: kvtier drops no KV of any head (head profile: none" in said
    assert "kvtier: every head keeps its whole context, so heads save nothing" in said
    assert "kvtier calibrate heads" in said
    given, absent = (Document.model_validate_json(file.read_text()) for file in files[:2])
    assert given.notes == ()
    assert len(absent.notes) == 1
    assert [run.ca_share for run in absent.runs] == [1, 1]
    assert absent.notes[0].split("(")[0] in files[2].read_text()


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


def test_the_commit_is_none_outside_a_checkout(tmp_path: Path):
    assert git_commit(tmp_path) is None


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes: 0" in text
    assert "130 interrupted" in text
