"""The display that the user sees while it runs, on stderr: a line per policy and turn, and how far
a long prefill is, every half minute or in a live status."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from kvtier.bench.schema import Plan, Workload
from kvtier.sizes import format_size

# A prefill says how far it is this often where there is no live status.
NOTE_EVERY_S = 30.0
# Lines of a replay there.
NOTES_OF_A_REPLAY = 10
# SGLang logs every chunk of a prefill while it goes on; the worker's own events come when it is
# over, and a first turn of 128k takes minutes on a CPU.
PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")
LOOK_EVERY_S = 0.5


@dataclass
class Reading:
    """A turn whose prompt is being computed. tokens: computed so far; noted: when that was last
    said without a live status. Times are time.monotonic()."""

    what: str
    began: float
    noted: float
    tokens: int = 0


class Progress:
    """Shows what the running worker does; silent when `quiet`. Use as a context manager."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None
        self._reading: Reading | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def event(self, plan: Plan, event: dict[str, Any]) -> None:
        """Show one event of a worker."""
        name = f"[bold]{plan.policy:7}[/bold]"
        work = plan.workload
        sessions = work.sessions if isinstance(work, Workload) else 1
        match event["event"]:
            case "loading":
                self._doing(f"{name} starting the engine")
            case "ready":
                self.note(f"{name} engine ready after {event['load_s']:.1f} s")
            case "turn":
                what = f"turn {event['turn']}"
                if isinstance(work, Workload):
                    what += f"/{work.turns}"
                if sessions > 1:
                    what += f" of session {event['session'] + 1}/{sessions}"
                now = time.monotonic()
                self._reading = Reading(what, now, now)
                self._doing(f"{name} {what}")
            case "scoring":
                self._reading = None
                self._doing(f"{name} scoring the right answers of {event['questions']} questions")
            case "request" if event["question"] == 0:
                self._reading = None
                self.note(f"{name} {_line(event, sessions)}")
            case "replayed":
                self._replayed(name, event)

    def prefilled(self, plan: Plan, tokens: int) -> None:
        """A chunk of so many tokens of the turn under way is computed; from any thread."""
        reading, now = self._reading, time.monotonic()
        if reading is None or not isinstance(plan.workload, Workload):
            return
        reading.tokens += tokens
        done, context = reading.tokens, plan.workload.context_tokens
        text = (
            f"[bold]{plan.policy:7}[/bold] {reading.what}, {format_size(done)} tokens read "
            f"({min(done / context, 1):.0%} of a context) in {now - reading.began:.0f} s"
        )
        if self._status is not None:
            self._doing(text)
        elif now - reading.noted >= NOTE_EVERY_S:
            reading.noted = now
            self.note(text)

    def _replayed(self, name: str, event: dict[str, Any]) -> None:
        done, total = event["done"], event["of"]
        text = f"{name} {done} of {total} requests answered, ttft {event['ttft_ms']:,.0f} ms"
        if self._status is not None and done < total:
            self._doing(text)
        elif done % max(1, total // NOTES_OF_A_REPLAY) == 0 or done == total:
            self.note(text)

    def note(self, text: str) -> None:
        """Show a remark."""
        self._console.print(text, soft_wrap=True)

    def _doing(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)


def _line(event: dict[str, Any], sessions: int) -> str:
    who = f"session {event['session'] + 1:>2} " if sessions > 1 else ""
    recall = "" if event["recall"] is None else f"  recall {event['recall']:.2f}"
    return (
        f"{who}turn {event['turn']}  ttft {event['ttft_ms']:9.1f} ms  "
        f"cached {event['cached_tokens']:>7}/{event['prompt_tokens']}{recall}"
    )


@contextmanager
def following(log: Path, tell: Callable[[int], None]) -> Iterator[None]:
    """Have `tell` hear from a thread, within the block, how many new tokens each chunk has
    computed."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(log, tell, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(log: Path, tell: Callable[[int], None], stop: threading.Event) -> None:
    rest = ""
    with log.open(errors="replace") as lines:
        while not stop.wait(LOOK_EVERY_S):
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                found = PREFILL.search(line)
                if found is not None:
                    tell(int(found[1]))
