"""Decoding and extending over entries where they lie, found by slot.

Decoding is split KV in two stages over equal stretches of entries (`schedule`, `decode`, `merge`);
extending is one pass over prefix and causal tail (`extend`), cut in splits where there are few new
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from kvtier_kernels.base import AttentionState, RaggedKV, Window
from kvtier_kernels.triton_backend.attention.decode import decode_units
from kvtier_kernels.triton_backend.attention.extend import extend_blocks
from kvtier_kernels.triton_backend.attention.output import Output, merged, state_buffers
from kvtier_kernels.triton_backend.attention.tiles import decode_entries, extend_tile, num_splits
from kvtier_kernels.triton_backend.launching import (
    Launch,
    dim_contiguous,
    has_wide_products,
    is_ieee,
)
from kvtier_kernels.triton_backend.planning.plans import (
    TritonPlan,
    row_blocks,
    schedule_for,
    table_of,
)

# Of a thread. Told nothing, ptxas spills to fit two programs where shared memory has room for one.
ALL_REGISTERS = 255


def decode(
    launch: Launch,
    q: torch.Tensor,
    kv: RaggedKV,
    plan: TritonPlan,
    scale: float,
    output: Output,
) -> AttentionState:
    """One query per request over its entries: `AttentionKernels.decode`, into `output`."""
    requests, _, group, dim = q.shape
    heads = output.num_heads
    q = dim_contiguous(q)
    k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
    schedule = schedule_for(launch, plan, heads)
    part_o, part_lse = state_buffers((schedule.max_units, heads, group, dim), q.device)
    mode, votes, strides = _votes(kv, plan)
    ieee = is_ieee(q)
    launch(
        decode_units,
        (schedule.max_units, heads),
        q,
        k,
        v,
        votes,
        plan.slots,
        plan.indptr,
        schedule.units_indptr,
        schedule.unit_request,
        schedule.stretch,
        output.head_ids,
        part_o,
        part_lse,
        scale,
        requests,
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        *strides,
        GROUP=group,
        DIM=dim,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_N=decode_entries(ieee),
        VOTES=mode,
        IEEE=ieee,
        MAPPED=output.mapped,
        num_warps=4,
        num_stages=3,
    )
    return merged(launch, part_o, part_lse, schedule.units_indptr, output)


def extend(
    launch: Launch,
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    q_indptr: Sequence[int],
    kv: RaggedKV,
    plan: TritonPlan,
    scale: float,
    output: Output,
    window: Window | None,
) -> AttentionState:
    """New tokens over prefix and causal tail: `AttentionKernels.extend`, into `output`."""
    assert plan.bounds is not None, "a plan for graphs is for decoding"
    tokens, _, group, dim = q.shape
    heads = output.num_heads
    q, k_new, v_new = (dim_contiguous(x) for x in (q, k_new, v_new))
    k, v = dim_contiguous(kv.k), dim_contiguous(kv.v)
    ieee = is_ieee(q)
    mode, votes, strides = _votes(kv, plan)
    tile = extend_tile(dim, ieee, laden=ieee or window is not None or mode == 2)
    block_rows, block_entries = tile.rows, tile.entries
    blocks = row_blocks(plan, q_indptr, group, block_rows)
    num_blocks = blocks.shape[1]
    splits = num_splits(num_blocks * heads, plan.bounds, q.device)
    if splits == 1:
        o, lse = output.buffers()
    else:
        o, lse = state_buffers((tokens * splits, heads, group, dim), q.device)
    rows = table_of(plan, tuple(q_indptr))
    positions, settled, starts = plan.slots, plan.slots, plan.indptr
    sink, recent = 0, 0
    if window is not None:
        positions, settled = window.positions, window.settled.view(torch.uint8)
        starts = table_of(plan, tuple(window.q_start))
        sink, recent = window.sink_tokens, window.recent_tokens
    launch(
        extend_blocks,
        (num_blocks, heads, splits),
        q,
        k_new,
        v_new,
        k,
        v,
        votes,
        plan.slots,
        plan.indptr,
        rows,
        blocks[0],
        blocks[1],
        positions,
        settled,
        starts,
        output.head_ids,
        o,
        lse,
        scale,
        o.shape[1],
        sink,
        recent,
        *q.stride()[:3],
        *k_new.stride()[:2],
        *v_new.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *strides,
        GROUP=group,
        DIM=dim,
        BLOCK_M=block_rows,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_N=block_entries,
        VOTES=mode,
        WINDOW=window is not None,
        IEEE=ieee,
        MAPPED=output.mapped,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=None if dim <= 128 or has_wide_products() else ALL_REGISTERS,
    )
    if splits == 1:
        return AttentionState(o, lse)
    parts = torch.arange(0, tokens * splits + 1, splits, dtype=torch.int32, device=q.device)
    return merged(launch, o, lse, parts, output)


def _votes(kv: RaggedKV, plan: TritonPlan) -> tuple[int, torch.Tensor, tuple[int, int, int]]:
    """How votes come, themselves (or any tensor, not read), and their strides."""
    votes = kv.log_votes
    if votes is None or not plan.voted:
        return 0, kv.k, (0, 0, 0)
    if votes.ndim == 1:
        return 1, votes, (votes.stride(0), 0, 0)
    return 2, votes, (votes.stride(0), votes.stride(1), votes.stride(2))


__all__ = ["decode", "extend"]
