"""New tokens over the entries of their prefix, found by slot, and over themselves: one pass, cut in
splits where there are few new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from kvtier_kernels.base import AttentionState, RaggedKV
from kvtier_kernels.triton_backend.attention.extend import extend_blocks
from kvtier_kernels.triton_backend.attention.merge import merge_splits
from kvtier_kernels.triton_backend.attention.tiles import MAX_SPLITS, extend_tile, num_splits
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
    state_buffers,
)
from kvtier_kernels.triton_backend.planning.plans import TritonPlan, row_blocks, table_of

# The most registers of a thread. Told nothing, ptxas spills to fit two programs where shared memory
# has room for one.
ALL_REGISTERS = 255


def extend(
    launch: Launch,
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    q_indptr: Sequence[int],
    kv: RaggedKV,
    plan: TritonPlan,
    scale: float,
) -> AttentionState:
    """`AttentionKernels.extend`."""
    tokens, heads, group, dim = q.shape
    q, k_new, v_new = (dim_contiguous(x) for x in (q, k_new, v_new))
    k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
    ieee = is_ieee(q)
    tile = extend_tile(dim, ieee)
    blocks = row_blocks(plan, q_indptr, group, tile.rows)
    num_blocks = blocks.shape[1]
    splits = num_splits(num_blocks * heads, plan.bounds, q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    o, lse = state_buffers((tokens, heads, group, dim), q.device, q.dtype)
    part_o, part_lse = o, lse
    if splits > 1:
        part_o, part_lse = state_buffers((tokens, splits, heads, group, dim), q.device)
    launch(
        extend_blocks,
        (num_blocks, heads, splits),
        q,
        k_new,
        v_new,
        k,
        v,
        plan.slots,
        plan.indptr,
        table_of(plan, tuple(q_indptr)),
        blocks[0],
        blocks[1],
        part_o,
        part_lse,
        scale,
        *q.stride()[:3],
        *k_new.stride()[:2],
        *v_new.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        GROUP=group,
        DIM=dim,
        BLOCK_M=tile.rows,
        BLOCK_D=block_d,
        BLOCK_N=tile.entries,
        IEEE=ieee,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=None if dim <= 128 or has_wide_products() else ALL_REGISTERS,
    )
    if splits > 1:
        launch(
            merge_splits,
            (tokens, heads * group),
            part_o,
            part_lse,
            o,
            lse,
            splits,
            DIM=dim,
            BLOCK_D=block_d,
            BLOCK_P=MAX_SPLITS,
        )
    return AttentionState(o, lse)
