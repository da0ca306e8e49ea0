"""How the entries that are kept are divided among KV heads: each has a share of its own.

    all heads together keep     10%        25%        50%  of a context
    head (0, 1) keeps           2%         6%         21%
    head (7, 2) keeps           48%        88%        96%     found in calibration: where the best
                                                              tokens of all heads together are

Fixed before serving, as here, they let memory be laid out by them, but fail on contexts unlike
those they were found on (docs/measured.md); `best_of_all` decides them anew for every context, as
AdaKV (arXiv 2407.11550) does. Nothing serves by either yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtier.retention.head_budgets import best_of_all

LEVELS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.33, 0.5, 0.75, 1.0)


def measured_shares(worth: Tensor) -> Tensor:
    """`[LEVELS, layers, kv_heads]`: what each head holds of the best entries of one context.

    worth: `[layers, kv_heads, tokens]`
    """
    return torch.stack(
        [best_of_all(worth, int(level * worth.numel())).float().mean(-1) for level in LEVELS]
    )


@dataclass(frozen=True)
class HeadShares:
    """shares: `[LEVELS, layers, kv_heads]`, each level's mean is the level (but for rounding)."""

    shares: Tensor

    @classmethod
    def mean_of(cls, measured: Sequence[Tensor]) -> HeadShares:
        return cls(torch.stack(list(measured)).mean(0))

    def at(self, share: float) -> Tensor:
        """Shares `[layers, kv_heads]` where all heads together keep `share` of the entries."""
        above = next(i for i, level in enumerate(LEVELS) if level >= share)
        if above == 0:
            return self.shares[0]
        low, high = LEVELS[above - 1], LEVELS[above]
        part = (share - low) / (high - low)
        return torch.lerp(self.shares[above - 1], self.shares[above], part)

    def counts(self, share: float, tokens: int, edges: int, entries: int) -> Tensor:
        """Tokens of the middle that each head keeps, int64 `[layers, kv_heads]`.

        edges:    tokens at both ends that every head keeps
        entries:  of all heads' middles together; the counts add up to no more
        """
        middle = tokens - edges
        wanted = (self.at(share) * tokens - edges).clamp(0, middle)
        if entries <= 0 or not bool(wanted.any()):
            return torch.zeros(wanted.shape, dtype=torch.int64)
        # What heads cannot hold more of goes to the others.
        low, high = 0.0, float(middle / wanted[wanted > 0].min())
        for _ in range(50):
            factor = (low + high) / 2
            total = float((wanted * factor).clamp_max(middle).floor().sum())
            low, high = (factor, high) if total <= entries else (low, factor)
        return (wanted * low).clamp_max(middle).floor().long()


__all__ = ["LEVELS", "HeadShares", "measured_shares"]
