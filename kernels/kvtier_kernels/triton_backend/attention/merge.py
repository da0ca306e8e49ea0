"""Attention states merged: the second stage of split KV, and two blocks of one query."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import LN_2, LOG2_E, log_of, no_infinity


@triton.jit(do_not_specialize=["out_lanes"])
def merge_parts(
    part_o,
    part_lse,
    parts_indptr,
    head_ids,
    o,
    lse,
    out_lanes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Row r owns the parts parts_indptr[r]:parts_indptr[r + 1]; a part has `lanes` query heads.

    part_o [parts, lanes, DIM], part_lse [parts, lanes], float32 -> o [rows, out_lanes, DIM],
    lse [rows, lanes]. MAPPED: o holds more KV heads, of which `head_ids` are ours. Grid (rows,
    lanes).
    """
    row, lane = tl.program_id(0), tl.program_id(1)
    lanes = tl.num_programs(1)
    first, last = tl.load(parts_indptr + row), tl.load(parts_indptr + row + 1)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for begin in range(first, last, BLOCK_P):
        part = begin + tl.arange(0, BLOCK_P)
        inside = part < last
        at = part.to(tl.int64) * lanes + lane
        logs = tl.load(part_lse + at, mask=inside, other=float("-inf")) * LOG2_E
        values = tl.load(
            part_o + at[:, None] * DIM + d[None, :],
            mask=inside[:, None] & (d < DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        shift = no_infinity(new_peak)
        weights = tl.exp2(logs - shift)
        keep = tl.exp2(peak - shift)
        acc = acc * keep + tl.sum(values * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        peak = new_peak
    some = tl.where(total > 0, total, 1.0)
    out_lane = lane
    if MAPPED:
        out_lane = tl.load(head_ids + lane // GROUP).to(tl.int32) * GROUP + lane % GROUP
    to = row.to(tl.int64) * out_lanes + out_lane
    tl.store(o + to * DIM + d, (acc / some).to(o.dtype.element_ty), mask=d < DIM)
    at = row.to(tl.int64) * lanes + lane
    tl.store(lse + at + tl.arange(0, 1), log_of(peak, total))


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
    shift = no_infinity(tl.maximum(log_a, log_b))
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
