"""Spans of which every head keeps as many entries as it needs, in pages of the slots that stay.

A slot is one *cell* for every KV head of every layer, a column. The cells of one column at
`PAGE` slots that follow each other, from a multiple of it, are a *page*; those of all columns are a
*bundle*. A compressed span keeps whole bundles, whose pages belong to whatever columns need them:

    pages kept        column 0: 5    column 1: 1    column 2: 4    column 3: 2

    pages             column 0   column 1   column 2   column 3
      bundle 17           0        1        2        3
      bundle 18           0        0        2        3
      bundle 19           0        0        2        2

A column's pages stand in the column itself first; what does not fit goes to the pages that others
have left, in order. So counts and slots alone say where everything is. SGLang counts slots, as
always: its free lists, locks and invariants never notice. An entry that stands for several tokens
has as many votes.

What is kept may be *coded* (kvtier_kernels.codes): pages are then the same and hold more entries.

A packed slot is not a token of every head any more: `dense_of` leaves it out where attention looks
for ordinary entries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from kvtier.retention.shares import PAGE
from kvtier_kernels import CellKV
from kvtier_kernels.codes import (
    CODED_ENTRY_BITS,
    CodedShape,
    coded_shape,
    decoded_entries,
    encode,
)
from kvtier_kernels.fp8 import put, raw, take
from kvtier_kernels.lists import ENTRY_BITS, PAGE_CELLS

# Budgets are counted in the pages that kernels read.
assert PAGE == PAGE_CELLS
# Entries moved at a time, to bound the copy.
MOVED_AT_A_TIME = 1 << 20


class Cells:
    """All cells of a pool: one buffer, one number each, those of a column together.

    k, v:         `[cells, dim]`
    column_cells: of a column
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, column_cells: int) -> None:
        self.k, self.v, self.column_cells = k, v, column_cells

    def of(self, column: int | torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """int64 `[slots]`: cells of one column, or of each slot's."""
        return column * self.column_cells + slots

    def at(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[cells, dim]` of some cells: copies."""
        return take(self.k, 0, cells), take(self.v, 0, cells)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy entries between cells, of which none is both."""
        for begin in range(0, source.numel(), MOVED_AT_A_TIME):
            some = slice(begin, begin + MOVED_AT_A_TIME)
            self._copy(source[some], target[some])

    def move_within(
        self, source: torch.Tensor, target: torch.Tensor, bounds: Sequence[int]
    ) -> None:
        """The same where those between two `bounds` that follow each other, as those of one column,
        may be source and target both: these are copied at once."""
        begin = 0
        for stop, after in pairwise([*bounds[1:], sys.maxsize]):
            if after - begin > MOVED_AT_A_TIME:
                self._copy(source[begin:stop], target[begin:stop])
                begin = stop

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for side in (raw(self.k), raw(self.v)):
            # The right-hand side is a copy before anything is written.
            side[target] = side[source]


def most_pages(*, coded: bool) -> int:
    """Return how many pages words can tell apart, which are of 31 bits and a sign. coded: where
    spans are."""
    return 1 << (31 - (CODED_ENTRY_BITS if coded else ENTRY_BITS))


def bundles_first(slots: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same slots `[n]` int64, those of whole bundles before the others and each part
    ascending, and how many are in whole bundles."""
    ordered = slots.sort().values
    within, last = ordered % PAGE, slots.numel() - 1
    # In a whole bundle its first slot and its last are as far away here as in the pool.
    first = torch.arange(slots.numel(), device=slots.device) - within
    inside = (first >= 0) & (first + PAGE - 1 <= last)
    begin, end = (at.clamp(0, last) for at in (first, first + PAGE - 1))
    whole = inside & (ordered[begin] == ordered - within)
    whole &= ordered[end] == ordered - within + PAGE - 1
    order = torch.argsort((~whole).int(), stable=True)
    return ordered[order], int(whole.sum())


@dataclass(frozen=True, eq=False)
class PackedSpan:
    """A packed span.

    slots:  int64 `[bundles * PAGE]`, those that stay: whole bundles, one after another
    counts: entries of every column
    words:  int32 `[pages]`, each page and how many entries it has (kvtier_kernels.lists), column
            by column
    column: int64 `[pages]`, of each page
    tokens: int32 `[entries]`, of which of the span's tokens each entry is, column by column and
            there ascending; None where entries are not of one token each
    coded:  how its pages are coded; None where they are not
    """

    slots: torch.Tensor
    counts: tuple[int, ...]
    words: torch.Tensor
    column: torch.Tensor
    tokens: torch.Tensor | None = None
    coded: CodedShape | None = None

    @property
    def indptr(self) -> tuple[int, ...]:
        """The position where each column's entries begin in `cells`, and where the last one's
        end."""
        return (0, *accumulate(self.counts))

    @property
    def pages(self) -> torch.Tensor:
        """int64 `[pages]`: the pages of `words`."""
        return self.words.long() >> (ENTRY_BITS if self.coded is None else CODED_ENTRY_BITS)

    def of_column(self, column: int) -> torch.Tensor:
        """int64 `[entries]`: the cells of one column's entries. It asks the device for nothing."""
        first = sum(-(-count // PAGE) for count in self.counts[:column])
        pages = self.words[first : first - (-self.counts[column] // PAGE)].to(torch.int64)
        step = torch.arange(PAGE, device=pages.device)
        # All pages of a column but the last are full.
        cells = (pages[:, None] >> ENTRY_BITS) * PAGE + step
        return cells.flatten()[: self.counts[column]]

    def of_tokens(self, begin: int, stop: int) -> torch.Tensor:
        """bool `[entries]`: whether each is of one of these tokens."""
        assert self.tokens is not None, "entries that stand for several tokens"
        return (begin <= self.tokens) & (self.tokens < stop)

    @property
    def cells(self) -> torch.Tensor:
        """int64 `[entries]`: the cell of every entry, column by column."""
        words = self.words.to(torch.int64)[:, None]
        step = torch.arange(PAGE, device=words.device)
        held = step < (words & ((1 << ENTRY_BITS) - 1))
        cells = ((words >> ENTRY_BITS) * PAGE + step).flatten()
        return cells[torch.nonzero_static(held.flatten(), size=sum(self.counts)).squeeze(-1)]


def slots_as_entries(kept: int) -> int:
    """Slots of whole bundles that hold so many entries of a column on average, whichever columns
    have them: the last page of each may not be full."""
    return PAGE * (-(-kept // PAGE) + 1)


@dataclass(frozen=True)
class Part:
    """The entries that are kept of some of a span's tokens, those from `begin` to `stop`. counts:
    entries of every column. page: entries of a page."""

    begin: int
    stop: int
    counts: tuple[int, ...]
    page: int

    @classmethod
    def of(cls, span: PackedSpan, begin: int, stop: int) -> Part:
        """Return the part of a span between two of its tokens. It asks the device."""
        kept = torch.tensor(span.counts)
        column = torch.arange(kept.numel()).repeat_interleave(kept)
        inside = span.of_tokens(begin, stop).long().cpu()
        counts = torch.zeros_like(kept).index_add_(0, column, inside)
        page = PAGE if span.coded is None else span.coded.entries
        return cls(begin, stop, tuple(counts.tolist()), page)

    @property
    def slots(self) -> int:
        """The number of slots of the whole bundles that hold it."""
        pages = sum(-(-count // self.page) for count in self.counts)
        return PAGE * -(-pages // len(self.counts))


Entries = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

Turned = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""(keys `[entries, dim]`, how many of each column) -> the keys as they would be elsewhere"""


class PackedSpans:
    """The packed spans of a pool.

    dense_of:     int64 `[slots]`: an ordinary slot's own number, 0 for a packed one
    log_votes:    float32 `[cells, votes]`, 0 for a token, ln N for an entry that stands for N of
                  them; None where all stand for one
    votes:        1, or as many as query heads of a group, which then have votes of their own; 0
                  where all entries stand for one token
    coded:        how spans are coded that keep entries of single tokens; None where they are not
    feedback:     float32 `[columns, dim, dim]`, of each column's keys (kvtier_kernels.codes); None
                  where nothing is known of queries. Set once, before anything is coded
    """

    def __init__(self, slots: int, cells: Cells, votes: int = 0, bits: int | None = None) -> None:
        self.cells, self.votes = cells, votes
        dim = cells.k.shape[1]
        self.coded = None if bits is None else coded_shape(bits, dim)
        self.feedback: torch.Tensor | None = None
        self._sides = CellKV(cells.k, cells.v, cells.column_cells).pages
        device = cells.k.device
        self.dense_of = torch.arange(slots, dtype=torch.int64, device=device)
        self.log_votes = torch.zeros(cells.k.shape[0], votes, device=device) if votes else None
        self._by_first: dict[int, PackedSpan] = {}
        # Cells that may have votes, by the span's first slot.
        self._voted: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        self._by_first.clear()
        self._voted.clear()
        torch.arange(self.dense_of.numel(), out=self.dense_of)
        if self.log_votes is not None:
            self.log_votes.zero_()

    @property
    def page(self) -> int:
        """Entries of a page, of spans that are coded where any are."""
        return PAGE if self.coded is None else self.coded.entries

    def span(
        self,
        slots: torch.Tensor,
        counts: Sequence[int],
        tokens: torch.Tensor | None = None,
        coded: CodedShape | None = None,
    ) -> PackedSpan:
        """The span whose columns keep so many entries in these whole bundles."""
        entries = torch.tensor(counts)
        held, bits = (PAGE, ENTRY_BITS) if coded is None else (coded.entries, CODED_ENTRY_BITS)
        pages = -(-entries // held)
        column = torch.arange(pages.numel()).repeat_interleave(pages)
        number = torch.arange(column.numel()) - (pages.cumsum(0) - pages)[column]
        filled = (entries[column] - held * number).clamp_max(held)
        # Each page stands in its own column first, then wherever others have left a place.
        bundles = slots.numel() // PAGE
        free = torch.nonzero(torch.arange(bundles) >= pages[:, None])
        beyond = number >= bundles
        stands, bundle = column.clone(), number
        taken = free[: int(beyond.sum())]
        stands[beyond], bundle[beyond] = taken[:, 0], taken[:, 1]
        first = slots[::PAGE][bundle.to(slots.device)]
        page = (stands.to(slots.device) * self.cells.column_cells + first) // PAGE
        words = (page << bits | filled.to(slots.device)).to(torch.int32)
        return PackedSpan(slots, tuple(counts), words, column.to(slots.device), tokens, coded)

    def code(self, span: PackedSpan, entries: Entries) -> None:
        """Write what a coded span keeps. entries: keys and values `[n, dim]` each of so many of its
        entries, by their numbers; they may stand where the span does, as none is written before all
        were asked for."""
        assert span.coded is not None, "a span that is not coded"
        held, device = span.coded.entries, span.words.device
        count = span.words.long() & ((1 << CODED_ENTRY_BITS) - 1)
        first = count.cumsum(0) - count
        place = torch.arange(held, device=device)
        coded = []
        numbers = torch.arange(count.numel(), device=device)
        for some in torch.split(numbers, MOVED_AT_A_TIME // held):
            # Behind a page's count its first entry stands again.
            within = torch.where(place < count[some, None], place, 0)
            sides = entries((first[some, None] + within).flatten())
            k, v = (side.view(len(some), held, -1) for side in sides)
            fed_back = None if self.feedback is None else (self.feedback, span.column[some])
            coded.append(encode(k, v, count[some], span.coded.bits, fed_back))
        for side, parts in zip(self._sides, zip(*coded, strict=True), strict=True):
            written = torch.cat(parts)
            side[:, : written.shape[1]].index_copy_(0, span.pages, written)

    def decoded(self, span: PackedSpan) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[entries, dim]` each, the keys and values of a span, column by column."""
        if span.coded is None:
            k, v = self.cells.at(span.cells)
            return k.float(), v.float()
        return decoded_entries(self._sides, span.words.long(), span.coded)

    def add(self, span: PackedSpan) -> None:
        """A span whose entries stand where its counts say."""
        slots = span.slots
        self.dense_of.index_fill_(0, slots, 0)
        self._by_first[int(slots[0])] = span

    def of(self, slots: torch.Tensor) -> PackedSpan | None:
        """The span that begins with the first of these slots, if there is one."""
        return self._by_first.get(int(slots[0])) if self._by_first and slots.numel() else None

    def cut(
        self, span: PackedSpan, first: Part, rest: Part, above: torch.Tensor, below: torch.Tensor
    ) -> torch.Tensor:
        """Make two spans of one that nobody is reading: of what is kept of its first tokens, in the
        slots `above`, its own first ones, and of what is kept of the rest, in `below`. Returns the
        slots that are left over."""
        mine = span.of_tokens(first.begin, first.stop)
        begun, later = self._part(span, first, above), self._part(span, rest, below)
        if span.coded is None:
            cells = span.cells
            self.cells.move(cells[~mine], later.cells)
            # Most of it stands where it stood. What does not may go where others of it stand.
            source, target = cells[mine], begun.cells
            moves = torch.nonzero(source != target).squeeze(-1)
            self.cells.move_within(source[moves], target[moves], (0, moves.numel()))
        else:
            # The first part keeps its codes, page by page; the other begins in the middle of pages
            # and is coded anew.
            k, v = self.decoded(span)
            those = torch.nonzero(~mine).squeeze(-1)
            self.code(later, lambda numbers: (k[those[numbers]], v[those[numbers]]))
            self._copy_codes(span, begun)
        self.add(begun)
        self.add(later)
        return span.slots[above.numel() :]

    def copy(
        self, span: PackedSpan, part: Part, slots: torch.Tensor, turned: Turned | None = None
    ) -> None:
        """Make a span of copies, in these slots, of what a span keeps of some of its tokens. Others
        may be reading it, and go on. turned: what the copies' keys become; None: what they are."""
        copied, those = self._part(span, part, slots), span.of_tokens(part.begin, part.stop)
        if span.coded is None:
            source, target = span.cells[those], copied.cells
            self.cells.move(source, target)
            if turned is not None:
                put(self.cells.k, target, turned(take(self.cells.k, 0, target), part.counts))
        elif part.begin == 0 and turned is None:
            self._copy_codes(span, copied)
        else:
            k, v = (side[those] for side in self.decoded(span))
            k = k if turned is None else turned(k, part.counts)
            self.code(copied, lambda numbers: (k[numbers], v[numbers]))
        self.add(copied)

    def _part(self, span: PackedSpan, part: Part, slots: torch.Tensor) -> PackedSpan:
        """The span that a part of another becomes, in these slots."""
        assert span.tokens is not None, "entries that stand for several tokens"
        tokens = span.tokens[span.of_tokens(part.begin, part.stop)] - part.begin
        return self.span(slots, part.counts, tokens, span.coded)

    def _copy_codes(self, span: PackedSpan, begun: PackedSpan) -> None:
        """Write the codes of a span's beginning, page by page, to where it stands or will."""
        assert span.coded is not None, "a span that is not coded"
        held = span.coded.entries
        kept = [-(-count // held) for count in begun.counts]
        number = torch.cat([torch.arange(-(-count // held)) for count in span.counts])
        column = span.column.cpu()
        stays = torch.nonzero(number < torch.tensor(kept)[column]).squeeze(-1)
        source, target = span.pages[stays.to(span.words.device)], begun.pages
        for side in self._sides:
            # The right-hand side is a copy before anything is written.
            side[target] = side[source]

    def vote(self, span: PackedSpan, columns: Sequence[int], log_votes: float) -> torch.Tensor:
        """Give the last entry of each of these columns so many votes; returns their cells."""
        assert self.log_votes is not None, "packed spans without votes"
        cells = torch.cat([span.of_column(column)[-1:] for column in columns])
        self.log_votes.index_fill_(0, cells, log_votes)
        self._voted[int(span.slots[0])] = cells
        return cells

    def let_vote(self, span: PackedSpan) -> None:
        """Any entry of a span may be given votes in `log_votes`, which end with the span."""
        self._voted[int(span.slots[0])] = span.cells

    def forget(self, slots: torch.Tensor) -> None:
        """These slots are free: they are ordinary again. slots: of whole spans, and others."""
        if not self._by_first:
            return
        for first in slots[self.dense_of[slots] == 0].tolist():
            self._by_first.pop(first, None)
            voted = self._voted.pop(first, None)
            if voted is not None and self.log_votes is not None:
                self.log_votes.index_fill_(0, voted, 0.0)
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
        """Yield what is wrong with the spans. free: int64 `[slots]`, how often each is free."""
        held = [span.slots for span in self._by_first.values()]
        slots = torch.cat(held) if held else self.dense_of[:0]
        packed = torch.bincount(slots, minlength=self.dense_of.numel())
        if bool((packed > 1).any()):
            yield "a slot is in two packed spans"
        if self.log_votes is not None:
            voted = torch.cat([*self._voted.values(), slots[:0]])
            found = self.log_votes.any(-1)
            found[voted] = False
            if bool(found.any()):
                yield "an entry has votes that is in no packed span"
        if bool(free[slots].any()):
            yield "a free slot is packed"
        if not torch.equal((self.dense_of == 0)[1:], (packed > 0)[1:]):
            yield "slots are packed that are in no span, or the other way round"
