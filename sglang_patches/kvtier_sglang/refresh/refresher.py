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
from kvtier.tier.transport.connection import Deadline
from kvtier_kernels import HeadMap
from kvtier_kernels.fp8 import put
from kvtier_sglang.pool.packed import PackedSpan, PackedSpans, slots_as_entries
from kvtier_sglang.refresh.sources import Choose, FetchedSource, RefreshSource
from kvtier_sglang.refresh.state import Contexts, Refreshing

# The longest that a pass waits for the tier to choose entries, for all of its requests and layers:
# so long all requests of the engine wait.
LONGEST_PASS_S = 2.0


@dataclass(frozen=True)
class Active:
    """A refresh in the pass under way. rows: of its request in the pass's queries."""

    rid: str
    refreshing: Refreshing
    rows: slice


class Refresher(ABC):
    """See the module docstring. heads: per layer, those whose entries are chosen again.

    patience_s: the longest that a pass waits for the tier; None: LONGEST_PASS_S.
    """

    def __init__(
        self,
        rule: RefreshRule,
        contexts: Contexts,
        heads: Sequence[HeadMap],
        patience_s: float | None = None,
    ) -> None:
        self.contexts = contexts
        self.allocator = allocator = contexts.allocator
        self.pool = allocator.pool
        self.rule = rule
        self.heads = heads
        self.counters: Counter[str] = Counter()
        self.refresh_s = 0.0
        self._active: list[Active] = []
        self._patience_s = LONGEST_PASS_S if patience_s is None else patience_s
        self._deadline = Deadline(self._patience_s)

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
        self._deadline = Deadline(self._patience_s)
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
            part = slice(q_indptr[index], q_indptr[index + 1])
            if not self._begin(refreshing, rows[request]):
                state.end_refresh()
                continue
            self.counters["refreshed_turns"] += 1
            self._active.append(Active(rid, refreshing, part))

    @property
    def refreshed_in_pass(self) -> list[str]:
        """The requests whose entries the pass under way chooses again."""
        return [one.rid for one in self._active]

    def _begin(self, refreshing: Refreshing, row: torch.Tensor) -> bool:
        """Give a request entries of its own; False where there is no room for them."""
        if not self._allocate(refreshing, row):
            self.counters["refresh_no_room"] += 1
            return False
        self._point(refreshing, row)
        return True

    def _allocate(self, refreshing: Refreshing, row: torch.Tensor) -> bool:
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
            if not self._refresh(index, active.refreshing, window):
                # The layer goes on with copies of the tree's entries.
                self.counters["unrefreshed_layers"] += 1
        self.refresh_s += time.monotonic() - began

    @abstractmethod
    def chooser(self, refreshing: Refreshing) -> Choose:
        """Return the function that chooses a request's entries of a layer again."""

    def _refresh(self, index: int, refreshing: Refreshing, window: QueryWindow) -> bool:
        """Choose a request's entries of one layer again; False where the source has failed."""
        chosen = self.chooser(refreshing)(refreshing.source, index, window, self._deadline)
        if chosen is None:
            return False
        self._write(index, refreshing, chosen)
        return True

    def _write(self, index: int, refreshing: Refreshing, chosen: Sequence[Chosen]) -> None:
        """Put what was chosen of each pruned range into the request's own entries."""
        packed = self.packed
        for slots, one in zip(refreshing.slots, chosen, strict=True):
            cells = torch.cat(self._own(index, slots))
            for side, source in ((packed.cells.k, one.k), (packed.cells.v, one.v)):
                put(side, cells, source.flatten(0, 1).to(side.device))
            if one.log_votes is not None:
                assert packed.log_votes is not None, "a pool without votes"
                votes = one.log_votes.to(packed.log_votes.device)
                packed.log_votes[cells] = votes.transpose(1, 2).flatten(0, 1).float()

    def _own(self, index: int, slots: torch.Tensor) -> list[torch.Tensor]:
        """The cells of a request's own entries of one range: of each head that chooses."""
        (span,) = self.packed.in_row(slots)
        heads = self.pool.head_num
        return [span.of_column(index * heads + head) for head in self.heads[index].heads]

    def end_pass(self) -> None:
        """The pass is over: what was refreshed needs its source no more."""
        for active in self._active:
            source = active.refreshing.source
            self.counters["refresh_moved_bytes"] += source.moved_bytes
            source.release()
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

    def chooser(self, refreshing: Refreshing) -> Choose:
        spans = [self.packed.in_row(slots)[0] for slots in refreshing.slots]
        heads = self.pool.head_num

        def choose(
            source: RefreshSource, index: int, window: QueryWindow, deadline: Deadline
        ) -> list[Chosen]:
            assert isinstance(source, FetchedSource), "the tier does not know what tokens are worth"
            exact = source.exact(index, self.heads[index].heads)
            mine = slice(index * heads, (index + 1) * heads)
            return [
                self._choose(index, pruned.begin, span.counts[mine], k, v, window)
                for pruned, span, (k, v) in zip(refreshing.ranges, spans, exact, strict=True)
            ]

        return choose

    def _choose(
        self,
        index: int,
        begin: int,
        counts: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
        window: QueryWindow,
    ) -> Chosen:
        """Choose so many entries of each of a layer's heads, of a range from position `begin` on,
        and return them as if all were of one head. k, v: `[heads, tokens, dim]`."""
        k, v = k.to(window.q.device), v.to(window.q.device)
        state = k.new_empty(*k.shape[:1], 0, k.shape[1], dtype=torch.float32)
        worth = self._score(index, k, v, state, begin)
        chosen = []
        for head, count in enumerate(counts):
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

    def chooser(self, refreshing: Refreshing) -> Choose:
        def choose(
            source: RefreshSource, index: int, window: QueryWindow, deadline: Deadline
        ) -> list[Chosen] | None:
            return source.choose(index, self.heads[index].heads, window, deadline)

        return choose

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
