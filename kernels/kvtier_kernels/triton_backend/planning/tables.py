"""Slot tables made on the device, so that a decoding step plans nothing on the host.

    table    a row of token slots per request, as the engine keeps them
    image    slot of another space by token slot, 0 where a token has none there; or None
    ->       slots, indptr: what is not 0 of each request, in order, one request after another

Two passes around a prefix sum: count what each block keeps, then write it where it belongs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _kept(table, image, rows, lengths, stride_table, BLOCK: tl.constexpr, IMAGE: tl.constexpr):
    """The slots of this program's block of columns; 0 where there is none."""
    request, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < tl.load(lengths + request)
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(table + row * stride_table + column, mask=inside, other=0)
    if IMAGE:
        slot = tl.load(image + slot.to(tl.int64), mask=inside, other=0)
    return slot


@triton.jit(do_not_specialize=["blocks"])
def count_kept(
    table,
    image,
    rows,
    lengths,
    counts,
    stride_table,
    blocks,
    BLOCK: tl.constexpr,
    IMAGE: tl.constexpr,
):
    """-> counts [requests, blocks] int32. Grid (requests, blocks)."""
    slot = _kept(table, image, rows, lengths, stride_table, BLOCK, IMAGE)
    at = tl.program_id(0) * blocks + tl.program_id(1)
    tl.store(counts + at, tl.sum((slot > 0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["blocks"])
def write_kept(
    table,
    image,
    rows,
    lengths,
    counts,
    ends,
    slots,
    indptr,
    stride_table,
    blocks,
    BLOCK: tl.constexpr,
    IMAGE: tl.constexpr,
):
    """counts and `ends`, their running sum, [requests, blocks] -> slots, indptr [requests + 1].
    Grid (requests, blocks)."""
    request, block = tl.program_id(0), tl.program_id(1)
    at = request * blocks + block
    end = tl.load(ends + at)
    count = tl.load(counts + at)
    if count > 0:
        slot = _kept(table, image, rows, lengths, stride_table, BLOCK, IMAGE)
        kept = slot > 0
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(slots + end - count + rank, slot.to(slots.dtype.element_ty), mask=kept)
    if block == blocks - 1:
        tl.store(indptr + request + 1, end.to(indptr.dtype.element_ty))
    if at == 0:
        tl.store(indptr, 0)
