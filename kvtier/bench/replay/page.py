"""The outcome of a replay as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier import webpage
from kvtier.bench.replay.measure import meets
from kvtier.bench.replay.schema import ReplayDocument, ReplayRecord, ReplayResult
from kvtier.bench.replay.table import replay_rows
from kvtier.bench.report import page
from kvtier.bench.report.charts import Series, Steps, line_chart
from kvtier.bench.report.html import environment, failures, legend, milliseconds, style_of
from kvtier.bench.table import describe_workload

PERCENTILES = (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
PARTS = 12
Share = Callable[[Sequence[ReplayRecord]], float]


def render_replay(document: ReplayDocument) -> str:
    """The whole page."""
    workload = describe_workload(document.workload)
    head = ["", *(run.policy for run in document.runs)]
    body = [
        page.soft(workload, document.started_at),
        page.notes(document.notes),
        legend(document.runs),
        page.figures(_charts(document)) if document.runs else "",
        webpage.table(head, replay_rows(document)) if document.runs else "",
        failures(document),
        environment(document),
    ]
    return page.page(f"kvtier bench: {workload}", "kvtier bench: a trace replayed", body)


def _charts(document: ReplayDocument) -> list[tuple[str, str]]:
    quantiles = Steps("percentile of the requests", tuple(map(str, PERCENTILES)))
    length_s = document.workload.duration_s or 1.0
    parts = Steps("s of the trace", tuple(f"{length_s * i / PARTS:.0f}" for i in range(PARTS)))

    def hit(records: Sequence[ReplayRecord]) -> float:
        return sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)

    def good(records: Sequence[ReplayRecord]) -> float:
        return float(np.mean([meets(record, document.workload) for record in records]))

    def over_requests(title: str, name: str) -> tuple[str, str]:
        lines = [Series(run.policy, _quantiles(run, name), style_of(run)) for run in document.runs]
        return title, line_chart(title, lines, milliseconds, steps=quantiles)

    def over_time(title: str, value: Share, least: float) -> tuple[str, str]:
        lines = [
            Series(run.policy, _by_part(run, length_s, value), style_of(run))
            for run in document.runs
        ]
        return title, line_chart(title, lines, "{:.0%}".format, least, parts)

    return [
        over_requests("Time to first token", "ttft_ms"),
        over_requests("Time per output token", "tpot_ms"),
        over_time("Tokens hit, by arrival", hit, 0),
        over_time("Requests that met the SLO, by arrival", good, 1),
    ]


def _quantiles(run: ReplayResult, name: str) -> tuple[float | None, ...]:
    values = [getattr(record, name) for record in run.requests]
    found = [one for one in values if one is not None]
    if not found:
        return (None,) * len(PERCENTILES)
    return tuple(map(float, np.percentile(found, PERCENTILES)))


def _by_part(run: ReplayResult, length_s: float, value: Share) -> tuple[float | None, ...]:
    """A value of the requests that came in each part of the trace; None where none came."""
    parts: list[list[ReplayRecord]] = [[] for _ in range(PARTS)]
    for record in run.requests:
        parts[min(PARTS - 1, int(PARTS * record.arrival_s / length_s))].append(record)
    return tuple(value(part) if part else None for part in parts)
