"""The newest queries over all keys: two kernels, and what they have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kvtier_kernels.selection import SelectionKernels
from kvtier_kernels.triton_backend.launching import Launch, dim_contiguous, is_ieee
from kvtier_kernels.triton_backend.selection.newest import mean_of_queries, sum_over_keys

_BLOCK_QUERIES = 32
_BLOCK_ROWS = 64
_BLOCK_KEYS = 64
# A tile is multiplied by the registers it lies in where there are no tensor cores.
_BLOCK_KEYS_IEEE = 32
# Keys of one program that sums over them: long enough for few parts, short enough for all cores.
_STRETCH = 1024


class Predictions(SelectionKernels):
    """`predicted_logits` and `window_lse` by a kernel each."""

    _launch: Launch

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


def _prepared(
    q: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Queries and keys of one dtype, dim contiguous, and the options of either kernel."""
    group, dim = q.shape[2:]
    if keys.dtype != q.dtype:
        q, keys = q.float(), keys.float()
    q, keys = dim_contiguous(q), dim_contiguous(keys)
    ieee = is_ieee(q)
    block = _BLOCK_KEYS_IEEE if ieee else _BLOCK_KEYS
    options = {
        "GROUP": group,
        "DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_N": block,
        "IEEE": ieee,
        "num_warps": 4 if dim <= 128 else 8,
        "num_stages": 2,
    }
    return q, keys, options


__all__ = ["Predictions"]
