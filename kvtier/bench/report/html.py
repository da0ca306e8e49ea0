"""The outcome of sessions as one HTML page; `page.py` has what such pages are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape

from kvtier import webpage
from kvtier.bench.policies import POLICIES
from kvtier.bench.report import page
from kvtier.bench.report.charts import Series, line_chart
from kvtier.bench.schema import (
    Document,
    DocumentBase,
    EngineRun,
    Ratios,
    RunResult,
    TurnResult,
)
from kvtier.bench.table import (
    describe_policy,
    describe_workload,
    ratio_rows,
    tier_lines,
    turn_rows,
)

Value = Callable[[TurnResult], float | None]


def render_report(document: Document) -> str:
    """The whole page."""
    workload = describe_workload(document.workload)
    body = [
        page.soft(workload, document.started_at),
        page.notes(document.notes),
        _tiles(document.ratios),
        legend(document.runs),
        _charts(document.runs),
        _turn_tables(document.runs),
        _tiers(document.runs),
        _comparisons(document),
        failures(document),
        environment(document),
    ]
    return page.page(f"kvtier bench: {workload}", "kvtier bench", body)


def _tiles(ratios: Ratios | None) -> str:
    """The headline numbers."""
    if ratios is None:
        return ""
    shown = [
        _times(ratios.kv_device_bytes, "fewer", "more", "KV bytes on the device"),
        _times(ratios.median_ttft_ms, "faster", "slower", "first token, later turns"),
        _times(ratios.median_tpot_ms, "faster", "slower", "per token"),
        (ratios.resident_sessions, "x", "as many resident sessions"),
        (ratios.recall, "", "of the recall"),
    ]
    tiles = page.tiles(
        [(f"{value:.2f}{unit}", text) for value, unit, text in shown if value is not None]
    )
    return f"<h2>{escape(ratios.policy)} against {escape(ratios.baseline)}</h2>{tiles}"


def _times(
    ratio: float | None, better: str, worse: str, what: str
) -> tuple[float | None, str, str]:
    """A tile for a ratio in which bigger is better: nothing is half as many times faster."""
    if not ratio or ratio >= 1:
        return ratio, "x", f"{better} {what}"
    return 1 / ratio, "x", f"{worse} {what}"


def legend(runs: Sequence[EngineRun]) -> str:
    """The legend of the charts of these runs."""
    return page.legend([(style_of(run), run.policy, describe_policy(run)) for run in runs])


def style_of(run: EngineRun) -> int:
    """A policy has the same colour in every report."""
    return list(POLICIES).index(run.policy)


def _charts(runs: Sequence[RunResult]) -> str:
    unit, size = _byte_unit(max((run.summary.kv_peak_bytes for run in runs), default=0))
    recall_means = runs[0].recall_means if runs else ""
    charts: list[tuple[str, Value, Callable[[float], str], float]] = [
        ("Time to first token", lambda t: t.ttft_ms, milliseconds, 0),
        ("Time per output token", lambda t: t.tpot_ms, milliseconds, 0),
        (
            "KV on the device after the turn",
            lambda t: t.kv_device_bytes / size,
            lambda v: f"{v:.4g} {unit}",
            0,
        ),
        (f"Recall: {recall_means}", lambda t: t.recall, lambda v: f"{v:.2f}", 1),
        ("NLL of right answers, nats per token", lambda t: t.nll, lambda v: f"{v:.3g}", 0),
        ("Sessions still resident", lambda t: t.resident_sessions, lambda v: f"{v:g}", 1),
    ]
    figures: list[tuple[str, str]] = []
    for title, value, label, at_least in charts:
        lines = [Series(run.policy, tuple(map(value, run.turns)), style_of(run)) for run in runs]
        if "resident" in title and all(len({r.session for r in run.requests}) == 1 for run in runs):
            continue
        figures.append((title, line_chart(title, lines, label, at_least)))
    return page.figures(figures)


def _byte_unit(largest: float) -> tuple[str, int]:
    """The unit of a bytes axis, so that its ticks are round numbers."""
    return ("GiB", 1024**3) if largest >= 1024**3 else ("MiB", 1024**2)


def milliseconds(value: float) -> str:
    """A time for people."""
    return f"{value / 1000:.4g} s" if value >= 1000 else f"{value:.4g} ms"


def _turn_tables(runs: Sequence[RunResult]) -> str:
    parts = []
    for run in runs:
        (_, *heads), rows = turn_rows(run)
        parts.append(webpage.table([run.policy, *heads], rows))
    return "<h2>Turns</h2>" + "".join(parts)


def _tiers(runs: Sequence[RunResult]) -> str:
    """Return the list of what the tier was used for."""
    items = [f"<li>{run.policy}: {escape(line)}</li>" for run in runs for line in tier_lines(run)]
    return f"<h2>Tier</h2><ul>{''.join(items)}</ul>" if items else ""


def _comparisons(document: Document) -> str:
    pairs = [pair for pair in (document.ratios, *document.comparisons) if pair is not None]
    if not pairs:
        return ""
    return "<h2>Ratios (bigger is better)</h2>" + webpage.table(*ratio_rows(pairs))


def failures(document: DocumentBase) -> str:
    """The last log lines of what failed."""
    return "".join(
        f"<h2>{escape(failure.policy)} failed (exit code {failure.exit_code})</h2>"
        f"<pre>{escape(chr(10).join(failure.log_tail))}</pre>"
        for failure in document.failures
    )


def environment(document: DocumentBase) -> str:
    """Return the section on where the numbers are from."""
    facts = {
        "command": "python -m kvtier.bench " + " ".join(document.command),
        "environment": asdict(document.environment),
        "model": document.model,
        "settings": document.settings,
    }
    return page.described("Where this was measured", facts)
