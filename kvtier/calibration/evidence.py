"""The evidence that a curve was fitted to, kept beside it: whether the two belong together can be
seen later.

A curve is three numbers, and wrong ones look like right ones. With the measurements next to them, a
reader computes the error of the fit again and must find the one that was written down. Nothing but
rounding can come between, whatever the noise: the fit's own error is the smallest there is, so a
curve that asks for clearly other shares has a clearly larger one.

This finds accidents and careless changes. It is no signature: who rewrites a whole document
consistently is believed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from kvtier.calibration.curves import Curve, Measurement, goodness, weighted_rmse

MAX_POINTS = 512
MAX_DEVIATION = 1e-4
"""The most that an error computed again may differ from the stored one, in quality: machines round
apart."""

Share = Annotated[float, Field(gt=0, le=1)]
Quality = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0)]


class Evidence(BaseModel):
    """points:            (NLL of the context in nats, share kept, quality), each as measured; all
                          of them, or MAX_POINTS of more, the extreme NLLs and shares among these
    underestimate_weight: of the fit, as `fit_curve` takes it
    weighted_rmse:        of the curve on the points, with that weight, in quality
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    underestimate_weight: float = Field(ge=1)
    weighted_rmse: float = Field(ge=0)
    points: tuple[tuple[Nats, Share, Quality], ...] = Field(min_length=1, max_length=MAX_POINTS)

    def check(
        self, curve: Curve, *, rmse: float, measurements: int, retentions: tuple[float, ...]
    ) -> None:
        """Raise ValueError unless `curve` is the one that was fitted to the points.

        The others are as in the curve's document: rmse in quality on all `measurements`, and the
        shares that were measured, ascending.
        """
        if len(self.points) != min(measurements, MAX_POINTS):
            raise ValueError(f"evidence has {len(self.points)} points of {measurements}")
        nlls, shares, _ = zip(*self.points, strict=True)
        _check_range("nll", nlls, (curve.nll_min, curve.nll_max))
        _check_range("retentions", shares, (retentions[0], retentions[-1]))
        measured = [Measurement(nll, share, quality, 0) for nll, share, quality in self.points]
        found = weighted_rmse(curve, measured, self.underestimate_weight)
        if abs(found - self.weighted_rmse) > MAX_DEVIATION:
            raise ValueError(
                "alpha, beta and power are not of the curve that was fitted to the measured "
                f"points: weighted RMSE {found:.4f} instead of {self.weighted_rmse:.4f}"
            )
        # The squares of all measurements are at least those of some.
        seen, whole = goodness(curve, measured).rmse, measurements == len(measured)
        most = rmse * math.sqrt(measurements / len(measured))
        if not (rmse if whole else 0.0) - MAX_DEVIATION <= seen <= most + MAX_DEVIATION:
            raise ValueError(f"rmse: {rmse} is stated, and {seen:.4f} is found on the points")


def evidence_of(
    curve: Curve, measurements: Sequence[Measurement], underestimate_weight: float
) -> Evidence:
    """The evidence of a curve that was just fitted to the measurements."""
    chosen = _chosen(measurements)
    return Evidence(
        underestimate_weight=underestimate_weight,
        weighted_rmse=weighted_rmse(curve, chosen, underestimate_weight),
        points=tuple((m.nll, m.retention, min(m.ratio, 1.0)) for m in chosen),
    )


def _chosen(measurements: Sequence[Measurement]) -> list[Measurement]:
    """All, or MAX_POINTS drawn at random, always the same ones; the ends of both ranges are in."""
    if len(measurements) <= MAX_POINTS:
        return list(measurements)
    every = range(len(measurements))
    by_nll = sorted(every, key=lambda index: measurements[index].nll)
    by_share = sorted(every, key=lambda index: measurements[index].retention)
    ends = {by_nll[0], by_nll[-1], by_share[0], by_share[-1]}
    others = [index for index in every if index not in ends]
    drawn = random.Random(0).sample(others, MAX_POINTS - len(ends))
    return [measurements[index] for index in sorted(ends.union(drawn))]


def _check_range(name: str, found: Sequence[float], stated: tuple[float, float]) -> None:
    if (min(found), max(found)) != stated:
        raise ValueError(
            f"{name}: {stated[0]} … {stated[1]} is not the range of the measured points, which is "
            f"{min(found)} … {max(found)}"
        )
