"""Selection and merging on a GPU: no logits and no similarities in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from kvtier_kernels.bins import Bins
from kvtier_kernels.selection import SelectionKernels, Stretch
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
    launch,
    to_device,
)
from kvtier_kernels.triton_backend.merging.bins import SortedBins
from kvtier_kernels.triton_backend.merging.nearest import nearest_home
from kvtier_kernels.triton_backend.selection.mass import window_columns, window_rows
from kvtier_kernels.triton_backend.selection.newest import mean_of_queries, sum_over_keys

_BLOCK_QUERIES = 32
_BLOCK_ROWS = 64
_BLOCK_KEYS = 64
# A tile is multiplied by the registers it lies in where there are no tensor cores.
_BLOCK_KEYS_IEEE = 32
# Keys of one program that sums over them: long enough for few parts, short enough for all cores.
_STRETCH = 1024
_MULTIPLIED = (torch.bfloat16, torch.float16, torch.float32)


class TritonSelection(SelectionKernels):
    """See the module docstring. float16 and bfloat16 keys are multiplied as they are, by tensor
    cores that sum in float32; others in float32."""

    def __init__(self, launch: Launch = launch) -> None:
        self._launch = launch

    def window_mass(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        stretches: Sequence[Stretch],
        scale: float,
    ) -> torch.Tensor:
        tokens, heads, group, _ = q.shape
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
        options = {"BLOCK_M": _BLOCK_ROWS, **_options(q)}
        grid = (len(windows), heads, triton.cdiv(longest * group, _BLOCK_ROWS))
        self._launch(window_rows, grid, q, k, begins, ends, logs, scale, *strides, **options)
        grid = (len(windows), heads, triton.cdiv(longest, options["BLOCK_N"]))
        self._launch(
            window_columns, grid, q, k, begins, ends, logs, mass, scale, tokens, *strides, **options
        )
        return mass

    def predicted_logits(
        self,
        q_window: torch.Tensor,
        keys: torch.Tensor,
        scale: float,
        offset: torch.Tensor,
    ) -> torch.Tensor:
        window, heads, group, _ = q_window.shape
        tokens = keys.shape[1]
        q_window, keys, options = _prepared(q_window, keys)
        out = torch.empty(heads, group, tokens, device=keys.device)
        self._launch(
            mean_of_queries,
            (triton.cdiv(tokens, options["BLOCK_N"]), heads),
            q_window,
            keys,
            offset.contiguous(),
            out,
            window,
            tokens,
            scale,
            *q_window.stride()[:3],
            *keys.stride()[:2],
            BLOCK_W=_BLOCK_QUERIES,
            **options,
        )
        return out

    def window_lse(self, q_window: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        window, heads, group, _ = q_window.shape
        tokens = keys.shape[1]
        stretches = triton.cdiv(tokens, _STRETCH)
        q_window, keys, options = _prepared(q_window, keys)
        part = torch.empty(stretches, window, heads, group, device=keys.device)
        self._launch(
            sum_over_keys,
            (stretches, heads, triton.cdiv(window * group, _BLOCK_ROWS)),
            q_window,
            keys,
            part,
            window,
            tokens,
            _STRETCH,
            scale,
            *q_window.stride()[:3],
            *keys.stride()[:2],
            BLOCK_M=_BLOCK_ROWS,
            **options,
        )
        return torch.logsumexp(part, dim=0)

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
        rows, columns = _homes_tile(dim, ieee)
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

    def bins(self, target: torch.Tensor, count: int) -> Bins:
        return SortedBins(target, count, self._launch)


def _prepared(
    q: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Queries and keys of one dtype, dim contiguous, and the options of either kernel."""
    if keys.dtype != q.dtype:
        q, keys = q.float(), keys.float()
    q, keys = dim_contiguous(q), dim_contiguous(keys)
    return q, keys, _options(q)


def _options(q: torch.Tensor) -> dict[str, Any]:
    """The options of a kernel that multiplies tiles of queries `[..., group, dim]` and keys."""
    group, dim = q.shape[2:]
    ieee = is_ieee(q)
    return {
        "GROUP": group,
        "DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_N": _BLOCK_KEYS_IEEE if ieee else _BLOCK_KEYS,
        "IEEE": ieee,
        "num_warps": 4 if dim <= 128 else 8,
        "num_stages": 2,
    }


def _homes_tile(dim: int, ieee: bool) -> tuple[int, int]:
    """Dropped entries and homes of a program's tile, as fit its registers and shared memory."""
    if ieee:
        return 64, 32
    return (128, 32) if dim <= 128 else (64, 64)
