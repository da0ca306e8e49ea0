"""A prefix memory that is published: where servers find it, and what it must be.

The memory itself stays in its directory. Nothing here holds tensors, texts or tokens.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kvtier.calibration.documents.base import Stored
from kvtier.calibration.documents.keys import MemoryKey, memory_key

NAME_CHARACTERS = 100


class MemoryDocument(Stored):
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

    @property
    def key(self) -> MemoryKey:
        """The document's key in the store."""
        return memory_key(self.model, self.revision, self.name)


def is_memory_name(text: str) -> bool:
    """Return whether a published memory may be called so: people can type it, and a table can show
    it."""
    return 0 < len(text) <= NAME_CHARACTERS and text.isprintable() and text == text.strip()


def is_location(text: str) -> bool:
    """Return whether it says, on any server, where a directory is."""
    return text.isprintable() and PurePosixPath(text).is_absolute()


__all__ = ["NAME_CHARACTERS", "MemoryDocument", "is_location", "is_memory_name"]
