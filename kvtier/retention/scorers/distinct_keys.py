"""DistinctKeys: tokens whose keys stick out stay. Two measures see different things: the
statistical leverage of Compactor (directions that few keys share) and KeyDiff (far from the mean
direction). Both are of keys before rotation, where what a token says is not mixed with where it
stands.

    score = pool(z(leverage) + w · z(−cos(k, mean of the normalised keys)))

It needs nothing from the prefill: no attention is looked at, and nothing is kept per token.
Sources: Compactor, §3.2; Park et al., "KeyDiff", 2025. Trials on contexts of seed 3000 chose that
both are added, of keys before rotation, and pooled over three. On others it keeps more of what is
asked for than `compactor` or `keydiff` at a quarter and a tenth, and as much, within the error, at
a half and more (docs/decisions.md). It is the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtier.retention.scorers.base import Span, TokenScorer, pooled, z_score
from kvtier_kernels.scores import key_difference, leverage_scores


@dataclass(frozen=True)
class DistinctKeys(TokenScorer):
    """See the module docstring.

    difference_weight: w
    pool_width:        odd number of neighbouring tokens that share their score
    """

    name: ClassVar[str] = "distinct-keys"

    difference_weight: float = 1.0
    pool_width: int = 3

    def score(self, span: Span) -> torch.Tensor:
        leverage = z_score(leverage_scores(span.keys, span.rotation))
        difference = z_score(key_difference(span.keys, span.rotation))
        return pooled(leverage + self.difference_weight * difference, self.pool_width)


__all__ = ["DistinctKeys"]
