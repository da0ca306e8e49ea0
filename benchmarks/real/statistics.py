"""The kept share of a context's worth, and its interval.

Losses are `[tasks, contexts]`, nats per answer token. Tasks count alike, as do contexts of a task.
Intervals are bootstrapped over a task's contexts. The draws are the same for every setting, so that
two settings are compared on the same contexts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
