"""Refresh where heads compete for entries: each head keeps as many as its budget for the context
says, a part of them by what tokens are worth to any turn, the rest by the turn's own queries
(kvtier.retention.refreshing.choose_again).

    tree      | packed span: slots 17 18 19 |     shared, never touched
    request   | packed span: slots 41 42 43 |     the same counts, entries of its own

Scheduler thread only, like the refresher.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import PrunedRange, RefreshRule, choose_again
from kvtier_kernels.fp8 import put
from kvtier_sglang.pool.packed import PackedSpans
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
    """See the module docstring. selection: what chose the entries of the tree."""

    spare_entries = 0

    def __init__(self, rule: RefreshRule, contexts: Contexts, selection: HeadsCompete) -> None:
        super().__init__(rule, contexts)
        assert not rule.merges, "packed entries are not merged"
        self.selection = selection
        sizes = [len(buffers.heads) for buffers in self.pool.ca]
        self._first_column = [0, *accumulate(sizes)]

    @property
    def packed(self) -> PackedSpans:
        """The pool's packed spans."""
        assert self.pool.packed is not None, "a pool that does not pack"
        return self.pool.packed

    def _slots(self, count: int) -> torch.Tensor | None:
        return self.allocator.alloc_bundles(count)

    def _point(self, refreshing: Refreshing, row: torch.Tensor) -> None:
        """Let a request's row read its own spans, which begin as copies of the tree's."""
        for pruned, slots in zip(refreshing.ranges, refreshing.slots, strict=True):
            part = slice(pruned.begin, pruned.begin + pruned.kept)
            (shared,) = self.packed.in_row(row[part].to(torch.int64))
            own = self.packed.span(slots, shared.counts)
            self.packed.cells.move(shared.cells, own.cells)
            self.packed.add(own)
            self.allocator.free_locality(slots)
            row[part] = slots.to(row.dtype)

    def _refresh(
        self, index: int, refreshing: Refreshing, source: RefreshSource, window: QueryWindow
    ) -> bool:
        assert isinstance(source, FetchedSource), "the tier chooses no packed entries"
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
        place, indptr = span.cells, span.indptr
        for head in range(heads):
            column = self._first_column[index] + head
            own = place[indptr[column] : indptr[column + 1]]
            mine = slice(head, head + 1)
            queries = QueryWindow(window.q[:, mine], window.scale)
            kept = choose_again(
                self.rule.keepkv, k[mine], v[mine], worth[head], span.counts[column], queries
            )
            for exact, target in ((k[head], cells.k), (v[head], cells.v)):
                put(target[:, 0], own, exact[kept])


__all__ = ["PackedRefresher"]
