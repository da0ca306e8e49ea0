"""Sums over groups of entries, per head: what merging is made of.

    target of 7 entries     0  1  0  UNMERGED  2  1  0        count = 3
    bin                     0  1  0     3      2  1  0        the last bin takes what is unmerged

Heads first: `[heads, rows, tokens]` for numbers per entry (a row per query head, or one), and
`[heads, tokens, dim]` for vectors. float32. `Bins` is the reference of what kernel backends give.
Those of `triton_backend.merging.bins` bring the entries of a bin together first, so that sums need
no atomics and come out the same each time.
"""

from __future__ import annotations

import torch

from kvtier_kernels.blocks import blocks

UNMERGED = -1
"""The target of an entry that is like no kept one."""


class Bins:
    """The bins of one assignment.

    target: `[heads, tokens]` int64 in [0, count), or UNMERGED.
    """

    def __init__(self, target: torch.Tensor, count: int) -> None:
        self.count = count
        heads = target.shape[0]
        self._index = torch.where(target == UNMERGED, count, target)
        first = torch.arange(heads, device=target.device).unsqueeze(1) * (count + 1)
        self._flat = self._index + first

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Return for each entry its bin's value: `[heads, rows, bins]` ->
        `[heads, rows, tokens]`."""
        return x.gather(2, self._index.unsqueeze(1).expand(-1, x.shape[1], -1))

    def log_softmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-shares within each bin, and the bins' log-sum-exp.

        x: `[heads, rows, tokens]`, finite. Returns `[heads, rows, tokens]` and
        `[heads, rows, count + 1]`, the latter -inf for a bin without entries.
        """
        shape = (*x.shape[:2], self.count + 1)
        peak = x.new_full(shape, float("-inf")).scatter_reduce_(2, self._of(x), x, "amax")
        # Relative to the peak first, so that shares are as precise at logits of 80 as at 0.
        x = x - self.spread(peak)
        log_total = torch.zeros_like(peak).scatter_add_(2, self._of(x), x.exp()).log()
        return x - self.spread(log_total), peak + log_total

    def mix(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Weighted sums of vectors: `[heads, tokens]`, `[heads, tokens, dim]` of any float dtype ->
        `[heads, count, dim]`; what is unmerged is left out."""
        heads, tokens, dim = x.shape
        out = torch.zeros(heads * (self.count + 1), dim, dtype=torch.float32, device=x.device)
        for part in blocks(tokens, heads * dim):
            weighted = weights[:, part, None] * x[:, part].float()
            out.index_add_(0, self._flat[:, part].reshape(-1), weighted.reshape(-1, dim))
        return out.view(heads, -1, dim)[:, : self.count]

    def sizes(self) -> torch.Tensor:
        """Return the number of entries in each bin: int64 `[heads, count]`."""
        ones = torch.ones_like(self._index)
        out = ones.new_zeros(ones.shape[0], self.count + 1).scatter_add_(1, self._index, ones)
        return out[:, : self.count]

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        return self._index.unsqueeze(1).expand_as(x)
