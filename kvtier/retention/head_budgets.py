"""The division of the entries that a compressed context keeps among its KV heads.

    equal      every head keeps the same number: its own best
    adaptive   the best entries of all heads and layers stay, however many of them a head has
    profile    anchored heads keep the same number, the others one entry for all

             head 0              head 1              head 2              6 entries
    equal    a . c . . . .       a b . . . . .       . . . . e f .
    adaptive a . c d e f .       . b . . . . .       . . . . . . .
    profile  a . c d . . .       mean of all         mean of all

Adaptive budgets need scores that compare across heads (`TokenScorer.comparable`). Sources: AdaKV
(arXiv 2407.11550) for budgets within a layer, KVzip (arXiv 2505.23416) for those over all layers.

Memory is given out in pages of `PAGE` entries of one head. So a budget is a number of pages: a head
opens a page where the entry that would be its first is among the best, and fills it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtier.retention.shares.base import PAGE


def best_of_all(worth: Tensor, entries: int) -> Tensor:
    """bool of worth's shape, `[…, tokens]`: its best `entries`."""
    flat = worth.flatten()
    kept = torch.zeros(flat.shape, dtype=torch.bool, device=worth.device)
    kept[flat.topk(entries).indices] = True
    return kept.view(worth.shape)


def adaptive_selection(worth: Tensor, kept: int, page: int = PAGE) -> Tensor:
    """Return the tokens that each head keeps, bool `[heads, tokens]`: whole pages, but for a last
    one of a head that keeps everything. Nothing waits for the device.

    worth: float32 `[heads, tokens]`, of the heads of all layers
    kept:  entries per head on average, 0 … tokens; all heads together keep no more
    page:  entries of a page

    The tokens that a head drops are in no entry. One entry for their mean with as many votes, as
    locality heads have, was tried. It kept .99 of the context's worth instead of .97 at a quarter
    of 2k tokens, but -.62 instead of .90 of many-shot classification at a quarter of 4k.
    """
    heads, tokens = worth.shape
    if kept >= tokens:
        return torch.ones_like(worth, dtype=torch.bool)
    values, order = worth.sort(-1, descending=True)
    pages = best_of_all(values[:, ::page], heads * kept // page).sum(-1, keepdim=True)
    within = torch.arange(tokens, device=worth.device) < pages * page
    return torch.zeros_like(within).scatter(-1, order, within)
