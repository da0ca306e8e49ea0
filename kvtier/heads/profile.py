"""The head profile: per layer, which KV heads are context-anchored (CA).

A profile is bound to one model by its shape and, where known, its name and revision. It is a
JSON document, so that it can be read, diffed and reviewed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.errors import HeadProfileError, HeadProfileMismatchError, UsageError
from kvtier.reading import first_problem, read_json

SCHEMA_VERSION: Literal[1] = 1


Head = tuple[int, int]
"""(layer, KV head)."""

Matrix = tuple[tuple[float, ...], ...]
"""[layers][kv_heads]."""


class ModelShape(BaseModel):
    """The part of a model's configuration that decides whether a profile fits it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_attention_heads // self.num_kv_heads

    def of_rank(self, ranks: int) -> ModelShape:
        """Return the shape that each of `ranks` tensor parallel ranks holds. With more ranks than
        KV heads several ranks hold the same head."""
        kv_heads = max(1, self.num_kv_heads // ranks)
        heads = self.num_attention_heads // ranks
        return self.model_copy(update={"num_kv_heads": kv_heads, "num_attention_heads": heads})

    def kv_heads_of_rank(self, rank: int, ranks: int) -> range:
        """Return the KV heads that the `rank`-th of `ranks` tensor parallel ranks holds, counted
        from 0, shared out as SGLang's QKVParallelLinear does."""
        first = rank * self.num_kv_heads // ranks
        return range(first, first + self.of_rank(ranks).num_kv_heads)


class MeasuredCost(BaseModel):
    """The cost of keeping only the CA heads, when it was verified by measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str = Field(description="Such as 'recall' or 'nll'.")
    full: float = Field(description="The metric with every head CA.")
    profile: float = Field(description="The metric with this profile.")
    samples: int = Field(ge=1)
    context_tokens: int = Field(ge=1)


class HeadProfile(BaseModel):
    """The KV heads that are CA, and where that knowledge comes from.

    ca_heads: per layer, ascending KV head indices; a layer may have none or all.
    scores:   [layer][head], higher = keep the context; None when the method has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    model: str = Field(description="Model name or path the profile was made on.")
    revision: str | None = Field(None, description="Digest of the model's weights.")
    shape: ModelShape
    method: str
    ca_heads: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float, ...], ...] | None = None
    costs: tuple[MeasuredCost, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_its_shape(self) -> HeadProfile:
        layers, heads = self.shape.num_layers, self.shape.num_kv_heads
        if len(self.ca_heads) != layers:
            raise ValueError(f"ca_heads must list {layers} layers, got {len(self.ca_heads)}")
        for layer, chosen in enumerate(self.ca_heads):
            if list(chosen) != sorted(set(chosen)) or any(not 0 <= h < heads for h in chosen):
                raise ValueError(
                    f"ca_heads[{layer}] must be ascending KV heads below {heads}, got {chosen}"
                )
        if self.scores is not None and (
            len(self.scores) != layers or any(len(row) != heads for row in self.scores)
        ):
            raise ValueError(f"scores must be {layers} rows of {heads} numbers")
        return self

    @property
    def num_ca_heads(self) -> int:
        """CA heads over all layers."""
        return sum(len(layer) for layer in self.ca_heads)

    @property
    def ca_share(self) -> float:
        """CA heads / all KV heads, in [0, 1]."""
        return self.num_ca_heads / (self.shape.num_layers * self.shape.num_kv_heads)

    def locality_heads(self, layer: int) -> tuple[int, ...]:
        """The other KV heads of a layer, ascending."""
        chosen = set(self.ca_heads[layer])
        return tuple(h for h in range(self.shape.num_kv_heads) if h not in chosen)

    def of_rank(self, rank: int, ranks: int) -> HeadProfile:
        """Return the part of the profile that the `rank`-th of `ranks` tensor parallel ranks holds,
        its KV heads counted from 0."""
        shape, held = self.shape.of_rank(ranks), self.shape.kv_heads_of_rank(rank, ranks)
        ca_heads = tuple(
            tuple(head - held.start for head in layer if head in held) for layer in self.ca_heads
        )
        scores = self.scores and tuple(row[held.start : held.stop] for row in self.scores)
        update = {"shape": shape, "ca_heads": ca_heads, "scores": scores, "costs": ()}
        return self.model_copy(update=update)

    def check_fits(self, shape: ModelShape, revision: str | None = None) -> None:
        """Raise HeadProfileMismatchError unless this profile was made for such a model."""
        if self.shape != shape:
            raise HeadProfileMismatchError(
                f"head_profile: made for {self.shape!r} (model {self.model!r}), "
                f"but the served model is {shape!r}"
            )
        if revision is not None and self.revision is not None and revision != self.revision:
            raise HeadProfileMismatchError(
                f"head_profile: made for revision {self.revision!r} of {self.model!r}, "
                f"but the served weights are {revision!r}"
            )

    def save(self, path: Path) -> None:
        """Write the profile as JSON, atomically."""
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        staging = path.with_name(path.name + ".tmp")
        staging.write_text(text + "\n")
        staging.replace(path)


def load_profile(path: Path) -> HeadProfile:
    """Read a profile. Raises HeadProfileError naming the file and what is wrong with it."""
    try:
        return HeadProfile.model_validate(read_json(path, "head_profile"))
    except UsageError as error:
        raise HeadProfileError(str(error)) from error
    except ValidationError as error:
        problem = first_problem(error, "document")
        raise HeadProfileError(f"head_profile: {path}: {problem}") from error


def full_profile(shape: ModelShape) -> HeadProfile:
    """Every head CA: nothing is ever dropped."""
    everything = (tuple(range(shape.num_kv_heads)),) * shape.num_layers
    return HeadProfile(model="any", shape=shape, method="full", ca_heads=everything)


def window_profile(shape: ModelShape) -> HeadProfile:
    """No head CA: the floor that any useful profile must beat."""
    return HeadProfile(model="any", shape=shape, method="window", ca_heads=((),) * shape.num_layers)


def random_profile(shape: ModelShape, num_ca_heads: int, seed: int) -> HeadProfile:
    """`num_ca_heads` heads drawn uniformly: the control for a calibrated profile."""
    total = shape.num_layers * shape.num_kv_heads
    chosen = random.Random(seed).sample(range(total), num_ca_heads)
    layers = [
        tuple(sorted(i % shape.num_kv_heads for i in chosen if i // shape.num_kv_heads == layer))
        for layer in range(shape.num_layers)
    ]
    return HeadProfile(
        model="any",
        shape=shape,
        method="random",
        ca_heads=tuple(layers),
        parameters={"seed": seed, "num_ca_heads": num_ca_heads},
    )
