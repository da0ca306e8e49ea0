"""A memory's card: what it was made for, how, and what it was measured to cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvtier.calibration.documents import Stored
from kvtier.errors import MemoryMismatchError
from kvtier.heads.model.config import model_name, model_shape, read_config, weights_revision
from kvtier.heads.profile import ModelShape

_ROTATION_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleaved",
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Identity(Stored):
    """The model and the prefix that a memory stands for; another one's answers would be nonsense.

    tokenizer, rotation: digests of the tokenizer's files, and of how positions are encoded
    dtype:               that the model is served in, such as "bfloat16"
    prefix_digest:       of the prefix's token ids
    """

    shape: ModelShape
    tokenizer: str
    rotation: str
    dtype: str
    prefix_tokens: int = Field(ge=0)
    prefix_digest: str

    @classmethod
    def of(cls, model_path: str, dtype: str, prefix_ids: Sequence[int]) -> Identity:
        """Return the identity of a local model directory. Raises UsageError and
        UnsupportedModelError."""
        config = read_config(model_path)
        return cls(
            model=model_name(model_path),
            revision=weights_revision(model_path),
            shape=model_shape(config),
            tokenizer=_files_digest(Path(model_path), _TOKENIZER_FILES),
            rotation=_digest({key: config.get(key) for key in _ROTATION_KEYS}),
            dtype=dtype,
            prefix_tokens=len(prefix_ids),
            prefix_digest=_digest(list(prefix_ids)),
        )

    def with_prefix(self, prefix_ids: Sequence[int]) -> Identity:
        """The same model behind another prefix."""
        update = {"prefix_tokens": len(prefix_ids), "prefix_digest": _digest(list(prefix_ids))}
        return self.model_copy(update=update)

    def check_serves(self, served: Identity) -> None:
        """Raises MemoryMismatchError, naming what differs, for another model or prefix than this
        one's."""
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(served, name)
            if name not in ("created_at", "schema_version", "model") and mine != theirs:
                raise MemoryMismatchError(
                    f"memory: made for {name} {mine!r} of {self.model}, but {theirs!r} is served"
                )


class Row(BaseModel):
    """The loss of requests in one way of holding the prefix.

    nll_gap:      nats per token of the answers, beside the exact prefix
    kl:           nats per token, from the exact prefix's distributions
    right:        share of the requests whose whole answer was likeliest, token by token
    bytes_held:   of what is held of the prefix
    bytes_read:   of that, by a token that is generated, in all layers
    fell_back:    share of lookups that no entry was near enough to
    requeued:     share of the requests that were read with the exact prefix instead
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    way: str
    requests: int = Field(ge=1)
    nll_gap: float
    kl: float
    right: float = Field(ge=0, le=1)
    bytes_held: int = Field(ge=0)
    bytes_read: int = Field(ge=0)
    fell_back: float = Field(0.0, ge=0, le=1)
    requeued: float = Field(0.0, ge=0, le=1)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _files_digest(folder: Path, names: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        if (folder / name).is_file():
            found.update(name.encode() + (folder / name).read_bytes())
    return found.hexdigest()[:16]
