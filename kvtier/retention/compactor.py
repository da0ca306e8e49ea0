"""Compactor: which tokens of a context a CA head keeps, decided before anyone has asked.

Per head, two z-scored signals are added (Compactor, equation 6):

    score = z(pool(window mass · ‖v‖)) + λ · z(leverage of the keys before rotation)

and the best `count` tokens stay. Public versions differ: the paper's λ is 0.3; kvpress takes the
share removed, uses no 1/√d and z-scores over all heads at once; compactor-vllm takes 0.5, no ‖v‖.
Ours is the paper's with exact leverage instead of a random sketch (see leverage_scores) and both
signals weighted alike: on the demo model, 64 facts in 4k tokens were all recalled from 60% of the
context with λ = 0.3, from 40% with 1, from 25% with 3, and from 75% with 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvtier_kernels.scores import leverage_scores


@dataclass(frozen=True)
class Compactor:
    """The scoring rule. All of it enters the policy digest a calibration curve is bound to.

    leverage_weight: λ
    window_tokens:   tokens that look at each other without a mask
    pool_width:      odd number of neighbouring tokens that share their window mass
    """

    leverage_weight: float = 1.0
    window_tokens: int = 256
    pool_width: int = 3

    def scores(self, keys: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Float32 `[heads, tokens]`, higher = keep.

        keys: `[heads, tokens, dim]` before rotation
        mass: `[heads, tokens]`, `kvtier_kernels.scores.window_mass` times ‖v‖
        """
        leverage = z_score(leverage_scores(keys))
        return z_score(pooled(mass, self.pool_width)) + self.leverage_weight * leverage

    def select(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` best tokens of every head in order of position: int64 `[heads, count]`."""
        best = torch.topk(scores, count, dim=-1, sorted=False).indices
        return best.sort(dim=-1).values


def z_score(x: torch.Tensor) -> torch.Tensor:
    """Each row of `[heads, tokens]` with mean 0 and deviation 1; a constant row becomes 0."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)


def pooled(x: torch.Tensor, width: int) -> torch.Tensor:
    """Mean over `width` neighbours in `[heads, tokens]`; at the ends over those that exist."""
    if width == 1:
        return x
    return functional.avg_pool1d(
        x.unsqueeze(0), width, stride=1, padding=width // 2, count_include_pad=False
    ).squeeze(0)
