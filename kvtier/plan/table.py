"""The planner's answer as a terminal table."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from kvtier.bench.table import columns
from kvtier.plan.study import PlanDocument, PolicyPlan

NOTHING = "-"
Cell = Callable[[PolicyPlan], str]


def print_plan(document: PlanDocument, console: Console) -> None:
    """Print the answer, a column for each policy."""
    console.print(f"[bold]{describe_traffic(document)}[/bold]")
    console.print(describe_replica(document))
    heads = ["", *(plan.policy for plan in document.policies)]
    console.print(columns(describe_slo(document), heads, plan_rows(document)))


def describe_traffic(document: PlanDocument) -> str:
    """Describe the traffic in one line."""
    said = document.traffic
    name = f"{said['copies']} x {said['trace']}" if "trace" in said else "described sessions"
    return (
        f"{name}: {said['requests']:,} requests of {said['sessions']:,} sessions, "
        f"{said['mean_input_tokens']:,.0f} + {said['mean_output_tokens']:,.0f} tokens on average"
    )


def describe_replica(document: PlanDocument) -> str:
    """Describe a replica in one line."""
    said = document.replica
    if "calibration" in said:
        return f"replicas as measured in {said['calibration']}, routed by {said['routing']}"
    return (
        f"replicas of {said['model']} on {said['tp']} x {said['gpu']}, "
        f"{said['kv_budget_bytes'] / 1e9:,.0f} GB for KV, "
        f"{said['kv_bytes_per_token'] / 1e3:.0f} kB a token, routed by {said['routing']}"
    )


def describe_slo(document: PlanDocument) -> str:
    """Describe the SLO in one line."""
    slo = document.slo
    return f"p{slo.percentile:g}: TTFT ≤ {slo.ttft_s * 1e3:,.0f} ms, TPOT ≤ {slo.tpot_s * 1e3:g} ms"


def plan_rows(document: PlanDocument) -> list[list[str]]:
    """Return the table's rows: a label and one cell per policy."""
    rows: list[tuple[str, Cell]] = [
        ("meets the SLO", lambda plan: plan.shown.verdict),
        ("replicas", lambda plan: f"{plan.shown.replicas:,}"),
        ("GPUs", lambda plan: f"{plan.shown.gpus:,}"),
        ("tokens hit on the device", lambda plan: f"{plan.shown.hit_device:.3f}"),
        ("… from the tier", lambda plan: f"{plan.shown.hit_tier:.3f}"),
        ("… computed", lambda plan: f"{plan.shown.recomputed:.3f}"),
        ("TTFT p50 / p90 / p99, s", lambda plan: _three(plan, "ttft_s", 1, ".2f")),
        ("TPOT p50 / p90 / p99, ms", lambda plan: _three(plan, "tpot_s", 1e3, ".1f")),
        ("requests within both times", lambda plan: f"{plan.shown.goodput_share:.1%}"),
        ("sessions resident at the end", lambda plan: f"{plan.shown.resident_sessions:,}"),
        ("tokens evicted", lambda plan: f"{plan.shown.evicted_tokens:,}"),
        ("requests refused", _refused),
        ("tokens that fit for one request", lambda plan: f"{plan.shown.request_room_tokens:,}"),
        ("output tokens per second", lambda plan: f"{plan.shown.output_tokens_per_s:,.0f}"),
        ("cost per million tokens", _cost),
    ]
    return [[label, *map(cell, document.policies)] for label, cell in rows]


def _three(plan: PolicyPlan, name: str, factor: float, form: str) -> str:
    found = getattr(plan.shown, name)
    return " / ".join(format(factor * value, form) for value in (found.p50, found.p90, found.p99))


def _refused(plan: PolicyPlan) -> str:
    refused, least = plan.shown.refused, plan.shown.least_refused_tokens
    return f"{refused:,}" if least is None else f"{refused:,}, from {least:,} tokens"


def _cost(plan: PolicyPlan) -> str:
    cost = plan.shown.cost_per_million_tokens
    return NOTHING if cost is None else f"{cost:.3f}"
