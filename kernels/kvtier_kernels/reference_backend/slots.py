"""Slot tables cut into contiguous runs, so that long stretches are read in place.

slots of a request:   7 8 9 10 11 | 40 | 3 | 90 91 92 93
runs (min_run = 4):   [7:12)        -    -   [90:94)         read as views, no copy
scattered:                          40   3                   gathered, a few entries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvtier_kernels.positions import positions_of

# Shorter runs cost more as attention of their own than as rows of one gathered block.
MIN_RUN_TOKENS = 512


@dataclass(frozen=True)
class RequestSlots:
    """The entries of one request.

    runs:      (start, stop) slot ranges without votes, read as views.
    scattered: [entries] int64 slots to gather, or None.
    voted:     whether any of `scattered` has votes.
    all_slots: [entries] int64, everything in the original order.
    """

    runs: tuple[tuple[int, int], ...]
    scattered: torch.Tensor | None
    voted: bool
    all_slots: torch.Tensor

    @property
    def num_entries(self) -> int:
        return int(self.all_slots.numel())


def plan_request(
    slots: torch.Tensor, log_votes: torch.Tensor | None, min_run: int = MIN_RUN_TOKENS
) -> RequestSlots:
    """Cut one request's slots into runs and scattered entries.

    slots: [entries] int64. log_votes: [all slots, ...] float32 or None; an entry with a non-zero
    log-vote is always scattered, so runs need no bias. min_run: at least 2.
    """
    if slots.numel() == 0:
        return RequestSlots((), None, False, slots)
    voted = None
    if log_votes is not None:
        votes = log_votes.index_select(0, slots)
        voted = votes != 0 if votes.ndim == 1 else (votes != 0).flatten(1).any(1)
    breaks = slots[1:] != slots[:-1] + 1
    if voted is not None:
        breaks = breaks | voted[1:] | voted[:-1]
    edges = (positions_of(breaks) + 1).tolist()
    bounds = [0, *edges, slots.numel()]
    runs, loose = [], []
    for begin, end in pairwise(bounds):
        if end - begin >= min_run:
            first = int(slots[begin])
            runs.append((first, first + end - begin))
        else:
            loose.append((begin, end))
    if not loose:
        return RequestSlots(tuple(runs), None, False, slots)
    index = torch.cat([torch.arange(b, e, device=slots.device) for b, e in loose])
    any_voted = voted is not None and bool(voted[index].any())
    return RequestSlots(tuple(runs), slots.index_select(0, index), any_voted, slots)


def plan_batch(
    slots: torch.Tensor,
    indptr: Sequence[int],
    log_votes: torch.Tensor | None,
    min_run: int = MIN_RUN_TOKENS,
) -> tuple[RequestSlots, ...]:
    """`plan_request` for every request of a batch."""
    return tuple(
        plan_request(slots[begin:end], log_votes, min_run) for begin, end in pairwise(indptr)
    )
