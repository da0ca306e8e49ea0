"""A picture of a calibration curve: measured quality by retention, and the curve through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.calibration.curves import Curve, Measurement

NAMES = ("low", "mid", "high")
POINTS = 101


def draw_curve(
    curve: Curve, measurements: Sequence[Measurement], path: Path, title: str = ""
) -> None:
    """Write the picture as PNG; needs matplotlib, no display.

    Contexts are cut into thirds by NLL: per third the mean measured quality at every retention, and
    the curve at the third's mean NLL.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    grid = np.linspace(0.0, 1.0, POINTS)
    groups = by_nll(measurements)
    for colour, (name, group) in zip(np.linspace(0.1, 0.8, len(groups)), groups, strict=True):
        nll = sum(m.nll for m in group) / len(group)
        shade = colormaps["viridis"](colour)
        points = mean_quality(group)
        axes.scatter(
            [retention for retention, _ in points], [quality for _, quality in points],
            s=42, color=shade, edgecolor="black", linewidth=0.8, zorder=3,
        )  # fmt: skip
        label = f"{name} NLL, {nll:.2f} nats"
        axes.plot(grid, [curve.quality(float(r), nll) for r in grid], color=shade, label=label)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("retention (share kept of what may be dropped)")
    axes.set_ylabel("quality (NLL full / NLL compressed)")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.05)
    axes.set_title("\n".join(title_lines(curve, measurements, title)), fontsize=9, loc="left")
    axes.legend(loc="lower right", fontsize=8)
    # No date and no library version: equal curves give equal files.
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "kvtier"})


def by_nll(measurements: Sequence[Measurement]) -> list[tuple[str, list[Measurement]]]:
    """Measurements in thirds by the NLL of their context, low first; with two contexts, in two."""
    nll_of = {measurement.context: measurement.nll for measurement in measurements}
    order = sorted(nll_of, key=lambda context: (nll_of[context], context))
    parts = np.array_split(np.array(order), min(len(NAMES), len(order)))
    names = NAMES if len(parts) == len(NAMES) else NAMES[:: len(NAMES) - 1][: len(parts)]
    return [
        (name, [m for m in measurements if m.context in set(part.tolist())])
        for name, part in zip(names, parts, strict=True)
    ]


def mean_quality(measurements: Sequence[Measurement]) -> list[tuple[float, float]]:
    """(retention, mean ratio) of every measured retention, ascending."""
    found = []
    for retention in sorted({measurement.retention for measurement in measurements}):
        ratios = [m.ratio for m in measurements if m.retention == retention]
        found.append((retention, sum(ratios) / len(ratios)))
    return found


def title_lines(curve: Curve, measurements: Sequence[Measurement], title: str) -> list[str]:
    """Return lines on what was measured, then the curve's parameters."""
    contexts = len({measurement.context for measurement in measurements})
    return [
        *([title] if title else []),
        f"{len(measurements)} measurements of {contexts} contexts",
        f"half at m = {curve.alpha:.3f} · NLL + {curve.beta:.3f}, p = {curve.power:.2f}",
    ]
