"""The outcome of the fault benchmark, what has to hold of it, and its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from benchmarks.common.bars import Bar, at_least
from benchmarks.common.table import new_table
from benchmarks.tier.faults.kinds import Kind
from benchmarks.tier.faults.load import Answers

LEAST_THROUGHPUT = 0.98
# "Within seconds": twice the breaker's longest wait between probes, and what a connection needs to
# be made again.
LONGEST_CLOSING_S = 15.0
HIT = ("put_Tier", "get_Tier")


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class KindOutcome(Frozen):
    """One kind. event: what is counted; details: of which; served: by what kind of a tier.

    during_s:      of the injection, in which `requests` requests were served and `restored`
                   restored
    operations_hit: the engine's puts and gets that asked the tier and failed for it meanwhile
    refused:       that the breaker did not let through; opened: how often it opened
    loading_paid:  whether, after the last fault, the engine believed that loading is faster than
                   computing; where it did not, it asks nothing of the tier for up to a minute
    closed_s:      from the last fault until it was closed; used_s: until a put was stored and a
                   request restored after that. None: not within the time.
    """

    name: str
    event: str
    served: str
    events: int
    details: dict[str, int]
    during_s: float
    requests: int
    requests_per_s: float
    failed: int
    wrong: int
    restored: int
    operations_hit: int
    refused: int
    opened: int
    loading_paid: bool
    closed_s: float | None
    used_s: float | None
    examples: tuple[str, ...]


class Throughput(Frozen):
    """Seconds for `lot_requests` requests, by lot and engine, without a tier and with a dead one.

    answers: turns that were asked twice of an engine without a tier, in other batches; of which so
    many differed.
    """

    lot_requests: int
    none_s: tuple[tuple[float, ...], ...]
    down_s: tuple[tuple[float, ...], ...]
    failed: int
    wrong: int
    answers: int
    answers_that_differ_between_passes: int

    @property
    def ratio(self) -> float | None:
        """Throughput with a dead tier over throughput without one: the median of the lots'."""
        return _median(
            sum(none) / sum(down) for none, down in zip(self.none_s, self.down_s, strict=True)
        )

    @property
    def alike(self) -> float | None:
        """The same of two engines without a tier: what such a ratio can differ from 1 by itself."""
        return _median(none[0] / none[-1] for none in self.none_s)


def _median(ratios: Iterable[float]) -> float | None:
    found = list(ratios)
    return statistics.median(found) if found else None


class Outcome(Frozen):
    """integrity: problems that the engine found with its own accounts; slowest_request_s: under
    faults, from its submission to its last token."""

    throughput: Throughput
    kinds: tuple[KindOutcome, ...]
    integrity: tuple[str, ...]
    slowest_request_s: float


def differing(some: Answers, others: Answers) -> int:
    """Turns that were not answered alike."""
    return sum(
        one != other
        for turns, other_turns in zip(some, others, strict=True)
        for one, other in zip(turns, other_turns, strict=True)
    )


def outcome_of_kind(
    kind: Kind,
    before: Mapping[str, Any],
    healed: Mapping[str, Any],
    after: Mapping[str, Any],
    during_s: float,
    recovered: Mapping[str, Any],
) -> KindOutcome:
    """Return a kind's outcome from the engine's tallies before the first fault, after the last, and
    when it was over.

    Failures and wrong answers count until it was over.
    """
    tiers = before["tier"], healed["tier"]
    requests = healed["finished"] - before["finished"]
    return KindOutcome(
        name=kind.name,
        event=kind.event,
        served=kind.served,
        events=kind.events,
        details=kind.details,
        during_s=during_s,
        requests=requests,
        requests_per_s=requests / during_s,
        failed=after["failed"] - before["failed"],
        wrong=after["wrong"] - before["wrong"],
        restored=_more("restored_requests", *tiers),
        operations_hit=sum(_more(name, *tiers) for name in tiers[1] if name.startswith(HIT)),
        refused=_more("refused_while_open", *tiers),
        opened=_more("breaker_opened", *tiers),
        loading_paid=healed["tier"]["loading_pays"],
        closed_s=recovered["closed_s"],
        used_s=recovered["used_s"],
        examples=tuple(after["examples"]),
    )


def _more(name: str, before: Mapping[str, int], after: Mapping[str, int]) -> int:
    return after.get(name, 0) - before.get(name, 0)


def make_bars(outcome: Outcome, faults: int) -> list[Bar]:
    """Return what has to hold, and whether it does."""
    kinds, throughput = outcome.kinds, outcome.throughput
    fewest = min((kind.events for kind in kinds), default=0)
    failed = sum(kind.failed for kind in kinds) + throughput.failed
    wrong = sum(kind.wrong for kind in kinds) + throughput.wrong
    closed, used = ([one.closed_s for one in kinds], [one.used_s for one in kinds])
    integrity = list(outcome.integrity)
    bars = [
        Bar("faults of each kind", f"{fewest} or more", fewest >= faults, f"at least {faults}"),
        Bar("failed requests", failed, failed == 0),
        Bar("turns with wrong tokens", wrong, wrong == 0),
        _recovery("breaker closed by itself after every kind", closed, LONGEST_CLOSING_S),
        _recovery("puts and restores again after every kind", used),
        Bar("the engine's accounts", integrity or "sound", not integrity),
    ]
    if throughput.ratio is not None:
        bars.append(at_least("throughput, tier down / no tier", throughput.ratio, LEAST_THROUGHPUT))
    return bars


def _recovery(name: str, seconds: Sequence[float | None], longest_s: float = math.inf) -> Bar:
    never = seconds.count(None)
    slowest = max((one for one in seconds if one is not None), default=0.0)
    value = f"within {slowest:.1f} s" + (f", {never} times not at all" if never else "")
    wanted = "" if longest_s == math.inf else f"at most {longest_s:g} s"
    return Bar(name, value, not never and slowest <= longest_s, wanted)


def notes(outcome: Outcome) -> list[str]:
    """Return lines on what two engines without a tier differ by: a run can tell no smaller
    difference."""
    throughput = outcome.throughput
    lines = [
        f"of {throughput.answers} turns asked twice without a tier, "
        f"{throughput.answers_that_differ_between_passes} were answered differently"
    ]
    if throughput.alike is not None:
        lines.append(f"throughput of two engines without a tier: {throughput.alike:.3f}")
    return lines


def make_table(outcome: Outcome) -> Table:
    """A line per kind."""
    columns = ("", "faults", "in", "requests", "failed", "wrong", "restored", "calls hit", "opened",
               "closed after", "in use after")  # fmt: skip
    table = new_table("An engine whose tier fails", columns)
    for kind in outcome.kinds:
        table.add_row(
            kind.name, f"{kind.events}", f"{kind.during_s:.0f} s", f"{kind.requests}",
            f"{kind.failed}", f"{kind.wrong}", f"{kind.restored}", f"{kind.operations_hit}",
            f"{kind.opened}", _seconds(kind.closed_s), _seconds(kind.used_s),
        )  # fmt: skip
    return table


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
