"""The bars of a soak, and its tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.common.bars import Bar
from benchmarks.soak.check import Kind
from benchmarks.soak.clients import FORK, KEPT_WHOLE, MOVED
from benchmarks.soak.faults import (
    DISK_FULL,
    EMPTIED,
    LONGEST_CLOSING_S,
    REDIS_KILL,
    RESTART,
    TIER_FAULTS,
    WEIGHTS,
)
from benchmarks.soak.models import LOCALITY
from benchmarks.soak.run import Sample, Seen

KINDS = (KEPT_WHOLE, "computed whole", "short", "prompt logprobs", FORK, MOVED)
FAULTS = (*TIER_FAULTS, REDIS_KILL, WEIGHTS, EMPTIED, RESTART)
# A disk that can be full takes the right to mount a file system.
OPTIONAL_FAULTS = (DISK_FULL,)
# A process that has run for a shorter share of the load says nothing about its memory.
LONG_LIFE = 0.25


def growth(samples: Sequence[Sample]) -> float | None:
    """The growth of one process's memory: the median of the last quarter of its life over that of
    the second quarter, less 1; None for too few samples."""
    values = [sample.resident_bytes for sample in samples]
    quarter = len(values) // 4
    if quarter < 3:
        return None
    early, late = values[quarter : 2 * quarter], values[-quarter:]
    return statistics.median(late) / statistics.median(early) - 1


def memory(samples: Sequence[Sample], load_s: float) -> dict[str, dict[str, Any]]:
    """Return by process, of the longest-lived start of each, how long it was watched, its median
    resident bytes at the end, and its growth, None where it did not live long enough."""
    lives: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.name, sample.start), []).append(sample)
    found: dict[str, dict[str, Any]] = {}
    for (name, start), life in lives.items():
        watched_s = life[-1].at_s - life[0].at_s
        if name in found and found[name]["watched_s"] >= watched_s:
            continue
        late = statistics.median(one.resident_bytes for one in life[-max(1, len(life) // 4) :])
        long = watched_s >= LONG_LIFE * load_s
        found[name] = {
            "start": start,
            "watched_s": round(watched_s, 1),
            "resident_bytes": int(late),
            "growth": growth(life) if long else None,
        }
    return found


def make_outcome(seen: Seen) -> dict[str, Any]:
    """Everything for the JSON."""
    tally, checker = seen.tally, seen.checker
    return {
        "start_up_s": round(seen.start_up_s, 1),
        "load_s": round(seen.load_s, 1),
        "requests": {
            "asked": tally.asked,
            "finished": tally.finished,
            "failed": tally.failed,
            "given_up": tally.given_up,
        },
        "actions": dict(tally.actions),
        "answers": dict(tally.answers),
        "compared": {kind: asdict(found) for kind, found in checker.kinds.items()},
        "compared_by_weights": dict(checker.versions),
        "compressed_shown": asdict(checker.compressed),
        "weights_of_the_reference_changed": checker.switches,
        "faults": dict(seen.damage.done),
        "breaker_closed_s": seen.damage.closing_s,
        "tier_used_again": seen.used_again,
        "looks_at_accounts": seen.damage.looks,
        "problems": seen.damage.problems,
        "memory": memory(seen.samples, seen.load_s),
        "tier": seen.tier,
        "engines": [engine_counters(state) for state in seen.states],
        "examples": [*tally.examples, *checker.examples],
    }


def engine_counters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine did with its tree and its tier, at the end of one of its lives."""
    tier = state["tier"]
    numbers = {name: value for name, value in tier.items() if not isinstance(value, dict)}
    tree = ("engine", "rule", "compressed_nodes", "variants", "compacted_tokens")
    return {**{name: state[name] for name in tree}, **numbers, "integrity": state["integrity"]}


def make_bars(outcome: Mapping[str, Any], most_growth: float) -> list[Bar]:
    """Return what has to hold, and whether it does. most_growth: of any process's memory."""
    kinds = {kind: Kind(**found) for kind, found in outcome["compared"].items()}
    wrong = sum(kind.wrong_tokens for kind in kinds.values())
    off = sum(kind.wrong_logprobs for kind in kinds.values())
    failed = outcome["requests"]["failed"]
    finished = outcome["requests"]["finished"]
    rules = {life["rule"] for life in outcome["engines"]}
    # The KV of engines that score it has other names than that of one that does not.
    wanted = [kind for kind in KINDS if kind != MOVED or LOCALITY in rules]
    compared = {kind: kinds[kind].compared if kind in kinds else 0 for kind in wanted}
    done = outcome["faults"]
    faults = {one: done.get(one, 0) for one in FAULTS if one in done or one not in OPTIONAL_FAULTS}
    closed = {fault: max(taken) for fault, taken in outcome["breaker_closed_s"].items() if taken}
    used = outcome["tier_used_again"].values()
    engines = outcome["engines"]
    restored: Counter[str] = Counter()
    for engine in engines:
        restored[engine["engine"]] += engine.get("restored_requests", 0)
    problems = [*outcome["problems"], *(one for engine in engines for one in engine["integrity"])]
    tier = outcome["tier"]
    if not 0 <= tier["used_bytes"] <= tier["capacity_bytes"]:
        problems.append(f"the tier uses {tier['used_bytes']} of {tier['capacity_bytes']} bytes")
    grown = {name: one["growth"] for name, one in outcome["memory"].items()}
    known = {name: value for name, value in grown.items() if value is not None}
    bars = [
        ("answers with a wrong token", wrong, wrong == 0),
        ("answers with a wrong log-probability", off, off == 0),
        ("failed requests", f"{failed} of {failed + finished}", failed == 0 and finished > 0),
        ("compared, of each kind", compared, min(compared.values()) > 0),
        ("under both weights", outcome["compared_by_weights"],
         len(outcome["compared_by_weights"]) == 2),
        ("faults, of each kind", faults, min(faults.values()) > 0),
        ("requests restored from the tier", dict(restored),
         len(restored) == 2 and min(restored.values()) > 0),
        (f"breaker closed by itself, within {LONGEST_CLOSING_S:g} s",
         {fault: f"{taken:.1f} s" for fault, taken in closed.items()},
         bool(closed) and max(closed.values()) <= LONGEST_CLOSING_S),
        ("tier used again after its last fault", outcome["tier_used_again"],
         all(one["put"] for one in used) and any(one["restored_requests"] for one in used)),
        ("accounts", problems or "sound", not problems),
        ("memory's growth", {name: f"{value:+.1%}" for name, value in known.items()},
         {"engine-a", "engine-b", "tier"} <= set(known) and max(known.values()) <= most_growth),
    ]  # fmt: skip
    return [Bar(name, value, bool(met)) for name, value, met in bars]
