"""The quality of answers to questions about a context when only some heads see its middle.

Nothing here imports torch: a head method asks for qualities and never touches a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.heads.profile import ModelShape
from kvtier.heads.samples.questions import CalibrationSample

Kept = tuple[tuple[bool, ...], ...]
"""[layers][kv_heads]: True where the head keeps the context."""


class Quality(NamedTuple):
    """recall: share of answers right in every token, which is what greedy decoding gets right
    tokens: share of scored answer tokens that are the argmax, the tokens before them given
    loss:   mean negative log-likelihood of scored answer tokens, nats (lower = better)
    """

    recall: float
    tokens: float
    loss: float


def kept_heads(ca_heads: Sequence[Sequence[int]], shape: ModelShape) -> Kept:
    """The mask of a profile's CA heads."""
    heads = range(shape.num_kv_heads)
    return tuple(tuple(head in chosen for head in heads) for chosen in ca_heads)


class Probed(Protocol):
    """A sample whose questions can be asked; see `kvtier.heads.probes.context.ProbeBatch`."""

    @property
    def sample(self) -> CalibrationSample: ...

    def quality(self, kept: Kept) -> Quality:
        """Return how well the questions are answered when only the `kept` heads see the middle."""
        ...


def measure(batches: Sequence[Probed], kept: Kept) -> Quality:
    """Mean quality over samples, each counted by its questions."""
    return mean_quality(batches, [batch.quality(kept) for batch in batches])


def mean_quality(batches: Sequence[Probed], found: Sequence[Quality]) -> Quality:
    """The mean of what was found for each sample, counted by its questions."""
    weights = [len(batch.sample.questions) for batch in batches]
    total = sum(weights)
    columns = zip(*found, strict=True)
    return Quality(
        *(sum(w * x for w, x in zip(weights, column, strict=True)) / total for column in columns)
    )


def kept_worth(full: Quality, chosen: Quality, none: Quality) -> float:
    """Return how much is kept of what the context is worth to the answers: 1 with the loss of every
    head, 0 with that of none; NaN where the context is worth nothing."""
    worth = none.loss - full.loss
    return (none.loss - chosen.loss) / worth if worth > 0 else math.nan
