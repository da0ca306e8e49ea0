"""Slot tables cut into contiguous runs, so that long stretches are read in place.

slots of a request:   7 8 9 10 11 | 40 | 3 | 90 91 92 93
runs (4 or more):     [7:12)        -    -   [90:94)         read as views, no copy
scattered:                          40   3                   gathered, a few entries
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Shorter runs cost more as attention of their own than as rows of one gathered block.
MIN_RUN_TOKENS = 512


@dataclass(frozen=True)
class RequestSlots:
    """The entries of one request.

    runs:      (start, stop) slot ranges, read as views.
    scattered: [entries] int64 slots to gather, or None.
    """

    runs: tuple[tuple[int, int], ...]
    scattered: torch.Tensor | None

    def __bool__(self) -> bool:
        """Return whether there are any slots."""
        return bool(self.runs) or self.scattered is not None


def plan_request(slots: torch.Tensor) -> RequestSlots:
    """Cut one request's slots, [entries] int64, into runs and scattered entries."""
    if slots.numel() < MIN_RUN_TOKENS:
        return RequestSlots((), slots if slots.numel() else None)
    breaks = positions_of(slots[1:] != slots[:-1] + 1) + 1
    bounds = torch.nn.functional.pad(breaks, (1, 0))
    lengths = torch.diff(bounds, append=breaks.new_tensor([slots.numel()]))
    is_run = lengths >= MIN_RUN_TOKENS
    starts = slots[bounds[is_run]].tolist()
    runs = [(start, start + n) for start, n in zip(starts, lengths[is_run].tolist(), strict=True)]
    loose = None if len(runs) == len(lengths) else slots[~is_run.repeat_interleave(lengths)]
    return RequestSlots(tuple(runs), loose)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions where the mask is true: on a CPU NumPy finds them in less time than
    PyTorch."""
    if mask.device.type == "cpu":
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return torch.nonzero(mask).flatten()
