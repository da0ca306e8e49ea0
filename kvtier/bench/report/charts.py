"""Line charts as SVG text: no library, no script, colours from the page's CSS variables.

y axis   | ·  ·  ·      one polyline with dots per series over equal steps, turns unless said;
(labels) |    ·  ·      the legend is HTML, so that it wraps and can be selected
         +---------
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 14, 40
# Values that differ by more than this are drawn on a logarithmic axis.
LOG_RANGE = 30.0
SERIES_CLASSES = 4


@dataclass(frozen=True)
class Series:
    """One line: a value per step, None where there is none. `style` is the CSS class number."""

    name: str
    values: tuple[float | None, ...]
    style: int


@dataclass(frozen=True)
class Steps:
    """The horizontal axis: what a step is called, and a label for each; their numbers where there
    are none."""

    name: str = "turn"
    labels: tuple[str, ...] = ()

    def label(self, index: int) -> str:
        """Below the axis."""
        return self.labels[index] if self.labels else str(index + 1)


TURNS = Steps()


@dataclass(frozen=True)
class Scale:
    """Maps values to the vertical axis and says which ticks to label."""

    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def height(self, value: float) -> float:
        """0 at the bottom of the axis, 1 at the top."""
        if self.logarithmic:
            span = math.log10(self.high) - math.log10(self.low)
            return (math.log10(value) - math.log10(self.low)) / span
        return (value - self.low) / (self.high - self.low)


def make_scale(values: Sequence[float], at_least: float = 0.0) -> Scale:
    """A linear axis from 0, or a logarithmic one over whole decades where values differ widely."""
    high = max([*values, at_least, 1e-9])
    low = min((value for value in values if value > 0), default=high)
    if high / low > LOG_RANGE and min(values) > 0:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = tuple(10.0**power for power in range(first, last + 1))
        return Scale(ticks[0], ticks[-1], True, ticks)
    step = _nice_step(high / 4)
    count = math.ceil(high / step - 1e-9)
    return Scale(0.0, count * step, False, tuple(i * step for i in range(count + 1)))


def _nice_step(raw: float) -> float:
    """The next of 1, 2, 2.5, 5 × 10^n."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))


def line_chart(
    title: str,
    series: Sequence[Series],
    label: Callable[[float], str],
    at_least: float = 0.0,
    steps: Steps = TURNS,
) -> str:
    """A chart as an `<svg>` element; `label` writes a value for people."""
    values = [value for line in series for value in line.values if value is not None]
    if not values:
        return ""
    scale = make_scale(values, at_least)
    count = max(len(line.values) for line in series)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_axes(scale, count, label, steps),
        *(_line(line, scale, count, label, steps) for line in series),
        "</svg>",
    ]
    return "\n".join(parts)


def _x(index: int, count: int) -> float:
    inner = WIDTH - LEFT - RIGHT
    return LEFT + inner * (index + 0.5) / count


def _y(value: float, scale: Scale) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * scale.height(value)


def _axes(scale: Scale, count: int, label: Callable[[float], str], steps: Steps) -> list[str]:
    parts = []
    for tick in scale.ticks:
        y = _y(tick, scale)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, "end", label(tick)))
    every = max(1, math.ceil(count / 12))
    for index in range(0, count, every):
        x = _x(index, count)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, "middle", steps.label(index)))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "middle", steps.name))
    return parts


def _text(x: float, y: float, anchor: str, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="tick" {place}>{escape(text)}</text>'


def _line(
    line: Series, scale: Scale, count: int, label: Callable[[float], str], steps: Steps
) -> str:
    points = [
        (
            _x(index, count),
            _y(value, scale),
            f"{line.name}, {steps.name} {steps.label(index)}: {label(value)}",
        )
        for index, value in enumerate(line.values)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(text)}</title></circle>'
        for x, y, text in points
    )
    style = line.style % SERIES_CLASSES
    return f'<g class="series s{style}"><polyline points="{path}"/>{dots}</g>'
