"""The kept share of a context's worth, and its interval; the tables that `benchmarks.real.table`
prints of it, and its picture over the share of the KV bytes. figures: rows, one per length, share
and way.

Losses are `[tasks, contexts]`, nats per answer token. Tasks count alike, as do contexts of a task.
Intervals are bootstrapped over a task's contexts. The draws are the same for every setting, so that
two settings are compared on the same contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.common.table import new_table

Losses = NDArray[np.float64]

DRAWS = 2000
# The percentiles of the bootstrap have 95 in 100 draws between them.
LOW, HIGH = 2.5, 97.5


class Interval(NamedTuple):
    """A mean and the bounds between which 95% of the bootstrap's means lie: the mean itself where
    every task has one context."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.2f} … {self.high:.2f})"


def kept_worth(chosen: Losses, full: Losses, none: Losses) -> Interval:
    """Return (none - chosen) / (none - full), which is 1 with the loss of the full context and 0
    with that of none."""
    gained, whole = none - chosen, none - full
    draws = [_mean(gained, rows) / _mean(whole, rows) for rows in _resampled(full.shape)]
    return _interval(gained.mean() / whole.mean(), draws)


def _resampled(shape: tuple[int, ...]) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return list(rng.integers(shape[1], size=(DRAWS, *shape)))


def _mean(values: Losses, rows: NDArray[np.int64]) -> float:
    return float(np.take_along_axis(values, rows, axis=1).mean())


def _interval(mean: float, draws: list[float]) -> Interval:
    low, high = np.percentile(draws, [LOW, HIGH])
    return Interval(float(mean), float(low), float(high))


def worth_table(
    figures: Sequence[dict[str, Any]], length: int, shares: Sequence[float], target: str
) -> Table:
    """Return a table of kept worth: a line per way, a column per share of the bytes. target: the
    way whose share follows from a quality, and which has no line."""
    title = f"Kept of what {length} tokens of context are worth, by share of the KV bytes (95%)"
    rows = [row for row in figures if row["length"] == length and row["way"] != target]
    return _by_share(title, rows, shares, lambda row: str(Interval(**row["all"])))


def recall_table(figures: Sequence[dict[str, Any]], length: int, shares: Sequence[float]) -> Table:
    """Return a table of recall, with the lines and columns of `worth_table`: the share of the
    questions whose whole answer is a way's greedy one."""
    title = f"Questions behind {length} tokens that are answered rightly, by share of the KV bytes"
    rows = [row for row in figures if row["length"] == length]
    return _by_share(title, rows, shares, lambda row: f"{row['recall']:.1%}")


def _by_share(
    title: str, rows: Sequence[dict[str, Any]], shares: Sequence[float],
    cell: Callable[[dict[str, Any]], str],
) -> Table:  # fmt: skip
    table = new_table(title, ("way", *(f"{share:.0%}" for share in shares)))
    found = {(row["way"], row["share"]): cell(row) for row in rows}
    for way in dict.fromkeys(row["way"] for row in rows):
        table.add_row(way, *(found.get((way, share), "") for share in shares))
    return table


def quality_table(figures: Sequence[dict[str, Any]], target: str) -> Table:
    """Return a table of a quality target's bytes, quality and kept worth, a line per length."""
    columns = ("tokens", "bytes", "least", "most", "quality", "kept worth")
    table = new_table(target, columns)
    for row in figures:
        if row["way"] == target:
            shares = (f"{row[name]:.1%}" for name in ("bytes", "least_bytes", "most_bytes"))
            kept = str(Interval(**row["all"]))
            table.add_row(str(row["length"]), *shares, f"{row['quality']:.3f}", kept)
    return table


def cheapest_table(figures: Sequence[dict[str, Any]], quality: float, target: str) -> Table:
    """Return a table of the fewest bytes with which each way has the quality, on average over
    contexts: a line per way, a column per length."""
    lengths = list(dict.fromkeys(row["length"] for row in figures))
    table = new_table(f"Bytes for quality {quality}", ("way", *map(str, lengths)))
    for way in dict.fromkeys(row["way"] for row in figures):
        cells = []
        for length in lengths:
            mine = [row for row in figures if (row["length"], row["way"]) == (length, way)]
            if way == target:
                cells.append(f"{mine[0]['bytes']:.1%} (quality {mine[0]['quality']:.3f})")
                continue
            fewest = fewest_bytes([(row["bytes"], row["quality"]) for row in mine], quality)
            cells.append("" if fewest is None else f"{fewest:.1%}")
        table.add_row(way, *cells)
    return table


def fewest_bytes(points: Sequence[tuple[float, float]], quality: float) -> float | None:
    """Return the share of the bytes down to which the quality holds. points: measured (share,
    quality).

    Going down, it lies on a straight line between the last point that has the quality and the next.
    It is None where the most bytes do not have it, and the fewest measured where all have it.
    """
    last = None
    for share, found in sorted(points, reverse=True):
        if found >= quality:
            last = (share, found)
        elif last is None:
            return None
        else:
            return share + (quality - found) / (last[1] - found) * (last[0] - share)
    return None if last is None else last[0]


def draw_worth(
    figures: Sequence[dict[str, Any]], length: int, ours: Sequence[str], path: Path
) -> None:
    """Draw the figures of one length as PNG. This needs matplotlib, but no display. ours: ways that
    are drawn in full lines; the others are dashed. Bars are 95% intervals."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in figures if row["length"] == length]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for index, way in enumerate(ways):
        palette = "tab10" if way in ours else "Dark2"
        mine = sorted((row for row in rows if row["way"] == way), key=lambda row: row["bytes"])
        means = [row["all"]["mean"] for row in mine]
        below = [row["all"]["mean"] - row["all"]["low"] for row in mine]
        above = [row["all"]["high"] - row["all"]["mean"] for row in mine]
        axes.errorbar(
            [row["bytes"] for row in mine], means, yerr=[below, above], label=way,
            color=colormaps[palette](index % 8), capsize=2, linewidth=1.4,
            linestyle="-" if way in ours else "--",
        )  # fmt: skip
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("share of the context's KV bytes")
    axes.set_ylabel("kept of what the context is worth")
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.1, 1.1)
    axes.set_title(f"{length} tokens of context", fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "kvtier"})
