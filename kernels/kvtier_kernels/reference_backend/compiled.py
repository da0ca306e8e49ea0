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
    requests, heads, rows, dim = q.shape
    pages = int(lists.pages[:, layer * heads : (layer + 1) * heads].sum())
    pages += heads * len(lists.slots) // PAGE_CELLS
    parts = max(1, min(torch.get_num_threads(), pages // THREAD_PAGES))
    most = np.full((parts, requests * heads, rows), _LEAST, np.float32)
    sums, out = np.zeros_like(most), np.empty((*most.shape, dim), np.float32)
    votes = _NO_VOTES if kv.log_votes is None else kv.log_votes.view(len(kv.k), -1).numpy()
    fixed = (q.contiguous().numpy(), kv.k.numpy(), kv.v.numpy(), votes, lists)

    def attend(part: int) -> None:
        _attend(*fixed, layer, kv.column_cells, np.float32(scale), part, parts, most, sums, out)

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


__all__ = ["FEW_ROWS", "HostLists", "decode"]
