"""The worth of a model's tokens, as the calibration store holds it."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Base64UrlBytes

from kvtier.calibration.documents.base import Stored
from kvtier.calibration.documents.keys import WorthKey, worth_key
from kvtier.calibration.documents.limits import MAX_WORTH_BYTES


class WorthDocument(Stored):
    """weights: the file that `kvtier calibrate` fits, byte by byte."""

    max_bytes: ClassVar[int] = MAX_WORTH_BYTES

    schema_version: Literal[1] = 1
    weights: Base64UrlBytes

    @classmethod
    def of(cls, model: str, revision: str | None, file: Path) -> Self:
        """The document of a file that was fitted just now. Raises OSError."""
        return cls(model=model, revision=revision, weights=urlsafe_b64encode(file.read_bytes()))

    @property
    def key(self) -> WorthKey:
        """The document's key in the store."""
        return worth_key(self.model, self.revision)


__all__ = ["WorthDocument"]
