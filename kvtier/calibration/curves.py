"""Calibration curves: the quality that is left when a share of a context is kept.

    f(r, n) = (1 − 2^{−(r/m)^p}) / (1 − 2^{−(1/m)^p}),   m = α·n + β     f(0) = 0, f(1) = 1
    r*(τ, n) = m · (−log₂(1 − τ (1 − 2^{−(1/m)^p})))^{1/p}

n is the context's token-mean NLL in nats, r the share that is kept of what may be dropped: sink and
recent tokens always stay and do not count, so that one curve fits every length. Quality is the NLL
of the true answers with the full cache over that with the compressed one. m is the share that
leaves about half of the quality, and grows with n: a text that surprises is a text that cannot lose
much. p says how suddenly quality falls there.

Compactor (section 3.5) has p = 1 (with b = −ln 2 / m, and b linear in n), which can only bend: it
starts to fall at once. A text whose facts are either kept or lost falls like a step.

Everything here is pure and deterministic; nothing needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import UsageError

Floats = NDArray[np.float64]

HALF_LIMITS = (0.01, 4.0)
"""Limits of m in a fit. Below the first, less would be kept than is ever measured; the second is
straight to two digits. A model that recalled everything would otherwise ask for m = 0."""

POWER_LIMITS = (0.5, 24.0)
"""Limits of p in a fit."""

MIN_MEASUREMENTS = 8
UNDERESTIMATE_WEIGHT = 2.0
FOLDS = 5

_LN2 = math.log(2.0)
_MIN_NLL_SPREAD = 1e-6  # nats; closer NLLs are one NLL
_RIDGE = 1e-6  # in squared quality, one unit away from where the ridge stands
_FLAT = np.array([0.0, 0.0, 0.0])  # ln m at both ends and ln p of the curve taken when in doubt
_GRID, _STARTS = 7, 4  # points of the grid along each edge of the box; searches from the best


@dataclass(frozen=True)
class Measurement:
    """One context, compressed once and asked about.

    nll:        token-mean NLL of the context, nats
    retention:  share kept of the tokens that may be dropped, in (0, 1]
    ratio:      NLL of the true answers, full cache / compressed cache, both plus a small floor
    context:    id of the context; held-out splits never cut through one
    """

    nll: float
    retention: float
    ratio: float
    context: int
    task: str = ""

    def __post_init__(self) -> None:
        for name, value in (("nll", self.nll), ("ratio", self.ratio)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(name, "a finite number of at least 0", value)
        if not 0 < self.retention <= 1:
            raise UsageError("retention", "a share in (0, 1]", self.retention)


@dataclass(frozen=True)
class Curve:
    """f and its inverse for one model and one retention policy.

    nll_min, nll_max: range of the contexts that were measured. An NLL outside of it is taken as the
    nearer end, so an unusual context is never extrapolated.
    """

    alpha: float
    beta: float
    power: float
    nll_min: float
    nll_max: float

    def half(self, nll: float) -> float:
        """m of a context with this NLL (nats). Raises UsageError for NaN."""
        if math.isnan(nll):
            raise UsageError("nll", "a number", nll)
        half = self.alpha * min(max(nll, self.nll_min), self.nll_max) + self.beta
        return min(max(half, HALF_LIMITS[0]), HALF_LIMITS[1])

    def quality(self, retention: float, nll: float) -> float:
        """f: quality in [0, 1] when `retention` in [0, 1] is kept."""
        half, power = np.float64(self.half(nll)), np.float64(self.power)
        return float(quality_at(np.float64(retention), half, power))

    def retention(self, quality: float, nll: float) -> float:
        """r*: the share to keep, in (0, 1], for a quality in (0, 1]."""
        return retention_at(quality, self.half(nll), self.power)


def quality_at(
    retention: Floats | np.float64, half: Floats | np.float64, power: Floats | np.float64
) -> Floats:
    """f elementwise, broadcasting, for m and p within their limits; e^-700 is as good as 0."""
    kept = np.minimum(_LN2 * (retention / half) ** power, 700.0)
    everything = np.minimum(_LN2 * (1.0 / half) ** power, 700.0)
    return np.asarray(np.expm1(-kept) / np.expm1(-everything))


def retention_at(quality: float, half: float, power: float) -> float:
    """r* for a quality in (0, 1] and m and p within their limits, in (0, 1]."""
    if quality == 1.0:
        return 1.0
    everything = min(_LN2 * (1.0 / half) ** power, 700.0)
    kept = -math.log1p(quality * math.expm1(-everything)) / _LN2
    return float(min(max(half * kept ** (1.0 / power), math.ulp(0.0)), 1.0))


def fit_curve(
    measurements: Sequence[Measurement], *, underestimate_weight: float = UNDERESTIMATE_WEIGHT
) -> Curve:
    """The curve with the least weighted squared error in quality.

    underestimate_weight: weight of an error that predicts too HIGH a quality; the others weigh 1.
    Such an error makes r* too small: the answer is lost unnoticed, while the opposite one
    costs a little memory. A weight w draws the curve through the 1/(1+w) expectile of the measured
    qualities, 2 through the 1/3 expectile; 1 gives ordinary least squares.

    A ratio above 1 counts as 1: better than the full cache is no reason to keep less. Where the
    measurements cannot tell two curves apart, the one nearest to m = p = 1 is taken, within limits;
    so perfect recall everywhere gives a steep curve and not an infinite one. Contexts of equal NLL
    give α = 0.

    Raises UsageError for fewer than MIN_MEASUREMENTS, or when none of them compressed anything.
    """
    if len(measurements) < MIN_MEASUREMENTS:
        raise UsageError(
            "measurements", f"at least {MIN_MEASUREMENTS} of them", f"{len(measurements)}"
        )
    if all(measurement.retention == 1 for measurement in measurements):
        raise UsageError("measurements", "some with a retention below 1", "only retention 1")
    return _solve(measurements, underestimate_weight)


@dataclass(frozen=True)
class Goodness:
    """The fit of a curve to measurements: rmse in quality, r2 = 1 − residual / total variance."""

    rmse: float
    r2: float


def goodness(curve: Curve, measurements: Sequence[Measurement]) -> Goodness:
    """Return how well `curve` predicts `measurements`, whether it was fitted to them or not."""
    _, _, measured = _columns(measurements)
    squares = float(np.sum(_residuals(curve, measurements) ** 2))
    spread = float(np.sum((measured - measured.mean()) ** 2))
    # Equal qualities have no variance to explain: right is 1, wrong is 0.
    r2 = 1.0 - squares / spread if spread > 0 else float(squares < 1e-6 * len(measured))
    return Goodness(math.sqrt(squares / len(measured)), r2)


def weighted_rmse(
    curve: Curve, measurements: Sequence[Measurement], underestimate_weight: float
) -> float:
    """Return the root mean of the squares that `fit_curve` makes small, in quality."""
    weighted = _weighted(_residuals(curve, measurements), underestimate_weight)
    return float(np.sqrt(np.mean(weighted**2)))


def held_out_rmse(
    measurements: Sequence[Measurement], *, underestimate_weight: float = UNDERESTIMATE_WEIGHT
) -> float | None:
    """RMSE in quality on contexts that the curve was not fitted to, over FOLDS splits by context.

    None when there is but one context, so that none can be left out.
    """
    contexts = sorted({measurement.context for measurement in measurements})
    count = min(FOLDS, len(contexts))
    if count < 2:
        return None
    nll = [measurement.nll for measurement in measurements]
    fold = {context: index % count for index, context in enumerate(contexts)}
    errors = []
    for left_out in range(count):
        rest = [m for m in measurements if fold[m.context] != left_out]
        held = [m for m in measurements if fold[m.context] == left_out]
        # Over the range of all contexts: the curve that is served knows the outermost ones too.
        curve = replace(_solve(rest, underestimate_weight), nll_min=min(nll), nll_max=max(nll))
        errors.append(_residuals(curve, held))
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))


def _columns(measurements: Sequence[Measurement]) -> tuple[Floats, Floats, Floats]:
    """NLLs, retentions and qualities, each [measurements]."""
    rows = np.array([(m.nll, m.retention, min(m.ratio, 1.0)) for m in measurements], np.float64)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _residuals(curve: Curve, measurements: Sequence[Measurement]) -> Floats:
    """Predicted minus measured quality, [measurements]."""
    nll, retention, measured = _columns(measurements)
    half = np.array([curve.half(float(one)) for one in nll])
    return quality_at(retention, half, np.float64(curve.power)) - measured


def _weighted(error: Floats, weight: float) -> Floats:
    """Errors (predicted minus measured); squares of those that predict too much weigh `weight`."""
    return np.asarray(np.where(error > 0, math.sqrt(weight), 1.0) * error)


def _solve(measurements: Sequence[Measurement], weight: float) -> Curve:
    """The fit in terms of ln m at the two ends of the NLL range, and of ln p: a box.

    The box is looked through on a coarse grid, and SciPy's trust-region search goes on from the
    best of its points: steep curves make narrow valleys, and one start may end in the wrong one.
    """
    # A server reads curves and fits none: it need not wait for this import.
    from scipy.optimize import least_squares

    nll, retention, measured = _columns(measurements)
    low, high = float(nll.min()), float(nll.max())
    spread = high - low if high - low >= _MIN_NLL_SPREAD else 0.0
    position = (nll - low) / spread if spread else np.zeros_like(nll)
    of_measurement = math.sqrt(1.0 / len(measurements))
    of_ridge = math.sqrt(_RIDGE / len(_FLAT))

    def residuals(point: Floats) -> Floats:
        """Return the residuals of the measurements and of the ridge; their squares sum to the
        loss."""
        at_low, at_high, power = np.exp(point)
        half = at_low * (1.0 - position) + at_high * position
        error = quality_at(retention, half, power) - measured
        ridge = of_ridge * (point - _FLAT)
        return np.concatenate([of_measurement * _weighted(error, weight), ridge])

    box = np.log(np.array([HALF_LIMITS, HALF_LIMITS, POWER_LIMITS])).T
    starts = sorted(_grid(*box), key=lambda point: float(np.sum(residuals(point) ** 2)))
    ends = [
        least_squares(residuals, start, bounds=box, x_scale="jac") for start in starts[:_STARTS]
    ]
    at_low, at_high, power = np.exp(min(ends, key=lambda end: float(end.cost)).x)
    if not spread:
        return Curve(0.0, float(at_low), float(power), low, high)
    alpha = float(at_high - at_low) / spread
    return Curve(alpha, float(at_low) - alpha * low, float(power), low, high)


def _grid(lowest: Floats, highest: Floats) -> Floats:
    """Points inside a box, evenly spread, [points, 3]."""
    steps = (np.arange(_GRID) + 0.5) / _GRID
    shares = np.stack(np.meshgrid(*[steps] * len(lowest), indexing="ij"), axis=-1)
    return np.asarray(lowest + (highest - lowest) * shares.reshape(-1, len(lowest)))


class UnseenTask(NamedTuple):
    """Means over a task's contexts. share: kept of what may be dropped; quality: what that gave."""

    task: str
    share: float
    quality: float


def unseen_tasks(measurements: Sequence[Measurement], target: float) -> list[UnseenTask]:
    """Each task under the curve of the others: what it says that the task's contexts keep, and what
    quality that gives. Held-out contexts of known tasks tell less: what decides how much may go is
    what will be asked. Only the curve leaves the task out; a scorer that was fitted to its
    questions has still seen them. A task is skipped where the others are too few to fit a curve to.
    target: quality in (0, 1]"""
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
