"""Refresh: the entries of a compacted context are chosen again, with the turn's own questions.

A context's entries are chosen, when its turn ends, without knowing what will be asked next. When a
new turn begins, its exact KV comes back from the tier while the request waits. Inside the pass that
ends the new prompt every layer derives its entries anew, right before it attends, from the exact KV
and the queries that it has just computed:

    tree      | sink | packed span: slots 17 18 19 | recent |        shared, never touched
    request   | sink | packed span: slots 41 42 43 | recent | new    its own, freed at its end

The request's entries stand in spans of its own, of which each head has as many as of the tree's;
its row points there. So no other request sees them, a tier that does not answer in time leaves the
request with what the tree has, and the next turn starts from there again.

Where heads compete, a part of them is chosen by what tokens are worth to any turn, the rest by the
turn's own queries (kvtier.retention.refreshing.reselect). By a head profile, anchored heads
choose by their queries, and the others keep what they have.

Scheduler thread only (the forward pass runs in it).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvtier.retention.keepkv import QueryWindow
from kvtier.retention.refreshing import Chosen, PrunedRange, RefreshRule
from kvtier_kernels import HeadMap
from kvtier_kernels.fp8 import put
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans, slots_as_entries
from kvtier_sglang.refresh.state import Contexts, Refreshing


@dataclass(frozen=True)
class Active:
    """A refresh in the pass under way. rows: of its request in the pass's queries."""

    rid: str
    refreshing: Refreshing
    rows: slice


class Refresher(ABC):
    """See the module docstring. heads: per layer, those whose entries are chosen again."""

    def __init__(self, rule: RefreshRule, contexts: Contexts, heads: Sequence[HeadMap]) -> None:
        self.contexts = contexts
        self.allocator = allocator = contexts.allocator
        self.pool = allocator.pool
        self.rule = rule
        self.heads = heads
        self.counters: Counter[str] = Counter()
        self.refresh_s = 0.0
        self._active: list[Active] = []

    @property
    def packed(self) -> PackedSpans:
        """The pool's packed spans."""
        assert self.pool.packed is not None, "a pool that does not pack"
        return self.pool.packed

    # -- from the attention backend --

    def begin_pass(
        self,
        rids: list[str],
        requests: list[int],
        stops: list[int],
        q_indptr: tuple[int, ...],
        rows: torch.Tensor,
    ) -> None:
        """A prefill pass begins: requests whose prompt it ends get entries of their own, or will
        not be refreshed after all.

        rows: the table of request rows; requests: their indices; stops: tokens after the pass.
        """
        self._active = []
        for index, (rid, request, stop) in enumerate(zip(rids, requests, stops, strict=True)):
            state = self.contexts.requests.get(rid)
            if state is None or state.refreshing is None:
                continue
            refreshing = state.refreshing
            if refreshing.slots or stop < refreshing.prompt_tokens:
                continue
            if self.contexts.pruned_ranges(rid) != refreshing.ranges:
                # The context was evicted or is another variant since its KV was asked for.
                self.counters["refresh_outdated"] += 1
                state.end_refresh()
                continue
            if not self._allocate(refreshing, rows[request]):
                self.counters["refresh_no_room"] += 1
                state.end_refresh()
                continue
            self._point(refreshing, rows[request])
            self.counters["refreshed_turns"] += 1
            part = slice(q_indptr[index], q_indptr[index + 1])
            self._active.append(Active(rid, refreshing, part))

    @property
    def refreshed_in_pass(self) -> list[str]:
        """The requests whose entries the pass under way chooses again."""
        return [one.rid for one in self._active]

    def _allocate(self, refreshing: Refreshing, row: torch.Tensor) -> bool:
        """Give a request slots of its own; False where there is no room for them."""
        needs = []
        for pruned in refreshing.ranges:
            shared = self._shared(pruned, row)
            as_entries = shared.coded is not None
            needs.append(slots_as_entries(pruned.kept) if as_entries else shared.slots.numel())
        self.contexts.make_room(sum(needs))
        slots = self.allocator.alloc_bundles(sum(needs))
        if slots is None:
            return False
        self.contexts.hold_private(sum(needs))
        refreshing.slots = list(torch.split(slots, needs))
        return True

    def _shared(self, pruned: PrunedRange, row: torch.Tensor) -> PackedSpan:
        """The tree's span of a range, which the request's row reads."""
        (span,) = self.packed.in_row(row[pruned.begin : pruned.end].to(torch.int64))
        return span

    def _point(self, refreshing: Refreshing, row: torch.Tensor) -> None:
        """Let a request's row read its own spans, which begin as copies of the tree's."""
        for pruned, slots in zip(refreshing.ranges, refreshing.slots, strict=True):
            shared = self._shared(pruned, row)
            own = self.packed.span(slots, self._counts(shared))
            self.packed.add(own)
            self._copy(shared, own)
            row[pruned.begin : pruned.begin + slots.numel()] = slots.to(row.dtype)

    def _counts(self, shared: PackedSpan) -> Sequence[int]:
        """Entries of every column of a request's own span."""
        return shared.counts

    def _copy(self, shared: PackedSpan, own: PackedSpan) -> None:
        """Let a request's own span, which is not coded, hold what the tree's does."""
        if shared.coded is None:
            self.packed.cells.move(shared.cells, own.cells)
        else:
            k, v = self.packed.decoded(shared)
            put(self.packed.cells.k, own.cells, k)
            put(self.packed.cells.v, own.cells, v)
        if self.packed.log_votes is not None:
            self.packed.let_vote(own)

    def layer(self, index: int, q: torch.Tensor, scale: float) -> None:
        """Refresh the pool's `index`-th layer of the requests of this pass.

        q: `[tokens, KV heads, group, dim]`, all heads, rotated.
        """
        heads = self.heads[index]
        if not (heads.heads and self._active):
            return
        began = time.monotonic()
        newest = self.rule.keepkv.window_queries
        for active in self._active:
            window = QueryWindow(heads.select(q[active.rows][-newest:]), scale)
            self._refresh(index, active.refreshing, window)
        self.refresh_s += time.monotonic() - began

    def _refresh(self, index: int, refreshing: Refreshing, window: QueryWindow) -> None:
        """Choose a request's entries of one layer again."""
        heads = self.heads[index].heads
        for pruned, slots in zip(refreshing.ranges, refreshing.slots, strict=True):
            (own,) = self.packed.in_row(slots)
            k, v = (x.to(window.q.device) for x in refreshing.exact.of_range(index, heads, pruned))
            self._write(index, own, self._choose(index, pruned, own, k, v, window))

    @abstractmethod
    def _choose(
        self,
        index: int,
        pruned: PrunedRange,
        own: PackedSpan,
        k: torch.Tensor,
        v: torch.Tensor,
        window: QueryWindow,
    ) -> Chosen:
        """Choose one layer's entries of a pruned range again, as many as `own` holds of its heads.

        k, v: the range's exact KV, `[heads, tokens, dim]`; window: these heads' newest queries.
        """

    def _write(self, index: int, own: PackedSpan, chosen: Chosen) -> None:
        """Put what was chosen of a pruned range into the request's own entries."""
        packed, heads = self.packed, self.pool.head_num
        columns = [own.of_column(index * heads + head) for head in self.heads[index].heads]
        cells = torch.cat(columns)
        for side, source in ((packed.cells.k, chosen.k), (packed.cells.v, chosen.v)):
            put(side, cells, source.flatten(0, 1).to(side.device))
        if chosen.log_votes is not None:
            assert packed.log_votes is not None, "a pool without votes"
            votes = chosen.log_votes.to(packed.log_votes.device)
            packed.log_votes[cells] = votes.transpose(1, 2).flatten(0, 1).float()

    def end_pass(self) -> None:
        """The pass is over: what was refreshed needs its exact KV no more."""
        for active in self._active:
            host = active.refreshing.exact.host
            self.counters["refresh_moved_bytes"] += host.host_bytes
            host.release()
        self._active = []


