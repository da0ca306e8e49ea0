"""Logs of served requests (`kvtier serve --request-log FILE`), for `kvtier trace explain`.

A line is one request in Mooncake's format (formats.py), with an object of kvtier's beside:

    "kvtier": {"hit": 1024, "restored": 0, "computed": 1386, "recomputed": {"evicted": 900},
               "changed_at": 1024, …}

Tokens of its prompt that were there, came from a tier and were computed; of the last, those that
had been computed before, by why they were again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import TracesFileError, UsageError
from kvtier.reading import read_json_lines


@dataclass(frozen=True)
class Logged:
    """One request. line: of the file; recomputed: tokens by reason; changed_at: the position at
    which the prompt leaves the context that has most of what follows."""

    line: int
    session: str | None
    timestamp_ms: float
    tokens: int
    hit: int
    restored: int
    computed: int
    recomputed: dict[str, int]
    changed_at: int | None = None

    @property
    def recomputed_tokens(self) -> int:
        return sum(self.recomputed.values())


@dataclass
class Sum:
    """The sums over several requests. tokens: of their prompts."""

    requests: int = 0
    tokens: int = 0
    hit: int = 0
    restored: int = 0
    computed: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)

    def add(self, request: Logged) -> None:
        self.requests += 1
        for name in ("tokens", "hit", "restored", "computed"):
            setattr(self, name, getattr(self, name) + getattr(request, name))
        self.recomputed.update(request.recomputed)

    @property
    def recomputed_tokens(self) -> int:
        return self.recomputed.total()

    @property
    def new(self) -> int:
        """Tokens that were computed for the first time."""
        return self.computed - self.recomputed_tokens


def read_log(file: Path, argument: str = "FILE") -> Iterator[Logged]:
    """The requests of a log, in the order in which they ended.

    Raises UsageError naming `argument` for a file that has none, TracesFileError naming line and
    field where it is no such log.
    """
    number = 0
    for number, (where, fields) in enumerate(
        read_json_lines(file, argument, TracesFileError), start=1
    ):
        yield _logged(number, where, fields)
    if not number:
        raise UsageError(argument, "a log of at least one request", str(file))


def _logged(number: int, where: str, fields: dict[str, Any]) -> Logged:
    told, session = fields.get("kvtier"), fields.get("session_id")
    if not isinstance(told, dict):
        raise TracesFileError(f"{where}: kvtier", "a line of `kvtier serve --request-log`", told)
    if session is not None and not isinstance(session, str):
        raise TracesFileError(f"{where}: session_id", "text", session)
    reasons = told.get("recomputed")
    if not isinstance(reasons, dict):
        raise TracesFileError(f"{where}: kvtier.recomputed", "tokens by reason", reasons)
    changed_at = told.get("changed_at")
    return Logged(
        line=number,
        session=session,
        timestamp_ms=_tokens(f"{where}: timestamp", fields.get("timestamp")),
        tokens=_tokens(f"{where}: input_length", fields.get("input_length")),
        hit=_tokens(f"{where}: kvtier.hit", told.get("hit")),
        restored=_tokens(f"{where}: kvtier.restored", told.get("restored")),
        computed=_tokens(f"{where}: kvtier.computed", told.get("computed")),
        recomputed={
            reason: _tokens(f"{where}: kvtier.recomputed.{reason}", tokens)
            for reason, tokens in reasons.items()
        },
        changed_at=None
        if changed_at is None
        else _tokens(f"{where}: kvtier.changed_at", changed_at),
    )


def _tokens(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TracesFileError(where, "a whole number of at least 0", value)
    return value


def sums_of(requests: Iterable[Logged]) -> tuple[Sum, dict[str | None, Sum]]:
    """Return the sum of all requests, and of each session, in the order in which first requests
    ended."""
    every, sessions = Sum(), dict[str | None, Sum]()
    for request in requests:
        every.add(request)
        sessions.setdefault(request.session, Sum()).add(request)
    return every, sessions
