"""A prefill of minutes shows how far it is, with a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from waiting import wait_for

from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.progress import display as module
from kvtier.bench.progress.display import Progress
from kvtier.bench.progress.prefill_log import following

CHUNK = "[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0, more"


def test_chunks_are_told_as_the_log_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.bench.progress.prefill_log.LOOK_EVERY_S", 0.01)
    log, told = tmp_path / "worker.log", []
    halves = CHUNK[:50], f"{CHUNK[50:]}\nDecode batch, #new-token: 9\n"
    log.write_text("loading\n")
    with following(log, told.append), log.open("a") as lines:
        # The first half is read with what is told.
        for part, heard in ((f"{CHUNK}\n{halves[0]}", 1), (halves[1], 2)):
            lines.write(part)
            lines.flush()
            wait_for(lambda heard=heard: len(told) == heard)
    assert told == [2048, 2048]


@pytest.fixture
def plan(model_path):
    _, plans = make_plans(
        parse_options(["--len", "4k", "--turns", "3", "--model-path", str(model_path)])
    )
    return plans[0].plan


def shown(progress: Progress, plan, chunks: int) -> None:
    progress.event(plan, {"event": "turn", "turn": 1, "session": 0})
    for _ in range(chunks):
        progress.prefilled(plan, 1024)


def test_without_a_terminal_a_line_comes_now_and_then(plan, monkeypatch, capsys):
    monkeypatch.setattr(module, "NOTE_EVERY_S", 0.0)
    with Progress(quiet=False) as progress:
        shown(progress, plan, 3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "turn 1/3, 3k tokens read (75% of a context) in 0 s" in lines[-1]
    monkeypatch.setattr(module, "NOTE_EVERY_S", 60.0)
    with Progress(quiet=False) as progress:
        shown(progress, plan, 3)
    assert capsys.readouterr().err == ""


def test_with_a_terminal_the_status_says_it(plan, monkeypatch):
    screen = io.StringIO()
    with Progress(quiet=False) as progress:
        progress._console = Console(file=screen, force_terminal=True, width=120)
        progress._status = progress._console.status("starting")
        shown(progress, plan, 2)
        progress._console.print(progress._status.renderable)
        progress._status = None
    assert "2k tokens read (50% of a context)" in screen.getvalue()


def test_what_is_computed_outside_a_turn_is_not_shown(plan, monkeypatch, capsys):
    monkeypatch.setattr(module, "NOTE_EVERY_S", 0.0)
    with Progress(quiet=False) as progress:
        progress.prefilled(plan, 1024)
    assert capsys.readouterr().err == ""
