"""The documents of the calibration store: one JSON document per curve, head profile, published
memory, and model whose tokens' worth is known.

Documents are immutable, know the model they were measured on, and refuse to be built from numbers
that would make no curve. What reads one from outside uses `parse_document`, and `check_fits` before
using a curve or a profile.

A curve has some ten kilobytes; what tokens are worth has megabytes (22 for a model of 80 layers
with 8 KV heads of 128).
"""

from __future__ import annotations

import json
import math
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AwareDatetime,
    Base64UrlBytes,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
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
from kvtier.calibration.keys import DETAILS, Key
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError
from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.reading import first_problem, parse_json

MAX_DOCUMENT_BYTES = 1 << 20
MAX_WORTH_BYTES = 32 << 20
MAX_EXPORT_BYTES = 64 << 20


def check_size(raw: bytes, max_bytes: int) -> None:
    """Raise CalibrationDocumentError for text of more bytes."""
    if len(raw) > max_bytes:
        raise CalibrationDocumentError(f"document: larger than {max_bytes} bytes")


def read_limited(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """A file, or so much of one that is too large that `check_size` refuses it.

    Raises OSError.
    """
    with path.open("rb") as stream:
        return stream.read(max_bytes + 1)


class Stored(BaseModel):
    """Base of the documents: immutable, no unknown fields, no NaN and no infinity anywhere.

    max_bytes: of its text.
    """

    max_bytes: ClassVar[int] = MAX_DOCUMENT_BYTES

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


class Document(Stored):
    """A document of the store. kind: as in its key."""

    kind: ClassVar[str]

    @property
    def key(self) -> Key:
        """The document's key in the store."""
        detail = DETAILS[self.kind]
        return Key.of(self.kind, self.model, self.revision, detail and getattr(self, detail))


DocumentKind = TypeVar("DocumentKind", bound=Document)


def parsed(kind: type[DocumentKind], text: str | bytes) -> DocumentKind:
    """The document that `text` holds. Raises CalibrationDocumentError naming the field at fault."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    check_size(raw, kind.max_bytes)
    try:
        return kind.model_validate(parse_json(raw, "document", _refusal, finite=False))
    except ValidationError as error:
        raise CalibrationDocumentError(first_problem(error, "document")) from error


def _refusal(where: str, expected: str, got: object) -> CalibrationDocumentError:
    return CalibrationDocumentError(f"{where}: expected {expected}, got {got!r}")


def check_same(what: str, found: dict[str, Any], served: dict[str, Any]) -> None:
    """Raise CalibrationMismatchError naming the first of `served` that a document is not of."""
    for name, expected in served.items():
        if found[name] != expected:
            raise CalibrationMismatchError(
                f"{what}: made for {name} {found[name]!r}, but {expected!r} is served"
            )


class ProfileDocument(Document):
    """A head profile, with the same envelope as a curve."""

    kind: ClassVar[str] = "profile"

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

    def check_fits(self, model: str, revision: str | None, shape: ModelShape) -> None:
        """Raise CalibrationMismatchError unless it was made for this model and head layout."""
        found = {"model": self.model, "revision": self.revision, "shape": self.profile.shape}
        served = {"model": model, "revision": revision, "shape": shape}
        check_same("head profile", found, served)


class WorthDocument(Document):
    """weights: the file that `kvtier calibrate` fits, byte by byte."""

    kind: ClassVar[str] = "worth"
    max_bytes: ClassVar[int] = MAX_WORTH_BYTES

    schema_version: Literal[1] = 1
    weights: Base64UrlBytes

    @classmethod
    def of(cls, model: str, revision: str | None, file: Path) -> Self:
        """The document of a file that was fitted just now. Raises OSError."""
        return cls(model=model, revision=revision, weights=urlsafe_b64encode(file.read_bytes()))


NAME_CHARACTERS = 100


class MemoryDocument(Document):
    """The document that `kvtier memory publish` stores; the numbers are from the memory's card.

    name:           what operators call it; one of its model's names
    location:       its directory as servers see it, an absolute path
    digest:         sha256 of the file of its tensors, 64 hexadecimal digits
    prefix_digest:  of the prefix's token ids
    dtype:          of the model that it was built from, such as "bfloat16"
    requeue_above:  share of a prompt's lookups that fall back above which a request is read with
                    the exact prefix
    nll_gap:        nats per token that the answers of held-out requests lose; None: not measured
    held_share:     bytes held, of those of the exact prefix; None: not measured
    """

    kind: ClassVar[str] = "memory"

    schema_version: Literal[1] = 1
    name: str
    location: str
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    prefix_digest: str = Field(min_length=1)
    prefix_tokens: int = Field(ge=1)
    dtype: str = Field(min_length=1)
    requeue_above: float = Field(ge=0, le=1)
    nll_gap: float | None = None
    held_share: float | None = Field(None, ge=0)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not is_memory_name(name):
            raise ValueError(f"must be printable text of 1 to {NAME_CHARACTERS} characters")
        return name

    @field_validator("location")
    @classmethod
    def _is_a_location(cls, location: str) -> str:
        if not is_location(location):
            raise ValueError("must be an absolute path in printable text")
        return location

    @model_validator(mode="after")
    def _is_measured_or_not(self) -> Self:
        if (self.nll_gap is None) != (self.held_share is None):
            raise ValueError("nll_gap and held_share are measured together")
        return self


def is_memory_name(text: str) -> bool:
    """Return whether a published memory may be called so: people can type it, and a table can show
    it."""
    return 0 < len(text) <= NAME_CHARACTERS and text.isprintable() and text == text.strip()


def is_location(text: str) -> bool:
    """Return whether it says, on any server, where a directory is."""
    return text.isprintable() and PurePosixPath(text).is_absolute()


MAX_RETENTIONS = 512
_ROUNDING = 1e-6  # m comes back from α·n + β with the last digits changed


class CurveDocument(Document):
    """A fitted calibration curve and how well it explains what was measured.

    policy:             digest of what drops the tokens, with its parameters, as the curve's key
    rmse, r2:           on the fitted measurements; in quality, and the share of variance explained
    held_out_rmse:      on contexts left out of the fit; None when there was but one
    answer_floor_nats:  added to both NLLs of every ratio
    retentions:         shares that were measured, ascending; MAX_RETENTIONS of more, both ends in
    evidence:           measured points that the curve must fit as well as it says
    """

    kind: ClassVar[str] = "curve"

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
        **asdict(curve),
        **asdict(fitted),
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


DOCUMENTS: dict[str, type[Document]] = {
    one.kind: one for one in (CurveDocument, ProfileDocument, WorthDocument, MemoryDocument)
}


def max_bytes(key: Key) -> int:
    """Return the most bytes that the text of a document under `key` may have."""
    return DOCUMENTS[key.kind].max_bytes


def parse_document(key: Key, text: str | bytes) -> Document:
    """The document stored under `key`.

    Raises CalibrationDocumentError naming the key and the field at fault, and
    CalibrationMismatchError when the document belongs under another key.
    """
    try:
        document = parsed(DOCUMENTS[key.kind], text)
    except CalibrationDocumentError as error:
        raise CalibrationDocumentError(f"{key}: {error}") from error
    if document.key != key:
        raise CalibrationMismatchError(f"{key}: holds the document of {document.key}")
    return document
