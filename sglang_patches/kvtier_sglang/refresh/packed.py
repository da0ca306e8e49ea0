"""Refresh where heads keep different numbers of entries: a request reads spans of its own, of which
each head has as many as of the tree's.

    tree      | packed span: slots 17 18 19 |     shared, never touched
    request   | packed span: slots 41 42 43 |     the same counts, entries of its own

Where heads compete, a part of them is chosen by what tokens are worth to any turn, the rest by the
turn's own queries (kvtier.retention.refreshing.choose_again). By a head profile, anchored heads
choose as they do without packing, and the others keep what they have.

Scheduler thread only, like the refresher.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule, choose_again
from kvtier_kernels import HeadMap
from kvtier_kernels.fp8 import put, take
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans
from kvtier_sglang.refresh.refresher import Contexts, Refresher, Refreshing
from kvtier_sglang.refresh.sources import FetchedSource, RefreshSource


class HeadsCompete(Protocol):
    """What chose the entries of the tree."""

    def score(
        self,
        index: int,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        state: torch.Tensor,
        first: int,
    ) -> torch.Tensor:
        """Float32 `[heads, tokens]` of exact KV `[heads, tokens, dim]` of a layer that begins at
        position `first`; state: `[heads, 0, tokens]`."""


class PackedRefresher(Refresher):
    """See the module docstring."""

    @property
    def packed(self) -> PackedSpans:
        """The pool's packed spans."""
        assert self.pool.packed is not None, "a pool that does not pack"
        return self.pool.packed

    def _shared(self, pruned: PrunedRange, row: torch.Tensor) -> PackedSpan:
        """The tree's span of a range, which the request's row reads."""
        (span,) = self.packed.in_row(row[pruned.begin : pruned.end].to(torch.int64))
        return span

    def _needs(self, refreshing: Refreshing, row: torch.Tensor) -> list[int]:
        return [self._shared(pruned, row).slots.numel() for pruned in refreshing.ranges]

    def _slots(self, count: int) -> torch.Tensor | None:
        return self.allocator.alloc_bundles(count)

    def _point(self, refreshing: Refreshing, row: torch.Tensor) -> None:
        """Let a request's row read its own spans, which begin as copies of the tree's."""
        for pruned, slots in zip(refreshing.ranges, refreshing.slots, strict=True):
            shared = self._shared(pruned, row)
            own = self.packed.span(slots, self._counts(shared))
            self.packed.add(own)
            self._copy(shared, own)
            self.allocator.free_locality(slots)
            row[pruned.begin : pruned.begin + slots.numel()] = slots.to(row.dtype)

    def _counts(self, shared: PackedSpan) -> Sequence[int]:
        """Entries of every column of a request's own span."""
        return shared.counts

    def _copy(self, shared: PackedSpan, own: PackedSpan) -> None:
        self.packed.cells.move(shared.cells, own.cells)


class AdaptiveRefresher(PackedRefresher):
    """Where heads compete. selection: what chose the entries of the tree."""

    def __init__(self, rule: RefreshRule, contexts: Contexts, selection: HeadsCompete) -> None:
        super().__init__(rule, contexts)
        assert not rule.merges, "entries that heads compete for are not merged"
        self.selection = selection
        sizes = [len(buffers.heads) for buffers in self.pool.ca]
        self._first_column = [0, *accumulate(sizes)]

    def _refresh(
        self, index: int, refreshing: Refreshing, source: RefreshSource, window: QueryWindow
    ) -> bool:
        assert isinstance(source, FetchedSource), "the tier does not know what tokens are worth"
        exact = source.exact(index, self.pool.ca[index].heads)
        for pruned, slots, (k, v) in zip(refreshing.ranges, refreshing.slots, exact, strict=True):
            device = window.q.device
            self._write_range(index, pruned, slots, k.to(device), v.to(device), window)
        return True

    def _write_range(
        self,
        index: int,
        pruned: PrunedRange,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: QueryWindow,
    ) -> None:
        """Choose again what one layer's heads keep of a range. k, v: `[heads, tokens, dim]`."""
        cells, heads, tokens = self.packed.cells, k.shape[0], k.shape[1]
        state = k.new_empty(heads, 0, tokens, dtype=torch.float32)
        worth = self.selection.score(index, k, v, state, pruned.begin)
        (span,) = self.packed.in_row(slots)
        for head in range(heads):
            column = self._first_column[index] + head
            own = span.of_column(column)
            mine = slice(head, head + 1)
            queries = QueryWindow(window.q[:, mine], window.scale)
            kept = choose_again(
                self.rule.keepkv, k[mine], v[mine], worth[head], span.counts[column], queries
            )
            for exact, target in ((k[head], cells.k), (v[head], cells.v)):
                put(target[:, 0], own, exact[kept])


class ProfileRefresher(PackedRefresher):
    """By a head profile. anchored: its anchored heads of each layer."""

    def __init__(self, rule: RefreshRule, contexts: Contexts, anchored: Sequence[HeadMap]) -> None:
        super().__init__(rule, contexts, anchored)
        heads = self.pool.head_num
        self._columns = [
            [index * heads + head for head in layer.heads] for index, layer in enumerate(self.heads)
        ]

    def _counts(self, shared: PackedSpan) -> Sequence[int]:
        """Anchored heads have one more where tokens are merged: what is like none of the kept."""
        counts = list(shared.counts)
        for column in (column for layer in self._columns for column in layer):
            counts[column] += self.rule.merges
        return counts

    def _copy(self, shared: PackedSpan, own: PackedSpan) -> None:
        packed, place = self.packed, own.cells
        begun = zip(own.indptr, shared.counts, strict=False)
        into = torch.cat([place[begin : begin + count] for begin, count in begun])
        packed.cells.move(shared.cells, into)
        if packed.log_votes is None:
            return
        packed.let_vote(own)
        packed.log_votes[into] = packed.log_votes[shared.cells]
        if self.rule.merges:
            # Until they are chosen they stand for nothing: no query sees them.
            more = place[~torch.isin(place, into)]
            packed.log_votes[more] = -torch.inf
            for side in (packed.cells.k, packed.cells.v):
                put(side[:, 0], more, side.new_zeros((more.numel(), side.shape[-1])))

    def _own(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """int64 `[heads, entries]`: the cells of a layer's anchored heads in a request's range."""
        (span,) = self.packed.in_row(slots)
        return torch.stack([span.of_column(column) for column in self._columns[index]])

    def _write(self, index: int, slots: torch.Tensor, chosen: Chosen) -> None:
        packed, own = self.packed, self._own(index, slots)
        cells = own.flatten()
        for side, source in ((packed.cells.k, chosen.k), (packed.cells.v, chosen.v)):
            put(side[:, 0], cells, source.flatten(0, 1).to(side.device))
        if chosen.log_votes is not None:
            assert packed.log_votes is not None, "a pool without votes"
            votes = chosen.log_votes.to(packed.log_votes.device)
            packed.log_votes[cells] = votes.transpose(1, 2).flatten(0, 1).float()
        self.counters["merge_fallbacks"] += chosen.fallbacks

    def own_keys(
        self, index: int, slots: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        packed = self.packed
        own = torch.cat([self._own(index, one) for one in slots], dim=1)
        keys = take(packed.cells.k[:, 0], 0, own.flatten()).view(*own.shape, -1)
        votes = None if packed.log_votes is None else packed.log_votes[own].transpose(1, 2)
        return keys, votes


__all__ = ["AdaptiveRefresher", "PackedRefresher", "ProfileRefresher"]
