"""`kvtier_kernels.bins` on a GPU: entries are sorted by bin once, then a program has a bin."""

from __future__ import annotations

import torch
import triton

from kvtier_kernels.bins import Bins
from kvtier_kernels.triton_backend.launching import Launch
from kvtier_kernels.triton_backend.merging.segments import segment_softmax, segment_sum

# Numbers of a program's tile: bins hold a handful of entries, few of them hundreds.
_TILE = 2048
_SOFTMAX_ENTRIES = 32


class SortedBins(Bins):
    """The bins of one assignment, their entries together and in order."""

    def __init__(self, target: torch.Tensor, count: int, launch: Launch) -> None:
        super().__init__(target, count)
        heads, tokens = target.shape
        device = target.device
        bins, order = self._flat.flatten().int().sort(stable=True)
        first = tokens * torch.arange(heads, device=device)
        edges = torch.arange(heads * (count + 1) + 1, dtype=torch.int32, device=device)
        self._launch = launch
        self._order = (order.view(heads, tokens) - first.unsqueeze(1)).int()
        self._bounds = torch.searchsorted(bins, edges, out_int32=True)

    def log_softmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads, rows, _ = x.shape
        x = x.contiguous()
        # The unmerged entries may be most of a context: too much for one program, and a plain sum.
        kept = (self._index != self.count).unsqueeze(1)
        lost = torch.logsumexp(x.masked_fill(kept, float("-inf")), dim=-1, keepdim=True)
        shares = x - lost
        mass = x.new_empty(heads, rows, self.count + 1)
        mass[..., self.count :] = lost
        self._launch(
            segment_softmax,
            (self.count, heads),
            x,
            self._order,
            self._bounds,
            shares,
            mass,
            self.count + 1,
            *x.stride()[:2],
            ROWS=rows,
            BLOCK_R=triton.next_power_of_2(rows),
            BLOCK_T=_SOFTMAX_ENTRIES,
            num_warps=1,
        )
        return shares, mass

    def mix(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        heads, _, dim = x.shape
        out = torch.empty(heads, self.count, dim, device=x.device)
        columns = triton.next_power_of_2(dim)
        if weights.stride(1) != 1:
            weights = weights.contiguous()
        self._launch(
            segment_sum,
            (self.count, heads),
            x,
            weights,
            self._order,
            self._bounds,
            out,
            self.count + 1,
            *x.stride(),
            weights.stride(0),
            DIM=dim,
            BLOCK_D=columns,
            BLOCK_T=min(64, max(1, _TILE // columns)),
            num_warps=2 if columns > 32 else 1,
        )
        return out

    def sizes(self) -> torch.Tensor:
        sizes = self._bounds.diff().view(-1, self.count + 1)
        return sizes[:, : self.count].long()
