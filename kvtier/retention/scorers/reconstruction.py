"""Reconstruction: tokens stay that the model would look at if it repeated the context.

What they would draw is not measured, as in KVzip, which prefills every context twice, but predicted
from the layer's keys and values by a linear map that `kvtier calibrate tokens` fits once per model
(kvtier.retention.token_worth, where the sources are). Its scores compare across heads and layers,
so heads can compete for entries (`head_budgets = adaptive`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvtier.errors import UsageError
from kvtier.retention.scorers.base import Span, TokenScorer
from kvtier.retention.token_worth import TokenWorth
from kvtier_kernels.codes import feedback

if TYPE_CHECKING:
    from typing import Self

    from kvtier.config import Settings


@dataclass(frozen=True)
class Reconstruction(TokenScorer):
    """See the module docstring.

    worth:  the fitted map; digest: its own, which names it
    heads:  which of a layer's KV heads this sees; None: all
    total:  adds up what tensor parallel ranks have, where it sees a rank's heads only
    """

    name: ClassVar[str] = "reconstruction"
    comparable: ClassVar[bool] = True
    is_fitted: ClassVar[bool] = True

    worth: TokenWorth = field(compare=False, repr=False)
    digest: str = ""
    heads: range | None = field(default=None, compare=False)
    total: Callable[[torch.Tensor], torch.Tensor] = field(
        default=lambda part: part, compare=False, repr=False
    )

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Raises UsageError without a file of weights."""
        file = settings.scorer.file
        if file is None:
            expected = "a file that `kvtier calibrate tokens` has written"
            raise UsageError("scorer.file", f"{expected}, with scorer = {cls.name}", None)
        try:
            changed = file.stat().st_mtime_ns
        except OSError:
            changed = 0
        return cls.of(_loaded(file, changed))

    @classmethod
    def of(cls, worth: TokenWorth) -> Self:
        return cls(worth, worth.digest)

    def parameters(self) -> dict[str, Any]:
        return {"digest": self.digest}

    def check_fits(self, layers: int, kv_heads: int, head_dim: int, revision: str | None) -> None:
        self.worth.check_fits(layers, kv_heads, head_dim, revision)

    def among_ranks(
        self, heads: range, total: Callable[[torch.Tensor], torch.Tensor]
    ) -> Reconstruction:
        return replace(self, heads=heads, total=total)

    def feedback(self) -> torch.Tensor | None:
        if self.worth.queries is None:
            return None
        heads = self.heads or range(self.worth.queries.shape[1])
        return feedback(self.worth.queries[:, heads.start : heads.stop])

    def score(self, span: Span) -> torch.Tensor:
        assert span.values is not None, "a comparable scorer is given values"
        worth, layer = _on_device(self.worth, span.keys.device), span.layer
        if self.heads is None:
            return worth.predict(layer, span.keys, span.values, span.rotation, span.first)
        told = worth.predict_from_kv(layer, span.keys, span.values, span.rotation, self.heads)
        told = self.total(told) + worth.predict_from_position(layer, span.keys.shape[1], span.first)
        return told[self.heads.start : self.heads.stop]


@lru_cache(maxsize=4)
def _loaded(file: Path, changed: int) -> TokenWorth:
    return TokenWorth.load(file)


@lru_cache(maxsize=4)
def _on_device(worth: TokenWorth, device: torch.device) -> TokenWorth:
    return worth if worth.weights.device == device else worth.to(device)
