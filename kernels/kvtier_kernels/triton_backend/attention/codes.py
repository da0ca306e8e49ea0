"""Attention over lists of coded pages (kvtier_kernels.codes): a program's stretch of pages, one
after another. What the parts leave is merged as of other lists.

Codes are made numbers before they are multiplied, as wide as the queries. Queries are rotated, and
so is what comes of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtier_kernels.triton_backend.softmax import absorb, normalise, tile_logits


@triton.jit
def _codes(own, inside, d, in_dim, DIM: tl.constexpr, BITS: tl.constexpr):
    """Codes [entries, dim] of entries whose bytes begin at `own` [entries], 0 where there are
    none."""
    there = inside[:, None] & in_dim[None, :]
    if BITS == 3:
        low_bytes: tl.constexpr = DIM // 4
        high_bytes: tl.constexpr = DIM // 8
        low = tl.load(own[:, None] + (d % low_bytes)[None, :], mask=there, other=0)
        low = (low >> (2 * (d // low_bytes))[None, :].to(tl.uint8)) & 3
        high = tl.load(own[:, None] + (low_bytes + d % high_bytes)[None, :], mask=there, other=0)
        high = (high >> (d // high_bytes)[None, :].to(tl.uint8)) & 1
        return low | (high << 2)
    code_bytes: tl.constexpr = DIM * BITS // 8
    code = tl.load(own[:, None] + (d % code_bytes)[None, :], mask=there, other=0)
    if BITS == 4:
        code = (code >> (4 * (d // code_bytes))[None, :].to(tl.uint8)) & 15
    return code


@triton.jit(
    do_not_specialize=["layer", "lists", "heads", "lanes", "columns"],
    # Rows of a table, which begin anywhere.
    do_not_specialize_on_alignment=["block_row", "block_end"],
)
def attend_codes(
    q,
    k,
    v,
    words,
    pages,
    rows,
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
    page_bytes,
    stride_q_token,
    stride_q_head,
    stride_q_group,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ENTRY_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Attend like `attend_stretch`, to k and v of codes, uint8 [pages, page_bytes], with ENTRIES of
    BITS a number and GROUPS of a value's numbers that share a scale. Grid (programs,).
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
        lane, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        in_dim = d < DIM
        entry_bytes: tl.constexpr = DIM * BITS // 8
        # A page is read in so many tiles.
        tiles: tl.constexpr = (ENTRIES + BLOCK_N - 1) // BLOCK_N
        for one in range(first, last + 1):
            low, high = tl.load(bounds + one), tl.load(bounds + one + 1)
            begin, end = tl.maximum(start, low) - low, tl.minimum(stop, high) - low
            block, head = one // heads, one % heads
            row = tl.load(rows + tl.load(block_request + block)).to(tl.int64)
            own_words = tl.load(words + row * columns + layer * heads + head)
            own_words = own_words.to(tl.pointer_type(tl.int32))

            m = tl.load(block_row + block) + lane
            in_rows = m < tl.load(block_end + block)
            token, g = (m // GROUP).to(tl.int64), m % GROUP
            from_q = token * stride_q_token + head * stride_q_head + g * stride_q_group
            tile = in_rows[:, None] & in_dim[None, :]
            queries = tl.load(q + from_q[:, None] + d[None, :], mask=tile, other=0.0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for step in range(begin * tiles, end * tiles):
                word = tl.load(own_words + step // tiles)
                n = step % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
                inside = n < (word & ((1 << ENTRY_BITS) - 1))
                at = (word >> ENTRY_BITS).to(tl.int64) * page_bytes
                codes = _codes(k + at + n * entry_bytes, inside, d, in_dim, DIM, BITS)
                scales = (k + at + ENTRIES * entry_bytes).to(tl.pointer_type(tl.float16))
                wide = tl.load(scales + d, mask=in_dim, other=0.0).to(tl.float32)
                least = tl.load(scales + DIM + d, mask=in_dim, other=0.0).to(tl.float32)
                keys = least[None, :] + wide[None, :] * codes.to(tl.float32)
                logits = tile_logits(queries, tl.trans(keys.to(queries.dtype)), scale, IEEE)
                logits = tl.where(inside[None, :], logits, float("-inf"))
                codes = _codes(v + at + n * entry_bytes, inside, d, in_dim, DIM, BITS)
                scales = (v + at + ENTRIES * entry_bytes).to(tl.pointer_type(tl.float16))
                own = scales + n[:, None] * GROUPS + (d // (DIM // GROUPS))[None, :]
                there = inside[:, None] & in_dim[None, :]
                wide = tl.load(own, mask=there, other=0.0).to(tl.float32)
                least = tl.load(own + ENTRIES * GROUPS, mask=there, other=0.0).to(tl.float32)
                values = (least + wide * codes.to(tl.float32)).to(queries.dtype)
                acc, peak, total = absorb(acc, peak, total, logits, values, IEEE)
            o, lse = normalise(acc, peak, total)
            part = (u + one).to(tl.int64) * lanes + lane
            tl.store(part_o + part[:, None] * DIM + d[None, :], o, mask=tile)
            tl.store(part_lse + part, lse, mask=in_rows)
