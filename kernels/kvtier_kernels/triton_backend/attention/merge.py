"""Attention states merged: those of a prefix's splits, and two blocks of one query."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import LN_2, LOG2_E, finite_max


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    part_o,
    part_lse,
    o,
    lse,
    splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """part_o [rows, splits, lanes, DIM], part_lse, float32 -> o [rows, lanes, DIM], lse.

    Some split of every row has seen something. Grid (rows, lanes), all splits in a tile of BLOCK_P.
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.num_programs(1)
    part, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    inside = part < splits
    at = (row * splits + part) * lanes + lane
    logs = tl.load(part_lse + at, mask=inside, other=float("-inf")) * LOG2_E
    values = tl.load(
        part_o + at[:, None] * DIM + d[None, :],
        mask=inside[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    peak = tl.max(logs, 0)
    weights = tl.exp2(logs - peak)
    total = tl.sum(weights, 0)
    mixed = tl.sum(values * weights[:, None], 0) / total
    to = row * lanes + lane
    tl.store(o + to * DIM + d, mixed.to(o.dtype.element_ty), mask=d < DIM)
    tl.store(lse + to, (peak + tl.log2(total)) * LN_2)


@triton.jit(do_not_specialize=["rows"])
def merge_two(
    o_a,
    lse_a,
    o_b,
    lse_b,
    o,
    lse,
    rows,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """States over two disjoint blocks of KV, contiguous: o [rows, DIM], lse [rows].

    Grid (rows / BLOCK_R).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    real = row < rows
    inside = real[:, None] & (d < DIM)[None, :]
    at = row[:, None] * DIM + d[None, :]
    log_a = tl.load(lse_a + row, mask=real, other=float("-inf"))
    log_b = tl.load(lse_b + row, mask=real, other=float("-inf"))
    shift = finite_max(tl.maximum(log_a, log_b))
    weight_a = tl.exp2((log_a - shift) * LOG2_E)
    weight_b = tl.exp2((log_b - shift) * LOG2_E)
    total = weight_a + weight_b
    seen = total > 0
    some = tl.where(seen, total, 1.0)
    value_a = tl.load(o_a + at, mask=inside, other=0.0).to(tl.float32)
    value_b = tl.load(o_b + at, mask=inside, other=0.0).to(tl.float32)
    value = (value_a * weight_a[:, None] + value_b * weight_b[:, None]) / some[:, None]
    tl.store(o + at, value.to(o.dtype.element_ty), mask=inside)
    log = tl.where(seen, shift + tl.log2(some) * LN_2, float("-inf"))
    tl.store(lse + row, log, mask=real)
