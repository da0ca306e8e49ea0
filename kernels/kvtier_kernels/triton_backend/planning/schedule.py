"""How decoding is spread over the device: equal stretches of entries, of whichever request.

    request 0   |------------------------------------|        units 0 1 2 3
    request 1   |--|                                          unit  4
    request 2   |-------------|                               units 5 6
    stretch     |---------|

One request of 128k entries beside sixty short ones keeps every core busy for as long. Everything is
computed on the device from `indptr`, so that a CUDA graph replays it for other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["requests", "max_units", "target_units"])
def schedule_units(
    indptr,
    units_indptr,
    unit_request,
    stretch,
    requests,
    max_units,
    target_units,
    LEAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """indptr [requests + 1] -> stretch [1], units_indptr [requests + 1], unit_request [max_units].

    A stretch is a multiple of LEAST entries, such that there are at most target_units + requests
    units; `unit_request` is `requests` for a unit that has nothing to do. Grid (max_units /
    BLOCK_U), each program with the whole of indptr in one tile of BLOCK_R > requests.
    """
    r = tl.arange(0, BLOCK_R)
    real = r < requests
    begin = tl.load(indptr + r, mask=real, other=0)
    end = tl.load(indptr + r + 1, mask=real, other=0)
    entries = tl.sum(end - begin, 0)
    each = (entries + target_units - 1) // target_units
    size = tl.maximum((each + LEAST - 1) // LEAST, 1) * LEAST
    units = (end - begin + size - 1) // size
    last = tl.cumsum(units, 0)
    u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    owner = tl.sum(((last[None, :] <= u[:, None]) & real[None, :]).to(tl.int32), 1)
    tl.store(unit_request + u, owner, mask=u < max_units)
    if tl.program_id(0) == 0:
        tl.store(units_indptr + r, last - units, mask=r <= requests)
        tl.store(stretch, size)


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
    """How lists are dealt (see `lists`): pages [rows, columns] -> bounds [layers, lists + 1] and
    stretch [layers]. Grid (layers,)."""
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
