"""The outcome of a replay as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.bench.replay.metrics import meets
from kvtier.bench.replay.schema import ReplayDocument, ReplayRecord, ReplayResult
from kvtier.bench.replay.table import replay_rows
from kvtier.bench.report import page
from kvtier.bench.report.charts import Series, Steps, line_chart
from kvtier.bench.report.html import environment, failures, milliseconds, style_of
from kvtier.bench.table import describe_policy, describe_workload

PERCENTILES = (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
PARTS = 12


def render_replay(document: ReplayDocument) -> str:
    """The whole page."""
    workload = describe_workload(document.workload)
    head = ["", *(run.policy for run in document.runs)]
    rows = [[label, *cells] for label, cells in replay_rows(document)]
    body = [
        page.soft(workload, document.started_at),
        page.notes(document.notes),
        page.legend([(style_of(run), run.policy, describe_policy(run)) for run in document.runs]),
        page.figures(_charts(document)) if document.runs else "",
        page.table(head, rows) if document.runs else "",
        failures(document),
        environment(document),
    ]
    return page.page(f"kvtier bench: {workload}", "kvtier bench: a trace replayed", body)


def _charts(document: ReplayDocument) -> list[tuple[str, str]]:
    quantiles = Steps("percentile of the requests", tuple(map(str, PERCENTILES)))
    length_s = document.workload.duration_s or 1.0
    parts = Steps("s of the trace", tuple(f"{length_s * i / PARTS:.0f}" for i in range(PARTS)))

    def share(value: float) -> str:
        return f"{value:.0%}"

    def over_requests(value: Callable[[ReplayRecord], float | None]) -> list[Series]:
        return [_series(run, _quantiles(run, value)) for run in document.runs]

    def over_time(value: Callable[[Sequence[ReplayRecord]], float]) -> list[Series]:
        return [_series(run, _by_part(run, length_s, value)) for run in document.runs]

    def ttft(record: ReplayRecord) -> float:
        return record.ttft_ms

    def tpot(record: ReplayRecord) -> float | None:
        return record.tpot_ms

    def hit(records: Sequence[ReplayRecord]) -> float:
        return sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)

    def good(records: Sequence[ReplayRecord]) -> float:
        return float(np.mean([meets(record, document.workload) for record in records]))

    def chart(
        title: str, lines: list[Series], label: Callable[[float], str], least: float, steps: Steps
    ) -> tuple[str, str]:
        return title, line_chart(title, lines, label, least, steps)

    return [
        chart("Time to first token", over_requests(ttft), milliseconds, 0, quantiles),
        chart("Time per output token", over_requests(tpot), milliseconds, 0, quantiles),
        chart("Tokens hit, by arrival", over_time(hit), share, 0, parts),
        chart("Requests that met the SLO, by arrival", over_time(good), share, 1, parts),
    ]


def _series(run: ReplayResult, values: Sequence[float | None]) -> Series:
    return Series(run.policy, tuple(values), style_of(run))


def _quantiles(
    run: ReplayResult, value: Callable[[ReplayRecord], float | None]
) -> list[float | None]:
    found = [one for record in run.requests if (one := value(record)) is not None]
    if not found:
        return [None] * len(PERCENTILES)
    return [float(one) for one in np.percentile(found, PERCENTILES)]


def _by_part(
    run: ReplayResult, length_s: float, value: Callable[[Sequence[ReplayRecord]], float]
) -> list[float | None]:
    """A value of the requests that came in each part of the trace; None where none came."""
    parts: list[list[ReplayRecord]] = [[] for _ in range(PARTS)]
    for record in run.requests:
        parts[min(PARTS - 1, int(PARTS * record.arrival_s / length_s))].append(record)
    return [value(part) if part else None for part in parts]


__all__ = ["render_replay"]
