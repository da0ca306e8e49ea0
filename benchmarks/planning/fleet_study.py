"""The number of GPUs that recorded traffic wants: full KV, kvtier, and its tier.

    python -m benchmarks.planning.fleet_study --trace conversation_trace.jsonl --copies 2 5 10
    python -m benchmarks.planning.fleet_study --trace claude_code_sessions.jsonl.gz --agents \\
        --out agents-study.json --picture agents-study.png

The users of an hour come so many times over, and a 70B model answers them. Or an 8B model answers
agents' sessions, which begin within half an hour, and an agent asks again when it has its answer;
what one GPU hits of them is found, too. Replicas are of stated hardware (`kvtier plan` says which).
The study finds the fewest that keep the 90th percentile of both times. Nothing here was measured on
a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import RESULTS, Arguments, Benchmark, Measured, Options
from benchmarks.common.table import new_table, show
from kvtier.plan.answers import Answers, Slo
from kvtier.plan.study import PolicyPlan, Question, ask

POLICIES = ("full", "kvtier", "kvtier-tier")
COLOURS = {"full": "#8a5a00", "kvtier": "#0b62c4", "kvtier-tier": "#a3308a"}


@dataclass(frozen=True)
class Arm:
    """A way to keep agents' sessions: a policy of the planner, the share that it keeps, and the
    dtype of what is kept; None: as it is."""

    policy: str
    retention: float = 0.25
    kept_dtype: str | None = None


ARMS = {
    "full KV": Arm("full"),
    "full KV, host tier": Arm("kvtier-tier", retention=1.0),
    "25%": Arm("kvtier"),
    "25%, tier": Arm("kvtier-tier"),
    "25% at 4 bits": Arm("kvtier", kept_dtype="int4"),
    "25% at 4 bits, tier": Arm("kvtier-tier", kept_dtype="int4"),
}
AGENTS_SPREAD_S = 1800.0
# Copies of the hour begin up to so much later, and the first part only fills caches.
SPREAD_S, WARM_S = 600.0, 900.0


def declare(arguments: Arguments) -> None:
    arguments.add("--trace", required=True, metavar="FILE", help="in Mooncake's format")
    arguments.add("--copies", nargs="+", type=int, default=[2, 5, 10], metavar="N",
                  help="times its users (2 5 10)")  # fmt: skip
    arguments.add("--agents", action="store_true", help="the trace is of agents' sessions")
    arguments.number("--ttft", 2.0, "s, the 90th percentile")
    arguments.number("--tpot", 0.05, "s, the 90th percentile")
    arguments.number("--gpu-hour-cost", 2.5, "of a GPU, in any currency")
    arguments.add("--picture", type=Path, metavar="FILE", help="PNG of the curves")


def run(options: Options) -> Iterator[Measured]:
    """Simulate traffic of every size. Yields the outcome so far after each, to be written."""
    if options.agents:
        yield from run_agents(options)
        return
    rows: list[dict[str, Any]] = []
    stated: Mapping[str, Any] = {}
    for copies in options.copies:
        question = Question(
            policies=POLICIES,
            slo=Slo(ttft_s=options.ttft, tpot_s=options.tpot, percentile=90.0),
            trace=Path(options.trace),
            copies=copies,
            spread_s=SPREAD_S,
            warm_s=WARM_S,
            gpu_hour_cost=options.gpu_hour_cost,
            seed=options.seed,
        )
        found = ask(question, lambda text: print(text, file=sys.stderr, flush=True))
        stated = {name: found[name] for name in ("replica", "lru")}
        rows.append({
            "copies": copies,
            "traffic": found["traffic"],
            "policies": {one.policy: document(one) for one in found["policies"]},
        })  # fmt: skip
        yield Measured({**stated, "slo": question.slo.model_dump(), "rows": rows})
    show_rows(rows)
    if options.picture is not None:
        draw(rows, options)


def run_agents(options: Options) -> Iterator[Measured]:
    """Simulate agents' sessions in every arm: the fewest GPUs, and one."""
    rows: dict[str, dict[str, Any]] = {}
    for name, arm in ARMS.items():
        question = Question(
            policies=(arm.policy,),
            slo=Slo(ttft_s=options.ttft, tpot_s=options.tpot, percentile=90.0),
            trace=Path(options.trace),
            spread_s=AGENTS_SPREAD_S,
            model="llama-3-8b",
            tp=1,
            retention=arm.retention,
            kept_dtype=arm.kept_dtype,
            schedule_policy="lpm",
            seed=options.seed,
        )

        def tell(text: str, name: str = name) -> None:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

        found = ask(question, tell)
        (plan,), (one,) = found["policies"], ask(replace(question, replicas=1), tell)["policies"]
        rows[name] = {
            "arm": asdict(arm),
            "traffic": found["traffic"],
            "replica": found["replica"],
            **document(plan),
            "one": one.tried[0].model_dump(),
        }
        yield Measured({"slo": question.slo.model_dump(), "rows": rows})
    show_agents(rows)
    if options.picture is not None:
        draw_agents(rows, options.picture)


