"""The gain to a fleet if agents said what they know of their sessions.

    python -m benchmarks.planning.hints --trace claude_code_sessions.jsonl.gz

Each hint is simulated as if all sessions gave it without an error, which bounds what it can gain,
beside the same traffic without hints. A hint is worth building if it raises the hit rate by .02 or
lowers TTFT's p90 by a tenth in at least two settings that one would run. The gain is an average
over the seeds, and has to be more than two standard errors. One would run the settings of kvtier
whose p90 without hints is at most 10 s. Recorded sessions have no common prefix; described tenants
with system prompts of their own do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from kvtier.plan.answers import Slo
from kvtier.plan.hints import Hints, away_s
from kvtier.plan.simulate import Outcome, simulate
from kvtier.plan.study import Question, replicas_of
from kvtier.traffic.described import Description, make_traffic
from kvtier.traffic.formats import read_trace
from kvtier.traffic.prefixes import Traffic, copies, traffic_of

SPREAD_S, LEAST_HIT, LEAST_TTFT, RUN_S = 1800.0, 0.02, 0.1, 10.0
LOW_RETENTION, RETENTION = 0.1, 0.25
POLICIES = ("full", "kvtier", "kvtier-tier")
Setting = tuple[str, str | None, int]
MEANS = ("hit", "computed_tokens", "ttft_p50_s", "ttft_p90_s", "refused")
# A setting is a policy, the dtype of kept entries, and a number of H100s.
SETTINGS: tuple[Setting, ...] = (
    *product(POLICIES[:1], (None,), (1, 2)),
    *product(POLICIES[1:2], (None,), (1, 2, 4)),
    *product(POLICIES[2:], (None,), (1, 2)),
    *product(POLICIES[1:], ("int4",), (1, 2)),
)
INSTANT = dict.fromkeys(
    ("tier_latency_s", "tier_token_s", "tier_shared_token_s", "tier_write_token_s"), 0.0
)
TENANTS, TENANT = 24, Description(
    sessions=40, sessions_per_s=0.01, turns=6, shared_tokens=16384, context_tokens=8192,
    turn_tokens=1024, output_tokens=256, think_s=60,
)  # fmt: skip


class Told(NamedTuple):
    """The hints of one row. retention: that of the plan; instant: fetching from the tier takes no
    time; named: the sessions that the hints are about, where they are not about all; policies:
    those that it is tried on."""

    hints: Hints | None = None
    retention: float = RETENTION
    instant: bool = False
    named: npt.NDArray[np.bool_] | None = None
    policies: tuple[str, ...] = POLICIES


def told(traffic: Traffic, seed: int) -> dict[str, Told]:
    """Return the rows for recorded sessions. Sessions that are named are drawn from the seed."""
    count = traffic.num_sessions
    order = np.random.default_rng(seed).permutation(count)
    fifth = np.isin(np.arange(count + 1), order[: count // 5])
    low = np.isin(np.arange(count + 1), order[count // 2 :])
    less = Hints(retention=np.where(low, LOW_RETENTION, RETENTION))
    away = away_s(traffic)
    longest = np.zeros(count + 1)
    np.maximum.at(longest, traffic.session, traffic.input_tokens)
    rough = away * np.exp(np.random.default_rng(seed).standard_normal(len(away)))
    return {
        "nothing": Told(),
        "done": Told(Hints(away_s=np.where(np.isinf(away), away, np.nan))),
        "comes back at": Told(Hints(away_s=away)),
        "comes back about then": Told(Hints(away_s=rough)),
        "prefetched": Told(instant=True, policies=POLICIES[2:]),
        "comes back at, prefetched": Told(Hints(away_s=away), instant=True, policies=POLICIES[2:]),
        "keep these": Told(Hints(priority=fifth.astype(float)), named=fifth[:-1]),
        "low priority": Told(less, named=low[:-1], policies=POLICIES[1:]),
        "(no hint: less for all)": Told(
            retention=(LOW_RETENTION + RETENTION) / 2, policies=POLICIES[1:]
        ),
        "(no hint: long ones last)": Told(Hints(priority=longest)),
    }


def told_tenants(traffic: Traffic) -> dict[str, Told]:
    """Return the rows for tenants: without hints, and with shared prefixes evicted last."""
    pinned = np.append(np.zeros(traffic.num_sessions), 1.0)
    return {"nothing": Told(), "shared by many": Told(Hints(priority=pinned))}


def declare(arguments: Arguments) -> None:
    arguments.add("--trace", required=True, metavar="FILE", help="sessions of agents")
    arguments.whole("--seeds", 20, "traffics, from --seed on", least=2)


def run(options: Options) -> Iterator[Measured]:
    """Simulate every row with every seed. Yields the rows so far after each, to be written."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        recorded = traffic_of(read_trace(Path(options.trace), spread_s=SPREAD_S, seed=seed))
        tenants = copies(make_traffic(TENANT, seed), TENANTS, SPREAD_S, seed)
        for name, traffic, rows in (
            ("recorded", recorded, told(recorded, seed)),
            ("tenants", tenants, told_tenants(tenants)),
        ):
            for setting, (hint, one) in product(SETTINGS, rows.items()):
                if setting[0] in one.policies:
                    measured = measure(traffic, setting, one)
                    found.setdefault((name, *setting, hint), []).append(measured)
        yield Measured({"rows": judged(found)})
    show_rows(judged(found))


