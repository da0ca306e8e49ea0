"""Random tokens stay, each head's own: what a scorer must beat. The same tokens on every server, so
that what one has stored another can restore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtier.retention.scorers.base import Span, TokenScorer


@dataclass(frozen=True)
class RandomTokens(TokenScorer):
    """See the module docstring. seed: of the draw, together with the span's first position."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, span: Span) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + span.first)
        return torch.rand(span.keys.shape[:2], generator=generator).to(span.keys.device)


__all__ = ["RandomTokens"]
