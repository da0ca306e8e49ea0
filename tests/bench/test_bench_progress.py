"""A prefill of minutes shows how far it is, with a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from waiting import wait_for

from kvtier.bench.options import parse_options
from kvtier.bench.planning import make_plans
from kvtier.bench.progress import Progress, following

CHUNK = "[2026-01-01 00:00:00] Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0, more"


def test_chunks_are_told_as_the_log_grows(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.bench.progress.LOOK_EVERY_S", 0.01)
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


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_prefill_says_how_far_it_is_now_and_then_or_in_a_status(
    model_path, monkeypatch, is_terminal
):
    flags = ["--len", "4k", "--turns", "3", "--model-path", str(model_path)]
    plan = make_plans(parse_options(flags))[1][0].plan
    screen = io.StringIO()

    def shown(every_s: float) -> list[str]:
        """The lines of a turn's prefill, of three chunks; what is outside a turn is not shown."""
        monkeypatch.setattr("kvtier.bench.progress.NOTE_EVERY_S", every_s)
        screen.truncate(0)
        with Progress(quiet=False) as progress:
            progress._console = Console(file=screen, force_terminal=is_terminal, width=120)
            progress._status = progress._console.status("starting") if is_terminal else None
            progress.prefilled(plan, 1024)
            progress.event(plan, {"event": "turn", "turn": 1, "session": 0})
            for _ in range(3):
                progress.prefilled(plan, 1024)
            if is_terminal:
                progress._console.print(progress._status.renderable)
                progress._status = None
        return screen.getvalue().splitlines()

    lines = shown(0.0)
    assert is_terminal or len(lines) == 3
    assert "turn 1/3, 3k tokens read (75% of a context) in 0 s" in lines[-1]
    assert is_terminal or shown(60.0) == []