def show_agents(rows: Mapping[str, dict[str, Any]]) -> None:
    table = new_table(
        "Agents' sessions",
        ("", "GPUs", "device", "tier", "refused", "TTFT p90, s", "TPOT p90, ms", "one GPU hits"),
    )
    for name, row in rows.items():
        best, one = shown_in(row), Answers.model_validate(row["one"])
        table.add_row(
            name, f"{best.gpus:,}" if row["best"] else f"> {best.gpus:,}",
            f"{best.hit_device:.3f}", f"{best.hit_tier:.3f}", f"{best.refused:,}",
            f"{best.ttft_s.p90:.2f}", f"{best.tpot_s.p90 * 1e3:.1f}",
            f"{one.hit_device + one.hit_tier:.3f}",
        )  # fmt: skip
    show(table)


def draw_agents(rows: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the fewest GPUs of each arm, with the requests that are refused there, and the share of
    tokens that one GPU hits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), sharey=True)
    shown = [shown_in(row) for row in rows.values()]
    ones = [Answers.model_validate(row["one"]) for row in rows.values()]
    bars = left.barh(list(rows), [one.gpus for one in shown], color="#0b62c4")
    left.bar_label(
        bars,
        [f" {x.gpus}" + (f", {x.refused} requests refused" if x.refused else "") for x in shown],
    )
    left.set(xlabel="GPUs for the SLO", xlim=(0, 1.8 * max(one.gpus for one in shown)))
    right.barh(list(rows), [one.hit_device for one in ones], color="#0b62c4", label="device")
    right.barh(
        list(rows), [one.hit_tier for one in ones], left=[one.hit_device for one in ones],
        color="#a3308a", label="tier",
    )  # fmt: skip
    right.set(xlabel="share of prompt tokens that one GPU hits", xlim=(0, 1))
    right.legend(loc="upper right")
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": "kvtier"})


def document(plan: PolicyPlan) -> dict[str, Any]:
    """Return one policy's plan, as it stands in the JSON."""
    return {
        "rates": plan.rates,
        "cache": plan.cache,
        "best": None if plan.best is None else plan.best.model_dump(),
        "tried": [one.model_dump() for one in plan.tried],
    }


def shown_in(found: Mapping[str, Any]) -> Answers:
    """Return the fleet to show of a document: the best, or the largest that was tried."""
    return Answers.model_validate(found["best"] or found["tried"][-1])


def show_rows(rows: list[dict[str, Any]]) -> None:
    table = new_table(
        "The fewest GPUs", ("copies", "policy", "GPUs", "device", "tier", "TTFT p90, s",
        "TPOT p90, ms", "refused", "resident", "cost of a million tokens"), left=("policy",),
    )  # fmt: skip
    for row in rows:
        for policy, found in row["policies"].items():
            best = shown_in(found)
            table.add_row(
                str(row["copies"]), policy,
                f"{best.gpus:,}" if found["best"] else f"> {best.gpus:,}",
                f"{best.hit_device:.3f}", f"{best.hit_tier:.3f}", f"{best.ttft_s.p90:.2f}",
                f"{best.tpot_s.p90 * 1e3:.1f}", f"{best.refused:,}",
                f"{best.resident_sessions:,}",
                f"{best.cost_per_million_tokens or 0:.3f}",
            )  # fmt: skip
    show(table)


def draw(rows: list[dict[str, Any]], options: Options) -> None:
    """Draw GPUs over traffic, and the largest traffic's times over GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for policy, colour in COLOURS.items():
        wanted = [row["policies"][policy]["best"] for row in rows]
        known = [(row["copies"], one["gpus"]) for row, one in zip(rows, wanted, strict=True) if one]
        style = {"color": colour, "marker": "o", "label": policy}
        left.plot([x for x, _ in known], [y for _, y in known], **style)
        tried = rows[-1]["policies"][policy]["tried"]
        gpus = [one["gpus"] for one in tried]
        middle.plot(gpus, [one["ttft_s"]["p90"] for one in tried], **style)
        right.plot(gpus, [one["tpot_s"]["p90"] * 1e3 for one in tried], **style)
    left.set(xlabel="times the recorded users", ylabel="GPUs", ylim=(0, None), title="GPUs wanted")
    times = rows[-1]["copies"]
    middle.set(
        xlabel="GPUs", ylabel="s", title=f"TTFT p90, {times} times", ylim=(0, 5 * options.ttft)
    )
    right.set(
        xlabel="GPUs", ylabel="ms", title=f"TPOT p90, {times} times", ylim=(0, 5e3 * options.tpot)
    )
    middle.axhline(options.ttft, color="grey", lw=0.8)
    right.axhline(1e3 * options.tpot, color="grey", lw=0.8)
    left.legend()
    figure.tight_layout()
    figure.savefig(options.picture, dpi=110)


BENCHMARK = Benchmark(
    "planning.fleet_study", __doc__, declare, run, out=RESULTS / "fleet-study.json"
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
