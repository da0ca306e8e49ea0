"""The lines of the transport benchmark's table, and what is claimed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.common.bars import Bar
from benchmarks.common.table import new_table
from benchmarks.tier.transport.paths import Bytes, paired
from kvtier.sizes import format_bytes, format_size


class Pair(NamedTuple):
    """A path against its baseline. bar: the least ratio that is claimed, None where none is."""

    name: str
    baseline: str
    bar: float | None = None


PAIRS = (
    Pair("shared get", "memcpy", 0.8),
    Pair("shared put", "memcpy"),
    Pair("stream get", "echo get", 0.9),
    Pair("stream put", "echo put", 0.9),
    Pair("tls get", "stream get"),
    Pair("tls put", "stream put"),
)

MOST_CHECKSUM = {"stream get": 0.05, "stream put": 0.05}
MOST_NEIGHBOUR = 1.2
MOST_RESIDENT = 1.05


class Row(NamedTuple):
    """A line of the table. met: None where nothing is claimed."""

    what: str
    value: str
    spread: str = ""
    compared: str = ""
    met: bool | None = None


def path_rows(data: Bytes, seconds: dict[str, list[float]]) -> list[Row]:
    """GB/s of every path; then every pair's ratio."""
    size, rows = format_size(data.blob_bytes), []
    for name, taken in seconds.items():
        rates = [data.num_bytes / one / 1e9 for one in taken]
        rows.append(Row(f"{size} {name}", f"{statistics.median(rates):.2f} GB/s", span(rates)))
    for pair in PAIRS:
        ratios = paired(seconds[pair.name], seconds[pair.baseline])
        ratio = statistics.median(ratios)
        met = None if pair.bar is None else ratio >= pair.bar
        bar = "" if pair.bar is None else f">= {pair.bar:.2f}x"
        what = f"{size} {pair.name} / {pair.baseline}"
        rows.append(Row(what, f"{ratio:.2f}x", span(ratios), bar, met))
    return rows


def share_rows(data: Bytes, shares: dict[str, list[float]]) -> list[Row]:
    rows = []
    for name, found in shares.items():
        share, most = statistics.median(found), MOST_CHECKSUM.get(name)
        met = None if most is None else share <= most
        bar = "" if most is None else f"<= {most:.0%}"
        what = f"{format_size(data.blob_bytes)} checksum's share of {name}"
        spread = f"{min(found):.1%} … {max(found):.1%}"
        rows.append(Row(what, f"{share:.1%}", spread, bar, met))
    return rows


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


def neighbour_rows(
    what: str, limit: str, found: dict[str, dict[str, float]], *, claimed: bool
) -> list[Row]:
    """limit: of the neighbour. Beside: at the same service; elsewhere: at another one, a control
    for what he costs as a process on this machine."""
    alone = found["alone"]["p99"]
    ratio = {where: one["p99"] / alone for where, one in found.items()}
    spread = ", ".join(f"{where} {one['p99'] * 1e3:.1f} ms" for where, one in found.items())
    met = ratio["beside"] <= MOST_NEIGHBOUR if claimed else None
    bar = f"<= {MOST_NEIGHBOUR:.2f}x" if claimed else ""
    extra = found["beside"]["p99"] / found["elsewhere"]["p99"]
    name = f"{what} p99 beside a neighbour at {limit}"
    return [
        Row(f"{name} / alone", f"{ratio['beside']:.2f}x", spread, bar, met),
        Row(f"{name} / elsewhere", f"{extra:.2f}x"),
    ]


def churn_row(found: dict[str, Any]) -> Row:
    """Return the row of churn; nothing is claimed of a service that was never full."""
    put, cap = format_bytes(found["put_bytes"]), found["cap_bytes"]
    fits = found["peak_bytes"] <= MOST_RESIDENT * cap
    return Row(
        f"resident after {put} of churn / cap of {format_bytes(cap)}",
        f"{found['peak_bytes'] / cap:.3f}x",
        f"{found['evictions']} evicted, {format_bytes(found['first_bytes'])} before",
        f"<= {MOST_RESIDENT:.2f}x",
        fits if found["evictions"] else None,
    )


def make_bars(rows: Sequence[Row]) -> list[Bar]:
    """The lines of which something is claimed."""
    return [Bar(row.what, row.value, row.met, row.compared) for row in rows if row.met is not None]


def make_table(rows: Sequence[Row]) -> Table:
    """A line per measurement."""
    table = new_table("The tier's transport, medians over rounds", ("path", "", "range", "claimed"))
    for row in rows:
        table.add_row(row.what, row.value, row.spread, row.compared)
    return table
