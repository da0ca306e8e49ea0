"""`kvtier trace`: what a log of requests says (`kvtier serve --request-log FILE`).

kvtier trace explain FILE                  why tokens were computed again, session by session
kvtier trace explain FILE --session ID     ... request by request of one session
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import UsageError
from kvtier.sizes import parse_count
from kvtier.traffic.request_log import Logged, Sum, read_log, sums_of

if TYPE_CHECKING:
    from rich.table import Table

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SHOWN_SESSIONS, SHOWN_REQUESTS = "20", "10"


def add_trace_parser(subparsers: Subparsers) -> None:
    """Add `trace`; parsed arguments carry the handler as `handler`."""
    parser = subparsers.add_parser("trace", help="say what a log of requests tells")
    actions = parser.add_subparsers(dest="trace", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain", help="why tokens of prompts were computed again, session by session"
    )
    explain.add_argument("file", type=Path, metavar="FILE", help="of `serve --request-log`")
    explain.add_argument("--session", metavar="ID", help="this session alone, request by request")
    explain.add_argument(
        "--sessions", default=SHOWN_SESSIONS, metavar="N",
        help="sessions that are shown, those with most tokens computed again (%(default)s)",
    )  # fmt: skip
    explain.add_argument(
        "--requests", default=SHOWN_REQUESTS, metavar="N",
        help="requests that are shown, likewise (%(default)s)",
    )  # fmt: skip
    explain.add_argument("--json", action="store_true", help="print all of it as JSON")
    explain.set_defaults(handler=explain_log)


def explain_log(options: argparse.Namespace) -> int:
    """`kvtier trace explain`. Raises UsageError for bad options, TracesFileError for a file that is
    no such log."""
    most_sessions = parse_count(options.sessions, "--sessions", least=0)
    most_requests = parse_count(options.requests, "--requests", least=0)
    requests = list(read_log(options.file))
    if options.session is not None:
        requests = [one for one in requests if one.session == options.session]
        if not requests:
            raise UsageError("--session", f"a session of {options.file}", options.session)
    every, sessions = sums_of(requests)
    if options.json:
        print(json.dumps(_document(every, sessions, requests), indent=2))
        return 0
    reasons = [reason for reason, _ in every.recomputed.most_common()]
    _print(_sums_table(every, sessions, most_sessions, reasons))
    if options.session is not None:
        title, shown = "its requests", requests
    else:
        title = "requests with most tokens computed again"
        shown = heapq.nlargest(most_requests, requests, key=lambda one: one.recomputed_tokens)
        shown = [one for one in shown if one.recomputed_tokens]
    if shown:
        _print(_requests_table(title, shown))
    return 0


def _print(table: Table) -> None:
    """Print a table at its own width: no number or name may be cut."""
    from rich.console import Console

    console = Console()
    wide = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.width = max(console.width, wide)
    console.print(table)


def _document(
    every: Sum, sessions: dict[str | None, Sum], requests: Sequence[Logged]
) -> dict[str, Any]:
    def told(one: Sum) -> dict[str, Any]:
        return {**vars(one), "new": one.new}

    return {
        "all": told(every),
        "sessions": [{"session": name, **told(one)} for name, one in sessions.items()],
        "requests": [vars(one) for one in requests],
    }


def _sums_table(
    every: Sum, sessions: dict[str | None, Sum], most: int, reasons: Sequence[str]
) -> Table:
    """All requests, and the sessions that computed most again; a column for each reason."""
    shown = heapq.nlargest(most, sessions.items(), key=lambda one: one[1].recomputed_tokens)
    left = f", {len(shown):,} of {len(sessions):,}" if len(shown) < len(sessions) else ""
    table = _table(
        f"tokens of prompts, by session{left}",
        ("session", "requests", "tokens in", "hit", "restored", "new", "computed again", *reasons),
    )
    for name, one in [("all", every), *shown]:
        cells = [one.requests, one.tokens, one.hit, one.restored, one.new, one.recomputed_tokens]
        cells += [one.recomputed[reason] for reason in reasons]
        table.add_row(name or "(no name)", *(f"{number:,}" for number in cells))
    return table


def _requests_table(title: str, requests: Sequence[Logged]) -> Table:
    head = ("line", "session", "at", "tokens in", "hit", "restored", "computed", "again")
    table = _table(title, (*head, "changed at"))
    for one in requests:
        reasons = sorted(one.recomputed.items(), key=lambda reason: -reason[1])
        table.add_row(
            f"{one.line:,}",
            one.session or "(no name)",
            f"{one.timestamp_ms / 1000:,.1f} s",
            *(f"{number:,}" for number in (one.tokens, one.hit, one.restored, one.computed)),
            ", ".join(f"{tokens:,} {reason}" for reason, tokens in reasons),
            "" if one.changed_at is None else f"{one.changed_at:,}",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in ("session", "again") else "right")
    return table
