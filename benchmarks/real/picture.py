"""A picture of the table: the kept share of a context's worth over the share of its KV bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOWEST = -0.1


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
    axes.set_ylim(LOWEST, 1.1)
    axes.set_title(f"{length} tokens of context", fontsize=10, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "kvtier"})


__all__ = ["draw_worth"]
