"""The outcome of a replay as terminal tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console

from kvtier.bench.replay.schema import ReplayDocument, ReplayResult
from kvtier.bench.table import (
    columns,
    describe_policy,
    describe_workload,
    print_failures,
    print_head,
    tier_lines,
)
from kvtier.sizes import format_bytes

Cell = Callable[[ReplayResult], str]


def print_replay(document: ReplayDocument, console: Console) -> None:
    """All policies in one table, a column each."""
    print_head(document, describe_workload(document.workload), console)
    if document.runs:
        heads = ["", *(run.policy for run in document.runs)]
        console.print(columns("Replayed", heads, replay_rows(document)))
    for run in document.runs:
        console.print(f"{run.policy}: {describe_policy(run)}")
        for line in tier_lines(run):
            console.print(f"{run.policy}: {line}")
    print_failures(document, console)


def replay_rows(document: ReplayDocument) -> list[list[str]]:
    """Rows of a label and one cell per policy."""
    replay = document.workload
    slo = f"TTFT ≤ {replay.slo_ttft_ms:g} ms, TPOT ≤ {replay.slo_tpot_ms:g} ms"
    rows: list[tuple[str, Cell]] = [
        ("tokens hit", lambda run: f"{run.summary.hit_rate:.3f}"),
        ("… of them from the tier", lambda run: f"{run.summary.tier_hit_rate:.3f}"),
        *_times("TTFT", lambda run: run.summary.ttft_ms, ",.0f"),
        *_times("TPOT", lambda run: run.summary.tpot_ms, ",.1f"),
        (f"goodput ({slo})", lambda run: f"{run.summary.goodput_share:.1%}"),
        ("… requests per second", lambda run: f"{run.summary.goodput_per_s:.2f}"),
        ("output tokens per second", lambda run: f"{run.summary.output_tokens_per_s:,.1f}"),
        ("tokens evicted", lambda run: f"{run.summary.evicted_tokens:,}"),
        ("tokens restored", lambda run: f"{run.summary.restored_tokens:,}"),
        (
            f"resident at the end, of {replay.conversations} conversations",
            lambda run: str(run.summary.resident),
        ),
        ("KV budget", lambda run: format_bytes(run.pools.budget_bytes)),
        ("KV peak", lambda run: format_bytes(run.summary.kv_peak_bytes)),
        ("took", lambda run: f"{run.wall_s:,.0f} s"),
    ]
    return [[label, *map(cell, document.runs)] for label, cell in rows]


def _times(name: str, value: Callable[[ReplayResult], object], form: str) -> list[tuple[str, Cell]]:
    """A row for each percentile."""

    def cell(percentile: str, run: ReplayResult) -> str:
        return format(getattr(value(run), percentile), form)

    return [(f"{name} {one}, ms", partial(cell, one)) for one in ("p50", "p90", "p99")]
