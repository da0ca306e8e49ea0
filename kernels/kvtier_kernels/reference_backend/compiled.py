"""Decoding over lists on a CPU, compiled by numba, which comes with SGLang: every list is read
where it lies. Each thread takes as many pages as the others, and the states of a list's parts are
merged.

    pages of all lists    | list 0      | list 1 | list 2            |
    threads               |      0          |      1          |  2   |

It is there for float32; other dtypes are left to PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch

from kvtier_kernels.codes import CODED_ENTRY_BITS, coded_shape
from kvtier_kernels.lists import ENTRY_BITS, PAGE_CELLS, CellKV
from kvtier_kernels.states import AttentionState

Function = TypeVar("Function", bound=Callable[..., Any])

# More query rows of a list than these are read faster as a product of matrices.
FEW_ROWS = 16
# A thread that would read fewer pages than these is not worth waking.
THREAD_PAGES = 64
# Below all logits, and finite, so that a difference from it is a number.
_LEAST = np.float32(-3e38)
_NO_VOTES = np.empty((0, 1), np.float32)
# The float32 of every float16, which numba does not read on a CPU.
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class HostLists(NamedTuple):
    """The lists of a batch, as NumPy arrays.

    words:  int32, of all lists
    starts: int64 [requests, columns], where each list begins in `words`
    pages:  int64 [requests, columns], words of each
    slots:  int32, the dense tokens of all requests
    indptr: int64 [requests + 1], where each request's begin
    """

    words: np.ndarray[Any, np.dtype[np.int32]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    pages: np.ndarray[Any, np.dtype[np.int64]]
    slots: np.ndarray[Any, np.dtype[np.int32]]
    indptr: np.ndarray[Any, np.dtype[np.int64]]


def _compiled(function: Function) -> Function:
    # Sums may be taken in any order; an infinity stays one.
    options = {"nogil": True, "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"}}
    try:
        made: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep what is compiled
        made = numba.njit(**options)(function)
    return made


@_compiled
def _weigh(logits, count, largest, total_weight, mean):
    """Make a page's logits weights beside the largest logit, and scale what there is to that."""
    rows, dim = mean.shape
    for r in range(rows):
        before = largest[r]
        now = before
        for e in range(count):
            now = max(now, logits[r, e])
        if now != before:
            share = np.exp(before - now)
            total_weight[r] *= share
            for d in range(dim):
                mean[r, d] *= share
            largest[r] = now
        weights = np.float32(0)
        for e in range(count):
            weight = np.exp(logits[r, e] - now)
            logits[r, e] = weight
            weights += weight
        total_weight[r] += weights


