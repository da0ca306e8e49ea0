"""The planner's answer as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from kvtier import webpage
from kvtier.bench.policies import POLICIES
from kvtier.bench.report import page
from kvtier.bench.report.charts import Series, Steps, line_chart
from kvtier.plan.answers import Answers
from kvtier.plan.study import PlanDocument, PolicyPlan
from kvtier.plan.table import describe_replica, describe_slo, describe_traffic, plan_rows

Value = Callable[[Answers], float]
# A title and what is drawn.
Chart = tuple[str, str]
# Times beyond this many times the SLO would flatten everything else.
SHOWN_TIMES = 5.0


def render_plan(document: PlanDocument) -> str:
    """Return the whole page as HTML."""
    traffic = describe_traffic(document)
    head = ["", *(plan.policy for plan in document.policies)]
    facts = {
        "command": "kvtier plan " + " ".join(document.command),
        "traffic": document.traffic,
        "replica": document.replica,
        "rates in seconds": {plan.policy: plan.rates for plan in document.policies},
        "caches": {plan.policy: plan.cache for plan in document.policies},
        "environment": asdict(document.environment),
    }
    body = [
        page.soft(traffic, describe_replica(document), document.started_at),
        page.tiles(_tiles(document)),
        page.legend(
            [
                (_style(plan), plan.policy, POLICIES[plan.policy].description)
                for plan in document.policies
            ]
        ),
        page.figures(_charts(document)),
        f"<h2>{describe_slo(document)}</h2>",
        webpage.table(head, plan_rows(document)),
        page.described("What was assumed", facts),
    ]
    return page.page(f"kvtier plan: {traffic}", "kvtier plan", body)


def _tiles(document: PlanDocument) -> list[tuple[str, str]]:
    return [
        (
            f"{plan.shown.gpus:,}" if plan.best else f"> {plan.shown.gpus:,}",
            f"GPUs under {plan.policy}"
            + (f", {plan.shown.refused:,} requests refused" if plan.shown.refused else ""),
        )
        for plan in document.policies
    ]


def _style(plan: PolicyPlan) -> int:
    """Return the number of a policy's colour, the same in every report."""
    return list(POLICIES).index(plan.policy)


def _charts(document: PlanDocument) -> list[Chart]:
    slo = document.slo
    sizes = sorted({one.gpus for plan in document.policies for one in plan.tried})
    steps = Steps("GPUs", tuple(map(str, sizes)))

    def chart(title: str, value: Value, label: Callable[[float], str], most: float) -> Chart:
        lines = [_line(plan, sizes, value, most) for plan in document.policies]
        return title, line_chart(title, lines, label, steps=steps)

    found = [
        chart("TTFT p90", lambda a: a.ttft_s.p90, _seconds, SHOWN_TIMES * slo.ttft_s),
        chart("TPOT p90", lambda a: a.tpot_s.p90, _seconds, SHOWN_TIMES * slo.tpot_s),
        chart("Requests within both times", lambda a: a.goodput_share, _share, 1),
        chart("Tokens not computed", lambda a: 1 - a.recomputed, _share, 1),
    ]
    if document.lru:
        title = f"Tokens hit by one LRU cache of {document.traffic['trace']}"
        found.append((title, _lru(document)))
    return found


def _lru(document: PlanDocument) -> str:
    steps = Steps("million tokens", tuple(f"{size / 2**20:.3g}" for size, _ in document.lru))
    line = Series("LRU", tuple(rate for _, rate in document.lru), 1)
    return line_chart("Tokens hit", [line], _share, steps=steps)


def _line(plan: PolicyPlan, sizes: list[int], value: Value, most: float) -> Series:
    values: list[float | None] = [None] * len(sizes)
    for one in plan.tried:
        found = value(one)
        if found <= most:
            values[sizes.index(one.gpus)] = found
    return Series(plan.policy, tuple(values), _style(plan))


def _seconds(value: float) -> str:
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"


def _share(value: float) -> str:
    return f"{value:.1%}"
