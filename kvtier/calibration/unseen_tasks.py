"""A test of a quality target on contexts of kinds that the curve was not fitted to.

Each task is left out in turn: the curve of all others says what its contexts keep, and their
measurements what quality that gives. Held-out contexts of known tasks tell less: what decides how
much may go is what will be asked. Only the curve leaves the task out; a scorer that was fitted to
its questions (`kvtier.heads.tokens`) has still seen them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvtier.calibration.curves import Measurement, fit_curve
from kvtier.errors import UsageError


class UnseenTask(NamedTuple):
    """Means over a task's contexts. share: kept of what may be dropped; quality: what that gave."""

    task: str
    share: float
    quality: float


def unseen_tasks(measurements: Sequence[Measurement], target: float) -> list[UnseenTask]:
    """Each task under the curve of the others. A task is skipped where the others are too few to
    fit a curve to. target: quality in (0, 1]"""
    nll = [measurement.nll for measurement in measurements]
    tasks = list(dict.fromkeys(measurement.task for measurement in measurements))
    found = []
    for task in tasks:
        rest = [m for m in measurements if m.task != task]
        try:
            curve = fit_curve(rest)
        except UsageError:
            continue
        # Over the range of all contexts: the curve that is served knows the outermost ones too.
        curve = replace(curve, nll_min=min(nll), nll_max=max(nll))
        kept = [
            (share := curve.retention(target, context[0].nll), _measured(context, share))
            for context in _contexts(measurements, task)
        ]
        share, quality = np.mean(kept, axis=0)
        found.append(UnseenTask(task, float(share), float(quality)))
    return found


def _contexts(measurements: Sequence[Measurement], task: str) -> Iterator[list[Measurement]]:
    """The measurements of each context of a task."""
    mine = [measurement for measurement in measurements if measurement.task == task]
    for context in dict.fromkeys(measurement.context for measurement in mine):
        yield [measurement for measurement in mine if measurement.context == context]


def _measured(context: Sequence[Measurement], share: float) -> float:
    """Quality of a context at a share, between measured ones on a straight line: from 0 where
    nothing is kept to 1 where all is."""
    measured = sorted((measurement.retention, measurement.ratio) for measurement in context)
    shares, qualities = [0.0, *(x for x, _ in measured)], [0.0, *(y for _, y in measured)]
    if shares[-1] < 1:
        shares, qualities = [*shares, 1.0], [*qualities, 1.0]
    return float(np.interp(share, shares, qualities))


__all__ = ["UnseenTask", "unseen_tasks"]
