"""A kernel that finds where each list's pages begin, and how many pages a program has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "heads", "lists", "programs"])
def deal_pages(
    pages,
    rows,
    dense,
    block_request,
    bounds,
    stretch,
    columns,
    heads,
    lists,
    programs,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Deal the lists to programs (see `lists`): pages [rows, columns] -> bounds [layers, lists + 1]
    and stretch [layers]. Grid (layers,)."""
    layer = tl.program_id(0)
    bounds += layer * (lists + 1)
    before = 0
    for first in range(0, lists, BLOCK):
        one = first + tl.arange(0, BLOCK)
        inside = one < lists
        request = tl.load(block_request + one // heads, mask=inside, other=0)
        row = tl.load(rows + request, mask=inside, other=0).to(tl.int64)
        column = layer * heads + one % heads
        words = tl.load(pages + row * columns + column, mask=inside, other=0)
        tokens = tl.load(dense + request, mask=inside, other=0).to(tl.int32)
        each = words + (tokens + 15) // 16
        tl.store(bounds + one, before + tl.cumsum(each, 0) - each, mask=inside)
        before += tl.sum(each, 0)
    tl.store(bounds + lists, before)
    tl.store(stretch + layer, tl.maximum((before + programs - 1) // programs, LEAST))
