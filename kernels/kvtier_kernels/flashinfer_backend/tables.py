"""The page tables and the logarithms of FlashInfer, made from those of the contract and back.

A page is one entry, so a plan's slot table is a page table as it is:

    slots    [ 7 3 9 | | 4 1 ]      paged_kv_indices
    indptr   [ 0, 3, 3, 5 ]         paged_kv_indptr
             [ 1, 0, 1 ]            paged_kv_last_page_len
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch


class Pages(NamedTuple):
    """The tables that FlashInfer plans from, on the host: given device tensors, it would wait for
    them.

    indptr:        [requests + 1] int32.
    last_page_len: [requests] int32. 0 for a request without entries, to which 1 would give one.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor


def pages_of(bounds: Sequence[int]) -> Pages:
    """The pages of requests whose entries are bounds[i]:bounds[i + 1]."""
    indptr = torch.tensor(bounds, dtype=torch.int32, device="cpu")
    return Pages(indptr, (indptr[1:] - indptr[:-1]).clamp(max=1))


def rows_without_entries(bounds: Sequence[int], q_indptr: Sequence[int]) -> list[int]:
    """The query rows of requests that have no entries."""
    rows: list[int] = []
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(q_indptr), strict=True):
        if begin == end:
            rows += range(first, last)
    return rows


def natural(lse: torch.Tensor) -> torch.Tensor:
    """FlashInfer's log-sum-exp, which is in base 2, as the contract's; in place."""
    return lse.mul_(math.log(2))


__all__ = ["Pages", "natural", "pages_of", "rows_without_entries"]
