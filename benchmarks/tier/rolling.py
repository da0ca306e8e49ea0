"""Servers behind a router are restarted one after the other while sessions talk: what is lost?

    python -m benchmarks.tier.rolling

Every server gets SIGTERM in its turn: it finishes the requests that it has, and stores the newest
turns in the tier. When it has ended it is started again, and once the router knows it, the next one
is. Sessions talk all the time, with a pause between turns, and try nothing again; the router does.
No request may fail, and no context may be computed again.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.soak.processes import Served
from benchmarks.tier.fleet import (
    TURN_TOKENS,
    Session,
    declare_fleet,
    reason,
    running_fleet,
    wait_until,
)
from kvtier.sizes import format_size

# The pause between a session's turns.
PAUSE_S = 2.0
# The turns of every session, before and after each restart.
TURNS = 2
# The longest that a server may take to end, then it is killed.
GRACE_S = 300


def declare(arguments: Arguments) -> None:
    declare_fleet(arguments)


class Talk:
    """A session that talks in a thread of its own until it is told to stop."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            try:
                self.session.ask(TURN_TOKENS)
            except OSError as error:
                self.failures.append(reason(error))


def run(options: Options) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-rolling-") as name,
        running_fleet(options, Path(name)) as fleet,
    ):
        sessions = fleet.sessions(options.sessions, options.seed)
        for session in sessions:
            session.ask(options.len)
        fleet.wait_until_stored()
        ended_s = []
        with talking(sessions) as talks:
            for server in fleet.servers:
                go_on(talks)
                ended_s.append(restarted(server))
                fleet.wait_until_routed()
            go_on(talks)
    return judged(options, talks, ended_s)


@contextmanager
def talking(sessions: Sequence[Session]) -> Iterator[list[Talk]]:
    """All of them talk meanwhile."""
    talks = [Talk(session) for session in sessions]
    for talk in talks:
        talk.start()
    try:
        yield talks
    finally:
        for talk in talks:
            talk.stop()


def go_on(talks: Sequence[Talk]) -> None:
    """Wait until every session has had so many more turns, or a request has failed."""
    wanted = [len(talk.session.turns) + TURNS for talk in talks]

    def done() -> bool:
        turns = [len(talk.session.turns) for talk in talks]
        went_on = all(now >= then for now, then in zip(turns, wanted, strict=True))
        return went_on or any(talk.failures for talk in talks)

    wait_until(done, "the sessions do not go on")


def restarted(server: Served) -> float:
    """SIGTERM, and a new start once it has ended; returns how long ending took, in seconds."""
    began = time.monotonic()
    server.stop(GRACE_S)
    ended_s = time.monotonic() - began
    server.start()
    return ended_s


def judged(options: Options, talks: Sequence[Talk], ended_s: Sequence[float]) -> Measured:
    turns = [turn for talk in talks for turn in talk.session.turns]
    later = [turn for turn in turns if turn.context_tokens]
    moved = [turn for turn in later if turn.from_tier]
    failures = [failure for talk in talks for failure in talk.failures]
    again = sum(turn.computed_again for turn in later)
    table = new_table(
        f"{len(talks)} sessions of {format_size(options.len)} while two servers are restarted",
        ("turns", "of them restored", "failed", "servers ended in"),
    )
    table.add_row(
        str(len(later)), str(len(moved)), str(len(failures)),
        ", ".join(f"{seconds:.0f} s" for seconds in ended_s),
    )  # fmt: skip
    show(table)
    return Measured(
        {
            "context_tokens": options.len, "sessions": len(talks), "ended_s": list(ended_s),
            "turns": [turn.figures() for turn in turns], "failures": failures,
        },
        [
            Bar("requests that failed", f"{len(failures)}", not failures),
            Bar("turns that were restored", f"{len(moved)}", bool(moved)),
            Bar("tokens of contexts computed again", f"{again}", again == 0),
        ],
    )  # fmt: skip


BENCHMARK = Benchmark(
    "tier.rolling",
    __doc__,
    declare,
    run,
    out=RESULTS / "tier-rolling.json",
    seed=5,
    seeded="of all tokens",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
