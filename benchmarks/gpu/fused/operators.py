"""Launchers of the fused kernels: shapes, memory for what comes out, and grids."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from benchmarks.gpu.fused import kernels

SILU_BLOCK = 1024
# Heads of a token that a program rotates.
ROTATED_HEADS = 8
# A row of 4096 numbers is 16 for each thread of 8 warps.
NUMBERS_PER_WARP = 512
MOST_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`[rows, dim]` of x `[rows, dim]`, each row divided by its root mean square and multiplied by
    weight `[dim]`, in the dtype of x. The last dimension of x is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, and x + residual, both `[rows, dim]` in the dtype of x. The last
    dimension of both is contiguous."""
    out, added = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, residual, weight, out, added, eps)
    return out, added


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    added: Tensor | None,
    eps: float,
) -> None:
    rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    kernels.rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if added is None else added,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        DIM=dim,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=min(max(block // NUMBERS_PER_WARP, 1), MOST_WARPS),
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """`[rows, dim]` of x `[rows, 2 * dim]`: silu of the first half times the second, in the dtype
    of x. The last dimension of x is contiguous."""
    rows, dim = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(dim, SILU_BLOCK))
    kernels.silu_and_mul[grid](x, out, x.stride(0), DIM=dim, BLOCK=SILU_BLOCK)
    return out


def rotate_halves(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, head_dim: int) -> None:
    """Rotate the heads of q and k, each `[tokens, heads * head_dim]` with a contiguous last
    dimension, in place: number i of a head with number i + half, as NeoX does.

    cos_sin: `[positions, 2 * half]`, cosines before sines, as many as rotate (at most head_dim)
    positions: int `[tokens]`
    """
    half = cos_sin.shape[1] // 2
    heads = [x.shape[1] // head_dim for x in (q, k)]
    grid = (len(positions), sum(triton.cdiv(count, ROTATED_HEADS) for count in heads))
    kernels.rotate_halves[grid](
        q,
        k,
        cos_sin,
        positions,
        *heads,
        q.stride(0),
        k.stride(0),
        cos_sin.stride(0),
        HALF=half,
        DIM=head_dim,
        BLOCK=triton.next_power_of_2(half),
        HEADS=ROTATED_HEADS,
        num_warps=1,
    )


__all__ = ["add_rms_norm", "rms_norm", "rotate_halves", "silu_and_mul"]
