"""Two servers behind SGLang's router, over one tier: sessions stay where they are, and when a
server dies its sessions go on at the other, restored.

    python -m benchmarks.tier.router

Sessions hold their turns through the router; then one server is killed, and every session holds
another turn. With `--deaths N` it is started again, and the other one is killed next. No request
may fail, no context may be computed again, and all answers have to be those of a server to which
nothing happened.

    kept in place    later turns whose context the server still had on the device
    moved            turns of the killed server's sessions at the other one: the context comes from
                     the tier, beside what computing it took when it was new
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.bars import Bar
from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from benchmarks.tier.fleet import (
    TURN_TOKENS,
    Session,
    Turn,
    reason,
    running_fleet,
)
from kvtier.sizes import format_size


def declare(arguments: Arguments) -> None:
    arguments.model()
    arguments.size("--len", "4k", "context tokens of a session")
    arguments.whole("--sessions", 8, "sessions", least=2)
    arguments.add(
        "--patience-s", type=float, metavar="S",
        help="seconds that servers wait for the tier, whatever they measured (as they measured)",
    )  # fmt: skip
    arguments.whole("--turns", 3, "turns of each before a server is killed", least=2)
    arguments.whole("--deaths", 1, "times that a server is killed")


def run(options: Options) -> Measured:
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-router-") as name,
        running_fleet(options, Path(name)) as fleet,
    ):
        sessions = fleet.sessions(options.sessions, options.seed)
        for session in sessions:
            session.ask(options.len)
        for _ in range(options.turns - 1):
            for session in sessions:
                session.ask(TURN_TOKENS)
        for death in range(options.deaths):
            if death:
                fleet.servers[1 - death % 2].start()
                fleet.wait_until_routed()
            fleet.wait_until_stored()
            fleet.servers[death % 2].kill()
            for session in sessions:
                try:
                    session.ask(TURN_TOKENS)
                except OSError as error:
                    failures.append(f"death {death}, {session.name}: {reason(error)}")
        for server in fleet.servers:
            server.kill()
        different = fleet.undisturbed(sessions)
    return judged(options, sessions, failures, different)


def judged(
    options: Options, sessions: Sequence[Session], failures: Sequence[str], different: int
) -> Measured:
    """failures: requests after the death; different: answers of an undisturbed server."""
    before = options.turns
    first = [session.turns[0] for session in sessions]
    later = [turn for session in sessions for turn in session.turns[1:before]]
    after = [turn for session in sessions for turn in session.turns[before:]]
    stayed = [turn for turn in later if turn.cached_tokens and not turn.from_tier]
    moved = [turn for turn in after if turn.from_tier]
    rows = {
        "first, computed": first,
        "later, context on the device": stayed,
        "after the death, session stays": [turn for turn in after if not turn.from_tier],
        "after the death, restored elsewhere": moved,
    }
    deaths = options.deaths
    killed = "one of them killed" if deaths == 1 else f"killed in turn {deaths} times"
    title = f"{len(first)} sessions of {format_size(options.len)}, two servers, {killed}"
    table = new_table(title, ("turns", "number", "median time to first token"))
    for label, turns in rows.items():
        table.add_row(label, str(len(turns)), f"{median_ms(turns):.0f} ms")
    show(table)
    # Later deaths find contexts that have grown.
    soon = [turn for turn in after[: len(sessions)] if turn.from_tier]
    computed, restored = median_ms(first), median_ms(soon)
    figures = {
        "context_tokens": options.len,
        "sessions": len(first),
        "deaths": options.deaths,
        **{
            name: [turn.figures() for turn in turns]
            for name, turns in (("first", first), ("later", later), ("after", after))
        },
        "computed_ms": computed,
        "restored_ms": restored,
        "failures": list(failures),
    }
    again = sum(turn.computed_again for turn in (*later, *after))
    times = f"{restored:.0f} ms against {computed:.0f} ms"
    answers = sum(len(session.turns) for session in sessions)
    return Measured(
        figures,
        [
            Bar("later turns in place", f"{len(stayed)} of {len(later)}", stayed == later),
            Bar(
                "sessions that moved", f"{len(moved)} of {len(after)}", 0 < len(moved) < len(after)
            ),
            Bar("requests that failed", f"{len(failures)}", not failures),
            Bar("tokens of contexts computed again", f"{again}", again == 0),
            Bar(
                "answers unlike an undisturbed server's",
                f"{different} of {answers}",
                different == 0,
            ),
            Bar("restored below computed", times, restored < computed),
        ],
    )


def median_ms(turns: Sequence[Turn]) -> float:
    """The median time to the first token; not a number where there is no turn."""
    return statistics.median(turn.ttft_ms for turn in turns) if turns else float("nan")


BENCHMARK = Benchmark(
    "tier.router", __doc__, declare, run, out=RESULTS / "tier-router.json", seed=5
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
