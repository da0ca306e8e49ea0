"""Reductions over the entries of each bin, whose indices lie together in `order`.

    order    3 0 | 5 | 4 1 2 | 6          bounds  0 2 3 6 7

A program has one bin of one head, so no other program adds to its sums and their order is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import finite_max


@triton.jit
def _values(x, order, i, end, r, ROWS: tl.constexpr, stride_row):
    """x of the entries at places i of `order`: [rows, entries], -inf where there is none."""
    inside = (r < ROWS)[:, None] & (i < end)[None, :]
    entry = tl.load(order + i, mask=i < end, other=0)
    return tl.load(
        x + r[:, None] * stride_row + entry[None, :], mask=inside, other=float("-inf")
    ), entry, inside  # fmt: skip


@triton.jit(do_not_specialize=["bins"])
def segment_softmax(
    x,
    order,
    bounds,
    shares,
    mass,
    bins,
    stride_head,
    stride_row,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """x [heads, ROWS, tokens] -> shares, alike: log-softmax within each bin; mass [heads, ROWS,
    bins], each bin's log-sum-exp. Strides are those of x and shares. Grid (bins to do, heads)."""
    segment, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(bounds + head * bins + segment)
    end = tl.load(bounds + head * bins + segment + 1)
    r = tl.arange(0, BLOCK_R)
    x += head * stride_head
    shares += head * stride_head
    # Reduced once, behind the loop: Triton 3.6 does not compile a maximum over rows that a loop
    # carries and that is used more than once.
    peaks = tl.full([BLOCK_R, BLOCK_T], float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        values, _, _ = _values(x, order, i, end, r, ROWS, stride_row)
        peaks = tl.maximum(peaks, values)
    peak = tl.max(peaks, 1)
    # Relative to the peak first, so that shares are as precise at logits of 80 as at 0.
    shift = finite_max(peak)
    totals = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for first in range(begin, end, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        values, _, _ = _values(x, order, i, end, r, ROWS, stride_row)
        totals += tl.exp(values - shift[:, None])
    total = tl.sum(totals, 1)
    log_total = tl.log(tl.where(total > 0, total, 1.0))
    for first in range(begin, end, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        values, entry, inside = _values(x, order, i, end, r, ROWS, stride_row)
        share = values - shift[:, None] - log_total[:, None]
        tl.store(shares + r[:, None] * stride_row + entry[None, :], share, mask=inside)
    at = (head * ROWS + r) * bins + segment
    tl.store(mass + at, peak + log_total, mask=r < ROWS)


@triton.jit(do_not_specialize=["bins"])
def segment_sum(
    x,
    weights,
    order,
    bounds,
    out,
    bins,
    stride_x_head,
    stride_x_token,
    stride_x_dim,
    stride_weights_head,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """x [heads, tokens, DIM], weights [heads, tokens] -> out [heads, bins to do, DIM], float32.
    Grid (bins to do, heads)."""
    segment, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tl.load(bounds + head * bins + segment)
    end = tl.load(bounds + head * bins + segment + 1)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        entry = tl.load(order + i, mask=i < end, other=0).to(tl.int64)
        values = tl.load(
            x + head * stride_x_head + entry[:, None] * stride_x_token + d[None, :] * stride_x_dim,
            mask=(i < end)[:, None] & (d < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(weights + head * stride_weights_head + entry, mask=i < end, other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
    at = head * tl.num_programs(0) + segment
    tl.store(out + at * DIM + d, acc, mask=d < DIM)