def measure(traffic: Traffic, setting: Setting, one: Told) -> dict[str, Any]:
    """Simulate one row in one setting. Returns the figures of all sessions and, where some are
    named, those of the named ones and of the others."""
    policy, kept_dtype, count = setting
    question = Question(
        (policy,), Slo(ttft_s=2.0, tpot_s=0.05), model="llama-3-8b", tp=1, kept_dtype=kept_dtype,
        retention=one.retention, schedule_policy="lpm",
    )  # fmt: skip
    plan = replicas_of(question)[0].with_replicas(count)
    plan = replace(plan, cache=replace(plan.cache, tier_tokens=count * plan.cache.tier_tokens))
    if one.instant:
        plan = replace(plan, rates=replace(plan.rates, **INSTANT))
    outcome = simulate(traffic, plan, one.hints)
    found: dict[str, Any] = figures(outcome, np.ones(traffic.num_requests, bool))
    if one.named is not None:
        named = one.named[traffic.session]
        found |= {"named": figures(outcome, named), "others": figures(outcome, ~named)}
    return found


def figures(outcome: Outcome, which: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Return the figures of some of the requests. which: bool `[requests]`. hit: the share of their
    input tokens that came from the device or the tier."""
    served = which & ~outcome.refused
    inputs = int(outcome.traffic.input_tokens[served].astype(np.int64).sum())
    hit = int((outcome.hit_device + outcome.hit_tier)[served].sum())
    p50, p90 = np.percentile(outcome.ttft_s[served], [50, 90])
    return {
        "hit": hit / inputs, "computed_tokens": inputs - hit,
        "ttft_p50_s": float(p50), "ttft_p90_s": float(p90), "refused": int((which & ~served).sum()),
    }  # fmt: skip


def judged(found: dict[tuple[Any, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each hint in each setting, with its gain over no hints with the same seeds.
    Errors are standard errors; that of p90 is its logarithm's."""
    rows = []
    for (*setting, hint), seeds in found.items():
        pairs = list(zip(seeds, found[(*setting, "nothing")], strict=True))
        hit, hit_error = average([told["hit"] - base["hit"] for told, base in pairs])
        log, log_error = average([
            math.log(told["ttft_p90_s"] / base["ttft_p90_s"]) for told, base in pairs
        ])  # fmt: skip
        base_p90, _ = average([base["ttft_p90_s"] for _, base in pairs])
        runs = setting[1] != "full" and base_p90 <= RUN_S
        gains = hit >= max(LEAST_HIT, 2 * hit_error)
        gains |= -log >= max(-math.log(1 - LEAST_TTFT), 2 * log_error)
        rows.append({
            **dict(zip(("traffic", "policy", "kept_dtype", "gpus"), setting, strict=True)),
            "hint": hint, "one_would_run": runs, "gains": gains,
            "hit_gain": hit, "hit_error": hit_error,
            "ttft_p90_ratio": math.exp(log), "ttft_p90_error": log_error, **summary(seeds),
        })  # fmt: skip
    return rows


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over the seeds, and the judged figures by seed."""
    found: dict[str, Any] = {name: average([one[name] for one in seeds])[0] for name in MEANS}
    for group in ("named", "others"):
        if group in seeds[0]:
            found[group] = summary([one[group] for one in seeds])
    by_seed = {name: [round(one[name], 5) for one in seeds] for name in ("hit", "ttft_p90_s")}
    return found | {"by_seed": by_seed}


def average(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is 0 for one value, as it is not known then."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)


def show_rows(rows: list[dict[str, Any]]) -> None:
    table = new_table("Hints", ("traffic", "setting", "hint", "hit", "TTFT p50, s", "p90, s",
        "hit gained", "p90", "gains"), left=("traffic", "setting", "hint"))  # fmt: skip
    for row in rows:
        table.add_row(
            row["traffic"], f"{row['gpus']} x {row['policy']} {row['kept_dtype'] or ''}",
            row["hint"], f"{row['hit']:.3f}", f"{row['ttft_p50_s']:.2f}",
            f"{row['ttft_p90_s']:.2f}", f"{row['hit_gain']:+.3f} ± {row['hit_error']:.3f}",
            f"{row['ttft_p90_ratio'] - 1:+.0%} ± {row['ttft_p90_error']:.0%}",
            ("yes" if row["gains"] else "no") if row["one_would_run"] else "",
        )  # fmt: skip
    show(table)


BENCHMARK = Benchmark("planning.hints", __doc__, declare, run, out=RESULTS / "hints.json", seed=1)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
