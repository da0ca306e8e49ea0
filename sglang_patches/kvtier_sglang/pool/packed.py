"""Spans of which every head keeps as many entries as it needs, packed into the slots that stay.

A CA slot is one *cell* for every CA head of every layer. A compressed span that keeps 3 slots of 4
heads has 12 cells, and any of its entries may stand in any of them:

    entries kept      head 0: 5    head 1: 1    head 2: 4    head 3: 2

    cells             head 0   head 1   head 2   head 3
      slot 17           0        1        2        3
      slot 18           0        0        2        3
      slot 19           0        0        2        2

A head's entries stand in its own column first; what does not fit goes to the cells that others have
left, in order. So counts and slots alone say where everything is. SGLang counts slots, as always:
its free lists, locks and invariants never notice.

A packed slot is not a token of every head any more: `dense_of` leaves it out where attention looks
for ordinary entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvtier_kernels.fp8 import raw

# Entries moved at a time, to bound the copy.
MOVED_AT_A_TIME = 1 << 20


class Cells:
    """All cells of a pool's CA heads: one buffer, one number each.

    k, v:           `[cells, 1, dim]`: to kernels each cell is a slot of a class with a single head
    bases, strides: int64 `[columns]`, where a column's (layer's CA head's) cells lie
    """

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, bases: Sequence[int], strides: Sequence[int]
    ) -> None:
        self.k, self.v = k.unsqueeze(1), v.unsqueeze(1)
        self.bases = torch.tensor(bases, dtype=torch.int64, device=k.device)
        self.strides = torch.tensor(strides, dtype=torch.int64, device=k.device)

    def of(self, columns: torch.Tensor | slice, slots: torch.Tensor) -> torch.Tensor:
        """int64 `[columns, slots]`."""
        return self.bases[columns, None] + slots * self.strides[columns, None]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy entries between cells, of which none is both."""
        for begin in range(0, source.numel(), MOVED_AT_A_TIME):
            some = slice(begin, begin + MOVED_AT_A_TIME)
            for side in (raw(self.k), raw(self.v)):
                side[target[some]] = side[source[some]]


@dataclass(frozen=True, eq=False)
class PackedSpan:
    """A packed span. slots: int64 `[slots]`, those that stay; counts: entries of every column."""

    slots: torch.Tensor
    counts: tuple[int, ...]

    @property
    def indptr(self) -> tuple[int, ...]:
        """Where each column's entries begin in `cells`, and where the last one's end."""
        return (0, *accumulate(self.counts))

    def cells(self, cells: Cells) -> torch.Tensor:
        """int64 `[entries]`: the cell of every entry, column by column."""
        counts = torch.tensor(self.counts, device=self.slots.device)
        indptr = counts.cumsum(0) - counts
        own = cells.of(slice(None), self.slots)
        place = torch.arange(self.slots.numel(), device=self.slots.device)
        held = place < counts[:, None]
        found = own.new_empty(sum(self.counts))
        found[(indptr[:, None] + place)[held]] = own[held]
        column, offset = _beyond(self.counts, self.slots.numel(), self.slots.device)
        found[indptr[column] + offset] = own[~held][: column.numel()]
        return found


def _beyond(
    counts: Sequence[int], slots: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column and offset of each entry that finds no place in its own column."""
    beyond = [max(count - slots, 0) for count in counts]
    columns = torch.arange(len(counts)).repeat_interleave(torch.tensor(beyond))
    offsets = [torch.arange(slots, slots + count) for count in beyond if count]
    offset = torch.cat(offsets) if offsets else torch.empty(0, dtype=torch.int64)
    return columns.to(device), offset.to(device)


class PackedSpans:
    """The packed spans of a pool.

    dense_of: int64 `[slots]`: an ordinary slot's own number, 0 for a packed one
    """

    def __init__(self, slots: int, cells: Cells) -> None:
        self.cells = cells
        self.dense_of = torch.arange(slots, dtype=torch.int64, device=cells.k.device)
        self._by_first: dict[int, PackedSpan] = {}

    def clear(self) -> None:
        self._by_first.clear()
        torch.arange(self.dense_of.numel(), out=self.dense_of)

    def add(self, span: PackedSpan) -> None:
        """A span whose entries stand where its counts say."""
        slots = span.slots
        self.dense_of.index_fill_(0, slots, 0)
        self._by_first[int(slots[0])] = span

    def forget(self, slots: torch.Tensor) -> None:
        """These slots are free: they are ordinary again. slots: of whole spans, and others."""
        if not self._by_first:
            return
        for first in slots[self.dense_of[slots] == 0].tolist():
            self._by_first.pop(first, None)
        self.dense_of[slots] = slots

    def in_row(self, row: torch.Tensor) -> tuple[PackedSpan, ...]:
        """The spans that a request's token slots are of, in order. row: int64 `[tokens]`."""
        if not self._by_first:
            return ()
        packed = row[(row > 0) & (self.dense_of[row] == 0)]
        spans, at = [], 0
        while at < packed.numel():
            spans.append(self._by_first[int(packed[at])])
            at += spans[-1].slots.numel()
        return tuple(spans)

    def problems(self, free: torch.Tensor) -> Iterable[str]:
        """What is wrong with them. free: slots that nothing holds."""
        held = [span.slots for span in self._by_first.values()]
        slots = torch.cat(held) if held else free[:0]
        if torch.unique(slots).numel() != slots.numel():
            yield "a slot is in two packed spans"
        if bool(torch.isin(slots, free).any()):
            yield "a free slot is packed"
        packed = torch.nonzero(self.dense_of == 0).flatten()
        if not torch.equal(packed[packed > 0], slots.sort().values):
            yield "slots are packed that are in no span, or the other way round"


__all__ = ["Cells", "PackedSpan", "PackedSpans"]
