"""The effect of a failing tier on an engine that serves: nothing, but that it has to compute more.

    python -m benchmarks.tier.faults --faults 1000

The real engine serves many short sessions, several at a time, with room for less than half of the
visits that are under way: every turn leaves for a tier and comes back from it. Then the tier fails,
one kind of fault after the other, again and again, under this load:

    kill       kill -9 of the service, and a restart
    stop       SIGSTOP and SIGCONT, some for longer than the engine's deadlines
    slow       calls that take ten times as long
    bit-flip   payloads with flipped bits
    disk-full  a disk without room
    reset      connections that are reset

What is counted as one fault is said in the table's source (tier/faults/kinds.py) and in the JSON.
Nothing is compressed, so every turn's greedy tokens are known: an engine without a tier said them
before, in the same run. After each kind the tier is well again, and the engine has to find that
out: its breaker closes, puts are stored, and sessions are restored, without a restart.

Throughput with a tier that is down all the time is compared with that of engines that have none,
two of each, on the same requests. They take turns every second or so, so that whatever else the
machine does meets all of them. Not in it: the first seconds of an outage, in which turns are still
copied for a tier that may be back soon (HOLD_S in kvtier/tier/link/link.py).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.remote import Remote
from benchmarks.common.table import show
from benchmarks.tier.faults.kinds import KINDS, Kind, Where
from benchmarks.tier.faults.load import (
    LONGEST,
    SHORTEST,
    TURNS,
    Answers,
    LoadSession,
    make_sessions,
)
from benchmarks.tier.faults.processes import free_address
from benchmarks.tier.faults.remote import (
    CLIENTS,
    DEVICE_TOKENS,
    ENGINE_THREADS,
    SPAN_TOKENS,
    TIMEOUT_S,
    VISITS,
    running_engine,
)
from benchmarks.tier.faults.report import (
    KindOutcome,
    Outcome,
    Throughput,
    differing,
    make_bars,
    make_table,
    notes,
    outcome_of_kind,
)
from kvtier.bench.runner import terminated_as_interrupted

SESSIONS = 24
# The lots of a round, of CLIENTS requests each.
ROUND_LOTS = 10
# The engines of each arm of the throughput: two processes that do the same differ by a few percent.
ENGINES = 2
# After the last fault of a kind, for the engine to use its tier again: it remembers for a minute
# that loading was slower than computing.
RECOVERY_S = 75.0
LOOK_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """The command; a SIGTERM ends all engines and services, too."""
    with terminated_as_interrupted():
        return BENCHMARK.main(argv)


def declare(arguments: Arguments) -> None:
    arguments.model()
    arguments.whole("--faults", 1000, "of each kind")
    arguments.add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(all)")
    arguments.whole("--sessions", SESSIONS, "different ones")
    arguments.whole("--rounds", 8, "of throughput", least=0)
    arguments.add("--tier-patience-s", type=float, help="of the engine whose tier fails (measured)")


def run(options: Options) -> Measured:
    """Serve without a tier, and then with one that fails."""
    sessions = make_sessions(options.sessions, options.seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-faults-") as name:
        answers, throughput = without_a_tier(options, sessions, Path(name))
        kinds, last = under_faults(options, sessions, answers, Path(name))
    outcome = Outcome(
        throughput=throughput,
        kinds=kinds,
        integrity=tuple(last["integrity"]),
        slowest_request_s=last["slowest_s"],
    )
    show(make_table(outcome), notes(outcome))
    settings = {
        "model": options.model_path.name,
        "faults_of_each_kind": options.faults,
        "sessions": options.sessions,
        "context_tokens": [SHORTEST, LONGEST],
        "turns": TURNS,
        "requests_at_a_time": CLIENTS,
        "visits_under_way": VISITS,
        "engine_threads": ENGINE_THREADS,
        "device_tokens": DEVICE_TOKENS,
        "tier_span_tokens": SPAN_TOKENS,
        "tier_timeout_s": TIMEOUT_S,
        "tier_patience_s": options.tier_patience_s,
        "seed": options.seed,
    }
    figures = {"settings": settings, "outcome": outcome.model_dump()}
    return Measured(figures, make_bars(outcome, options.faults))


def without_a_tier(
    options: Options, sessions: Sequence[LoadSession], folder: Path
) -> tuple[Answers, Throughput]:
    """Return what every turn has to say, and the throughput of the same requests with no tier and a
    dead one."""
    arms: tuple[Mapping[str, str], ...] = ({}, {"TIER": free_address()})
    with ExitStack() as stack:
        engines = []
        for number, settings in enumerate(arms * ENGINES if options.rounds else arms[:1]):
            own = folder / f"engine-{number}"
            own.mkdir()
            running = running_engine(own, options.model_path, sessions, settings)
            engines.append(stack.enter_context(running))
        answers: Answers = engines[0].tell("references", salt="first")["answers"]
        again: Answers = engines[0].tell("references", salt="again")["answers"]
        for engine in engines:
            engine.tell("take", answers=answers)
        # The first round warms up; it takes longer than the link holds puts (HOLD_S) on few cores.
        rounds = options.rounds and options.rounds + 1
        lots = in_turns(engines, rounds, options.seed)[ROUND_LOTS:]
    return answers, Throughput(
        lot_requests=CLIENTS,
        none_s=tuple(tuple(one["seconds"] for one in said[::2]) for said in lots),
        down_s=tuple(tuple(one["seconds"] for one in said[1::2]) for said in lots),
        failed=sum(one["failed"] for said in lots for one in said),
        wrong=sum(one["wrong"] for said in lots for one in said),
        answers=sum(len(turns) for turns in answers),
        answers_that_differ_between_passes=differing(answers, again),
    )


def in_turns(engines: Sequence[Remote], rounds: int, seed: int) -> list[list[dict[str, Any]]]:
    """Return what every engine said of every lot, in the order given: all get the same requests,
    one engine and one lot at a time, in every other lot the last engine first."""
    found = []
    for number in range(rounds):
        for engine in engines:
            engine.tell("begin", seed=seed + number)
        for lot in range(ROUND_LOTS):
            said = {}
            for index in list(range(len(engines)))[:: 1 if lot % 2 == 0 else -1]:
                said[index] = engines[index].tell("lot")
            found.append([said[index] for index in range(len(engines))])
    return found


def under_faults(
    options: Options, sessions: Sequence[LoadSession], answers: Answers, folder: Path
) -> tuple[tuple[KindOutcome, ...], dict[str, Any]]:
    """Every kind, in one engine that serves through all of it; and its last tally."""
    mine = folder / "faults"
    mine.mkdir()
    address = free_address()
    outcomes = []
    settings = {"TIER": address}
    if options.tier_patience_s is not None:
        settings["TIER_PATIENCE_S"] = str(options.tier_patience_s)
    with running_engine(mine, options.model_path, sessions, settings) as engine:
        engine.tell("take", answers=answers)
        engine.tell("start", seed=options.seed)
        for number, name in enumerate(options.kinds):
            own = folder / name
            own.mkdir()
            where = Where(
                address=address,
                folder=own,
                refused=lambda: engine.tell("tally")["tier"].get("put_TierExhaustedError", 0),
                used=lambda: wait_for_use(engine)["used_s"] is not None,
                deadline_s=TIMEOUT_S,
                seed=options.seed + number,
            )
            outcomes.append(one_kind(KINDS[name](where), engine, options.faults))
            print(progress(outcomes[-1]), file=sys.stderr, flush=True)
        last = engine.tell("stop")
    return tuple(outcomes), last


def progress(kind: KindOutcome) -> str:
    return (
        f"{kind.name}: {kind.events} in {kind.during_s:.0f} s, {kind.failed} requests failed, "
        f"{kind.wrong} wrong, {kind.restored} restored meanwhile, in use again after {kind.used_s}"
    )


def one_kind(kind: Kind, engine: Remote, faults: int) -> KindOutcome:
    """Serve a tier, wait until it is used, let it fail, and see how long it takes to be back."""
    with kind.running():
        before = wait_for_use(engine)
        began = time.monotonic()
        kind.inject(faults)
        during = time.monotonic() - began
        healed = engine.tell("tally")
        recovered = wait_for_use(engine, healed)
        after = recovered["tally"]
    return outcome_of_kind(kind, before["tally"], healed, after, during, recovered)


def wait_for_use(engine: Remote, since: dict[str, Any] | None = None) -> dict[str, Any]:
    """Wait until the breaker is closed, and a put was stored and a request restored after that.

    closed_s, used_s: how long that took, None where it did not happen within RECOVERY_S.
    """
    tally = since or engine.tell("tally")
    began = time.monotonic()
    closed_s = used_s = None
    counted = tally["tier"]
    while used_s is None and time.monotonic() - began < RECOVERY_S:
        time.sleep(LOOK_S)
        tally = engine.tell("tally")
        tier, now = tally["tier"], time.monotonic() - began
        if not tier["healthy"]:
            closed_s = None
            continue
        if closed_s is None:
            closed_s, counted = now, tier
        if all(tier.get(one, 0) > counted.get(one, 0) for one in ("put", "restored_requests")):
            used_s = now
    return {"tally": tally, "closed_s": closed_s, "used_s": used_s}


BENCHMARK = Benchmark(
    "tier.faults",
    __doc__,
    declare,
    run,
    out=RESULTS / "tier-faults.json",
    seeded="of sessions, load and faults",
)

if __name__ == "__main__":
    sys.exit(main())
