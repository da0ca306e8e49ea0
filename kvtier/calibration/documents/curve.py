"""A calibration curve as the store holds it: what was measured, and on what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from kvtier.calibration.curves import (
    HALF_LIMITS,
    POWER_LIMITS,
    UNDERESTIMATE_WEIGHT,
    Curve,
    Measurement,
    fit_curve,
    goodness,
    held_out_rmse,
)
from kvtier.calibration.documents.base import Stored, check_same, parsed
from kvtier.calibration.documents.evidence import Evidence, evidence_of
from kvtier.calibration.documents.keys import CurveKey, curve_key
from kvtier.calibration.documents.limits import read_limited
from kvtier.errors import CalibrationDocumentError

MAX_RETENTIONS = 512
_ROUNDING = 1e-6  # m comes back from α·n + β with the last digits changed


class CurveDocument(Stored):
    """A fitted calibration curve and how well it explains what was measured.

    policy:             digest of what drops the tokens, with its parameters, as the curve's key
    rmse, r2:           on the fitted measurements; in quality, and the share of variance explained
    held_out_rmse:      on contexts left out of the fit; None when there was but one
    answer_floor_nats:  added to both NLLs of every ratio
    retentions:         shares that were measured, ascending; MAX_RETENTIONS of more, both ends in
    evidence:           measured points that the curve must fit as well as it says
    """

    schema_version: Literal[2] = 2
    policy: str = Field(min_length=1)
    dtype: str = Field(min_length=1)
    alpha: float
    beta: float
    power: float
    nll_min: float
    nll_max: float
    rmse: float = Field(ge=0)
    r2: float = Field(le=1)
    held_out_rmse: float | None = Field(None, ge=0)
    measurements: int = Field(ge=1)
    contexts: int = Field(ge=1)
    retentions: tuple[float, ...] = Field(min_length=1)
    answer_floor_nats: float = Field(ge=0)
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    evidence: Evidence

    @field_validator("retentions")
    @classmethod
    def _are_shares(cls, retentions: tuple[float, ...]) -> tuple[float, ...]:
        ascending = list(retentions) == sorted(set(retentions))
        if not ascending or not 0 < retentions[0] <= retentions[-1] <= 1:
            raise ValueError("must be ascending shares in (0, 1]")
        return retentions

    @field_validator("parameters")
    @classmethod
    def _are_finite(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        json.dumps(parameters, allow_nan=False)
        return parameters

    @model_validator(mode="after")
    def _is_a_curve(self) -> Self:
        if self.nll_min > self.nll_max:
            raise ValueError(f"nll_min {self.nll_min} is above nll_max {self.nll_max}")
        for name, limits, values in (
            ("m", HALF_LIMITS, [self.alpha * n + self.beta for n in (self.nll_min, self.nll_max)]),
            ("power", POWER_LIMITS, [self.power]),
        ):
            low, high = limits
            if not all(low - _ROUNDING <= value <= high + _ROUNDING for value in values):
                raise ValueError(f"{name} must be within {low} … {high}, got {values}")
        return self

    @model_validator(mode="after")
    def _is_what_was_fitted(self) -> Self:
        self.evidence.check(
            self.curve,
            rmse=self.rmse,
            measurements=self.measurements,
            retentions=self.retentions,
        )
        return self

    @property
    def key(self) -> CurveKey:
        """The document's key in the store."""
        return curve_key(self.model, self.revision, self.policy)

    @property
    def curve(self) -> Curve:
        """The curve itself."""
        return Curve(self.alpha, self.beta, self.power, self.nll_min, self.nll_max)

    def quality(self, retention: float, nll: float) -> float:
        """The quality in [0, 1] that a share in [0, 1] leaves."""
        return self.curve.quality(retention, nll)

    def retention(self, quality: float, nll: float) -> float:
        """The share to keep for a quality target in (0, 1], never below what was measured."""
        return max(self.curve.retention(quality, nll), self.retentions[0])

    def check_fits(self, model: str, revision: str | None, policy: str, dtype: str) -> None:
        """Raise CalibrationMismatchError unless it was measured on exactly this."""
        served = {"model": model, "revision": revision, "policy": policy, "dtype": dtype}
        check_same("curve", {name: getattr(self, name) for name in served}, served)


def document_of_fit(
    measurements: Sequence[Measurement],
    *,
    model: str,
    revision: str | None,
    policy: str,
    dtype: str,
    answer_floor_nats: float,
    underestimate_weight: float = UNDERESTIMATE_WEIGHT,
    parameters: dict[str, JsonValue] | None = None,
) -> CurveDocument:
    """Fit a curve and describe it. Raises UsageError as `fit_curve` does."""
    curve = fit_curve(measurements, underestimate_weight=underestimate_weight)
    fitted = goodness(curve, measurements)
    return CurveDocument(
        model=model,
        revision=revision,
        policy=policy,
        dtype=dtype,
        alpha=curve.alpha,
        beta=curve.beta,
        power=curve.power,
        nll_min=curve.nll_min,
        nll_max=curve.nll_max,
        rmse=fitted.rmse,
        r2=fitted.r2,
        held_out_rmse=held_out_rmse(measurements, underestimate_weight=underestimate_weight),
        measurements=len(measurements),
        contexts=len({measurement.context for measurement in measurements}),
        retentions=_thinned(sorted({measurement.retention for measurement in measurements})),
        answer_floor_nats=answer_floor_nats,
        parameters={"underestimate_weight": underestimate_weight, **(parameters or {})},
        evidence=evidence_of(curve, measurements, underestimate_weight),
    )


def _thinned(retentions: Sequence[float]) -> tuple[float, ...]:
    """MAX_RETENTIONS of more, evenly spread with both ends: users' samples may each have others."""
    if len(retentions) <= MAX_RETENTIONS:
        return tuple(retentions)
    step = (len(retentions) - 1) / (MAX_RETENTIONS - 1)
    return tuple(retentions[round(index * step)] for index in range(MAX_RETENTIONS))


def load_curve(path: Path) -> CurveDocument:
    """Read a curve file. Raises CalibrationDocumentError naming the file and the field at fault."""
    try:
        return parsed(CurveDocument, read_limited(path))
    except OSError as error:
        raise CalibrationDocumentError(f"curve: cannot read {path}: {error}") from error
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"curve: {path}: {error}") from error
