"""Homes of dropped entries, found by one kernel."""

from __future__ import annotations

import torch
import triton

from kvtier_kernels.selection import SelectionKernels
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
)
from kvtier_kernels.triton_backend.merging.nearest import nearest_home

_MULTIPLIED = (torch.bfloat16, torch.float16, torch.float32)


class Homes(SelectionKernels):
    """`find_homes` by one kernel. float16 and bfloat16 keys are multiplied as they are, by tensor
    cores that sum in float32; others in float32."""

    _launch: Launch

    def find_homes(
        self,
        keys: torch.Tensor,
        dropped: torch.Tensor,
        homes: torch.Tensor,
        lengths: torch.Tensor,
        floor: float,
        target: torch.Tensor,
    ) -> None:
        if keys.dtype not in _MULTIPLIED:
            keys, homes = keys.float(), homes.float()
        keys = dim_contiguous(keys)
        heads, rest = dropped.shape
        count, dim = homes.shape[1:]
        inverse = lengths.clamp_min(1e-12).reciprocal().masked_fill_(~lengths.isfinite(), torch.nan)
        ieee = is_ieee(keys)
        rows, columns = _tile(dim, ieee)
        self._launch(
            nearest_home,
            (triton.cdiv(rest, rows), heads),
            keys,
            dropped,
            homes.contiguous(),
            inverse,
            target,
            floor,
            rest,
            count,
            *keys.stride()[:2],
            dropped.stride(0),
            target.stride(0),
            DIM=dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_M=rows,
            BLOCK_N=columns,
            IEEE=ieee,
            # Two programs of 4 warps fit a core, so that one may multiply while the other compares;
            # but that takes all the registers there are.
            num_warps=4 if has_wide_products() and not ieee else 8,
            num_stages=2 if ieee or dim > 128 else 3,
        )


def _tile(dim: int, ieee: bool) -> tuple[int, int]:
    """Dropped entries and homes of a program's tile, as fit its registers and shared memory."""
    if ieee:
        return 64, 32
    return (128, 32) if dim <= 128 else (64, 64)


__all__ = ["Homes"]
