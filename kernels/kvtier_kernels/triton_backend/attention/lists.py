"""Attention over lists in pages: each program's stretch of pages, and its parts merged."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.attention.entries import load_entries
from kvtier_kernels.triton_backend.softmax import (
    LOG2_E,
    absorb,
    normalise,
    tile_logits,
    weigh,
)


@triton.jit
def _cells(own_words, own_slots, packed, tokens, first_cell, page, place, end):
    """The cells of `place` in each `page` of a list, and which of them are entries.

    The pages of a list are its words', and then its dense tokens' by sixteen. first_cell: of the
    column.
    """
    in_words = (page < packed) & (page < end)
    word = tl.load(own_words + page, mask=in_words, other=0)
    token = (page - packed) * 16 + place
    is_dense = (page >= packed) & (page < end) & (token < tokens)
    slot = tl.load(own_slots + token, mask=is_dense, other=0)
    cell = tl.where(in_words, (word >> 5) * 16 + place, first_cell + slot)
    return cell, is_dense | (place < (word & 31))


@triton.jit
def _with_votes(logits, votes, cell, g, rows, voted, vote_heads, VOTES: tl.constexpr):
    """logits [rows, entries] in base 2, with the log-votes of the entries that are `voted`.

    g: each row's query head of its group, where `rows`. VOTES, vote_heads: as of `attend_stretch`.
    """
    if VOTES == 1:
        bias = tl.load(votes + cell, mask=voted, other=0.0)
        logits += bias[None, :] * LOG2_E
    if VOTES == 2:
        at = cell[None, :] * vote_heads + (g % vote_heads)[:, None]
        bias = tl.load(votes + at, mask=rows[:, None] & voted[None, :], other=0.0)
        logits += bias * LOG2_E
    return logits


@triton.jit(
    do_not_specialize=[
        "layer",
        "lists",
        "heads",
        "lanes",
        "columns",
        "column_cells",
        "stride_slots",
        "vote_heads",
    ],
    # Rows of a table, which begin anywhere.
    do_not_specialize_on_alignment=["block_row", "block_end"],
)
def attend_stretch(
    q,
    k,
    v,
    votes,
    words,
    pages,
    slots,
    rows,
    dense,
    block_request,
    block_row,
    block_end,
    bounds,
    stretch,
    part_o,
    part_lse,
    scale,
    layer,
    lists,
    heads,
    lanes,
    columns,
    column_cells,
    stride_slots,
    vote_heads,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    VOTES: tl.constexpr,
    IEEE: tl.constexpr,
):
    """q [tokens, heads, GROUP, DIM] -> part_o [programs + lists, lanes, DIM], part_lse, float32.

    Row m of a block is row m % GROUP of token m // GROUP. The part of list i by program u has the
    number u + i, which no other part has. VOTES: 0 none, 1 per entry, 2 per entry and query head,
    of which there are `vote_heads`. Grid (programs,).
    """
    u = tl.program_id(0)
    bounds += layer * (lists + 1)
    size = tl.load(stretch + layer)
    start = u * size
    stop = tl.minimum(start + size, tl.load(bounds + lists))
    if start < stop:
        # The loop finds the lists that these pages belong to.
        first, last = 0, 0
        for some in range(0, lists, BLOCK_L):
            one = some + tl.arange(0, BLOCK_L)
            ends = tl.load(bounds + 1 + one, mask=one < lists, other=2147483647)
            first += tl.sum((ends <= start).to(tl.int32), 0)
            last += tl.sum((ends < stop).to(tl.int32), 0)
        lane, d, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_dim = d < DIM
        for one in range(first, last + 1):
            low, high = tl.load(bounds + one), tl.load(bounds + one + 1)
            begin, end = tl.maximum(start, low) - low, tl.minimum(stop, high) - low
            block, head = one // heads, one % heads
            request = tl.load(block_request + block)
            row = tl.load(rows + request).to(tl.int64)
            column = layer * heads + head
            own_words = tl.load(words + row * columns + column).to(tl.pointer_type(tl.int32))
            packed = tl.load(pages + row * columns + column)
            own_slots = slots + row * stride_slots
            tokens = tl.load(dense + request).to(tl.int32)
            first_cell = column * column_cells

            m = tl.load(block_row + block) + lane
            in_rows = m < tl.load(block_end + block)
            token, g = (m // GROUP).to(tl.int64), m % GROUP
            from_q = token * stride_q_token + head * stride_q_head + g * stride_q_group
            tile = in_rows[:, None] & in_dim[None, :]
            queries = tl.load(q + from_q[:, None] + d[None, :], mask=tile, other=0.0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            # Cells come a tile ahead: a load that waits for its own address is not issued early.
            coming, coming_in = _cells(
                own_words, own_slots, packed, tokens, first_cell, begin + n // 16, n % 16, end
            )
            for page in range(begin, end, BLOCK_N // 16):
                cell, inside = coming.to(tl.int64), coming_in
                coming, coming_in = _cells(
                    own_words, own_slots, packed, tokens, first_cell,
                    page + BLOCK_N // 16 + n // 16, n % 16, end,
                )  # fmt: skip
                keys = load_entries(k, cell, 0, inside, d, in_dim, DIM, 0)
                # Dense tokens have no votes.
                voted = inside & (n < (packed - page) * 16)
                logits = _with_votes(
                    tile_logits(queries, tl.trans(keys), scale, IEEE), votes, cell, g, in_rows,
                    voted, vote_heads, VOTES,
                )  # fmt: skip
                logits = tl.where(inside[None, :], logits, float("-inf"))
                values = load_entries(v, cell, 0, inside, d, in_dim, DIM, 0).to(queries.dtype)
                acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)
            o, lse = normalise(acc, peak, total)
            at = (u + one).to(tl.int64) * lanes + lane
            tl.store(part_o + at[:, None] * DIM + d[None, :], o, mask=tile)
            tl.store(part_lse + at, lse, mask=in_rows)


@triton.jit(
    do_not_specialize=["layer", "lists", "heads", "lanes"],
    do_not_specialize_on_alignment=["block_row", "block_end"],
)
def merge_lists(
    part_o,
    part_lse,
    block_row,
    block_end,
    bounds,
    stretch,
    o,
    lse,
    layer,
    lists,
    heads,
    lanes,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The parts of `attend_stretch` -> o [tokens, heads, GROUP, DIM], lse.

    Grid (lists, lanes / BLOCK_R), BLOCK_P parts at a time.
    """
    one, block = tl.program_id(0), tl.program_id(0) // heads
    lane, d = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    m = tl.load(block_row + block) + lane
    in_rows = m < tl.load(block_end + block)
    bounds += layer * (lists + 1)
    size = tl.load(stretch + layer)
    low, high = tl.load(bounds + one), tl.load(bounds + one + 1)
    first = one + low // size
    last = tl.where(high > low, one + (high - 1) // size + 1, first)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for begin in range(first, last, BLOCK_P):
        part = begin + tl.arange(0, BLOCK_P)
        inside = (part < last)[:, None] & in_rows[None, :]
        at = part.to(tl.int64)[:, None] * lanes + lane[None, :]
        logs = tl.load(part_lse + at, mask=inside, other=float("-inf")) * LOG2_E
        of_parts = tl.load(
            part_o + at[:, :, None] * DIM + d[None, None, :],
            mask=inside[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
        )
        peak, total, weights, keep = weigh(peak, total, logs, 0)
        acc = acc * keep[:, None] + tl.sum(of_parts * weights[:, :, None], 0)
    mixed, log = normalise(acc, peak, total)
    to = ((m // GROUP).to(tl.int64) * heads + one % heads) * GROUP + m % GROUP
    inside = in_rows[:, None] & (d < DIM)[None, :]
    tl.store(o + to[:, None] * DIM + d[None, :], mixed.to(o.dtype.element_ty), mask=inside)
    tl.store(lse + to, log, mask=in_rows)
