"""The sizes of attention's tiles, and the number of splits that a prefix is cut in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton

from kvtier_kernels.triton_backend.launching import (
    has_wide_products,
    is_interpreted,
    multiprocessors,
)

MAX_SPLITS = 16
# A split of a prefix has at least so many entries: fewer cost more in merging than they gain.
LEAST_SPLIT = 1024
# Entries of a prefix's kept KV in a program's tile: few, so that it loads one while it computes
# with another, and five programs still fit a multiprocessor. Without tensor cores a tile lies in
# registers.
KEPT_ENTRIES = 32
KEPT_ENTRIES_IEEE = 16
# A whole coded page.
CODED_TILE = 64
# The registers of a multiprocessor.
REGISTERS = 65536
# In the interpreter every operation costs the same, however much it does.
INTERPRETED_TILE = 64


def num_splits(programs: int, bounds: Sequence[int], device: torch.device) -> int:
    """Splits of the prefix: enough to keep the device busy, where it is long enough for that."""
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    wanted = triton.cdiv(2 * multiprocessors(device), max(1, programs))
    useful = max(1, longest // LEAST_SPLIT)
    # The number is rounded up to a power of two, as it was measured on an H100.
    return int(min(MAX_SPLITS, triton.next_power_of_2(min(wanted, useful))))


def kept_entries(ieee: bool) -> int:
    if is_interpreted():
        return INTERPRETED_TILE
    return KEPT_ENTRIES_IEEE if ieee else KEPT_ENTRIES


class Tile(NamedTuple):
    """rows: tokens times group. stages: tiles of entries in flight, the one in use included.
    programs: that are resident on a multiprocessor at a time, of attention over lists."""

    rows: int
    entries: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def registers(self) -> int:
        """The most registers of a thread. Told nothing, ptxas spills to fit more programs than
        shared memory has room for."""
        return min(255, REGISTERS // (32 * self.warps * self.programs) // 8 * 8)


def extend_tile(dim: int, ieee: bool) -> Tile:
    """The fastest on an H100 of those that keep to the registers, elsewhere what does (`ahead`)."""
    if is_interpreted():
        return Tile(INTERPRETED_TILE, INTERPRETED_TILE, 4, 2)
    if dim > 128:
        return Tile(32, 32, 8, 3)
    if not has_wide_products():
        return Tile(32, 32, 8, 2) if ieee else Tile(64, 64, 8, 2)
    if ieee:
        # These fit the registers as Triton 3.6 and 3.8 compile them.
        return Tile(32, 32, 4, 1)
    return Tile(64, 64, 4, 3)


def list_tile(dim: int, ieee: bool, rows: int, *, laden: bool) -> Tile:
    """Return the tile of attention over lists, such that the registers suffice (`ahead`). For few
    rows it was measured on an H200: with dim 128, 64 entries in three stages leave room for just
    three programs.

    rows: the most of a request, tokens times group. laden: with votes per query head, or of fp8.
    """
    wanted = max(16, triton.next_power_of_2(rows))
    if is_interpreted():
        return Tile(min(wanted, INTERPRETED_TILE), INTERPRETED_TILE, 4, 3, 3)
    if ieee:
        return Tile(16, 16, 4, 3, 2) if wanted == 16 else Tile(32, 16, 4, 1, 2)
    entries = 64 if dim <= 128 else 32
    stages = 3 if has_wide_products() else 2
    if wanted == 16:
        return Tile(16, entries, 4, stages, 2 if laden else stages)
    if laden or dim > 128:
        return Tile(32, 32, 4, stages, stages - 1)
    return Tile(min(wanted, 64), entries, 4, stages, stages - 1)


def code_tile(dim: int, ieee: bool, rows: int) -> Tile:
    """Return the tile of attention over coded pages, of at most 63 entries each. It is not
    measured; the registers suffice for it (`ahead`).

    rows: the most of a request, tokens times group.
    """
    wanted = max(16, triton.next_power_of_2(rows))
    if is_interpreted():
        return Tile(min(wanted, INTERPRETED_TILE), CODED_TILE, 4, 3, 3)
    if ieee:
        return Tile(16, 16, 4, 2, 2)
    return Tile(min(wanted, 16 if dim > 128 else 64), CODED_TILE, 8, 2, 1)


class MergeTile(NamedTuple):
    """parts: of a row at a time."""

    rows: int
    parts: int


def merge_tile(rows: int) -> MergeTile:
    """Return the tile of the merge of the parts that attention over lists leaves. rows: of a
    list."""
    if is_interpreted():
        return MergeTile(INTERPRETED_TILE, 4)
    # Few rows have many parts each, which are best read at once.
    return MergeTile(1, 32) if rows <= 16 else MergeTile(8, 4)