@_compiled
def _attend(q, k, v, votes, lists, layer, column_cells, scale, part, parts, most, sums, out):
    """One part of the pages of all lists: of each list its largest logit, the sum of exponentials
    and the values that they weigh, for the part."""
    requests, heads, rows, dim = q.shape
    total = 0
    for request in range(requests):
        dense = lists.indptr[request + 1] - lists.indptr[request]
        for head in range(heads):
            total += lists.pages[request, layer * heads + head] + -(-dense // PAGE_CELLS)
    stretch = -(-total // parts)
    first, last = part * stretch, min((part + 1) * stretch, total)
    # Local, so that the compiler knows that nothing else writes there.
    logits = np.empty((rows, PAGE_CELLS), np.float32)
    largest, total_weight = np.empty(rows, np.float32), np.empty(rows, np.float32)
    mean = np.empty((rows, dim), np.float32)
    cells = np.empty(PAGE_CELLS, np.int64)
    at = 0
    for request in range(requests):
        begin = lists.indptr[request]
        dense = lists.indptr[request + 1] - begin
        for head in range(heads):
            column = layer * heads + head
            words = lists.pages[request, column]
            pages = words + -(-dense // PAGE_CELLS)
            if at >= last or at + pages <= first:
                at += pages
                continue
            largest[:] = _LEAST
            total_weight[:] = 0
            mean[:] = 0
            for page in range(max(first - at, 0), min(last - at, pages)):
                if page < words:
                    word = lists.words[lists.starts[request, column] + page]
                    count = word & ((1 << ENTRY_BITS) - 1)
                    for e in range(count):
                        cells[e] = np.int64(word >> ENTRY_BITS) * PAGE_CELLS + e
                else:
                    token = (page - words) * PAGE_CELLS
                    count = min(PAGE_CELLS, dense - token)
                    for e in range(count):
                        cells[e] = column * column_cells + lists.slots[begin + token + e]
                for e in range(count):
                    key = k[cells[e]]
                    for r in range(rows):
                        logit = np.float32(0)
                        for d in range(dim):
                            logit += q[request, head, r, d] * key[d]
                        logits[r, e] = logit * scale
                if votes.shape[0] and page < words:
                    for e in range(count):
                        for r in range(rows):
                            logits[r, e] += votes[cells[e], r % votes.shape[1]]
                _weigh(logits, count, largest, total_weight, mean)
                for e in range(count):
                    value = v[cells[e]]
                    for r in range(rows):
                        weight = logits[r, e]
                        for d in range(dim):
                            mean[r, d] += weight * value[d]
            one = request * heads + head
            most[part, one] = largest
            sums[part, one] = total_weight
            out[part, one] = mean
            at += pages


@_compiled
def _unpack(page, at, bits, dim, codes):
    """The codes of one key or value of a coded page, as numbers; see kvtier_kernels.codes."""
    if bits == 8:
        for d in range(dim):
            codes[d] = page[at + d]
    elif bits == 4:
        half = dim // 2
        for d in range(half):
            codes[d] = page[at + d] & 15
        for d in range(half):
            codes[half + d] = page[at + d] >> 4
    else:
        quarter, eighth = dim // 4, dim // 8
        for part in range(4):
            for d in range(quarter):
                codes[part * quarter + d] = page[at + d] >> 2 * part & 3
        for part in range(8):
            for d in range(eighth):
                codes[part * eighth + d] += (page[at + quarter + d] >> part & 1) << 2


@_compiled
def _attend_codes(q, k, v, halves, layout, lists, layer, scale, part, parts, most, sums, out):
    """`_attend` over coded pages. k, v: uint8 [pages, bytes]. layout: bits of a code, entries of a
    page, groups of a value, which share a scale. halves: float32 of every float16."""
    requests, heads, rows, dim = q.shape
    bits, entries, groups = layout
    entry_bytes, size = dim * bits // 8, dim // groups
    total = 0
    for request in range(requests):
        for head in range(heads):
            total += lists.pages[request, layer * heads + head]
    stretch = -(-total // parts)
    first, last = part * stretch, min((part + 1) * stretch, total)
    logits = np.empty((rows, entries), np.float32)
    largest, total_weight = np.empty(rows, np.float32), np.empty(rows, np.float32)
    mean, scaled = np.empty((rows, dim), np.float32), np.empty((rows, dim), np.float32)
    codes, base = np.empty(dim, np.float32), np.empty(rows, np.float32)
    at = 0
    for request in range(requests):
        for head in range(heads):
            column = layer * heads + head
            pages = lists.pages[request, column]
            if at >= last or at + pages <= first:
                at += pages
                continue
            largest[:] = _LEAST
            total_weight[:] = 0
            mean[:] = 0
            for page in range(max(first - at, 0), min(last - at, pages)):
                word = lists.words[lists.starts[request, column] + page]
                count = word & ((1 << CODED_ENTRY_BITS) - 1)
                keys, values = k[word >> CODED_ENTRY_BITS], v[word >> CODED_ENTRY_BITS]
                scales = keys[entries * entry_bytes :].view(np.uint16)
                for r in range(rows):
                    logit = np.float32(0)
                    for d in range(dim):
                        number = q[request, head, r, d]
                        scaled[r, d] = number * halves[scales[d]]
                        logit += number * halves[scales[dim + d]]
                    base[r] = logit
                for e in range(count):
                    _unpack(keys, e * entry_bytes, bits, dim, codes)
                    for r in range(rows):
                        logit = base[r]
                        for d in range(dim):
                            logit += scaled[r, d] * codes[d]
                        logits[r, e] = logit * scale
                _weigh(logits, count, largest, total_weight, mean)
                scales = values[entries * entry_bytes :].view(np.uint16)
                for e in range(count):
                    _unpack(values, e * entry_bytes, bits, dim, codes)
                    for group in range(groups):
                        wide = halves[scales[e * groups + group]]
                        least = halves[scales[(entries + e) * groups + group]]
                        for d in range(group * size, (group + 1) * size):
                            codes[d] = least + wide * codes[d]
                    for r in range(rows):
                        weight = logits[r, e]
                        for d in range(dim):
                            mean[r, d] += weight * codes[d]
            one = request * heads + head
            most[part, one] = largest
            sums[part, one] = total_weight
            out[part, one] = mean
            at += pages


@_compiled
def _merge(most, sums, out, o, lse):
    """States of parts into one of each list."""
    parts, lists, rows, dim = out.shape
    for one in range(lists):
        for r in range(rows):
            largest = most[:, one, r].max()
            total = np.float32(0)
            for part in range(parts):
                total += sums[part, one, r] * np.exp(most[part, one, r] - largest)
            o[one, r] = 0
            for part in range(parts):
                if sums[part, one, r]:
                    share = np.exp(most[part, one, r] - largest) / total
                    for d in range(dim):
                        o[one, r, d] += share * out[part, one, r, d]
            lse[one, r] = largest + np.log(total) if total else -np.inf


def decode(
    q: torch.Tensor, kv: CellKV, lists: HostLists, layer: int, scale: float
) -> AttentionState:
    """See ListKernels.decode; float32, on a CPU."""
    heads = q.shape[1]
    pages = _pages(lists, layer, heads) + heads * len(lists.slots) // PAGE_CELLS
    votes = _NO_VOTES if kv.log_votes is None else kv.log_votes.view(len(kv.k), -1).numpy()
    fixed = (q.contiguous().numpy(), kv.k.numpy(), kv.v.numpy(), votes, lists)
    return _in_parts(
        lambda *parts: _attend(*fixed, layer, kv.column_cells, np.float32(scale), *parts), q, pages
    )


def decode_codes(
    q: torch.Tensor, kv: CellKV, lists: HostLists, layer: int, scale: float
) -> AttentionState:
    """The same over coded pages. q and what is found are rotated (kvtier_kernels.codes)."""
    assert kv.bits is not None, "pages that are not coded"
    shape = coded_shape(kv.bits, q.shape[-1])
    layout = (shape.bits, shape.entries, shape.groups)
    k, v = kv.pages
    fixed = (q.contiguous().numpy(), k.numpy(), v.numpy(), _HALVES, layout, lists)
    return _in_parts(
        lambda *parts: _attend_codes(*fixed, layer, np.float32(scale), *parts),
        q,
        # A page of codes has several times as many entries.
        shape.entries * _pages(lists, layer, q.shape[1]) // PAGE_CELLS,
    )


def _pages(lists: HostLists, layer: int, heads: int) -> int:
    """Words of a layer's lists."""
    return int(lists.pages[:, layer * heads : (layer + 1) * heads].sum())


def _in_parts(attend_part: Callable[..., None], q: torch.Tensor, pages: int) -> AttentionState:
    """Run `attend_part` in all threads and merge their states. attend_part takes (part, parts,
    most, sums, out), see `_attend`."""
    requests, heads, rows, dim = q.shape
    parts = max(1, min(torch.get_num_threads(), pages // THREAD_PAGES))
    most = np.full((parts, requests * heads, rows), _LEAST, np.float32)
    sums, out = np.zeros_like(most), np.empty((*most.shape, dim), np.float32)

    def attend(part: int) -> None:
        attend_part(part, parts, most, sums, out)

    others = [_threads(parts - 1).submit(attend, part) for part in range(1, parts)]
    attend(0)
    for other in others:
        other.result()
    o, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    _merge(most, sums, out, o.view(-1, rows, dim).numpy(), lse.view(-1, rows).numpy())
    return AttentionState(o, lse)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that wait in between, as PyTorch's own would not."""
    return ThreadPoolExecutor(count, "kvtier-decode")


# A fork has none of them.
os.register_at_fork(after_in_child=_threads.cache_clear)
