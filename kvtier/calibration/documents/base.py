"""The part that all calibration documents share: what they are bound to, and how they are read.

Documents are immutable, know the model they were measured on, and refuse to be built from numbers
that would make no curve.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvtier.calibration.documents.limits import MAX_DOCUMENT_BYTES, check_json_limits
from kvtier.errors import CalibrationDocumentError, CalibrationMismatchError
from kvtier.reading import parse_json


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


DocumentKind = TypeVar("DocumentKind", bound=Stored)


def parsed(kind: type[DocumentKind], text: str | bytes) -> DocumentKind:
    """The document that `text` holds. Raises CalibrationDocumentError naming the field at fault."""
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    check_json_limits(raw, kind.max_bytes)
    try:
        return kind.model_validate(parse_json(raw, "document", _refusal, finite=False))
    except ValidationError as error:
        raise CalibrationDocumentError(_first_problem(error)) from error


def _refusal(where: str, expected: str, got: object) -> CalibrationDocumentError:
    return CalibrationDocumentError(f"{where}: expected {expected}, got {got!r}")


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    return f"{where}: {first['msg']}"


def check_same(what: str, found: dict[str, Any], served: dict[str, Any]) -> None:
    """Raise CalibrationMismatchError naming the first of `served` that a document is not of."""
    for name, expected in served.items():
        if found[name] != expected:
            raise CalibrationMismatchError(
                f"{what}: made for {name} {found[name]!r}, but {expected!r} is served"
            )
