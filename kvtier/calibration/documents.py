"""What the calibration store holds: one JSON document per curve and per head profile.

Documents are immutable, know the model they were measured on, and refuse to be built from numbers
that would make no curve. A caller that reads one from outside uses `parse_document`, and
`check_fits` before using it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

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
from kvtier.calibration.evidence import Evidence, evidence_of
from kvtier.calibration.keys import CurveKey, Key, ProfileKey, curve_key, profile_key
from kvtier.calibration.limits import check_json_limits, read_limited
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError
from kvtier.heads.profile import HeadProfile, ModelShape

MAX_RETENTIONS = 512
_ROUNDING = 1e-6  # m comes back from α·n + β with the last digits changed


class Stored(BaseModel):
    """Base of the documents: immutable, no unknown fields, no NaN and no infinity anywhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1, 2] = 1
    model: str = Field(min_length=1, description="Model name the measurements were made on.")
    revision: str | None = Field(None, description="Digest of the model's weights.")
    created_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))

    @field_validator("created_at")
    @classmethod
    def _in_utc(cls, moment: datetime) -> datetime:
        return moment.astimezone(UTC)

    def to_json(self) -> str:
        """The document as the store holds it."""
        return self.model_dump_json(indent=1)


class CurveDocument(Stored):
    """A fitted calibration curve and how well it explains what was measured.

    policy:             what drops the tokens, with its parameters, as the curve's key names it
    rmse, r2:           on the fitted measurements; in quality, and the share of variance explained
    held_out_rmse:      on contexts left out of the fit; None when there was but one
    answer_floor_nats:  added to both NLLs of every ratio
    retentions:         shares that were measured, ascending; MAX_RETENTIONS of more, both ends in
    evidence:           measured points that the curve must fit as well as it says; since
                        schema_version 2, without it the document is of schema_version 1
    """

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
    evidence: Evidence | None = None

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
        if (self.schema_version == 2) != (self.evidence is not None):
            raise ValueError("evidence belongs to schema_version 2, and to no other")
        if self.evidence is not None:
            self.evidence.check(
                self.curve,
                rmse=self.rmse,
                measurements=self.measurements,
                retentions=self.retentions,
            )
        return self

    @model_serializer(mode="wrap")
    def _without_what_it_has_not(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Readers of schema_version 1 refuse a field that they do not know, even an empty one."""
        content: dict[str, Any] = serialize(self)
        if self.evidence is None:
            content.pop("evidence", None)
        return content

    @property
    def key(self) -> CurveKey:
        """Where the store keeps it."""
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
        _check_same("curve", {name: getattr(self, name) for name in served}, served)


class ProfileDocument(Stored):
    """A head profile, with the same envelope as a curve."""

    schema_version: Literal[1] = 1
    profile: HeadProfile

    @model_validator(mode="after")
    def _is_finite_and_named_alike(self) -> Self:
        rows = self.profile.scores or ()
        costs = [number for cost in self.profile.costs for number in (cost.full, cost.profile)]
        if not all(math.isfinite(number) for row in (*rows, costs) for number in row):
            raise ValueError("profile has scores or costs that are not finite")
        if (self.profile.model, self.profile.revision) != (self.model, self.revision):
            raise ValueError("profile names another model or revision than its document")
        return self

    @classmethod
    def of(cls, profile: HeadProfile) -> Self:
        """The document of a profile made just now."""
        return cls(model=profile.model, revision=profile.revision, profile=profile)

    @property
    def key(self) -> ProfileKey:
        """Where the store keeps it."""
        return profile_key(self.model, self.revision)

    def check_fits(self, model: str, revision: str | None, shape: ModelShape | None = None) -> None:
        """Raise CalibrationMismatchError unless it was made for this model (and head layout)."""
        found = {"model": self.model, "revision": self.revision, "shape": self.profile.shape}
        served = {"model": model, "revision": revision, "shape": shape or self.profile.shape}
        _check_same("head profile", found, served)


Document = CurveDocument | ProfileDocument
DocumentKind = TypeVar("DocumentKind", bound=Stored)


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
        schema_version=2,
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
        return _parsed(CurveDocument, read_limited(path))
    except OSError as error:
        raise CalibrationDocumentError(f"curve: cannot read {path}: {error}") from error
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"curve: {path}: {error}") from error


def _parsed(kind: type[DocumentKind], text: str | bytes) -> DocumentKind:
    """Raises CalibrationDocumentError naming the field at fault."""
    check_json_limits(text)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise CalibrationDocumentError(_first_problem(error)) from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    return f"{where}: {first['msg']}"


def parse_document(key: Key, text: str | bytes) -> Document:
    """The document stored under `key`.

    Raises CalibrationDocumentError naming the key and the field at fault, and
    CalibrationMismatchError when the document belongs under another key.
    """
    kind: type[CurveDocument | ProfileDocument] = (
        CurveDocument if isinstance(key, CurveKey) else ProfileDocument
    )
    try:
        document = _parsed(kind, text)
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"{key}: {error}") from error
    if document.key != key:
        raise CalibrationMismatchError(f"{key}: holds the document of {document.key}")
    return document


def _check_same(what: str, found: dict[str, Any], served: dict[str, Any]) -> None:
    for name, expected in served.items():
        if found[name] != expected:
            raise CalibrationMismatchError(
                f"{what}: made for {name} {found[name]!r}, but {expected!r} is served"
            )
