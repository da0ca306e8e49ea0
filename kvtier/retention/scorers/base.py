"""The interface of a token scorer: it says which tokens of a context CA heads keep, before anyone
has asked.

    prefill     observe(q, k, v)  →  state       what a token was seen to be, kept per head
    turn ends   score(span)       →  scores      the best tokens of each head stay

A scorer is a frozen dataclass whose fields are its parameters. The engine, calibration and the
benchmarks use it alike; its parameters enter the digests that calibration curves and names in the
tier are bound to. docs/extending.md writes one, from its file to the running server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.nn import functional

from kvtier_kernels.scores import Rotation

if TYPE_CHECKING:
    from typing import Self

    from kvtier.config import Settings

# Deviation of a row, as a share of its mean, below which it says nothing.
_CONSTANT = 1e-3


class Chunk(NamedTuple):
    """The queries, keys and values of some heads of a layer in a prefill pass, of one request or
    several.

    q, k, v:  q `[tokens, heads, group, dim]`, k and v `[tokens, heads, dim]`; q and k rotated
    q_indptr: request i owns the rows q_indptr[i]:q_indptr[i + 1]
    start:    position of each request's first row in its context
    scale:    multiplies q.k
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_indptr: Sequence[int]
    start: Sequence[int]
    scale: float


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a context, of some heads of a layer.

    keys:     `[heads, tokens, dim]`, rotated, any float dtype
    state:    float32 `[heads, state_width, tokens]`, what `observe` returned for them
    first:    position of the first token
    rotation: how the keys were rotated; None for a model that does not rotate
    values:   `[heads, tokens, dim]`, there for a scorer that is `comparable`
    layer:    which layer of the model
    """

    keys: torch.Tensor
    state: torch.Tensor
    first: int = 0
    rotation: Rotation | None = None
    values: torch.Tensor | None = None
    layer: int = 0


@dataclass(frozen=True)
class TokenScorer(ABC):
    """See the module docstring.

    name:        what users choose it by.
    state_width: how many float32 numbers a token and head keep from the prefill; 0 for none.
    comparable:  whether scores compare across heads and layers, so that heads can compete for
                 entries (`head_budgets = adaptive`). Such a scorer sees all KV heads of a layer,
                 of a server with tensor parallel ranks those of its rank; see `among_ranks`.
    is_fitted:   whether it was fitted to a model and comes from a file (`scorer.file`).
    """

    name: ClassVar[str]
    state_width: ClassVar[int] = 0
    comparable: ClassVar[bool] = False
    is_fitted: ClassVar[bool] = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the scorer as a server with these settings uses it."""
        return cls()

    def parameters(self) -> dict[str, Any]:
        """All that decides the scores."""
        return asdict(self)

    def state_parameters(self) -> dict[str, Any]:
        """Return the parameters that decide the state."""
        return {}

    def check_fits(  # noqa: B027, most scorers fit any model
        self, layers: int, kv_heads: int, head_dim: int, revision: str | None
    ) -> None:
        """Raises UsageError for a model that the scorer was not fitted to. revision: the digest of
        its weights, where it is known."""

    def observe(self, chunk: Chunk) -> torch.Tensor:
        """The state of new tokens: float32 `[heads, state_width, tokens]`. A prefill that is cut
        into chunks should give what it gives in one."""
        raise NotImplementedError(f"{self.name}: observe is only for a state_width above 0")

    def among_ranks(
        self, heads: range, total: Callable[[torch.Tensor], torch.Tensor]
    ) -> TokenScorer:
        """Return the scorer as a tensor parallel rank uses it that holds these of the model's KV
        heads. It matters to scores of a head that need what the others hold: total(part) adds up
        what each rank calls it with, and waits for all of them; ranks score the same spans in the
        same order."""
        return self

    def feedback(self) -> torch.Tensor | None:
        """Return the weights by which keys are coded: `kvtier_kernels.codes.feedback`, float32
        `[layers, kv_heads, dim, dim]`, of the heads that it sees; None where nothing is known of
        queries."""
        return None

    @abstractmethod
    def score(self, span: Span) -> torch.Tensor:
        """Float32 `[heads, tokens]`, higher = keep. Unless the scorer is `comparable`, only the
        order within a head matters."""


def z_score(x: torch.Tensor) -> torch.Tensor:
    """Each row of `[heads, tokens]` with mean 0 and deviation 1.

    A row that is constant but for rounding becomes (nearly) 0, not noise of deviation 1: so is the
    leverage of fewer tokens than a key has dimensions.
    """
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return centred / torch.maximum(deviation, _CONSTANT * mean.abs()).clamp_min(1e-12)


def pooled(x: torch.Tensor, width: int) -> torch.Tensor:
    """Mean over `width` neighbours in `[heads, tokens]`; at the ends over those that exist."""
    if width == 1:
        return x
    return functional.avg_pool1d(
        x.unsqueeze(0), width, stride=1, padding=width // 2, count_include_pad=False
    ).squeeze(0)
