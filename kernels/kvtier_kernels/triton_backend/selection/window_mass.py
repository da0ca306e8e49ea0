"""Window mass: rows first, then columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from kvtier_kernels.selection import SelectionKernels, Stretch
from kvtier_kernels.triton_backend.launching import Launch, dim_contiguous, is_ieee, to_device
from kvtier_kernels.triton_backend.selection.mass import window_columns, window_rows

BLOCK_ROWS = 64
BLOCK_COLUMNS = 64
# A tile is multiplied by the registers it lies in where there are no tensor cores.
BLOCK_COLUMNS_IEEE = 32


class WindowMass(SelectionKernels):
    """`window_mass` by two kernels."""

    _launch: Launch

    def window_mass(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        stretches: Sequence[Stretch],
        scale: float,
    ) -> torch.Tensor:
        tokens, heads, group, dim = q.shape
        q, k = dim_contiguous(q), dim_contiguous(k)
        logs = torch.empty(tokens, heads, group, dtype=torch.float32, device=q.device)
        mass = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        if not stretches:
            return mass
        windows = [
            (b, b + width) for begin, end, width in stretches for b in range(begin, end, width)
        ]
        begins, ends = to_device(list(zip(*windows, strict=True)), q.device)
        longest = max(stretch.width for stretch in stretches)
        strides = (*q.stride()[:3], *k.stride()[:2])
        ieee = is_ieee(q)
        columns = BLOCK_COLUMNS_IEEE if ieee else BLOCK_COLUMNS
        options = {
            "GROUP": group,
            "DIM": dim,
            "BLOCK_M": BLOCK_ROWS,
            "BLOCK_N": columns,
            "BLOCK_D": max(16, triton.next_power_of_2(dim)),
            "IEEE": ieee,
            "num_warps": 4 if dim <= 128 else 8,
            "num_stages": 2,
        }
        grid = (len(windows), heads, triton.cdiv(longest * group, BLOCK_ROWS))
        self._launch(window_rows, grid, q, k, begins, ends, logs, scale, *strides, **options)
        grid = (len(windows), heads, triton.cdiv(longest, columns))
        self._launch(
            window_columns, grid, q, k, begins, ends, logs, mass, scale, tokens, *strides, **options
        )
        return mass


__all__ = ["WindowMass"]
