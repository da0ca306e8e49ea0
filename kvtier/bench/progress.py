"""What the user sees while it runs, on stderr: one line per policy and turn, or a live status."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from kvtier.bench.schema import Plan
from kvtier.sizes import format_size


class Progress:
    """Shows events of the running worker; silent when `quiet`. Use as a context manager."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None

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
        match event["event"]:
            case "loading":
                self._doing(f"{name} starting the engine")
            case "ready":
                self.note(f"{name} engine ready after {event['load_s']:.1f} s")
            case "turn":
                what = f"turn {event['turn']}/{work.turns}"
                if work.sessions > 1:
                    what += f" of session {event['session'] + 1}/{work.sessions}"
                if event["turn"] == 1:
                    what += f", reading {format_size(work.context_tokens)} tokens"
                self._doing(f"{name} {what} (since {time.strftime('%H:%M:%S')})")
            case "request" if event["question"] == 0:
                self.note(f"{name} {_line(event, work.sessions)}")

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