Score: TypeAlias = Callable[
    [int, torch.Tensor, torch.Tensor | None, torch.Tensor, int], torch.Tensor
]
"""The worth of a layer's tokens: see PackedSelection.score."""


class AdaptiveRefresher(Refresher):
    """A refresher where heads compete. score: by which the entries of the tree were chosen."""

    def __init__(self, rule: RefreshRule, contexts: Contexts, score: Score) -> None:
        pool = contexts.allocator.pool
        every = tuple(range(pool.head_num))
        heads = HeadMap(every, torch.tensor(every, device=pool.device))
        super().__init__(rule, contexts, [heads] * pool.layer_num)
        self._score = score

    def _choose(
        self,
        index: int,
        pruned: PrunedRange,
        own: PackedSpan,
        k: torch.Tensor,
        v: torch.Tensor,
        window: QueryWindow,
    ) -> Chosen:
        """The entries of all heads as if they were of one: each has as many as it had."""
        state = k.new_empty(*k.shape[:1], 0, k.shape[1], dtype=torch.float32)
        worth = self._score(index, k, v, state, pruned.begin)
        first = index * self.pool.head_num
        chosen = []
        for head, count in enumerate(own.counts[first : first + self.pool.head_num]):
            mine = slice(head, head + 1)
            queries = QueryWindow(window.q[:, mine], window.scale)
            chosen.append(self.rule.choose_by_worth(k[mine], v[mine], worth[head], count, queries))
        votes = [one.log_votes for one in chosen if one.log_votes is not None]
        return Chosen(
            torch.cat([one.k for one in chosen], dim=1),
            torch.cat([one.v for one in chosen], dim=1),
            torch.cat(votes, dim=2) if votes else None,
        )


class ProfileRefresher(Refresher):
    """A refresher by a head profile. heads: its anchored heads of each layer."""

    def _choose(
        self,
        index: int,
        pruned: PrunedRange,
        own: PackedSpan,
        k: torch.Tensor,
        v: torch.Tensor,
        window: QueryWindow,
    ) -> Chosen:
        """The entries of each head, as many as the range keeps."""
        return self.rule.choose(k, v, pruned.kept, window)

    def _counts(self, shared: PackedSpan) -> Sequence[int]:
        """Anchored heads have one more where tokens are merged: what is like none of the kept."""
        counts, heads = list(shared.counts), self.pool.head_num
        for index, layer in enumerate(self.heads):
            for head in layer.heads:
                counts[index * heads + head] += self.rule.merges
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
                put(side, more, side.new_zeros((more.numel(), side.shape[-1])))
