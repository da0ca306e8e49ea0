"""How the entries that a compressed context keeps are divided among its KV heads.

    equal      every head keeps the same number: its own best
    adaptive   the best entries of all heads and layers stay, however many of them a head has

             head 0              head 1              head 2          8 entries for three heads
    equal    a . c . . . .       a b . . . . .       . . . . e f .   (and two more somewhere)
    adaptive a . c d e f g       . b . . . . .       . . . . . . .

Adaptive budgets need scores that compare across heads (`TokenScorer.comparable`). Sources: AdaKV
(arXiv 2407.11550) for budgets within a layer, KVzip (arXiv 2505.23416) for those over all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Where a context keeps less than this share, an entry for what a head dropped costs answers (trials
# on the texts that heads are chosen on: at 10% of the bytes .80 of the context's worth without, .68
# with; at 25% .95 and .96).
COMPENSATED_FROM = 0.2


def best_of_all(worth: Tensor, entries: int) -> Tensor:
    """bool of worth's shape, `[…, tokens]`: its best `entries`."""
    flat = worth.flatten()
    kept = torch.zeros(flat.shape, dtype=torch.bool, device=worth.device)
    kept[flat.topk(entries).indices] = True
    return kept.view(worth.shape)


def is_compensated(kept: int, tokens: int) -> bool:
    """Whether each head gets one entry for the tokens it drops, where heads keep `kept` of so many
    on average."""
    return kept >= COMPENSATED_FROM * tokens


def adaptive_selection(worth: Tensor, kept: int, *, compensation: bool) -> Tensor:
    """Which tokens each head keeps, bool `[heads, tokens]`.

    worth:        float32 `[heads, tokens]`, of the heads of all layers
    kept:         entries per head on average, 1 … tokens
    compensation: whether one of them stands for what the head drops
    """
    heads, tokens = worth.shape
    if kept >= tokens:
        return torch.ones_like(worth, dtype=torch.bool)
    return best_of_all(worth, heads * (kept - int(compensation)))


__all__ = ["COMPENSATED_FROM", "adaptive_selection", "best_of_all", "is_compensated"]
